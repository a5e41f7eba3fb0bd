"""gpu_check.py's part `kernels`: single kernels on the shapes of real models, beside what the GPU can do.

Kernels that read and write are set beside the bandwidth of a copy, products beside torch's own library calls. A row
says which share they reach and what is aimed at; a smaller share is no error.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_triton.ops.contract import Dims
from vllm_triton.ops.registry import OPS, Op
from vllm_triton.ops.testing import make_inputs, timing

Row = dict[str, Any]

# Per cent of the bandwidth of a copy, of the time of a library call, and of the former for decoding at 8192 tokens.
MEMORY_AIM, PRODUCT_AIM, DECODE_AIM = 85, 85, 90
SECONDS = 0.3
# Bound by memory: each is measured on its largest shape.
MEMORY_BOUND = (
    *("fused_add_rms_norm", "fused_qk_norm_rope", "gelu_and_mul", "layer_norm", "rms_norm", "rotary_embedding"),
    *("scaled_quant", "silu_and_mul", "softcap_logits"),
)


def _library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _library_scaled_mm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """fp8, one scale a row on both sides."""
    return torch._scaled_mm(a, weight.t(), a_scale, weight_scale.t(), bias=bias, out_dtype=out_dtype)


@dataclass(frozen=True)
class Product:
    """library: the call with the op's arguments. dims: from T, N and K to the op's sizes."""

    op: str
    library: Callable[..., torch.Tensor]
    dims: Callable[[int, int, int], Dims]


PRODUCTS = (
    Product("linear", _library_linear, lambda T, N, K: {"T": T, "N": N, "K": K}),
    Product(
        "scaled_mm",
        _library_scaled_mm,
        lambda T, N, K: {"T": T, "N": N, "K": K, "A": T, "C": N, "Q": 1, "quantized": 1},
    ),
)
# T, N and K of Llama-3-8B's qkv and gate_up, for 1 and 64 requests and for a prompt; and of nothing.
LLAMA_SIZES = tuple((tokens, *size) for size in ((6144, 4096), (28672, 4096)) for tokens in (1, 64, 2048))
SMALL_SIZES = ((3, 64, 32),)


def decode_dims(num_sequences: int, context: int) -> Dims:
    """Of paged_attention, with Llama-3-8B's heads and pages of 16 tokens."""
    blocks = context // 16
    heads = {"H": 32, "G": 8, "D": 128, "S": 16, "Q": 1}
    return heads | {"T": num_sequences, "B": num_sequences, "M": blocks, "P": num_sequences * blocks + 1}


def compare_kernels(device: str, bandwidth: float, is_small: bool) -> Iterator[Row]:
    """Args: bandwidth: bytes per second of a copy. is_small: small shapes, whose figures say nothing."""
    with torch.inference_mode():
        for name in MEMORY_BOUND:
            op = OPS[name]
            labelled = sorted(op.contract.bench_dims.items(), key=lambda item: _num_elements(op, item[1]))
            label, dims = labelled[0 if is_small else -1]
            yield _beside_copy(op, label, dims, device, bandwidth, MEMORY_AIM)
        label, dims = ("2 x 32", decode_dims(2, 32)) if is_small else ("8 x 8192", decode_dims(8, 8192))
        yield _beside_copy(OPS["paged_attention"], f"decode {label}", dims, device, bandwidth, DECODE_AIM)
        for product in PRODUCTS:
            for sizes in SMALL_SIZES if is_small else LLAMA_SIZES:
                yield _beside_library(product, sizes, device)


def _arguments(op: Op, dims: Dims, device: str) -> tuple[Any, ...]:
    return tuple(make_inputs(op.contract, dims, torch.bfloat16, device=device).values())


def _num_elements(op: Op, dims: Dims) -> int:
    """Of the arguments that there always are."""
    needed = (tensor for tensor in op.contract.tensors.values() if not tensor.optional)
    return sum(math.prod(tensor.shape_in(dims)) for tensor in needed)


def _beside_copy(op: Op, label: str, dims: Dims, device: str, bandwidth: float, aim: int) -> Row:
    arguments = _arguments(op, dims, device)
    function = op.implementation_now().function
    seconds = timing.measure(lambda: function(*arguments), device, SECONDS).median
    rate = op.contract.bytes_moved(arguments) / seconds
    figures = {"us": round(seconds * 1e6, 1), "gb_s": round(rate / 1e9, 1)}
    return {"what": f"{op.name} {label}"} | figures | {"percent_of_copy": round(100 * rate / bandwidth, 1), "aim": aim}


def _beside_library(product: Product, sizes: tuple[int, int, int], device: str) -> Row:
    op, dims, label = OPS[product.op], product.dims(*sizes), " x ".join(map(str, sizes))
    arguments = _arguments(op, dims, device)
    function = op.implementation_now().function
    seconds = timing.measure(lambda: function(*arguments), device, SECONDS).median
    row: Row = {"what": f"{op.name} {label}", "us": round(seconds * 1e6, 1)}
    row["tflop_s"] = round(op.contract.flops(dims) / seconds / 1e12, 2)
    try:
        library = timing.measure(lambda: product.library(*arguments), device, SECONDS).median
    except (RuntimeError, NotImplementedError, ValueError) as error:  # not every device has every such call
        return row | {"library": f"cannot: {str(error).splitlines()[0][:80]}"}
    return row | {
        "library_us": round(library * 1e6, 1),
        "percent": round(100 * library / seconds, 1),
        "aim": PRODUCT_AIM,
    }

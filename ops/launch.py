"""What Triton kernels of several ops share: block sizes, and the cases that compile for GPUs that are not here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_triton.ops.platforms import why_not_triton
from vllm_triton.ops.registry import Situation


@dataclass(frozen=True)
class CompileCase:
    """One real configuration of a kernel, for compiling without a GPU.

    Args:
        kernel: the @triton.jit function.
        signature: argument -> Triton type ("*bf16", "i32", "fp32"), constexprs left out.
        constexprs: argument -> value.
        num_warps, num_stages: as at launch.
    """

    kernel: Callable[..., Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


def supports_triton(situation: Situation) -> str | None:
    """The reason why no Triton kernel runs in this situation, or None."""
    return why_not_triton(situation.device)


# Triton's own forms of these two, which kernels call as well, take microseconds on the host.
def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(size: int, by: int) -> int:
    """How many pieces of `by` hold `size`."""
    return -(-size // by)


def block_size(size: int, most: int) -> int:
    """The smallest power of two that holds `size`, at most `most`."""
    return min(next_power_of_2(size), most)


def rows_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row of these tensors starts a multiple of 16 elements after the first, so that it loads as vectors.

    A kernel that does not specialise on its strides is told so by a constexpr, and passes it on by `tl.multiple_of`.
    The stride of an axis of size 1 says nothing and is ignored: it must not compile a variant of its own while serving.
    """
    for tensor in tensors:
        for axis in range(tensor.dim() - 1):
            if tensor.stride(axis) % 16 and tensor.size(axis) != 1:
                return False
    return True

"""From a loaded model to the program that runs its forward, and the kernels that any step may launch."""

import logging
import platform as host
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import triton

from vllm_triton import models, ops
from vllm_triton.compile import pieces
from vllm_triton.compile.cache import CompileCache, hash_of, hash_of_files
from vllm_triton.compile.graphs.modes import BatchDescriptor, Dispatch, RuntimeMode
from vllm_triton.compile.kernel_count import kernels_compiled
from vllm_triton.compile.pieces.build import Recipe, build_program
from vllm_triton.compile.pieces.compilers import COMPILERS
from vllm_triton.compile.pieces.program import Program
from vllm_triton.compile.pieces.ranges import compile_ranges
from vllm_triton.compile.pieces.trace import InputSpec
from vllm_triton.compile.triton_cpu.toolchain import cpu_features
from vllm_triton.config import EngineConfig
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.interface import CausalLM, KVCache
from vllm_triton.ops.launch import compiling_ahead, next_power_of_2
from vllm_triton.ops.platforms import Platform, triton_interprets, why_not_triton
from vllm_triton.ops.registry import OPS, Capture
from vllm_triton.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

INPUTS: Mapping[str, InputSpec] = {
    "token_ids": InputSpec(("T",), torch.int64),
    "positions": InputSpec(("T",), torch.int64),
    "slot_mapping": InputSpec(("T",), torch.int64),
    "block_table": InputSpec(("B", "M"), torch.int32),
    "seq_lens": InputSpec(("B",), torch.int32),
    "query_start_loc": InputSpec(("B + 1",), torch.int32),
}


def compile_forward(
    model: CausalLM,
    kv_caches: list[KVCache],
    config: EngineConfig,
    platform: Platform,
    selection: Mapping[str, str],
) -> Program:
    """Args: selection: op -> implementation.

    Raises: TraceError where the model's forward is not the same for all numbers of tokens.
    """
    compiler = COMPILERS[config.compile_backend or platform.compile_backend]()
    ranges = compile_ranges(config.compile_ranges, config.max_num_batched_tokens, config.compile_sizes)
    constants = constants_of(model, kv_caches)
    recipe = Recipe(forward_of(model), INPUTS, constants, torch.device(platform.device), compiler, ranges)
    factors = cache_factors(recipe, model, platform, selection)
    description = {"model": config.model, "device": platform.name, "pieces": compiler.name}
    return build_program(recipe, CompileCache(), hash_of(factors), description)


def cache_factors(recipe: Recipe, model: CausalLM, platform: Platform, selection: Mapping[str, str]) -> dict[str, Any]:
    """What shapes a compiled forward: another value of any of these is another entry of the cache."""
    implementations = [OPS[op].implementations[name].function for op, name in selection.items()]
    outside = {file for file in map(_file_of, implementations) if file is not None}
    return {
        "model": repr(model.config),
        "modules": repr(model),
        "model_code": hash_of_files(Path(models.__file__).parent, Path(__file__)),
        "inputs": repr(recipe.inputs),
        "compiler_code": hash_of_files(Path(pieces.__file__).parent),
        "kernels": dict(selection),
        "kernel_code": [hash_of_files(Path(ops.__file__).parent), *(hash_of_files(file) for file in sorted(outside))],
        # How many blocks a KV cache has is nothing that pieces know.
        "constants": {
            name: [list(tensor.shape[name.endswith("_cache") :]), str(tensor.dtype)]
            for name, tensor in recipe.constants.items()
        },
        "device": [platform.name, _device_kind(recipe.device)],
        "versions": [torch.__version__, triton.__version__, sys.version],
        "compile_backend": [recipe.compiler.name, recipe.compiler.key()],
        "ranges": [str(sizes) for sizes in recipe.ranges],
    }


def _file_of(function: Callable[..., Any]) -> Path | None:
    """Of an implementation from outside."""
    file = sys.modules[function.__module__].__file__ if function.__module__ in sys.modules else None
    return Path(file) if file and Path(ops.__file__).parent not in Path(file).parents else None


def _device_kind(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{host.machine()} {' '.join(sorted(cpu_features()))}"
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


def constants_of(model: CausalLM, kv_caches: list[KVCache]) -> dict[str, torch.Tensor]:
    """What a forward reads, and writes, beside its inputs, by name."""
    constants = dict(model.named_parameters()) | dict(model.named_buffers())
    for layer, (keys, values) in enumerate(kv_caches):
        constants |= {f"layers.{layer}.key_cache": keys, f"layers.{layer}.value_cache": values}
    return constants


def forward_of(model: CausalLM) -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor]:
    """The model as a function of INPUTS and of the constants above: hidden states."""
    module = cast(torch.nn.Module, model)
    weights = [*dict(model.named_parameters()), *dict(model.named_buffers())]

    def forward(inputs: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]) -> torch.Tensor:
        metadata = {name: tensor for name, tensor in inputs.items() if name not in ("token_ids", "positions")}
        caches = [
            (constants[f"layers.{layer}.key_cache"], constants[f"layers.{layer}.value_cache"])
            for layer in range(model.config.num_layers)
        ]
        arguments = (inputs["token_ids"], inputs["positions"], AttentionMetadata(**metadata), caches)
        return torch.func.functional_call(module, {name: constants[name] for name in weights}, arguments)

    return forward


def compile_kernels(runner: ModelRunner, program: Program, platform: Platform, config: EngineConfig) -> None:
    """Makes every kernel ready that a step may launch, so that none is compiled while somebody waits for an answer; but
    for implementations that launch from torch calls of their own.

    Kernels differ by powers of two of the number of tokens at most, and by whether steps mostly decode.
    """
    if triton_interprets() or why_not_triton(platform.device) is not None:
        return
    start, before = time.perf_counter(), kernels_compiled()
    runnable = {op: _launches_alone(op) for op in OPS}
    dry = program.with_ops(runnable)
    most = config.max_num_batched_tokens
    sizes = [1 << power for power in range(next_power_of_2(most).bit_length()) if 1 << power < most] + [most]
    with torch.inference_mode(), compiling_ahead(torch.get_num_threads()):
        for num_tokens in reversed(sizes):  # the largest kernels take longest
            for num_rows in {1, min(num_tokens, config.max_num_seqs)}:
                inputs = runner.model_inputs(num_tokens, num_rows, runner.batch.max_blocks)
                step = Dispatch(RuntimeMode.NONE, BatchDescriptor(num_tokens, num_rows))
                hidden = dry(step, num_tokens, *inputs.tensors())
                _run_sampling(runner, hidden[:num_rows], runnable)
    logger.info(
        "compile: %d kernels for steps of 1 to %d tokens ready in %.2f s",
        kernels_compiled() - before,
        most,
        time.perf_counter() - start,
    )


def _launches_alone(op: str) -> Callable[..., Any]:
    """The op's implementation where it is launches of kernels; else what only makes its results' tensors."""
    implementation = OPS[op].implementation_now()
    runs_torch = implementation.captured_in("cpu") is Capture.NEVER
    return OPS[op].contract.fake if runs_torch else implementation.function


def _run_sampling(runner: ModelRunner, hidden: torch.Tensor, ops_: Mapping[str, Callable[..., Any]]) -> None:
    """All that may happen to the logits of so many rows."""
    size = len(hidden)
    logits = runner.model.compute_logits(hidden)
    draw = vars(runner.sampling_buffers.upload(size))
    ops_["sample_tokens"](logits, *draw.values())
    wide = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    ops_["sample_tokens"](wide, *draw.values())
    integers = torch.zeros(size, 1, dtype=torch.int32, device=logits.device)
    floats = wide[:, 0].contiguous()
    ops_["apply_penalties"](wide, integers, integers[:, 0], integers[:, 0], floats, floats, floats)
    ops_["apply_logit_bias"](wide, integers[:, 0].long(), integers[:, 0].long(), floats)
    words = torch.zeros(size, -(-wide.shape[1] // 32), dtype=torch.int32, device=logits.device)
    ops_["apply_token_bitmask"](wide, words, integers[:, 0].long())
    ops_["token_logprobs"](wide, integers[:, 0].long())

"""What Triton kernels of several ops share: launching, block sizes, cases that compile for GPUs that are not here."""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from vllm_triton.ops.platforms import lacks_fp8, triton_interprets, why_not_triton
from vllm_triton.ops.registry import Situation


@dataclass(frozen=True)
class CompileCase:
    """One real configuration of a kernel, for compiling without a GPU.

    Args:
        kernel: the @triton.jit function.
        signature: argument -> Triton type ("*bf16", "i32", "fp32"), constexprs left out.
        constexprs: argument -> value.
        num_warps, num_stages: as at launch.
        without: targets (compile.aot.TARGETS) whose machines lack what the kernel needs, with the reason.
    """

    kernel: Callable[..., Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    without: Mapping[str, str] = field(default_factory=dict)


# For CompileCase.without.
WITHOUT_FP8 = {"cuda:80": "fp8 e4m3 begins with compute capability 8.9"}


def supports_triton(situation: Situation) -> str | None:
    """The reason why no Triton kernel runs in this situation, or None."""
    return why_not_triton(situation.device)


def why_not_dtype(dtype: torch.dtype | None, device: str) -> str | None:
    """Why Triton's kernels cannot compute with this dtype on this kind of device, or None."""
    if dtype == torch.float8_e4m3fn and lacks_fp8(device):
        return "the GPU has no fp8 e4m3, which begins with compute capability 8.9"
    return None


def supports_weights(situation: Situation) -> str | None:
    """The reason why no Triton kernel runs on weights of this dtype here, or None."""
    return why_not_dtype(situation.weight_dtype, situation.device) or supports_triton(situation)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Runs a kernel, as `kernel[grid](*tensors, *numbers, *constants, ...)` does, in less time on CPUs.

    Triton takes 5 us and more to find the code for its arguments, as long as a small op takes a CPU. There it depends
    on little: it is found again by the dtypes of the tensors, the constants, and the numbers that are specialised.

    Args:
        kernel: the @triton.jit function, whose parameters come in this order.
        grid: one to three sizes.
        numbers: what is neither a tensor nor a constexpr.
        constants: for constexprs, each always of one type.
    Raises: TypeError where an argument is missing, also one that has a default.
    """
    if _launches.are_dry:
        arguments = (*tensors, *numbers, *constants)
        kernel.run(*arguments, grid=grid, warmup=True, num_warps=num_warps, num_stages=num_stages)
        return
    if not _natively() or max(numbers, default=0) >= 2**31 or _is_hooked():
        kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, num_stages=num_stages)
        return
    known = _known.get(id(kernel)) or _Known.of(kernel, len(tensors), len(numbers))
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    key = (constants, *dtypes, *[numbers[index] for index in known.specialised])
    compiled = known.compiled.get(key)
    if compiled is None:
        given = len(tensors) + len(numbers) + len(constants)
        if given != len(kernel.params):  # later launches leave no defaults to Triton
            raise TypeError(f"{kernel.__name__}: takes {len(kernel.params)} arguments, got {given}")
        known.compiled[key] = kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, num_stages=num_stages)
        return
    x, y, z = (*grid, 1, 1)[:3]
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, 0, function, metadata, None, None, None, *tensors, *numbers, *constants)


class _Launches(threading.local):
    are_dry = False


_launches = _Launches()


@contextlib.contextmanager
def compiling_ahead(num_workers: int) -> Iterator[None]:
    """Inside the block this thread's launches run nothing: they name kernels, which at its end are compiled, so many at
    a time.

    Raises: at the end, what the first compilation raised that failed.
    """
    # Python 3.11 raises a SystemError where a collection lets another thread parse in the middle of a parse.
    with without_garbage_collection(), ThreadPoolExecutor(num_workers) as pool, triton.AsyncCompileMode(pool):
        _launches.are_dry = True
        try:
            yield
        finally:
            _launches.are_dry = False


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside the block Python collects no garbage; afterwards it does again, if it did before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _Known:
    """What `launch` knows of a kernel.

    specialised: places in `numbers` whose values Triton may build into the code.
    compiled: by what the code depends on.
    """

    kernel: Any
    specialised: tuple[int, ...]
    compiled: dict[tuple[Any, ...], Any]

    @classmethod
    def of(cls, kernel: Any, num_tensors: int, num_numbers: int) -> "_Known":
        parameters = kernel.params[num_tensors : num_tensors + num_numbers]
        fixed = [parameter.do_not_specialize or parameter.annotation_type == "fp32" for parameter in parameters]
        known = cls(kernel, tuple(index for index, is_fixed in enumerate(fixed) if not is_fixed), {})
        return _known.setdefault(id(kernel), known)


_known: dict[int, _Known] = {}


@functools.cache
def _natively() -> bool:
    """Whether Triton's kernels run natively on CPU tensors in this process."""
    return not triton_interprets() and why_not_triton("cpu") is None


def _is_hooked() -> bool:
    """Whether somebody, such as a profiler, asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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


# More than the last-level cache of most machines.
_LARGEST_CACHED = 32 << 20


def store_modifier(*results: torch.Tensor) -> str:
    """How a kernel stores these results: "", or ".cs" on a CPU where they are too large to be found in a cache later.

    There a plain store reads each line before it is overwritten.
    """
    total = 0
    for result in results:
        total += result.nbytes
    return ".cs" if total > _LARGEST_CACHED and results[0].is_cpu else ""


def rows_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row of these tensors starts a multiple of 16 elements after the first, so that it loads as vectors.

    A kernel that does not specialise on its strides is told so by a constexpr, and passes it on by `tl.multiple_of`.
    The stride of an axis of size 1 says nothing and is ignored: it must not compile a variant of its own while serving.
    """
    for tensor in tensors:
        for axis, stride in enumerate(tensor.stride()[:-1]):
            if stride % 16 and tensor.shape[axis] != 1:
                return False
    return True


# Elements of a program: 8 for each of 128 threads, so that a bfloat16 row loads 16 bytes a thread.
LARGEST_ROW_BLOCK = 1024
# A CPU reads rows in order: a program for most of one.
LARGEST_CPU_ROW_BLOCK = 4096


@dataclass(frozen=True)
class RowConfig:
    """How a kernel that treats the elements of a row alike cuts it: into blocks of so many, one a program."""

    block: int
    num_warps: int = 4


@functools.cache
def select_row_config(num_columns: int, device: str) -> RowConfig:
    """Args: num_columns: elements of a row. device: the kind of it."""
    return RowConfig(block_size(num_columns, LARGEST_CPU_ROW_BLOCK if device == "cpu" else LARGEST_ROW_BLOCK))

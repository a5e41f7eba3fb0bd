"""What Triton kernels of several ops share: block sizes, and the cases that compile for GPUs that are not here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton

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


def block_size(size: int, most: int) -> int:
    """The smallest power of two that holds `size`, at most `most`."""
    return min(triton.next_power_of_2(size), most)

"""The property suite that every implementation of every op runs under, ours and anybody's."""

from vllm_triton.ops.testing.inputs import Pick, make_inputs
from vllm_triton.ops.testing.tolerance import assert_within_rounding

__all__ = ["Pick", "assert_within_rounding", "make_inputs"]

"""Every Triton kernel of `ops` runs natively under the property suite."""

import pytest
import torch
import triton

from vllm_triton import ops
from vllm_triton.compile.triton_cpu import settings
from vllm_triton.ops.registry import OPS
from vllm_triton.ops.scaled_quant import PER_TENSOR, PER_TOKEN
from vllm_triton.ops.testing import Pick, suite
from vllm_triton.ops.testing.inputs import same_bits

KERNELS = [pytest.param(op, id=op.name) for op in OPS.values() if "triton" in op.implementations]
# Compiling costs more than running: few shapes, each with several draws of values, strides and margins. With each dtype
# more than ten times the 8 examples that the interpreter gets; fewer shapes where bounds are checked as well.
NUM_SHAPES = 2 if settings.checked() else 4
NUM_DRAWS = 4 if settings.checked() else 7


@pytest.mark.parametrize("op", KERNELS)
def test_matches_reference(op):
    for shape in range(NUM_SHAPES):
        dims = op.contract.test_dims(Pick.seeded(shape))
        for dtype in suite.dtypes_to_test(op, "triton"):
            for draw in range(NUM_DRAWS):
                suite.check_matches_reference(
                    op, "triton", dims, dtype, NUM_DRAWS * shape + draw, margins=draw % 2 == 1
                )


@pytest.mark.parametrize("op", [pair for pair in KERNELS if pair.values[0].contract.rows is not None])
def test_invariances(op):
    dims = op.contract.test_dims(Pick.seeded(0))
    for seed, dtype in enumerate(suite.dtypes_to_test(op, "triton")):
        suite.check_invariances(op, "triton", dims, dtype, seed)


def test_norms_of_every_batch_and_view_share_one_kernel(monkeypatch):
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    weight = torch.ones(100)
    for num_tokens in (2, 3, 16, 17):
        for stride_t, stride_h in ((1008, 100), (1000, 112), (1001, 101)):  # multiples of 16 at most in one place
            x = torch.empty_strided((num_tokens, 3, 100), (stride_t, stride_h, 1)).fill_(2.0)
            ops.rms_norm(x, weight, 1e-5)
        ops.rms_norm(x[:, 0], weight, 1e-5)
    assert len(compiled) == 1


@pytest.mark.parametrize("group_size", [PER_TENSOR, PER_TOKEN, 32, 128])
def test_fp8_is_rounded_as_by_torch(group_size):
    """Bit for bit, down to subnormal numbers."""
    x = torch.randn(40, 300) * 10.0 ** torch.randint(-4, 4, (40, 1))
    actual = ops.scaled_quant(x, torch.float8_e4m3fn, group_size)
    for one, other in zip(actual, ops.scaled_quant.reference(x, torch.float8_e4m3fn, group_size), strict=True):
        assert same_bits(one, other)


_FP8, _INT8 = {"quantized": 1}, {"quantized": 2}


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [
        *((1, _FP8 | {"blocks": 1}), (40, _FP8), (40, _FP8 | {"static": 3}), (40, _FP8 | {"blocks": 1})),
        *((1, _INT8), (40, _INT8), (40, _INT8 | {"blocks": 1})),
    ],
)
def test_quantised_experts(num_tokens, kind):
    dims = {"T": num_tokens, "E": 300, "I": 150, "X": 3, "Y": 4, "K": 2, "biases": 3, "settled": 1, **kind}
    for seed, dtype in enumerate(suite.dtypes_to_test(ops.fused_moe, "triton")):
        suite.check_matches_reference(ops.fused_moe, "triton", dims, dtype, seed, margins=True)

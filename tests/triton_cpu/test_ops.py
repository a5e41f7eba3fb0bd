"""Every Triton kernel of `ops` runs natively under the property suite."""

import pytest

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.ops.registry import OPS
from vllm_triton.ops.testing import Pick, suite

KERNELS = [pytest.param(op, id=op.name) for op in OPS.values() if "triton" in op.implementations]
NUM_SEEDS = 10


@pytest.mark.parametrize("op", KERNELS)
def test_matches_reference(op):
    for seed in range(NUM_SEEDS):
        dims = op.contract.test_dims(Pick.seeded(seed))
        for dtype in suite.dtypes_to_test(op, "triton"):
            suite.check_matches_reference(op, "triton", dims, dtype, seed, margins=seed % 2 == 1)


@pytest.mark.parametrize("op", [pair for pair in KERNELS if pair.values[0].contract.rows is not None])
def test_invariances(op):
    dims = op.contract.test_dims(Pick.seeded(0))
    for seed, dtype in enumerate(suite.dtypes_to_test(op, "triton")):
        suite.check_invariances(op, "triton", dims, dtype, seed)

"""The property suite over every op and every implementation in the registry."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.ops.registry import OPS, Op
from vllm_triton.ops.testing import Pick, suite

PAIRS = [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS.values() for name in op.implementations]
ROW_PAIRS = [pair for pair in PAIRS if pair.values[0].contract.rows is not None]
# A program costs milliseconds in Triton's interpreter.
EXAMPLES = {"triton": 8}


def _examples(implementation: str) -> int:
    return EXAMPLES.get(implementation, 25)


def _dims(data: st.DataObject, op: Op) -> dict[str, int]:
    return op.contract.test_dims(Pick(lambda low, high: data.draw(st.integers(low, high))))


@pytest.mark.parametrize("op, implementation", PAIRS)
def test_matches_reference(op, implementation):
    @settings(max_examples=_examples(implementation))
    @given(st.data())
    def holds(data):
        dtype = data.draw(st.sampled_from(suite.dtypes_to_test(op, implementation)))
        seed, margins = data.draw(st.integers(0, 2**31)), data.draw(st.booleans())
        suite.check_matches_reference(op, implementation, _dims(data, op), dtype, seed, margins)

    holds()


@pytest.mark.parametrize("op, implementation", ROW_PAIRS)
def test_invariances(op, implementation):
    @settings(max_examples=max(_examples(implementation) // 3, 3))
    @given(st.data())
    def holds(data):
        dtype = data.draw(st.sampled_from(suite.dtypes_to_test(op, implementation)))
        suite.check_invariances(op, implementation, _dims(data, op), dtype, data.draw(st.integers(0, 2**31)))

    holds()


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS.values()])
def test_rejects_bad_input(op):
    suite.check_rejects_bad_input(op)


@pytest.mark.parametrize("op, implementation", PAIRS)
def test_opcheck(op, implementation):
    for dtype in suite.dtypes_to_test(op, implementation)[:1]:
        suite.check_opcheck(op, implementation, dtype)


@pytest.mark.parametrize("op, implementation", PAIRS)
def test_compiles_fullgraph(op, implementation):
    for dtype in suite.dtypes_to_test(op, implementation)[-1:]:
        suite.check_compiles_fullgraph(op, implementation, dtype)

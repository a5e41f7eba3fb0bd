"""Shapes, dtypes and mutations are written once: what is read from a contract, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.ops.contract import FLOATS, INTS, Contract, Scalar, Size, Tensor
from vllm_triton.ops.errors import DTypeError, OpError, ShapeError
from vllm_triton.ops.registry import OPS
from vllm_triton.ops.testing import Pick, make_inputs
from vllm_triton.ops.testing.inputs import margins_untouched

ROOT = Path(__file__).parents[2]
SCALE = Scalar(float, "be greater than 0", lambda scale: scale > 0, example=1.0)
CONTRACT = Contract(
    "toy",
    {
        "x": Tensor("T 2*I", FLOATS),
        "starts": Tensor("B+1", INTS),
        "cache": Tensor("P 4 I", "x", mutated=True),
        "bias": Tensor("I", "x", optional=True),
        "scale": SCALE,
    },
    {"out": Tensor("T I", "x"), "counts": Tensor("B", (torch.int64,))},
    constraint=lambda dims: None if dims["B"] < 5 else f"starts must hold at most 5 entries, got {dims['B'] + 1}",
)


ROUTED = Contract(
    "routed",
    {
        "x": Tensor("T X", FLOATS),
        "places": Tensor("X", INTS, optional=True),
        "num_choices": Scalar(int, "be at least 1", lambda value: value >= 1, example=2, size="K"),
        "num_experts": Scalar(int, "be at least 1", lambda value: value >= 1, example=4, size="X"),
    },
    {"ids": Tensor("T K", (torch.int32,)), "blocks": Tensor("Z", (torch.int64,))},
    derived=lambda dims: {"Z": min(dims["T"] * dims["K"], dims["X"])},
)


def _good() -> dict:
    return {
        "x": torch.randn(3, 12),
        "starts": torch.zeros(2, dtype=torch.int32),
        "cache": torch.zeros(7, 4, 6),
        "bias": None,
        "scale": 2.0,
    }


@pytest.mark.parametrize(
    "text, size",
    [
        ("T", Size("T", "T")),
        ("12", Size("12", None, 0, 12)),
        ("2*I", Size("2*I", "I", factor=2)),
        ("B+1", Size("B+1", "B", offset=1)),
        ("H?", Size("H?", "H", may_miss=True)),
    ],
)
def test_sizes_are_parsed(text, size):
    assert Size.parse(text) == size


@pytest.mark.parametrize("text", ["2I", "T-1", "", "T.E", "2?", "?"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="a size must be a name, a number"):
        Size.parse(text)


@given(st.sampled_from(["T", "7", "3*T", "T+2", "T?"]), st.integers(0, 50))
def test_binding_a_size_returns_to_its_value(text, number):
    size = Size.parse(text)
    extent = size.value({"T": number})
    dims: dict[str, int] = {}
    assert size.bind(extent, dims)
    assert dims == ({} if size.name is None else {"T": number})
    assert size.bind(extent, dims) and not size.bind(extent + 1, dims)


def test_a_size_that_no_number_gives_does_not_bind():
    assert not Size.parse("2*I").bind(5, {})
    assert not Size.parse("B+1").bind(0, {})


def test_schema():
    assert CONTRACT.schema == (
        "(Tensor x, Tensor starts, Tensor(a!) cache, Tensor? bias, float scale) -> (Tensor, Tensor)"
    )
    assert Contract("one", {"x": Tensor("T", FLOATS)}, {"out": Tensor("T", "x")}).schema == "(Tensor x) -> Tensor"
    assert Contract("none", {"n": Scalar(int, "", bool, 1)}).schema == "(int n) -> ()"


def test_check_returns_the_sizes():
    assert CONTRACT.check(tuple(_good().values())) == {"T": 3, "I": 6, "B": 1, "P": 7}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": 3}, DTypeError, "toy: x must be a tensor, got int"),
        ({"x": None}, DTypeError, "toy: x must be a tensor, got NoneType"),
        (
            {"x": torch.zeros(3, 12, dtype=torch.int64)},
            DTypeError,
            "toy: x must be of dtype .*float16.*got torch.int64",
        ),
        ({"x": torch.randn(3)}, ShapeError, r"toy: x must have shape \[T 2\*I\], got \[3\]"),
        ({"x": torch.randn(3, 5)}, ShapeError, r"toy: x must have size 2\*I in axis 1, got \[3, 5\]"),
        (
            {"x": torch.randn(12, 3).T},
            ShapeError,
            r"toy: x must be contiguous in its last dimension, got strides \(1, 3\)",
        ),
        ({"cache": torch.zeros(7, 5, 6)}, ShapeError, r"toy: cache must have size 4 in axis 1, got \[7, 5, 6\]"),
        ({"cache": torch.zeros(7, 4, 8)}, ShapeError, r"toy: cache must have size I = 6 in axis 2, got \[7, 4, 8\]"),
        ({"cache": torch.zeros(7, 4, 6).half()}, DTypeError, "toy: cache must have the dtype of x, torch.float32, got"),
        ({"bias": torch.zeros(6, device="meta")}, DTypeError, "toy: bias must be on cpu, got meta"),
        ({"starts": torch.zeros(6, dtype=torch.int32)}, ShapeError, "toy: starts must hold at most 5 entries, got 6"),
        ({"scale": 0}, ShapeError, "toy: scale must be greater than 0, got 0"),
        ({"scale": float("nan")}, ShapeError, "toy: scale must be greater than 0, got nan"),
        ({"scale": "1"}, DTypeError, "toy: scale must be float, got '1'"),
    ],
)
def test_check_says_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        CONTRACT.check(tuple((_good() | change).values()))


def test_check_counts_the_arguments():
    with pytest.raises(DTypeError, match=r"toy: arguments must be \(x, starts, cache, bias, scale\), got 1 of them"):
        CONTRACT.check((torch.randn(3, 12),))


def test_a_single_column_may_have_any_stride():
    thin = Contract("thin", {"x": Tensor("T E", FLOATS)})
    assert thin.check((torch.randn(3, 8)[:, ::8],)) == {"T": 3, "E": 1}


HEADS = Contract("heads", {"x": Tensor("T H? E", FLOATS), "weight": Tensor("E", "x")}, {"out": Tensor("T H? E", "x")})


@pytest.mark.parametrize("dims", [{"T": 3, "E": 8}, {"T": 3, "H": 2, "E": 8}])
def test_an_axis_may_be_missing(dims):
    values = tuple(make_inputs(HEADS, dims, torch.float32).values())
    assert values[0].shape == tuple(dims.values())
    assert HEADS.check(values) == dims
    assert HEADS.fake(*values).shape == tuple(dims.values())
    assert HEADS.bytes_moved(values) == (2 * values[0].numel() + 8) * 4


@pytest.mark.parametrize("shape", [(8,), (2, 3, 2, 8)])
def test_no_other_axis_may_be_missing(shape):
    with pytest.raises(ShapeError, match=r"heads: x must have shape \[T H\? E\], got \["):
        HEADS.check((torch.randn(shape), torch.ones(8)))


@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 7)])
def test_a_size_after_a_missing_axis_is_named_with_its_own_axis(shape):
    x = torch.randn(shape)
    with pytest.raises(ShapeError, match=r"heads: weight must have size E = 7 in axis 0, got \[8\]"):
        HEADS.check((x, torch.ones(8)))


def test_fake_of_a_contract():
    out, counts = CONTRACT.fake(*_good().values())
    assert (out.shape, out.dtype) == ((3, 6), torch.float32)
    assert (counts.shape, counts.dtype) == ((1,), torch.int64)


def test_bytes_moved_counts_arguments_and_results():
    good = _good()
    read = (3 * 12 + 7 * 4 * 6) * 4 + 2 * 4
    written = 3 * 6 * 4 + 1 * 8
    assert CONTRACT.bytes_moved(tuple(good.values())) == read + written
    halves = {name: value.half() if name in ("x", "cache") else value for name, value in good.items()}
    per_float = Contract("toy", CONTRACT.args, CONTRACT.results, bytes=lambda dims, itemsize: dims["T"] * itemsize)
    assert per_float.bytes_moved(tuple(halves.values())) == 3 * 2


BLOCKS = Contract(
    "blocks",
    {
        "x": Tensor("T K", FLOATS),
        "dtype": Scalar(torch.dtype, "be float16", lambda dtype: dtype == torch.half, None),
        "group_size": Scalar(int, "be at least 0", lambda value: value >= 0, example=4, size="group_size"),
    },
    {"out": Tensor("T K", "dtype"), "largest": Tensor("T Q?", (torch.float32,))},
    derived=lambda dims: {"Q": dims["K"] // dims["group_size"]} if dims["group_size"] else {},
)


def test_a_dtype_and_sizes_of_results_that_no_argument_has():
    x = torch.randn(3, 8)
    out, largest = BLOCKS.fake(x, torch.half, 4)
    assert BLOCKS.schema == "(Tensor x, ScalarType dtype, int group_size) -> (Tensor, Tensor)"
    assert (out.shape, out.dtype, largest.shape) == ((3, 8), torch.half, (3, 2))
    assert BLOCKS.fake(x, torch.half, 0)[1].shape == (3,)
    assert BLOCKS.bytes_moved((x, torch.half, 4)) == 3 * 8 * (4 + 2) + 3 * 2 * 4


@pytest.mark.parametrize(
    "dtype, message", [(torch.int8, "dtype must be float16, got torch.int8"), (1, "must be dtype")]
)
def test_a_wrong_dtype_is_refused(dtype, message):
    with pytest.raises(OpError, match=f"blocks: .*{message}"):
        BLOCKS.check((torch.randn(3, 8), dtype, 4))


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS.values()])
@pytest.mark.parametrize("seed", range(3))
def test_fake_equals_real(op, seed):
    inputs = make_inputs(op.contract, op.contract.test_dims(Pick.seeded(seed)), torch.bfloat16, seed)
    fake, real = op.contract.fake(*inputs.values()), op.reference(*inputs.values())
    fake, real = (result if isinstance(result, tuple) else (result,) for result in (fake, real))
    for one, other in zip(fake, real, strict=True):
        if other is not None:
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_margins_notice_a_write_outside():
    view = make_inputs(CONTRACT, {"T": 3, "I": 6, "B": 1, "P": 2}, torch.float32, margins=True)["x"]
    assert margins_untouched(view)
    assert not view.is_contiguous()
    view._base[0, 0] = 0.0
    assert not margins_untouched(view)


@pytest.mark.parametrize("package", ["ops", "compile"])
def test_a_bare_import_is_refused(package):
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: import this package as 'vllm_triton.{package}', not as '{package}'" in done.stderr


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 3), (5, 7)])
def test_sizes_come_from_numbers_and_from_other_sizes(num_tokens, num_blocks):
    values = (torch.zeros(num_tokens, 7), None, 3, 7)
    assert ROUTED.check(values) == {"T": num_tokens, "X": 7, "K": 3}
    assert ROUTED.bind(values) == {"T": num_tokens, "X": 7, "K": 3, "Z": num_blocks}
    ids, blocks = ROUTED.fake(*values)
    assert ids.shape == (num_tokens, 3) and blocks.shape == (num_blocks,)
    assert ROUTED.bytes_moved(values) == 4 * 7 * num_tokens + 4 * 3 * num_tokens + 8 * num_blocks


def test_a_number_that_is_another_size_is_refused():
    with pytest.raises(ShapeError, match=r"^routed: num_experts must be X = 7, got 8$"):
        ROUTED.check((torch.zeros(2, 7), None, 3, 8))


def test_numbers_that_are_sizes_are_made_of_the_dims():
    inputs = make_inputs(ROUTED, {"T": 2, "X": 5, "K": 4}, torch.float32)
    assert (inputs["num_choices"], inputs["num_experts"]) == (4, 5)

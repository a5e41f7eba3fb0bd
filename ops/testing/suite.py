"""Checks of one implementation of one op, each under the name of the test that calls it.

They raise AssertionError. Hypothesis is imported by the caller, so that an installed package needs it only for tests.
"""

import copy
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Argument, Dims, Scalar
from vllm_triton.ops.errors import OpError
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.registry import Op
from vllm_triton.ops.testing.inputs import Pick, make_inputs, margins_untouched, placed, same_bits
from vllm_triton.ops.testing.tolerance import assert_within_rounding

_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
_BAD_VALUES: tuple[Any, ...] = (-1, -1.0, 0, 0.0, 2.0, float("nan"), float("inf"), torch.complex64)


def dtypes_to_test(op: Op, implementation: str) -> tuple[torch.dtype, ...]:
    """The floating dtypes of the argument that admits most of them, the first of such."""
    floats = max((_floats_of(arg) for arg in op.contract.args.values()), key=len) or (torch.float32,)
    # Triton's interpreter multiplies the raw bits of bfloat16 operands in tl.dot.
    if op.contract.uses_dot and implementation == "triton" and triton_interprets():
        return tuple(dtype for dtype in floats if dtype != torch.bfloat16)
    return floats


def _floats_of(arg: Argument) -> tuple[torch.dtype, ...]:
    if isinstance(arg, Scalar):
        return tuple(dtype for dtype in FLOATS if arg.type is torch.dtype and arg.valid(dtype))
    return tuple(dtype for dtype in FLOATS if dtype in arg.dtype) if isinstance(arg.dtype, tuple) else ()


def run(op: Op, function: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Calls `function` and returns its results and the mutated arguments by name."""
    returned = function(*inputs.values())
    results = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    outputs = dict(zip(op.contract.results, results, strict=True))
    return outputs | {name: inputs[name] for name in op.contract.mutated if inputs[name] is not None}


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies of the inputs with every floating tensor in float64, and float64 for the dtype of a floating result."""
    return {name: _widened(value) for name, value in inputs.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in FLOATS else value
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else _copied(value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def check_matches_reference(
    op: Op, implementation: str, dims: Dims, dtype: torch.dtype, seed: int, margins: bool, device: str = "cpu"
) -> None:
    """Error against float64 within rounding; arguments and their surroundings left alone unless mutated.

    Args: device: of the implementation; the reference runs on the CPU, so that all devices are held to the same.
    """
    before = make_inputs(op.contract, dims, dtype, seed)
    exact = run(op, op.reference, widened(before))
    eager = run(op, op.reference, {name: _copied(value) for name, value in before.items()})
    inputs = placed({name: _copied(value) for name, value in before.items()}, device, margins)
    actual = run(op, op.implementations[implementation], inputs)
    for name, value in actual.items():
        assert_within_rounding(value.cpu(), exact[name], eager[name], what=f"{op.name}/{implementation}: {name}")
    for name, arg in op.contract.tensors.items():
        value = inputs[name]
        if value is None:
            continue
        assert margins_untouched(value), f"{op.name}/{implementation}: memory around {name} was written"
        if not arg.mutated:
            same = same_bits(value.cpu(), before[name])
            assert same, f"{op.name}/{implementation}: {name} was written"


def check_invariances(op: Op, implementation: str, dims: Dims, dtype: torch.dtype, seed: int) -> None:
    """Permuting or splitting the rows permutes or splits the results, within rounding."""
    rows = op.contract.rows
    assert rows is not None, f"{op.name} has no independent rows"
    inputs = make_inputs(op.contract, dims, dtype, seed)
    exact = run(op, op.reference, widened(inputs))
    eager = run(op, op.reference, {name: _copied(value) for name, value in inputs.items()})
    generator = torch.Generator().manual_seed(seed)
    for selection in (torch.randperm(dims[rows], generator=generator), torch.arange((dims[rows] + 1) // 2)):
        selected = {name: _select(op, name, value, selection) for name, value in inputs.items()}
        actual = run(op, op.implementations[implementation], selected)
        for name, value in actual.items():
            what = f"{op.name}/{implementation}: {name} of selected rows"
            assert_within_rounding(value, exact[name][selection], eager[name][selection], what=what)


def _select(op: Op, name: str, value: Any, selection: torch.Tensor) -> Any:
    arg = op.contract.args[name]
    if isinstance(arg, Scalar) or value is None or not arg.sizes or arg.sizes[0].text != op.contract.rows:
        return _copied(value)
    return value[selection]


def check_rejects_bad_input(op: Op) -> None:
    """Every break of the contract is an OpError that names the op and the argument."""
    dims = op.contract.test_dims(Pick.seeded(0))
    good = make_inputs(op.contract, dims, torch.float32)
    for name, arg in op.contract.args.items():
        if isinstance(arg, Scalar):
            bad: list[Any] = [value for value in _BAD_VALUES if type(value) is arg.type and not arg.valid(value)]
            bad.append("text")
        else:
            value = good[name]
            if value is None:
                value = torch.empty((1,) * len(arg.sizes))
            one_axis_too_many = value.new_empty((1,) * (len(arg.sizes) + 1))
            bad = ["text", value.to(torch.complex64), one_axis_too_many]
            others = [other for key, other in good.items() if key != name]
            if any(isinstance(other, torch.Tensor) for other in others):  # a single tensor may be on any device
                bad.append(value.to("meta"))
            if arg.contiguous and value.dim() and value.shape[-1] > 1:
                bad.append(value.repeat_interleave(2, dim=-1)[..., ::2])
            if not arg.optional:
                bad.append(None)
        for value in bad:
            _assert_rejected(op, good | {name: value}, name)


def _assert_rejected(op: Op, inputs: dict[str, Any], name: str) -> None:
    try:
        op(*inputs.values())
    except OpError as error:
        message = str(error)
        # With one tensor on another device, either side of the disagreement may be named.
        assert message.startswith(f"{op.name}: ") and (name in message or " must be on " in message), message
        return
    raise AssertionError(f"{op.name}: {name}={inputs[name]!r} was accepted")


def check_opcheck(op: Op, implementation: str, dtype: torch.dtype) -> None:
    """torch.library.opcheck: the schema tells the truth, and the fake matches in shape, stride and dtype."""
    inputs = make_inputs(op.contract, op.contract.test_dims(Pick.seeded(1)), dtype)
    tests = list(_OPCHECKS)
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn for value in inputs.values()):
        tests.remove("test_schema")  # it computes with the arguments, and torch has no arithmetic of small floats
    with op.using(implementation):
        torch.library.opcheck(op.torch_op, tuple(inputs.values()), test_utils=tests)


def check_compiles_fullgraph(op: Op, implementation: str, dtype: torch.dtype) -> None:
    """torch.compile sees one graph without breaks, and runs it to the same result."""
    inputs = make_inputs(op.contract, op.contract.test_dims(Pick.seeded(2)), dtype)
    expected = run(op, op.implementations[implementation], {name: _copied(value) for name, value in inputs.items()})
    torch.compiler.reset()
    with op.using(implementation):
        compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
        actual = run(op, compiled, inputs)
    for name, value in actual.items():
        same = same_bits(value, expected[name])
        assert same, f"{op.name}/{implementation}: {name} differs when compiled"

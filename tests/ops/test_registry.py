"""Choosing implementations: explicit choices never fall back, and a started engine's choices hold."""

import threading
from dataclasses import replace

import pytest
import torch

from vllm_triton.ops import registry as registry_module
from vllm_triton.ops import rms_norm
from vllm_triton.ops.contract import FLOATS, Tensor
from vllm_triton.ops.errors import RegistryError, ShapeError
from vllm_triton.ops.platforms import CPU
from vllm_triton.ops.registry import OPS, Situation, choose, define_op, explain, freeze, parse_choices

SITUATION = Situation("cpu", dtype=torch.bfloat16)


@pytest.fixture
def refusing():
    """An implementation of rms_norm that refuses bfloat16."""

    def supports(situation: Situation) -> str | None:
        return "it is written for float32" if situation.dtype == torch.bfloat16 else None

    @rms_norm.impl("refusing", supports=supports)
    def refusing_rms_norm(x, weight, eps):
        return rms_norm.reference(x, weight, eps)

    yield "refusing"
    del rms_norm.implementations["refusing"]


@pytest.fixture
def not_started(monkeypatch):
    """A process in which no engine has started."""
    monkeypatch.setattr(registry_module, "_frozen", None)
    for op in OPS.values():
        monkeypatch.setattr(op, "_active", None)


def test_an_explicit_choice_that_refuses_raises_with_its_reason(refusing):
    with pytest.raises(RegistryError, match="rms_norm: 'refusing' was asked for but cannot run: it is written for"):
        choose(rms_norm, CPU, SITUATION, explicit=refusing)
    with pytest.raises(RegistryError, match="it is written for float32"):
        freeze({"rms_norm": refusing}, SITUATION)


def test_a_choice_left_open_skips_what_refuses(refusing):
    platform = replace(CPU, priority=(refusing, "torch", "reference"))
    row = choose(rms_norm, platform, SITUATION)
    assert row["chosen"] == "torch"
    reasons = {entry["name"]: entry["rejected_because"] for entry in row["implementations"]}
    assert reasons[refusing] == "it is written for float32"
    assert reasons["torch"] is None
    assert reasons["reference"] == "cpu prefers torch"
    assert choose(rms_norm, platform, Situation("cpu", dtype=torch.float32))["chosen"] == refusing


def test_nothing_that_runs_is_an_error_that_names_the_reasons(refusing):
    platform = replace(CPU, priority=(refusing,))
    with pytest.raises(RegistryError, match=r"rms_norm: no implementation runs on cpu: .*it is written for float32"):
        choose(rms_norm, platform, SITUATION)


def test_an_op_may_have_an_order_of_its_own():
    platform = replace(CPU, priority=("torch", "reference"), op_priority={"rms_norm": ("reference", "torch")})
    assert choose(rms_norm, platform, SITUATION)["chosen"] == "reference"
    assert choose(OPS["linear"], platform, SITUATION)["chosen"] == "torch"


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(RegistryError, match=r"kernels: op must be one of .*linear.*rms_norm.*, got rms_nrom"):
        explain({"rms_nrom": "torch"}, SITUATION)
    with pytest.raises(
        RegistryError, match=r"rms_norm: implementation must be one of reference, .*torch.*, got 'trch'"
    ):
        explain({"rms_norm": "trch"}, SITUATION)
    with pytest.raises(
        RegistryError, match=r"rms_norm: implementation must be one of reference, .*torch.*, got 'trch'"
    ):
        rms_norm.implementation("trch")


def test_a_name_registers_once():
    with pytest.raises(RegistryError, match=r"rms_norm: implementation name must be new, got 'torch'"):
        rms_norm.impl("torch")(lambda x, weight, eps: x)


def test_the_contract_must_list_the_functions_arguments():
    with pytest.raises(RegistryError, match=r"misnamed: contract must list the arguments \['x', 'y'\], got \['x'\]"):

        @define_op(args={"x": Tensor("T", FLOATS)}, reference=lambda x, y: x)
        def misnamed(x, y): ...

    assert "misnamed" not in OPS


def test_explain_tells_of_every_op_what_was_chosen_and_why():
    rows = explain({"rms_norm": "reference"}, SITUATION, replace(CPU, priority=("torch", "reference")))
    assert [row["op"] for row in rows] == sorted(OPS)
    for row in rows:
        assert set(row) == {"op", "chosen", "why", "implementations"}
        names = [entry["name"] for entry in row["implementations"]]
        assert names == list(OPS[row["op"]].implementations)
        assert [entry["name"] for entry in row["implementations"] if entry["rejected_because"] is None] == [
            row["chosen"]
        ]
    by_op = {row["op"]: row for row in rows}
    assert (by_op["rms_norm"]["chosen"], by_op["rms_norm"]["why"]) == ("reference", "asked for")
    rejected = {entry["name"]: entry["rejected_because"] for entry in by_op["rms_norm"]["implementations"]}
    assert rejected["torch"] == "reference was asked for"
    assert by_op["linear"]["why"] == "first that runs in the order of cpu: torch, reference"


def test_freezing_makes_the_choice_run(not_started):
    calls = []

    @rms_norm.impl("recording")
    def recording(x, weight, eps):
        calls.append(x.shape)
        return rms_norm.reference(x, weight, eps)

    try:
        selection = freeze({"rms_norm": "recording"}, SITUATION)
        assert set(selection) == set(OPS) and selection["rms_norm"] == "recording"
        rms_norm(torch.randn(2, 8), torch.ones(8), 1e-5)
        assert calls == [(2, 8)]
    finally:
        del rms_norm.implementations["recording"]


def test_frozen_choices_hold_for_the_process(not_started):
    first = freeze({"rms_norm": "reference"}, SITUATION)
    assert freeze({"rms_norm": "reference"}, SITUATION) == first
    with pytest.raises(RegistryError, match=r"fixed once an engine has started, .* rms_norm \(reference -> torch\)"):
        freeze({"rms_norm": "torch"}, SITUATION)
    assert rms_norm._active is rms_norm.implementations["reference"]


def test_using_runs_another_implementation_and_returns(not_started):
    freeze({"rms_norm": "reference"}, SITUATION)
    with rms_norm.using("torch"):
        assert rms_norm._active is rms_norm.implementations["torch"]
        with pytest.raises(ZeroDivisionError), rms_norm.using("triton"):
            raise ZeroDivisionError
        assert rms_norm._active is rms_norm.implementations["torch"]
    assert rms_norm._active is rms_norm.implementations["reference"]


def test_an_op_runs_without_an_engine(not_started):
    x = torch.randn(2, 8)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5), rms_norm.reference(x, torch.ones(8), 1e-5))


@pytest.mark.parametrize(
    "text, choices",
    [
        ("", {}),
        (" , ", {}),
        ("linear=torch", {"linear": "torch"}),
        (" linear = torch , rms_norm=mine,", {"linear": "torch", "rms_norm": "mine"}),
    ],
)
def test_parse_choices(text, choices):
    assert parse_choices(text) == choices


@pytest.mark.parametrize("text, part", [("linear", "linear"), ("a=b,=torch", "=torch"), ("linear=", "linear=")])
def test_parse_choices_names_the_part_that_is_wrong(text, part):
    with pytest.raises(RegistryError, match=f"kernels: choice must have the form op=implementation, got '{part}'"):
        parse_choices(text)


def test_trusted_calls_are_not_checked_in_this_thread_alone():
    wrong = torch.ones(2, 3), torch.ones(4), 1e-5
    with registry_module.trusted_calls(), rms_norm.using("torch"):
        with pytest.raises(RuntimeError):  # torch's own complaint, from inside the implementation
            rms_norm(*wrong)
        other = threading.Thread(target=lambda: caught.append(_error_of(wrong)))
        caught: list[type] = []
        other.start()
        other.join()
    assert caught == [ShapeError]
    assert _error_of(wrong) is ShapeError


def _error_of(arguments) -> type | None:
    try:
        rms_norm(*arguments)
    except Exception as error:
        return type(error)
    return None

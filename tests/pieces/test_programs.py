"""A traced forward as text, and as a program that does what the forward does."""

import pytest
import torch
from small_forward import INPUTS, SIZE, Tensors, attend, constants, forward, plain_step, step_inputs, traceable

from vllm_triton.compile.pieces.compilers import EagerCompiler, InductorCompiler
from vllm_triton.compile.pieces.errors import TraceError
from vllm_triton.compile.pieces.program import Program
from vllm_triton.compile.pieces.ranges import CompileRange, Ranged, compile_ranges
from vllm_triton.compile.pieces.source import ForwardSource, write_source
from vllm_triton.compile.pieces.trace import InputSpec, trace

CPU = torch.device("cpu")


def _source(forward, inputs=INPUTS, weights=None) -> ForwardSource:
    return write_source(trace(forward, inputs, constants() if weights is None else weights, CPU))


def _program(source: ForwardSource, weights: Tensors) -> Program:
    pieces = {piece.name: EagerCompiler().compile(piece, CompileRange(1, 99))[0] for piece in source.pieces}
    return Program(source, pieces, weights)


def test_equal_layers_are_one_piece():
    source = _source(forward)
    names = [call.function for call in source.calls]
    assert names == ["piece_0", "attention_0", "piece_1", "attention_0", "piece_1", "attention_0", "piece_2"]
    assert source.calls[2].constants == ("layers.1.norm", "layers.1.qkv")
    assert source.calls[5].constants == ("layers.2.key_cache", "layers.2.value_cache")
    assert "layers" not in source.module  # no layer's name or number is part of what runs


def test_what_differs_between_layers_makes_pieces_of_their_own():
    def uneven(inputs: Tensors, weights: Tensors) -> torch.Tensor:
        x = inputs["x"]
        for layer in range(3):
            x = attend(inputs, weights, layer, x) * (layer + 1)
        return x

    assert [call.function for call in _source(uneven).calls][2:5:2] == ["piece_1", "piece_2"]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16])
def test_a_program_does_what_the_forward_does(num_tokens):
    expected_weights, found_weights = constants(), constants()
    inputs = step_inputs(num_tokens)
    expected = forward(inputs, expected_weights)
    found = _program(_source(forward), found_weights)(plain_step(num_tokens), num_tokens, *inputs.values())
    assert torch.equal(found, expected)
    for name, tensor in expected_weights.items():
        assert torch.equal(found_weights[name], tensor), name


def test_a_program_frees_what_nobody_needs_any_more():
    """Neither within a function nor between them: at most the running piece's inputs and results are alive."""
    source = _source(forward)
    for function in source.functions:
        assigned = {line.split(" = ")[0].strip(" ()") for line in function.text.splitlines() if " = " in line}
        names = {name for names in assigned for name in names.replace(",", " ").split()}
        returned = set(function.text.splitlines()[-1].replace("(", " ").replace(")", " ").replace(",", " ").split())
        deleted = {
            name.strip()
            for line in function.text.splitlines()
            if line.startswith("    del ")
            for name in line[8:].split(",")
        }
        assert names == deleted | (returned & names), function.text
    assert source.text.count("del ") == len(source.calls) - 1  # but after the last


SPECIALISING = {
    "a choice by the number of tokens": lambda x: x * 2 if x.shape[0] > 100 else x,
    "a size taken for a number": lambda x: x.view(len(x) * SIZE),
}


@pytest.mark.parametrize("case", SPECIALISING)
def test_a_decision_by_an_unknown_size_is_an_error(case):
    with pytest.raises(TraceError, match="decides something by an unknown size"):
        _source(traceable(SPECIALISING[case]))


VALUES = {
    "item": lambda x: x * x[0, 0].item(),
    "nonzero": lambda x: x.nonzero().float(),
    "a choice by a value": lambda x: x if x.sum() > 0 else -x,
}


@pytest.mark.parametrize("case", VALUES)
def test_a_decision_by_a_value_is_an_error(case):
    with pytest.raises(TraceError, match="value"):
        _source(traceable(VALUES[case]))


def test_a_piece_knows_one_unknown_size():
    two = {"x": InputSpec(("T", SIZE), torch.float32), "seq_lens": InputSpec(("B", SIZE), torch.float32)}
    with pytest.raises(TraceError, match="one unknown size, the number of tokens T, got another"):
        _source(lambda inputs, weights: torch.cat([inputs["x"], inputs["seq_lens"]]), two)


def test_a_tensor_that_is_no_constant_is_an_error():
    hidden = torch.ones(SIZE)
    with pytest.raises(TraceError, match="keep it as a buffer"):
        _source(traceable(lambda x: x * hidden))


def test_inductor_takes_inlineable_ops_as_their_references(tmp_path):
    """One compilation for a range serves every number in it, 1 among them; its files serve other processes."""
    one_layer = lambda inputs, weights: attend(inputs, weights, 0, inputs["x"]) * 2
    source, weights, inductor = _source(one_layer), constants(), InductorCompiler()
    ranges = compile_ranges([2], 64, sizes=[8])
    made = {piece: [(sizes, *inductor.compile(piece, sizes)) for sizes in ranges] for piece in source.pieces}
    fresh = {piece.name: Ranged([(sizes, runnable) for sizes, runnable, _ in made[piece]]) for piece in made}
    loaded = {
        piece.name: Ranged([(sizes, inductor.load(piece, save(tmp_path), tmp_path)) for sizes, _, save in made[piece]])
        for piece in made
    }
    for pieces in (fresh, loaded):
        for num_tokens in (1, 2, 8, 16):
            inputs = step_inputs(num_tokens)
            found = Program(source, pieces, weights)(plain_step(num_tokens), num_tokens, *inputs.values())
            torch.testing.assert_close(found, one_layer(inputs, constants()))

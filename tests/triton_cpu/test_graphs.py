"""Graphs on a CPU: regions of ops as lists of launches, and decode steps of an engine."""

import copy
import gc
import logging

import pytest
import torch
from tiny import VOCAB_SIZE, make_tiny

from vllm_triton import LLM, SamplingParams, ops
from vllm_triton.compile.graphs.backend import CaptureError
from vllm_triton.compile.graphs.checking import CheckedGraphs, GraphMismatchError
from vllm_triton.compile.graphs.modes import CudagraphMode
from vllm_triton.compile.graphs.recording import CpuGraphs
from vllm_triton.config import EngineConfig
from vllm_triton.errors import ConfigError
from vllm_triton.ops import registry
from vllm_triton.ops.platforms import CPU
from vllm_triton.runner import capture

WEIGHT, NORM = torch.randn(96, 48), torch.randn(48)


def _region(x: torch.Tensor):
    """Two products with what lies between them; the result of the first one dies before the last is made."""

    def region():
        hidden = ops.silu_and_mul(ops.linear(ops.rms_norm(x, NORM, 1e-5), WEIGHT, None))
        _, second = ops.linear(hidden, WEIGHT, None).split(48, dim=1)
        return (ops.silu_and_mul(ops.linear(ops.rms_norm(second, NORM, 1e-5), WEIGHT, None)),)

    return region


@pytest.mark.parametrize("trusted", [False, True])
def test_replays_equal_the_region_for_every_input(trusted):
    backend = CpuGraphs()
    inputs = {size: torch.zeros(size, 48) for size in (8, 5, 1)}
    with registry.trusted_calls() if trusted else torch.no_grad():
        graphs = {size: backend.capture(f"{size}", _region(x))[0][0] for size, x in inputs.items()}
    size_of_largest = backend.num_bytes
    gc.collect()
    rubbish = [torch.full((48 * 8,), float("nan")) for _ in range(100)]  # what freed memory would hold now
    for _ in range(3):
        for size, x in inputs.items():
            x.copy_(torch.randn(size, 48))
            [result] = graphs[size].replay()
            assert torch.equal(result, _region(x)()[0])
    assert backend.num_bytes == size_of_largest and len(rubbish) == 100


def test_smaller_graphs_live_in_the_memory_of_the_largest():
    backend = CpuGraphs()
    backend.capture("8", _region(torch.zeros(8, 48)))
    before = backend.num_bytes
    for size in range(7, 0, -1):
        backend.capture(str(size), _region(torch.zeros(size, 48)))
    assert backend.num_bytes == before


def test_stages_are_graphs_of_their_own_and_together():
    x = torch.randn(4, 48)
    (normed, product), _ = CpuGraphs().capture(
        "two", lambda: (ops.rms_norm(x, NORM, 1e-5),), lambda normed: (ops.linear(normed, WEIGHT, None),)
    )
    expected = ops.rms_norm(x, NORM, 1e-5)
    assert (len(normed), len(product)) == (1, 2)
    assert torch.equal(normed.replay()[0], expected)
    x.mul_(-3)
    assert torch.equal(product.replay()[0], ops.linear(ops.rms_norm(x, NORM, 1e-5), WEIGHT, None))


READS = {
    "_local_scalar_dense.default": lambda x: x[0, 0].item(),
    "max.default": lambda x: bool(x.max() == 0),
    "nonzero.default": lambda x: x.nonzero(),
    "add.Tensor": lambda x: x + 1,
    "zeros.default": lambda x: torch.zeros(3),
    "clone.default": lambda x: x.t().contiguous(),
}


@pytest.mark.parametrize("call", READS)
def test_what_is_no_launch_is_an_error_that_names_it_and_its_line(call):
    x = torch.ones(4, 48)
    with pytest.raises(CaptureError, match=rf"graph step: aten\.{call} is no Triton launch(.|\n)*test_graphs\.py:\d+"):
        CpuGraphs().capture("step", lambda: (READS[call](x),))
    assert torch.equal(ops.rms_norm(x, NORM, 1e-5), ops.rms_norm(x, NORM, 1e-5))  # recording has ended


@pytest.mark.parametrize("trusted", [False, True])
def test_a_torch_call_inside_an_op_is_found(trusted):
    x = torch.ones(4, 48)
    kind = registry.trusted_calls() if trusted else torch.no_grad()
    with kind, ops.linear.using("torch"), pytest.raises(CaptureError, match=r"linear/vectorised\.py:\d+"):
        CpuGraphs().capture("step", lambda: (ops.linear(x, WEIGHT, None),))


class _State:
    """One row that counts, and a tensor that is written."""

    def __init__(self, x: torch.Tensor):
        self.x = x

    def num_rows(self) -> int:
        return 1

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"x": self.x}

    def save(self) -> list[torch.Tensor]:
        return [self.x.clone()]

    def restore(self, saved: list[torch.Tensor]) -> None:
        self.x.copy_(saved[0])


def test_a_checked_graph_finds_what_changed_since_its_capture():
    x, weights = torch.randn(4, 48), [WEIGHT, WEIGHT + 1]
    state = _State(x)
    [graph], _ = CheckedGraphs(CpuGraphs(), state).capture("step", lambda: (ops.linear(x, weights[0], None),))
    expected = ops.linear(x, WEIGHT, None)
    assert torch.equal(graph.replay()[0], expected)
    weights.reverse()
    where = r"result 0 differs .* 96 of 96 places, first at \(0, 0\): .*; first in linear, op 1 of 1"
    with pytest.raises(GraphMismatchError, match=f"graph step: {where}"):
        graph.replay()
    weights.reverse()
    state.x = x.clone()
    with pytest.raises(GraphMismatchError, match="x has moved"):
        graph.replay()


def test_a_checked_graph_names_the_first_op_that_differs():
    """Of those whose rows count; the ops behind it differ as well, and arguments that are written count too."""
    x, norms, biases = torch.randn(4, 48), [NORM, NORM * 2], [torch.ones(1), torch.zeros(1)]
    place = torch.zeros(1, dtype=torch.int64)

    def step():
        product = ops.linear(x, WEIGHT, None)
        ops.apply_logit_bias(product, place, place, biases[0])
        first, second = product.split(48, dim=1)
        normed, _ = ops.fused_add_rms_norm(first, second, norms[0], 1e-5)
        return (ops.linear(normed, WEIGHT, None),)

    [graph], _ = CheckedGraphs(CpuGraphs(), _State(x)).capture("step", step)
    graph.replay()
    norms.reverse()
    with pytest.raises(GraphMismatchError, match="first in fused_add_rms_norm, op 3 of 4"):
        graph.replay()
    norms.reverse()
    biases.reverse()
    with pytest.raises(GraphMismatchError, match="first in apply_logit_bias, op 2 of 4"):
        graph.replay()


def test_a_checked_graph_restores_what_both_runs_write():
    bias_rows = torch.zeros(1, dtype=torch.int64)
    logits = torch.arange(96.0).view(2, 48)

    ones = torch.ones(1)
    [graph], _ = CheckedGraphs(CpuGraphs(), _State(logits)).capture(
        "step", lambda: ops.apply_logit_bias(logits, bias_rows, bias_rows, ones) or ()
    )
    before = logits.clone()
    graph.replay()
    graph.replay()
    before[0, 0] += 2
    assert torch.equal(logits, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama3", path)
    return str(path)


def _llm(folder: str, **settings) -> LLM:
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=6, **settings)


def _tokens(llm: LLM, count: int, **params):
    prompts = [
        {"prompt_token_ids": [3 + (7 * row + place) % (VOCAB_SIZE - 3) for place in range(5)]} for row in range(count)
    ]
    lengths = [SamplingParams(max_tokens=4 + row % 3, ignore_eos=True, seed=row, **params) for row in range(count)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, lengths, use_tqdm=False)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 9},
        {"temperature": 0.9, "presence_penalty": 0.7, "logprobs": 2},
    ],
    ids=["greedy", "drawn", "penalised"],
)
def test_captured_steps_give_the_tokens_of_eager_ones(folder, params):
    """Batches of every size, which shrink as requests end: most are padded."""
    eager, captured = _llm(folder, optimization_level=0), _llm(folder, cudagraph_capture_sizes=[6, 4, 1])
    for count in range(1, 7):
        assert _tokens(captured, count, **params) == _tokens(eager, count, **params)


class _Counting:
    """Counts what is captured and replayed, by name and in order."""

    num_bytes = 0

    def __init__(self):
        self.backend, self.captured, self.replayed = CpuGraphs(), [], []

    def capture(self, name, *stages):
        self.captured.append(name)
        graphs, results = self.backend.capture(name, *stages)
        return [_CountingGraph(self, name, graph) for graph in graphs], results


class _CountingGraph:
    def __init__(self, counter, name, graph):
        self.counter, self.name, self.graph = counter, name, graph

    def replay(self):
        self.counter.replayed.append(self.name)
        return self.graph.replay()


@pytest.fixture
def counting(monkeypatch) -> _Counting:
    counting = _Counting()
    monkeypatch.setattr(capture, "CpuGraphs", lambda: counting)
    return counting


def test_largest_first_and_every_decode_step_of_a_captured_size(folder, counting):
    llm = _llm(folder, cudagraph_mode="full", cudagraph_capture_sizes=[1, 4])
    assert counting.captured == ["decode 4", "decode 1"]
    [tokens] = _tokens(llm, 1, temperature=0)
    assert counting.replayed == ["decode 1"] * (len(tokens) - 1)  # the first one comes of the prompt's step
    counting.replayed.clear()
    _tokens(llm, 3, temperature=0)  # 4, 5 and 6 tokens
    assert counting.replayed == ["decode 4"] * 4 + ["decode 1"]
    counting.replayed.clear()
    _tokens(llm, 6, temperature=0)  # 6 rows have no graph; 4 and then 2 live on
    assert counting.replayed == ["decode 4"] * 2


def test_pieces_run_captured_where_whole_steps_are_not(folder, counting):
    llm = _llm(folder, cudagraph_mode="piecewise", cudagraph_capture_sizes=[1, 6])
    functions = ["piece_0, call 0", "piece_1, call 2", "piece_1, call 4", "piece_2, call 6"]  # of three layers
    pieces = {size: [f"{name} of the forward of {size} tokens" for name in functions] for size in (6, 1)}
    assert counting.captured == pieces[6] + pieces[1]
    [tokens] = _tokens(llm, 1, temperature=0)  # a prompt of 5 tokens, then one token a step
    assert counting.replayed == pieces[6] + pieces[1] * (len(tokens) - 1)
    counting.replayed.clear()
    _tokens(llm, 2, temperature=0)  # prompts of 10 tokens together have no graph
    assert counting.replayed == pieces[6] * 3 + pieces[1]


def test_pieces_are_captured_for_more_tokens_than_requests(folder, counting):
    llm = _llm(folder, cudagraph_capture_sizes=[6, 40])
    assert [name for name in counting.captured if name.startswith("decode")] == ["decode 6"]
    _tokens(llm, 6, temperature=0)  # prompts of 30 tokens together
    assert counting.replayed[:4] == [name for name in counting.captured if "of 40 tokens" in name]


def test_a_size_that_no_step_has_is_refused():
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes must be at most max_num_batched_tokens=64, got 128"):
        EngineConfig("model", max_num_batched_tokens=64, cudagraph_capture_sizes=[128])


def test_only_the_wrappers_of_a_step_s_mode_act(folder, counting):
    """A graph of a whole step holds what the pieces in it do, and not their graphs."""
    _llm(folder, cudagraph_mode="full_and_piecewise", cudagraph_capture_sizes=[4])
    assert len(counting.captured) == 4 + 1 and counting.captured[-1] == "decode 4"
    assert counting.replayed == []


def test_an_input_that_moved_is_an_error(folder):
    llm = _llm(folder, cudagraph_mode="piecewise", cudagraph_capture_sizes=[6])
    runner = llm.core.runner
    runner._positions = copy.deepcopy(runner._positions)
    with pytest.raises(ValueError, match="input 1 has moved since BatchDescriptor"):
        _tokens(llm, 1, temperature=0)


def test_norms_of_heads_are_captured(tmp_path, counting, monkeypatch):
    """Qwen3's, which read a view of the fused projection; every replay is compared with the same step uncaptured."""
    make_tiny("qwen3", tmp_path)
    eager = _llm(str(tmp_path), optimization_level=0)
    monkeypatch.setenv("VLLM_TRITON_GRAPH_CHECK", "1")
    captured = _llm(str(tmp_path), cudagraph_mode="full", cudagraph_capture_sizes=[4, 1])
    for count in (1, 3, 6):
        assert _tokens(captured, count, temperature=0) == _tokens(eager, count, temperature=0)
    assert set(counting.replayed) == {"decode 1", "decode 4"}


def test_padding_rows_write_nowhere(folder):
    llm = _llm(folder, cudagraph_capture_sizes=[4])
    caches = [cache for layer in llm.core.runner.kv_caches for cache in layer]
    with torch.inference_mode():
        for cache in caches:
            cache.fill_(float("nan"))
    _tokens(llm, 1, temperature=0)
    written = [(~cache.isnan()).flatten(0, 1).flatten(1).any(1).sum().item() for cache in caches]
    assert written == [5 + 4 - 1] * len(caches)  # the prompt, and every token but the last


WHOLE_STEPS = "whole steps of decoding for 2 requests"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimization_level": 0}, "compile: nothing, as asked for"),
        ({"optimization_level": 1}, "graphs: captured pieces of steps of 2 tokens in"),
        ({}, f"graphs: captured pieces of steps of 2 tokens and {WHOLE_STEPS}"),
        ({"optimization_level": 3}, f"graphs: captured pieces of steps of 2 tokens and {WHOLE_STEPS}"),
        ({"optimization_level": 0, "cudagraph_mode": "full"}, f"graphs: captured {WHOLE_STEPS}"),
        ({"cudagraph_mode": "none"}, "graphs: none, as asked for"),
    ],
)
def test_a_given_mode_wins_over_the_level(folder, caplog, settings, line):
    with caplog.at_level(logging.INFO):
        _llm(folder, cudagraph_capture_sizes=[2], **settings)
    assert line in caplog.text


def test_what_cannot_be_captured_lowers_the_mode(folder):
    source = _llm(folder, cudagraph_mode="none").core.runner._program.source
    selection = dict.fromkeys(ops.registry.OPS, "triton")

    def reasons(launches_only: bool = True, **different: str) -> tuple[str | None, str | None]:
        found = capture.Capturable.of(source, CPU, selection | different, launches_only)
        return found.why_no_pieces, found.why_no_steps

    assert reasons() == (None, None)
    assert reasons(apply_penalties="torch") == (None, None)  # no part of a graph
    assert reasons(softcap_logits="torch") == (None, None)  # this model has none
    with_softcap = capture.Capturable.of(
        source, CPU, selection | {"softcap_logits": "torch"}, True, frozenset({"softcap_logits"})
    )
    assert with_softcap.why_no_steps == "softcap_logits=torch cannot be captured on cpu"
    for op in ("linear", "embedding", "silu_and_mul"):
        assert reasons(**{op: "torch"}) == (f"{op}=torch cannot be captured on cpu",) * 2
    for op in ("paged_attention", "reshape_and_cache", "sample_tokens"):
        assert reasons(**{op: "torch"}) == (None, f"{op}=torch cannot be captured on cpu")
    assert reasons(launches_only=False)[0] == reasons(launches_only=False)[1]
    assert "launches of Triton kernels alone" in reasons(launches_only=False)[0]


def test_config_names_the_modes_there_are():
    for mode in CudagraphMode:
        assert EngineConfig("model", cudagraph_mode=mode.value).cudagraph_mode == mode.value

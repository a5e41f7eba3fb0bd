"""What gpu_check.py runs, each part in a process of its own. A part yields rows; an error is the last one.

A row: {"what": ..., and figures}; "error" in it says that it went wrong.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_kernels
import torch

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.compile.graphs.backend import Graph, GraphBackend, Stage, Tensors
from vllm_triton.compile.graphs.checking import CheckedGraphs, GraphMismatchError, ResultsAlone
from vllm_triton.compile.graphs.modes import default_capture_sizes
from vllm_triton.config import EngineConfig
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.llama import LlamaForCausalLM
from vllm_triton.ops.platforms import current_platform
from vllm_triton.ops.registry import OPS, Op, Situation
from vllm_triton.ops.testing import Pick, suite, timing
from vllm_triton.runner.capture import graph_backend
from vllm_triton.runner.compilation import compile_forward, compile_kernels
from vllm_triton.runner.model_runner import DecodeState, ModelRunner
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.output import NewRequestData, SchedulerOutput

BLOCK_SIZE = 16
WARM_UP_STEPS, FEWEST_STEPS, MOST_STEPS = 3, 5, 40
# Small enough that activations stay finite.
DUMMY_STD = 0.02
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "presence_penalty": 0.5},
)

Row = dict[str, Any]


def _llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
    }


TINY = _llama(3, 256, 512, 8, 2, 1024, tied=True)
SMOLLM2_135M = _llama(30, 576, 1536, 9, 3, 49152, tied=True)
LLAMA_3_8B = _llama(32, 4096, 14336, 32, 8, 128256, tied=False)


@dataclass(frozen=True)
class Scale:
    """How much work the parts do. Models are configurations; counts are numbers of requests.

    op_seconds: for the checks of an op.
    copied_bytes: of a copy that measures the memory's bandwidth, far above any cache.
    """

    op_seconds: float
    speed_model: dict[str, Any]
    floor_model: dict[str, Any]
    most_captured: int
    speed_counts: tuple[int, ...]
    floor_counts: tuple[int, ...]
    context: int
    copied_bytes: int


SCALES = {
    "gpu": Scale(25, SMOLLM2_135M, LLAMA_3_8B, 64, (1, 8, 32), (1, 8, 64), 1024, 2 << 30),
    # For a test of the parts themselves; its figures say nothing.
    "tiny": Scale(1, TINY, TINY, 4, (1, 3), (1, 2), 20, 8 << 20),
}


def check_op(op_name: str, device: str, seconds: float) -> Iterator[Row]:
    """Every implementation that runs here against the reference, for an equal share of the time."""
    op = OPS[op_name]
    names = [name for name, each in op.implementations.items() if each.supports(Situation(device)) is None]
    names.remove("reference")
    for name in names:
        yield _check_implementation(op, name, device, seconds / len(names))


def _check_implementation(op: Op, name: str, device: str, seconds: float) -> Row:
    """Random cases of the contract, at least one a dtype, for half of the time; then its shapes of real models."""
    start, dtypes = time.perf_counter(), suite.dtypes_to_test(op, name)
    num_cases = num_shapes = 0
    case, row = "", {"what": f"{op.name} {name}"}
    try:
        while num_cases < len(dtypes) or time.perf_counter() < start + seconds / 2:
            dims, dtype = op.contract.test_dims(Pick.seeded(num_cases)), dtypes[num_cases % len(dtypes)]
            case = f"{dims}, {dtype}, seed {num_cases}"
            has_margins = num_cases % 2 == 1
            suite.check_matches_reference(op, name, dims, dtype, num_cases, has_margins, device)
            num_cases += 1
        for label, dims in op.contract.bench_dims.items():
            if time.perf_counter() > start + seconds:
                break
            case, dtype = label, torch.bfloat16 if torch.bfloat16 in dtypes else dtypes[0]
            suite.check_matches_reference(op, name, dims, dtype, seed=0, margins=False, device=device)
            num_shapes += 1
    except Exception as error:  # the row says so, and the next implementation may be right
        row["error"] = f"{case}: {type(error).__name__}: {error}"
    return row | {"cases": num_cases, "real_shapes": f"{num_shapes} of {len(op.contract.bench_dims)}"}


class Decoding:
    """A runner of random weights in bfloat16, in which requests decode from the middle of a random text: their earlier
    keys and values are random as well, so that no prompt has to be computed.

    Args:
        config: of the model, as in a config.json.
        max_num_seqs: requests at most.
        max_model_len: tokens of each at most.
    """

    @torch.inference_mode()
    def __init__(self, config: dict[str, Any], device: str, max_num_seqs: int, max_model_len: int):
        self.config = ModelConfig.from_hf(config, {}, "gpu_check.py")
        self.model = _random_model(self.config, device, max_model_len)
        self._max_blocks = -(-max_model_len // BLOCK_SIZE)
        shape = (max_num_seqs * self._max_blocks + 1, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_size)
        caches = [
            (
                torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(),
                torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(),
            )
            for _ in range(self.config.num_layers)
        ]
        self.runner = ModelRunner(
            self.model, caches, torch.device(device), BLOCK_SIZE, max_num_seqs, max_num_seqs, max_model_len
        )
        self._settings = EngineConfig(
            "gpu_check", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs, max_model_len=max_model_len
        )
        self._running: list[str] = []

    def compile(self, checked: bool = False) -> None:
        """Runs the forward in pieces from now on. Args: checked: graphs of it are to be checked."""
        selection = {name: op.implementation_now().name for name, op in OPS.items()}
        caches, platform = self.runner.kv_caches, current_platform()
        program = compile_forward(self.model, caches, self._settings, platform, selection)
        compile_kernels(self.runner, program, platform, self._settings)
        self.runner.use(program.through_dispatcher() if checked else program)

    def prefill(self, num_tokens: int) -> None:
        """Puts one request in place of those that run, and computes so many of its tokens."""
        self.start([num_tokens], uncomputed=num_tokens, temperature=0.0)

    def start(self, lengths: Sequence[int], uncomputed: int = 1, **params: Any) -> None:
        """Puts other requests in place of those that run, of so many tokens each, and computes their last ones."""
        ended, self._running = self._running, [str(index) for index in range(len(lengths))]
        draw = random.Random(0)
        requests = []
        for index, length in enumerate(lengths):
            first_block = 1 + index * self._max_blocks
            requests.append(
                NewRequestData(
                    request_id=self._running[index],
                    token_ids=[draw.randrange(self.config.vocab_size) for _ in range(length)],
                    num_prompt_tokens=length,
                    params=SamplingParams(seed=index, **params),
                    stop_token_ids=frozenset(),
                    block_ids=list(range(first_block, first_block + self._max_blocks)),
                    num_computed_tokens=length - uncomputed,
                )
            )
        self.runner.execute(self._output(uncomputed, removed_request_ids=ended, new_requests=requests))

    def step(self) -> None:
        """One more token for each request."""
        self.runner.execute(self._output())

    def median_seconds(self, count: int, context: int) -> float:
        """Of a step of so many requests, with what the host does for it."""
        self.start([context] * count, temperature=0.0)
        for _ in range(WARM_UP_STEPS):
            self.step()
        taken: list[float] = []
        while len(taken) < FEWEST_STEPS or (len(taken) < MOST_STEPS and sum(taken) < 3):
            start = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def _output(self, num_tokens: int = 1, **fields: Any) -> SchedulerOutput:
        scheduled = dict.fromkeys(self._running, num_tokens)
        total = num_tokens * len(scheduled)
        return SchedulerOutput(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=total, **fields)


def _random_model(config: ModelConfig, device: str, max_positions: int) -> LlamaForCausalLM:
    """Drawn on the device: the host would take minutes for a large one."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config, max_positions).to(torch.bfloat16)
    model.to_empty(device=device)
    for name, slot in model.weight_slots():
        assert isinstance(slot, torch.Tensor)  # without a checkpoint nothing is packed
        slot.normal_(1.0 if "norm" in name else 0.0, DUMMY_STD)
    model.finish_loading(device)
    return model


class CountedGraphs:
    """A backend whose graphs count their replays: a step that has none runs uncaptured and does not say so."""

    def __init__(self, backend: GraphBackend):
        self._backend = backend
        self.num_replays = 0

    @property
    def num_bytes(self) -> int:
        return self._backend.num_bytes

    def capture(self, name: str, *stages: Stage) -> tuple[list["CountedGraph"], Tensors]:
        graphs, results = self._backend.capture(name, *stages)
        return [CountedGraph(self, graph) for graph in graphs], results


class CountedGraph:
    def __init__(self, counter: CountedGraphs, graph: Graph):
        self._counter = counter
        self._graph = graph

    def replay(self) -> Tensors:
        self._counter.num_replays += 1
        return self._graph.replay()


def check_replays(device: str, scale: Scale) -> Iterator[Row]:
    """Captures each default bucket of a tiny model, and compares replays with the same stages uncaptured, bit by bit:
    full and as empty as they come, greedy, drawn, and with a penalty, which takes the logits of a graph. Then the same
    for pieces of steps.
    """
    decoding = Decoding(TINY, device, scale.most_captured, max_model_len=128)
    sizes = default_capture_sizes(scale.most_captured)
    checked = CheckedGraphs(graph_backend(current_platform()), DecodeState(decoding.runner))
    backend = CountedGraphs(checked)
    start = time.perf_counter()
    decoding.runner.capture_decoding(backend, sizes)
    seconds, mib = time.perf_counter() - start, backend.num_bytes / 2**20
    yield {"what": f"capture of {len(sizes)} buckets", "seconds": round(seconds, 1), "mib": round(mib, 1)}
    for below, size in itertools.pairwise([0, *sizes]):
        row: Row = {"what": f"bucket {size}"}
        backend.num_replays = num_steps = 0
        try:
            for count, params in itertools.product({below + 1, size}, SAMPLING):
                decoding.start([1 + 7 * index % 100 for index in range(count)], **params)
                for _ in range(2):
                    decoding.step()
                num_steps += 3
            if backend.num_replays != num_steps:
                row["error"] = f"{num_steps - backend.num_replays} of {num_steps} steps ran uncaptured"
        except GraphMismatchError as error:  # the row says so, and the next bucket may be right
            row["error"] = str(error)
        yield row | {"equal_replays": backend.num_replays - ("error" in row)}
    yield from _check_pieces(decoding, sizes)


def _check_pieces(decoding: Decoding, sizes: Sequence[int]) -> Iterator[Row]:
    """Prompts of all lengths that a bucket takes; of one token they are whole steps, which are checked before."""
    decoding.compile(checked=True)
    backend = CountedGraphs(CheckedGraphs(graph_backend(current_platform()), ResultsAlone()))
    decoding.runner.capture_pieces(backend, sizes)
    num_pieces = decoding.config.num_layers + 1
    for below, size in itertools.pairwise([1, *sizes[1:]]):
        row: Row = {"what": f"pieces of {size} tokens"}
        backend.num_replays = 0
        lengths = {below + 1, size}
        try:
            for length in lengths:
                decoding.prefill(length)
            if backend.num_replays != len(lengths) * num_pieces:
                row["error"] = f"{backend.num_replays} of {len(lengths) * num_pieces} pieces ran captured"
        except GraphMismatchError as error:  # the row says so, and the next bucket may be right
            row["error"] = str(error)
        yield row | {"equal_replays": backend.num_replays - ("error" in row)}


def compare_levels(device: str, scale: Scale) -> Iterator[Row]:
    """Milliseconds of a decode step, eager and captured."""
    counts = scale.speed_counts
    decoding = Decoding(scale.speed_model, device, max(counts), _longest(scale))
    eager = {count: decoding.median_seconds(count, scale.context) for count in counts}
    decoding.compile()
    decoding.runner.capture_decoding(graph_backend(current_platform()), counts)
    for count in counts:
        captured = decoding.median_seconds(count, scale.context)
        yield {
            "what": f"{count} requests",
            "o0_ms": round(eager[count] * 1e3, 3),
            "o2_ms": round(captured * 1e3, 3),
            "times_as_fast": round(eager[count] / captured, 2),
        }


def compare_with_floor(device: str, scale: Scale) -> Iterator[Row]:
    """Milliseconds of a captured decode step beside those that reading its weights, keys and values takes alone."""
    bandwidth = _copy_bandwidth(device, scale.copied_bytes)
    yield {"what": "copy", "gb_s": round(bandwidth / 1e9, 1)}
    counts = scale.floor_counts
    decoding = Decoding(scale.floor_model, device, max(counts), _longest(scale))
    decoding.compile()
    decoding.runner.capture_decoding(graph_backend(current_platform()), counts)
    model, config = decoding.model, decoding.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.untied_head is not None:  # of the table itself a step reads a row a request
        weights -= sum(parameter.nbytes for parameter in model.embed_tokens.parameters())
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * torch.bfloat16.itemsize
    for count in counts:
        seconds = decoding.median_seconds(count, scale.context)
        floor = (weights + count * scale.context * per_token) / bandwidth
        yield {
            "what": f"{count} requests of {scale.context} tokens",
            "ms": round(seconds * 1e3, 3),
            "floor_ms": round(floor * 1e3, 3),
            "percent_of_floor": round(100 * floor / seconds, 1),
            "tok_s": round(count / seconds, 1),
        }


def compare_kernels(device: str, scale: Scale) -> Iterator[Row]:
    """Single kernels beside the bandwidth of a copy, and products beside the library's."""
    bandwidth = _copy_bandwidth(device, scale.copied_bytes)
    yield {"what": "copy", "gb_s": round(bandwidth / 1e9, 1)}
    yield from gpu_kernels.compare_kernels(device, bandwidth, is_small=scale is SCALES["tiny"])


def _longest(scale: Scale) -> int:
    return scale.context + 1 + WARM_UP_STEPS + MOST_STEPS


def _copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes per second, those read and those written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timing.measure(lambda: target.copy_(source), device, seconds=0.5).median

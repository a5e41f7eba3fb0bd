"""CUDA's graphs without a GPU: what is asked of torch.cuda, in which order, on which stream; what is refused."""

import contextlib
import gc
import weakref

import pytest
import torch

from vllm_triton.compile.graphs.backend import CaptureError
from vllm_triton.compile.graphs.cuda import CudaGraphs, HostReads, unowned
from vllm_triton.compile.pieces.source import ForwardSource, Function
from vllm_triton.ops.platforms import CPU, CUDA, HIP
from vllm_triton.ops.registry import OPS
from vllm_triton.runner import capture

DEVICE = torch.device("cuda")


class StandIn:
    """For torch.cuda: writes down what is called and on which stream, and refuses what the driver refuses."""

    def __init__(self):
        self.log = []
        self.current = "default"
        self.capturing = None
        self.breaks = False  # whether the next call of the driver spoils the capture
        self.free = 1000
        self.num_graphs = 0

    def graph_pool_handle(self):
        return "pool"

    def Stream(self, device):
        return StandInStream(self, "side")

    def current_stream(self, device):
        return StandInStream(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self):
        self.num_graphs += 1
        return StandInGraph(self, self.num_graphs)

    def mem_get_info(self, device):
        assert self.capturing is None, "the driver refuses this during a capture"
        return self.free, 2000


class StandInStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        assert self.cuda.capturing is None, "a capture would wait for what it does not contain"
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class StandInGraph:
    def __init__(self, cuda, number):
        self.cuda, self.number = cuda, number

    def capture_begin(self, pool, capture_error_mode):
        assert self.cuda.capturing is None and not gc.isenabled()
        self.cuda.capturing = self
        self.cuda.log.append(f"begin {self.number} on {self.cuda.current}: {pool}, {capture_error_mode}")

    def capture_end(self):
        assert self.cuda.capturing is self
        self.cuda.capturing = None
        self.cuda.log.append(f"end {self.number} on {self.cuda.current}")
        if self.cuda.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.free -= 10

    def replay(self):
        self.cuda.log.append(f"replay {self.number} on {self.cuda.current}")


@pytest.fixture
def cuda():
    return StandIn()


@pytest.fixture
def backend(cuda):
    return CudaGraphs(DEVICE, cuda)


def _stage(cuda, name):
    """Notes that it runs, and adds one to what it gets."""

    def stage(*inputs):
        cuda.log.append(f"{name} on {cuda.current}{' captured' if cuda.capturing else ''}")
        return tuple(each + 1 for each in inputs) or (torch.zeros(3),)

    return stage


def test_runs_all_stages_then_captures_each_on_a_stream_that_waits_and_is_waited_for(cuda, backend):
    backend.capture("step", _stage(cuda, "first"), _stage(cuda, "second"))
    assert cuda.log == [
        "side waits for default",
        "first on side",
        "second on side",
        "begin 1 on side: pool, thread_local",
        "first on side captured",
        "end 1 on side",
        "begin 2 on side: pool, thread_local",
        "second on side captured",
        "end 2 on side",
        "default waits for side",
    ]


def test_stages_replay_in_turn_on_the_current_stream(cuda, backend):
    (first, both), _ = backend.capture("step", _stage(cuda, "first"), _stage(cuda, "second"))
    cuda.log.clear()
    first.replay()
    assert cuda.log == ["replay 1 on default"]
    with cuda.stream(StandInStream(cuda, "other")):
        both.replay()
    assert cuda.log[1:] == ["replay 1 on other", "replay 2 on other"]


def test_graphs_share_a_pool_and_hold_none_of_their_results(backend):
    made = []

    def stage(*inputs):
        # Everything that stages of earlier captures returned is free by now.
        assert all(each() is None for each in made[: len(made) // 4 * 4])
        result = torch.arange(24.0).view(4, 6).t()[1:]
        made.append(weakref.ref(result))
        addresses.append(result.data_ptr())
        return (result,)

    for name in ("8", "4"):
        addresses = []
        graphs = backend.capture(name, stage, stage)[0]
        assert [graph.replay()[0].data_ptr() for graph in graphs] == addresses[2:]
    assert len(made) == 8 and all(each() is None for each in made)


def test_a_result_without_an_owner_is_the_same_tensor():
    for tensor in (torch.randn(5, 7).t()[2:], torch.ones(3, dtype=torch.bfloat16), torch.empty(0, 4)):
        alias = unowned(tensor)
        assert torch.equal(alias, tensor) and alias.dtype == tensor.dtype and alias.stride() == tensor.stride()
        assert alias.data_ptr() == tensor.data_ptr()


def test_bytes_are_what_captures_take_of_the_free_memory(cuda, backend):
    def stage():
        cuda.free -= 100 * (cuda.capturing is None)  # what a library takes at its first use is no graph's
        return ()

    backend.capture("8", stage)
    backend.capture("4", stage, stage)
    assert backend.num_bytes == 30


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_during_a_capture(cuda, backend, was_enabled, fails):
    seen = []

    def stage():
        seen.append(gc.isenabled())
        if fails and cuda.capturing:
            raise ValueError("no")
        return ()

    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
            backend.capture("step", stage)
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [was_enabled, False]


@pytest.mark.parametrize("breaks", [True, False])
def test_a_stage_that_fails_ends_its_capture_and_names_the_line(cuda, backend, breaks):
    cuda.breaks = breaks

    def stage():
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return ()

    with pytest.raises(CaptureError, match=r"graph step: operation not permitted .*test_cuda_graphs\.py:\d+: raise"):
        backend.capture("step", stage)
    assert cuda.capturing is None and cuda.log[-2:] == ["end 1 on side", "default waits for side"]
    cuda.breaks = False
    backend.capture("again", _stage(cuda, "first"))
    assert cuda.log[-2] == "end 2 on side"


def test_an_interruption_ends_the_capture_and_stays_what_it_is(cuda, backend):
    def stage():
        if cuda.capturing:
            raise KeyboardInterrupt
        return ()

    with pytest.raises(KeyboardInterrupt):
        backend.capture("step", stage)
    assert cuda.capturing is None and cuda.current == "default"


def test_a_capture_that_was_spoilt_in_silence_is_an_error(cuda, backend):
    cuda.breaks = True
    with pytest.raises(CaptureError, match="graph step: operation failed due to a previous error"):
        backend.capture("step", _stage(cuda, "first"))


X = torch.ones(4, 4)
READS = {
    "_local_scalar_dense.default reads a value on the host": lambda: X[0, 0].item(),
    "_local_scalar_dense.default reads a value": lambda: bool(X.max() == 0),
    "equal.default reads a value": lambda: torch.equal(X, X + 1),
    "nonzero.default makes a size of values": lambda: torch.where(X > 0),
    "index.Tensor makes a size of values": lambda: X[X > 0],
    "index_put_.default makes a size of values": lambda: X.clone().__setitem__(X > 0, torch.zeros(16)),
    "repeat_interleave.Tensor makes a size of values": lambda: X.repeat_interleave(torch.ones(4).int(), dim=0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("message", READS)
def test_a_host_read_is_refused_before_the_driver_sees_it(cuda, backend, message, mode):
    expected = rf"graph step: aten\.{message.replace('.', '[.]')} .*test_cuda_graphs\.py:\d+"
    with mode(), pytest.raises(CaptureError, match=expected):
        backend.capture("step", lambda: (READS[message](),))
    assert cuda.log == ["side waits for default", "default waits for side"]


def test_what_a_graph_can_hold_passes():
    index = torch.tensor([0, 2])
    with torch.inference_mode(), HostReads("step"):
        rows = torch.nn.functional.linear(X, X)[index]
        rows[index - index] = 1.0
        assert rows.to(torch.float64).shape == (2, 4)


@pytest.mark.parametrize("platform", [CUDA, HIP])
def test_a_gpu_captures_what_reads_nothing_on_the_host(monkeypatch, platform):
    monkeypatch.setattr(capture, "triton_interprets", lambda: False)
    functions = (
        Function("piece_0", True, "ops.embedding(x), ops.linear(x)"),
        Function("attention_0", False, "ops.reshape_and_cache(x), ops.paged_attention(x)"),
    )
    source, selection = ForwardSource(functions, (), ""), dict.fromkeys(OPS, "triton")

    def reasons(**different: str) -> tuple[str | None, str | None]:
        found = capture.Capturable.of(source, platform, selection | different, launches_only=False)
        return found.why_no_pieces, found.why_no_steps

    assert reasons() == (None, None)
    assert reasons(linear="torch") == (None, None)
    for op in ("paged_attention", "reshape_and_cache", "sample_tokens"):
        assert reasons(**{op: "torch"}) == (None, f"{op}=torch cannot be captured on {platform.name}")
    assert reasons(linear="reference") == (f"linear=reference cannot be captured on {platform.name}",) * 2
    monkeypatch.setattr(capture, "triton_interprets", lambda: True)
    assert reasons() == ("Triton's interpreter launches nothing",) * 2


def test_each_platform_has_its_backend(monkeypatch):
    monkeypatch.setattr(capture, "CudaGraphs", lambda device: f"graphs of {device}")
    assert [capture.graph_backend(platform) for platform in (CUDA, HIP)] == ["graphs of cuda"] * 2
    assert isinstance(capture.graph_backend(CPU), capture.CpuGraphs)

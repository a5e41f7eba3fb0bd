"""A GPU's graphs: work that its driver wrote down from a stream, launched again by one call; CUDA's, and HIP's alike.

A region runs once uncaptured, watched for what no graph can hold: there kernels compile and libraries allocate, which
they must not do while the driver writes. Then each stage is captured alone. A graph cannot be extended, so the one of
the first two stages is both of theirs launched in turn; capturing the first stage again inside of it would take twice
the time and the memory, and would save one launch, which the host makes while the first graph still runs.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_triton.compile.graphs.backend import CaptureError, Stage, Tensors
from vllm_triton.compile.graphs.watching import WatchedCalls, calling_line, raising_line
from vllm_triton.ops.launch import without_garbage_collection

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
# They make sizes of values where an index is a mask; torch marks the first as if it always did, the others never.
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class CudaGraph:
    """One or more stages.

    Args:
        graphs: one for each stage.
        outputs: what the last one returned; their memory is the pool's.
    """

    def __init__(self, graphs: Sequence[Any], outputs: Tensors):
        self._graphs = graphs
        self._outputs = outputs

    def replay(self) -> Tensors:
        """Runs it on the current stream."""
        for graph in self._graphs:
            graph.replay()
        return self._outputs


class CudaGraphs:
    """Captures on a stream of its own; all graphs share one memory pool.

    Args:
        device: with or without an index.
        cuda: torch.cuda, or what a test puts in its place.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._pool = cuda.graph_pool_handle()
        # The same for all: memory that one stream's work has freed is not for another's, and libraries have a
        # workspace for each stream.
        self._stream = cuda.Stream(device)
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What captures took of the device's free memory, the driver's part with it."""
        return self._num_bytes

    def capture(self, name: str, *stages: Stage) -> tuple[list[CudaGraph], Tensors]:
        """Runs the stages once, then captures them, without running. Kernels that are missing are compiled.

        Raises: CaptureError, which names the call that reads a value on the host, or what else the driver refuses; what
            the stages raise when they run.
        """
        with self._own_stream():
            outputs: Tensors = ()
            with HostReads(name):
                for stage in stages:
                    outputs = stage(*outputs)
            del outputs
            # What a collection frees may call the driver in ways that a capture forbids.
            with without_garbage_collection():
                return self._capture(name, stages)

    def _capture(self, name: str, stages: Sequence[Stage]) -> tuple[list[CudaGraph], Tensors]:
        free_before = self._cuda.mem_get_info(self._device)[0]
        graphs: list[Any] = []
        outputs: list[Tensors] = []  # held until the end, so that no stage overwrites what one before it returned
        for stage in stages:
            graphs.append(self._cuda.CUDAGraph())
            outputs.append(self._capture_stage(name, graphs[-1], stage, outputs[-1] if outputs else ()))
        self._num_bytes += max(free_before - self._cuda.mem_get_info(self._device)[0], 0)
        made = [CudaGraph(graphs[: end + 1], tuple(map(unowned, results))) for end, results in enumerate(outputs)]
        return made, outputs[-1]

    def _capture_stage(self, name: str, graph: Any, stage: Stage, arguments: Tensors) -> Tensors:
        # Calls that a capture forbids, such as allocating, are forbidden to this thread alone: others serve requests.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = stage(*arguments)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the driver says once more that the capture has failed
                graph.capture_end()
            if isinstance(error, Exception):
                raise CaptureError(f"graph {name}: {error} ({raising_line(error)})") from error
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(f"graph {name}: {error}") from error
        return results

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Runs the block on this backend's stream, after what was asked of the current one and before what will be."""
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without keeping it from others: for the results of a graph, whose place is the pool's.

    Else each graph's logits had memory of their own: 130 MB for 512 requests and 128k tokens.
    """
    storage = tensor.untyped_storage()
    # Torch's own trees of graphs hold their results by the same call, so that it lives as long as they do.
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


class HostReads(WatchedCalls):
    """Refuses calls that read values on the host, or make sizes of them: a replay could not do so again."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace == "aten":
            with self:  # composite calls come whole in inference mode; their parts are what counts
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        problem = _problem(func, args, kwargs)
        if problem is not None:
            raise CaptureError(
                f"graph {self.name}: {func} {problem} and cannot be captured: call it before or after what is "
                f"captured ({calling_line()})"
            )
        return func(*args, **kwargs)


def _problem(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if func in _INDEXING:
        is_masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return "makes a size of values" if is_masked else None
    if func in _COPIES:
        source = args[1] if func is _aten.copy_.default else args[0]
        target = torch.device(kwargs.get("device") or args[0].device)
        return "copies between host and device" if source.device.type != target.type else None
    if torch.Tag.data_dependent_output in func.tags:
        return "reads a value on the host"
    return "makes a size of values" if torch.Tag.dynamic_output_shape in func.tags else None

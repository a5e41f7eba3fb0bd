"""Sees the torch calls of a region that is to be captured, and finds the line of one that cannot be."""

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_triton.ops.registry import NAMESPACE, OPS

_aten = torch.ops.aten
# Calls whose results hold what happened to be in memory.
ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_NOT_OURS = (Path(__file__).parent, Path(torch.__file__).parent, Path(triton.__file__).parent)


class WatchedCalls(TorchDispatchMode):
    """Every torch call inside the block goes through `call`; those that an op makes as well, in place of the op's.

    Args: name: of the graph, for errors.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise import Dynamo, which takes a second, to keep it out of here."""
        return False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """In place of a torch call, whose results it returns."""
        return func(*args, **kwargs)

    def on_op(self, op: str, outputs: tuple[torch.Tensor, ...]) -> None:
        """After an op: outputs are what it returned, then what it wrote into its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != NAMESPACE:
            return self.call(func, args, kwargs)
        op = OPS[func._schema.name.partition("::")[2]]
        with self:
            results = op.implementation_now()(*args, **kwargs)
        self.on_op(op.name, op.contract.outputs(args, results))
        return results


def returns_views(func: Any) -> bool:
    """Whether all that a torch call returns is its arguments' memory, unchanged."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def calling_line() -> str:
    """Where the call that is being watched was made."""
    return innermost_line(traceback.extract_stack())


def raising_line(error: BaseException) -> str:
    """Where the call was made that raised."""
    return innermost_line(traceback.extract_tb(error.__traceback__))


def innermost_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The last of these lines that is neither torch's nor Triton's nor in this folder."""
    for frame in reversed(list(frames)):
        if not any(folder in Path(frame.filename).parents for folder in _NOT_OURS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "called from nowhere"

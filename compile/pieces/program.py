"""A forward that runs as its written source says, piece by piece."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_triton.compile.graphs.modes import Dispatch, RuntimeMode
from vllm_triton.compile.graphs.wrapper import GraphWrapper
from vllm_triton.compile.pieces.compilers import Runnable, chosen_implementations, define
from vllm_triton.compile.pieces.source import ForwardSource
from vllm_triton.ops.registry import OPS


class Program:
    """Args:
    source: what to run.
    pieces: by name, what runs them.
    constants: by name, as in the trace.
    ops: what runs the ops between pieces; by default their chosen implementations.
    """

    def __init__(
        self,
        source: ForwardSource,
        pieces: Mapping[str, Runnable],
        constants: Mapping[str, torch.Tensor],
        ops: Mapping[str, Callable[..., Any]] | None = None,
    ):
        self.source = source
        self._constants = constants
        self._forward = define("forward", source.text, {})
        implementations = ops or chosen_implementations()
        attention = {
            function.name: define(function.name, function.text, implementations)
            for function in source.functions
            if not function.is_piece
        }
        self._calls: list[Callable[..., Any]] = []
        for number, call in enumerate(source.calls):
            own = [constants[name] for name in call.constants]
            if call.function in attention:
                self._calls.append(_uncaptured(attention[call.function], own))
            else:
                name = f"{call.function}, call {number} of the forward"
                self._calls.append(GraphWrapper(name, RuntimeMode.PIECEWISE, pieces[call.function], own))

    def __call__(self, step: Dispatch, num_tokens: int, *inputs: torch.Tensor) -> torch.Tensor:
        """Args: inputs: as in the trace; in a step of PIECEWISE graphs, where they lay when these were captured."""
        return self._forward(self._calls, step, num_tokens, *inputs)

    def with_ops(self, ops: Mapping[str, Callable[..., Any]]) -> "Program":
        """The same forward, uncompiled, with these functions for its ops."""
        pieces = {piece.name: define(piece.name, piece.text, ops) for piece in self.source.pieces}
        return Program(self.source, pieces, self._constants, ops)

    def through_dispatcher(self) -> "Program":
        """The same forward, uncompiled, whose ops torch's dispatch modes see."""
        return self.with_ops({name: op.torch_op for name, op in OPS.items()})


def _uncaptured(function: Callable[..., Any], constants: Sequence[torch.Tensor]) -> Callable[..., Any]:
    return lambda step, num_tokens, *inputs: function(num_tokens, *inputs, *constants)

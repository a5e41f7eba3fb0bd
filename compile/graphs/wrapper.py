"""A callable that is captured for some steps, replayed in later ones like them, and runs as it is in all others."""

from collections.abc import Callable, Sequence

import torch

from vllm_triton.compile.graphs.backend import Graph, Tensors
from vllm_triton.compile.graphs.modes import BatchDescriptor, Dispatch, RuntimeMode


class GraphWrapper:
    """Wrappers may contain one another: only those of the step's mode act.

    It copies no inputs: in every step of a descriptor they must lie where they lay when it was captured, as static
    buffers and results of other graphs do.

    Args:
        name: for errors.
        mode: of the steps in which it acts.
        runnable: takes the number of tokens and tensors, returns tensors.
        constants: tensors that it takes after those of the step.
    """

    def __init__(
        self, name: str, mode: RuntimeMode, runnable: Callable[..., Tensors], constants: Sequence[torch.Tensor] = ()
    ):
        self._name = name
        self._mode = mode
        self._runnable = runnable
        self._constants = tuple(constants)
        self._graphs: dict[BatchDescriptor, tuple[Graph, list[int]]] = {}
        # Of the call that runs: a stage that kept them would keep their memory from later captures.
        self._inputs: Sequence[torch.Tensor] = ()

    def __call__(self, step: Dispatch, num_tokens: int, *inputs: torch.Tensor) -> Tensors:
        """Raises: ValueError where an input has moved since the capture; KeyError where there was none."""
        if step.mode is not self._mode:
            return self._runnable(num_tokens, *inputs, *self._constants)
        self._inputs = inputs
        try:
            return self._run(step, num_tokens)
        finally:
            self._inputs = ()

    def _run(self, step: Dispatch, num_tokens: int) -> Tensors:
        addresses = [tensor.data_ptr() for tensor in self._inputs]
        if step.captures_into is not None:
            name = f"{self._name} of {num_tokens} tokens"
            (graph,), results = step.captures_into.capture(
                name, lambda: self._runnable(num_tokens, *self._inputs, *self._constants)
            )
            self._graphs[step.descriptor] = graph, addresses
            return results
        graph, captured = self._graphs[step.descriptor]
        if addresses != captured:
            moved = [
                number for number, (one, other) in enumerate(zip(addresses, captured, strict=True)) if one != other
            ]
            raise ValueError(f"{self._name}: input {moved[0]} has moved since {step.descriptor} was captured")
        return graph.replay()

"""One trace of a forward on tensors without values, with the number of tokens unknown.

The trace goes through torch's dispatcher: it sees every op and every torch call of the forward, however Python came to
them. What Python decides stays decided, so a decision that depends on an unknown size is an error; but for one between
1 and more: torch takes an unknown size for at least 2 and does not say so. A forward must not tell one token apart.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_triton.compile.pieces.errors import TraceError

# Sizes that the trace sees for unknown ones, in turn; such that no model's own size is among them, and that two unknown
# sizes are never taken for one.
_HINTS = (8191, 6133, 4057, 3067)


@dataclass(frozen=True)
class InputSpec:
    """An input that differs from step to step.

    shape: numbers, and names of unknown sizes, plus a number where it says so: ("T",), ("B + 1",), ("B", "M").
    """

    shape: tuple[str | int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Trace:
    """graph: of torch.fx, whose placeholders have the names of inputs and constants; every node's meta has its "val".

    inputs, constants: those names, in the order of the placeholders.
    symbols: the name of each unknown size, by torch's own symbol for it.
    """

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    symbols: Mapping[str, str]


def trace(
    forward: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor],
    inputs: Mapping[str, InputSpec],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Trace:
    """Runs `forward(inputs, constants)` on tensors without values.

    Args:
        constants: what is the same in all steps: weights and KV caches.
    Raises: TraceError where the forward decides something by an unknown size or by a value.
    """
    # They take torch a second to import, which a start that finds its forward in the cache does without.
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    # Tensors from elsewhere come through as attributes, which write_source refuses.
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    sizes = Sizes(shape_env)
    with mode:
        fake_inputs = {
            name: torch.empty([sizes.of(size) for size in spec.shape], dtype=spec.dtype, device=device)
            for name, spec in inputs.items()
        }
        fake_constants = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            for name, tensor in constants.items()
        }

    def flat(*tensors: torch.Tensor) -> torch.Tensor:
        first = tensors[: len(inputs)]
        return forward(dict(zip(inputs, first, strict=True)), dict(zip(constants, tensors[len(inputs) :], strict=True)))

    try:
        with torch.no_grad():
            module = make_fx(flat)(*fake_inputs.values(), *fake_constants.values())
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise TraceError(f"the forward depends on a value of a tensor, which a trace has not: {error}") from error
    guards = [guard for guard in shape_env.guards if guard.expr is not True]
    if guards:
        raise TraceError(
            f"the forward decides something by an unknown size: {sizes.named(guards[0].expr)} {guards[0].sloc}; "
            "it must do the same for all (x.shape[0] is a size that may stay unknown, len(x) is not)"
        )
    return Trace(module.graph, tuple(inputs), tuple(constants), sizes.names())


class Sizes:
    """Unknown sizes by name."""

    def __init__(self, shape_env: Any):
        self._shape_env = shape_env
        self._known: dict[str, Any] = {}

    def of(self, size: str | int) -> Any:
        if isinstance(size, int):
            return size
        name, _, more = size.partition(" + ")
        if name not in self._known:
            self._known[name] = self._new(name, _HINTS[len(self._known)])
        return self._known[name] + int(more or 0)

    def within(self, name: str, least: int, most: int) -> Any:
        """An unknown size of which so much is known. For torch it is at least 2, and more than one number."""
        self._known[name] = size = self._new(name, max(most, 3))
        self._shape_env.constrain_symbol_range(size.node.expr, max(least, 2), max(most, 3))
        return size

    def _new(self, name: str, hint: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"size_{name}")
        symbol = self._shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return self._shape_env.create_symintnode(symbol, hint=hint, source=source)

    def names(self) -> dict[str, str]:
        return {str(size.node.expr): name for name, size in self._known.items()}

    def named(self, expression: Any) -> str:
        """An expression of torch's, in the names of these sizes."""
        text = str(expression)
        for symbol, name in self.names().items():
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text

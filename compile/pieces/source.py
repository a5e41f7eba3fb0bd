"""A traced forward written as Python: one function for each different stretch of it, and one that calls them.

The forward is cut where ops use the KV cache, whose tables have sizes of their own; what lies between, a piece, knows
one unknown size, T, the number of tokens. Stretches that differ only in their weights are one function, called with
other constants. The text is what runs, what the disk cache holds, and what compilers for pieces start from.
"""

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_triton.compile.pieces.errors import TraceError
from vllm_triton.compile.pieces.trace import Trace
from vllm_triton.ops.registry import NAMESPACE, OPS

TOKENS = "T"
Dim = int | str  # an expression of T where it is a string


@dataclass(frozen=True)
class TensorSpec:
    """What a function takes for one of its parameters; dtype and device by torch's names."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class Function:
    """One stretch: its parameters after T are `inputs`, which differ from step to step, then `constants`.

    is_piece: it is no stretch of ops that use the KV cache.
    parameters: of a piece, what it takes for inputs and constants.
    """

    name: str
    is_piece: bool
    text: str
    parameters: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class Call:
    """One place in the forward: the function that runs there, and the names of its constants."""

    function: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class ForwardSource:
    """text: of `forward(calls, step, T, *inputs)`, where calls[n](step, T, *inputs) stands for the n-th of `calls`."""

    functions: tuple[Function, ...]
    calls: tuple[Call, ...]
    text: str

    @property
    def pieces(self) -> list[Function]:
        return [function for function in self.functions if function.is_piece]

    @staticmethod
    def ops_of(functions: Iterable[Function]) -> set[str]:
        """Names of the registry's ops that they call."""
        return {name for function in functions for name in re.findall(r"\bops\.(\w+)\(", function.text)}

    @property
    def module(self) -> str:
        """All of it as one file."""
        return "\n\n".join([*(function.text for function in self.functions), self.text])


def write_source(trace: Trace) -> ForwardSource:
    """Raises: TraceError where a piece depends on another unknown size than T."""
    return _Writer(trace).write()


Node = torch.fx.Node
_WRITTEN_AS_THEMSELVES = (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)


class _Writer:
    def __init__(self, trace: Trace):
        self._trace = trace
        self._constants: dict[Node, str] = {}
        self._inputs: dict[Node, str] = {}
        self._region: dict[Node, int] = {}
        self._regions: list[list[Node]] = []
        self._find_regions()

    def write(self) -> ForwardSource:
        functions: dict[tuple[Any, ...], Function] = {}
        calls: list[Call] = []
        lines: list[str] = []
        last_uses = self._last_uses()
        for number, nodes in enumerate(self._regions):
            is_piece = not _uses_cache(nodes[0])
            inputs, constants, results = self._interface(number)
            body, parameters = self._body(nodes, inputs, constants, results)
            key = (is_piece, body, parameters if is_piece else ())
            if key not in functions:
                kind = "piece" if is_piece else "attention"
                name = f"{kind}_{sum(function.is_piece == is_piece for function in functions.values())}"
                functions[key] = Function(name, is_piece, f"def {name}({body}", key[2])
            calls.append(Call(functions[key].name, tuple(self._constants[node] for node in constants)))
            arguments = ", ".join(["step", TOKENS, *map(self._name, inputs)])
            call = f"calls[{number}]({arguments})"
            lines.append(f"{_tuple(map(self._name, results))} = {call}" if results else call)
            if dead := [self._name(node) for node in last_uses.get(number, ())]:
                lines.append(f"del {', '.join(dead)}")
        (output,) = self._trace.graph.find_nodes(op="output")
        lines.append(f"return {self._value(output.args[0])}")
        head = f"def forward({', '.join(['calls', 'step', TOKENS, *self._trace.inputs])}):"
        return ForwardSource(tuple(functions.values()), tuple(calls), _indented(head, lines))

    def _find_regions(self) -> None:
        names = iter([*self._trace.inputs, *self._trace.constants])
        for node in self._trace.graph.nodes:
            if node.op == "placeholder":
                name = next(names)
                (self._inputs if len(self._inputs) < len(self._trace.inputs) else self._constants)[node] = name
            elif node.op == "get_attr":
                raise TraceError(
                    f"the forward makes a tensor of its own from values ({node.format_node()}): let the "
                    "model keep it as a buffer"
                )
            elif node.op == "call_function" and not _is_size(node):
                self._place(node)

    def _place(self, node: Node) -> None:
        if node.target is operator.getitem:  # of several results
            number = self._region[node.all_input_nodes[0]]
        else:
            if not self._regions or _uses_cache(self._regions[-1][0]) != _uses_cache(node):
                self._regions.append([])
            number = len(self._regions) - 1
        self._regions[number].append(node)
        self._region[node] = number

    def _interface(self, number: int) -> tuple[list[Node], list[Node], list[Node]]:
        """(inputs, constants, results) of a region, in the order in which they come up."""
        used = dict.fromkeys(node for each in self._regions[number] for node in each.all_input_nodes)
        outside = [node for node in used if not _is_size(node) and self._region.get(node) != number]
        results = [
            node
            for node in self._regions[number]
            if any(user.op == "output" or self._region.get(user) != number for user in node.users if not _is_size(user))
        ]
        return (
            [node for node in outside if node not in self._constants],
            [node for node in outside if node in self._constants],
            results,
        )

    def _body(
        self, nodes: list[Node], inputs: list[Node], constants: list[Node], results: list[Node]
    ) -> tuple[str, tuple[TensorSpec, ...]]:
        """The function's text behind its name, in names that do not tell equal regions apart."""
        names = _Names()
        parameters = {node: names.new(self._inputs.get(node, "x")) for node in inputs}
        parameters |= {node: names.new(_without_layer(self._constants[node])) for node in constants}
        known = dict(parameters)
        lines = []
        for position, node in enumerate(nodes):
            if node.target is operator.getitem:
                continue  # taken apart where it was made
            targets = self._targets(node, names, known)
            lines.append(f"{targets} = {self._call(node, known)}" if targets else self._call(node, known))
            later = nodes[position + 1 :]
            dead = [
                known[each]
                for each in node.all_input_nodes
                if each in known
                and each not in parameters
                and each not in results
                and not any(user in later for user in each.users)
            ]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        lines.append(f"return {_tuple(known[node] for node in results)}")
        head = f"{', '.join([TOKENS, *parameters.values()])}):"
        specs = tuple(self._spec(node) for node in parameters) if not _uses_cache(nodes[0]) else ()
        return _indented(head, lines), specs

    def _targets(self, node: Node, names: "_Names", known: dict[Node, str]) -> str:
        """What a node's results are assigned to, which is from then on known."""
        name = _op_name(node)
        if not isinstance(node.meta.get("val"), tuple | list):
            if node.users:
                known[node] = names.new(name)
            return known.get(node, "")
        parts = {user.args[1]: user for user in node.users}
        known |= {part: names.new(name) for _, part in sorted(parts.items())}
        return _tuple(known[parts[index]] if index in parts else "_" for index in range(len(node.meta["val"])))

    def _call(self, node: Node, known: dict[Node, str]) -> str:
        arguments = [self._value(each, known) for each in node.args]
        arguments += [f"{name}={self._value(each, known)}" for name, each in node.kwargs.items()]
        return f"{_target(node)}({', '.join(arguments)})"

    def _value(self, value: Any, known: dict[Node, str] | None = None) -> str:
        if isinstance(value, Node):
            if _is_size(value):
                return str(self._size(value.meta["val"]))
            return known[value] if known is not None else self._name(value)
        if isinstance(value, list | tuple):
            inside = [self._value(each, known) for each in value]
            return f"[{', '.join(inside)}]" if isinstance(value, list) else _tuple(inside)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, _WRITTEN_AS_THEMSELVES):
            return repr(value)
        raise TraceError(f"the forward calls an op with {value!r}, which cannot be written down")

    def _size(self, size: int | torch.SymInt) -> Dim:
        """A size as it stands in the text."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        unknown = {str(symbol): self._trace.symbols.get(str(symbol)) for symbol in expression.free_symbols}
        others = [name or "depends on values" for name in unknown.values() if name != TOKENS]
        if others:
            raise TraceError(
                f"a piece may have one unknown size, the number of tokens {TOKENS}, got another ({', '.join(others)}): "
                "only ops that use the KV cache know it"
            )
        return re.sub(r"\bs\d+\b", TOKENS, str(expression))

    def _spec(self, node: Node) -> TensorSpec:
        value = node.meta["val"]
        return TensorSpec(
            tuple(map(self._size, value.shape)),
            tuple(map(self._size, value.stride())),
            str(value.dtype).removeprefix("torch."),
            str(value.device),
        )

    def _name(self, node: Node) -> str:
        """In `forward`, where each value has a name of its own."""
        return self._inputs.get(node) or node.name

    def _last_uses(self) -> dict[int, list[Node]]:
        """The values between regions that nobody needs after region n, by n."""
        uses: dict[int, list[Node]] = {}
        for node, number in self._region.items():
            users = [self._region.get(user, len(self._regions)) for user in node.users if not _is_size(user)]
            if users and number < max(users) < len(self._regions):
                uses.setdefault(max(users), []).append(node)
        return uses


class _Names:
    """Fresh names: linear, linear_1, ..."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def new(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}_{count}" if count else name


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor | tuple | list | None)


def _uses_cache(node: Node) -> bool:
    return _op_name(node) in OPS and OPS[_op_name(node)].contract.uses_kv_cache


def _op_name(node: Node) -> str:
    """As "linear" or "view"."""
    return str(node.target).split(".")[-2] if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _target(node: Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TraceError(f"the forward calls {node.target}, which is neither an op of the registry nor torch's")
    if node.target.namespace == NAMESPACE:
        return f"ops.{_op_name(node)}"
    return str(node.target)  # aten.view.default


def _without_layer(constant: str) -> str:
    """A constant's name in a function that serves all layers: "layers.3.mlp.weight" -> "mlp_weight"."""
    return "_".join(part for part in constant.split(".") if not part.isdigit() and part != "layers")


def _tuple(parts: Any) -> str:
    parts = list(parts)
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _indented(head: str, lines: list[str]) -> str:
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"

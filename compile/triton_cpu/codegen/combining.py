"""The region of a reduction or a scan that combines two values: in place, or as a function that reductions share."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Names, Nest
from vllm_triton.compile.triton_cpu.codegen.types import LANES, literal, vector
from vllm_triton.compile.triton_cpu.ir import Block, Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

_NAN, _INFINITY = float("nan"), float("inf")
# What leaves every other operand as it is. -0.0 + 0.0 is 0.0, and maxnum passes NaN over.
_NEUTRAL = {
    "arith.addf": -0.0,
    "arith.mulf": 1.0,
    "arith.maxnumf": _NAN,
    "arith.minnumf": _NAN,
    "arith.maximumf": -_INFINITY,
    "arith.minimumf": _INFINITY,
    "arith.addi": 0,
    "arith.muli": 1,
    "arith.ori": 0,
    "arith.xori": 0,
    "arith.andi": -1,
    "arith.maxui": 0,
    "arith.minui": -1,
}


def neutral(operation: Operation) -> str | None:
    """C++ of the scalar to start from where a region is one operation that has one; None for any other region."""
    block, element = operation.regions[0].block, operation.operands[0].type.element
    if len(block.operations) != 2 or element == "i1":
        return None
    only = block.operations[0]
    if set(only.operands) != set(block.arguments) or block.terminator.operands != only.results:
        return None
    if only.name in ("arith.maxsi", "arith.minsi"):
        lowest = -(1 << int(element[1:]) - 1)
        return literal(lowest if only.name == "arith.maxsi" else ~lowest, element)
    return literal(_NEUTRAL[only.name], element) if only.name in _NEUTRAL else None


def combine(
    generator: "Generator", nest: Nest, block: Block, left: list[str], right: list[str], kind: str
) -> list[Expression]:
    """The region at the innermost depth of a nest, for lanes or for scalars."""
    outside = nest.memo
    nest.memo = dict(outside)
    for argument, text in zip(block.arguments, [*left, *right], strict=True):
        nest.memo[argument, ()] = Expression(text, argument.type.element, nest.depth, kind)  # type: ignore[arg-type]
    found = [generator.evaluate(operand, (), nest) for operand in block.terminator.operands]
    nest.memo = outside  # the region's values are others at its next use
    return found


def set_together(nest: Nest, places: list[str], texts: list[str]) -> None:
    """Assignments that read all texts before they write a place."""
    fresh = [nest.names.new("c") for _ in places]
    for new, text in zip(fresh, texts, strict=True):
        nest.emit(f"const auto {new} = {text};")
    for place, new in zip(places, fresh, strict=True):
        nest.emit(f"{place} = {new};")


def fold(generator: "Generator", names: Names, block: Block, vectors: list[list[str]]) -> list[str]:
    """Statements that combine vectors, pairwise, and their lanes, into lane 0 of the first.

    vectors: C++ variables for each operand, a power of two of them.
    """
    lines: list[str] = []

    def step(left: list[str], right: list[str]) -> None:
        nest = Nest((), names)
        set_together(nest, left, [as_vector(value) for value in combine(generator, nest, block, left, right, "vector")])
        lines.extend(nest.lines())

    count = len(vectors[0])
    while count > 1:
        count //= 2
        for number in range(count):
            step([each[number] for each in vectors], [each[number + count] for each in vectors])
    firsts = [each[0] for each in vectors]
    distance = LANES
    while distance > 1:
        distance //= 2
        step(firsts, [f"tcpu::shift_down<{distance}>({name})" for name in firsts])
    return lines


def folded(generator: "Generator", operation: Operation, names: list[str]) -> str | None:
    """C++ of the scalar that the region makes of these vectors' lanes, by a function that all such folds of the program
    call, so that the compiler sees it once; None for regions of several operands or that read other values."""
    block = operation.regions[0].block
    if len(operation.operands) > 1 or not _is_closed(block.terminator.operands[0], block):
        return None
    parameters = [f"v{number}" for number in range(len(names))]
    head = ", ".join(f"{vector(operation.operands[0].type.element)} {name}" for name in parameters)
    body = [*fold(generator, Names(), block, [parameters]), f"return {parameters[0]}[0];"]
    function = generator.program.share(f"({head}) {{\n" + "\n".join(body) + "\n}")
    return f"{function}({', '.join(names)})"


def _is_closed(value: Value, block: Block) -> bool:
    """Whether a region computes a value from its arguments alone."""
    if value in block.arguments:
        return True
    producer = value.producer
    if producer not in block.operations or producer.regions:
        return False
    return all(_is_closed(operand, block) for operand in producer.operands)

"""Operations that compute each element from the same element of their operands.

A template holds {0}, {1}, ... for the operands. "{...}" of a function call works for scalars and vectors alike, since
the runtime overloads its functions; a vector template is given apart where C++ has no operator for it.
"""

from collections.abc import Callable
from dataclasses import replace

from vllm_triton.compile.triton_cpu.codegen import expressions, ranges
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.types import HALVES, STORAGE, UNSIGNED, register, scalar, vector
from vllm_triton.compile.triton_cpu.ir import Operation, Value

_BINARY_OPERATORS = {
    "arith.addf": "+",
    "arith.subf": "-",
    "arith.mulf": "*",
    "arith.divf": "/",
    "tt.precise_divf": "/",
    "arith.andi": "&",
    "arith.ori": "|",
    "arith.xori": "^",
}
# name -> (function of the runtime, whether its operands are unsigned)
_CALLS = {
    "arith.remf": ("rem", False),
    "arith.minimumf": ("minimum", False),
    "arith.maximumf": ("maximum", False),
    "arith.minnumf": ("minnum", False),
    "arith.maxnumf": ("maxnum", False),
    "arith.divsi": ("div", False),
    "arith.divui": ("div", True),
    "arith.remsi": ("rem", False),
    "arith.remui": ("rem", True),
    "arith.minsi": ("min", False),
    "arith.maxsi": ("max", False),
    "arith.minui": ("min", True),
    "arith.maxui": ("max", True),
    "arith.shli": ("shl", True),
    "arith.shrui": ("shr", True),
    "arith.shrsi": ("shr", False),
    "tt.mulhiui": ("mulhi", True),
    "math.exp": ("exp", False),
    "math.exp2": ("exp2", False),
    "math.log": ("log", False),
    "math.log2": ("log2", False),
    "math.sin": ("sin", False),
    "math.cos": ("cos", False),
    "math.sqrt": ("sqrt", False),
    "tt.precise_sqrt": ("sqrt", False),
    "math.rsqrt": ("rsqrt", False),
    "math.erf": ("erf", False),
    "math.floor": ("floor", False),
    "math.ceil": ("ceil", False),
    "math.absf": ("abs", False),
    "math.absi": ("abs", False),
    "math.fma": ("fma", False),
    "math.tanh": ("tanh", False),
}
_INTEGER_COMPARISONS = {"eq": "eq", "ne": "ne"} | {s + p: p for s in "su" for p in ("lt", "le", "gt", "ge")}
_SCALAR_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CONVERSIONS = (
    "arith.extf",
    "arith.truncf",
    "tt.fp_to_fp",
    "arith.sitofp",
    "arith.uitofp",
    "arith.fptosi",
    "arith.fptoui",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "arith.index_cast",
)
# libdevice functions that the runtime has under the same name, after "__nv_" and a trailing "f" are taken off.
_EXTERN = {"tanh": "tanh", "pow": "pow", "exp": "exp", "log": "log", "rsqrt": "rsqrt", "erf": "erf", "floor": "floor"}
_EXTERN |= {"sqrt": "sqrt", "ceil": "ceil", "fabs": "abs", "exp2": "exp2", "log2": "log2", "sin": "sin", "cos": "cos"}

NAMES = frozenset(
    {*_BINARY_OPERATORS, *_CALLS, *_CONVERSIONS}
    | {"arith.addi", "arith.subi", "arith.muli", "arith.cmpi", "arith.cmpf", "arith.select", "arith.negf"}
    | {"tt.bitcast", "arith.bitcast", "tt.clampf", "tt.extern_elementwise", "tt.int_to_ptr", "tt.ptr_to_int"}
)
# What one element costs, roughly in additions; everything else counts 1.
COST = dict.fromkeys([name for name in _CALLS if name.startswith("math.")], 12) | {
    "arith.divf": 5,
    "tt.precise_divf": 5,
    "arith.divsi": 8,
    "arith.divui": 8,
    "arith.remsi": 8,
    "arith.remui": 8,
    "arith.remf": 20,
    "tt.extern_elementwise": 15,
    "tt.mulhiui": 4,
}


def is_rounding(operation: Operation) -> bool:
    """Whether the operation rounds a float to a small float, to nearest."""
    if operation.name not in ("arith.truncf", "tt.fp_to_fp") or operation.result.type.element not in HALVES:
        return False
    return operation.operands[0].type.element == "f32" and not _rounds_toward_zero(operation)


def _rounds_toward_zero(operation: Operation) -> bool:
    return "rtz" in (operation.attributes.get("rounding"), *operation.words)


def compute(operation: Operation, operands: list[Expression]) -> Expression:
    """The operation's value at one chunk. Raises: UnsupportedOperationError."""
    name, element = operation.name, operation.result.type.element
    if name == "arith.addi" and element != "i1":
        return expressions.add(*operands)
    if name == "arith.subi" and element != "i1":
        return expressions.subtract(*operands)
    if name == "arith.muli" and element != "i1":
        return expressions.multiply(*operands)
    if name == "arith.andi" and element == "i1":
        return expressions.both(*operands)
    if name in ("arith.divsi", "arith.remsi") and (divisor := _constant(operation.operands[1])):
        divided = expressions.divide(operands[0], divisor, remainder=name == "arith.remsi")
        if divided is not None:
            return divided
    if name == "arith.cmpi":
        return _compare_integers(operation, operands)
    if name == "arith.cmpf":
        return _compare_floats(operation, operands)
    if name == "arith.select":
        return _select(operation, operands)
    if name in _CONVERSIONS:
        return _convert(operation, operands[0])
    if name in ("tt.bitcast", "arith.bitcast"):
        return _bitcast(operation, operands[0])
    if name in ("tt.int_to_ptr", "tt.ptr_to_int"):
        return _apply(element, operands, lambda texts: texts[0])
    template = _template(operation, operands)
    return _apply(element, operands, template, rounds=element in HALVES)


def _apply(
    element: str, operands: list[Expression], template: Callable[[list[str]], str], rounds: bool = False
) -> Expression:
    """Scalars where all operands are uniform, vectors otherwise."""
    level = max(operand.level for operand in operands)
    if all(operand.is_uniform for operand in operands):
        text = template([operand.text for operand in operands])
        if rounds:
            text = _rounded(text, element)
        return Expression(f"{scalar(element)}({text})", element, level)
    text = template([as_vector(operand) for operand in operands])
    if rounds:
        text = _rounded(text, element)
    return Expression(f"(({vector(element)})({text}))", element, level, "vector")


def _rounded(text: str, element: str) -> str:
    """A float as the small float would hold it."""
    return f"tcpu::convert<float, {STORAGE[element]}>({text})"


def _template(operation: Operation, operands: list[Expression]) -> Callable[[list[str]], str]:
    name, element = operation.name, operation.result.type.element
    if name in ("arith.addi", "arith.subi"):  # of i1
        return lambda texts: f"({texts[0]} ^ {texts[1]})"
    if name == "arith.muli":
        return lambda texts: f"({texts[0]} & {texts[1]})"
    if name in _BINARY_OPERATORS:
        sign = _BINARY_OPERATORS[name]
        return lambda texts: f"({texts[0]} {sign} {texts[1]})"
    if name == "arith.negf":
        return lambda texts: f"(-{texts[0]})"
    if name == "tt.clampf":
        propagates = "all" in operation.words or operation.attributes.get("propagateNan") in ("all", 1)
        low, high = ("maximum", "minimum") if propagates else ("maxnum", "minnum")
        return lambda texts: f"tcpu::{high}(tcpu::{low}({texts[0]}, {texts[1]}), {texts[2]})"
    if name == "tt.extern_elementwise":
        symbol = str(operation.attributes.get("symbol", "")).removeprefix("__nv_")
        function = _EXTERN.get(symbol) or _EXTERN.get(symbol.removesuffix("f"))
        if function is None:
            raise operation.unsupported(f"the library function {symbol!r}")
        return lambda texts: f"tcpu::{function}({', '.join(texts)})"
    if name in ("arith.divsi", "arith.remsi") and _is_power_of_two(_constant(operation.operands[1])):
        divisor = _constant(operation.operands[1])
        return lambda texts: f"tcpu::{name[6:9]}_by<{divisor}>({texts[0]})"
    if name in _CALLS:
        function, takes_unsigned = _CALLS[name]
        if not takes_unsigned or element not in UNSIGNED:
            return lambda texts: f"tcpu::{function}({', '.join(texts)})"

        is_vector = not all(operand.is_uniform for operand in operands)
        return lambda texts: (
            f"tcpu::{function}({', '.join(expressions.unsigned(text, element, is_vector) for text in texts)})"
        )
    raise operation.unsupported()


def _is_power_of_two(number: int | None) -> bool:
    return number is not None and number.bit_count() == 1


def _constant(value: Value) -> int | None:
    """The value, if it is the same positive constant in all lanes."""
    number = value.constant
    return number if isinstance(number, int) and number > 0 else None


def _compare_integers(operation: Operation, operands: list[Expression]) -> Expression:
    predicate = next(word for word in operation.words if word in _INTEGER_COMPARISONS)
    left, right = operands
    if (known := ranges.decided(operation)) is not None:
        return expressions.uniform(str(known).lower(), "i1")
    limited = expressions.below(predicate, left, right)
    if limited is not None:
        return limited
    kind, element = _INTEGER_COMPARISONS[predicate], left.element
    level = max(left.level, right.level)
    is_vector = not (left.is_uniform and right.is_uniform)
    texts = [as_vector(operand) if is_vector else operand.text for operand in operands]
    if predicate.startswith("u") and element != "ptr":
        texts = [expressions.unsigned(text, element, is_vector) for text in texts]
    if is_vector:
        return Expression(f"tcpu::cmp_{kind}({', '.join(texts)})", "i1", level, "vector")
    return Expression(f"({texts[0]} {_SCALAR_COMPARISONS[kind]} {texts[1]})", "i1", level)


def _compare_floats(operation: Operation, operands: list[Expression]) -> Expression:
    predicates = [prefix + kind for prefix in "ou" for kind in _SCALAR_COMPARISONS] + ["ord", "uno"]
    predicate = next(word for word in operation.words if word in predicates)
    is_vector = not all(operand.is_uniform for operand in operands)
    level = max(operand.level for operand in operands)
    texts = [as_vector(operand) if is_vector else operand.text for operand in operands]
    function = f"cmp_{predicate.removeprefix('o') if predicate not in ('ord', 'one') else predicate}"
    text = f"tcpu::{function if is_vector else 'is_' + predicate}({', '.join(texts)})"
    return Expression(text, "i1", level, "vector" if is_vector else "uniform")


def _select(operation: Operation, operands: list[Expression]) -> Expression:
    condition, yes, no = operands
    element, level = operation.result.type.element, max(operand.level for operand in operands)
    if condition.is_uniform and yes.is_uniform and no.is_uniform:
        return Expression(f"({condition.text} ? {yes.text} : {no.text})", element, level, base=None)
    texts = [as_vector(operand) for operand in operands]
    return Expression(f"tcpu::select({', '.join(texts)})", element, level, "vector")


def _convert(operation: Operation, operand: Expression) -> Expression:
    """Between elements of a register; a half type is a float that was rounded."""
    name, to = operation.name, operation.result.type.element
    source = operand.element
    if name in ("arith.extsi", "arith.index_cast") and operand.kind == "affine":
        return replace(operand, text=f"int64_t({operand.text})" if to == "i64" else operand.text, element=to)
    is_vector = not operand.is_uniform
    text = as_vector(operand) if is_vector else operand.text
    unsigned_source = name in ("arith.extui", "arith.uitofp")
    if source == "i1":
        text = f"({text} & 1)" if is_vector and unsigned_source else text if is_vector else f"int32_t({text})"
        if not is_vector and not unsigned_source:
            text = f"(-{text})"
        lane = "int32_t"
    elif unsigned_source:
        text, lane = expressions.unsigned(text, source, is_vector), UNSIGNED[source]
    else:
        lane = register(source)
    if to == "i1":  # trunci keeps the lowest bit
        text = f"tcpu::cmp_ne({text} & 1, {text} & 0)" if is_vector else f"(({text}) & 1)"
        return Expression(text, to, operand.level, "vector" if is_vector else "uniform")
    target = UNSIGNED[to] if name == "arith.fptoui" else STORAGE[to]
    if target != lane:
        function = "truncate" if _rounds_toward_zero(operation) else "convert"
        text = f"tcpu::{function}<{lane}, {target}>({text})"
    if name == "arith.fptoui":
        text = expressions.signed(text, to, is_vector)
    return Expression(text, to, operand.level, "vector" if is_vector else "uniform")


def _bitcast(operation: Operation, operand: Expression) -> Expression:
    to, source = operation.result.type.element, operand.element
    if to == "ptr" and source == "ptr":
        # Element counts change with the pointee: fall back to the address.
        is_same = operand.base is None or operation.operands[0].type == operation.result.type
        return operand if is_same else _address(operand, operation)
    if operation.operands[0].type.element == to:
        return operand
    is_vector = not operand.is_uniform
    text = as_vector(operand) if is_vector else operand.text
    if source in HALVES:
        text = f"tcpu::small_to_bits<{STORAGE[source]}>({text})"
    if to in HALVES:
        text = f"tcpu::bits_to_small<{STORAGE[to]}>({text})"
    elif source not in HALVES:
        text = f"(({vector(to)})({text}))" if is_vector else f"tcpu::bitcast<{register(to)}>({text})"
    return Expression(text, to, operand.level, "vector" if is_vector else "uniform")


def _address(pointer: Expression, operation: Operation) -> Expression:
    width = f"sizeof({STORAGE[operation.operands[0].type.pointee or 'i8']})"
    count = Expression(pointer.text, "i64", pointer.level, pointer.kind, pointer.step)
    scaled = expressions.multiply(count, Expression(f"int64_t({width})", "i64", 0))
    start = f"uint64_t({pointer.base})"
    if scaled.kind == "vector":
        text = f"(tcpu::splat<uint64_t>({start}) + (tcpu::vec<uint64_t>)({scaled.text}))"
        return Expression(text, "ptr", pointer.level, "vector")
    return Expression(f"({start} + {scaled.text})", "ptr", pointer.level, scaled.kind, scaled.step)

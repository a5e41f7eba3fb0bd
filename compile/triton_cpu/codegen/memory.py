"""Loads and stores: one instruction where the address grows by one element a lane, a gather otherwise."""

from dataclasses import dataclass, replace

from vllm_triton.compile.triton_cpu.codegen import expressions
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import HALVES, LANES, STORAGE, register, vector

ALL_LANES = (1 << LANES) - 1


@dataclass(frozen=True)
class Access:
    """Where one chunk lies.

    bits: C++ text of the lanes that are accessed, None for all 16.
    condition: of a uniform pointer with a uniform mask: C++ bool, None for always.
    """

    pointer: Expression
    storage: str
    element: str
    bits: str | None
    condition: str | None
    level: int
    mask: Expression | None


def access(pointer: Expression, pointee: str, mask: Expression | None, nest: Nest) -> Access:
    level = max(pointer.level, mask.level if mask is not None else 0)
    bits = None if mask is None else nest.bits(mask)
    if nest.valid is not None:
        bits = nest.existing if bits is None else f"({bits} & {nest.existing})"
    condition = mask.text if mask is not None and mask.is_uniform else None
    return Access(pointer, STORAGE[pointee], pointee, bits, condition, level, mask)


def everywhere(pointer: Expression, pointee: str) -> Access:
    """All 16 lanes."""
    return Access(pointer, STORAGE[pointee], pointee, None, None, pointer.level, None)


def address(pointer: Expression, storage: str) -> str:
    """C++ pointer to lane 0."""
    if pointer.base is None:
        return f"(({storage}*)({pointer.text}))"
    return pointer.base if pointer.text == "0" else f"({pointer.base} + {pointer.text})"


def load(where: Access, other: Expression | None) -> Expression:
    pointer, storage, element = where.pointer, where.storage, where.element
    level = max(where.level, other.level if other is not None else 0)
    zero = f"{register(element)}(0)" if element != "i1" else "false"
    if pointer.is_uniform and (where.mask is None or where.mask.is_uniform) and (other is None or other.is_uniform):
        text = f"tcpu::load_scalar<{storage}>({address(pointer, storage)})"
        if where.condition is not None:
            text = f"(({where.condition}) ? {text} : {other.text if other is not None else zero})"
        return Expression(text, element, level)
    fallback = as_vector(other) if other is not None else f"tcpu::splat<{register(element)}>({zero})"
    if pointer.is_uniform:
        assert where.bits is not None, "a pointer for all lanes is masked by lane here"
        text = f"tcpu::load_same<{storage}>({address(pointer, storage)}, {where.bits}, {fallback})"
    elif pointer.is_row:
        place = address(pointer, storage)
        if where.bits is None:
            text = f"tcpu::load<{storage}>({place})"
        else:
            text = f"tcpu::load_masked<{storage}>({place}, {where.bits}, {fallback})"
    else:
        bits = where.bits or f"{ALL_LANES}u"
        text = f"tcpu::gather{_scattered(pointer, storage)}, {bits}, {fallback})"
    return Expression(text, element, level, "vector")


def copy(where: Access, place: str) -> str | None:
    """The statement that moves a chunk of neighbours to a buffer, zero where nothing is read; None for other chunks."""
    if not where.pointer.is_row:
        return None
    source = address(where.pointer, where.storage)
    if where.bits is None:
        return f"tcpu::copy<{where.storage}>({place}, {source});"
    return f"tcpu::copy_masked<{where.storage}>({place}, {source}, {where.bits});"


def stored(value: Expression, rounds: bool) -> str:
    """The 16 lanes as a store takes them. rounds: a small float's value is not rounded to it yet."""
    return as_vector(value) if rounds or value.element not in HALVES else f"tcpu::exact{{{as_vector(value)}}}"


def store(where: Access, value: Expression, rounds: bool = False, streams: bool = False) -> tuple[str, int]:
    """The statement, and the level at which it stands. streams: past the caches, where it is one of neighbours."""
    pointer, storage = where.pointer, where.storage
    level = max(where.level, value.level)
    if pointer.is_uniform and value.is_uniform and (where.mask is None or where.mask.is_uniform):
        text = f"tcpu::store_scalar<{storage}>({address(pointer, storage)}, {value.text});"
        return (f"if ({where.condition}) {text}" if where.condition is not None else text), level
    if pointer.is_row:
        place, name = address(pointer, storage), "stream" if streams else "store"
        if where.bits is None:
            return f"tcpu::{name}<{storage}>({place}, {stored(value, rounds)});", level
        return f"tcpu::{name}_masked<{storage}>({place}, {where.bits}, {stored(value, rounds)});", level
    bits = where.bits or f"{ALL_LANES}u"
    return f"tcpu::scatter{_scattered(pointer, storage)}, {bits}, {stored(value, rounds)});", level


def _scattered(pointer: Expression, storage: str) -> str:
    """The rest of a gather's or scatter's name, and its first arguments."""
    if pointer.base is None:
        addresses = as_vector(pointer)
        return f"_ptr<{storage}>({addresses}"
    offsets = as_vector(Expression(pointer.text, "i64", pointer.level, pointer.kind, pointer.step))
    return f"<{storage}>({pointer.base}, {offsets}"


def advance(pointer: Expression, offset: Expression, pointee: str) -> Expression:
    """tt.addptr: offsets count elements."""
    wide = as_integer(offset)
    if pointer.base is not None:
        count = replace(pointer, element="i64", base=None)
        moved = wide if pointer.text == "0" and pointer.is_uniform else expressions.add(count, wide)
        return replace(moved, element="ptr", level=max(moved.level, pointer.level), base=pointer.base)
    size = Expression(f"int64_t(sizeof({STORAGE[pointee]}))", "i64", 0)
    by = expressions.multiply(wide, size)
    level = max(pointer.level, by.level)
    text = f"({as_vector(pointer)} + ({vector('ptr')})({as_vector(by)}))"
    if pointer.is_uniform and by.is_uniform:
        return Expression(f"({pointer.text} + {by.text})", "ptr", level)
    return Expression(text, "ptr", level, "vector")


def as_integer(index: Expression, element: str = "i64") -> Expression:
    """Any integer as i64, or as i32."""
    if index.element == element:
        return index
    if index.kind == "vector":
        text = f"tcpu::convert<{register(index.element)}, {register(element)}>({index.text})"
        return Expression(text, element, index.level, "vector")
    return replace(index, text=f"{register(element)}({index.text})", element=element)


def to_address(pointer: Expression, pointee: str) -> Expression:
    """The same pointer as a 64-bit address, for memory and selections."""
    if pointer.base is None:
        return pointer
    start = f"uint64_t({pointer.base})"
    if pointer.is_uniform and pointer.text == "0":
        return Expression(start, "ptr", pointer.level)
    offset = Expression(pointer.text, "i64", pointer.level, pointer.kind, pointer.step)
    by = expressions.multiply(offset, Expression(f"int64_t(sizeof({STORAGE[pointee]}))", "i64", 0))
    if by.is_uniform:
        return Expression(f"({start} + uint64_t({by.text}))", "ptr", pointer.level)
    return Expression(
        f"(tcpu::splat<uint64_t>({start}) + ({vector('ptr')})({as_vector(by)}))", "ptr", pointer.level, "vector"
    )

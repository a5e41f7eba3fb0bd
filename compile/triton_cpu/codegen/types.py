"""How TTIR's elements look in C++: in memory, and in a register (one lane of a vector)."""

import math

from vllm_triton.compile.triton_cpu.ir import Type

# Lanes of every vector; a tile is walked 16 elements at a time.
LANES = 16

# In memory. Masks exist in buffers of our own alone: Triton loads and stores bool as i8.
STORAGE = {
    "i1": "int32_t",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "f8E4M3FN": "tcpu::f8e4m3",
    "f8E5M2": "tcpu::f8e5m2",
    "f16": "tcpu::f16",
    "bf16": "tcpu::bf16",
    "f32": "float",
    "f64": "double",
    "ptr": "uint64_t",
}
HALVES = ("f8E4M3FN", "f8E5M2", "f16", "bf16")
# Bytes of one element in memory.
WIDTH = {"i1": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "ptr": 8} | {
    "f8E4M3FN": 1,
    "f8E5M2": 1,
}
UNSIGNED = {"i1": "uint32_t", "i8": "uint8_t", "i16": "uint16_t", "i32": "uint32_t", "i64": "uint64_t"}


def register(element: str) -> str:
    """C++ type of one lane: small floats are computed in float and rounded where TTIR rounds."""
    return "float" if element in HALVES else STORAGE[element]


def scalar(element: str) -> str:
    """C++ type of a scalar variable."""
    return "bool" if element == "i1" else register(element)


def scalar_type(type_: Type) -> str:
    """C++ type of a scalar variable that may be a pointer."""
    return f"{STORAGE[type_.pointee or 'i8']}*" if type_.is_pointer else scalar(type_.element)


def vector(element: str) -> str:
    return f"tcpu::vec<{register(element)}>"


def literal(value: int | float | bool, element: str) -> str:
    """A constant as a C++ scalar."""
    if element == "i1":
        return "true" if value else "false"
    if element in ("f32", *HALVES, "f64"):
        name = "double" if element == "f64" else "float"
        if value != value:
            return f"std::numeric_limits<{name}>::quiet_NaN()"
        if element in HALVES:
            value = _rounded(value, element)
        if value in (float("inf"), float("-inf")):
            return f"({'-' if value < 0 else ''}std::numeric_limits<{name}>::infinity())"
        return f"({name}({float(value).hex()}))"
    if element == "ptr":
        return f"(uint64_t({value}))"
    bits = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}[element]
    wrapped = (int(value) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    if wrapped == -(1 << (bits - 1)):  # the number without its sign would not fit
        return f"({STORAGE[element]}({wrapped + 1}{'LL' if bits == 64 else ''}) - 1)"
    return f"({STORAGE[element]}({wrapped}{'LL' if bits == 64 else ''}))"


# Bits of a small float's significand, the first one included, and its least normal exponent.
_PRECISION = {"f16": (11, -14), "bf16": (8, -126), "f8E4M3FN": (4, -6), "f8E5M2": (3, -14)}


def _rounded(value: float, element: str) -> float:
    """The nearest number of a type: TTIR's text may show fewer digits. Without torch, which may be watched here."""
    bits, least = _PRECISION[element]
    step = 2.0 ** (max(math.frexp(value)[1] - 1, least) - bits + 1)
    return math.copysign(round(value / step) * step, value) if math.isfinite(value) else value


def strides(shape: tuple[int, ...]) -> list[int]:
    """Row-major strides in elements."""
    found, stride = [], 1
    for extent in reversed(shape):
        found.append(stride)
        stride *= extent
    return found[::-1]


def shape_of(type_: Type) -> tuple[int, ...]:
    assert type_.shape is not None, f"{type_} is a scalar"
    return type_.shape

"""Tokens of TTIR's text, and what is made of few of them: types, attributes, numbers, source locations."""

import re
import struct
from typing import Any

from vllm_triton.compile.triton_cpu.ir import Type

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s+|//[^\n]*)+)
  | (?P<value>%[\w$.-]+(?:\#\d+)?)
  | (?P<block>\^[\w$.-]+)
  | (?P<symbol>@(?:[\w$.-]+|"[^"]*"))
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)(?![\w.]))
  | (?P<hash>\#[\w$.-]+)
  | (?P<word>!?[A-Za-z_][\w$.]*)
  | (?P<arrow>->)
  | (?P<punctuation>[-(){}<>\[\],:=*?+|])
    """,
    re.VERBOSE,
)
_SCALARS = re.compile(r"(?:i\d+|index|bf16|f16|f32|f64|f8E4M3FN|f8E5M2|f8E4M3FNUZ|f8E5M2FNUZ|f8E4M3B11FNUZ)$")
_TENSOR_SHAPE = re.compile(r"((?:\d+x)+)")


class ParseError(ValueError):
    """The text is not TTIR as this parser knows it: a newer Triton may print an operation in another way."""


class Scanner:
    """Reads from the beginning to the end, one token ahead."""

    def __init__(self, text: str):
        self.text = text
        self.position = 0
        self.lines = Locations(text)
        self._skip_space()

    def _skip_space(self) -> None:
        match = _TOKEN.match(self.text, self.position)
        if match is not None and match.lastgroup == "space":
            self.position = match.end()

    def peek(self) -> tuple[str, str]:
        """(kind, text) of the next token; ("end", "") at the end."""
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            if self.position >= len(self.text):
                return "end", ""
            raise self.error("a token")
        return match.lastgroup or "", match.group()

    def next(self) -> tuple[str, str]:
        kind, token = self.peek()
        self.position += len(token)
        self._skip_space()
        return kind, token

    def at(self, token: str) -> bool:
        return self.peek()[1] == token

    def accept(self, token: str) -> bool:
        if self.at(token):
            self.next()
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(repr(token))

    def error(self, wanted: str) -> ParseError:
        line = self.text.count("\n", 0, self.position) + 1
        shown = self.text[self.position : self.position + 80].split("\n")[0]
        return ParseError(f"TTIR line {line}: expected {wanted}, got {shown!r}")

    # Types and attributes

    def type(self) -> Type:
        kind, token = self.next()
        if token == "tensor":
            self.expect("<")
            match = _TENSOR_SHAPE.match(self.text, self.position)
            if match is None:
                raise self.error("a tensor's shape")
            self.position = match.end()
            element = self.type()
            if self.accept(","):  # a layout, which TTIR has only after later passes
                raise self.error("a tensor without a layout")
            self.expect(">")
            shape = tuple(int(extent) for extent in match.group(1).split("x")[:-1])
            return Type(element.element, shape, element.pointee)
        if token == "!tt.ptr":
            self.expect("<")
            pointee = self.type()
            if self.accept(","):
                self.next()
            self.expect(">")
            # In tensors a bool is a byte; Triton loads and stores it as one.
            return Type("ptr", None, "i8" if pointee.element == "i1" else pointee.element)
        if kind == "word" and _SCALARS.match(token):
            return Type("i64" if token == "index" else token)
        raise self.error(f"a type after {token!r}")

    def types(self) -> list[Type]:
        """One type, or several in parentheses."""
        if not self.accept("("):
            return [self.type()]
        found = []
        while not self.accept(")"):
            found.append(self.type())
            self.accept(",")
        return found

    def attributes(self) -> dict[str, Any]:
        """After "{", up to and with "}"."""
        found: dict[str, Any] = {}
        while not self.accept("}"):
            _, name = self.next()
            found[name.strip('"')] = self.attribute() if self.accept("=") else True
            self.accept(",")
        return found

    def attribute(self) -> Any:
        kind, token = self.next()
        if kind == "number":
            value: Any = _number(token)
            return self._typed_number(token, value)
        if kind == "string":
            return unescape(token)
        if token in ("true", "false"):
            return token == "true"
        if token == "dense":
            self.expect("<")
            value = self._dense()
            self.expect(">")
            self.expect(":")
            return Dense(value, self.type())
        if token == "array":
            self.expect("<")
            self.type()
            if self.at(":"):
                return self._list(":", ">")
            self.expect(">")
            return []
        if token == "[":
            return self._list("", "]")
        if kind == "word" and self.at("<"):  # for example #tt.something or arith.fastmath<none>
            return self._balanced()
        return token

    def _typed_number(self, token: str, value: Any) -> Any:
        if not self.accept(":"):
            return value
        type_ = self.type()
        if type_.is_float:
            return _float(token, type_.element)
        return bool(value) if type_.element == "i1" else value

    def _list(self, opening: str, closing: str) -> list[Any]:
        if opening:
            self.expect(opening)
        found = []
        while not self.accept(closing):
            found.append(self.attribute())
            self.accept(",")
        return found

    def _dense(self) -> Any:
        if self.accept("["):
            found = []
            while not self.accept("]"):
                found.append(self._dense())
                self.accept(",")
            return found
        kind, token = self.next()
        return token if kind != "string" else unescape(token)

    def _balanced(self) -> str:
        self.expect("<")
        depth, start = 1, self.position
        while depth:
            _, token = self.next()
            depth += (token == "<") - (token == ">")
        return self.text[start : self.position].rstrip("> \n")

    def location(self) -> str:
        """Reads `loc(...)` where it stands; the line, or "" where there is none."""
        text = self._location_text()
        return self.lines.resolve(text) if text else ""

    def argument_name(self) -> str:
        """Reads `loc(...)` where it stands; the name that the kernel's source gave an argument, or "" """
        return self.lines.first_name(self._location_text())

    def _location_text(self) -> str:
        if not self.accept("loc"):
            return ""
        start = self.position
        self.expect("(")
        depth = 1
        while depth:
            _, token = self.next()
            depth += (token == "(") - (token == ")")
        return self.text[start : self.position]


class Dense:
    """dense<...> : a type; one element stands for all."""

    def __init__(self, value: Any, type_: Type):
        self.value, self.type = value, type_

    def numbers(self) -> Any:
        """A number for a splat, else nested lists flattened in row-major order."""
        if not isinstance(self.value, list):
            return constant(self.value, self.type.element)
        flat: list[Any] = []

        def visit(item: Any) -> None:
            if isinstance(item, list):
                for part in item:
                    visit(part)
            else:
                flat.append(constant(item, self.type.element))

        visit(self.value)
        return flat


def _number(token: str) -> int | float:
    return int(token, 0) if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", token) else float(token)


def constant(token: str, element: str) -> int | float | bool:
    if token in ("true", "false"):
        return token == "true"
    if element in ("f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "f64"):
        return _float(token, element)
    return _number(token)


def _float(token: str, element: str) -> float:
    """A decimal number, or the bits of one in hexadecimal."""
    if not token.startswith(("0x", "-0x")):
        return float(token)
    bits = int(token, 16)
    if element == "f64":
        return struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    if element == "f32":
        return struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    if element == "bf16":
        return struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0]
    if element in ("f16", "f8E5M2"):
        wide = bits if element == "f16" else bits << 8
        return struct.unpack("<e", wide.to_bytes(2, "little"))[0]
    return _e4m3(bits)


def _e4m3(bits: int) -> float:
    sign, exponent, mantissa = (-1.0 if bits & 0x80 else 1.0), (bits >> 3) & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def unescape(token: str) -> str:
    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", lambda match: _escaped(match.group(1)), token[1:-1])


def _escaped(text: str) -> str:
    if len(text) == 2:
        return chr(int(text, 16))
    return {"n": "\n", "t": "\t"}.get(text, text)


class Locations:
    """`#locN = loc(...)` lines; a name or a call site is resolved to the kernel's own file and line."""

    def __init__(self, text: str):
        self.unknown = "unknown line"
        self._definitions = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
        self._resolved: dict[str, str] = {}

    def resolve(self, text: str) -> str:
        if text not in self._resolved:
            self._resolved[text] = self._search(text, 0)
        return self._resolved[text]

    def first_name(self, text: str) -> str:
        """The innermost: a value that is assigned to a variable gets that one's name around its own."""
        name = ""
        while match := re.match(r'\("([^"]+)"\((#loc\d*)\)\)', text):
            name, text = match[1], f"({self._definitions.get(match[2], '')})"
        return name

    def _search(self, text: str, depth: int) -> str:
        """Of a call site, the caller: a kernel's line says more than that of a library function."""
        found = re.findall(r'"([^"]+)":(\d+):\d+', text)
        if found:
            return ":".join(found[-1])
        for name in reversed(re.findall(r"#loc\d*", text)):
            if depth < 20 and name in self._definitions:
                line = self._search(self._definitions[name], depth + 1)
                if line:
                    return line
        return ""

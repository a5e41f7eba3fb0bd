"""What Triton calls to launch a kernel: reads its signature once, and its arguments at every launch."""

import ctypes
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_triton.compile.triton_cpu import extents, launching, library
from vllm_triton.compile.triton_cpu.errors import TritonCpuError

# A type of Triton's -> the code by which the launchers read an argument of it.
_CODES = {
    "constexpr": "c",
    "i1": "?",
    "u1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "l",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "L",
    "fp16": "f",
    "bf16": "f",
    "fp32": "f",
    "f16": "f",
    "f32": "f",
    "fp64": "d",
    "f64": "d",
}
_RANGES = {
    "?": (0, 1, "i1"),
    "b": (-(2**7), 2**7 - 1, "i8"),
    "h": (-(2**15), 2**15 - 1, "i16"),
    "i": (-(2**31), 2**31 - 1, "i32"),
    "l": (-(2**63), 2**63 - 1, "i64"),
    "B": (0, 2**8 - 1, "u8"),
    "H": (0, 2**16 - 1, "u16"),
    "I": (0, 2**32 - 1, "u32"),
    "L": (0, 2**64 - 1, "u64"),
}
_DESCRIPTOR = re.compile(r"tensordesc(?:_im2col)?<([^[>]*)\[([^\]]*)\]")

Signature = str | tuple["Signature", ...]


def make_launcher(src: Any, metadata: Any) -> Callable[..., None]:
    """The launcher of one signature: `launch(x, y, z, stream, function, packed metadata, launch metadata, enter hook,
    exit hook, *arguments)`, constexprs among the arguments.

    A launch raises TypeError, ValueError or OverflowError, with the argument's name, for what the kernel cannot take,
    and KernelError for what the kernel itself reports.

    Args:
        src: what Triton compiled; its `signature` is read.
        metadata: the kernel's; its `name` and whether it is `checked` are read.
    Raises: TritonCpuError for a type that cannot be passed.
    """
    signature = list(src.signature.values())
    names = tuple(str(name) for name in src.signature)
    codes = "".join(_codes(kind, metadata.name) for kind in signature)
    extension = library.extension()
    launch: Callable[..., None]
    if extension is None or metadata.checked:
        launch = _CtypesLauncher(metadata.name, codes, names, metadata.checked)
    else:
        launch = extension.Launcher(metadata.name, codes.encode(), names, launching.num_threads, launching.fail)
    descriptors = [index for index, kind in enumerate(signature) if _is_descriptor(kind)]
    return _expanding(launch, descriptors) if descriptors else launch


def _codes(kind: Signature, kernel: str) -> str:
    if isinstance(kind, tuple):
        return "(" + "".join(_codes(item, kernel) for item in kind) + ")"
    if kind.startswith(("*", "!tt.ptr")):
        return "p"
    if _is_descriptor(kind):
        match = _DESCRIPTOR.match(kind)
        if match is None:
            raise TritonCpuError(f"{kernel}: cannot read the tensor descriptor type {kind!r}")
        rank = match[2].count(",") + 1
        flags = "??" if _descriptors_have_rounding() else "?"
        return "(p" + "l" * (2 * rank) + flags + "i" * rank + "l" * rank + ")"
    if kind not in _CODES:
        raise TritonCpuError(
            f"{kernel}: the CPU backend cannot pass arguments of type {kind!r}; it passes pointers, {', '.join(_CODES)}"
        )
    return _CODES[kind]


def _is_descriptor(kind: Signature) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _descriptors_have_rounding() -> bool:
    """Whether Triton passes a descriptor's round_f32_to_tf32 too, as it does where descriptors have that field."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__


def _expanding(launch: Callable[..., None], descriptors: Sequence[int]) -> Callable[..., None]:
    """A launcher that first turns descriptors into what the kernel takes: Triton's frontend adds shape and strides,
    and the lowering of the descriptor to a pointer adds them once more."""
    positions = [9 + index for index in descriptors]
    rounds = _descriptors_have_rounding()

    def expanded(descriptor: Any) -> tuple[Any, ...]:
        flags = (
            (descriptor.padding == "nan", descriptor.round_f32_to_tf32) if rounds else (descriptor.padding == "nan",)
        )
        shape = (*descriptor.shape, *descriptor.strides)
        return (descriptor.base, *shape, *flags, *shape)

    def launch_expanded(*arguments: Any) -> None:
        flat = list(arguments)
        for position in positions:
            flat[position] = expanded(flat[position])
        launch(*flat)

    return launch_expanded


class _CtypesLauncher:
    """What the native launcher does, for machines without Python's headers, and for checked kernels, whose speed does
    not matter: it passes the extents of their tensors too."""

    def __init__(self, kernel: str, codes: str, names: tuple[str, ...], is_checked: bool) -> None:
        self._kernel = kernel
        self._names = names
        self._codes = codes
        self._is_checked = is_checked
        self._launch = library.native().triton_cpu_launch

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *arguments: Any,
    ) -> None:
        if len(arguments) != len(self._names):
            raise TypeError(f"{self._kernel}: takes {len(self._names)} arguments, got {len(arguments)}")
        for axis, size in enumerate((x, y, z)):
            if not 0 <= size < 2**31:
                raise ValueError(f"{self._kernel}: grid[{axis}] must be from 0 to 2**31 - 1, got {size}")
        codes = iter(self._codes)
        slots = [
            slot
            for name, argument in zip(self._names, arguments, strict=True)
            for slot in self._slots(name, argument, codes)
        ]
        if self._is_checked:
            slots = extents.with_extents(slots)
        if enter_hook is not None:
            enter_hook(launch_metadata)
        packed = (ctypes.c_uint64 * len(slots))(*slots)
        report = library.Report()
        if self._launch(function, packed, len(slots), x, y, z, launching.num_threads(), report):
            launching.fail_by(report)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _slots(self, name: str, value: Any, codes: Iterator[str]) -> list[int]:
        """The packed form of one argument; takes its codes from the iterator."""
        code = next(codes)
        if code == "c":
            return []
        if code == "(":
            return self._tuple_slots(name, value, codes)
        if code == "p":
            return [self._pointer(name, value)]
        if code in "fd":
            return [self._float(name, value, code)]
        return [self._integer(name, value, code)]

    def _tuple_slots(self, name: str, value: Any, codes: Iterator[str]) -> list[int]:
        slots: list[int] = []
        inner, depth = "", 1
        for code in codes:
            depth += (code == "(") - (code == ")")
            if depth == 0:
                break
            inner += code
        items = iter(inner)
        for item in value:
            slots += self._slots(name, item, items)
        return slots

    def _pointer(self, name: str, value: Any) -> int:
        device = getattr(value, "device", None)
        if device is None:
            raise TypeError(f"{self._kernel}: argument {name!r} must be a CPU tensor, got {type(value).__name__}")
        if not str(device).startswith("cpu"):
            raise ValueError(
                f"{self._kernel}: argument {name!r} must be a CPU tensor, got one on {device}: move it with .cpu()"
            )
        return extents.Address.of(value) if self._is_checked else value.data_ptr()

    def _integer(self, name: str, value: Any, code: str) -> int:
        low, high, kind = _RANGES[code]
        try:
            number = value.__index__()
        except AttributeError:
            message = f"{self._kernel}: argument {name!r} must be an integer, got {type(value).__name__}"
            raise TypeError(message) from None
        if not low <= number <= high:
            raise OverflowError(f"{self._kernel}: argument {name!r} must fit {kind}, got {number}")
        return number & (2**64 - 1)

    def _float(self, name: str, value: Any, code: str) -> int:
        try:
            number = float(value)
        except (TypeError, ValueError):
            message = f"{self._kernel}: argument {name!r} must be a number, got {type(value).__name__}"
            raise TypeError(message) from None
        if code == "d":
            return struct.unpack("<Q", struct.pack("<d", number))[0]
        return ctypes.c_uint32.from_buffer_copy(ctypes.c_float(number)).value

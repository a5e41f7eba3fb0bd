"""Reads a GGUF file's metadata and tensor table; tensor bytes stay in the file until they are asked for.

Layout (github.com/ggml-org/ggml, docs/gguf.md), little endian:
    "GGUF", version u32, tensor count u64, metadata count u64,
    metadata: key, value type u32, value;   tensor table: name, rank u32, sizes u64[rank], type u32, offset u64,
    padding to general.alignment, tensor data. Strings are a u64 length and that many bytes of UTF-8.
The gguf package's own reader makes a numpy array of every vocabulary entry, which takes seconds; this one takes a
tenth of one.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from vllm_triton.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Value types of the metadata: struct format of each fixed-size one, then the two with a length of their own.
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING_TYPE = 8
_ARRAY_TYPE = 9


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    shape: sizes in torch's order, slowest dimension first.
    offset, num_bytes: where its bytes lie in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: key -> plain Python value (int, float, bool, str, or a list of them).
        tensors: name -> GgufTensor, in the file's order.
    Raises: ModelError, naming the file, if it is not a GGUF file, is truncated, or one of several splits.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
            # A mapping outlives the file object; pages are read when a tensor's bytes are used.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = len(MAGIC)
        self.metadata: dict[str, Any] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelError(
                f"{path} is truncated or damaged: its header cannot be read at byte {self._position} ({error}); "
                "fetch the file again"
            ) from error

    def tensor_bytes(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes as stored: uint8 [rows, bytes per row], a read-only view of the file.

        A row is the tensor's last dimension; its bytes hold whole quantisation blocks.
        """
        flat = np.frombuffer(self._bytes, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return flat.reshape(-1, tensor.shape[-1] // block_elements * block_bytes)

    def dequantize(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's values: float32 of tensor.shape. Raises: ModelError for a type that cannot be dequantised."""
        try:
            values = dequantize(self.tensor_bytes(tensor), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {tensor.name} of {self.path} has type {tensor.kind.name}, which cannot be dequantised; "
                "use a file in another quantisation, for example Q4_1 or Q8_0"
            ) from error
        return values.reshape(tensor.shape)

    def release_pages(self) -> None:
        """Lets go of the memory that holds what was read of the file; reading again fetches it again."""
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        version, num_tensors, num_metadata = self._unpack("IQQ")
        if version not in SUPPORTED_VERSIONS:
            raise ModelError(
                f"{self.path} has GGUF version {version}; supported are {', '.join(map(str, SUPPORTED_VERSIONS))} "
                "(little endian)"
            )
        for _ in range(num_metadata):
            key = self._read_string()
            (value_type,) = self._unpack("I")
            self.metadata[key] = self._read_value(key, value_type)
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{self.path} is one of {self.metadata['split.count']} splits of a model; "
                "merge them first with llama.cpp's `llama-gguf-split --merge`"
            )
        entries = [self._read_tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {entry[0]: self._place(data_start, *entry) for entry in entries}

    def _read_tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._read_string()
        (rank,) = self._unpack("I")
        sizes = self._unpack(f"{rank}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _place(self, data_start: int, name: str, shape: tuple[int, ...], kind_number: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(kind_number)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(f"tensor {name} of {self.path} has the unknown GGML type {kind_number}") from error
        num_elements = int(np.prod(shape, dtype=object))
        if not shape or 0 in shape or shape[-1] % block_elements:
            raise ModelError(
                f"tensor {name} of {self.path} has shape {list(shape)}: its last dimension must be a positive multiple "
                f"of {block_elements}, the block of {kind.name}"
            )
        num_bytes = num_elements // block_elements * block_bytes
        end = data_start + offset + num_bytes
        if end > len(self._bytes):
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {end}, the file at {len(self._bytes)}; "
                "fetch the file again"
            )
        return GgufTensor(name, shape, kind, data_start + offset, num_bytes)

    def _read_value(self, key: str, value_type: int) -> Any:
        if value_type == _STRING_TYPE:
            return self._read_string()
        if value_type in _SCALAR_FORMATS:
            return self._unpack(_SCALAR_FORMATS[value_type])[0]
        if value_type != _ARRAY_TYPE:
            raise ModelError(f"metadata {key} of {self.path} has the unknown value type {value_type}")
        item_type, length = self._unpack("IQ")
        if item_type in _SCALAR_FORMATS:
            return list(self._unpack(f"{length}{_SCALAR_FORMATS[item_type]}"))
        return [self._read_value(key, item_type) for _ in range(length)]

    def _read_string(self) -> str:
        (length,) = self._unpack("Q")
        start, end = self._position, self._position + length
        if end > len(self._bytes):
            raise IndexError(f"a string of {length} bytes reaches past the end")
        self._position = end
        return self._bytes[start:end].decode("utf-8")

    def _unpack(self, layout: str) -> tuple:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._bytes, self._position)
        self._position += struct.calcsize(layout)
        return values

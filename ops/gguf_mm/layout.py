"""The layout of weights that stay packed as a GGUF file has them: 32 rows interleaved, scales apart from values.

Of each 32 values of a row, in this order along the axis W of `quants`:
    Q4_0, Q4_1, Q4_K   4 words of 8 values, 4 bits each, lowest bits first: those with even numbers in the lower half,
                       the others in the upper half, so that one shift makes two neighbours a pair of 16 bits
    Q8_0               8 words of 4 signed bytes
    Q6_K               4 words of 8 values' lower 4 bits: of the first four values in the lower halves of the bytes, of
                       the others in the upper halves; then 2 words of 16 values' upper 2 bits: of the first four values
                       the lowest of each byte, and so on
Of each block, along the axis S of `scales`, 16 bits each:
    Q4_0, Q8_0         d                       value = d * (q - 8), and d * q
    Q4_1               d, m                    value = d * q + m
    Q4_K               d, dmin, 8 x [s | m << 8], one each 32 values        value = d * s * q - dmin * m
    Q6_K               d, 8 x [s | s' << 8], s for 16 values and s' for 16  value = d * s * (q - 32)
d, m and dmin are fp16, the others unsigned bytes, but signed in Q6_K. Nothing is rounded, and but for Q4_K, whose 6-bit
scales take a byte each (3 % more), it takes what it takes in the file.

Source: the blocks are those of github.com/ggml-org/ggml, src/ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS = 32  # that lie interleaved
_ROWS_AT_A_TIME = 1024  # unpacked values take several times what they take packed


@dataclass(frozen=True)
class Format:
    """block: values of a row that a block holds. block_bytes: of it in a file. words, scales: of it in this layout.

    floats: how many of the scales, the first, are fp16 numbers; the others are pairs of bytes.
    """

    name: str
    block: int
    block_bytes: int
    words: int
    scales: int
    floats: int


FORMATS = {
    each.name: each
    for each in (
        Format("Q4_0", 32, 18, 4, 1, 1),
        Format("Q4_1", 32, 20, 4, 2, 2),
        Format("Q8_0", 32, 34, 8, 1, 1),
        Format("Q4_K", 256, 144, 32, 10, 2),
        Format("Q6_K", 256, 210, 48, 9, 1),
    )
}


def format_of(depth: int, num_words: int, num_scales: int) -> Format | None:
    """The format in which a row of `depth` values has so many words and scales."""
    for each in FORMATS.values():
        blocks = depth // each.block
        fits = (blocks * each.block, blocks * each.words, blocks * each.scales) == (depth, num_words, num_scales)
        if fits and blocks:
            return each
    return None


def pack(rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of `gguf_mm`; rows of zeros fill up the last group of 32.

    Args:
        rows: [N, bytes of a row] uint8, as in the file.
        name: of their format, a key of FORMATS.
    Returns: quants [J, W, 32] int32 and scales [J, S, 32] int16, where J = ceil(N/32).
    Raises: ValueError where a row is not whole blocks, or the format has no packed layout.
    """
    if name not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {name}")
    layout = FORMATS[name]
    if rows.shape[1] % layout.block_bytes:
        raise ValueError(f"a row of {name} must be a multiple of {layout.block_bytes} bytes, got {rows.shape[1]}")
    num_blocks = rows.shape[1] // layout.block_bytes
    num_groups = -(-rows.shape[0] // ROWS)
    quants = torch.zeros(num_groups, num_blocks * layout.words, ROWS, dtype=torch.int32)
    scales = torch.zeros(num_groups, num_blocks * layout.scales, ROWS, dtype=torch.int16)
    for start in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        some = rows[start : start + _ROWS_AT_A_TIME]
        words, halves = _SPLIT[name](some.unflatten(1, (num_blocks, layout.block_bytes)))
        for target, values in ((quants, words), (scales, halves)):
            group = start // ROWS
            interleaved = _interleaved(values.reshape(len(some), -1))
            target[group : group + len(interleaved)] = interleaved
    return quants, scales


def unpack(quants: torch.Tensor, scales: torch.Tensor, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of packed rows in a floating dtype: [32*J, depth]; any other number of rows may lie interleaved."""
    layout = format_of(depth, quants.shape[1], scales.shape[1])
    if layout is None:
        raise ValueError(f"no format has {list(quants.shape)} words and {list(scales.shape)} scales for {depth} inputs")
    values = _values(_rows(quants), layout).unflatten(1, (-1, layout.block)).to(dtype)  # [32*J, blocks, block]
    halves = _rows(scales).unflatten(1, (-1, layout.scales))  # [32*J, blocks, scales of a block]
    first = halves[..., :1].view(torch.float16).to(dtype)
    if layout.name == "Q4_0":
        weight = first * (values - 8)
    elif layout.name == "Q8_0":
        weight = first * values
    elif layout.name == "Q4_1":
        weight = first * values + halves[..., 1:].view(torch.float16).to(dtype)
    elif layout.name == "Q4_K":
        pairs = halves[..., 2:].contiguous().view(torch.uint8).unflatten(2, (8, 2)).to(dtype)  # s and m of 32 values
        scale = (first * pairs[..., 0]).repeat_interleave(32, 2)
        minimum = (halves[..., 1:2].view(torch.float16).to(dtype) * pairs[..., 1]).repeat_interleave(32, 2)
        weight = scale * values - minimum
    else:
        scale = (first * halves[..., 1:].contiguous().view(torch.int8).to(dtype)).repeat_interleave(16, 2)
        weight = scale * (values - 32)
    return weight.flatten(1)


def _values(words: torch.Tensor, layout: Format) -> torch.Tensor:
    """The integers of rows of words: [N, W] int32 -> [N, K] int32."""
    if layout.name == "Q8_0":
        return words.contiguous().view(torch.int8).int()
    if layout.name != "Q6_K":
        return _fields(words, 4).unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)
    bytes_ = words.contiguous().view(torch.uint8).unflatten(1, (-1, 6, 4))  # of 32 values
    lower = torch.stack([bytes_[:, :, :4] >> shift & 15 for shift in (0, 4)], 3)
    upper = torch.stack([bytes_[:, :, 4:] >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    return (lower.flatten(1) | upper.flatten(1) << 4).int()


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, W] int32 of fields of so many bits, lowest first -> [N, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(1)


def _words(fields: torch.Tensor) -> torch.Tensor:
    """uint8 [N, blocks, V, n] of numbers below 2^(8/n) -> int32 [N, blocks, V/4]: n to a byte, the first lowest."""
    bits = 8 // fields.shape[3]
    bytes_ = fields[..., 0].clone()
    for place in range(1, fields.shape[3]):
        bytes_ |= fields[..., place] << (bits * place)
    return bytes_.view(torch.int32)


def _in_halves(values: torch.Tensor) -> torch.Tensor:
    """[N, blocks, V] -> [N, blocks, V/2, 2]: of each eight, the even ones share the first two of four bytes."""
    return values.unflatten(2, (-1, 2, 2, 2)).permute(0, 1, 2, 5, 3, 4).flatten(2, 4)


def _by_four(values: torch.Tensor, count: int) -> torch.Tensor:
    """[N, blocks, V] -> [N, blocks, V/count, count]: so many groups of four neighbours share four bytes."""
    return values.unflatten(2, (-1, count, 4)).transpose(3, 4).flatten(2, 3)


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [N, blocks, 2n] -> int16 [N, blocks, n]."""
    return blocks.contiguous().view(torch.int16)


def _nibbles(blocks: torch.Tensor, chunk: int) -> torch.Tensor:
    """The values of bytes, of which each chunk holds first those in the lower halves, then those in the upper ones."""
    chunks = blocks.unflatten(2, (-1, chunk))
    return torch.stack((chunks & 15, chunks >> 4), 3).flatten(2)


def _split_q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _words(_in_halves(_nibbles(blocks[..., 2:], 16))), _halves(blocks[..., :2])


def _split_q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _words(_in_halves(_nibbles(blocks[..., 4:], 16))), _halves(blocks[..., :4])


def _split_q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks[..., 2:].contiguous().view(torch.int32), _halves(blocks[..., :2])


def _split_q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes hold eight scales and eight minima of 6 bits: four of each whole, their upper 2 bits the others'."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 2)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 2)
    pairs = torch.stack((scale, minimum), 3).flatten(2)
    return _words(_in_halves(_nibbles(blocks[..., 16:], 32))), _halves(torch.cat((blocks[..., :4], pairs), 2))


def _split_q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lower = _words(_by_four(_nibbles(blocks[..., :128], 64), 2))
    chunks = blocks[..., 128:192].unflatten(2, (2, 32))
    upper = torch.stack([(chunks >> shift) & 3 for shift in (0, 2, 4, 6)], 3).flatten(2)
    words = torch.cat((lower.unflatten(2, (8, 4)), _words(_by_four(upper, 4)).unflatten(2, (8, 2))), 3)
    return words.flatten(2), _halves(torch.cat((blocks[..., 208:], blocks[..., 192:208]), 2))


_SPLIT: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q8_0": _split_q8_0,
    "Q4_K": _split_q4_k,
    "Q6_K": _split_q6_k,
}


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    """[N, C] -> [J, C, 32]."""
    missing = -values.shape[0] % ROWS
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return padded.unflatten(0, (-1, ROWS)).transpose(1, 2)


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[J, C, 32] -> [32*J, C]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])

"""The layout of 4-bit weights: 16 rows interleaved, words of 8 values, scales and zeros apart.

A group of inputs shares a scale and a zero for each row; groups are equally long and hold whole blocks of 32 inputs.
"""

import torch

BLOCK = 32  # inputs; a group holds whole ones
ROWS = 16  # rows that lie interleaved
PER_WORD = 8  # values of one int32
MIDDLE = 8  # the zero of a weight that has none of its own
LARGEST_ZERO = 16


def pack(
    quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands of `w4a16_mm`; rows of zeros fill up the last group of 16.

    Args:
        quants: [N, K] of integers from 0 to 15; K a multiple of 32.
        scales: [N, S], where S divides K/32, in the dtype that they are to have.
        zeros: [N, S] of integers from 0 to 16, or None, which stands for 8.
    Returns: quants [J, K/8, 16] int32, scales and zeros [J, S, 16], dtype of the scales, where J = ceil(N/16).
    Raises: ValueError, for sizes that do not fit and for values outside these.
    """
    _check_depth(quants.shape[1])
    _check_integers("quants", quants, 2 ** (32 // PER_WORD) - 1)
    return pack_words(words_of(quants.to(torch.uint8)), scales, zeros)


def pack_words(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `pack`, of values that share words already: words [N, K/8] int32, see `words_of`."""
    num_rows, num_words = words.shape
    _check_depth(num_words * PER_WORD)
    num_blocks = num_words * PER_WORD // BLOCK
    if scales.shape[0] != num_rows or not scales.shape[1] or num_blocks % scales.shape[1]:
        wanted = f"[{num_rows}, a divisor of {num_blocks}]"
        raise ValueError(f"scales must have shape {wanted}, got {list(scales.shape)}")
    if zeros is not None:
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros must have the shape of scales, {list(scales.shape)}, got {list(zeros.shape)}")
        _check_integers("zeros", zeros, LARGEST_ZERO)
        zeros = _interleaved(zeros.to(scales.dtype))
    return _interleaved(words), _interleaved(scales), zeros


def words_of(quants: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of integers from 0 to 15 -> int32 [N, K/8]: eight neighbours to a word, the first lowest."""
    return (quants[:, ::2] | quants[:, 1::2] << 4).view(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The values 0 to 15 of packed `quants` [J, W, 16], as int32 [16*J, 8*W]."""
    shifts = 4 * torch.arange(PER_WORD, device=words.device, dtype=torch.int32)
    return ((_rows(words)[..., None] >> shifts) & 15).flatten(1)


def dequantize(
    quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [16*J, K] of packed operands, computed in a floating dtype."""
    groups = unpack(quants).to(dtype).unflatten(1, (scales.shape[1], -1))
    centred = groups - (MIDDLE if zeros is None else _rows(zeros).to(dtype)[..., None])
    return (centred * _rows(scales).to(dtype)[..., None]).flatten(1)


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    """[N, C] -> [J, C, 16], filled up by rows of zeros."""
    missing = -values.shape[0] % ROWS
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return padded.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[J, C, 16] -> [16*J, C]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def _check_depth(depth: int) -> None:
    if depth % BLOCK or not depth:
        raise ValueError(f"the number of columns must be a multiple of {BLOCK}, got {depth}")


def _check_integers(name: str, values: torch.Tensor, largest: int) -> None:
    if not values.numel():
        return
    if not 0 <= values.min() <= values.max() <= largest:
        raise ValueError(f"{name} must lie in 0 to {largest}, got {values.min().item()} to {values.max().item()}")
    if values.is_floating_point() and not torch.equal(values, values.round()):
        raise ValueError(f"{name} must be integers, got {values[values != values.round()][0].item()}")

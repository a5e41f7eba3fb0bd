"""The layout of 4-bit weights: 16 rows interleaved, words of 8 values, scales and minima apart."""

import torch

BLOCK = 32  # values of a row that share a scale and a minimum
ROWS = 16  # rows that lie interleaved
PER_WORD = 8  # values of one int32


def pack(
    quants: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of `w4a16_mm`; rows of zeros fill up the last group of 16.

    Args:
        quants: [N, K] of integers from 0 to 15; K a multiple of 32.
        scales, minima: [N, K/32].
    Returns: quants [J, K/8, 16] int32, scales and minima [J, K/32, 16] fp16, where J = ceil(N/16).
    Raises: ValueError, for sizes that do not fit and for values outside 0 to 15.
    """
    num_rows, depth = quants.shape
    if depth % BLOCK:
        raise ValueError(f"the number of columns must be a multiple of {BLOCK}, got {depth}")
    for name, values in (("scales", scales), ("minima", minima)):
        if values.shape != (num_rows, depth // BLOCK):
            raise ValueError(f"{name} must have shape {[num_rows, depth // BLOCK]}, got {list(values.shape)}")
    if quants.numel() and not 0 <= int(quants.min()) <= int(quants.max()) <= 15:
        raise ValueError(f"quants must lie in 0 to 15, got {int(quants.min())} to {int(quants.max())}")
    shifts = 4 * torch.arange(PER_WORD, device=quants.device)
    # Distinct bits: the sum is the union. Wraps where the highest value sets the sign bit.
    words = (quants.long().unflatten(1, (-1, PER_WORD)) << shifts).sum(2).to(torch.int32)
    return _interleaved(words), _interleaved(scales.half()), _interleaved(minima.half())


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The values 0 to 15 of packed `quants` [J, W, 16], as int32 [16*J, 8*W]."""
    shifts = 4 * torch.arange(PER_WORD, device=words.device, dtype=torch.int32)
    return _rows((words[..., None] >> shifts) & 15)


def per_value(values: torch.Tensor) -> torch.Tensor:
    """Packed `scales` or `minima` [J, Q, 16], repeated for each of the values that share one: [16*J, 32*Q]."""
    return _rows(values[..., None].expand(*values.shape, BLOCK))


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    """[N, C] -> [J, C, 16]."""
    missing = -values.shape[0] % ROWS
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return padded.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[J, C, 16, n] -> [16*J, C*n]."""
    groups, columns, rows, each = values.shape
    return values.permute(0, 2, 1, 3).reshape(groups * rows, columns * each)

"""4-bit weights as checkpoints store them, written value by value as the formats are described."""

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
IN_TURN = list(range(8))


def packed_along(values: torch.Tensor, axis: int, order: list[int]) -> torch.Tensor:
    """int32 words: from the lowest four bits up, the order-th of each eight neighbours along an axis."""
    rows = values.tolist() if axis == 1 else values.T.tolist()
    words: list[list[int]] = []
    for row in rows:
        words.append([])
        for start in range(0, len(row), 8):
            word = 0
            for place, which in enumerate(order):
                value = row[start + which] if start + which < len(row) else 0
                assert 0 <= value <= 15
                word += value * 16**place
            words[-1].append(word if word < 2**31 else word - 2**32)
    result = torch.tensor(words, dtype=torch.int32)
    return result if axis == 1 else result.T.contiguous()


def gptq_zeros(zeros: torch.Tensor, checkpoint_format: str) -> torch.Tensor:
    """[S, N/8], of zeros [N, S] from 0 to 15: as they are, or whole words less one in each place, where 0 borrows."""
    words = packed_along(zeros.T, 1, IN_TURN).long()
    words -= {"gptq": 0x11111111, "gptq_v2": 0}[checkpoint_format]
    return ((words + 2**31) % 2**32 - 2**31).int()


def stored_tensors(
    layout: str, quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """What a checkpoint has of one layer, by the ends of the names.

    Args:
        layout: "awq", "gptq", "gptq_v2" or "pack-quantized".
        quants: [N, K]. scales, zeros: [N, S]; no zeros are 8.
        g_idx: [K], the group of each column, or None for groups of neighbours.
    """
    if layout == "pack-quantized":
        tensors = {
            "weight_packed": packed_along(quants, 1, IN_TURN),
            "weight_scale": scales,
            "weight_shape": torch.tensor(quants.shape),
        }
        if zeros is not None:
            tensors["weight_zero_point"] = packed_along(zeros, 0, IN_TURN)
        return tensors if g_idx is None else tensors | {"weight_g_idx": g_idx.int()}
    zeros = torch.full(scales.shape, 8) if zeros is None else zeros
    tensors = {"scales": scales.T.contiguous()}
    if layout == "awq":
        assert g_idx is None
        return tensors | {
            "qweight": packed_along(quants.T, 1, AWQ_ORDER),
            "qzeros": packed_along(zeros.T, 1, AWQ_ORDER),
        }
    if g_idx is None:
        g_idx = torch.arange(quants.shape[1]) // (quants.shape[1] // scales.shape[1])
    return tensors | {
        "qweight": packed_along(quants.T, 0, IN_TURN),
        "qzeros": gptq_zeros(zeros, layout),
        "g_idx": g_idx.int(),
    }

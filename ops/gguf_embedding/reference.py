import torch

from vllm_triton.ops.gguf_mm.layout import ROWS, unpack


def gguf_embedding_reference(
    out: torch.Tensor, token_ids: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor
) -> None:
    groups, rows = token_ids // ROWS, token_ids % ROWS
    quants, scales = quants[groups, :, rows], scales[groups, :, rows]  # [T, W] and [T, S]
    wide = torch.promote_types(out.dtype, torch.float32)
    out.copy_(unpack(quants[..., None], scales[..., None], out.shape[1], wide))

import torch


def apply_token_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    for words, row in zip(bitmask, rows.tolist(), strict=True):
        if row >= 0:
            allowed = (words[tokens // 32] >> (tokens % 32)) & 1
            logits[row].masked_fill_(allowed == 0, float("-inf"))

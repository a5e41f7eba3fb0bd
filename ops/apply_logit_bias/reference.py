import torch


def apply_logit_bias_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    for row, token, value in zip(rows.tolist(), token_ids.tolist(), bias, strict=True):
        if row >= 0:
            logits[row, token] += value

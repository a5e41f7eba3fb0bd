import torch


def token_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(dim=-1)
    of_tokens = logits.gather(1, token_ids[:, None])
    ranks = (logits > of_tokens).sum(dim=-1) + 1
    return (of_tokens[:, 0] - lse).float(), ranks, lse.float()

import torch


def softcap_logits_reference(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (softcap * torch.tanh(wide / softcap)).to(logits.dtype)

import torch


def merge_attention_states_reference(
    out: torch.Tensor,
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    wide = torch.promote_types(out.dtype, torch.float32)
    total = torch.logaddexp(first_lse.to(wide), second_lse.to(wide))
    merged = torch.zeros_like(out, dtype=wide)
    for part, part_lse in ((first, first_lse), (second, second_lse)):
        weight = (part_lse.to(wide) - total).exp()[:, :, None]
        merged += torch.where(part_lse[:, :, None] > float("-inf"), weight * part, 0.0)
    out.copy_(merged)
    if lse is not None:
        lse.copy_(total)

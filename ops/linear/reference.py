import torch


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)

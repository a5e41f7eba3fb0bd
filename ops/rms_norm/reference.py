import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    mean_square = x_wide.square().mean(dim=-1, keepdim=True)
    return (x_wide * torch.rsqrt(mean_square + eps) * weight.to(wide)).to(x.dtype).contiguous()

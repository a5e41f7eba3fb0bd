import torch

# Rows and columns of a weight that share a scale, where a scale is of a block of it.
SCALE_BLOCK = 128


def scaled_mm_reference(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(out_dtype, torch.float32)
    x = a.to(wide) * per_value(a_scale, a.shape).to(wide)
    out = x @ (weight.to(wide) * per_value(weight_scale, weight.shape).to(wide)).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(out_dtype)


def per_value(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales [R] or [R, Q], where one row may be for all rows or for SCALE_BLOCK of them, repeated for every value."""
    for axis, size in enumerate(shape[: scale.dim()]):
        if scale.shape[axis] not in (1, size):
            scale = scale.repeat_interleave(SCALE_BLOCK, axis).narrow(axis, 0, size)
    return scale.reshape(*scale.shape, *[1] * (2 - scale.dim()))

import torch

# Values of `group_size` that count no columns.
PER_TENSOR, PER_TOKEN = 0, -1

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# The smallest normal float32.
SMALLEST_SCALE = 2.0**-126


def scaled_quant_reference(
    x: torch.Tensor, dtype: torch.dtype, group_size: int, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_columns = x.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale is not None:
        return quantized(wide, scale, dtype), scale.clone()
    if group_size == PER_TENSOR:
        largest = wide.abs().flatten().amax(0, keepdim=True) if x.numel() else wide.new_zeros(1)
        scales = scale_of(largest, dtype)
        return quantized(wide, scales, dtype), scales
    width = num_columns if group_size == PER_TOKEN else group_size
    groups = torch.nn.functional.pad(wide, (0, -num_columns % width)).unflatten(1, (-1, width))
    scales = scale_of(groups.abs().amax(2), dtype)
    values = quantized(groups, scales[:, :, None], dtype).flatten(1)
    return values[:, :num_columns].contiguous(), scales


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale that maps the largest magnitude to the end of the range."""
    # By a tensor: a number's reciprocal would be multiplied by on a GPU, and rounds differently.
    return (largest / torch.full_like(largest, LARGEST[dtype])).clamp(min=SMALLEST_SCALE)


def quantized(wide: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = (wide / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (values.round() if dtype == torch.int8 else values).to(dtype)

import torch


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    slots_per_page = key_cache.shape[1]
    if key_scale is not None and value_scale is not None:
        key, value = quantized(key, key_scale, key_cache.dtype), quantized(value, value_scale, value_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, slots_per_page)
            key_cache[page, offset] = key[token]
            value_cache[page, offset] = value[token]


def quantized(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values [T, G, D] over scale [1] or [G], in the range of dtype and, of integers, rounded."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) / scale[:, None]
    largest = 127.0 if dtype == torch.int8 else 448.0
    wide = wide.clamp(-largest, largest)
    return (wide.round() if dtype == torch.int8 else wide).to(dtype)

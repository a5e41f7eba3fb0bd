"""What a checked kernel is told of its tensors beside their addresses: which bytes are theirs."""

from collections.abc import Sequence
from typing import Any

# In place of a number of pairs: nothing is known, so nothing is refused.
_UNKNOWN = 2**64 - 1
Extent = list[tuple[int, int]]


class Address(int):
    """The address of a tensor's first element. extent: None where the argument has no shape."""

    extent: Extent | None

    @classmethod
    def of(cls, tensor: Any) -> "Address":
        address = cls(tensor.data_ptr())
        address.extent = extent(tensor)
        return address


def extent(tensor: Any) -> Extent | None:
    """The tensor's own bytes, as pairs (count, stride in bytes), outermost first, the last stride being 1: those at
    sum(index * stride) for every index below its count. Bytes between the rows of a view are not among them; where
    elements overlap, all from the first to the last are."""
    try:
        shape, strides, width = tensor.shape, tensor.stride(), tensor.element_size()
    except AttributeError:
        return None
    if 0 in shape:
        return [(0, 1)]
    axes = [(stride * width, size) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride > 0]
    pairs: Extent = [(width, 1)]  # innermost first
    span = width
    for stride, size in sorted(axes):
        inner_size, inner_stride = pairs[-1]
        overlaps = stride < span
        span += (size - 1) * stride
        if overlaps:
            pairs = [(span, 1)]
        elif stride == inner_size * inner_stride:
            pairs[-1] = (size * inner_size, inner_stride)
        else:
            pairs.append((size, stride))
    return pairs[::-1]


def with_extents(slots: Sequence[int]) -> list[int]:
    """The slots of a launch, and behind them what runtime/bounds.h expects."""
    places: list[int] = []
    blocks: list[int] = [_UNKNOWN]
    for slot in slots:
        known = slot.extent if isinstance(slot, Address) else None
        if known is None:
            places.append(2 * len(slots))
            continue
        places.append(2 * len(slots) + len(blocks))
        blocks.append(len(known))
        for count, stride in known:
            blocks += (count, stride)
    return [*slots, *places, *blocks]

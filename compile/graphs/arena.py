"""Memory for recorded launches: it keeps its place, and what one recording no longer needs serves the next.

A launch list holds addresses. The tensors that were made while it recorded are gone by the time it is replayed, so
their memory must be nobody else's: it comes from an arena, which outlives the lists. Within a recording, and from one
to the next, a block is free again once its last tensor is gone: lists that share an arena overwrite one another's
intermediate values, which is right as long as they run one at a time.
"""

import bisect
import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

# Of the addresses of blocks: what torch's own allocator gives, so that kernels are specialised alike.
ALIGNMENT = 64


class Arena:
    """Not thread-safe: one thread records at a time."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._free: list[tuple[int, int]] = []  # size and number of each free block, ascending
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the smallest free block that holds it, or in a new one."""
        num_elements = 0 if 0 in shape else 1 + sum((s - 1) * step for s, step in zip(shape, strides, strict=True))
        num_bytes = num_elements * dtype.itemsize
        number = self._take(num_bytes)
        # torch holds this view as long as a tensor lies in it.
        lease = self._blocks[number][:num_bytes]
        weakref.finalize(lease, self._give_back, number).atexit = False
        return torch.from_numpy(lease).view(dtype).as_strided(shape, strides)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping its block from others: for the results of a graph.

        Raises: ValueError for a tensor that lies elsewhere.
        """
        if tensor.numel() == 0:
            return tensor.detach().clone()
        for block in self._blocks:
            offset = tensor.data_ptr() - block.ctypes.data
            if 0 <= offset < block.nbytes:
                return torch.from_numpy(block[offset:]).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        raise ValueError("the tensor does not lie in this arena")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in here."""
        address = tensor.data_ptr()
        return any(0 <= address - block.ctypes.data < block.nbytes for block in self._blocks)

    def _take(self, num_bytes: int) -> int:
        place = bisect.bisect_left(self._free, (num_bytes, -1))
        if place < len(self._free):
            return self._free.pop(place)[1]
        size = max(math.ceil(num_bytes / ALIGNMENT), 1) * ALIGNMENT
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._blocks.append(memory[start : start + size])
        self.num_bytes += size
        return len(self._blocks) - 1

    def _give_back(self, number: int) -> None:
        bisect.insort(self._free, (self._blocks[number].nbytes, number))

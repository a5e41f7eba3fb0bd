"""Static input buffers: filled with numpy on the host, read by the model at a fixed address on the device."""

import numpy as np
import torch


class InputBuffer:
    """A host array and its twin on the device; on a CPU platform they are the same memory.

    Args:
        shape: largest extent.
        dtype: torch dtype of both.
        device: where the model reads.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device):
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_host)
        self.np: np.ndarray = self._host.numpy()
        self._device = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, count: int) -> torch.Tensor:
        """The first `count` rows as the model sees them; the copy is ordered before later work on the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]

"""Static input buffers: filled with numpy on the host, read by the model at a fixed address on the device."""

import numpy
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
        self._array = self._host.numpy()
        self._device = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self._uploaded = None if on_host else torch.Event(device)
        self._views: dict[int, torch.Tensor] = {}  # by count: torch takes longer to make one than to find it here

    @property
    def np(self) -> numpy.ndarray:
        """The host array, to be written. Waits for the last upload to have read it: the device may lag by steps,
        since only a step that samples waits for it."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        return self._array

    def upload(self, count: int) -> torch.Tensor:
        """The first `count` rows as the model sees them; the copy is ordered before later work on the device."""
        if self._uploaded is not None:
            with torch.inference_mode():
                self._device[:count].copy_(self._host[:count], non_blocking=True)
            self._uploaded.record()
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._device[:count]
        return view

"""Input buffers: what the model reads is what was written for its step, however late the device copies it."""

import torch

from vllm_triton.runner.buffers import InputBuffer


class LateDevice:
    """A device's memory and its event: copies run only when somebody waits for them."""

    def __init__(self):
        self.asked, self.pending, self.copied = [], [], []

    def __getitem__(self, rows):
        return self

    def copy_(self, source, non_blocking):
        self.asked.append(source)

    def record(self):
        self.pending, self.asked = self.pending + self.asked, []

    def synchronize(self):
        self.copied.extend(source.tolist() for source in self.pending)
        self.pending = []


def test_memory_is_not_overwritten_before_it_was_copied(monkeypatch):
    late, zeros = LateDevice(), torch.zeros

    def zeros_without_gpu(*args, pin_memory=False, device=None, **kwargs):
        return zeros(*args, **kwargs) if device is None else late

    monkeypatch.setattr(torch, "zeros", zeros_without_gpu)
    monkeypatch.setattr(torch, "Event", lambda where: late)
    buffer = InputBuffer(4, dtype=torch.int64, device=torch.device("cuda"))
    for step in range(3):
        buffer.np[:2] = [step, step + 10]
        buffer.upload(2)
    late.synchronize()
    assert late.copied == [[0, 10], [1, 11], [2, 12]]


def test_on_the_host_nothing_is_copied():
    buffer = InputBuffer(4, dtype=torch.int64, device=torch.device("cpu"))
    buffer.np[:] = [1, 2, 3, 4]
    uploaded = buffer.upload(2)
    buffer.np[0] = 9
    assert uploaded.tolist() == [9, 2]

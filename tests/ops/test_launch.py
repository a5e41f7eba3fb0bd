import pytest
import torch

from vllm_triton.ops import launch
from vllm_triton.ops.launch import block_size, rows_aligned, supports_weights
from vllm_triton.ops.registry import Situation


def test_block_size_is_a_power_of_two_that_holds_the_size():
    assert [block_size(size, 64) for size in (1, 2, 3, 63, 64, 65)] == [1, 2, 4, 64, 64, 64]


def test_rows_are_aligned_where_every_leading_stride_is_a_multiple_of_16():
    assert rows_aligned(torch.empty(3, 32), torch.empty(2, 2, 16))
    assert not rows_aligned(torch.empty(3, 32), torch.empty(3, 24))
    assert not rows_aligned(torch.empty(3, 64)[:, :48].unflatten(1, (6, 8)))
    assert rows_aligned(torch.empty(3, 64)[:, :24])


def test_the_stride_of_a_single_row_does_not_matter():
    assert rows_aligned(torch.empty(1, 24), torch.empty(4, 1, 32)[:, :, :24])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, None])
def test_weights_of_fp8_need_a_gpu_that_has_it(monkeypatch, dtype):
    situation = Situation("cuda", weight_dtype=dtype)
    monkeypatch.setattr(launch, "lacks_fp8", lambda device: False)
    assert supports_weights(situation) is None
    monkeypatch.setattr(launch, "lacks_fp8", lambda device: device == "cuda")
    assert ("no fp8 e4m3" in (supports_weights(situation) or "")) == (dtype == torch.float8_e4m3fn)

import pytest
import torch

from vllm_triton.ops import embedding


@pytest.mark.parametrize("implementation", list(embedding.implementations))
def test_copies_rows_bit_for_bit(implementation):
    table = torch.randn(5, 63).bfloat16()
    table[3, 7] = float("nan")
    out = embedding.implementations[implementation](torch.tensor([4, 3, 3, 0]), table)
    assert torch.equal(out.view(torch.int16), table[[4, 3, 3, 0]].view(torch.int16))


@pytest.mark.parametrize("implementation", list(embedding.implementations))
def test_a_scaled_row_is_rounded_once(implementation):
    table = torch.randn(5, 63).half()
    out = embedding.implementations[implementation](torch.tensor([4, 3]), table, 33.94)
    assert torch.equal(out, (table[[4, 3]].float() * 33.94).half())


def test_rows_of_several_blocks():
    from vllm_triton.ops.launch import LARGEST_CPU_ROW_BLOCK

    table = torch.randn(3, 2 * LARGEST_CPU_ROW_BLOCK + 63)
    assert torch.equal(embedding.implementations["triton"](torch.tensor([2, 0]), table), table[[2, 0]])

import pytest
import torch

from vllm_triton.ops import rotary_embedding
from vllm_triton.ops.errors import ShapeError

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(rotary_embedding.implementations))


def _cos_sin(num_positions: int, rotary: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = torch.arange(num_positions)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


@IMPLEMENTATIONS
@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_each_pair_as_a_complex_product(implementation, interleaved):
    positions = torch.tensor([0, 5, 31])
    query, key = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    actual = rotary_embedding.implementations[implementation](positions, query, key, _cos_sin(32, 16), interleaved)
    for heads, turned in zip((query, key), actual, strict=True):
        pairs = heads.unflatten(-1, (8, 2) if interleaved else (2, 8))
        first, second = pairs.unbind(-1 if interleaved else -2)
        frequency = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        turn = torch.polar(torch.ones(3, 1, 8), positions[:, None, None] * frequency)
        expected = torch.complex(first, second) * turn
        expected = torch.stack([expected.real, expected.imag], dim=-1 if interleaved else -2).flatten(-2)
        torch.testing.assert_close(turned, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(implementation, interleaved):
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    scores = []
    for query_position, key_position in ((7, 3), (107, 103)):
        function = rotary_embedding.implementations[implementation]
        table = _cos_sin(128, 32)
        turned_query, _ = function(torch.tensor([query_position]), query, key, table, interleaved)
        _, turned_key = function(torch.tensor([key_position]), query, key, table, interleaved)
        scores.append((turned_query * turned_key).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@IMPLEMENTATIONS
def test_partial_rotary_copies_the_rest(implementation):
    query, key = torch.randn(2, 3, 24).bfloat16(), torch.randn(2, 1, 24).bfloat16()
    positions = torch.tensor([3, 9])
    turned = rotary_embedding.implementations[implementation](positions, query, key, _cos_sin(10, 8), False)
    for before, after in zip((query, key), turned, strict=True):
        assert torch.equal(after[..., 8:], before[..., 8:])
        assert not torch.equal(after[..., :8], before[..., :8])


@IMPLEMENTATIONS
def test_results_are_contiguous_and_share_no_memory(implementation):
    fused = torch.randn(1, 6 * 8)
    query, key = fused[:, :32].view(1, 4, 8), fused[:, 32:].view(1, 2, 8)
    results = rotary_embedding.implementations[implementation](torch.zeros(1).long(), query, key, _cos_sin(1, 8), False)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (fused, *results)}
    assert len(storages) == 3
    assert all(result.is_contiguous() for result in results)


def test_more_heads_than_a_tile_holds():
    from vllm_triton.ops.rotary_embedding import kernel

    assert kernel.select_config(num_heads=128, head_size=128, rotary=128).block_heads == 64
    positions, query, key = torch.tensor([2]), torch.randn(1, 128, 128), torch.randn(1, 70, 128)
    arguments = (positions, query, key, _cos_sin(3, 128), False)
    for actual, expected in zip(
        rotary_embedding.implementations["triton"](*arguments), rotary_embedding.reference(*arguments), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rotary", [3, 10])
def test_refuses_a_rotary_size_that_is_odd_or_larger_than_the_head(rotary):
    query = torch.randn(1, 1, 8)
    message = f"rotary_embedding: cos_sin must have an even size R of at most D = 8 in axis 1, got {rotary}"
    with pytest.raises(ShapeError, match=message):
        rotary_embedding(torch.zeros(1).long(), query, query, torch.randn(4, rotary), False)

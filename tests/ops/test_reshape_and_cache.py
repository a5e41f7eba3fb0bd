import pytest
import torch

from vllm_triton.ops import reshape_and_cache

NAN = float("nan")
PAGES, SLOTS, HEADS, HEAD_SIZE = 4, 16, 2, 8
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(reshape_and_cache.implementations))


def _separate_caches():
    return torch.full((2, PAGES, SLOTS, HEADS, HEAD_SIZE), NAN).unbind(0)


def _side_by_side_caches():
    return torch.full((PAGES, 2, SLOTS, HEADS, HEAD_SIZE), NAN).unbind(1)


def _heads_before_slots_caches():
    return torch.full((2, PAGES, HEADS, SLOTS, HEAD_SIZE), NAN).transpose(2, 3).unbind(0)


LAYOUTS = pytest.mark.parametrize("make_caches", [_separate_caches, _side_by_side_caches, _heads_before_slots_caches])


@IMPLEMENTATIONS
@LAYOUTS
def test_writes_the_named_slots_and_no_other_cell(implementation, make_caches):
    key_cache, value_cache = make_caches()
    key, value = torch.randn(2, 3, HEADS, HEAD_SIZE)
    reshape_and_cache.implementations[implementation](key, value, key_cache, value_cache, torch.tensor([17, -1, 63]))
    for cache, written in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[1, 1], written[0])
        assert torch.equal(cache[3, 15], written[2])
        untouched = torch.ones(PAGES, SLOTS, dtype=torch.bool)
        untouched[1, 1] = untouched[3, 15] = False
        assert cache[untouched].isnan().all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_batch_of_padding_writes_nothing(implementation, num_tokens):
    key_cache, value_cache = _separate_caches()
    key = torch.randn(num_tokens, HEADS, HEAD_SIZE)
    slots = torch.full((num_tokens,), -1)
    reshape_and_cache.implementations[implementation](key, key, key_cache, value_cache, slots)
    assert key_cache.isnan().all() and value_cache.isnan().all()


@IMPLEMENTATIONS
def test_reads_views_of_a_fused_projection(implementation):
    projection = torch.randn(5, 3 * HEADS * HEAD_SIZE)
    key, value = (part.view(5, HEADS, HEAD_SIZE) for part in projection.chunk(3, dim=-1)[1:])
    key_cache, value_cache = _separate_caches()
    reshape_and_cache.implementations[implementation](key, value, key_cache, value_cache, torch.arange(5))
    assert torch.equal(key_cache[0, :5], key) and torch.equal(value_cache[0, :5], value)


@IMPLEMENTATIONS
def test_the_order_of_tokens_does_not_matter(implementation):
    key, value = torch.randn(2, 6, HEADS, HEAD_SIZE)
    slots = torch.tensor([3, 40, -1, 12, 0, 63])
    written = []
    for order in (torch.arange(6), torch.tensor([4, 2, 0, 5, 1, 3])):
        key_cache, value_cache = _separate_caches()
        reshape_and_cache.implementations[implementation](
            key[order], value[order], key_cache, value_cache, slots[order]
        )
        written.append((key_cache.nan_to_num(), value_cache.nan_to_num()))
    assert torch.equal(written[0][0], written[1][0]) and torch.equal(written[0][1], written[1][1])


def test_torch_is_refused_where_a_host_read_would_stop_the_device():
    from vllm_triton.ops.registry import Situation

    implementation = reshape_and_cache.implementations["torch"]
    assert implementation.supports(Situation("cpu")) is None
    assert "host" in implementation.supports(Situation("cuda"))

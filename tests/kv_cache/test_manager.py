"""The manager: which blocks a request gets, which it finds, and what stays when it leaves."""

import pytest

from vllm_triton.engine.messages import EngineRequest
from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache import KVCacheError, KVCacheManager
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.request import Request

BLOCK_SIZE = 16


def make_manager(num_blocks=11, enable_caching=True):
    return KVCacheManager(num_blocks, BLOCK_SIZE, enable_caching)


def make_request(token_ids, cache_salt=None, request_id="request"):
    source = EngineRequest(request_id, list(token_ids), SamplingParams(), cache_salt=cache_salt)
    return Request(source, max_num_tokens=10**6, sequence_number=0)


def start(manager, request):
    """Computes all the request's tokens, as one step would. Returns: new blocks or None, and the tokens found."""
    computed_blocks, num_computed = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(request, request.num_tokens - num_computed, computed_blocks)
    if new_blocks is not None:
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, request.num_tokens)
    return new_blocks, num_computed


def block_ids(blocks):
    return [block.block_id for block in blocks]


def test_a_second_request_shares_the_full_blocks_of_the_first():
    manager = make_manager()
    first = make_request(range(55), request_id="first")
    new_blocks, num_computed = start(manager, first)
    assert (block_ids(new_blocks), num_computed) == ([1, 2, 3, 4], 0)
    assert [block.block_hash is not None for block in new_blocks] == [True, True, True, False]

    second = make_request([*range(48), *range(100, 107)], request_id="second")
    new_blocks, num_computed = start(manager, second)
    assert (block_ids(new_blocks), num_computed) == ([5], 48)
    assert block_ids(second.blocks) == [1, 2, 3, 5]
    assert [block.ref_cnt for block in second.blocks] == [2, 2, 2, 1]
    assert manager.pool.num_free_blocks == 5
    manager.check_integrity([first, second])
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (110, 48)


def test_looking_a_prefix_up_changes_no_reference_count():
    manager = make_manager()
    first = make_request(range(55))
    start(manager, first)
    manager.get_computed_blocks(make_request(range(55)))
    assert [block.ref_cnt for block in first.blocks] == [1, 1, 1, 1]


@pytest.mark.parametrize(("num_tokens", "hit"), [(48, 32), (49, 48), (16, 0), (17, 16), (1, 0)])
def test_a_full_hit_leaves_the_last_token_to_compute(num_tokens, hit):
    manager = make_manager()
    start(manager, make_request(range(num_tokens)))
    again = make_request(range(num_tokens), request_id="again")
    new_blocks, num_computed = start(manager, again)
    assert num_computed == hit
    assert len(new_blocks) == 1


def test_a_cached_block_reused_for_a_partial_fill_loses_its_hash():
    manager = make_manager(num_blocks=2)
    first = make_request(range(16))
    start(manager, first)
    manager.free(first)
    assert manager.pool.num_cached_hashes == 1
    [block], _ = start(manager, make_request(range(100, 105)))
    assert block.block_hash is None
    assert manager.pool.num_cached_hashes == 0


def test_too_few_free_blocks_change_nothing():
    manager = make_manager(num_blocks=5)
    cached, other = make_request(range(32), request_id="cached"), make_request(range(200, 216), request_id="other")
    start(manager, cached)
    start(manager, other)
    manager.free(cached)
    before = [(block.ref_cnt, block.block_hash) for block in manager.pool.blocks]
    queued = list(manager.pool.free_queue)

    # Three blocks are free, two of them its own prefix, and it needs two more.
    wanting = make_request([*range(32), *range(300, 332)], request_id="wanting")
    computed_blocks, num_computed = manager.get_computed_blocks(wanting)
    assert num_computed == 32
    assert manager.allocate_slots(wanting, 32, computed_blocks) is None
    assert [(block.ref_cnt, block.block_hash) for block in manager.pool.blocks] == before
    assert list(manager.pool.free_queue) == queued
    assert wanting.blocks == []
    assert manager.prefix_cache_queries == 48

    fitting = make_request([*range(32), *range(300, 316)], request_id="fitting")
    new_blocks, num_computed = start(manager, fitting)
    assert (len(new_blocks), num_computed) == (1, 32)
    manager.check_integrity([other, fitting])


def test_a_request_is_let_in_only_if_all_its_tokens_fit():
    manager = make_manager(num_blocks=5)
    holder = make_request(range(16), request_id="holder")
    start(manager, holder)
    long = make_request(range(100, 164), request_id="long")
    assert manager.allocate_slots(long, 16) is None
    manager.free(holder)
    assert len(manager.allocate_slots(long, 16)) == 1


def test_the_salt_separates_caches():
    manager = make_manager(num_blocks=30)
    start(manager, make_request(range(55), "tenant", "first"))
    assert manager.get_computed_blocks(make_request(range(55), "tenant"))[1] == 48
    assert manager.get_computed_blocks(make_request(range(55), "another"))[1] == 0
    assert manager.get_computed_blocks(make_request(range(55), None))[1] == 0


def test_a_freed_request_is_found_until_its_blocks_are_reused_from_the_tail():
    manager = make_manager(num_blocks=5)
    first = make_request(range(64))
    start(manager, first)
    manager.free(first)
    other = make_request(range(100, 116), request_id="other")
    start(manager, other)
    assert manager.get_computed_blocks(make_request(range(65)))[1] == 48
    manager.free(other)
    assert manager.get_computed_blocks(make_request(range(65)))[1] == 48


def test_blocks_of_output_tokens_are_found_too():
    manager = make_manager()
    first = make_request(range(15))
    start(manager, first)
    for token in range(15, 40):
        first.token_ids.append(token)
        manager.allocate_slots(first, 1)
        first.num_computed_tokens += 1
        manager.cache_blocks(first, first.num_computed_tokens)
    assert len(first.blocks) == 3
    assert len(first.block_hashes) == 2
    assert manager.get_computed_blocks(make_request(range(40)))[1] == 32


def test_resetting_is_refused_while_a_request_holds_blocks():
    manager = make_manager()
    first, second = make_request(range(55)), make_request(range(55), request_id="second")
    start(manager, first)
    start(manager, second)
    manager.free(first)
    assert not manager.reset_prefix_cache()
    manager.free(second)
    assert manager.reset_prefix_cache()
    assert manager.pool.num_cached_hashes == 0
    assert manager.get_computed_blocks(first)[1] == 0


def test_without_caching_nothing_is_hashed_or_found():
    manager = make_manager(enable_caching=False)
    first = make_request(range(55))
    start(manager, first)
    assert first.block_hashes == []
    assert manager.get_computed_blocks(make_request(range(55))) == ([], 0)
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (0, 0)


def test_what_can_fit():
    manager = make_manager()
    assert manager.max_num_tokens == 160
    assert manager.can_fit(160)
    assert not manager.can_fit(161)


def test_the_integrity_check_finds_a_holder_that_is_not_counted():
    manager = make_manager()
    first = make_request(range(20), request_id="first")
    start(manager, first)
    manager.check_integrity([first])
    with pytest.raises(KVCacheError, match=r"Block\(1, ref_cnt=1, .*\) is held by \[\]"):
        manager.check_integrity([])
    first.blocks.append(first.blocks[0])
    first.blocks[0].ref_cnt = 2
    with pytest.raises(KVCacheError, match=r"held by \['first', 'first'\]"):
        manager.check_integrity([first])


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        KVCacheManager(4, 0)

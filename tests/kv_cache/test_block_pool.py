"""The block pool: order of reuse, reference counts, hashes, and the checks that find its faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache import BlockPool, KVCacheError
from vllm_triton.kv_cache.block import Block, FreeBlockQueue


def block_ids(blocks):
    return [block.block_id for block in blocks]


def hash_of(number):
    return number.to_bytes(32, "little")


def test_popping_from_an_empty_queue_says_so():
    queue = FreeBlockQueue([])
    with pytest.raises(KVCacheError, match="free queue is empty"):
        queue.popleft()


@given(st.lists(st.tuples(st.sampled_from(["popleft", "remove", "append", "appendleft"]), st.integers(0, 7))))
def test_the_queue_behaves_as_a_list(operations):
    blocks = [Block(block_id) for block_id in range(8)]
    queue, expected = FreeBlockQueue(blocks[:4]), blocks[:4]
    for operation, index in operations:
        block = blocks[index]
        if operation == "popleft":
            if not expected:
                continue
            assert queue.popleft() is expected.pop(0)
        elif operation == "remove":
            if block not in expected:
                with pytest.raises(KVCacheError, match="not in the free queue"):
                    queue.remove(block)
                continue
            queue.remove(block)
            expected.remove(block)
        elif block in expected:
            with pytest.raises(KVCacheError, match="already in the free queue"):
                getattr(queue, operation)(block)
        else:
            getattr(queue, operation)(block)
            expected.insert(0 if operation == "appendleft" else len(expected), block)
        assert list(queue) == expected
        assert len(queue) == len(expected)


def test_block_zero_is_never_handed_out():
    pool = BlockPool(4)
    assert block_ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.num_free_blocks == 0
    assert pool.usage == 1.0
    with pytest.raises(KVCacheError, match="1 blocks were asked for but the free queue holds 0"):
        pool.get_new_blocks(1)


def test_a_pool_needs_a_block_to_hand_out():
    with pytest.raises(ConfigError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_a_refused_request_for_blocks_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(KVCacheError):
        pool.get_new_blocks(4)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_the_tail_is_reused_first_and_unhashed_blocks_before_all():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks[:3], [hash_of(index) for index in range(3)])
    pool.free_blocks(blocks)
    assert block_ids(pool.free_queue) == [4, 5, 3, 2, 1]
    pool.check_integrity()


def test_usage_is_a_fraction_of_the_usable_blocks():
    pool = BlockPool(11)
    assert pool.usage == 0.0
    pool.get_new_blocks(4)
    assert pool.usage == pytest.approx(0.4)


def test_touch_takes_a_free_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(blocks, [hash_of(index) for index in range(5)])
    pool.free_blocks(blocks)
    pool.touch([blocks[2]])
    assert block_ids(pool.free_queue) == [5, 4, 2, 1]
    pool.touch([blocks[2]])
    assert blocks[2].ref_cnt == 2
    pool.check_integrity()
    pool.free_blocks([blocks[2]])
    assert pool.num_free_blocks == 4
    pool.free_blocks([blocks[2]])
    assert pool.num_free_blocks == 5


def test_a_reused_block_loses_its_hash():
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [hash_of(7)])
    pool.free_blocks([block])
    assert pool.get_cached_block(hash_of(7)) is block
    pool.get_new_blocks(1)
    assert block.block_hash is None
    assert pool.get_cached_block(hash_of(7)) is None
    assert pool.num_cached_hashes == 0


def test_evicting_one_of_three_equal_blocks_leaves_the_others_findable():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cache_full_blocks([block], [hash_of(7)])
    assert pool.num_cached_hashes == 1
    for left in (2, 1, 0):
        evicted = pool.get_cached_block(hash_of(7))
        pool.free_blocks([evicted])
        assert pool.get_new_blocks(1) == [evicted]
        pool.check_integrity()
        found = pool.get_cached_block(hash_of(7))
        assert (found is not None) == (left > 0)
        assert found is not evicted


def test_a_full_block_is_cached_once():
    pool = BlockPool(3)
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [hash_of(1)])
    with pytest.raises(KVCacheError, match="block 1 already has a hash"):
        pool.cache_full_blocks([block], [hash_of(2)])


def test_freeing_twice_is_an_error():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(KVCacheError, match="block 1 was freed but nobody holds it"):
        pool.free_blocks(blocks)


def test_the_prefix_cache_is_reset_only_when_no_block_is_held():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks[:2], [hash_of(1), hash_of(2)])
    pool.free_blocks(blocks[1:])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(hash_of(2)) is blocks[1]
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    assert pool.num_cached_hashes == 0
    assert all(block.block_hash is None for block in pool.blocks)
    pool.check_integrity()


def leak(pool, held):
    held.ref_cnt = 0


def queue_held(pool, held):
    pool.free_queue.append(held)


def miscount(pool, held):
    pool.free_queue._length += 1


def go_negative(pool, held):
    held.ref_cnt = -1


def use_null(pool, held):
    pool.null_block.ref_cnt = 1


def hash_unfindably(pool, held):
    held.block_hash = hash_of(9)


def hash_differently(pool, held):
    pool.cache_full_blocks([held], [hash_of(1)])
    held.block_hash = hash_of(2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leak, r"blocks \[1\] are either free or queued"),
        (queue_held, r"blocks \[1\] are either free or queued"),
        (miscount, "counts 4 blocks and links 3"),
        (go_negative, r"blocks \[1\] have a negative ref_cnt"),
        (use_null, "the null block is in use"),
        (hash_unfindably, r"blocks \[1\] are either hashed or findable"),
        (hash_differently, "is cached under another hash"),
    ],
)
def test_the_integrity_check_finds(damage, message):
    pool = BlockPool(5)
    [held] = pool.get_new_blocks(1)
    pool.check_integrity()
    damage(pool, held)
    with pytest.raises(KVCacheError, match=message):
        pool.check_integrity()

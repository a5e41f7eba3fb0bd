"""Block hashes: what enters them, and that they are computed once."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_triton.kv_cache import hashing
from vllm_triton.kv_cache.hashing import ROOT_HASH, extend_block_hashes, hash_block

BLOCK_SIZE = 4
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def hashes_of(token_ids, cache_salt=None):
    hashes = []
    extend_block_hashes(hashes, len(token_ids) // BLOCK_SIZE, token_ids, BLOCK_SIZE, cache_salt)
    return hashes


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_hashes_agree_exactly_on_the_shared_full_blocks(first, second):
    first_hashes, second_hashes = hashes_of(first), hashes_of(second)
    for index, (left, right) in enumerate(zip(first_hashes, second_hashes, strict=False)):
        end = (index + 1) * BLOCK_SIZE
        assert (left == right) == (first[:end] == second[:end])


@given(TOKENS, st.data())
def test_growing_step_by_step_gives_the_same_hashes(token_ids, data):
    hashes: list[bytes] = []
    for num_blocks in sorted(data.draw(st.lists(st.integers(0, len(token_ids) // BLOCK_SIZE)))):
        extend_block_hashes(hashes, num_blocks, token_ids, BLOCK_SIZE, None)
        assert len(hashes) == num_blocks
    assert hashes_of(token_ids)[: len(hashes)] == hashes


def test_no_hash_is_computed_twice(monkeypatch):
    computed = []

    def counting(*args):
        computed.append(args)
        return hash_block(*args)

    monkeypatch.setattr(hashing, "hash_block", counting)
    token_ids, hashes = list(range(20)), []
    for num_blocks in (1, 1, 3, 2, 5):
        extend_block_hashes(hashes, num_blocks, token_ids, BLOCK_SIZE, "salt")
    assert len(computed) == len(hashes) == 5
    assert [extra_keys for _, _, extra_keys in computed] == [("salt",), (), (), (), ()]


def test_the_salt_changes_every_block_of_the_chain():
    token_ids = list(range(12))
    plain, salted, empty = hashes_of(token_ids), hashes_of(token_ids, "a"), hashes_of(token_ids, "")
    assert len({*plain, *salted, *empty}) == 9


def test_extra_keys_do_not_run_together():
    variants = [(), ("",), ("", ""), ("ab",), ("a", "b"), ("\ud800",)]
    hashes = {hash_block(ROOT_HASH, [1, 2, 3, 4], extra_keys) for extra_keys in variants}
    assert len(hashes) == len(variants)

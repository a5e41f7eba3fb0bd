"""Chained block hashes: the hash of a block names its tokens and all tokens before them.

Two sequences with the same hash at block i share their first (i + 1) * block_size tokens, so that one dictionary
lookup per block finds the longest cached prefix. SHA-256 keeps a user from building a prompt that collides with
another user's.
"""

import hashlib
from array import array
from collections.abc import Sequence

ROOT_HASH = hashlib.sha256(b"vllm_triton block chain").digest()


def hash_block(parent_hash: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """The hash of one full block.

    Args:
        parent_hash: hash of the block before it, ROOT_HASH for the first one, 32 bytes.
        token_ids: the block's tokens, each in 0..2**32 - 1; always block_size of them.
        extra_keys: what else changes the content, for example the cache salt.
    Returns: 32 bytes.
    """
    digest = hashlib.sha256(parent_hash)
    digest.update(array("I", token_ids))
    for key in extra_keys:
        # The length in front keeps ("ab",) and ("a", "b") apart; a lone surrogate may come out of a JSON string.
        encoded = key.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def extend_block_hashes(
    block_hashes: list[bytes], num_blocks: int, token_ids: list[int], block_size: int, cache_salt: str | None
) -> None:
    """Appends to `block_hashes` until it holds `num_blocks`; hashes that are there are not computed again.

    Args:
        block_hashes: the sequence's hashes so far, one per full block.
        num_blocks: at most len(token_ids) // block_size.
        cache_salt: separates users who must not share a cache. It enters the first block alone: the chain carries
            it to the others.
    """
    for index in range(len(block_hashes), num_blocks):
        parent_hash = block_hashes[-1] if block_hashes else ROOT_HASH
        extra_keys = (cache_salt,) if index == 0 and cache_salt is not None else ()
        block_token_ids = token_ids[index * block_size : (index + 1) * block_size]
        block_hashes.append(hash_block(parent_hash, block_token_ids, extra_keys))

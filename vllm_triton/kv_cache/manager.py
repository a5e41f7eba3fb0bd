"""KVCacheManager: gives requests the blocks for their tokens and finds those that are computed already."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache.block import Block, KVCacheError
from vllm_triton.kv_cache.block_pool import BlockPool
from vllm_triton.kv_cache.hashing import extend_block_hashes

if TYPE_CHECKING:
    from vllm_triton.scheduler.request import Request


class KVCacheManager:
    """Blocks of full-attention layers, one list per request.

    The fields `blocks`, `num_slots`, `block_hashes` and `next_full_block_at` of a Request are written here alone.

    Args:
        num_blocks: blocks of the cache, the null block included, at least 2.
        block_size: tokens per block, >= 1.
        enable_caching: whether full blocks can be found by later requests with the same prefix.
    Raises: ConfigError.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True):
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching)
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds when nobody else uses it."""
        return self.pool.num_usable_blocks * self.block_size

    def can_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of this many tokens can ever be held."""
        return num_tokens <= self.max_num_tokens

    def get_computed_blocks(self, request: "Request") -> tuple[list[Block], int]:
        """The longest cached prefix of a request that holds no blocks. Changes no reference count.

        At least one token is left to compute, since its logits are what the step is for.

        Returns: the blocks, and the tokens in them: a multiple of block_size, at most request.num_tokens - 1.
        """
        blocks: list[Block] = []
        if self.enable_caching:
            for index in range((request.num_tokens - 1) // self.block_size):
                self._hash_blocks(request, index + 1)
                block = self.pool.get_cached_block(request.block_hashes[index])
                if block is None:
                    break
                blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self, request: "Request", num_new_tokens: int, new_computed_blocks: Sequence[Block] = ()
    ) -> list[Block] | None:
        """Gives a request the blocks for its next tokens.

        A request without blocks is let in only if all tokens it has now would fit: letting in a first chunk of a
        prompt whose rest does not fit would end in a preemption.

        Args:
            num_new_tokens: tokens to compute after the computed ones and those in new_computed_blocks.
            new_computed_blocks: what get_computed_blocks found, for a request without blocks.
        Returns: the blocks taken from the free queue (perhaps none); None, with nothing changed, if too few are free.
        """
        held = request.blocks or new_computed_blocks
        num_tokens = request.num_computed_tokens + len(new_computed_blocks) * self.block_size + num_new_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - len(held)
        num_needed = num_new_blocks
        if not request.blocks:
            num_whole_sequence = -(-request.num_tokens // self.block_size) - len(held)
            num_revived = sum(block.ref_cnt == 0 for block in new_computed_blocks)
            num_needed = max(num_new_blocks, num_whole_sequence) + num_revived
        if num_needed > self.pool.num_free_blocks:
            return None

        if not request.blocks:
            self._admit(request, new_computed_blocks)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new_blocks)
        request.blocks += new_blocks
        request.num_slots = len(request.blocks) * self.block_size
        return new_blocks

    def _admit(self, request: "Request", computed_blocks: Sequence[Block]) -> None:
        self.pool.touch(computed_blocks)
        num_computed_tokens = len(computed_blocks) * self.block_size
        request.blocks = list(computed_blocks)
        request.num_slots = num_computed_tokens
        request.next_full_block_at = num_computed_tokens + self.block_size
        # A request that returns after a preemption finds its own blocks: counting them would flatter the hit rate.
        if self.enable_caching and request.num_preemptions == 0:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_computed_tokens

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """Makes the blocks that are full after num_computed_tokens findable.

        To be called once it is certain that those tokens are computed in this step or were before it.
        """
        num_cached = request.next_full_block_at // self.block_size - 1
        num_full = num_computed_tokens // self.block_size
        if num_full <= num_cached:
            return
        request.next_full_block_at = (num_full + 1) * self.block_size
        if self.enable_caching:
            self._hash_blocks(request, num_full)
            self.pool.cache_full_blocks(request.blocks[num_cached:num_full], request.block_hashes[num_cached:num_full])

    def _hash_blocks(self, request: "Request", num_blocks: int) -> None:
        extend_block_hashes(request.block_hashes, num_blocks, request.token_ids, self.block_size, request.cache_salt)

    def free(self, request: "Request") -> None:
        """Takes all blocks of a request back; cached ones stay findable until they are reused."""
        self.pool.free_blocks(request.blocks)
        request.blocks = []
        request.num_slots = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; refused, with False, while any block is held."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self, requests: Iterable["Request"]) -> None:
        """Checks the pool, and that each block's ref_cnt is the number of requests that hold it.

        Args:
            requests: all requests that may hold blocks.
        Raises: KVCacheError that names the blocks.
        """
        self.pool.check_integrity()
        holders: dict[int, list[str]] = {}
        for request in requests:
            for block in request.blocks:
                holders.setdefault(block.block_id, []).append(request.request_id)
        for block in self.pool.blocks:
            names = holders.get(block.block_id, [])
            if len(names) != block.ref_cnt or len(names) != len(set(names)):
                raise KVCacheError(f"{block} is held by {names}: ref_cnt must be the number of its holders, each once")

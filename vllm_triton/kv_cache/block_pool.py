"""The pool of blocks: who holds them, which are free, and which can be found again by the hash of their content."""

import logging
from collections.abc import Sequence

from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache.block import Block, FreeBlockQueue, KVCacheError

logger = logging.getLogger(__name__)


class BlockPool:
    """Hands out blocks and takes them back.

    Block 0 is the null block: a place holder in block tables, never handed out, freed or hashed. A freed block with
    a hash stays findable until it is reused; the one freed longest ago is reused first.

    Args:
        num_blocks: blocks of the cache, the null block included, at least 2.
        enable_caching: False keeps no hashes.
    Raises: ConfigError if there is no block to hand out.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True):
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (the null block and one to hand out), got {num_blocks}: "
                "give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        # Nearly every hash has one block, and a dictionary for each of them would cost memory and garbage collection.
        self._cached: dict[bytes, Block | dict[int, Block]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out, free or not."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    @property
    def num_cached_hashes(self) -> int:
        """Different block contents that a lookup can find."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that somebody holds, 0..1."""
        return 1.0 - len(self.free_queue) / self.num_usable_blocks

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Takes the blocks that are to be reused next; each loses its hash and has ref_cnt 1.

        Raises: KVCacheError if fewer are free; then nothing changed.
        """
        if num_blocks > len(self.free_queue):
            raise KVCacheError(
                f"{num_blocks} blocks were asked for but the free queue holds {len(self.free_queue)}: "
                "check num_free_blocks first"
            )
        taken = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Adds a holder to cached blocks; those that were free leave the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        """Takes a sequence's blocks back, given in the sequence's order.

        They are queued from the last to the first, so that the tail of a sequence is reused before its start, which
        others are likelier to share. Blocks without a hash are worth nothing and are reused before all others.

        Raises: KVCacheError for a block that nobody holds.
        """
        for block in reversed(blocks):
            if block.ref_cnt == 0:
                raise KVCacheError(f"block {block.block_id} was freed but nobody holds it: it was freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self.free_queue.appendleft(block)
                else:
                    self.free_queue.append(block)

    def cache_full_blocks(self, blocks: Sequence[Block], block_hashes: Sequence[bytes]) -> None:
        """Makes full blocks findable under their hashes, one each. Raises: KVCacheError for a block that has one."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.block_hash is not None:
                raise KVCacheError(f"block {block.block_id} already has a hash: a full block is cached once")
            block.block_hash = block_hash
            entry = self._cached.get(block_hash)
            if entry is None:
                self._cached[block_hash] = block
            elif isinstance(entry, Block):
                self._cached[block_hash] = {entry.block_id: entry, block.block_id: block}
            else:
                entry[block.block_id] = block

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """A block with this content, free or held; None if there is none. Of several, always the same one."""
        entry = self._cached.get(block_hash)
        if isinstance(entry, dict):
            return next(iter(entry.values()))
        return entry

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes. Refused, with False, while any block is held: its holder still relies on its hash."""
        num_held = self.num_usable_blocks - len(self.free_queue)
        if num_held:
            logger.warning("the prefix cache was not reset: %d blocks are held by requests; try when idle", num_held)
            return False
        for block in self.free_queue:
            block.block_hash = None
        self._cached.clear()
        return True

    def _forget(self, block: Block) -> None:
        """Takes the hash off a block that is about to hold something else."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        block.block_hash = None
        entry = self._cached[block_hash]
        if isinstance(entry, Block):
            del self._cached[block_hash]
            return
        del entry[block.block_id]
        if len(entry) == 1:
            self._cached[block_hash] = entry.popitem()[1]

    def check_integrity(self) -> None:
        """Checks the free queue, the reference counts and the hashes against each other, in O(num_blocks).

        Raises: KVCacheError that lists every fault found.
        """
        faults = [*self._free_queue_faults(), *self._hash_faults()]
        if faults:
            raise KVCacheError("the block pool is inconsistent: " + "; ".join(faults))

    def _free_queue_faults(self) -> list[str]:
        faults = []
        queued = [block.block_id for block in self.free_queue]
        if len(queued) != len(self.free_queue):
            faults.append(f"the free queue counts {len(self.free_queue)} blocks and links {len(queued)}")
        free = {block.block_id for block in self.blocks if block.ref_cnt == 0 and block is not self.null_block}
        if set(queued) != free:
            faults.append(f"blocks {sorted(set(queued) ^ free)} are either free or queued, not both")
        negative = [block.block_id for block in self.blocks if block.ref_cnt < 0]
        if negative:
            faults.append(f"blocks {negative} have a negative ref_cnt")
        if self.null_block.ref_cnt or self.null_block.block_hash:
            faults.append(f"the null block is in use: {self.null_block}")
        return faults

    def _hash_faults(self) -> list[str]:
        faults = []
        found: set[int] = set()
        for block_hash, entry in self._cached.items():
            blocks = [entry] if isinstance(entry, Block) else list(entry.values())
            if isinstance(entry, dict) and len(entry) < 2:
                faults.append(f"hash {block_hash.hex()[:8]} keeps a dictionary for {len(entry)} blocks")
            faults.extend(f"{block} is cached under another hash" for block in blocks if block.block_hash != block_hash)
            found.update(block.block_id for block in blocks)
        hashed = {block.block_id for block in self.blocks if block.block_hash is not None}
        if hashed != found:
            faults.append(f"blocks {sorted(hashed ^ found)} are either hashed or findable, not both")
        return faults

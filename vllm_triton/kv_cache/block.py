"""Blocks of the KV cache and the queue of free ones. A block is a number; the keys and values live with the runner."""

from collections.abc import Iterator

from vllm_triton.errors import VllmTritonError


class KVCacheError(VllmTritonError, RuntimeError):
    """The bookkeeping of blocks was asked for something impossible: a fault of the engine, not of a request."""


class Block:
    """One block of every layer's cache.

    block_id: its row in the runner's cache.
    ref_cnt: sequences that hold it; a block nobody holds is in the free queue and may still be cached.
    block_hash: identifies the tokens in it and before it; None while it is partly filled or not cached.
    previous_free, next_free: its neighbours in the free queue; the block itself while it is not queued.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "previous_free", "ref_cnt")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.previous_free: Block = self
        self.next_free: Block = self

    def __repr__(self) -> str:
        block_hash = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={block_hash})"


class FreeBlockQueue:
    """Free blocks in the order in which they are reused: a ring of links, so that any block leaves in O(1)."""

    def __init__(self, blocks: list[Block]):
        # A block of the ring that is never handed out: it spares every operation the empty-queue cases.
        self._anchor = Block(-1)
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Blocks from the next to be reused to the last."""
        block = self._anchor.next_free
        while block is not self._anchor:
            yield block
            block = block.next_free

    def popleft(self) -> Block:
        """Takes the block that is to be reused next. Raises: KVCacheError if no block is free."""
        block = self._anchor.next_free
        if block is self._anchor:
            raise KVCacheError("the free queue is empty: check the number of free blocks before taking one")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes a block out of any place. Raises: KVCacheError if it is not queued."""
        if block.next_free is block:
            raise KVCacheError(f"block {block.block_id} is not in the free queue, so that it cannot leave it")
        block.previous_free.next_free = block.next_free
        block.next_free.previous_free = block.previous_free
        block.previous_free = block.next_free = block
        self._length -= 1

    def append(self, block: Block) -> None:
        """Queues a block to be reused last. Raises: KVCacheError if it is already queued."""
        self._insert(block, self._anchor.previous_free)

    def appendleft(self, block: Block) -> None:
        """Queues a block to be reused next. Raises: KVCacheError if it is already queued."""
        self._insert(block, self._anchor)

    def _insert(self, block: Block, previous: Block) -> None:
        if block.next_free is not block:
            raise KVCacheError(f"block {block.block_id} is already in the free queue: it was freed twice")
        block.previous_free, block.next_free = previous, previous.next_free
        previous.next_free.previous_free = block
        previous.next_free = block
        self._length += 1

"""One request as the scheduler sees it, and the rules by which it ends."""

from enum import Enum

from vllm_triton.engine.messages import EngineRequest, FinishReason
from vllm_triton.kv_cache.block import Block


class RequestStatus(Enum):
    """WAITING: holds no blocks and has no row in the runner. RUNNING: has both. FINISHED: known to nobody any more."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """A sequence of tokens, the first num_computed_tokens of which have keys and values in its blocks.

    Args:
        source: the request as it reached the engine.
        max_num_tokens: prompt and output together, at most; with that many it ends.
        sequence_number: order of admission to the scheduler, the last word where two requests compare equal.

    Fields written by the scheduler:
        status, num_computed_tokens, num_preemptions
        num_cached_tokens: prompt tokens found in the prefix cache when it first ran; None before.
        finish_reason, stop_reason: why it ended.
    Fields written by the KV cache manager:
        blocks: blocks of all its positions, in order.
        num_slots: tokens that fit these blocks.
        block_hashes: hashes of its full blocks as far as they were needed.
        next_full_block_at: computed tokens at which the next block is full, and can be shared.
    """

    __slots__ = (
        "block_hashes",
        "blocks",
        "cache_salt",
        "eos_token_ids",
        "finish_reason",
        "max_num_tokens",
        "min_num_tokens",
        "next_full_block_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "order",
        "params",
        "request_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, source: EngineRequest, max_num_tokens: int, sequence_number: int):
        self.request_id = source.request_id
        self.params = source.params
        self.cache_salt = source.cache_salt
        self.order = (source.priority, source.arrival_time, sequence_number)

        self.token_ids = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_num_tokens
        self.min_num_tokens = self.num_prompt_tokens + source.params.min_tokens
        self.eos_token_ids = frozenset() if source.params.ignore_eos else source.eos_token_ids
        self.stop_token_ids = self.eos_token_ids.union(source.params.stop_token_ids)

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

        self.blocks: list[Block] = []
        self.num_slots = 0
        self.block_hashes: list[bytes] = []
        self.next_full_block_at = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens, {len(self.blocks)} blocks)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    def append_tokens(self, new_token_ids: list[int]) -> list[int]:
        """Appends sampled tokens up to and including the one that ends the request, and sets why it ended.

        A token ends it if it is an EOS or a stop token and at least min_tokens were generated, counting it; then
        stop_reason is None for EOS and the token's id otherwise. Failing that, the length ends it.

        Returns: the tokens that were kept; the same list if it is all of them.
        """
        token_ids = self.token_ids
        for count, token_id in enumerate(new_token_ids, start=1):
            token_ids.append(token_id)
            num_tokens = len(token_ids)
            if token_id in self.stop_token_ids and num_tokens >= self.min_num_tokens:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = None if token_id in self.eos_token_ids else token_id
            elif num_tokens >= self.max_num_tokens:
                self.finish_reason = FinishReason.LENGTH
            else:
                continue
            return new_token_ids if count == len(new_token_ids) else new_token_ids[:count]
        return new_token_ids

"""The scheduler: which requests advance by how many tokens in the next step, and what the step made of them.

There is no prefill or decode phase. Every request has tokens and a number of computed ones; each step lets the second
catch up with the first, under one budget of tokens: first for the requests that run, then for those that wait. A
prompt is a long way to catch up, a decode step is one token.

One step is one `schedule()`, one run of the model, one `update_from_output()`; requests may be added and aborted
between any two of them.
"""

from array import array
from collections.abc import Iterable

from vllm_triton.engine.messages import EngineOutput, EngineRequest, FinishReason, SchedulerStats
from vllm_triton.errors import ConfigError, RequestError, VllmTritonError
from vllm_triton.kv_cache.block import Block
from vllm_triton.kv_cache.manager import KVCacheManager
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.output import NewRequestData, RunnerOutput, SchedulerOutput
from vllm_triton.scheduler.queue import WAITING_QUEUES
from vllm_triton.scheduler.request import Request, RequestStatus

WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED


class SchedulerError(VllmTritonError, RuntimeError):
    """The step protocol between scheduler and runner was broken: a fault of the engine, not of a request."""


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, and preemption by recomputation.

    Progress: `schedule()` returns an empty batch only when there are no requests. The first running request (under
    "priority", the one that comes first in its order) is preempted by nobody and can take the blocks of all others,
    and `add_request` lets nothing in that the whole pool could not hold.

    Args:
        config: limits and policy.
        kv_cache_manager: the blocks; used by this scheduler alone.
    Raises: ConfigError if the two disagree.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager):
        if config.enable_prefix_caching != kv_cache_manager.enable_caching:
            raise ConfigError(
                f"enable_prefix_caching is {config.enable_prefix_caching} but the KV cache manager has "
                f"enable_caching={kv_cache_manager.enable_caching}: give both the same value"
            )
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = WAITING_QUEUES[config.policy]()
        self.num_preemptions = 0
        self._num_added = 0
        # Ids that have a row in the runner and must lose it before the next batch.
        self._removed_request_ids: list[str] = []

    def add_request(self, source: EngineRequest) -> None:
        """Queues a request.

        It ends with LENGTH at the first of: its own max_total_tokens (0 for no limit of its own), the model's
        max_model_len, and one token more than the pool can hold, since the last token needs no keys and values.

        Raises: RequestError for an id in use, and for a prompt that is empty, holds something that is no token id, or
            leaves no room for an output token.
        """
        prompt = source.prompt_token_ids
        if source.request_id in self.requests:
            raise RequestError(f"request id {source.request_id!r} is in use: choose another id", "request_id")
        if not prompt:
            raise RequestError(
                f"the prompt of request {source.request_id!r} is empty: send at least one token", "prompt"
            )
        try:
            array("I", prompt)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"the prompt of request {source.request_id!r} must hold token ids, integers in 0..2**32 - 1: {error}",
                "prompt",
            ) from error
        request = Request(source, self._max_num_tokens(source), self._num_added)
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def _max_num_tokens(self, source: EngineRequest) -> int:
        num_prompt_tokens = len(source.prompt_token_ids)
        manager = self.kv_cache_manager
        if not manager.can_fit(num_prompt_tokens):
            raise RequestError(
                f"the prompt of request {source.request_id!r} has {num_prompt_tokens} tokens but the KV cache holds "
                f"{manager.max_num_tokens} in all: shorten the prompt or give the KV cache more memory",
                "prompt",
            )
        limits = {"max_model_len": self.config.max_model_len, "the KV cache": manager.max_num_tokens + 1}
        if source.max_total_tokens:
            limits["max_total_tokens"] = source.max_total_tokens
        name = min(limits, key=lambda key: limits[key])
        if num_prompt_tokens >= limits[name]:
            raise RequestError(
                f"the prompt of request {source.request_id!r} has {num_prompt_tokens} tokens, which leaves no room for "
                f"an output within {name} ({limits[name]} tokens): shorten the prompt or raise the limit",
                "prompt",
            )
        return limits[name]

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests at once; ids that are unknown or have ended are ignored.

        An abort between schedule() and update_from_output() wins: what the step computes for the request is dropped.

        Returns: one last output, with finish reason ABORT, for each request that was ended.
        """
        aborted_waiting: set[Request] = set()
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is WAITING:
                aborted_waiting.add(request)
            request.finish_reason = FinishReason.ABORT
            self._finish(request)
            outputs.append(_output(request, []))
        if aborted_waiting:
            self.waiting.remove(aborted_waiting)
        if len(outputs) > len(aborted_waiting):
            self._drop_finished_from_running()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Plans the next step and counts its tokens as computed.

        Raises: SchedulerError if the last step was not reported to update_from_output().
        """
        output = SchedulerOutput()
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(output)
        # After a preemption blocks are short: a request let in now would only be preempted next.
        if self.num_preemptions == num_preemptions:
            budget = self._schedule_waiting(output, budget)
        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget
        if output.num_scheduled_tokens:
            # Kept while the batch is empty, since the runner may not be called for it.
            output.removed_request_ids = self._removed_request_ids
            self._removed_request_ids = []
        return output

    def _schedule_running(self, output: SchedulerOutput) -> int:
        """Lets running requests advance, in order, and preempts where blocks run out. Returns: the budget left."""
        budget = self.config.max_num_batched_tokens
        num_scheduled_tokens = output.num_scheduled_tokens
        with_full_block: list[Request] = []
        # A copy, because a preemption takes requests out of the list.
        for request in tuple(self.running):
            if budget == 0:
                break
            if request.status is not RUNNING:
                continue
            num_new_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_new_tokens != 1:
                num_new_tokens = self._limit(request, num_new_tokens, budget)
            end = request.num_computed_tokens + num_new_tokens
            if end > request.num_slots:
                new_blocks, returned_budget = self._allocate_or_preempt(request, num_new_tokens, output)
                budget += returned_budget
                if new_blocks is None:
                    continue
                output.new_block_ids[request.request_id] = [block.block_id for block in new_blocks]
            if end >= request.next_full_block_at:
                with_full_block.append(request)
            request.num_computed_tokens = end
            num_scheduled_tokens[request.request_id] = num_new_tokens
            budget -= num_new_tokens
        # Not before all are through: a request preempted by a later one is not computed in this step after all, and
        # its blocks must not be found.
        for request in with_full_block:
            if request.status is RUNNING:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> int:
        """Starts waiting requests, in order, while rows, blocks and budget last. Returns: the budget left."""
        manager = self.kv_cache_manager
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            computed_blocks, num_computed_tokens = manager.get_computed_blocks(request)
            num_new_tokens = self._limit(request, request.num_tokens - num_computed_tokens, budget)
            if manager.allocate_slots(request, num_new_tokens, computed_blocks) is None:
                break
            self.waiting.pop()
            self.running.append(request)
            request.status = RUNNING
            request.num_computed_tokens = num_computed_tokens + num_new_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_computed_tokens
            # At once, so that equal prompts that start in the same step share their blocks.
            manager.cache_blocks(request, request.num_computed_tokens)
            output.new_requests.append(
                NewRequestData(
                    request_id=request.request_id,
                    token_ids=list(request.token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    params=request.params,
                    stop_token_ids=request.stop_token_ids,
                    block_ids=[block.block_id for block in request.blocks],
                    num_computed_tokens=num_computed_tokens,
                )
            )
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            budget -= num_new_tokens
        return budget

    def _limit(self, request: Request, num_new_tokens: int, budget: int) -> int:
        if num_new_tokens < 1:
            raise SchedulerError(
                f"request {request.request_id!r} has no token to compute: the last step's tokens must reach "
                "update_from_output() before the next schedule()"
            )
        threshold = self.config.long_prefill_token_threshold
        return min(num_new_tokens, budget, threshold or budget)

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, output: SchedulerOutput
    ) -> tuple[list[Block] | None, int]:
        """Returns: the new blocks, or None if the request itself had to go; the budget that preempted ones returned."""
        returned_budget = 0
        while (new_blocks := self.kv_cache_manager.allocate_slots(request, num_new_tokens)) is None:
            victim = self.waiting.choose_victim(self.running)
            returned_budget += self._preempt(victim, output)
            if victim is request:
                break
        return new_blocks, returned_budget

    def _preempt(self, request: Request, output: SchedulerOutput) -> int:
        """Takes a request's blocks and row; its tokens stay. Returns: the tokens it was to compute in this step."""
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        self._removed_request_ids.append(request.request_id)
        request.status = WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add_preempted(request)
        output.new_block_ids.pop(request.request_id, None)
        return output.num_scheduled_tokens.pop(request.request_id, 0)

    def update_from_output(self, scheduler_output: SchedulerOutput, runner_output: RunnerOutput) -> list[EngineOutput]:
        """Appends the step's tokens to their requests and ends those that are complete.

        Returns: one output per request with a new token, in the runner's order.
        Raises: SchedulerError if a token arrives for a request that was not to have one.
        """
        requests = self.requests
        logprobs = runner_output.logprobs
        outputs: list[EngineOutput] = []
        any_finished = False
        for request_id, sampled in zip(runner_output.request_ids, runner_output.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            # Aborted during the step; if it waits, its id was given to a new request since.
            if request is None or request.status is not RUNNING:
                continue
            if request.num_computed_tokens != len(request.token_ids):
                raise SchedulerError(
                    f"the runner sampled for request {request_id!r}, of which {request.num_computed_tokens} of "
                    f"{len(request.token_ids)} tokens are computed: only the last known token has a next one"
                )
            new_token_ids = request.append_tokens(sampled)
            outputs.append(_output(request, new_token_ids))
            if logprobs and request_id in logprobs:
                outputs[-1].logprobs = logprobs[request_id][: len(new_token_ids)]
            if request.finish_reason is not None:
                self._finish(request)
                any_finished = True
        if any_finished:
            self._drop_finished_from_running()
        return outputs

    def _finish(self, request: Request) -> None:
        if request.status is RUNNING:
            self._removed_request_ids.append(request.request_id)
        request.status = FINISHED
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]

    def _drop_finished_from_running(self) -> None:
        self.running = [request for request in self.running if request.status is RUNNING]

    def stats(self) -> SchedulerStats:
        manager = self.kv_cache_manager
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=manager.pool.usage,
            prefix_cache_queries=manager.prefix_cache_queries,
            prefix_cache_hits=manager.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; refused, with False, while a request runs."""
        return self.kv_cache_manager.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Checks that every block is free or held by the requests that its ref_cnt counts. Raises: KVCacheError."""
        self.kv_cache_manager.check_integrity(self.requests.values())


def _output(request: Request, new_token_ids: list[int]) -> EngineOutput:
    return EngineOutput(
        request.request_id,
        new_token_ids,
        None,
        request.finish_reason,
        request.stop_reason,
        request.num_cached_tokens or 0,
    )

"""The scheduler as a state machine: whatever comes in whatever order, blocks, budgets and outputs are right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_simulation import (
    SimulatedRunner,
    make_engine_request,
    make_scheduler,
    reference_output,
)

from vllm_triton.engine.messages import FinishReason

MAX_MODEL_LEN = 24
# Every request is recomputed at most once per token of each other one; far more steps than that is a livelock.
MAX_STEPS_TO_END = 20000

REQUESTS = st.fixed_dictionaries(
    {
        # Few tokens and lengths, so that prefixes are often shared.
        "prompt": st.one_of(
            st.lists(st.integers(0, 1), min_size=1, max_size=16), st.integers(1, 16).map(lambda length: [1] * length)
        ),
        "max_total_tokens": st.one_of(st.just(MAX_MODEL_LEN), st.integers(2, MAX_MODEL_LEN)),
        "ignore_eos": st.sampled_from([True, True, False]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.sampled_from([[], [], [3], [4, 5]]),
        "logprobs": st.sampled_from([None, 0]),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from([None, "tenant"]),
    }
)
INDEXES = st.lists(st.integers(0, 9), max_size=3)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 1, 3]),
        enable_prefix_caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, extra_budget, policy, threshold, enable_prefix_caching):
        self.scheduler = make_scheduler(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.runner = SimulatedRunner(self.scheduler)
        self.capacity = (num_blocks - 1) * block_size
        self.sources = {}
        self.generated = {}
        self.num_added = 0
        self.free_ids = []

    def add(self, description):
        description = dict(description)
        prompt = description.pop("prompt")[: self.capacity]
        max_total_tokens = max(len(prompt) + 1, description.pop("max_total_tokens"))
        # Now and then the id of a request that has ended.
        request_id = self.free_ids.pop() if self.free_ids and self.num_added % 3 == 0 else f"r{self.num_added}"
        source = make_engine_request(
            request_id, prompt, max_total_tokens, arrival_time=float(self.num_added // 2), **description
        )
        self.num_added += 1
        self.scheduler.add_request(source)
        self.sources[request_id], self.generated[request_id] = source, []

    def choose(self, indexes):
        live = list(self.sources)
        return [live[index % len(live)] for index in indexes] if live else []

    def abort(self, request_ids):
        outputs = self.scheduler.abort_requests([*request_ids, "unknown"])
        assert [output.request_id for output in outputs] == list(dict.fromkeys(request_ids))
        for output in outputs:
            assert (output.finish_reason, output.new_token_ids) == (FinishReason.ABORT, [])
            source, generated = self.end(output.request_id)
            assert reference_output(source, self.max_num_tokens(source))[0][: len(generated)] == generated

    def end(self, request_id):
        self.free_ids.append(request_id)
        return self.sources.pop(request_id), self.generated.pop(request_id)

    def max_num_tokens(self, source):
        return min(source.max_total_tokens, MAX_MODEL_LEN, self.capacity + 1)

    def collect(self, outputs):
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            source = self.sources[output.request_id]
            self.generated[output.request_id] += output.new_token_ids
            assert len(output.new_token_ids) == 1
            assert (output.logprobs is None) == (source.params.logprobs is None)
            if output.finish_reason is not None:
                source, generated = self.end(output.request_id)
                expected = reference_output(source, self.max_num_tokens(source))
                assert (generated, output.finish_reason, output.stop_reason) == expected

    def step(self, abort_during=(), add_during=()):
        planned = self.scheduler.schedule()
        assert planned.num_scheduled_tokens or not self.sources, "an empty batch while requests wait"
        self.abort(self.choose(abort_during))
        for description in add_during:
            self.add(description)
        self.collect(self.scheduler.update_from_output(planned, self.runner.execute(planned)))

    @rule(descriptions=st.lists(REQUESTS, min_size=1, max_size=4))
    def add_requests(self, descriptions):
        for description in descriptions:
            self.add(description)

    @rule(indexes=INDEXES)
    def abort_requests(self, indexes):
        self.abort(self.choose(indexes))

    @rule(count=st.integers(1, 6))
    def run_steps(self, count):
        for _ in range(count):
            self.step()

    @rule(indexes=INDEXES, descriptions=st.lists(REQUESTS, max_size=1))
    def run_step_with_changes_during_it(self, indexes, descriptions):
        self.step(indexes, descriptions)

    @rule()
    def reset_prefix_cache(self):
        manager = self.scheduler.kv_cache_manager
        idle = manager.pool.num_free_blocks == manager.pool.num_usable_blocks
        assert self.scheduler.reset_prefix_cache() == idle
        assert not idle or manager.pool.num_cached_hashes == 0

    @rule()
    def run_to_the_end(self):
        for _ in range(MAX_STEPS_TO_END):
            if not self.sources:
                break
            self.step()
        assert not self.sources, "requests that do not end"
        assert self.scheduler.stats().kv_cache_usage == 0.0

    @invariant()
    def books_are_balanced(self):
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert set(scheduler.requests) == set(self.sources)
        assert scheduler.has_unfinished_requests() == bool(self.sources)
        stats = scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.sources)
        assert 0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert all(request.num_computed_tokens > 0 for request in scheduler.running)

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.run_to_the_end()
            assert self.scheduler.reset_prefix_cache()
            self.scheduler.check_integrity()


SchedulerMachine.TestCase.settings = settings(max_examples=500, stateful_step_count=20)
TestSchedulerMachine = SchedulerMachine.TestCase

"""Scheduling: budgets, chunks, prefix hits, preemption, aborts and admission."""

import pytest
from scheduler_simulation import (
    SimulatedRunner,
    make_engine_request,
    make_scheduler,
    reference_output,
    run_step,
    run_to_end,
    tokens_of,
)

from vllm_triton.engine.messages import FinishReason
from vllm_triton.errors import ConfigError, RequestError
from vllm_triton.kv_cache import KVCacheManager
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.output import RunnerOutput
from vllm_triton.scheduler.scheduler import Scheduler, SchedulerError


def scheduled_counts(step):
    return list(step.num_scheduled_tokens.values())


def add_all(scheduler, sources):
    for source in sources:
        scheduler.add_request(source)


def test_long_prefills_share_the_budget():
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, long_prefill_token_threshold=400, enable_prefix_caching=False
    )
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [token] * 800, ignore_eos=True) for token, name in enumerate("abc")])
    steps = []
    for _ in range(3):
        step = scheduler.schedule()
        steps.append(scheduled_counts(step))
        scheduler.update_from_output(step, runner.execute(step))
    assert steps == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_a_prompt_is_cut_by_the_budget_and_sampled_once_it_is_complete():
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("a", [1] * 25, ignore_eos=True))
    assert [len(run_step(scheduler, runner)) for _ in range(4)] == [0, 0, 1, 1]


def test_running_requests_come_before_waiting_ones():
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("a", [1] * 5, ignore_eos=True))
    run_step(scheduler, runner)
    scheduler.add_request(make_engine_request("b", [2] * 30, ignore_eos=True))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 1, "b": 9}


def test_no_more_requests_run_than_there_are_rows():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [1, 2], 5, ignore_eos=True) for name in "abc"])
    run_step(scheduler, runner)
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 1)
    assert set(run_to_end(scheduler, runner)) == {"a", "b", "c"}


def test_equal_prompts_that_start_in_one_step_share_their_blocks():
    scheduler = make_scheduler(num_blocks=20)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [1] * 40, 60, ignore_eos=True) for name in "ab"])
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 40, "b": 8}
    first, second = step.new_requests
    assert first.block_ids[:2] == second.block_ids[:2]
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 32)
    outputs = scheduler.update_from_output(step, runner.execute(step))
    assert [output.num_cached_tokens for output in outputs] == [0, 32]
    assert scheduler.stats().prefix_cache_queries == 80
    assert scheduler.stats().prefix_cache_hits == 32


def test_a_repeated_prompt_computes_at_least_its_last_token():
    scheduler = make_scheduler(num_blocks=20)
    runner = SimulatedRunner(scheduler)
    for request_id, cached in (("first", 0), ("again", 32), ("once more", 32)):
        source = make_engine_request(request_id, [1] * 33, 40, ignore_eos=True)
        scheduler.add_request(source)
        outputs = run_to_end(scheduler, runner)[request_id]
        assert {output.num_cached_tokens for output in outputs} == {cached}
        assert tokens_of(outputs) == reference_output(source, 40)[0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(7, 4), (25, 1), (4, 8)])
def test_outputs_are_the_same_when_everything_is_preempted(policy, enable_prefix_caching, num_blocks, block_size):
    settings = {"policy": policy, "enable_prefix_caching": enable_prefix_caching, "max_num_seqs": 8}
    scheduler = make_scheduler(num_blocks, block_size, max_num_batched_tokens=8, **settings)
    sources = [
        make_engine_request(f"r{index}", [index % 3, 1, 2, index % 2, 3], 20, ignore_eos=True, priority=index % 2)
        for index in range(6)
    ]
    add_all(scheduler, sources)
    outputs = run_to_end(scheduler, SimulatedRunner(scheduler))
    assert scheduler.stats().num_preemptions > 0
    for source in sources:
        expected, reason, _ = reference_output(source, 20)
        assert tokens_of(outputs[source.request_id]) == expected
        assert outputs[source.request_id][-1].finish_reason == reason
    assert scheduler.stats().kv_cache_usage == 0.0


def test_fcfs_preempts_the_last_and_resumes_it_first():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request("a", [1] * 8, 14, ignore_eos=True)])
    add_all(scheduler, [make_engine_request("b", [2] * 6, 14, ignore_eos=True)])
    add_all(scheduler, [make_engine_request("c", [3] * 4, 14, ignore_eos=True)])
    run_step(scheduler, runner)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.removed_request_ids == ["b"]
    assert step.new_block_ids == {"a": [4]}
    assert scheduler.waiting.peek().request_id == "b"
    preempted = scheduler.requests["b"]
    assert (preempted.num_computed_tokens, preempted.num_tokens, preempted.blocks) == (0, 7, [])
    scheduler.update_from_output(step, runner.execute(step))
    outputs = run_to_end(scheduler, runner)
    assert list(outputs) == ["a", "b", "c"]


def test_several_preempted_requests_keep_their_order():
    scheduler = make_scheduler(num_blocks=4, block_size=1, enable_prefix_caching=False, max_num_seqs=3)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [1], 3, ignore_eos=True) for name in "abcd"])
    run_step(scheduler, runner)
    # All three blocks are held: c makes room for a, and b finds nobody behind it.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert scheduler.num_preemptions == 2
    assert [scheduler.waiting.pop().request_id for _ in range(3)] == ["b", "c", "d"]


def test_the_priority_policy_starts_the_smallest_first_and_breaks_ties_by_arrival():
    scheduler = make_scheduler(policy="priority")
    for name, priority, arrival in (("late", 1, 2.0), ("low", 5, 0.0), ("early", 1, 1.0), ("high", -1, 9.0)):
        scheduler.add_request(make_engine_request(name, [1], priority=priority, arrival_time=arrival))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["high", "early", "late", "low"]


def test_the_lowest_priority_is_preempted_and_returns_its_budget_and_blocks():
    # "low" is first in the running order, so it has its token in this step before "high" needs its blocks.
    scheduler = make_scheduler(num_blocks=5, block_size=4, policy="priority", max_num_seqs=2, max_num_batched_tokens=8)
    runner = SimulatedRunner(scheduler)
    low = make_engine_request("low", [1] * 7, 12, ignore_eos=True, priority=1)
    high = make_engine_request("high", [2] * 7, 12, ignore_eos=True, priority=0)
    scheduler.add_request(low)
    run_step(scheduler, runner)
    scheduler.add_request(high)
    run_step(scheduler, runner)
    assert list(scheduler.running) == [scheduler.requests["low"], scheduler.requests["high"]]
    while True:
        before = scheduler.stats().num_preemptions
        step = scheduler.schedule()
        if scheduler.stats().num_preemptions > before:
            break
        scheduler.update_from_output(step, runner.execute(step))
    assert scheduler.requests["low"].num_preemptions == 1
    assert scheduler.requests["high"].num_preemptions == 0
    assert step.num_scheduled_tokens == {"high": step.total_num_scheduled_tokens}
    assert "low" not in step.new_block_ids
    assert step.removed_request_ids == ["low"]
    scheduler.update_from_output(step, runner.execute(step))
    outputs = run_to_end(scheduler, runner)
    assert scheduler.stats().kv_cache_usage == 0.0
    assert outputs["low"][-1].finish_reason is FinishReason.LENGTH


def test_nobody_starts_in_a_step_with_a_preemption():
    scheduler = make_scheduler(num_blocks=5, block_size=4, policy="priority")
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("low", [1] * 8, 12, ignore_eos=True, priority=2))
    run_step(scheduler, runner)
    scheduler.add_request(make_engine_request("middle", [2] * 3, 12, ignore_eos=True, priority=1))
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    # All four blocks are held. "urgent" would fit what is left of the blocks of "low".
    scheduler.add_request(make_engine_request("urgent", [3], 12, ignore_eos=True, priority=0))
    step = scheduler.schedule()
    assert step.removed_request_ids == ["low"]
    assert step.num_scheduled_tokens == {"middle": 1}
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 2
    scheduler.update_from_output(step, runner.execute(step))
    assert scheduler.schedule().num_scheduled_tokens == {"middle": 1, "urgent": 1}


def test_blocks_that_a_preempted_request_was_to_fill_are_not_found():
    scheduler = make_scheduler(
        num_blocks=8, block_size=4, policy="priority", max_num_seqs=2, long_prefill_token_threshold=8
    )
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("low", [1] * 24, 26, ignore_eos=True, priority=1))
    run_step(scheduler, runner)
    scheduler.add_request(make_engine_request("high", [2] * 4, 9, ignore_eos=True, priority=0))
    run_step(scheduler, runner)
    low = scheduler.requests["low"]
    assert (low.num_computed_tokens, low.num_preemptions) == (16, 0)
    # "low" is given the last two blocks for its last eight tokens; then "high" needs one of them.
    step = scheduler.schedule()
    assert low.num_preemptions == 1
    assert step.num_scheduled_tokens == {"high": 1}
    assert scheduler.kv_cache_manager.get_computed_blocks(low)[1] == 16
    scheduler.update_from_output(step, runner.execute(step))
    run_to_end(scheduler, runner)


def test_a_request_ends_with_length_where_the_pool_ends():
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False)
    source = make_engine_request("a", [1] * 10, 1000, ignore_eos=True)
    scheduler.add_request(source)
    outputs = run_to_end(scheduler, SimulatedRunner(scheduler))["a"]
    assert (tokens_of(outputs), outputs[-1].finish_reason, None) == reference_output(source, 13)


def test_a_prompt_as_large_as_the_pool_has_one_token():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add_request(make_engine_request("a", [1] * 12, 1000, ignore_eos=True))
    outputs = run_to_end(scheduler, SimulatedRunner(scheduler))["a"]
    assert len(tokens_of(outputs)) == 1
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("source", "message", "param"),
    [
        (make_engine_request("used", [1]), "request id 'used' is in use", "request_id"),
        (make_engine_request("a", []), "prompt of request 'a' is empty", "prompt"),
        (make_engine_request("a", [1] * 13), "has 13 tokens but the KV cache holds 12 in all", "prompt"),
        (make_engine_request("a", [1] * 10), r"no room for an output within max_model_len \(10 tokens\)", "prompt"),
        (make_engine_request("a", [1] * 4, 4), r"no room for an output within max_total_tokens \(4 tokens\)", "prompt"),
        (make_engine_request("a", [1, -1]), "must hold token ids", "prompt"),
        (make_engine_request("a", [1, 2**32]), "must hold token ids", "prompt"),
        (make_engine_request("a", [1, 0.5]), "must hold token ids", "prompt"),
    ],
)
def test_requests_that_cannot_run_are_refused_at_admission(source, message, param):
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=10)
    scheduler.add_request(make_engine_request("used", [1], 2))
    with pytest.raises(RequestError, match=message) as caught:
        scheduler.add_request(source)
    assert caught.value.param == param
    assert list(scheduler.requests) == ["used"]
    assert set(run_to_end(scheduler, SimulatedRunner(scheduler))) == {"used"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_abort_ends_running_and_waiting_requests_and_ignores_others(policy):
    scheduler = make_scheduler(max_num_seqs=1, policy=policy)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [1, 2], ignore_eos=True) for name in "abc"])
    run_step(scheduler, runner)
    outputs = scheduler.abort_requests(["b", "unknown", "a", "a"])
    assert [(output.request_id, output.finish_reason, output.new_token_ids) for output in outputs] == [
        ("b", FinishReason.ABORT, []),
        ("a", FinishReason.ABORT, []),
    ]
    scheduler.check_integrity()
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (0, 1)
    step = scheduler.schedule()
    assert step.removed_request_ids == ["a"]
    assert list(step.num_scheduled_tokens) == ["c"]


def test_an_abort_during_the_last_step_is_an_abort():
    scheduler = make_scheduler()
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [1, 2], 3, ignore_eos=True) for name in "ab"])
    step = scheduler.schedule()
    [aborted] = scheduler.abort_requests(["a"])
    [finished] = scheduler.update_from_output(step, runner.execute(step))
    assert (aborted.request_id, aborted.finish_reason) == ("a", FinishReason.ABORT)
    assert (finished.request_id, finished.finish_reason) == ("b", FinishReason.LENGTH)
    assert not scheduler.has_unfinished_requests()


def test_an_id_used_again_during_the_step_does_not_get_the_old_request_s_token():
    scheduler = make_scheduler()
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("a", [1, 2], 3, ignore_eos=True))
    step = scheduler.schedule()
    scheduler.abort_requests(["a"])
    again = make_engine_request("a", [3, 4], 6, ignore_eos=True)
    scheduler.add_request(again)
    assert scheduler.update_from_output(step, runner.execute(step)) == []
    assert tokens_of(run_to_end(scheduler, runner)["a"]) == reference_output(again, 6)[0]


def test_removed_rows_are_reported_with_the_next_batch_even_after_idle_calls():
    scheduler = make_scheduler()
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("a", [1, 2], 3, ignore_eos=True))
    run_to_end(scheduler, runner)
    idle = scheduler.schedule()
    assert (idle.num_scheduled_tokens, idle.total_num_scheduled_tokens) == ({}, 0)
    scheduler.add_request(make_engine_request("b", [1, 2], 3, ignore_eos=True))
    assert scheduler.schedule().removed_request_ids == ["a"]


def test_a_step_that_is_not_reported_is_an_error():
    scheduler = make_scheduler()
    scheduler.add_request(make_engine_request("a", [1, 2]))
    scheduler.schedule()
    with pytest.raises(SchedulerError, match="'a' has no token to compute"):
        scheduler.schedule()


def test_a_token_for_an_unfinished_prefill_is_an_error():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add_request(make_engine_request("a", [1] * 6))
    step = scheduler.schedule()
    with pytest.raises(SchedulerError, match="'a', of which 4 of 6 tokens are computed"):
        scheduler.update_from_output(step, RunnerOutput(["a"], [[1]]))


def test_resetting_the_prefix_cache_waits_for_the_last_request():
    scheduler = make_scheduler()
    runner = SimulatedRunner(scheduler)
    scheduler.add_request(make_engine_request("a", [1] * 40, 45, ignore_eos=True))
    run_step(scheduler, runner)
    assert not scheduler.reset_prefix_cache()
    run_to_end(scheduler, runner)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(make_engine_request("b", [1] * 40, 45, ignore_eos=True))
    assert {output.num_cached_tokens for output in run_to_end(scheduler, runner)["b"]} == {0}


def test_a_preempted_request_reports_the_prefix_it_found_first():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    runner = SimulatedRunner(scheduler)
    add_all(scheduler, [make_engine_request(name, [ord(name)] * 7, 15, ignore_eos=True) for name in "ab"])
    starts, outputs = [], []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        starts += [(new.request_id, new.num_computed_tokens) for new in step.new_requests]
        outputs += scheduler.update_from_output(step, runner.execute(step))
    assert starts == [("a", 0), ("b", 0), ("b", 4)]
    assert {output.num_cached_tokens for output in outputs} == {0}
    stats = scheduler.stats()
    assert (stats.num_preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits) == (1, 14, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens must be an integer of at least 1, got 'many'"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"at least max_num_seqs \(9\).*got 8"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, got 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be an integer of at least 0, got -1"),
        ({"policy": "random"}, "policy must be one of fcfs, priority, got 'random'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**settings)


def test_scheduler_and_manager_must_agree_on_caching():
    with pytest.raises(ConfigError, match=r"enable_prefix_caching is True but .* enable_caching=False"):
        Scheduler(SchedulerConfig(), KVCacheManager(4, 4, enable_caching=False))

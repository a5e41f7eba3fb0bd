"""How a request ends: EOS, stop tokens, min_tokens, lengths."""

import pytest

from vllm_triton.engine.messages import EngineRequest, FinishReason, TokenLogprobs
from vllm_triton.kv_cache import KVCacheManager
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.output import RunnerOutput
from vllm_triton.scheduler.scheduler import Scheduler

EOS = 2


def outputs_for(sampled_per_step, max_total_tokens=100, max_model_len=200, logprobs=None, **settings):
    """The outputs of a request with two prompt tokens, to which the runner answers with these lists of tokens."""
    scheduler = Scheduler(SchedulerConfig(max_model_len=max_model_len), KVCacheManager(100, 16))
    params = SamplingParams(max_tokens=None, **settings)
    scheduler.add_request(EngineRequest("a", [7, 8], params, frozenset({EOS}), max_total_tokens))
    outputs = []
    for sampled in sampled_per_step:
        assert scheduler.has_unfinished_requests(), "ended too early"
        step = scheduler.schedule()
        step_logprobs = {"a": logprobs} if logprobs else {}
        outputs += scheduler.update_from_output(step, RunnerOutput(["a"], [list(sampled)], step_logprobs))
    assert scheduler.has_unfinished_requests() == (outputs[-1].finish_reason is None)
    scheduler.check_integrity()
    return outputs


def end_of(*args, **settings):
    output = outputs_for(*args, **settings)[-1]
    return output.new_token_ids, output.finish_reason, output.stop_reason


def test_a_running_request_reports_each_token():
    outputs = outputs_for([[5], [6]])
    assert [output.new_token_ids for output in outputs] == [[5], [6]]
    assert [output.finish_reason for output in outputs] == [None, None]


def test_eos_ends_without_a_stop_reason():
    assert end_of([[5], [EOS]]) == ([EOS], FinishReason.STOP, None)


def test_a_stop_token_is_the_stop_reason():
    assert end_of([[5], [9]], stop_token_ids=[9]) == ([9], FinishReason.STOP, 9)


def test_eos_is_none_even_if_it_is_a_stop_token_too():
    assert end_of([[EOS]], stop_token_ids=[EOS]) == ([EOS], FinishReason.STOP, None)


def test_ignored_eos_goes_on_unless_it_is_a_stop_token():
    assert end_of([[EOS]], ignore_eos=True) == ([EOS], None, None)
    assert end_of([[EOS]], ignore_eos=True, stop_token_ids=[EOS]) == ([EOS], FinishReason.STOP, EOS)


@pytest.mark.parametrize(("token", "stop_reason"), [(EOS, None), (9, 9)])
def test_min_tokens_counts_the_token_that_would_end_it(token, stop_reason):
    settings = {"min_tokens": 5, "stop_token_ids": [9]}
    assert end_of([[5], [5], [token]], **settings) == ([token], None, None)
    assert end_of([[5], [5], [5], [token]], **settings) == ([token], None, None)
    assert end_of([[5], [5], [token], [5], [token]], **settings) == ([token], FinishReason.STOP, stop_reason)


def test_max_total_tokens_counts_the_prompt():
    assert end_of([[5], [6], [7]], max_total_tokens=5) == ([7], FinishReason.LENGTH, None)


def test_the_context_ends_a_request_without_a_limit_of_its_own():
    assert end_of([[5], [6], [7]], max_total_tokens=0, max_model_len=5) == ([7], FinishReason.LENGTH, None)


def test_min_tokens_does_not_outlive_the_length():
    assert end_of([[EOS], [EOS]], max_model_len=4, min_tokens=9) == ([EOS], FinishReason.LENGTH, None)


def test_a_stop_on_the_last_token_is_a_stop():
    assert end_of([[5], [EOS]], max_total_tokens=4) == ([EOS], FinishReason.STOP, None)


def test_tokens_after_the_end_are_dropped_with_their_logprobs():
    logprobs = [TokenLogprobs([token], [-1.0], [1]) for token in (5, EOS, 6)]
    [output] = outputs_for([[5, EOS, 6]], logprobs=logprobs)
    assert output.new_token_ids == [5, EOS]
    assert output.logprobs == logprobs[:2]
    assert output.finish_reason is FinishReason.STOP


def test_several_tokens_in_one_step_are_caught_up_with():
    outputs = outputs_for([[5, 6, 4], [3]])
    assert [output.new_token_ids for output in outputs] == [[5, 6, 4], [3]]


def test_logprobs_are_passed_on():
    logprobs = [TokenLogprobs([5, 6], [-0.1, -2.0], [1, 2])]
    [output] = outputs_for([[5]], logprobs=logprobs)
    assert output.logprobs == logprobs
    assert outputs_for([[5]])[0].logprobs is None

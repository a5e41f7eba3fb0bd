from vllm_triton.engine.messages import SchedulerStats
from vllm_triton.engine.stats import FinishedRequestStats
from vllm_triton.serve.metrics import Metrics


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", **labels})


def finished(reason="stop", **changes):
    stats = {
        "finish_reason": reason,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 0,
        "num_generation_tokens": 3,
        "time_to_first_token": 0.25,
        "e2e_latency": 1.5,
        "mean_time_per_output_token": 0.5,
        "max_tokens": 16,
        "n": 2,
    }
    return FinishedRequestStats(**(stats | changes))


def test_steps_set_gauges_and_add_to_counters():
    metrics = Metrics("m")
    metrics.on_step(SchedulerStats(2, 3, 0.5, prefix_cache_queries=100, prefix_cache_hits=40, num_preemptions=1))
    metrics.on_step(SchedulerStats(1, 0, 0.25, prefix_cache_queries=150, prefix_cache_hits=40, num_preemptions=3))
    assert value(metrics, "num_requests_running") == 1
    assert value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "prefix_cache_queries_total") == 150
    assert value(metrics, "prefix_cache_hits_total") == 40
    assert value(metrics, "num_preemptions_total") == 3


def test_kernels_that_are_compiled_while_serving_are_counted():
    metrics = Metrics("m")
    for total in (27, 27, 28):
        metrics.on_step(SchedulerStats(kernel_compilations=total))
    assert metrics.registry.get_sample_value("vllm_triton:kernel_compilations_total", {"model_name": "m"}) == 28


def test_tokens_and_latencies():
    metrics = Metrics("m")
    metrics.on_first_token(0.25, num_prompt_tokens=7)
    metrics.on_tokens(1)
    metrics.on_tokens(2)
    metrics.on_inter_token(0.125)
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.25
    assert value(metrics, "inter_token_latency_seconds_sum") == 0.125


def test_finished_requests():
    metrics = Metrics("m")
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    metrics.on_finished(finished())
    metrics.on_finished(finished("length", max_tokens=None, num_generation_tokens=1))
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "e2e_request_latency_seconds_sum") == 3.0
    assert value(metrics, "request_prompt_tokens_sum") == 14
    assert value(metrics, "request_generation_tokens_sum") == 4
    assert value(metrics, "request_params_n_sum") == 4
    assert value(metrics, "request_params_max_tokens_count") == 1
    assert value(metrics, "request_time_per_output_token_seconds_count") == 1


def test_two_servers_in_one_process_do_not_share_numbers():
    first, second = Metrics("m"), Metrics("m")
    first.on_tokens(5)
    assert value(second, "generation_tokens_total") == 0

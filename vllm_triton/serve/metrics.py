"""What the server tells Prometheus, under vLLM's names where the meaning is the same."""

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_triton.engine.messages import FinishReason, SchedulerStats
from vllm_triton.engine.stats import FinishedRequestStats

# Upper bounds in seconds: from one step of a small model on a GPU to a long queue on a CPU.
FIRST_TOKEN_SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160]
INTER_TOKEN_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10]
REQUEST_SECONDS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000]
CHOICES = [1, 2, 5, 10, 20, 50, 128]


class Metrics:
    """A StatsListener whose numbers /metrics shows.

    Args:
        model_name: value of the label model_name, which every metric carries.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._totals = SchedulerStats()

        self._running = self._gauge("num_requests_running", "Requests in the batch being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be computed.")
        self._cache_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV cache; 1 is all of it.")

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed or found in the cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Requests put back to waiting for lack of KV blocks.")
        self._kernels = Counter(
            "vllm_triton:kernel_compilations",
            "Kernels that Triton compiled or loaded since the process started; serving should add none.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)

        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", INTER_TOKEN_SECONDS)
        self._per_output_token = self._histogram("request_time_per_output_token_seconds", INTER_TOKEN_SECONDS)
        self._e2e_latency = self._histogram("e2e_request_latency_seconds", REQUEST_SECONDS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", TOKENS)
        self._request_generation_tokens = self._histogram("request_generation_tokens", TOKENS)
        self._params_n = self._histogram("request_params_n", CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", TOKENS)

    def text(self) -> bytes:
        """Everything, in the format that Prometheus scrapes."""
        return generate_latest(self.registry)

    def on_step(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._cache_usage.set(stats.kv_cache_usage)
        self._queries.inc(stats.prefix_cache_queries - self._totals.prefix_cache_queries)
        self._hits.inc(stats.prefix_cache_hits - self._totals.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions - self._totals.num_preemptions)
        self._kernels.inc(stats.kernel_compilations - self._totals.kernel_compilations)
        self._totals = stats

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def on_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def on_inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def on_finished(self, stats: FinishedRequestStats) -> None:
        self._success.labels(self._model_name, stats.finish_reason).inc()
        self._e2e_latency.observe(stats.e2e_latency)
        if stats.num_generation_tokens > 1:
            self._per_output_token.observe(stats.mean_time_per_output_token)
        self._request_prompt_tokens.observe(stats.num_prompt_tokens)
        self._request_generation_tokens.observe(stats.num_generation_tokens)
        self._params_n.observe(stats.n)
        if stats.max_tokens is not None:
            self._params_max_tokens.observe(stats.max_tokens)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        metric = Gauge(f"vllm:{name}", help_text, ["model_name"], registry=self.registry)
        return metric.labels(self._model_name)

    def _counter(self, name: str, help_text: str) -> Counter:
        metric = Counter(f"vllm:{name}", help_text, ["model_name"], registry=self.registry)
        return metric.labels(self._model_name)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        help_text = f"One observation per {'token' if name.startswith('inter') else 'request'}."
        metric = Histogram(f"vllm:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)
        return metric.labels(self._model_name)

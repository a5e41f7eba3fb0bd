"""The engine core: one loop of schedule, run, update. It speaks in messages and knows no text."""

import dataclasses
import random

from vllm_triton.compile.kernel_count import kernels_compiled
from vllm_triton.config import EngineConfig
from vllm_triton.engine.messages import EngineOutput, EngineRequest, EngineStep, SchedulerStats
from vllm_triton.kv_cache.manager import KVCacheManager
from vllm_triton.runner.load import load_model
from vllm_triton.sampling_params import SEED_LIMIT
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.scheduler import Scheduler


class EngineCore:
    """Not thread-safe: one thread adds, aborts and steps.

    Raises: ConfigError, ModelError, RegistryError.
    """

    def __init__(self, config: EngineConfig):
        # First, since loading takes long: limits that contradict one another are refused at once.
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        loaded = load_model(config)
        self.model_config = loaded.model_config
        self.checkpoint = loaded.checkpoint
        self.max_model_len = loaded.max_model_len
        self.runner = loaded.runner
        self.scheduler = Scheduler(
            dataclasses.replace(limits, max_model_len=loaded.max_model_len),
            KVCacheManager(loaded.num_kv_blocks, config.block_size, config.enable_prefix_caching),
        )
        self._seeds = random.Random(config.seed)

    def add_request(self, request: EngineRequest) -> None:
        """Raises: RequestError."""
        if request.params.seed is None:
            # Fixed here, so that a preemption does not change the request's draws.
            seed = self._seeds.randrange(SEED_LIMIT)
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> list[EngineOutput]:
        """Ends requests and frees their blocks; unknown ids are ignored, since they may just have ended."""
        return self.scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> EngineStep:
        """One forward of the model over whatever is scheduled. A step that fails ends every request."""
        try:
            scheduler_output = self.scheduler.schedule()
            runner_output = self.runner.execute(scheduler_output)
            outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        except BaseException:
            self._start_over()
            raise
        return EngineStep(outputs, self.stats())

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        stats.kernel_compilations = kernels_compiled()
        return stats

    def _start_over(self) -> None:
        """Leaves the core as if new. A block can be found once its tokens are scheduled: none may outlive a step that
        did not compute them."""
        self.scheduler.abort_requests(list(self.scheduler.requests))
        self.scheduler.reset_prefix_cache()
        self.runner.batch.clear()

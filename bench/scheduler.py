"""Time the scheduler without a model: schedule() and update_from_output() per decode step, in microseconds.

usage: python bench/scheduler.py [N]
N running requests with 200-token prompts (default 256), block size 16, prefix caching on, 40000 blocks. The figures
are medians over the steps in which all N decode; the last line of stdout is `schedule_us X update_us Y`.
"""

import random
import statistics
import sys
import time

from vllm_triton.engine.messages import EngineRequest
from vllm_triton.kv_cache import KVCacheManager
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.output import RunnerOutput
from vllm_triton.scheduler.scheduler import Scheduler

NUM_STEPS = 400
NUM_WARMUP_STEPS = 20
PROMPT_LENGTH = 200


def build_scheduler(num_requests: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=8192, max_model_len=8192)
    scheduler = Scheduler(config, KVCacheManager(num_blocks=40000, block_size=16, enable_caching=True))
    generator = random.Random(0)
    for index in range(num_requests):
        scheduler.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=[generator.randrange(1000) for _ in range(PROMPT_LENGTH)],
                params=SamplingParams(ignore_eos=True, max_tokens=600),
                eos_token_ids=frozenset({2}),
                max_total_tokens=PROMPT_LENGTH + 600,
            )
        )
    return scheduler


def measure(num_requests: int) -> tuple[list[float], list[float]]:
    """Returns: seconds of schedule() and of update_from_output() for each step in which all requests decode."""
    scheduler = build_scheduler(num_requests)
    schedule_seconds, update_seconds = [], []
    for step in range(NUM_STEPS):
        started = time.perf_counter()
        scheduler_output = scheduler.schedule()
        scheduled = time.perf_counter()
        decoding = [
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if scheduler.requests[request_id].num_computed_tokens == scheduler.requests[request_id].num_tokens
        ]
        runner_output = RunnerOutput(decoding, [[5] for _ in decoding])
        sampled = time.perf_counter()
        scheduler.update_from_output(scheduler_output, runner_output)
        updated = time.perf_counter()
        if step > NUM_WARMUP_STEPS and len(decoding) == scheduler_output.total_num_scheduled_tokens == num_requests:
            schedule_seconds.append(scheduled - started)
            update_seconds.append(updated - sampled)
    return schedule_seconds, update_seconds


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    schedule_seconds, update_seconds = measure(num_requests)
    for name, seconds in (("schedule", schedule_seconds), ("update", update_seconds)):
        deciles = [round(1e6 * value) for value in statistics.quantiles(seconds, n=10)]
        print(f"{name}: {num_requests} requests, {len(seconds)} steps, p20 {deciles[1]} us, p80 {deciles[7]} us")
    medians = [round(1e6 * statistics.median(seconds)) for seconds in (schedule_seconds, update_seconds)]
    print(f"schedule_us {medians[0]} update_us {medians[1]}")


if __name__ == "__main__":
    main()

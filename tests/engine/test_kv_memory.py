"""Tokens do not depend on how much KV memory there is, on who held it before, or on what lies in what nobody holds."""

import contextlib
import random

import pytest
import torch
from tiny import VOCAB_SIZE

from vllm_triton import LLM, SamplingParams
from vllm_triton.ops import paged_attention, reshape_and_cache

EOS = 2
LENGTH = 24
COMMON = {"max_tokens": LENGTH, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **COMMON),
    "seeded": SamplingParams(temperature=1.2, seed=3, top_p=0.95, top_k=50, **COMMON),
    "seeded by the engine": SamplingParams(temperature=1.0, min_p=0.01, **COMMON),
    "penalised": SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.5, frequency_penalty=0.7, **COMMON),
    "choices": SamplingParams(temperature=1.1, seed=5, n=2, logprobs=2, **COMMON),
    # EOS as soon as it is allowed: the tokens made before a preemption count.
    "late end": SamplingParams(temperature=0.8, seed=6, min_tokens=17, max_tokens=LENGTH, logit_bias={EOS: 100.0}),
}


def make_llm(folder: str, **settings) -> LLM:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 4}
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, **sizes, **settings)


def generate(llm: LLM, kinds=tuple(PARAMS)) -> dict[str, list]:
    """(token ids, positions with logprobs, finish reason) of every choice of each kind of request, run together."""
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(3, VOCAB_SIZE) for _ in range(9 + i)]} for i in range(len(kinds))]
    outputs = llm.generate(prompts, [PARAMS[kind] for kind in kinds], use_tqdm=False)
    llm.core.scheduler.check_integrity()
    return {
        kind: [(choice.token_ids, len(choice.logprobs or ()), choice.finish_reason) for choice in output.outputs]
        for kind, output in zip(kinds, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def expected(tiny_folder) -> dict[str, list]:
    llm = make_llm(tiny_folder, num_kv_blocks=200)
    outputs = generate(llm)
    assert llm.core.scheduler.num_preemptions == 0
    assert len(outputs["late end"][0][0]) == 18 and outputs["late end"][0][0][-1] == EOS
    return outputs


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_are_complete(tiny_folder, expected, policy, enable_prefix_caching):
    # Eleven blocks of four: the longest sequence needs ten.
    llm = make_llm(tiny_folder, num_kv_blocks=12, scheduling_policy=policy, enable_prefix_caching=enable_prefix_caching)
    preempted = set()
    preempt = llm.core.scheduler._preempt
    llm.core.scheduler._preempt = lambda request, step: preempted.add(request.request_id) or preempt(request, step)
    assert generate(llm) == expected
    assert len(preempted) >= 6, "all seven sequences but the first"


@torch.inference_mode()
def poison_unowned(llm: LLM, scheduled: dict[str, int]) -> int:
    """Fills every slot with NaN whose keys and values nobody has computed and kept. Returns: how many."""
    pool = llm.core.scheduler.kv_cache_manager.pool
    owned = torch.zeros(llm.core.runner.kv_caches[0][0].shape[:2], dtype=torch.bool)
    for block in pool.blocks:
        owned[block.block_id] = block.block_hash is not None
    for request in llm.core.scheduler.requests.values():
        for position in range(request.num_computed_tokens - scheduled.get(request.request_id, 0)):
            index, slot = divmod(position, owned.shape[1])
            owned[request.blocks[index].block_id, slot] = True
    for cache in (cache for layer in llm.core.runner.kv_caches for cache in layer):
        cache[~owned] = float("nan")
    return int((~owned).sum())


@pytest.mark.parametrize(("implementation", "num_kv_blocks"), [("torch", 60), ("torch", 12), ("triton", 12)])
def test_what_nobody_owns_is_not_read(tiny_folder, expected, implementation, num_kv_blocks):
    # A step takes a tenth of a second in Triton's interpreter.
    kinds = tuple(PARAMS) if implementation == "torch" else ("greedy", "seeded")
    # Graphs hold the implementation that was chosen when they were captured.
    mode = "none" if implementation == "torch" else None
    llm = make_llm(tiny_folder, num_kv_blocks=num_kv_blocks, cudagraph_mode=mode)
    execute, poisoned = llm.core.runner.execute, []

    def execute_poisoned(step):
        poisoned.append(poison_unowned(llm, step.num_scheduled_tokens))
        return execute(step)

    llm.core.runner.execute = execute_poisoned
    with contextlib.ExitStack() as stack:
        for op in (paged_attention, reshape_and_cache):
            stack.enter_context(op.using(implementation))
        outputs = generate(llm, kinds)
    assert outputs == {kind: expected[kind] for kind in kinds}
    assert min(poisoned) >= 4, "the null block at least"

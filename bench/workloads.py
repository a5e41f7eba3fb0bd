"""The three workloads: equal token ids for every engine that is measured.

w1  one chat request, greedy, 128 new tokens                    -> output tokens/s
w2  32 requests at once, 128 random prompt tokens, 128 new      -> output tokens/s
w3  4 requests at once, 1024 random prompt tokens, 1 new        -> prompt tokens/s

A breakdown decodes 1 and 64 requests of 128 random prompt tokens.

End-of-sequence tokens are ignored, so that each run makes the same number of tokens.
"""

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_triton import LLM, SamplingParams

CHAT = [{"role": "user", "content": "Write a long story about a dragon who learns to paint."}]
W1_NEW_TOKENS = 128
W2_REQUESTS, W2_PROMPT_TOKENS, W2_NEW_TOKENS = 32, 128, 128
W3_REQUESTS, W3_PROMPT_TOKENS = 4, 1024
# Requests -> new tokens.
BREAKDOWN, BREAKDOWN_PROMPT_TOKENS = {1: 256, 64: 64}, 128
BLOCK_SIZE = 16
# As many as w2 fills, and the null block: the others need fewer.
KV_BLOCKS = 1 + W2_REQUESTS * (W2_PROMPT_TOKENS + W2_NEW_TOKENS) // BLOCK_SIZE
BREAKDOWN_KV_BLOCKS = 1 + 64 * (BREAKDOWN_PROMPT_TOKENS + BREAKDOWN[64]) // BLOCK_SIZE


def random_prompts(count: int, length: int) -> list[list[int]]:
    """The same ids in every run; all are ordinary tokens of the demo model."""
    draw = random.Random(0)
    return [[draw.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def greedy(new_tokens: int) -> "SamplingParams":
    """The likeliest token every time, so many of them."""
    from vllm_triton import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def generate(llm: "LLM", prompts: list[list[int]], new_tokens: int) -> None:
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(new_tokens), use_tqdm=False)

"""The three workloads: equal token ids for every engine that is measured.

w1  one chat request, greedy, 128 new tokens                    -> output tokens/s
w2  32 requests at once, 128 random prompt tokens, 128 new      -> output tokens/s
w3  4 requests at once, 1024 random prompt tokens, 1 new        -> prompt tokens/s

End-of-sequence tokens are ignored, so that each run makes the same number of tokens.
"""

import random

CHAT = [{"role": "user", "content": "Write a long story about a dragon who learns to paint."}]
W1_NEW_TOKENS = 128
W2_REQUESTS, W2_PROMPT_TOKENS, W2_NEW_TOKENS = 32, 128, 128
W3_REQUESTS, W3_PROMPT_TOKENS = 4, 1024


def random_prompts(count: int, length: int) -> list[list[int]]:
    """The same ids in every run; all are ordinary tokens of the demo model."""
    draw = random.Random(0)
    return [[draw.randrange(100, 40000) for _ in range(length)] for _ in range(count)]

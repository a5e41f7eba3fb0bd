"""One uniform number per (seed, step): Philox4x32-10, bit for bit what Triton's tl.rand draws.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3.
"""

import torch

ROUNDS = 10
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# tl.rand's: the largest int32 times this stays below 1 in float32.
_SCALE = 4.6566127342e-10


def uniform(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The float32 u in [0, 1) of each (seed, step): counter words are the step's halves, key words the seed's.

    Args:
        seeds, steps: [B] int64.
    Returns: [B] fp32.
    """
    # Unsigned 32-bit words in int64. Products wrap modulo 2^64, which leaves the 64 bits of the exact product.
    counter = [steps & _LOW, (steps >> 32) & _LOW, torch.zeros_like(steps), torch.zeros_like(steps)]
    key = [seeds & _LOW, (seeds >> 32) & _LOW]
    for _ in range(ROUNDS):
        product_0, product_2 = _MULTIPLIERS[0] * counter[0], _MULTIPLIERS[1] * counter[2]
        counter = [
            ((product_2 >> 32) & _LOW) ^ counter[1] ^ key[0],
            product_2 & _LOW,
            ((product_0 >> 32) & _LOW) ^ counter[3] ^ key[1],
            product_0 & _LOW,
        ]
        key = [(word + step) & _LOW for word, step in zip(key, _KEY_STEPS, strict=True)]
    signed = counter[0].to(torch.int32)
    return torch.where(signed < 0, ~signed, signed).to(torch.float32) * _SCALE

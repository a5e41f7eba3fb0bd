"""What the contract's property tests cannot say of sample_tokens: distributions, ties, rounding, independence."""

import math

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.ops import sample_tokens
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.sample_tokens import kernel, vectorised
from vllm_triton.ops.sample_tokens.philox import uniform

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", sorted(sample_tokens.implementations))
INFINITY = float("inf")
# In the interpreter, a row that bisects takes tens of milliseconds. Natively, where this file runs as well, none does.
SLOW = "triton" if triton_interprets() else None


def sample(implementation, logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, seeds=None, steps=None):
    """Tokens of logits [B, V]; every other setting is one for all rows or one per row."""
    num_rows = logits.shape[0]

    def per_row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    arguments = (
        logits,
        per_row(temperature, torch.float32),
        per_row(min_p, torch.float32),
        per_row(top_k, torch.int32),
        per_row(top_p, torch.float32),
        per_row(7 if seeds is None else seeds, torch.int64),
        torch.arange(num_rows) if steps is None else per_row(steps, torch.int64),
    )
    sample_tokens.contract.check(arguments)
    return sample_tokens.implementations[implementation](*arguments)


def drawn(implementation, logits, **settings):
    """The tokens that 12 evenly spread uniform numbers draw from one row [V]: all whose probability is above 1/11."""
    steps = uniform(torch.full((5000,), 7), torch.arange(5000)).argsort()[200::400]
    return set(sample(implementation, logits.expand(len(steps), -1).contiguous(), steps=steps, **settings).tolist())


@triton.jit
def _rand_kernel(seeds_ptr, steps_ptr, out_ptr):
    index = tl.program_id(0)
    tl.store(out_ptr + index, tl.rand(tl.load(seeds_ptr + index), tl.load(steps_ptr + index)))


def test_uniform_is_triton_rand():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**63 - 1, (200,), generator=generator)
    steps = torch.randint(0, 2**62, (200,), generator=generator) >> torch.randint(0, 62, (200,), generator=generator)
    seeds[:3] = torch.tensor([0, 2**63 - 1, -1])
    expected = torch.empty(200)
    _rand_kernel[(200,)](seeds, steps, expected)
    assert torch.equal(uniform(seeds, steps), expected)


def test_uniform_is_philox_4x32_10():
    # The first word of the known answer for counter 0 and key 0, from the paper's test vectors.
    word = torch.tensor([0x6627E8D5], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    assert torch.equal(uniform(zero, zero), word.float() * 4.6566127342e-10)


@IMPLEMENTATIONS
def test_greedy_takes_the_first_of_the_largest(implementation):
    logits = torch.zeros(3, 200)
    logits[1, [50, 199]] = 1.0
    logits[2, 131] = 1e-3
    assert sample(implementation, logits, temperature=[0.0, 9e-6, 0.0]).tolist() == [0, 50, 131]


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"top_k": 2}, {0, 1, 3}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 4}, {0, 1, 3, 4}),
        ({"top_p": 0.1}, {0, 1, 3}),
        ({"min_p": 0.3}, {0, 1, 3, 4}),
        ({"min_p": 0.4}, {0, 1, 3}),
        # Of what top_k keeps, the three equal tokens have more than 0.8, but of everything less.
        ({"top_k": 4, "top_p": 0.8}, {0, 1, 3}),
        ({"top_p": 0.8}, {0, 1, 3, 4}),
        ({"min_p": 0.2, "top_p": 0.8}, {0, 1, 3}),
        ({"temperature": 0.5, "min_p": 0.3}, {0, 1, 3}),
    ],
)
def test_equal_logits_are_kept_together(implementation, settings, kept):
    # Three of 0.25, one of 0.094, five of 0.031.
    weights = torch.tensor([2.0, 2.0, 0.0, 2.0, 0.75, 0.25, 0.25, 0.25, 0.25, 0.25])
    assert drawn(implementation, weights.log(), **settings) == kept


@IMPLEMENTATIONS
def test_top_p_weighs_every_logit_equal_to_the_kth_largest(implementation):
    # One of 1/3 and ten of 1/15: top_k = 2 keeps all, so the first alone has less than 0.4 of the mass.
    weights = torch.tensor([5.0] + [1.0] * 10)
    assert len(drawn(implementation, weights.log(), top_k=2, top_p=0.4)) > 1
    assert drawn(implementation, weights.log(), top_k=2, top_p=0.3) == {0}


@IMPLEMENTATIONS
def test_a_draw_on_a_boundary_takes_the_next_token(implementation):
    step = 48329989
    assert uniform(torch.tensor(7), torch.tensor(step)).item() == 0.5
    logits = torch.tensor([[-INFINITY, 0.0, -INFINITY, 0.0, -INFINITY]])
    assert sample(implementation, logits, steps=[step]).tolist() == [3]


@IMPLEMENTATIONS
def test_limits_of_the_whole_vocabulary_change_nothing(implementation):
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    logits[:, ::3] = -INFINITY
    free = sample(implementation, logits)
    assert torch.equal(sample(implementation, logits, top_k=100, top_p=1.0), free)
    assert torch.equal(sample(implementation, logits, top_k=1000, min_p=0.0), free)
    assert (free % 3 != 0).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}])
def test_rows_with_few_or_no_finite_logits(implementation, settings):
    logits = torch.full((5, 70), -INFINITY)
    logits[0, 69] = -3.0
    logits[1, :] = float("nan")
    logits[3, :40], logits[3, 5] = float("nan"), 1.0
    logits[4, :], logits[4, 8] = 2.0, INFINITY
    assert sample(implementation, logits, **settings).tolist() == [69, 0, 0, 5, 8]


@IMPLEMENTATIONS
def test_rounding_at_the_end_falls_on_a_kept_token(implementation):
    # The largest draws of many steps, against masses whose running sum rounds: the tail is masked or dropped.
    steps = torch.arange(200_000)
    steps = steps[uniform(torch.full_like(steps, 7), steps).topk(20).indices]
    logits = torch.rand(20, 5000, generator=torch.Generator().manual_seed(0))
    logits[:10, 4500:] = -INFINITY
    logits[10:, 4500:] = -20.0
    last = sample(implementation, logits, steps=steps, min_p=[0.0] * 10 + [0.1] * 10)
    assert ((last > 4400) & (last < 4500)).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("vocabulary", [4096, 4090])
def test_the_smallest_and_largest_draws_fall_on_tokens_that_are_not_masked(implementation, vocabulary):
    steps = torch.arange(400_000)
    draws = uniform(torch.full_like(steps, 7), steps)
    smallest, largest = draws.topk(3, largest=False).indices, draws.topk(3).indices
    logits = torch.full((6, vocabulary), -INFINITY)
    # Added one by one, these weights come to 4e-5 less than their sum, so that the largest draws lie beyond all.
    logits[:, 50:4000] = math.log(0.7)
    logits[:, 50] = 0.0
    assert 1 - draws[largest].min() < 2e-5
    tokens = sample(implementation, logits, steps=torch.cat([smallest, largest]))
    assert ((tokens[:3] >= 50) & (tokens[:3] < 60)).all()
    assert ((tokens[3:] >= 3990) & (tokens[3:] < 4000)).all()
    logits[:, 51:] = -INFINITY
    assert (sample(implementation, logits, steps=torch.cat([smallest, largest])) == 50).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_p": 0.999, "top_k": 4000}, {"top_k": 6}])
def test_rows_longer_than_a_block_and_than_the_candidates(implementation, settings):
    assert kernel.LARGEST_BLOCK < 5000 and vectorised.CANDIDATES[-1] < 5000
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1], [3], [9]])
    assert torch.equal(sample(implementation, logits, **settings), sample("reference", logits, **settings))


@pytest.mark.parametrize("implementation, vocabulary", [("torch", 50257), ("triton", 300), ("reference", 300)])
def test_a_row_does_not_depend_on_the_others(implementation, vocabulary):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, vocabulary, generator=generator) * 3
    settings = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3] * 3),
        "top_k": torch.tensor([0, 0, 40, 5, 0, 300, 7, 0, 0, 0, 1, 0]),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 0.95] * 2),
        "min_p": torch.tensor([0.0, 0.0, 0.1] * 4),
        "seeds": torch.arange(12),
        "steps": torch.arange(12) + 100,
    }
    together = sample(implementation, logits, **settings)
    for row in range(12):
        alone = {name: value[row : row + 1] for name, value in settings.items()}
        assert sample(implementation, logits[row : row + 1], **alone).item() == together[row].item()


@IMPLEMENTATIONS
@pytest.mark.parametrize("varied", ["seeds", "steps"])
@pytest.mark.parametrize(
    "settings, kept", [({}, [0, 1, 2, 3, 4, 5]), ({"top_k": 4, "top_p": 0.9, "temperature": 0.7}, [0, 2, 4])]
)
def test_draws_follow_the_distribution(implementation, varied, settings, kept):
    num_draws = 3000 if implementation != SLOW else 40 if settings else 250
    weights = torch.tensor([0.3, 0.02, 0.25, 0.08, 0.3, 0.05], dtype=torch.float64)
    fixed = "steps" if varied == "seeds" else "seeds"
    logits = weights.log().float().expand(num_draws, -1).contiguous()
    tokens = sample(implementation, logits, **settings, **{varied: torch.arange(num_draws), fixed: 11})
    weights = weights ** (1 / settings.get("temperature", 1.0))
    expected = weights[kept] / weights[kept].sum() * num_draws
    counts = tokens.bincount(minlength=6)
    assert counts.sum() == counts[kept].sum()
    chi_square = ((counts[kept] - expected).square() / expected).sum().item()
    # Mean df and variance 2 df: five standard deviations above, which a right sampler passes once in thousands.
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@IMPLEMENTATIONS
def test_draws_of_neighbouring_steps_are_independent(implementation):
    num_draws = 150 if implementation == SLOW else 2000
    tokens = sample(implementation, torch.zeros(num_draws, 2), steps=torch.arange(num_draws))
    repeats = (tokens[1:] == tokens[:-1]).sum().item()
    assert abs(repeats - num_draws / 2) < 5 * math.sqrt(num_draws) / 2


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_rows_far_apart(implementation):
    logits = torch.randn(3, 60)
    memory = torch.empty(2**31 + 60)
    far = memory.as_strided((3, 60), (2**30, 1))
    far.copy_(logits)
    assert torch.equal(sample(implementation, far), sample(implementation, logits))

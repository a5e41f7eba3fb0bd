"""What the contract's property tests cannot say of rejection sampling: known answers, and its distribution."""

import pytest
import torch

from vllm_triton.ops import rejection_sample
from vllm_triton.ops.platforms import triton_interprets

VOCABULARY = 6
# These take milliseconds a row. Natively, where this file runs as well, Triton does not.
SLOW = ("reference", "triton") if triton_interprets() else ("reference",)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(rejection_sample.implementations))


def verify(implementation, drafts, target_probs, draft_probs=None, bonus=(), greedy=True, seeds=None, most=None):
    """Tokens of each row, without the -1 behind them."""
    lengths = [len(row) for row in drafts]
    out = torch.full((len(drafts), (most or max([1, *lengths])) + 1), -7)
    rejection_sample.implementations[implementation](
        out,
        torch.tensor([token for row in drafts for token in row], dtype=torch.int64),
        torch.tensor([0, *lengths]).cumsum(0).int(),
        target_probs,
        draft_probs,
        torch.tensor(bonus),
        torch.full((len(drafts),), greedy),
        torch.arange(len(drafts)) if seeds is None else seeds,
        torch.full((len(drafts),), 17),
    )
    for row in out.tolist():
        assert all(token == -1 for token in row[row.index(-1) :] if -1 in row) if -1 in row else True
    return [[token for token in row if token != -1] for row in out.tolist()]


def one_hot(tokens):
    return torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), VOCABULARY).float()


@IMPLEMENTATIONS
@pytest.mark.parametrize("greedy", [True, False])
def test_known_answers(implementation, greedy):
    """A target that is certain of its tokens: drafts [1, 2, 3] against 1 2 3 4 and 1 5 3 4, and no draft against 5."""
    target = one_hot([1, 2, 3, 1, 5, 3])
    drafts, bonus = [[1, 2, 3], [1, 2, 3], []], [4, 4, 5]
    assert verify(implementation, drafts, target, bonus=bonus, greedy=greedy) == [[1, 2, 3, 4], [1, 5], [5]]


@IMPLEMENTATIONS
def test_the_first_of_equal_probabilities_is_the_largest(implementation):
    target = torch.tensor([[0.1, 0.3, 0.3, 0.3, 0.0, 0.0]]).repeat(2, 1)
    assert verify(implementation, [[1], [2]], target, bonus=[0, 0]) == [[1, 0], [1]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("certain", [False, True])
def test_tokens_are_distributed_as_if_the_target_drew_them(implementation, certain):
    count = 400 if implementation in SLOW else 20000
    generator = torch.Generator().manual_seed(1)
    target = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.2, 0.1])
    draft = torch.tensor([0.3, 0.1, 0.2, 0.25, 0.0, 0.15])
    drafted = torch.full((count,), 3) if certain else torch.multinomial(draft, count, True, generator=generator)
    seeds = torch.randint(0, 2**62, (count,), generator=generator)
    draft_probs = None if certain else draft.expand(count, -1).contiguous()
    rows = verify(
        implementation,
        drafted[:, None].tolist(),
        target.expand(count, -1).contiguous(),
        draft_probs,
        bonus=[0] * count,
        greedy=False,
        seeds=seeds,
    )
    first = torch.tensor([row[0] for row in rows]).bincount(minlength=VOCABULARY) / count
    # Four standard deviations of the most uncertain share.
    assert (first - target).abs().max() < 4 * (0.24 / count) ** 0.5
    assert first[2] == 0


@IMPLEMENTATIONS
def test_rows_are_as_wide_as_out(implementation):
    assert verify(implementation, [[1], []], one_hot([1]), bonus=[2, 3], most=5) == [[1, 2], [3]]

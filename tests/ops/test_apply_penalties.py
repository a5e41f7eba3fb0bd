"""What the contract's property tests cannot say of apply_penalties: worked examples and far memory."""

import pytest
import torch

from vllm_triton.ops import apply_penalties

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", sorted(apply_penalties.implementations))


def penalise(implementation, logits, history, prompt_len, total_len, repetition, frequency, presence):
    """The logits after the call, every setting the same for all rows."""
    num_rows = logits.shape[0]
    integers = [torch.full((num_rows,), value, dtype=torch.int32) for value in (prompt_len, total_len)]
    floats = [torch.full((num_rows,), value) for value in (repetition, frequency, presence)]
    apply_penalties.contract.check((logits, history, *integers, *floats))
    apply_penalties.implementations[implementation](logits, history, *integers, *floats)
    return logits


@IMPLEMENTATIONS
def test_repetition_comes_first_and_counts_the_prompt(implementation):
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, float("-inf")]])
    # Prompt 0, 1; output 2, 1, 2, 4; what follows is not read.
    history = torch.tensor([[0, 1, 2, 1, 2, 4, 3, -7, 99]], dtype=torch.int32)
    result = penalise(implementation, logits, history, 2, 6, 2.0, 0.5, 0.25)
    expected = [2 / 2, -2 * 2 - 0.5 - 0.25, 4 / 2 - 2 * 0.5 - 0.25, 1.0, float("-inf")]
    assert result.tolist() == [expected]


@IMPLEMENTATIONS
def test_a_token_all_along_a_long_history_is_penalised_once(implementation):
    logits = torch.ones(2, 8)
    history = torch.zeros(2, 200, dtype=torch.int32)
    history[:, 150] = 5
    result = penalise(implementation, logits, history, 0, 200, 4.0, 0.0, 1.0)
    assert result.tolist() == [[0.25 - 1, 1, 1, 1, 1, 0.25 - 1, 1, 1]] * 2


@IMPLEMENTATIONS
@pytest.mark.parametrize("settings", [(0, 0, 2.0, 1.0, 1.0), (3, 5, 1.0, 0.0, 0.0), (5, 5, 1.0, 2.0, 2.0)])
def test_nothing_to_penalise(implementation, settings):
    logits = torch.randn(2, 8)
    before = logits.clone()
    history = torch.tensor([[1, 2, 3, 4, 5]] * 2, dtype=torch.int32)
    assert torch.equal(penalise(implementation, logits, history, *settings), before)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_rows_far_apart(implementation):
    near = torch.randn(3, 40)
    far = torch.empty(2**31 + 40).as_strided((3, 40), (2**30, 1))
    far.copy_(near)
    history = torch.randint(0, 40, (3, 50), dtype=torch.int32)
    settings = (history, 10, 50, 1.5, 0.5, 0.5)
    assert torch.equal(penalise(implementation, far, *settings), penalise(implementation, near, *settings))

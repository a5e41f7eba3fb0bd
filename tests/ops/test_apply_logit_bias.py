"""What the contract's property tests cannot say of apply_logit_bias: worked examples and far memory."""

import pytest
import torch

from vllm_triton.ops import apply_logit_bias

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", sorted(apply_logit_bias.implementations))


def biased(implementation, logits, rows, token_ids, bias):
    arguments = (logits, torch.tensor(rows), torch.tensor(token_ids), torch.tensor(bias))
    apply_logit_bias.contract.check(arguments)
    apply_logit_bias.implementations[implementation](*arguments)
    return logits


@IMPLEMENTATIONS
def test_only_the_named_logits_change(implementation):
    rows, token_ids, bias = [2, -1, 0, 0], [0, 3, 3, 0], [-1.5, 100.0, float("-inf"), 2.0]
    result = biased(implementation, torch.ones(3, 4), rows, token_ids, bias)
    assert result.tolist() == [[3, 1, 1, float("-inf")], [1, 1, 1, 1], [-0.5, 1, 1, 1]]


@IMPLEMENTATIONS
def test_padding_alone_writes_nothing(implementation):
    before = torch.randn(2, 5)
    result = biased(implementation, before.clone(), [-1] * 130, [4] * 130, [1.0] * 130)
    assert torch.equal(result, before)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_rows_far_apart(implementation):
    near = torch.randn(3, 40)
    far = torch.empty(2**31 + 40).as_strided((3, 40), (2**30, 1))
    far.copy_(near)
    arguments = ([2, 1, 0], [39, 5, 0], [1.0, 2.0, 3.0])
    assert torch.equal(biased(implementation, far, *arguments), biased(implementation, near, *arguments))

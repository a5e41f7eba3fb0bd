"""Which experts are chosen, beside what the property suite draws: ties, and logits that are not finite."""

import math

import pytest
import torch

from vllm_triton.ops import topk_routing
from vllm_triton.ops.errors import ShapeError

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(topk_routing.implementations))
SCORING = pytest.mark.parametrize("use_sigmoid", [False, True])


def _route(implementation, logits, bias=None, num_choices=2, use_sigmoid=False, renormalize=False, groups=(1, 1)):
    function = topk_routing.implementations[implementation].function
    weights, ids = function(torch.tensor(logits), bias, num_choices, use_sigmoid, renormalize, *groups, 1.0)
    return weights, ids.tolist()


@IMPLEMENTATIONS
@SCORING
def test_of_equal_logits_the_lower_ids_are_chosen(implementation, use_sigmoid):
    _, ids = _route(implementation, [[1.0, 3.0, 1.0, 3.0, 3.0], [0.0] * 5], num_choices=4, use_sigmoid=use_sigmoid)
    assert ids == [[1, 3, 4, 0], [0, 1, 2, 3]]


@IMPLEMENTATIONS
def test_saturated_scores_are_told_apart_by_their_logits(implementation):
    assert _route(implementation, [[30.0, 40.0, 50.0]], num_choices=3, use_sigmoid=True)[1] == [[2, 1, 0]]
    assert _route(implementation, [[-300.0, 0.0, -200.0]], num_choices=3)[1] == [[1, 2, 0]]


@IMPLEMENTATIONS
@SCORING
def test_logits_of_minus_infinity_or_nan_are_chosen_last_and_count_nothing(implementation, use_sigmoid):
    logits = [[-math.inf, 1.0, math.nan, 2.0], [math.nan] * 4, [-math.inf] * 4]
    weights, ids = _route(implementation, logits, num_choices=3, use_sigmoid=use_sigmoid, renormalize=True)
    assert ids == [[3, 1, 0], [0, 1, 2], [0, 1, 2]]
    assert weights[0].sum().item() == pytest.approx(1) and weights[0, :2].min() > 0
    assert not weights[0, 2] and not weights[1:].any()


@IMPLEMENTATIONS
def test_bias_counts_for_the_choice_alone(implementation):
    logits, bias = [[2.0, 1.0, 0.0, -1.0]], torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, ids = _route(implementation, logits, bias, use_sigmoid=True)
    assert ids == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0, 2.0]]).sigmoid())


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("has_bias", "expected"),
    [
        (False, [0, 2]),  # groups by their best expert: 9 and 6
        (True, [2, 3]),  # by the sum of their two best: that of the first is the least
    ],
)
def test_groups_are_chosen_before_experts(implementation, has_bias, expected):
    logits = [[9.0, -9.0, 6.0, 5.0, 4.0, 4.0]]
    bias = torch.tensor([0.0, -3.0, 0.0, 0.0, 0.0, 0.0]) if has_bias else None
    assert _route(implementation, logits, bias, use_sigmoid=True, groups=(3, 2))[1] == [expected]


@IMPLEMENTATIONS
def test_experts_of_lesser_groups_rank_below_minus_infinity(implementation):
    logits = [[1.0, -math.inf, -math.inf, 0.5, 0.5, 0.5]]
    assert _route(implementation, logits, num_choices=3, groups=(2, 1))[1] == [[0, 1, 2]]
    assert _route(implementation, [[-math.inf] * 6], torch.zeros(6), num_choices=3, groups=(3, 2))[1] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("num_choices", "groups", "message"),
    [
        (7, (1, 1), "num_choices must be at most the 6 experts of the kept groups, got 7"),
        (3, (3, 1), "num_choices must be at most the 2 experts of the kept groups, got 3"),
        (1, (4, 1), "num_groups must divide the 6 experts of router_logits, got 4"),
        (1, (2, 3), "topk_groups must be at most num_groups = 2, got 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(num_choices, groups, message):
    with pytest.raises(ShapeError, match=message):
        topk_routing(torch.zeros(1, 6), None, num_choices, False, False, *groups, 1.0)

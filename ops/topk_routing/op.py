from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.topk_routing.reference import topk_routing_reference


def _constraint(dims: Dims) -> str | None:
    experts, groups, kept = dims["X"], dims["num_groups"], dims["topk_groups"]
    if experts % groups:
        return f"num_groups must divide the {experts} experts of router_logits, got {groups}"
    if kept > groups:
        return f"topk_groups must be at most num_groups = {groups}, got {kept}"
    if dims["K"] > kept * experts // groups:
        return f"num_choices must be at most the {kept * experts // groups} experts of the kept groups, got {dims['K']}"
    return None


def _draw_dims(pick: Any) -> Dims:
    """The number of a group's experts and "kind" are no sizes: the one makes sizes fit, the other steers `_arrange`."""
    groups, per_group = pick.of(1, 1, 2, 4), pick(1, 9)
    kept = pick(1, groups)
    return {
        "T": pick(1, 7),
        "X": groups * per_group,
        "num_groups": groups,
        "topk_groups": kept,
        "K": pick(1, min(kept * per_group, 6)),
        "kind": pick(0, 7),
    }


# Numbers whose scores, sums of scores and biased scores differ by much more than a rounding where they differ at all:
# which expert is chosen depends on no implementation's last bit. Equal ones are frequent.
def _logits(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 25, (dims["T"], dims["X"]), generator=generator) / 4


def _bias(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return 2.0 * torch.randint(-1, 2, (dims["X"],), generator=generator)


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    kind = dims.get("kind")
    if kind is not None:
        inputs["use_sigmoid"], inputs["renormalize"] = bool(kind & 1), bool(kind & 2)
        inputs["correction_bias"] = inputs["correction_bias"] if kind & 4 else None


@define_op(
    args={
        "router_logits": Tensor("T X", FLOATS, values=_logits),
        "correction_bias": Tensor("X", (torch.float32,), optional=True, values=_bias),
        "num_choices": Scalar(int, "be at least 1", lambda value: value >= 1, example=2, size="K"),
        "use_sigmoid": Scalar(bool, "be a truth value", lambda value: True, example=False),
        "renormalize": Scalar(bool, "be a truth value", lambda value: True, example=True),
        "num_groups": Scalar(int, "be at least 1", lambda value: value >= 1, example=1, size="num_groups"),
        "topk_groups": Scalar(int, "be at least 1", lambda value: value >= 1, example=1, size="topk_groups"),
        "scaling_factor": Scalar(float, "be greater than 0", lambda value: 0 < value < float("inf"), example=2.5),
    },
    results={"topk_weights": Tensor("T K", (torch.float32,)), "topk_ids": Tensor("T K", (torch.int32,))},
    reference=topk_routing_reference,
    constraint=_constraint,
    test_dims=_draw_dims,
    bench_dims={
        "mixtral-8x7b 1 token": {"T": 1, "X": 8, "K": 2, "num_groups": 1, "topk_groups": 1},
        "qwen3-30b-a3b 1 token": {"T": 1, "X": 128, "K": 8, "num_groups": 1, "topk_groups": 1},
        "qwen3-30b-a3b 512 tokens": {"T": 512, "X": 128, "K": 8, "num_groups": 1, "topk_groups": 1},
        "deepseek-v3 512 tokens": {"T": 512, "X": 256, "K": 8, "num_groups": 8, "topk_groups": 4},
    },
    arrange=_arrange,
    rows="T",
)
def topk_routing(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_choices: int,
    use_sigmoid: bool,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses K of X experts for each token, and how much each of them counts.

        score[t, x] = softmax_x(router_logits[t, x]), or sigmoid(router_logits[t, x])
        rank[t, x]  = score[t, x] + correction_bias[x], or router_logits[t, x] without a bias
        topk_ids[t]       = the K experts of highest rank[t], highest first; of equal ones the lower id first
        topk_weights[t, k] = scaling_factor * score[t, topk_ids[t, k]] (/ the sum of these scores, if renormalize)

    With groups, X / num_groups neighbouring experts are one, and only the topk_groups best groups are chosen from:
    those of the highest single rank, or with a bias those of the highest sum of two.

    A logit of -inf or NaN has score 0 and, without a bias, ranks last: ids are valid whatever the logits are. Weights
    whose scores are all 0 are 0. Logits of +inf are not allowed.

    Args:
        router_logits: [T, X] fp16|bf16|fp32, last dim contiguous.
        correction_bias: [X] fp32, which counts for the choice and not for the weights, or None.
        num_choices: K, at least 1.
        use_sigmoid: scores each expert by itself.
        renormalize: a token's weights sum to scaling_factor.
        num_groups: divides X; 1 for no groups.
        topk_groups: at most num_groups; K at most the experts in so many groups.
        scaling_factor: on the weights, > 0.
    Returns: topk_weights [T, K] fp32, topk_ids [T, K] int32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Jiang et al., "Mixtral of Experts", section 2.1; DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.1.2.
    """

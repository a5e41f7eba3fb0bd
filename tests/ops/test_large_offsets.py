"""Offsets beyond 2^31 elements: few rows at a huge stride, over memory of which only the touched pages exist."""

import pytest
import torch

from vllm_triton.ops import (
    embedding,
    fused_add_rms_norm,
    fused_moe,
    fused_moe_w4a16,
    fused_qk_norm_rope,
    gelu_and_mul,
    layer_norm,
    linear,
    moe_sum,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    scaled_mm,
    scaled_quant,
    silu_and_mul,
    softcap_logits,
    topk_routing,
    w4a16_mm,
)
from vllm_triton.ops.testing import make_inputs

ROW_STRIDE = 2**30
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["torch", "triton"])


def _far_rows(values: torch.Tensor) -> torch.Tensor:
    """The same three rows, the last of them 2^31 elements after the first."""
    assert values.shape[0] == 3
    memory = torch.empty(2 * ROW_STRIDE + values[0].numel(), dtype=values.dtype)
    far = memory.as_strided(values.shape, (ROW_STRIDE, *values[0].contiguous().stride()))
    far.copy_(values)
    return far


def _assert_far_equals_near(op, implementation, near, far):
    function = op.implementations[implementation]
    expected, actual = function(*near), function(*far)
    expected, actual = (result if isinstance(result, tuple) else (result,) for result in (expected, actual))
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one)


@IMPLEMENTATIONS
def test_rms_norm(implementation):
    x, weight = torch.randn(3, 40).half(), torch.randn(40).half()
    _assert_far_equals_near(rms_norm, implementation, (x, weight, 1e-5), (_far_rows(x), weight, 1e-5))


@IMPLEMENTATIONS
def test_rms_norm_of_heads(implementation):
    x, weight = torch.randn(3, 3, 40).half(), torch.randn(40).half()
    far_heads = _far_rows(x.transpose(0, 1)).transpose(0, 1)
    for far in (_far_rows(x), far_heads):
        _assert_far_equals_near(rms_norm, implementation, (x, weight, 1e-5), (far, weight, 1e-5))


@IMPLEMENTATIONS
def test_layer_norm(implementation):
    x, weight = torch.randn(3, 40).half(), torch.randn(40).half()
    _assert_far_equals_near(layer_norm, implementation, (x, weight, weight, 1e-5), (_far_rows(x), weight, weight, 1e-5))


@IMPLEMENTATIONS
def test_fused_add_rms_norm(implementation):
    x, residual, weight = torch.randn(3, 40).half(), torch.randn(3, 40).half(), torch.randn(40).half()
    far = (_far_rows(x), _far_rows(residual), weight, 1e-5)
    _assert_far_equals_near(fused_add_rms_norm, implementation, (x, residual, weight, 1e-5), far)


@IMPLEMENTATIONS
def test_silu_and_mul(implementation):
    x = torch.randn(3, 80).half()
    _assert_far_equals_near(silu_and_mul, implementation, (x,), (_far_rows(x),))


@IMPLEMENTATIONS
def test_gelu_and_mul(implementation):
    x = torch.randn(3, 80).half()
    _assert_far_equals_near(gelu_and_mul, implementation, (x, True), (_far_rows(x), True))


@IMPLEMENTATIONS
def test_softcap_logits(implementation):
    logits = torch.randn(3, 80).half()
    _assert_far_equals_near(softcap_logits, implementation, (logits, 1.5), (_far_rows(logits), 1.5))


@IMPLEMENTATIONS
def test_embedding(implementation):
    table, token_ids = torch.randn(3, 40).half(), torch.tensor([2, 0, 1, 2])
    _assert_far_equals_near(embedding, implementation, (token_ids, table), (token_ids, _far_rows(table)))


@IMPLEMENTATIONS
def test_rotary_embedding(implementation):
    positions, cos_sin = torch.tensor([2, 0, 1]), torch.randn(3, 16)
    query, key = torch.randn(3, 2, 16).half(), torch.randn(3, 1, 16).half()
    near = (positions, query, key, cos_sin, False)
    far = (positions, _far_rows(query), _far_rows(key), _far_rows(cos_sin), False)
    _assert_far_equals_near(rotary_embedding, implementation, near, far)


@IMPLEMENTATIONS
def test_fused_qk_norm_rope(implementation):
    positions, cos_sin, weight = torch.tensor([2, 0, 1]), torch.randn(3, 16), torch.randn(16).half()
    query, key = torch.randn(3, 2, 16).half(), torch.randn(3, 1, 16).half()
    near = (positions, query, key, weight, weight, cos_sin, 1e-5)
    far = (positions, _far_rows(query), _far_rows(key), weight, weight, _far_rows(cos_sin), 1e-5)
    _assert_far_equals_near(fused_qk_norm_rope, implementation, near, far)


@IMPLEMENTATIONS
def test_linear(implementation):
    x, weight = torch.randn(3, 24), torch.randn(3, 24)
    near, far = (x, weight, None), (_far_rows(x), _far_rows(weight), None)
    _assert_far_equals_near(linear, implementation, near, far)


@IMPLEMENTATIONS
def test_fused_moe(implementation):
    x, w1, w2 = torch.randn(3, 24), torch.randn(3, 32, 24), torch.randn(3, 24, 16)
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 2], [2, 1], [1, 0]]).int()
    near = (x, w1, w2, weights, ids, None)
    _assert_far_equals_near(fused_moe, implementation, near, (*map(_far_rows, near[:5]), None))
    # The rows of an expert's weight, of which there are then three.
    x, w1, w2 = x[:, :3], w1[:, :, :3], w2[:, :3]
    far_w2 = _far_rows(w2.transpose(0, 1)).transpose(0, 1)
    _assert_far_equals_near(
        fused_moe, implementation, (x, w1, w2, weights, ids, None), (x, w1, far_w2, weights, ids, None)
    )


@IMPLEMENTATIONS
def test_fused_moe_of_small_numbers(implementation):
    x, ids = torch.randn(3, 24), torch.tensor([[0, 2], [2, 1], [1, 0]]).int()
    weights = torch.randint(-128, 128, (3, 32, 24), dtype=torch.int8), torch.randint(-128, 128, (3, 24, 16)).char()
    scales, biases = (torch.rand(3, 32, 1), torch.rand(3, 24, 1)), (torch.randn(3, 32), torch.randn(3, 24))
    routing, limit = (torch.rand(3, 2), ids, None), 7.0
    near = (x, *weights, *routing, *biases, limit, *scales)
    far = (_far_rows(x), *map(_far_rows, weights), *routing, *map(_far_rows, biases), limit, *map(_far_rows, scales))
    _assert_far_equals_near(fused_moe, implementation, near, far)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [3, 9])  # by few slots and by tiles
def test_fused_moe_w4a16(implementation, num_tokens):
    dims = {"T": num_tokens, "Q1": 1, "Q2": 1, "S1": 1, "S2": 1, "X": 3, "Y": 3, "K": 2, "zeros": 3}
    near = make_inputs(fused_moe_w4a16.contract, dims, torch.float32) | {"expert_map": None}
    moved = [name for name in near if name.startswith("w") or (name == "x" and num_tokens == 3)]
    far = near | {name: _far_rows(near[name]) for name in moved}
    _assert_far_equals_near(fused_moe_w4a16, implementation, tuple(near.values()), tuple(far.values()))


@IMPLEMENTATIONS
@pytest.mark.parametrize("group_size", [0, -1, 32])
def test_scaled_quant(implementation, group_size):
    x = torch.randn(3, 40)
    _assert_far_equals_near(
        scaled_quant, implementation, (x, torch.int8, group_size), (_far_rows(x), torch.int8, group_size)
    )


@IMPLEMENTATIONS
def test_moe_sum(implementation):
    x, ids = torch.randn(3, 3, 40).half(), torch.tensor([[0, 2, 1]] * 3).int()
    far_choices = _far_rows(x.transpose(0, 1)).transpose(0, 1)
    for far in (_far_rows(x), far_choices):
        _assert_far_equals_near(moe_sum, implementation, (x, ids, None), (far, _far_rows(ids), None))


@IMPLEMENTATIONS
def test_topk_routing(implementation):
    logits = torch.randn(3, 8)
    kind = (None, 2, False, True, 1, 1, 1.0)
    _assert_far_equals_near(topk_routing, implementation, (logits, *kind), (_far_rows(logits), *kind))


@IMPLEMENTATIONS
def test_scaled_mm(implementation):
    a, weight = torch.randint(-127, 128, (2, 3, 24), dtype=torch.int8)
    scales = (torch.rand(3, 1), torch.rand(3, 1), torch.float32)
    near, far = (a, weight, *scales), (_far_rows(a), _far_rows(weight), *scales)
    _assert_far_equals_near(scaled_mm, implementation, near, far)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [2, 3])  # by each of the kernels
def test_w4a16_mm(implementation, num_tokens):
    x, words = torch.randn(3, 64).half(), torch.randint(-(2**31), 2**31, (3, 8, 16)).int()
    scales, zeros = torch.rand(3, 2, 16).half(), torch.randint(0, 17, (3, 2, 16)).half()
    near = (x[:num_tokens], words, scales, zeros, None, None)
    far = (_far_rows(x)[:num_tokens], _far_rows(words), _far_rows(scales), _far_rows(zeros), None, None)
    _assert_far_equals_near(w4a16_mm, implementation, near, far)


@IMPLEMENTATIONS
def test_reshape_and_cache_of_tokens_far_apart(implementation):
    key, value = torch.randn(2, 3, 2, 16).half()
    slot_mapping = torch.tensor([17, 3, 31])
    caches = [torch.zeros(2, 2, 16, 2, 16, dtype=torch.float16) for _ in range(2)]
    write = reshape_and_cache.implementations[implementation]
    write(key, value, *caches[0], slot_mapping)
    write(_far_rows(key), _far_rows(value), *caches[1], slot_mapping)
    assert caches[0].any() and torch.equal(*caches)


@IMPLEMENTATIONS
@pytest.mark.parametrize("query_lens", [[3], [1, 2], [1, 1, 1]])
def test_paged_attention_of_tokens_far_apart(implementation, query_lens):
    query, out = torch.randn(3, 2, 16).half(), torch.zeros(3, 2, 16).half()
    cache = torch.randn(2, 4, 16, 1, 16).half()
    block_table = torch.tensor([[1, 2], [2, 3], [3, 1]], dtype=torch.int32)[: len(query_lens)]
    seq_lens = torch.tensor([20, 9, 32], dtype=torch.int32)[: len(query_lens)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    attend = paged_attention.implementations[implementation]
    far_out = _far_rows(out)
    attend(out, query, *cache, block_table, seq_lens, starts, 0.25, 0)
    attend(far_out, _far_rows(query), *cache, block_table, seq_lens, starts, 0.25, 0)
    assert out.any(dim=-1).all() and torch.equal(far_out, out)


@IMPLEMENTATIONS
def test_reshape_and_cache_writes_the_last_pages_of_a_large_pool(implementation):
    pages, slots, heads, head_size = 32768, 16, 32, 128
    pool = torch.empty(pages, 2, slots, heads, head_size, dtype=torch.bfloat16)  # keys and values side by side
    key_cache, value_cache = pool[:, 0], pool[:, 1]
    key, value = torch.randn(2, 3, heads, head_size).bfloat16()
    slot_mapping = torch.tensor([pages * slots - 1, 0, (pages // 2) * slots + 3])
    reshape_and_cache.implementations[implementation](key, value, key_cache, value_cache, slot_mapping)
    for token, (page, slot) in enumerate([(pages - 1, slots - 1), (0, 0), (pages // 2, 3)]):
        assert torch.equal(key_cache[page, slot], key[token])
        assert torch.equal(value_cache[page, slot], value[token])

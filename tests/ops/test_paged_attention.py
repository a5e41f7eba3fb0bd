"""What the contract's property tests cannot say of paged attention: shapes of batches by name, poison, huge offsets."""

import functools

import pytest
import torch

from vllm_triton.ops.errors import OpError
from vllm_triton.ops.merge_attention_states import merge_attention_states
from vllm_triton.ops.paged_attention import kernel, paged_attention, splits, vectorised
from vllm_triton.ops.paged_attention.batches import OUT_POISON, fill_batch, quantize_caches
from vllm_triton.ops.paged_attention.cascade import cascade_attention
from vllm_triton.ops.testing import assert_within_rounding, suite

IMPLEMENTATIONS = sorted(paged_attention.implementations)
FAST = ["torch", "triton"]

# name -> (new tokens of each row, all tokens of each row)
BATCHES = {
    "prefill": ([40, 17], [40, 17]),
    "prefill of odd sizes": ([63, 130], [63, 130]),
    "decode": ([1, 1, 1, 1], [1, 16, 17, 100]),
    "decode of one": ([1], [33]),
    "chunked": ([20, 5], [52, 100]),
    "mixed": ([1, 30, 1, 7, 0, 1], [70, 30, 1, 50, 0, 16]),
    "all padding": ([0, 0, 0], [0, 0, 0]),
}


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    is_causal: bool = True,
    sinks: bool = False,
    quantized: torch.dtype | None = None,
    lse: bool = False,
    padding: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, object]:
    """Arguments of one call, with `padding` more rows in out and query than there are tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_rows = sum(query_lens) + padding, len(query_lens)
    most_blocks = max(1, *(-(-seq_len // block_size) for seq_len in seq_lens)) + 1
    num_pages = num_rows * most_blocks + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch = {
        "out": normal(num_tokens, heads, head_size),
        "query": normal(num_tokens, heads, head_size),
        "key_cache": normal(num_pages, block_size, kv_heads, head_size),
        "value_cache": normal(num_pages, block_size, kv_heads, head_size),
        "block_table": torch.zeros(num_rows, most_blocks, dtype=torch.int32),
        "seq_lens": torch.zeros(num_rows, dtype=torch.int32),
        "query_start_loc": torch.zeros(num_rows + 1, dtype=torch.int32),
        "scale": head_size**-0.5,
        "window": window,
        "softcap": softcap,
        "is_causal": is_causal,
        "sinks": torch.randn(heads, generator=generator) if sinks else None,
        "key_scale": torch.empty(kv_heads),
        "value_scale": torch.empty(kv_heads),
        "lse": torch.empty(num_tokens, heads) if lse else None,
    }
    quantize_caches(batch, quantized, generator)
    fill_batch(batch, query_lens, seq_lens, 1 + torch.randperm(num_pages - 1, generator=generator))
    return batch


def attend(implementation: str, batch: dict[str, object]) -> torch.Tensor:
    """`out` after the call; the batch itself keeps its own."""
    arguments = batch | {"out": batch["out"].clone()}
    paged_attention.contract.check(tuple(arguments.values()))
    return suite.run(paged_attention, paged_attention.implementations[implementation], arguments)["out"]


def assert_right(implementation: str, batch: dict[str, object]) -> None:
    exact = attend_exactly(batch)
    assert_within_rounding(attend(implementation, batch), exact, attend("reference", batch), what=implementation)


def attend_exactly(batch: dict[str, object]) -> torch.Tensor:
    return suite.run(paged_attention, paged_attention.reference, suite.widened(batch))["out"]


def dense_attention(batch: dict[str, object], row: int) -> torch.Tensor:
    """Attention of one sequence by torch's own function in float64, over keys that are not paged: [n, H, D]."""
    start, end = batch["query_start_loc"][row : row + 2].tolist()
    seq_len, block_size = int(batch["seq_lens"][row]), batch["key_cache"].shape[1]
    blocks = batch["block_table"][row, : -(-seq_len // block_size)].long()
    query = batch["query"][start:end].double().transpose(0, 1)
    group = query.shape[0] // batch["key_cache"].shape[2]
    key, value = (
        batch[name][blocks].flatten(0, 1)[:seq_len].double().transpose(0, 1).repeat_interleave(group, dim=0)
        for name in ("key_cache", "value_cache")
    )
    visible = torch.ones(end - start, seq_len, dtype=torch.bool).tril(seq_len - (end - start))
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=batch["scale"]
    )
    return result.transpose(0, 1)


@pytest.mark.parametrize("name", BATCHES)
def test_reference_is_dense_attention(name):
    batch = make_batch(*BATCHES[name])
    out = attend_exactly(batch)
    for row, (start, end) in enumerate(zip(batch["query_start_loc"], batch["query_start_loc"][1:], strict=False)):
        if start < end:
            torch.testing.assert_close(out[start:end], dense_attention(batch, row), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_by_name(implementation, name):
    assert_right(implementation, make_batch(*BATCHES[name]))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("window", [1, 15, 16, 20])
def test_window_shorter_than_the_text(implementation, window):
    # Rows end inside and at the end of a block; blocks before the window have been given back.
    batch = make_batch([1, 9, 40, 1, 1], [64, 70, 40, 5, 90], window=window)
    assert (batch["block_table"][4, :4] == 0).all()
    assert_right(implementation, batch)


@pytest.mark.parametrize("implementation", FAST)
def test_a_window_as_long_as_the_text_changes_nothing(implementation):
    batch = make_batch([1, 9, 40], [64, 70, 40])
    torch.testing.assert_close(attend(implementation, batch | {"window": 70}), attend(implementation, batch))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    "heads, kv_heads, head_size, block_size",
    [
        *((1, 1, 16, 16), (9, 3, 64, 32), (8, 1, 80, 16), (5, 5, 96, 64), (20, 1, 16, 16), (2, 2, 256, 16)),
        *((4, 2, 112, 128), (6, 3, 32, 128), (2, 1, 128, 64)),
    ],
)
def test_head_ratios_and_sizes(implementation, heads, kv_heads, head_size, block_size):
    shapes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "block_size": block_size}
    assert_right(implementation, make_batch([1, 20, 3], [150, 20, 35], **shapes))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_keep_their_poison(implementation):
    batch = make_batch([1, 6, 0], [20, 6, 0], padding=20)
    out = attend(implementation, batch)
    assert (out[7:] == OUT_POISON).all()
    assert out[:7].isfinite().all() and (out[:7] != OUT_POISON).any(dim=(1, 2)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_do_not_depend_on_where_blocks_lie(implementation):
    one, other = (make_batch([1, 30, 4], [70, 30, 50], seed=seed) for seed in (1, 2))
    for row, seq_len in enumerate((70, 30, 50)):
        blocks = -(-seq_len // 16)
        for name in ("key_cache", "value_cache"):
            other[name][other["block_table"][row, :blocks].long()] = one[name][one["block_table"][row, :blocks].long()]
    assert torch.equal(attend(implementation, other | {"query": one["query"]}), attend(implementation, one))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_permuting_the_sequences_permutes_the_results(implementation):
    batch = make_batch([1, 30, 4, 1], [70, 30, 50, 3], padding=0)
    starts = batch["query_start_loc"].tolist()
    order = [2, 0, 3, 1]
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
    lengths = [starts[row + 1] - starts[row] for row in order]
    permuted = batch | {
        "query": batch["query"][tokens],
        "block_table": batch["block_table"][order],
        "seq_lens": batch["seq_lens"][order],
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
    }
    torch.testing.assert_close(attend(implementation, permuted), attend(implementation, batch)[tokens])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slot_stride", ["divides the page", "does not divide the page"])
def test_pages_are_views(implementation, slot_stride):
    batch = make_batch([1, 1, 20], [30, 70, 41])
    pages, slots, heads, size = batch["key_cache"].shape
    views = {}
    for name in ("key_cache", "value_cache"):
        if slot_stride == "divides the page":
            views[name] = torch.full((pages, 2, slots, heads, size), float("nan"))[:, 1]
        else:
            buffer = torch.full((pages, slots * heads * size + 8), float("nan"))
            views[name] = buffer[:, 8:].unflatten(1, (slots, heads, size))
        views[name].copy_(batch[name])
    torch.testing.assert_close(attend(implementation, batch | views), attend(implementation, batch))


@pytest.mark.parametrize("implementation", FAST)
def test_blocks_beyond_two_to_the_31(implementation):
    """The last pages of a pool of 32768 with 32 KV heads; only the pages that are written take memory."""
    num_pages, block_size, heads, head_size = 32768, 32, 32, 128
    shapes = {"heads": heads, "kv_heads": heads, "head_size": head_size, "block_size": block_size}
    small = make_batch([1, 3], [40, 20], padding=0, dtype=torch.float16, **shapes)
    offset = num_pages - small["key_cache"].shape[0]
    assert offset * block_size * heads * head_size > 2**31
    huge = dict(small)
    for name in ("key_cache", "value_cache"):
        huge[name] = torch.empty(num_pages, block_size, heads, head_size, dtype=torch.float16)
        huge[name][offset:] = small[name]
    huge["block_table"] = torch.where(small["block_table"] > 0, small["block_table"] + offset, 0).int()
    assert torch.equal(attend(implementation, huge), attend(implementation, small))


def test_decode_rows_of_unlike_lengths_are_split():
    groups = vectorised._groups([0, 2, 3, 4, 5], [10, 0, 200, 5000, 9000, 4000])
    assert groups == [[4], [3], [5], [2, 0]]
    assert vectorised._groups(list(range(40)), [400] * 40) == [list(range(20)), list(range(20, 40))]


@pytest.mark.parametrize("implementation", FAST)
def test_decode_rows_of_unlike_lengths(implementation):
    assert_right(implementation, make_batch([1, 1, 1, 1], [600, 3, 150, 280], heads=2, kv_heads=1))


@pytest.mark.parametrize("head_size", [16, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8, 100])
def test_config_fits_shared_memory_and_covers_the_heads(head_size, dtype, group):
    select = functools.partial(kernel.select_config, head_size=head_size, group=group, dtype=dtype)
    variants = {select(tokens, sequences) for tokens in (1, 7, 64, 5000) for sequences in (1, 64)}
    assert len(variants) <= 2
    for config in variants:
        assert config.block_q >= 1 and config.block_q * group <= config.block_m
        assert config.block_d >= head_size and config.block_n >= 16
        assert 2 * 2 * config.block_n * config.block_d * dtype.itemsize <= max(65536, 4 * 16 * 256 * dtype.itemsize)


def attend_one_by_one(batch: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query and head by itself, in float64, as the op's docstring says: out and lse of real tokens."""
    starts, block_size = batch["query_start_loc"].tolist(), batch["key_cache"].shape[1]
    group = batch["query"].shape[1] // batch["key_cache"].shape[2]
    caches = {name: batch[f"{name}_cache"].double() for name in ("key", "value")}
    for name in caches:
        if batch[f"{name}_scale"] is not None:
            caches[name] = caches[name] * batch[f"{name}_scale"].double()[:, None]
    out = torch.zeros(starts[-1], *batch["query"].shape[1:], dtype=torch.float64)
    lse = torch.zeros(out.shape[:2], dtype=torch.float64)
    for row, seq_len in enumerate(batch["seq_lens"].tolist()):
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - (starts[row + 1] - token)
            first = max(position - batch["window"] + 1, 0) if batch["window"] else 0
            last = position if batch["is_causal"] else seq_len - 1
            seen = [(int(batch["block_table"][row, j // block_size]), j % block_size) for j in range(first, last + 1)]
            for head in range(out.shape[1]):
                mass, total = 0.0, torch.zeros(out.shape[2], dtype=torch.float64)
                for page, slot in seen:
                    key = caches["key"][page, slot, head // group]
                    score = batch["scale"] * torch.dot(batch["query"][token, head].double(), key)
                    if batch["softcap"]:
                        score = batch["softcap"] * torch.tanh(score / batch["softcap"])
                    mass += score.exp()
                    total += score.exp() * caches["value"][page, slot, head // group]
                if batch["sinks"] is not None:
                    mass += batch["sinks"][head].double().exp()
                out[token, head], lse[token, head] = total / mass, mass.log()
    return out, lse


VARIANTS = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 5},
    "int8": {"quantized": torch.int8},
    "fp8": {"quantized": torch.float8_e4m3fn},
    "not causal": {"is_causal": False},
    "all": {"softcap": 2.0, "sinks": True, "quantized": torch.int8, "window": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_is_the_formula(variant):
    batch = make_batch([1, 6, 0, 3], [9, 6, 0, 20], lse=True, heads=4, **VARIANTS[variant])
    wide = suite.widened(batch)
    paged_attention.reference(*wide.values())
    out, lse = attend_one_by_one(batch)
    torch.testing.assert_close(wide["out"][:10], out, rtol=1e-6, atol=1e-6)  # scales are float32
    torch.testing.assert_close(wide["lse"][:10], lse, rtol=1e-6, atol=1e-6)


def attend_with_lse(implementation: str, batch: dict[str, object]) -> dict[str, torch.Tensor]:
    arguments = batch | {name: batch[name].clone() for name in ("out", "lse")}
    paged_attention.contract.check(tuple(arguments.values()))
    return suite.run(paged_attention, paged_attention.implementations[implementation], arguments)


def assert_all_right(implementation: str, batch: dict[str, object]) -> None:
    exact = suite.run(paged_attention, paged_attention.reference, suite.widened(batch))
    eager, actual = attend_with_lse("reference", batch), attend_with_lse(implementation, batch)
    for name, value in actual.items():
        assert_within_rounding(value, exact[name], eager[name], what=name)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(implementation, variant):
    assert_all_right(implementation, make_batch([1, 40, 0, 3], [300, 40, 0, 150], lse=True, **VARIANTS[variant]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing(implementation):
    batch = make_batch([2, 1], [0, 5], lse=True, is_causal=False)
    result = attend_with_lse(implementation, batch)
    assert (result["out"][:2] == 0).all() and (result["lse"][:2] == float("-inf")).all()
    assert (result["out"][2] != 0).all() and result["lse"][2].isfinite().all()
    assert (result["lse"][3:] == OUT_POISON).all()


@pytest.mark.parametrize("splits", [2, 4, 32])
@pytest.mark.parametrize("variant", [None, "sinks and window", "softcap", "int8", "not causal"])
def test_keys_split_over_programs(monkeypatch, splits, variant):
    monkeypatch.setattr(kernel, "select_num_splits", lambda *arguments: splits)
    lengths = [1, 255, 256, 511, 512, 600, 1025, 0]
    extras = {**VARIANTS.get(variant, {}), **({"window": 700} if variant == "sinks and window" else {})}
    # The interpreter takes as long for a part that is not in use: of 32 parts for fewer heads.
    sizes = {"heads": 2, "kv_heads": 1} if splits == 32 else {"heads": 4, "kv_heads": 2}
    sizes |= {"head_size": 24, "lse": True}
    batch = make_batch([min(length, 1) for length in lengths], lengths, **sizes, **extras)
    assert_all_right("triton", batch)
    several = make_batch([2, 3, 1], [700, 3, 300], **sizes, **extras)
    assert_all_right("triton", several)


def test_number_of_splits():
    def select(num_programs: int, most_keys: int, wanted: int = 264) -> int:
        return splits._select(num_programs, most_keys, wanted)

    assert [select(n, 8192) for n in (8, 16, 33, 132, 133, 1000)] == [32, 16, 8, 2, 1, 1]
    assert [select(8, keys) for keys in (16, 256, 511, 512, 1024, 10**6)] == [1, 1, 1, 2, 4, 32]
    # Kernels that are ready for all powers of two of programs are so for all numbers of them.
    ready = {select(1 << power, 8192) for power in range(12)}
    assert {select(programs, 8192) for programs in range(1, 2048)} <= ready


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("quantized", [None, torch.int8])
def test_cascade_of_a_shared_beginning(implementation, quantized):
    batch = make_batch([1, 5, 1, 0], [90, 70, 65, 0], quantized=quantized, softcap=4.0)
    batch["block_table"][1:3, :4] = batch["block_table"][0, :4]
    out = torch.full_like(batch["out"], torch.nan)
    arguments = [batch[name] for name in ("query", "key_cache", "value_cache", "block_table", "seq_lens")]
    tail = (4, batch["scale"], batch["softcap"], batch["key_scale"], batch["value_scale"])
    with paged_attention.using(implementation), merge_attention_states.using(implementation):
        cascade_attention(out, *arguments, batch["query_start_loc"], *tail)
    exact, eager = attend_exactly(batch), attend("reference", batch)
    assert_within_rounding(out[:7], exact[:7], eager[:7])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key_cache": torch.int8}, "value_cache must have the dtype of key_cache"),
        ({"key_cache": torch.int8, "value_cache": torch.int8}, "key_scale and value_scale must be tensors"),
        ({"key_cache": torch.float16, "value_cache": torch.float16}, "key_cache must have the dtype of query"),
        ({"key_scale": torch.ones(2)}, "key_scale must be None for a cache of torch.float32"),
        ({"key_scale": torch.ones(3), "value_scale": torch.ones(3)}, "key_scale must have 1 element or G = 2, got 3"),
        ({"is_causal": False, "window": 3}, "window must be 0 where is_causal is False, got 3"),
    ],
)
def test_what_does_not_go_together(change, message):
    batch = make_batch([1], [20])
    for name, value in change.items():
        batch[name] = batch[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(OpError, match=message):
        paged_attention(*batch.values())

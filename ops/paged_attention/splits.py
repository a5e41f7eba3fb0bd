"""Several programs a query where there are few: each sees a part of the keys, and a second kernel merges the results.

The grid and the number of parts depend on shapes alone, so that a captured step may be replayed when texts have grown;
how many parts are in use is decided on the device, from the length of each text.

Source: Dao et al., "Flash-Decoding for long-context inference"; Milakov and Gimelshein, "Online normalizer calculation
for softmax".
"""

import functools

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, next_power_of_2
from vllm_triton.ops.platforms import num_processors

# A part of the keys that is worth a program of its own has no fewer.
KEYS_PER_SPLIT = tl.constexpr(256)
MOST_SPLITS = 32
# Programs that a processor is given; a GPU's hides the memory's latency of one behind the other.
PROGRAMS_PER_PROCESSOR = {"cpu": 1, "cuda": 2}
LN_2 = tl.constexpr(0.6931471805599453)


def select_num_splits(num_programs: int, most_keys: int, device: torch.device) -> int:
    """Parts of the keys, a power of two.

    Args:
        num_programs: that there are without splitting.
        most_keys: that a text may have.
    """
    return _select(num_programs, most_keys, num_processors(device) * PROGRAMS_PER_PROCESSOR[device.type])


@functools.cache
def _select(num_programs: int, most_keys: int, wanted: int) -> int:
    splits = max(min(wanted // num_programs, most_keys // KEYS_PER_SPLIT.value, MOST_SPLITS), 1)
    return 1 << (splits.bit_length() - 1)


@triton.jit(do_not_specialize=["num_sequences", "partial_stride_s", "out_stride_t", "out_stride_h", "lse_stride_t"])
def _merge_splits_kernel(
    partial_ptr,  # [SPLITS, T, H, D] fp32
    partial_lse_ptr,  # [SPLITS, T, H] fp32, to the base 2
    query_start_loc_ptr,  # [B + 1]
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] or None
    num_sequences,
    partial_stride_s,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token and head: out = sum_s 2^(lse_s - lse) partial_s,  lse = log2 sum_s 2^lse_s.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if token >= tl.load(query_start_loc_ptr + num_sequences):  # padding
        return
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    rows = splits.to(tl.int64) * partial_stride_s + token * tl.num_programs(1) + head
    part_lse = tl.load(partial_lse_ptr + rows)
    highest = tl.max(part_lse, axis=0)
    if highest == float("-inf"):  # one program saw all keys and wrote the result
        return
    weights = tl.exp2(part_lse - highest)
    # Parts that are not in use were not written.
    mask = (part_lse > float("-inf"))[:, None] & (columns < D)[None, :]
    partial = tl.load(partial_ptr + rows[:, None] * D + columns[None, :], mask=mask, other=0.0)
    mass = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / mass
    tl.store(out_ptr + token * out_stride_t + head * out_stride_h + columns, result, mask=columns < D)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_stride_t + head, (highest + tl.log2(mass)) * LN_2)


COMPILE_CASE = CompileCase(
    _merge_splits_kernel,
    {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "query_start_loc_ptr": "*i32", "out_ptr": "*bf16"}
    | dict.fromkeys(("num_sequences", "partial_stride_s", "out_stride_t", "out_stride_h", "lse_stride_t"), "i32"),
    {"lse_ptr": None, "D": 128, "SPLITS": 16, "BLOCK_D": 128},
)


def merge_splits(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Writes the result of each token and head into out and lse, unless one program has done so.

    Args: partial [SPLITS, T, H, D], partial_lse [SPLITS, T, H] to the base 2, both fp32; as _merge_splits_kernel says.
    """
    num_splits, num_tokens, num_heads, head_size = partial.shape
    launch(
        _merge_splits_kernel,
        (num_tokens, num_heads),
        (partial, partial_lse, query_start_loc, out, lse),
        (
            query_start_loc.shape[0] - 1,
            num_tokens * num_heads,
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
        ),
        (head_size, num_splits, next_power_of_2(head_size)),
    )

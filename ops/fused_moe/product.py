"""A tile of an expert's product, which both kernels of fused_moe compute alike: dense, or of small numbers with scales.

Small numbers are summed as those of scaled_mm are: int8 in int32, exactly, and fp8 in float32. Scales of whole rows are
applied to a tile's sums at the end; scales of blocks to each block's, which are then summed in float32.

Source: Xiao et al., "SmoothQuant", section 3; DeepSeek-AI, "DeepSeek-V3 Technical Report", sections 3.3.2 and 3.5.2.
"""

import triton
import triton.language as tl

from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def row_offsets(rows, stride, ALIGNED: tl.constexpr):
    offsets = rows.to(tl.int64) * stride
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 16)
    return offsets


@triton.jit
def expert_scales(scale_ptr, expert, parts, rows, part_size, stride_x, stride_n, HAS_BLOCKS: tl.constexpr):
    """Where the scales of rows of an expert's weight begin.

    Args:
        parts, rows: row r of part p is row p * part_size + r of the weight; each part begins blocks of its own.
    """
    if HAS_BLOCKS:
        rows //= _SCALE_BLOCK
        part_size = tl.cdiv(part_size, _SCALE_BLOCK)
    scale_rows = parts * part_size + rows
    return scale_ptr + row_offsets(expert, stride_x, False) + row_offsets(scale_rows, stride_n, False)


@triton.jit
def product(
    a_ptrs,  # [BLOCK_T]: rows of the left operand
    a_mask,  # [BLOCK_T]
    a_scale_ptrs,  # [BLOCK_T]: their scales, or None
    weight_ptrs,  # [N]: rows of the weight
    weight_mask,  # [N]
    weight_scale_ptrs,  # [N]: their scales, or None
    depth,
    BLOCK_K: tl.constexpr,  # with blocks at most 128
    HAS_BLOCKS: tl.constexpr,
):
    """[BLOCK_T, N], float32."""
    lanes = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs[:, None] + lanes[None, :]
    weight_ptrs = weight_ptrs[None, :] + lanes[:, None]
    SUM: tl.constexpr = tl.int32 if weight_ptrs.dtype.element_ty == tl.int8 and not HAS_BLOCKS else tl.float32
    PRODUCT: tl.constexpr = tl.int32 if weight_ptrs.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([a_ptrs.shape[0], weight_ptrs.shape[1]], dtype=SUM)
    for start in range(0, depth, BLOCK_K):
        inside = lanes < depth - start
        a = tl.load(a_ptrs + start, mask=a_mask[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask[None, :] & inside[:, None], other=0.0)
        if HAS_BLOCKS:
            block = start // _SCALE_BLOCK
            a_scale = tl.load(a_scale_ptrs + block, mask=a_mask, other=0.0)
            weight_scale = tl.load(weight_scale_ptrs + block, mask=weight_mask, other=0.0)
            part = tl.dot(a, weight, out_dtype=PRODUCT, max_num_imprecise_acc=BLOCK_K).to(tl.float32)
            total += part * a_scale[:, None] * weight_scale[None, :]
        elif weight_scale_ptrs is not None:
            total = tl.dot(a, weight, total, out_dtype=PRODUCT, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(a, weight, total, input_precision="ieee")
    if weight_scale_ptrs is not None and not HAS_BLOCKS:
        a_scale = tl.load(a_scale_ptrs, mask=a_mask, other=0.0)
        weight_scale = tl.load(weight_scale_ptrs, mask=weight_mask, other=0.0)
        total = total.to(tl.float32) * a_scale[:, None] * weight_scale[None, :]
    return total

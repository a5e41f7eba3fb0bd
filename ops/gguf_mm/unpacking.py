"""Unpacks weights inside a kernel, in the layout of `layout.py`."""

import triton
import triton.language as tl


@triton.jit
def _float(bits):
    """Of 16 bits."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_minimum(ptrs, block, stride_s, FORMAT: tl.constexpr):
    """What the values of each block of 32 are multiplied by, and what is added to them, but for Q6_K: there the scales
    of a block's first and last 16 values.

    ptrs: of rows. block: number of the block, of any shape that fits.
    """
    if FORMAT == "Q4_K" or FORMAT == "Q6_K":
        FLOATS: tl.constexpr = 2 if FORMAT == "Q4_K" else 1
        first = ptrs + block // 8 * (FLOATS + 8) * stride_s
        scale = _float(tl.load(first))
        pair = tl.load(first + (FLOATS + block % 8) * stride_s).to(tl.int32)
        if FORMAT == "Q4_K":
            return scale * (pair & 255).to(tl.float32), -_float(tl.load(first + stride_s)) * (pair >> 8).to(tl.float32)
        else:
            return scale * (pair << 24 >> 24).to(tl.float32), scale * (pair >> 8).to(tl.float32)
    elif FORMAT == "Q4_1":
        return _float(tl.load(ptrs + 2 * block * stride_s)), _float(tl.load(ptrs + (2 * block + 1) * stride_s))
    else:
        scale = _float(tl.load(ptrs + block * stride_s))
        if FORMAT == "Q4_0":
            return scale, -8 * scale
        else:
            return scale, -128 * scale


@triton.jit
def words_of(ptrs, block, stride_w, FORMAT: tl.constexpr):
    """The words that hold the values of blocks of 32: [blocks, 1, 2, 2, rows] of 4 bits each, or of bytes in Q8_0 and
    Q6_K: [blocks, 2, 2, 2, rows].

    ptrs: of rows. block: [blocks].
    """
    block = block[:, None, None, None, None]
    pair = tl.arange(0, 2)
    of_four = 2 * pair[:, None, None] + pair[:, None]  # [2, 2, 1]
    half = pair[:, None, None, None]
    if FORMAT == "Q6_K":
        lower = tl.load(ptrs + (block * 6 + 2 * half + pair[:, None, None]) * stride_w)
        upper = tl.load(ptrs + (block * 6 + 4 + half) * stride_w)
        return ((lower >> 4 * pair[:, None]) & 0x0F0F0F0F) | ((upper >> 2 * of_four << 4) & 0x30303030)
    elif FORMAT == "Q8_0":
        words = tl.load(ptrs + (block * 8 + 4 * half + of_four) * stride_w)
        return words ^ -2139062144  # each byte + 128
    else:
        return tl.load(ptrs + (block * 4 + of_four) * stride_w)


@triton.jit
def place_in_word(number, BITS: tl.constexpr):
    """The lowest bit of each of a word's values."""
    if BITS == 4:
        return 4 * (number // 2) + 16 * (number % 2)
    else:
        return 8 * number


@triton.jit
def in_pairs(words):
    """Of four words of 4-bit values q, [4, rows], the numbers 128 + q in bf16, [32, rows]."""
    shifts = (4 * tl.arange(0, 4))[:, None]
    pairs = ((words[:, None, :] >> shifts) & 0x000F000F) | 0x43004300  # [4, 4, rows]
    halves = tl.trans(tl.join(pairs, pairs >> 16), (0, 1, 3, 2))
    return tl.reshape(halves.to(tl.int16).to(tl.bfloat16, bitcast=True), [32, words.shape[1]])


@triton.jit
def unpacked(
    quants_ptrs,  # [rows]
    scales_ptrs,  # [rows]
    start,
    quants_stride_w,
    scales_stride_s,
    FORMAT: tl.constexpr,
    DEPTH: tl.constexpr,
    dtype: tl.constexpr,
):
    """The values of rows at inputs start to start + DEPTH - 1: [DEPTH, rows]."""
    ROWS: tl.constexpr = quants_ptrs.shape[0]
    BITS: tl.constexpr = 8 if FORMAT == "Q8_0" or FORMAT == "Q6_K" else 4
    block = start // 32 + tl.arange(0, DEPTH // 32)
    scale, minimum = scale_and_minimum(scales_ptrs, block[:, None], scales_stride_s, FORMAT)
    words = words_of(quants_ptrs, block, quants_stride_w, FORMAT)[:, :, :, :, None, :]
    place = place_in_word(tl.arange(0, 32 // BITS), BITS)[:, None]
    values = ((words >> place) & ((1 << BITS) - 1)).to(tl.float32)  # [blocks, 1 or 2, 2, 2, each of a word, rows]
    if FORMAT == "Q6_K":
        scale = tl.permute(tl.join(scale, minimum), (0, 2, 1))  # [blocks, 2, rows]
        weight = (values - 32) * scale[:, :, None, None, None, :]
    else:
        weight = values * scale[:, None, None, None, None, :] + minimum[:, None, None, None, None, :]
    return tl.reshape(weight.to(dtype), [DEPTH, ROWS])

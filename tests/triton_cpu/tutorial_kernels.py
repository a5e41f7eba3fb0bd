"""Kernels of the kinds that tutorials teach, as their readers write them: nothing here knows of CPUs."""

import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask) + tl.load(y_ptr + offsets, mask), mask)


@triton.jit
def softmax(x_ptr, out_ptr, stride_x, stride_out, num_rows, num_columns, BLOCK: tl.constexpr):
    """Programs stride over rows that fit into one tile."""
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=2):
        x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=-float("inf")).to(tl.float32)
        weights = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * stride_out + columns, weights / tl.sum(weights, axis=0), mask=mask)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.autotune(
    configs=[
        triton.Config({"BM": 16, "BN": 32, "BK": 32, "GROUP": 2}, num_warps=4),
        triton.Config({"BM": 32, "BN": 16, "BK": 16, "GROUP": 4}, num_warps=2, num_stages=2),
    ],
    key=["N", "K"],
)
@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Tiles in groups of rows; rows and columns wrap around the edge, so that only the depth needs a mask."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    rows = (tile_m * BM + tl.arange(0, BM)) % M
    columns = (tile_n * BN + tl.arange(0, BN)) % N
    depth = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=depth[None, :] < K - step * BK, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < K - step * BK, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    places = c_ptr + stride_cm * rows[:, None] + stride_cn * columns[None, :]
    tl.store(places, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    """Draws again in the backward pass what it drew in the forward pass, so no mask is kept."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    kept = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(kept, x / (1 - p), 0.0), mask=offsets < n)


@triton.jit
def layer_norm(x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, scale_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    out_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        x = tl.where(columns < N, x - mean, 0.0)
        total += x * x
    scale = 1 / tl.sqrt(tl.sum(total, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < N
        weight, bias = tl.load(weight_ptr + columns, mask=mask), tl.load(bias_ptr + columns, mask=mask)
        x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + columns, (x - mean) * scale * weight + bias, mask=mask)


@triton.jit
def layer_norm_backward(
    dx_ptr,
    dy_ptr,
    dweight_ptr,
    dbias_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    stride,
    M,
    N,
    BLOCK: tl.constexpr,
):
    """dx of every row that falls to this program, and this program's part of the sums over rows."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    dbias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        mean, scale = tl.load(mean_ptr + row), tl.load(scale_ptr + row)
        normal = tl.where(mask, (x - mean) * scale, 0.0)
        weighted = weight * dy
        along = tl.sum(normal * weighted, axis=0) / N
        middle = tl.sum(weighted, axis=0) / N
        tl.store(dx_ptr + row * stride + columns, (weighted - (normal * along + middle)) * scale, mask=mask)
        dweight += dy * normal
        dbias += dy
    tl.store(dweight_ptr + program * N + columns, dweight, mask=mask)
    tl.store(dbias_ptr + program * N + columns, dbias, mask=mask)


@triton.jit
def sum_rows(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """out[n] = sum_m x[m, n]"""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, M, BM):
        rows = start + tl.arange(0, BM)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        total += tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=columns < N)


@triton.jit
def _attend(
    total,
    mass,
    highest,
    q,
    k_ptr,
    v_ptr,
    rows,
    low,
    high,
    length,
    scale,
    D: tl.constexpr,
    BN: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    d = tl.arange(0, D)
    for start in range(low, high, BN):
        columns = start + tl.arange(0, BN)
        k = tl.load(k_ptr + columns[:, None] * D + d[None, :], mask=columns[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504)
        seen = columns[None, :] < length
        if DIAGONAL:
            seen &= rows[:, None] >= columns[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        v = tl.load(v_ptr + columns[:, None] * D + d[None, :], mask=columns[:, None] < length, other=0.0)
        total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        highest = new_highest
    return total, mass, highest


@triton.jit
def attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    length,
    scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Causal attention in two stages: the blocks left of the diagonal, and the blocks on it. BM is a multiple of BN."""
    first = tl.program_id(0) * BM
    head = tl.program_id(1).to(tl.int64) * length * D
    rows, d = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + head + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0.0)
    total = tl.zeros([BM, D], dtype=tl.float32)
    mass = tl.full([BM], 0.0, dtype=tl.float32)
    highest = tl.full([BM], -float("inf"), dtype=tl.float32)
    k_ptr += head
    v_ptr += head
    low = first if CAUSAL else length
    total, mass, highest = _attend(
        total, mass, highest, q, k_ptr, v_ptr, rows, 0, low, length, scale, D, BN, DIAGONAL=False
    )
    if CAUSAL:
        high = min(first + BM, length)
        total, mass, highest = _attend(
            total, mass, highest, q, k_ptr, v_ptr, rows, low, high, length, scale, D, BN, DIAGONAL=True
        )
    out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head + rows[:, None] * D + d[None, :], out, mask=rows[:, None] < length)

"""4-bit weights as checkpoints store them, read into what `layout.pack_words` takes.

Eight values share an int32, four bits each. Along which axis they are neighbours, and in which order, is each format's:

    AWQ "gemm"             along outputs; from the lowest bits up those of outputs 0, 2, 4, 6, 1, 3, 5, 7 of each eight
    GPTQ                   weight along inputs, zeros along outputs, in turn
    compressed-tensors     weight along inputs, zeros along outputs, in turn; from -8 to 7, stored 8 higher

Where the words may stay as they are, the result is a view of what is stored; else bits move between words, of which a
piece is held for a while. Values are never unpacked.

Source: github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py; github.com/ModelCloud/GPTQModel,
gptqmodel/utils/model.py (both kinds of zeros); github.com/vllm-project/compressed-tensors, pack_quantized.py.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from vllm_triton.ops.w4a16_mm.layout import BLOCK, MIDDLE, PER_WORD

# Of the eight outputs that share a word of AWQ, where each one's bits are, counted in fours from the lowest.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# What is added to words of stored zeros, by `checkpoint_format` in a GPTQ checkpoint's configuration. It was taken from
# whole words: a zero of 0 has borrowed from the next one.
_GPTQ_ZERO_OFFSETS = {"gptq": 0x11111111, "gptq_v2": 0}
# Words whose bits move at a time: so few that they stay in a cache, and that torch computes with them in one thread.
# That is up to ten times as fast on a busy machine, where threads wait for one another.
_WORDS_AT_A_TIME = 2**15 - 1


class StoredWeight(NamedTuple):
    """weight[n, order[k]] = scales[n, g(k)] * (q[n, k] - zeros[n, g(k)]), where g(k) = k // (K/S).

    words: [N, K/8] int32, which hold q, see `layout.words_of`; they may be a view of the stored tensor.
    scales: [N, S], dtype as stored.
    zeros: [N, S] uint8, from 0 to 15, or None where all are 8.
    order: [K] int32, or None where it is 0, 1, 2 and so on.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
    """A weight of AutoAWQ's version "gemm".

    Args:
        qweight: [K, N/8] int32.
        qzeros: [S, N/8] int32.
        scales: [S, N].
    Raises: ValueError where these do not fit together.
    """
    num_groups, num_rows = _transposed_sizes(scales)
    depth = qweight.shape[0]
    _check("qweight", qweight, [depth, num_rows // PER_WORD])
    _check("qzeros", qzeros, [num_groups, num_rows // PER_WORD])
    _check_groups(depth, num_groups)
    words = torch.empty(num_rows // PER_WORD, PER_WORD, depth // PER_WORD, dtype=torch.int32)
    for some in _pieces(words.shape[0], words.shape[2]):
        neighbours = qweight[:, some].unflatten(0, (-1, PER_WORD)).unbind(1)
        for row, stored_place in enumerate(_AWQ_PLACES):
            words[some, row] = _joined(each >> 4 * stored_place for each in neighbours).T
    zeros = _values(qzeros)[:, :, list(_AWQ_PLACES)].flatten(1).T
    return StoredWeight(words.flatten(0, 1), scales.T, _unless_all_are_8(zeros), None)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    checkpoint_format: str = "gptq",
) -> StoredWeight:
    """A weight of AutoGPTQ, GPTQModel and others that write their format.

    Args:
        qweight: [K/8, N] int32.
        qzeros: [S, N/8] int32.
        scales: [S, N].
        g_idx: [K], the group of each input, or None where groups are of neighbours.
        checkpoint_format: "gptq", where zeros are stored one lower, or "gptq_v2".
    Raises: ValueError where these do not fit together, or the format is another.
    """
    if checkpoint_format not in _GPTQ_ZERO_OFFSETS:
        known = ", ".join(_GPTQ_ZERO_OFFSETS)
        raise ValueError(f"checkpoint_format must be one of {known}, got {checkpoint_format!r}")
    num_groups, num_rows = _transposed_sizes(scales)
    depth = qweight.shape[0] * PER_WORD
    _check("qweight", qweight, [depth // PER_WORD, num_rows])
    _check("qzeros", qzeros, [num_groups, num_rows // PER_WORD])
    order = _order("g_idx", g_idx, depth, num_groups)
    zeros = _values(qzeros + _GPTQ_ZERO_OFFSETS[checkpoint_format]).flatten(1).T
    return StoredWeight(_ordered(qweight, order).T, scales.T, _unless_all_are_8(zeros), order)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
) -> StoredWeight:
    """A weight of format "pack-quantized" with 4 bits.

    Args:
        weight_packed: [N, K/8] int32.
        weight_scale: [N, S].
        weight_shape: [2], N and K.
        weight_zero_point: [ceil(N/8), S] int32, or None where the weight is symmetric.
        weight_g_idx: [K], the group of each input, or None where groups are of neighbours; -1 says so too.
    Raises: ValueError where these do not fit together.
    """
    num_rows, depth = (int(size) for size in weight_shape)
    num_groups = _sizes("weight_scale", weight_scale)[1]
    _check("weight_packed", weight_packed, [num_rows, depth // PER_WORD])
    if weight_scale.shape[0] != num_rows:
        raise ValueError(f"weight_scale must have {num_rows} rows, got shape {list(weight_scale.shape)}")
    if weight_g_idx is not None and bool((weight_g_idx == -1).any()):
        weight_g_idx = None
    order = _order("weight_g_idx", weight_g_idx, depth, num_groups)
    zeros = None
    if weight_zero_point is not None:
        _check("weight_zero_point", weight_zero_point, [-(-num_rows // PER_WORD), num_groups])
        zeros = _unless_all_are_8(_values(weight_zero_point.T).flatten(1).T[:num_rows])
    return StoredWeight(_ordered(weight_packed.T, order).T, weight_scale, zeros, order)


def _ordered(words: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """[K/8, N] int32, values in this order along K."""
    if order is None:
        return words
    result = torch.empty(words.shape, dtype=torch.int32)
    sources = order.unflatten(0, (-1, PER_WORD)).unbind(1)
    for some in _pieces(words.shape[1], words.shape[0]):
        stored = words[:, some].contiguous()
        parts = (stored.index_select(0, each // PER_WORD) >> (4 * (each % PER_WORD))[:, None] for each in sources)
        result[:, some] = _joined(parts)
    return result


def _pieces(size: int, words_of_each: int) -> Iterator[slice]:
    step = max(_WORDS_AT_A_TIME // words_of_each, 1)
    return (slice(start, start + step) for start in range(0, size, step))


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Words of the lowest four bits of each of eight tensors, those of the first lowest."""
    fields = ((part & 15) << 4 * place for place, part in enumerate(parts))
    return functools.reduce(torch.bitwise_or, fields)


def _values(words: torch.Tensor) -> torch.Tensor:
    """[R, C] int32 -> [R, C, 8] uint8, the lowest bits first."""
    return torch.stack([words >> 4 * place & 15 for place in range(PER_WORD)], 2).to(torch.uint8)


def _unless_all_are_8(zeros: torch.Tensor) -> torch.Tensor | None:
    return None if bool((zeros == MIDDLE).all()) else zeros.contiguous()


def _order(name: str, g_idx: torch.Tensor | None, depth: int, num_groups: int) -> torch.Tensor | None:
    """[K] int32: columns sorted by group, those of a group as they were; None where they are already."""
    group_size = _check_groups(depth, num_groups)
    if g_idx is None:
        return None
    if list(g_idx.shape) != [depth]:
        raise ValueError(f"{name} must have shape {[depth]}, got {list(g_idx.shape)}")
    if torch.equal(g_idx.long(), torch.arange(depth) // group_size):
        return None
    if not 0 <= int(g_idx.min()) <= int(g_idx.max()) < num_groups:
        limits = f"{int(g_idx.min())} to {int(g_idx.max())}"
        raise ValueError(f"{name} must lie in 0 to {num_groups - 1}, for as many groups as scales has, got {limits}")
    sizes = torch.bincount(g_idx.long(), minlength=num_groups)
    if bool((sizes != group_size).any()):
        raise ValueError(
            f"{name} must have equally many inputs in each group, {group_size}, got {int(sizes.min())} to "
            f"{int(sizes.max())}: groups of different sizes are not supported"
        )
    return g_idx.argsort(stable=True).int()


def _check_groups(depth: int, num_groups: int) -> int:
    """The size of a group."""
    if not num_groups or not depth or depth % num_groups or depth // num_groups % BLOCK:
        raise ValueError(
            f"groups must be of equally many inputs, a multiple of {BLOCK}, got {num_groups} of {depth} inputs"
        )
    return depth // num_groups


def _transposed_sizes(scales: torch.Tensor) -> list[int]:
    """S and N of a weight whose zeros share words along N."""
    sizes = _sizes("scales", scales)
    if sizes[1] % PER_WORD:
        raise ValueError(f"scales must have a multiple of {PER_WORD} columns, got shape {sizes}")
    return sizes


def _sizes(name: str, scales: torch.Tensor) -> list[int]:
    if scales.dim() != 2 or not scales.is_floating_point():
        raise ValueError(f"{name} must be a matrix of floats, got {scales.dtype} of shape {list(scales.shape)}")
    return list(scales.shape)


def _check(name: str, words: torch.Tensor, shape: list[int]) -> None:
    if words.dtype != torch.int32 or list(words.shape) != shape:
        raise ValueError(f"{name} must be int32 of shape {shape}, got {words.dtype} of shape {list(words.shape)}")

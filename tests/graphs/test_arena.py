"""The arena: tensors that keep their place, and share it in turn."""

import gc

import pytest
import torch

from vllm_triton.compile.graphs.arena import ALIGNMENT, Arena


def _empty(arena: Arena, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    like = torch.empty(shape, device="meta")
    return arena.empty(like.shape, like.stride(), dtype)


def test_tensors_that_live_together_do_not_overlap():
    arena = Arena()
    tensors = [_empty(arena, 3, 5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 2)
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert all((tensor == number % 2).all() for number, tensor in enumerate(tensors))


def test_memory_is_free_again_when_the_last_view_is_gone():
    arena = Arena()
    tensor = _empty(arena, 1000)
    address, view = tensor.data_ptr(), tensor[10:20].view(2, 5)
    del tensor
    assert _empty(arena, 1000).data_ptr() != address
    del view
    assert _empty(arena, 900).data_ptr() == address


def test_smaller_tensors_take_the_smallest_block_that_holds_them():
    arena = Arena()
    large, small = _empty(arena, 1000), _empty(arena, 100)
    addresses = {"large": large.data_ptr(), "small": small.data_ptr()}
    size = arena.num_bytes
    del large, small
    assert _empty(arena, 90).data_ptr() == addresses["small"]
    first, second = _empty(arena, 100), _empty(arena, 101)
    assert (first.data_ptr(), second.data_ptr()) == (addresses["small"], addresses["large"])
    assert arena.num_bytes == size


def test_an_unowned_tensor_lies_where_its_owner_lay():
    arena = Arena()
    tensor = _empty(arena, 4, 6, dtype=torch.bfloat16)
    turned = tensor.T[2:]
    turned.copy_(torch.randn(4, 4))
    unowned = arena.unowned(turned)
    assert torch.equal(unowned, turned) and unowned.stride() == turned.stride()
    address = tensor.data_ptr()
    del tensor, turned
    assert _empty(arena, 4, 6, dtype=torch.bfloat16).data_ptr() == address  # it keeps nothing
    with pytest.raises(ValueError, match="arena"):
        arena.unowned(torch.zeros(3))


def test_strides_and_empty_tensors():
    arena = Arena()
    strided = arena.empty((2, 3), (8, 2), torch.float32)
    assert strided.shape == (2, 3) and strided.stride() == (8, 2)
    none = _empty(arena, 0, 7)
    assert none.shape == (0, 7) and arena.unowned(none).shape == (0, 7)


def test_blocks_outlive_their_arena():
    arena = Arena()
    tensor = _empty(arena, 10).fill_(3)
    del arena
    gc.collect()
    assert tensor.sum() == 30

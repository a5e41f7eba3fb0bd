"""Sizes: bytes of a block, blocks of a memory, tokens of a pool; and the manager of a spec."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache import (
    FullAttentionSpec,
    KVCacheManager,
    KVCacheSpec,
    manager_class_for,
    max_sequence_length,
    num_blocks_that_fit,
    num_bytes_for,
    registry,
)

LARGE_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=32, head_size=128, dtype_size_bytes=2, num_layers=32)
GIBIBYTE = 2**30


def test_eight_gibibytes_and_the_null_block_hold_16384_tokens():
    assert LARGE_SPEC.page_size_bytes == 256 * 2**10
    assert LARGE_SPEC.block_size_bytes == 8 * 2**20
    num_blocks = num_blocks_that_fit(LARGE_SPEC, 8 * GIBIBYTE + LARGE_SPEC.block_size_bytes)
    assert num_blocks == 1025
    assert max_sequence_length(LARGE_SPEC, num_blocks) == 16384
    assert num_bytes_for(LARGE_SPEC, 16384) == 8 * GIBIBYTE + LARGE_SPEC.block_size_bytes


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 8))
def test_the_smallest_cache_for_a_length_holds_it_and_a_byte_less_does_not(max_model_len, block_size, num_layers):
    spec = FullAttentionSpec(block_size, 2, 3, 4, num_layers=num_layers)
    num_bytes = num_bytes_for(spec, max_model_len)
    assert max_sequence_length(spec, num_blocks_that_fit(spec, num_bytes)) >= max_model_len
    if num_bytes > 2 * spec.block_size_bytes:
        assert max_sequence_length(spec, num_blocks_that_fit(spec, num_bytes - 1)) < max_model_len


def test_a_memory_without_room_for_two_blocks_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=f"at least {16 * 2**20} bytes.*got {16 * 2**20 - 1}"):
        num_blocks_that_fit(LARGE_SPEC, 16 * 2**20 - 1)


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_size", "dtype_size_bytes", "num_layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_spec_refuses_what_is_no_size(name, value):
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype_size_bytes": 2, "num_layers": 4}
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got {value}"):
        FullAttentionSpec(**{**sizes, name: value})


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        LARGE_SPEC.block_size = 32


def test_the_manager_is_found_by_the_nearest_class(monkeypatch):
    monkeypatch.setattr(registry, "_MANAGERS", dict(registry._MANAGERS))

    @dataclass(frozen=True)
    class Derived(FullAttentionSpec):
        pass

    class DerivedManager(KVCacheManager):
        pass

    assert manager_class_for(FullAttentionSpec) is KVCacheManager
    assert manager_class_for(Derived) is KVCacheManager
    registry.register_manager(Derived, DerivedManager)
    assert manager_class_for(Derived) is DerivedManager
    assert manager_class_for(FullAttentionSpec) is KVCacheManager
    with pytest.raises(ConfigError, match="Derived already has the manager DerivedManager"):
        registry.register_manager(Derived, KVCacheManager)


def test_a_spec_without_a_manager_lists_the_known_ones():
    class Unknown(KVCacheSpec):
        page_size_bytes = 1

    with pytest.raises(ConfigError, match=r"no KV cache manager for Unknown.*FullAttentionSpec"):
        manager_class_for(Unknown)

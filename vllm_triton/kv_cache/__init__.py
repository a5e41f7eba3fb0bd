"""Bookkeeping of the paged KV cache: sizes, blocks, prefix hashes. Plain Python, no tensors."""

from vllm_triton.kv_cache.block import Block, KVCacheError
from vllm_triton.kv_cache.block_pool import BlockPool
from vllm_triton.kv_cache.manager import KVCacheManager
from vllm_triton.kv_cache.registry import manager_class_for, register_manager
from vllm_triton.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    max_sequence_length,
    num_blocks_that_fit,
    num_bytes_for,
)

__all__ = [
    "Block",
    "BlockPool",
    "FullAttentionSpec",
    "KVCacheError",
    "KVCacheManager",
    "KVCacheSpec",
    "manager_class_for",
    "max_sequence_length",
    "num_blocks_that_fit",
    "num_bytes_for",
    "register_manager",
]

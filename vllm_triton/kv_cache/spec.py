"""What one block of the KV cache costs, and how many blocks and tokens fit a given memory."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields

from vllm_triton.errors import ConfigError


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """The cache of a group of equal layers. Frozen: scheduler and runner must see the same sizes.

    block_size: tokens per block, >= 1.
    num_layers: layers of the group, >= 1; a block holds its tokens for all of them.
    """

    block_size: int
    num_layers: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for spec_field in fields(self):
            value = getattr(self, spec_field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{type(self).__name__}: {spec_field.name} must be an integer of at least 1, got {value!r}"
                )

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer."""

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return self.page_size_bytes * self.num_layers

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens needs."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token of the sequence.

    Layers with a sliding window use it too: their blocks stay allocated for the whole sequence, and only the
    attention itself looks at the window. A spec and a manager of their own could free what left the window.

    num_kv_heads, head_size: shape of one token's keys (and values) in one layer.
    dtype_size_bytes: bytes of one element, 2 for float16 and bfloat16.
    """

    num_kv_heads: int
    head_size: int
    dtype_size_bytes: int

    @property
    def page_size_bytes(self) -> int:
        keys_and_values = 2
        return keys_and_values * self.block_size * self.num_kv_heads * self.head_size * self.dtype_size_bytes


def num_blocks_that_fit(spec: KVCacheSpec, available_bytes: int) -> int:
    """Blocks that this memory holds, the null block included.

    Raises: ConfigError if there is no room for the null block and one more.
    """
    num_blocks = available_bytes // spec.block_size_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least {2 * spec.block_size_bytes} bytes (two blocks of {spec.block_size_bytes}), "
            f"got {available_bytes}: give it more memory or lower block_size from {spec.block_size}"
        )
    return num_blocks


def max_sequence_length(spec: KVCacheSpec, num_blocks: int) -> int:
    """Tokens of the longest sequence that fits when it has the cache for itself; `num_blocks` counts the null block."""
    return (num_blocks - 1) * spec.block_size


def num_bytes_for(spec: KVCacheSpec, max_model_len: int) -> int:
    """Bytes of the smallest cache in which one sequence of max_model_len tokens fits, the null block included."""
    return (spec.num_blocks_for(max_model_len) + 1) * spec.block_size_bytes

"""What the runner needs of a model, whatever its decoder looks like."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.layers import Slot, Weight

KVCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each [P, S, G, D]


class CausalLM(Protocol):
    """A torch module. Shapes: T tokens of the step, B rows of which logits are asked, E hidden, V vocabulary."""

    config: ModelConfig

    def __call__(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attention: AttentionMetadata,
        kv_caches: list[KVCache],
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the step's keys and values into kv_caches."""
        ...

    @property
    def lm_head(self) -> Weight:
        """[V, E]"""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, E] -> [B, V]"""
        ...

    def weight_slots(self) -> Iterable[tuple[str, Slot]]:
        """Every tensor of a checkpoint, by its Hugging Face name, and the part of a parameter that it fills."""
        ...

    def surplus_names(self) -> tuple[str, ...]:
        """Endings of names that checkpoints of the family may hold without need."""
        ...

    def finish_loading(self, device: torch.device | str) -> None:
        """Makes what is computed rather than loaded; once, after the weights."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...

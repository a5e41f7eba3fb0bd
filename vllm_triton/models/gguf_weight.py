"""A weight that stays packed as a GGUF file has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.packed_weight import PackedWeight, Stored, frozen
from vllm_triton.ops.gguf_mm.layout import FORMATS, ROWS, pack
from vllm_triton.quantization.schemes import GgufScheme


@dataclass(frozen=True)
class GgufRows:
    """A weight as a file has it.

    rows: [N, bytes of a row] uint8. name: of their format, one of those that `gguf_mm` multiplies by.
    """

    rows: torch.Tensor
    name: str

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""
        num_rows, num_bytes = self.rows.shape
        return torch.Size((num_rows, num_bytes // FORMATS[self.name].block_bytes * FORMATS[self.name].block))

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype


class GgufWeight(PackedWeight):
    """[N, K], of one format."""

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: GgufScheme):
        super().__init__(sizes, in_size, scheme)
        self.name = scheme.name
        self.dtype = torch.get_default_dtype()  # of what it is multiplied by
        self.num_groups = -(-sum(sizes) // ROWS)
        layout = FORMATS[scheme.name]
        blocks = in_size // layout.block

        def parameter(num_columns: int, dtype: torch.dtype) -> nn.Parameter:
            return frozen(torch.empty(self.num_groups, num_columns, ROWS, dtype=dtype))

        self.quants = parameter(blocks * layout.words, torch.int32)
        self.scales = parameter(blocks * layout.scales, torch.int16)

    def stored(self, size: int) -> Mapping[str, Stored]:
        return {"weight": Stored(((size, self.in_size),), (torch.uint8,))}

    def pack(self, parts: list[dict[str, GgufRows]]) -> None:
        rows = torch.cat([tensors["weight"].rows for tensors in parts])
        for target, values in zip((self.quants, self.scales), pack(rows, self.name), strict=True):
            target.copy_(values)

    def bias(self) -> nn.Parameter:
        return frozen(torch.zeros(ROWS * self.num_groups))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = ops.gguf_mm(x, self.quants, self.scales, bias)
        return self.without_padding(out)

    def embedding(self, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert scale == 1, "no family whose GGUF files are read scales its embeddings"
        out = token_ids.new_empty(token_ids.shape[0], self.in_size, dtype=self.dtype)
        ops.gguf_embedding(out, token_ids, self.quants, self.scales)
        return out

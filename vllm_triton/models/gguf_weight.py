"""A weight that stays packed as a GGUF file has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.ops.gguf_mm.layout import FORMATS, ROWS, pack


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


class GgufWeight(nn.Module):
    """[N, K], of one format; see DenseWeight for what it offers."""

    def __init__(self, sizes: Sequence[int], in_size: int, name: str):
        super().__init__()
        self.sizes, self.in_size, self.name = list(sizes), in_size, name
        self.dtype = torch.get_default_dtype()  # of what it is multiplied by
        self.num_groups = -(-sum(sizes) // ROWS)
        blocks, layout = in_size // FORMATS[name].block, FORMATS[name]

        def parameter(num_columns: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(self.num_groups, num_columns, ROWS, dtype=dtype), requires_grad=False)

        self.quants = parameter(blocks * layout.words, torch.int32)
        self.scales = parameter(blocks * layout.scales, torch.int16)
        self._arrived: dict[int, torch.Tensor] = {}

    def slots(self) -> list["GgufSlot"]:
        return [GgufSlot(self, part) for part in range(len(self.sizes))]

    def fill(self, part: int, rows: torch.Tensor) -> None:
        """Packs the weight once its last part is there: rows of two may lie interleaved."""
        self._arrived[part] = rows
        if len(self._arrived) == len(self.sizes):
            parts = [self._arrived.pop(each) for each in range(len(self.sizes))]
            for target, values in zip((self.quants, self.scales), pack(torch.cat(parts), self.name), strict=True):
                target.copy_(values)

    def bias(self) -> nn.Parameter:
        return nn.Parameter(torch.zeros(ROWS * self.num_groups), requires_grad=False)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = ops.gguf_mm(x, self.quants, self.scales, bias)
        return out if out.shape[1] == sum(self.sizes) else out[:, : sum(self.sizes)]

    def embedding(self, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert scale == 1, "no family whose GGUF files are read scales its embeddings"
        out = token_ids.new_empty(token_ids.shape[0], self.in_size, dtype=self.dtype)
        ops.gguf_embedding(out, token_ids, self.quants, self.scales)
        return out


@dataclass(frozen=True)
class GgufSlot:
    """Where a part of a packed weight belongs."""

    weight: GgufWeight
    part: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weight.sizes[self.part], self.weight.in_size))

    def copy_(self, source: GgufRows) -> None:
        self.weight.fill(self.part, source.rows)

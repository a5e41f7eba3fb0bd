"""What paged attention needs to know about a step, built once for all layers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """B sequences with T new tokens in all; row b's queries are tokens query_start_loc[b] to query_start_loc[b + 1].

    slot_mapping: [T] int64, where each token's key and value go: block * block_size + offset; -1 for nowhere.
    block_table: [B, M] int32, each sequence's blocks in order; 0, the null block, after the last.
    seq_lens: [B] int32, tokens of each sequence with this step's.
    query_start_loc: [B + 1] int32.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

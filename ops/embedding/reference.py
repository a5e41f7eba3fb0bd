import torch


def embedding_reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[token_ids]

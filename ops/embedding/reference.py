import torch


def embedding_reference(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    rows = table[token_ids]
    if scale == 1.0:
        return rows
    return (rows.to(torch.promote_types(table.dtype, torch.float32)) * scale).to(table.dtype)

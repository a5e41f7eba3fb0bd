import torch


def paged_attention_reference(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    wide = torch.promote_types(query.dtype, torch.float32)
    slots_per_page = key_cache.shape[1]
    heads_per_kv_head = query.shape[1] // key_cache.shape[2]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        # Positions that no query sees may lie in blocks already given back: they are not even read.
        first_seen = max(int(query_positions[0]) - window + 1, 0) if window else 0
        positions = torch.arange(first_seen, seq_len, device=query.device)
        pages, slots = block_table[row, positions // slots_per_page].long(), positions % slots_per_page
        keys = key_cache[pages, slots].to(wide).repeat_interleave(heads_per_kv_head, dim=1)  # [N, H, D]
        values = value_cache[pages, slots].to(wide).repeat_interleave(heads_per_kv_head, dim=1)

        distance = query_positions[:, None] - positions[None, :]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(wide), keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)

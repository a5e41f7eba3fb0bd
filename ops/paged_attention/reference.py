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
    softcap: float = 0.0,
    is_causal: bool = True,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    wide = torch.promote_types(query.dtype, torch.float32)
    slots_per_page = key_cache.shape[1]
    heads_per_kv_head = query.shape[1] // key_cache.shape[2]

    def dequantized(found: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        """[N, G, D] -> [N, H, D]"""
        wide_values = found.to(wide) if factor is None else found.to(wide) * factor.to(wide)[:, None]
        return wide_values.repeat_interleave(heads_per_kv_head, dim=1)

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
        keys = dequantized(key_cache[pages, slots], key_scale)
        values = dequantized(value_cache[pages, slots], value_scale)

        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(wide), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            distance = query_positions[:, None] - positions[None, :]
            hidden = (distance < 0) | (distance >= window) if window else distance < 0
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink_scores = sinks.to(wide)[:, None, None].expand(-1, end - start, 1)
            total = torch.cat([scores, sink_scores], dim=-1).logsumexp(dim=-1)
        else:
            total = scores.logsumexp(dim=-1)  # [H, q]
        weights = (scores - total.nan_to_num(neginf=0.0)[:, :, None]).exp()
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        if lse is not None:
            lse[start:end] = total.T.to(lse.dtype)

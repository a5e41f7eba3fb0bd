from collections import Counter

import torch


def apply_penalties_reference(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    for row in range(logits.shape[0]):
        tokens = history[row, : int(total_lens[row])].tolist()
        for token in set(tokens):
            logit = logits[row, token]
            logits[row, token] = logit / repetition[row] if logit > 0 else logit * repetition[row]
        for token, count in Counter(tokens[int(prompt_lens[row]) :]).items():
            logits[row, token] -= frequency[row] * count + presence[row]

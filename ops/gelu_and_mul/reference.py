import math

import torch


def gelu_and_mul_reference(x: torch.Tensor, approximate: bool) -> torch.Tensor:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if approximate:
        turned = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        turned = torch.erf(gate / math.sqrt(2))
    return (gate * ((1 + turned) / 2) * up).to(x.dtype)

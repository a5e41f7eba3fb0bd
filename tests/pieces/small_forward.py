"""A small forward with attention in it, for tests of what cuts, writes and compiles forwards."""

from collections.abc import Callable

import torch

from vllm_triton import ops
from vllm_triton.compile.graphs.modes import BatchDescriptor, Dispatch, RuntimeMode
from vllm_triton.compile.pieces.trace import InputSpec

SIZE, HEADS, HEAD_SIZE = 32, 2, 16
NUM_BLOCKS, BLOCK_SIZE = 5, 4
NUM_LAYERS = 3
Tensors = dict[str, torch.Tensor]

INPUTS = {
    "x": InputSpec(("T", SIZE), torch.float32),
    "slot_mapping": InputSpec(("T",), torch.int64),
    "block_table": InputSpec(("B", "M"), torch.int32),
    "seq_lens": InputSpec(("B",), torch.int32),
    "query_start_loc": InputSpec(("B + 1",), torch.int32),
}


def constants() -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    made = {}
    for layer in range(NUM_LAYERS):
        made |= {
            f"layers.{layer}.norm": random(SIZE),
            f"layers.{layer}.qkv": random(3 * SIZE, SIZE),
            f"layers.{layer}.key_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE),
            f"layers.{layer}.value_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE),
        }
    return made


def attend(inputs: Tensors, weights: Tensors, layer: int, x: torch.Tensor) -> torch.Tensor:
    """x [T, E] -> [T, E]"""
    normed = ops.rms_norm(x, weights[f"layers.{layer}.norm"], 1e-5)
    projected = ops.linear(normed, weights[f"layers.{layer}.qkv"], None)
    query, key, value = (part.view(x.shape[0], HEADS, HEAD_SIZE) for part in projected.split(SIZE, dim=-1))
    caches = weights[f"layers.{layer}.key_cache"], weights[f"layers.{layer}.value_cache"]
    out = torch.empty_like(query)
    ops.reshape_and_cache(key, value, *caches, inputs["slot_mapping"])
    tables = inputs["block_table"], inputs["seq_lens"], inputs["query_start_loc"]
    ops.paged_attention(out, query, *caches, *tables, HEAD_SIZE**-0.5, 0)
    return out.view(x.shape[0], SIZE)


def forward(inputs: Tensors, weights: Tensors) -> torch.Tensor:
    x = inputs["x"]
    for layer in range(NUM_LAYERS):
        x = attend(inputs, weights, layer, x)
    return x * 2


def step_inputs(num_tokens: int) -> Tensors:
    """One sequence, from its start."""
    return {
        "x": torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(num_tokens)),
        "slot_mapping": BLOCK_SIZE + torch.arange(num_tokens),
        "block_table": torch.arange(1, NUM_BLOCKS, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([num_tokens], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, num_tokens], dtype=torch.int32),
    }


def plain_step(num_tokens: int) -> Dispatch:
    return Dispatch(RuntimeMode.NONE, BatchDescriptor(num_tokens, 1))


def traceable(body: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Tensors], torch.Tensor]:
    """A forward of x alone."""
    return lambda inputs, weights: body(inputs["x"])

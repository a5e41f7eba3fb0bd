"""Small GGUF models, whose weights are random blocks of the formats asked for."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from vllm_triton.ops.gguf_mm.layout import FORMATS

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INTERMEDIATE, VOCAB = 4, 2, 64, 256, 512, 300
SHAPES = {
    "attn_q": (HEADS * HEAD_SIZE, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_SIZE),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}
# Bytes of a block at which fp16 numbers stand.
FLOATS_AT = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def random_rows(name: str, num_rows: int, depth: int, rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Rows as a file has them, of every bit, but that their fp16 numbers are drawn around 0."""
    layout = FORMATS[name]
    blocks = rng.integers(0, 256, (num_rows, depth // layout.block, layout.block_bytes), dtype=np.uint8)
    for place in FLOATS_AT[name]:
        floats = (scale * rng.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[..., place : place + 2] = floats[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


# A scale at which values lie around 1/16, as those of a trained model do.
_SCALES = {"Q4_0": 1 / 64, "Q4_1": 1 / 128, "Q8_0": 1 / 1024, "Q4_K": 1 / 4096, "Q6_K": 1 / 16384}


def write_model(path: Path, layers: list[Mapping[str, str]], table: str = "Q8_0", bias: bool = False) -> None:
    """Args:
    layers: of each, the format of each weight, by name as in SHAPES; one that is left out is float32.
    table: format of the embedding, which the head is tied to.
    bias: whether queries, keys and values have one.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2" if bias else "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(len(layers))
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name: str, shape: tuple[int, ...], kind: str | None) -> None:
        if kind in FORMATS:
            rows = random_rows(kind, *shape, rng, _SCALES[kind])
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
            return
        values = rng.standard_normal(shape, dtype=np.float32) / 16
        if kind is not None:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(name, values + (1 if "norm" in name else 0))

    add("token_embd.weight", (VOCAB, HIDDEN), table)
    add("output_norm.weight", (HIDDEN,), None)
    for index, formats in enumerate(layers):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{index}.{name}.weight", (HIDDEN,), None)
        for name, shape in SHAPES.items():
            add(f"blk.{index}.{name}.weight", shape, formats.get(name))
            if bias and name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{index}.{name}.bias", shape[:1], None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

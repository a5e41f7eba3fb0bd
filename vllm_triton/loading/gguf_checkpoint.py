"""A checkpoint in one GGUF file: names mapped to Hugging Face's, tensors as they are or dequantised, one at a time."""

import logging
import re
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import torch

from vllm_triton.errors import ModelError
from vllm_triton.loading.checkpoint import Checkpoint, StoredTensor
from vllm_triton.loading.gguf_config import architecture, config_from_gguf, generation_config_from_gguf
from vllm_triton.loading.gguf_file import GgufFile
from vllm_triton.models.gguf_weight import GgufRows
from vllm_triton.ops.gguf_mm.layout import FORMATS
from vllm_triton.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_PATTERN = re.compile(r"(\w+)\.(weight|bias)")

# The rope factors reach the model through the configuration's rope_scaling.
_CONFIG_TENSORS = {"rope_freqs.weight"}
# Only this architecture's converter reorders the rows of q and k, for rope over neighbouring pairs.
_PERMUTED_ARCHITECTURE = "llama"


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor. Raises: ModelError for a name no supported architecture has."""
    if match := _LAYER_PATTERN.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    elif (match := _TOP_PATTERN.fullmatch(name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.{match[2]}"
    raise ModelError(f"GGUF tensor {name} is not part of a supported architecture")


def unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of GGUF's llama q and k: each head's interleaved pairs become two halves.

    Args:
        rows: [num_heads * head_dim, ...], weights, biases or packed rows.
    Returns: the same rows in Hugging Face's order.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class GgufCheckpoint(Checkpoint):
    """One .gguf file. All names and types are checked when it is opened, before any tensor is read."""

    def __init__(self, path: Path):
        self.source = str(path)
        self.file = GgufFile(path)
        self.config = config_from_gguf(self.file)
        self.generation_config = generation_config_from_gguf(self.file.metadata)
        self.torch_dtype = None
        self._names = {name: hugging_face_name(name) for name in self.file.tensors if name not in _CONFIG_TENSORS}
        self._is_permuted = architecture(self.file.metadata) == _PERMUTED_ARCHITECTURE
        self.packed_formats = {
            name: self.file.tensors[gguf_name].kind.name
            for gguf_name, name in self._names.items()
            if self.file.tensors[gguf_name].kind.name in FORMATS and len(self.file.tensors[gguf_name].shape) == 2
        }

    def tensors(self, packed: Container[str] = ()) -> Iterator[tuple[str, StoredTensor]]:
        unpacked: Counter[str] = Counter()
        for gguf_name, name in self._names.items():
            tensor = self.file.tensors[gguf_name]
            stays = name in packed
            if len(tensor.shape) > 1 and not stays:
                unpacked[tensor.kind.name] += 1
            values = self.file.tensor_bytes(tensor) if stays else self.file.dequantize(tensor)
            if ".q_proj." in name and self._is_permuted:
                values = unpermute_rows(values, self.config["num_attention_heads"])
            elif ".k_proj." in name and self._is_permuted:
                values = unpermute_rows(values, self.config["num_key_value_heads"])
            # Copies only what is out of order or still a view of the read-only file, which torch cannot hold.
            stored = torch.from_numpy(np.require(values, requirements=["C", "W"]))
            yield name, GgufRows(stored, tensor.kind.name) if stays else stored
        self.file.release_pages()
        if unpacked:
            each = ", ".join(f"{count} of {kind}" for kind, count in unpacked.items())
            logger.info("%s: dequantised %d weights: %s", self.source, unpacked.total(), each)

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.file.metadata)

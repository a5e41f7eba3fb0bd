"""The packed embedding in torch calls: the reference makes as few of them as there need be."""

from vllm_triton.ops.gguf_embedding.op import gguf_embedding
from vllm_triton.ops.gguf_embedding.reference import gguf_embedding_reference
from vllm_triton.ops.registry import TORCH_CALLS

gguf_embedding.impl("torch", capture=TORCH_CALLS)(gguf_embedding_reference)

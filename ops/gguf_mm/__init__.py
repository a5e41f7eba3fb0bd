from vllm_triton.ops.gguf_mm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.gguf_mm.layout import FORMATS, pack
from vllm_triton.ops.gguf_mm.op import gguf_mm

__all__ = ["FORMATS", "gguf_mm", "pack"]

from vllm_triton.ops.moe_align_block_size import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.moe_align_block_size.op import moe_align_block_size

__all__ = ["moe_align_block_size"]

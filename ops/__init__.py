"""The ops of the engine. Import it as `vllm_triton.ops`; importing it defines every op and registers our kernels."""

if __name__ != "vllm_triton.ops":
    raise ImportError(
        f"import this package as 'vllm_triton.ops', not as {__name__!r}: it would register every op twice"
    )

from vllm_triton.ops.apply_logit_bias import apply_logit_bias
from vllm_triton.ops.apply_penalties import apply_penalties
from vllm_triton.ops.apply_token_bitmask import apply_token_bitmask
from vllm_triton.ops.embedding import embedding
from vllm_triton.ops.fused_add_rms_norm import fused_add_rms_norm
from vllm_triton.ops.fused_moe import fused_moe
from vllm_triton.ops.fused_moe_w4a16 import fused_moe_w4a16
from vllm_triton.ops.fused_qk_norm_rope import fused_qk_norm_rope
from vllm_triton.ops.gelu_and_mul import gelu_and_mul
from vllm_triton.ops.gguf_embedding import gguf_embedding
from vllm_triton.ops.gguf_mm import gguf_mm
from vllm_triton.ops.layer_norm import layer_norm
from vllm_triton.ops.linear import linear
from vllm_triton.ops.merge_attention_states import merge_attention_states
from vllm_triton.ops.moe_align_block_size import moe_align_block_size
from vllm_triton.ops.moe_sum import moe_sum
from vllm_triton.ops.paged_attention import paged_attention
from vllm_triton.ops.rejection_sample import rejection_sample
from vllm_triton.ops.reshape_and_cache import reshape_and_cache
from vllm_triton.ops.rms_norm import rms_norm
from vllm_triton.ops.rotary_embedding import rotary_embedding
from vllm_triton.ops.sample_tokens import sample_tokens
from vllm_triton.ops.scaled_mm import scaled_mm
from vllm_triton.ops.scaled_quant import scaled_quant
from vllm_triton.ops.silu_and_mul import silu_and_mul
from vllm_triton.ops.softcap_logits import softcap_logits
from vllm_triton.ops.token_logprobs import token_logprobs
from vllm_triton.ops.topk_routing import topk_routing
from vllm_triton.ops.w4a16_mm import w4a16_mm

__all__ = [
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "embedding",
    "fused_add_rms_norm",
    "fused_moe",
    "fused_moe_w4a16",
    "fused_qk_norm_rope",
    "gelu_and_mul",
    "gguf_embedding",
    "gguf_mm",
    "layer_norm",
    "linear",
    "merge_attention_states",
    "moe_align_block_size",
    "moe_sum",
    "paged_attention",
    "rejection_sample",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample_tokens",
    "scaled_mm",
    "scaled_quant",
    "silu_and_mul",
    "softcap_logits",
    "token_logprobs",
    "topk_routing",
    "w4a16_mm",
]

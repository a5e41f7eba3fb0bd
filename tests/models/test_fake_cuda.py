"""A forward traces on fake CUDA tensors without a GPU: no host read, and no tensor on the wrong device."""

import pytest
import torch
from tiny import FAMILIES, make_tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_triton.loading import open_checkpoint
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.llama import LlamaForCausalLM

NUM_TOKENS, NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE = 7, 3, 9, 16


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_on_fake_cuda(family, tmp_path):
    make_tiny(family, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, checkpoint.source)
    with FakeTensorMode(), torch.inference_mode():
        with torch.device("cuda"):
            model = LlamaForCausalLM(config, max_positions=64)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        # A copy from the host is all that finish_loading does, and this build of torch cannot fake it.
        model.cos_sin = torch.empty(64, config.rope.rotary_size, device="cuda")

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        attention = AttentionMetadata(
            slot_mapping=integers(NUM_TOKENS, dtype=torch.int64),
            block_table=integers(NUM_SEQS, 4),
            seq_lens=integers(NUM_SEQS),
            query_start_loc=integers(NUM_SEQS + 1),
        )
        cache_shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_size)
        caches = [
            tuple(torch.empty(cache_shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            for _ in range(config.num_layers)
        ]
        token_ids = integers(NUM_TOKENS, dtype=torch.int64)
        hidden = model(token_ids, token_ids, attention, caches)
        logits = model.compute_logits(hidden.narrow(0, 0, NUM_SEQS))
    assert hidden.device.type == "cuda" and hidden.shape == (NUM_TOKENS, config.hidden_size)
    assert hidden.dtype == torch.bfloat16
    assert (logits.device.type, logits.dtype, logits.shape) == ("cuda", torch.bfloat16, (NUM_SEQS, config.vocab_size))

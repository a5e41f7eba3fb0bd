"""Quantized models through the engine's loop, whose steps are captured where kernels run natively: the same tokens as
without pieces and graphs.
"""

import pytest
from tiny import make_tiny

from vllm_triton import LLM, SamplingParams
from vllm_triton.ops.platforms import triton_interprets

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 120, 17], [3, 198, 64, 8, 9, 10, 11], [77])]


@pytest.mark.parametrize(
    "family, quantization",
    [("qwen3", "int8_per_channel"), ("qwen3-moe", "int8_per_channel"), ("phi3", "fp8_per_tensor")],
)
def test_tokens_are_those_of_an_eager_run(family, quantization, tmp_path, caplog):
    make_tiny(family, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for level in (0, 2):
        caplog.set_level("INFO", "vllm_triton")
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            quantization=quantization,
            skip_tokenizer_init=True,
            num_kv_blocks=16,
            max_num_seqs=4,
            optimization_level=level,
        )
        tokens.append([out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]
    whole_steps = "whole steps of decoding for 1, 2, 4 requests" in caplog.text
    assert whole_steps != triton_interprets()

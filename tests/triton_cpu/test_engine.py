"""The engine on Triton kernels alone, natively: tokens equal transformers'."""

import random

import pytest
from tiny import VOCAB_SIZE, greedy_tokens, make_tiny

from vllm_triton import LLM, SamplingParams
from vllm_triton.ops.registry import OPS

NEW_TOKENS = 12


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_greedy_tokens_equal_transformers(family, tmp_path):
    model = make_tiny(family, tmp_path)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 40)]
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        kernels=dict.fromkeys(OPS, "triton"),
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [greedy_tokens(model, p, NEW_TOKENS) for p in prompts]

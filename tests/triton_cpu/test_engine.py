"""The engine on Triton kernels alone, natively: tokens equal transformers'."""

import random

import pytest
from tiny import VOCAB_SIZE, greedy_tokens, make_tiny

from vllm_triton import LLM, SamplingParams
from vllm_triton.compile.kernel_count import kernels_compiled, latest_kernels
from vllm_triton.ops.registry import OPS

NEW_TOKENS = 12


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3", "mixtral", "qwen3-moe", "gpt-oss"])
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


EXTRAS = (
    {},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {5: 1.0}},
    {"logprobs": 2},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.1},
    {"min_tokens": 1},
)


# Each in a type in which nothing before it in this file compiles some of its kernels.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "float16"), ("mistral", "bfloat16"), ("gemma2", "float16"), ("qwen3-moe", "bfloat16")],
)
def test_serving_compiles_no_kernel_after_the_start(family, dtype, tmp_path):
    """Whatever the lengths and numbers of requests are, and whatever their draws ask for."""
    make_tiny(family, tmp_path)
    sizes = {"num_kv_blocks": 96, "max_num_seqs": 12, "max_num_batched_tokens": 150}
    before = kernels_compiled()
    llm = LLM(str(tmp_path), dtype=dtype, skip_tokenizer_init=True, **sizes)
    ready = kernels_compiled()
    assert ready > before
    draw = random.Random(0)
    for num_requests in (1, 2, 3, 40):
        prompts = [
            {
                "prompt_token_ids": [
                    draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 2, 15, 16, 17, 90, 200]))
                ]
            }
            for _ in range(num_requests)
        ]
        params = [
            SamplingParams(
                max_tokens=draw.choice([1, 2, 20]),
                temperature=draw.choice([0, 0.8]),
                ignore_eos=True,
                **EXTRAS[(num_requests + index) % len(EXTRAS)],
            )
            for index in range(num_requests)
        ]
        llm.generate(prompts, params, use_tqdm=False)
    assert kernels_compiled() == ready, latest_kernels()

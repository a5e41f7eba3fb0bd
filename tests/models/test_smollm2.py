"""The demo model: float32 tokens equal transformers', bfloat16 logits lie within rounding of them."""

import pytest
import torch
from tiny import greedy_tokens, prompt_logits

from vllm_triton import LLM, SamplingParams
from vllm_triton.loading import find_demo_model
from vllm_triton.ops.testing import assert_within_rounding
from vllm_triton.ops.testing.tolerance import rounding_band

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived a dragon who wanted to learn how to paint. Every "
    "morning she flew to the market, where the painter set up his easel, and",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def hf_model():
    import transformers

    gguf = find_demo_model()
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()


def _llm(**settings) -> LLM:
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return LLM(str(find_demo_model()), **(sizes | settings))


def _greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_float32_tokens_equal_transformers(hf_model):
    llm = _llm(dtype="float32")
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    expected = [greedy_tokens(hf_model, prompt, NEW_TOKENS) for prompt in prompts]
    assert [_greedy(llm, [prompt])[0] for prompt in prompts] == expected, "one at a time"
    assert _greedy(llm, prompts) == expected, "batched; the longest finds its first blocks in the prefix cache"
    assert llm.core.scheduler.stats().prefix_cache_hits > 0
    del llm
    pressed = _llm(dtype="float32", num_kv_blocks=9, max_num_batched_tokens=12, enable_prefix_caching=False)
    assert _greedy(pressed, prompts) == expected, "in chunks, preempted"
    assert pressed.core.scheduler.stats().num_preemptions > 0


def test_bfloat16_logits_lie_within_rounding(hf_model):
    llm = _llm(dtype="bfloat16", enable_prefix_caching=False)
    low = hf_model.to(torch.bfloat16)
    eager_model, exact_model = low, None
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    with torch.no_grad():
        eager = [eager_model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        exact_model = low.float()  # the same rounded weights, exact arithmetic
        exact = [exact_model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        generated = _greedy(llm, prompts)
        for prompt, exact_logits, eager_logits, ours in zip(prompts, exact, eager, generated, strict=True):
            actual = prompt_logits(llm, prompt).to(torch.bfloat16)
            assert_within_rounding(actual, exact_logits, eager_logits, what=f"logits of {len(prompt)} tokens")
            _assert_first_difference_is_a_tie(exact_model, prompt, ours, rounding_band(exact_logits, eager_logits))


def _assert_first_difference_is_a_tie(exact_model, prompt: list[int], ours: list[int], band: float) -> None:
    theirs = greedy_tokens(exact_model, prompt, NEW_TOKENS)
    for index, (our_token, their_token) in enumerate(zip(ours, theirs, strict=True)):
        if our_token != their_token:
            logits = exact_model(torch.tensor([prompt + theirs[:index]])).logits[0, -1]
            gap = (logits[their_token] - logits[our_token]).item()
            assert gap <= band, f"token {index}: {our_token} is {gap:.3f} below {their_token}, the band is {band:.3f}"
            return


def test_answers_a_question():
    llm = _llm(dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"

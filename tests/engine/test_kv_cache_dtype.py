"""Keys and values in fp8: half the memory of bfloat16, and the same text where the model is sure of it."""

import pytest
import torch

from vllm_triton import LLM, SamplingParams
from vllm_triton.errors import ConfigError
from vllm_triton.loading import find_demo_model


def _llm(folder: str, **settings) -> LLM:
    sizes = {"num_kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(folder, skip_tokenizer_init=True, **(sizes | settings))


def test_a_quantized_cache_takes_a_byte_an_element(tiny_folder):
    plain, quantized = (_llm(tiny_folder, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    sizes = [sum(half.nbytes for layer in llm.core.runner.kv_caches for half in layer) for llm in (plain, quantized)]
    assert sizes[0] == 2 * sizes[1]
    assert {half.dtype for layer in quantized.core.runner.kv_caches for half in layer} == {torch.float8_e4m3fn}


def test_the_cache_holds_what_a_plain_one_holds_rounded(tiny_folder):
    prompt = {"prompt_token_ids": [5, 80, 33, 121, 9, 60, 2, 14] * 4}
    first_layers = []
    for dtype in ("auto", "fp8"):
        llm = _llm(tiny_folder, dtype="float32", kv_cache_dtype=dtype)
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        # The first two blocks after the null block. Later layers depend on what attention made of the first.
        first_layers.append([half[1:3].clone() for half in llm.core.runner.kv_caches[0]])
    for plain, quantized in zip(*first_layers, strict=True):
        assert plain.abs().max() > 0.1
        assert torch.equal(plain.to(torch.float8_e4m3fn).float(), quantized.float())


def test_the_demo_model_still_knows_its_capitals():
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    llm = LLM(str(find_demo_model()), dtype="bfloat16", kv_cache_dtype="fp8", **sizes)
    params = SamplingParams(temperature=0, max_tokens=6)
    outputs = llm.generate(["The capital of France is", "The capital of Italy is"], params, use_tqdm=False)
    assert ["Paris" in outputs[0].outputs[0].text, "Rome" in outputs[1].outputs[0].text] == [True, True]


def test_an_unknown_dtype_lists_those_there_are(tiny_folder):
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8_e4m3, got 'fp4'"):
        _llm(tiny_folder, kv_cache_dtype="fp4")

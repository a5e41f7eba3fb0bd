"""Greedy tokens of every family equal transformers' in float32, however the batch is cut."""

import json
import random

import pytest
import torch
from tiny import FAMILIES, VOCAB_SIZE, greedy_tokens, make_tiny, prompt_logits

from vllm_triton import LLM, SamplingParams
from vllm_triton.ops.testing import assert_within_rounding

NEW_TOKENS = 14


def _prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def _generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    # transformers bans EOS up to min_new_tokens; the same here, so that both go on.
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _llm(folder, **settings) -> LLM:
    # Up to 64 tokens phi4's angles are those of short texts in both engines. No step here takes more: natively, kernels
    # compile for steps of every size up to the largest.
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64, "max_num_seqs": 8}
    defaults |= {"max_model_len": 64, "max_num_batched_tokens": 64}
    return LLM(str(folder), **(defaults | settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    sharded = {"max_shard_size": "40KB"} if family in ("llama2", "qwen3") else {}
    model = make_tiny(family, tmp_path, **sharded)
    assert bool(sharded) == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    prompts = _prompts(1, [1, 5, 17, 40, 33])
    prompts.append([*prompts[3][:32], 7, 8, 9])  # shares two blocks with another
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]

    batched = _llm(tmp_path)
    assert [_generate(batched, [prompt])[0] for prompt in prompts] == expected, "one at a time, then prefix-cached"
    assert _generate(batched, prompts) == expected, "batched and prefix-cached"
    assert batched.core.scheduler.stats().prefix_cache_hits > 0

    chunked = _llm(tmp_path, max_num_batched_tokens=8, enable_prefix_caching=False)
    assert _generate(chunked, prompts) == expected, "prompts in chunks of at most 8 tokens"

    tiny_pool = _llm(tmp_path, block_size=4, num_kv_blocks=17)
    assert _generate(tiny_pool, prompts) == expected, "preempted"
    assert tiny_pool.core.scheduler.stats().num_preemptions > 0


def _let_tokens_take_all_experts(folder):
    """Which of them it takes is a choice, and where two are nearly equal, one rounding may choose the other."""
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts_per_tok"] = config["num_local_experts"]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    """In float32 within rounding of float64, and in bfloat16 within what transformers loses in it."""
    from transformers import AutoModelForCausalLM

    make_tiny(family, tmp_path)
    [prompt] = _prompts(3, [40])
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            _let_tokens_take_all_experts(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.no_grad():
            eager = model(torch.tensor([prompt])).logits[0]
            exact = model.double()(torch.tensor([prompt])).logits[0]
        # One forward outside the engine's loop: nothing to compile ahead for.
        llm = _llm(tmp_path, dtype=str(dtype).removeprefix("torch."), optimization_level=0)
        actual = prompt_logits(llm, prompt).to(dtype)
        assert_within_rounding(actual, exact, eager, what=f"logits in {dtype}")


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_block_size_does_not_change_tokens(block_size, tmp_path):
    model = make_tiny("llama3", tmp_path)
    prompts = _prompts(2, [3, 31, 64])
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    sizes = {"num_kv_blocks": 300, "max_model_len": 256, "max_num_batched_tokens": 128}
    assert _generate(_llm(tmp_path, block_size=block_size, **sizes), prompts) == expected


def test_an_engine_for_long_texts_turns_by_the_long_factors(tmp_path):
    model = make_tiny("phi4", tmp_path)
    prompts = _prompts(4, [65, 100])
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert _generate(_llm(tmp_path, max_model_len=256, max_num_batched_tokens=256), prompts) == expected

"""LLM: what callers pass and get, and the rules of sampling that only a whole engine shows."""

import random

import pytest
from tiny import VOCAB_SIZE

from vllm_triton import LLM, SamplingParams
from vllm_triton.errors import ConfigError, ModelError, RequestError

EOS = 2


def _prompt(seed: int, length: int = 12) -> dict:
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]}


def _one(llm: LLM, prompt, **params):
    [output] = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output


def _tokens(llm: LLM, prompt, **params) -> list[int]:
    return _one(llm, prompt, **params).outputs[0].token_ids


def test_outputs_are_named_as_vllm_names_them(demo_llm):
    output = _one(demo_llm, "The capital of France is", temperature=0, max_tokens=5, logprobs=2)
    choice = output.outputs[0]
    assert output.finished and output.prompt == "The capital of France is"
    assert output.prompt_token_ids == demo_llm.tokenizer.encode("The capital of France is")
    assert (choice.index, choice.finish_reason) == (0, "length") and choice.text.startswith(" Paris.")
    assert choice.text == demo_llm.tokenizer.decode(choice.token_ids)
    assert [entry[token].decoded_token for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)] == [
        demo_llm.tokenizer.decode_token(token) for token in choice.token_ids
    ]


def test_several_prompts_and_params_keep_their_order(tiny_llm):
    prompts = [_prompt(seed) for seed in range(5)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (7, 1, 3, 9, 2)]
    outputs = tiny_llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 1, 3, 9, 2]
    assert tiny_llm.generate([], use_tqdm=False) == []


def test_progress_bar_on_request_only(tiny_llm, capfd):
    tiny_llm.generate(_prompt(0), SamplingParams(max_tokens=2), use_tqdm=False)
    assert "Processed prompts" not in capfd.readouterr().err
    tiny_llm.generate(_prompt(0), SamplingParams(max_tokens=2))
    assert "Processed prompts: 100%" in capfd.readouterr().err


@pytest.mark.parametrize("count, entries", [(0, {1}), (5, {5, 6})])
def test_logprobs_hold_the_sampled_token_and_the_likeliest(tiny_llm, count, entries):
    choice = _one(
        tiny_llm, _prompt(1), seed=3, temperature=2.0, max_tokens=30, ignore_eos=True, logprobs=count
    ).outputs[0]
    assert {len(entry) for entry in choice.logprobs} <= entries
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token
        top = [item for key, item in entry.items() if key != token or item.rank <= count]
        assert sorted(item.rank for item in top) == list(range(1, len(top) + 1))
        assert all(item.logprob <= 0 for item in entry.values())


def test_logprobs_are_those_before_bias_and_temperature(tiny_llm):
    def first(**params):
        entry = _one(tiny_llm, _prompt(2), max_tokens=1, logprobs=20, temperature=0, **params).outputs[0].logprobs[0]
        return {token: round(item.logprob, 4) for token, item in entry.items()}

    plain, biased = first(), first(logit_bias={5: 100.0})
    assert 5 in biased and next(iter(biased)) == 5
    assert {token: value for token, value in biased.items() if token in plain} == plain | (
        {5: biased[5]} if 5 in plain else {}
    )


def test_seeded_tokens_do_not_depend_on_the_batch(tiny_llm):
    params = {"seed": 11, "temperature": 1.3, "max_tokens": 20, "ignore_eos": True, "top_p": 0.9, "top_k": 40}
    alone = _tokens(tiny_llm, _prompt(3), **params)
    others = [SamplingParams(temperature=t, max_tokens=25, ignore_eos=True) for t in (0.0, 0.7, 1.9)]
    batch = tiny_llm.generate(
        [_prompt(4), _prompt(3), _prompt(5), _prompt(6)],
        [others[0], SamplingParams(**params), *others[1:]],
        use_tqdm=False,
    )
    assert batch[1].outputs[0].token_ids == alone
    assert _tokens(tiny_llm, _prompt(3), **(params | {"seed": 12})) != alone


def test_engine_seed_makes_unseeded_requests_repeatable(tiny_folder):
    def run(seed: int) -> list[list[int]]:
        llm = LLM(tiny_folder, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=32, seed=seed)
        outputs = llm.generate([_prompt(1), _prompt(1)], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = run(5)
    assert run(5) == first and run(6) != first
    assert first[0] != first[1], "equal prompts draw differently"


def test_min_tokens_outlasts_eos_and_stop_tokens(tiny_llm):
    bias = {EOS: 100.0}
    assert _tokens(tiny_llm, _prompt(7), temperature=0, max_tokens=9, logit_bias=bias) == [EOS]
    late = _one(tiny_llm, _prompt(7), temperature=0, max_tokens=9, logit_bias=bias, min_tokens=5).outputs[0]
    assert len(late.token_ids) == 6 and late.token_ids[-1] == EOS and EOS not in late.token_ids[:-1]
    assert (late.finish_reason, late.stop_reason) == ("stop", None)
    stopped = _one(
        tiny_llm, _prompt(7), temperature=0, max_tokens=9, logit_bias={50: 100.0}, stop_token_ids=[50], min_tokens=5
    ).outputs[0]
    assert len(stopped.token_ids) == 6 and stopped.stop_reason == 50


def test_ignore_eos_goes_on(tiny_llm):
    tokens = _tokens(tiny_llm, _prompt(7), temperature=0, max_tokens=4, logit_bias={EOS: 100.0}, ignore_eos=True)
    assert tokens == [EOS] * 4


def test_penalties_forbid_repetition(tiny_llm):
    plain = _tokens(tiny_llm, _prompt(8), temperature=0, max_tokens=60, ignore_eos=True)
    assert len(set(plain)) < len(plain)
    punished = _tokens(tiny_llm, _prompt(8), temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=1e6)
    assert len(set(punished)) == len(punished), "each repeated token would have the lowest logit"


def test_choices_of_one_prompt(tiny_llm):
    params = {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True, "seed": 4}
    output = _one(tiny_llm, _prompt(9), n=3, **params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    assert output.outputs[0].token_ids == _tokens(tiny_llm, _prompt(9), **params), (
        "the first choice has the seed itself"
    )


def test_stop_strings_across_tokens(demo_llm):
    prompt = "The capital of France is"
    whole = _one(demo_llm, prompt, temperature=0, max_tokens=16).outputs[0].text
    start = whole.index("ris.")  # from inside one token into another
    stop = whole[start : start + 5]
    cut = _one(demo_llm, prompt, temperature=0, max_tokens=16, stop=stop).outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:start], "stop", stop)
    kept = _one(demo_llm, prompt, temperature=0, max_tokens=16, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert kept.text == whole[: start + 5]
    assert not demo_llm.core.has_unfinished_requests()


def test_prefix_cache_gives_the_same_tokens(demo_llm):
    prompt = "A long beginning that fills more than one block of the cache, so that the second run finds it there: "
    first = _one(demo_llm, prompt, temperature=0, max_tokens=20)
    second = _one(demo_llm, prompt, temperature=0, max_tokens=20)
    assert second.num_cached_tokens >= 16 > first.num_cached_tokens
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_context_end_is_a_length_stop(tiny_llm):
    longest = tiny_llm.core.max_model_len
    output = _one(tiny_llm, _prompt(1, longest - 3), temperature=0, max_tokens=None, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, params, param",
    [
        ({"prompt_token_ids": []}, {}, "prompt"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, {}, "prompt"),
        ({"prompt_token_ids": [3] * 300}, {}, "prompt"),
        ({"token_ids": [3]}, {}, "prompt"),
        ("text", {}, "prompt"),
        ({"prompt_token_ids": [3]}, {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"prompt_token_ids": [3]}, {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt_token_ids": [3]}, {"stop": "x"}, "stop"),
    ],
)
def test_a_bad_request_names_its_field_and_leaves_nothing_behind(tiny_llm, prompt, params, param):
    with pytest.raises(RequestError) as caught:
        tiny_llm.generate([_prompt(0), prompt], SamplingParams(**params), use_tqdm=False)
    assert caught.value.param == param
    assert not tiny_llm.core.has_unfinished_requests()
    assert len(_tokens(tiny_llm, _prompt(0), max_tokens=3, ignore_eos=True)) == 3
    tiny_llm.core.scheduler.check_integrity()


def test_params_per_prompt_must_match(tiny_llm):
    with pytest.raises(RequestError, match="one for each of the 2 prompts, got 1"):
        tiny_llm.generate([_prompt(0), _prompt(1)], [SamplingParams()], use_tqdm=False)


def test_an_interrupt_leaves_the_engine_empty(tiny_llm, monkeypatch):
    steps = iter(range(3))

    def step():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return type(tiny_llm.core).step(tiny_llm.core)

    monkeypatch.setattr(tiny_llm.core, "step", step)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate([_prompt(0), _prompt(1)], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert not tiny_llm.core.has_unfinished_requests()
    assert tiny_llm.core.scheduler.stats().kv_cache_usage == 0


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"max_model_lenght": 5}, "max_model_lenght"),
        ({"dtype": "int8"}, "dtype"),
        ({"block_size": 12}, "block_size"),
        ({"max_model_len": 100000}, "max_model_len"),
        ({"num_kv_blocks": 1}, "num_kv_blocks"),
        ({"optimization_level": 4}, "optimization_level"),
        ({"kernels": {"rms_nrm": "torch"}}, "rms_nrm"),
        ({"kernels": {"rms_norm": "cuda"}}, "reference"),
        ({"load_format": "pickle"}, "load_format"),
    ],
)
def test_a_bad_setting_is_named(tiny_folder, settings, named):
    with pytest.raises(ValueError, match=named):
        LLM(tiny_folder, **settings)


def test_unknown_settings_list_the_known(tiny_folder):
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(tiny_folder, gpu_memory_utilization=0.9)


def test_missing_model_is_named():
    with pytest.raises(ModelError, match="no-such-folder"):
        LLM("./no-such-folder")


def test_dummy_weights_come_from_the_seed(tiny_folder):
    def run(seed: int) -> float:
        llm = LLM(
            tiny_folder, load_format="dummy", seed=seed, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=32
        )
        [entry] = _one(llm, _prompt(1), temperature=0, max_tokens=1, logprobs=0).outputs[0].logprobs
        return next(iter(entry.values())).logprob

    assert run(1) == run(1) != run(2)


def test_another_choice_of_kernels_in_one_process_is_refused(tiny_llm, tiny_folder):
    from vllm_triton.ops.errors import RegistryError

    with pytest.raises(RegistryError, match="rms_norm"):
        LLM(tiny_folder, skip_tokenizer_init=True, num_kv_blocks=32, kernels={"rms_norm": "reference"})

"""LLM: what callers pass and get, and the rules of sampling that only a whole engine shows."""

import json
import math
import random
import shutil
import subprocess
import sys

import pytest
from tiny import VOCAB_SIZE

from vllm_triton import LLM, SamplingParams
from vllm_triton.engine.output_processor import OutputProcessor
from vllm_triton.errors import ConfigError, ModelError, RequestError

EOS = 2
SIZES = {"num_kv_blocks": 32, "max_num_seqs": 8, "max_num_batched_tokens": 128}


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


def test_each_request_of_a_batch_gets_its_own_number_of_logprobs(tiny_llm):
    counts = [5, None, 0, 2]
    params = [SamplingParams(temperature=2.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=n) for n in counts]
    outputs = tiny_llm.generate([_prompt(seed) for seed in range(4)], params, use_tqdm=False)
    assert outputs[1].outputs[0].logprobs is None
    for index, entries in ((0, {5, 6}), (2, {1}), (3, {2, 3})):
        [choice] = outputs[index].outputs
        assert {len(entry) for entry in choice.logprobs} <= entries
        assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids


def test_logprobs_are_those_before_bias_and_temperature(tiny_llm):
    def first(**params):
        entry = _one(tiny_llm, _prompt(2), max_tokens=1, logprobs=20, temperature=0, **params).outputs[0].logprobs[0]
        return {token: round(item.logprob, 4) for token, item in entry.items()}

    plain, biased = first(), first(logit_bias={5: 100.0})
    assert 5 in biased and next(iter(biased)) == 5
    assert {token: value for token, value in biased.items() if token in plain} == plain | (
        {5: biased[5]} if 5 in plain else {}
    )


@pytest.mark.parametrize("place", [0, 1, 3])
def test_seeded_tokens_do_not_depend_on_the_batch(tiny_llm, place):
    params = {"seed": 11, "temperature": 1.3, "max_tokens": 20, "ignore_eos": True, "top_p": 0.9, "top_k": 40}
    params |= {"min_p": 0.15, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
    alone = _tokens(tiny_llm, _prompt(3), **params)
    # Neighbours end earlier and later: rows move while the request runs.
    settings = [(0.0, 3), (0.7, 9), (1.9, 25)]
    batch = [SamplingParams(temperature=t, max_tokens=count, ignore_eos=True) for t, count in settings]
    batch.insert(place, SamplingParams(**params))
    prompts = [_prompt(seed) for seed in (4, 5, 6)]
    prompts.insert(place, _prompt(3))
    together = tiny_llm.generate(prompts, batch, use_tqdm=False)
    assert together[place].outputs[0].token_ids == alone
    assert _tokens(tiny_llm, _prompt(3), **(params | {"seed": 12})) != alone


def test_engine_seed_makes_unseeded_requests_repeatable(tiny_folder):
    def run(seed: int) -> list[list[int]]:
        llm = LLM(tiny_folder, dtype="float32", skip_tokenizer_init=True, seed=seed, **SIZES)
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
    prompt = "A beginning that fills several different blocks of the cache, so that the second run finds it there. "
    prompt += "Whoever mixed their order up, or took a stranger's, would read another story and go on with that: once "
    first = _one(demo_llm, prompt, temperature=0, max_tokens=20)
    second = _one(demo_llm, prompt, temperature=0, max_tokens=20)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
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


def test_a_step_that_fails_leaves_no_prefix_to_be_found(tiny_folder, monkeypatch):
    """Its blocks were to be shared, and were never computed."""
    llm = LLM(tiny_folder, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64, max_num_batched_tokens=128)
    prompt, greedy = _prompt(0, 40), {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    expected = _tokens(llm, _prompt(1, 40), **greedy), _tokens(llm, prompt, **greedy)
    assert llm.core.scheduler.reset_prefix_cache()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core.runner, "_forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([_prompt(1, 40), prompt], SamplingParams(**greedy), use_tqdm=False)
    monkeypatch.undo()
    assert len(llm.core.runner.batch) == 0 and not llm.core.has_unfinished_requests()
    assert (_tokens(llm, _prompt(1, 40), **greedy), _tokens(llm, prompt, **greedy)) == expected
    llm.core.scheduler.check_integrity()


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**40},
        {"temperature": 3e38},
        {"temperature": 3e38, "top_p": 1e-300, "min_p": 1.0},
        {"repetition_penalty": 3e38},
        {"repetition_penalty": 4e-39, "presence_penalty": -2.0},
    ],
)
def test_extreme_settings_draw_tokens_of_the_vocabulary(tiny_llm, params):
    forbidden = [9, 10]
    tokens = _tokens(tiny_llm, _prompt(3), max_tokens=20, min_tokens=20, stop_token_ids=forbidden, seed=1, **params)
    assert len(tokens) == 20 and all(0 <= token < VOCAB_SIZE and token not in forbidden for token in tokens)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e39, 10**400, math.inf, math.nan], ids=["1e39", "10**400", "inf", "nan"])
def test_strengths_beyond_float32_are_refused(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_params_that_became_wrong_leave_nothing_behind(demo_llm):
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature"):
        demo_llm.processor.add_request("wrong", demo_llm.renderer.render_prompt("Hello"), params)
    assert demo_llm.processor.num_unfinished_requests == 0


@pytest.mark.parametrize("outside", [-1, VOCAB_SIZE])
def test_an_eos_outside_the_vocabulary_is_never_drawn(tiny_folder, tmp_path, outside):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, outside]}))
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **SIZES)
    last = VOCAB_SIZE - 1  # where an index of -1 would write
    tokens = _tokens(llm, _prompt(7), temperature=0, max_tokens=9, min_tokens=4, logit_bias={EOS: 100.0, last: 90.0})
    assert tokens == [last] * 4 + [EOS]


def test_a_stored_dtype_that_nothing_computes_in_is_refused(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    with pytest.raises(ConfigError, match=r"float64.*set dtype to one of float32, float16, bfloat16"):
        LLM(str(folder), skip_tokenizer_init=True, **SIZES)
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **SIZES)
    assert len(_tokens(llm, _prompt(0), max_tokens=3, ignore_eos=True)) == 3


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


def test_limits_are_checked_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be at least max_num_seqs \(8\)"):
        LLM("./no-such-folder", max_num_seqs=8, max_num_batched_tokens=4)


def test_unknown_settings_list_the_known(tiny_folder):
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(tiny_folder, gpu_memory_utilization=0.9)


def test_missing_model_is_named():
    with pytest.raises(ModelError, match="no-such-folder"):
        LLM("./no-such-folder")


def test_dummy_weights_come_from_the_seed(tiny_folder):
    def run(seed: int) -> float:
        settings = {"load_format": "dummy", "seed": seed, "dtype": "float32", "skip_tokenizer_init": True}
        llm = LLM(tiny_folder, **settings, **SIZES)
        [entry] = _one(llm, _prompt(1), temperature=0, max_tokens=1, logprobs=0).outputs[0].logprobs
        return next(iter(entry.values())).logprob

    assert run(1) == run(1) != run(2)


def test_another_choice_of_kernels_in_one_process_is_refused(tiny_llm, tiny_folder):
    from vllm_triton.ops.errors import RegistryError

    with pytest.raises(RegistryError, match="rms_norm"):
        LLM(tiny_folder, skip_tokenizer_init=True, num_kv_blocks=32, kernels={"rms_norm": "reference"})


@pytest.mark.parametrize(
    "params, named",
    [
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {5.7: 1}}, "logit_bias"),
        ({"logit_bias": 3}, "logit_bias"),
    ],
)
def test_token_ids_of_a_wrong_kind_are_named(params, named):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == named


def test_the_tokenizers_end_of_turn_ends_a_sequence_and_min_tokens_forbids_it(demo_llm, monkeypatch):
    processor = OutputProcessor(demo_llm.tokenizer, 49152, 256, frozenset({7}))
    assert processor.eos_token_ids == {7, demo_llm.tokenizer.eos_token_id}
    monkeypatch.setattr(demo_llm.processor, "eos_token_ids", frozenset({42}))
    bias = {42: 100.0}
    assert _tokens(demo_llm, "Hello", temperature=0, max_tokens=9, logit_bias=bias) == [42]
    late = _tokens(demo_llm, "Hello", temperature=0, max_tokens=9, logit_bias=bias, min_tokens=4)
    assert len(late) == 5 and late.index(42) == 4


def test_a_model_that_does_not_load_leaves_the_kernels_free():
    code = """
from vllm_triton import LLM
from vllm_triton.loading import find_demo_model
import vllm_triton.runner.load as load

load.load_weights, real = lambda *arguments: 1 / 0, load.load_weights
settings = {"dtype": "float32", "skip_tokenizer_init": True}
settings |= {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
try:
    LLM(str(find_demo_model()), kernels={"rms_norm": "reference"}, **settings)
except ZeroDivisionError:
    load.load_weights = real
    LLM(str(find_demo_model()), **settings)
    print("loaded")
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "loaded"

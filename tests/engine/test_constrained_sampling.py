"""Allowed tokens and bad words: what they forbid, in which order, and that they leave the other rows alone."""

import math

import pytest

from vllm_triton import SamplingParams
from vllm_triton.errors import RequestError

VOCAB_SIZE = 199


def _prompt(seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(seed * 31 + place * 17) % 190 + 3 for place in range(6)]}


def _choices(llm, prompts, settings):
    params = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | each) for each in settings]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_only_allowed_tokens_are_drawn_and_other_rows_draw_as_alone(tiny_llm):
    free = {"seed": 3, "temperature": 1.5}
    allowed = [7, 31, 32, 63, 64, VOCAB_SIZE - 1]
    [alone] = _choices(tiny_llm, [_prompt(0)], [free])
    limited = {"seed": 4, "temperature": 3.0, "allowed_token_ids": allowed}
    first, second, third = _choices(tiny_llm, [_prompt(1), _prompt(0), _prompt(2)], [limited, free, limited])
    assert second.token_ids == alone.token_ids
    drawn = {*first.token_ids, *third.token_ids}
    assert drawn <= set(allowed) and len(drawn) > 1


def test_a_bias_cannot_bring_back_what_is_not_allowed(tiny_llm):
    settings = {"temperature": 0, "allowed_token_ids": [9, 11], "logit_bias": {20: 100.0, 11: 90.0}}
    assert _choices(tiny_llm, [_prompt(1)], [settings])[0].token_ids == [11] * 12


def test_logprobs_are_those_before_anything_is_forbidden(tiny_llm):
    settings = {"temperature": 0, "logprobs": 3, "max_tokens": 1}
    plain, limited = _choices(tiny_llm, [_prompt(1)] * 2, [settings, settings | {"allowed_token_ids": [9]}])
    [likeliest] = [token for token, entry in plain.logprobs[0].items() if entry.rank == 1]
    assert limited.token_ids == [9]
    assert limited.logprobs[0][likeliest].logprob == pytest.approx(plain.logprobs[0][likeliest].logprob, abs=1e-5)
    assert limited.logprobs[0][9].rank > 1 and math.isfinite(limited.logprobs[0][9].logprob)


def test_bad_words_forbid_their_last_token_where_the_others_stand(tiny_llm):
    greedy = {"temperature": 0, "logit_bias": {50: 100.0}}
    assert _choices(tiny_llm, [_prompt(1)], [greedy])[0].token_ids == [50] * 12
    [single] = _choices(tiny_llm, [_prompt(1)], [greedy | {"bad_words_token_ids": [[50]]}])
    assert 50 not in single.token_ids
    [triple] = _choices(tiny_llm, [_prompt(1)], [greedy | {"bad_words_token_ids": [[50, 50, 50]]}])
    # Two of them, something else, two again: in every step, not only the first.
    assert [token == 50 for token in triple.token_ids] == [True, True, False] * 4


def test_bad_words_do_not_look_at_the_prompt(tiny_llm):
    greedy = {"temperature": 0, "logit_bias": {50: 100.0}, "bad_words_token_ids": [[3, 50]], "max_tokens": 2}
    assert _choices(tiny_llm, [{"prompt_token_ids": [8, 3]}], [greedy])[0].token_ids == [50, 50]


def test_bad_words_as_text(demo_llm):
    greedy = {"temperature": 0, "max_tokens": 8}
    prompt = "The capital of France is"
    [plain] = _choices(demo_llm, [prompt], [greedy])
    [without] = _choices(demo_llm, [prompt], [greedy | {"bad_words": ["Paris"]}])
    assert "Paris" in plain.text and "Paris" not in without.text


@pytest.mark.parametrize(
    "params, named",
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
    ],
)
def test_lists_of_a_wrong_kind_are_named(params, named):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == named


@pytest.mark.parametrize(
    "params, named",
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[3, VOCAB_SIZE]]}, "bad_words_token_ids"),
        ({"bad_words": ["text"]}, "bad_words"),  # the tiny model has no tokenizer
    ],
)
def test_what_the_model_does_not_have_is_named_and_leaves_nothing_behind(tiny_llm, params, named):
    with pytest.raises(RequestError) as caught:
        tiny_llm.generate([_prompt(0)], SamplingParams(**params), use_tqdm=False)
    assert caught.value.param == named
    assert not tiny_llm.core.has_unfinished_requests()

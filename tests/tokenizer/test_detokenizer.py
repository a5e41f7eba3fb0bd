"""The text of growing answers, for every way of cutting them into updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

from vllm_triton.errors import RequestError
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.tokenizer import IncrementalDetokenizer

BYTE_LEVEL, SENTENCEPIECE = byte_level_tokenizer(), sentencepiece_tokenizer()
TEXTS = st.text("abcdehté 日😀\n\r▁<", max_size=25)


def token_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@st.composite
def chunked(draw, ids):
    """The ids cut anywhere into updates, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(tokenizer, chunks, params, prompt=(), ended_by_stop_token=False):
    """Feeds the chunks as an engine does; returns (deltas, text, stop string)."""
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt), params)
    deltas, stop = [], None
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        stop = detokenizer.update(chunk, ended_by_stop_token and last)
        deltas.append(detokenizer.next_delta(finished=last or stop is not None))
        if stop is not None:
            break
    return deltas, detokenizer.text, stop


@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_whole_text_for_any_ids(data, skip):
    """Ids need not be text: cut characters and invalid bytes are included."""
    ids = data.draw(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), min_size=1, max_size=25))
    chunks = data.draw(chunked(ids))
    deltas, text, stop = run(BYTE_LEVEL, chunks, SamplingParams(max_tokens=None, skip_special_tokens=skip))
    assert "".join(deltas) == text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert stop is None


@given(data=st.data(), text=TEXTS)
def test_no_delta_holds_half_a_character(data, text):
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        chunks = data.draw(chunked(token_ids(tokenizer, text)))
        deltas, whole, _ = run(tokenizer, chunks, SamplingParams(max_tokens=None))
        assert "\ufffd" not in "".join(deltas)
        assert "".join(deltas) == whole == text.replace("▁", " " if tokenizer is SENTENCEPIECE else "▁")


def stopped_text(tokenizer, ids, stops, min_tokens, include):
    """By brute force: after each token, look through the whole text for a stop string that ends in the new part."""
    old = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        decided = text.removesuffix("\ufffd") if count < len(ids) else text
        if count > min_tokens:
            for end in range(len(old) + 1, len(decided) + 1):
                found = [stop for stop in stops if decided[:end].endswith(stop)]
                if found:
                    stop = max(found, key=len)
                    return decided[: end if include else end - len(stop)], stop
        old = decided
    return tokenizer.decode(ids), None


@given(
    data=st.data(),
    text=TEXTS,
    stops=st.lists(st.text("abcdé 日😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_strings(data, text, stops, min_tokens, include):
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = token_ids(tokenizer, text)
        params = SamplingParams(max_tokens=None, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
        deltas, whole, stop = run(tokenizer, data.draw(chunked(ids)), params)
        assert (whole, stop) == stopped_text(tokenizer, ids, stops, min_tokens, include)
        assert "".join(deltas) == whole


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abcd")])
@pytest.mark.parametrize("chunks", [["abcde"], ["abc", "de"], ["a", "b", "c", "d", "e"]])
def test_stop_string_inside_and_across_updates(include, expected, chunks):
    params = SamplingParams(stop=["cd"], include_stop_str_in_output=include)
    # One token for each character: "cd" begins in one and ends in another.
    ids = [[id_ for character in chunk for id_ in token_ids(BYTE_LEVEL, character)] for chunk in chunks]
    deltas, text, stop = run(BYTE_LEVEL, ids, params)
    assert ("".join(deltas), text, stop) == (expected, expected, "cd")


def test_a_possible_beginning_of_a_stop_string_waits():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams(stop=["the end"]))
    deltas = []
    for piece in ("say ", "the", " e", "go"):
        detokenizer.update(token_ids(BYTE_LEVEL, piece))
        deltas.append(detokenizer.next_delta(finished=False))
    assert deltas == ["say ", "", "", "the ego"]


def test_nothing_waits_when_the_stop_string_is_included():
    detokenizer = IncrementalDetokenizer(
        BYTE_LEVEL, [], SamplingParams(stop=["the end"], include_stop_str_in_output=True)
    )
    detokenizer.update(token_ids(BYTE_LEVEL, "the"))
    assert detokenizer.next_delta(finished=False) == "the"


def test_a_cut_character_waits_and_is_flushed_at_the_end():
    first, *rest = token_ids(BYTE_LEVEL, "日")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams())
    detokenizer.update([first])
    assert detokenizer.next_delta(finished=False) == ""
    assert detokenizer.text == ""
    detokenizer.update(rest)
    assert detokenizer.next_delta(finished=False) == "日"
    detokenizer.update([first])
    assert detokenizer.next_delta(finished=True) == "\ufffd"
    assert detokenizer.text == "日\ufffd"
    assert detokenizer.next_delta(finished=True) == ""


def test_tokens_after_a_stop_string_are_dropped():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams(stop=["b"]))
    assert detokenizer.update(token_ids(BYTE_LEVEL, "abc")) == "b"
    assert detokenizer.update(token_ids(BYTE_LEVEL, "abc")) == "b"
    assert detokenizer.next_delta(finished=True) == detokenizer.text == "a"


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_text_of_the_stop_token(include, expected):
    params = SamplingParams(include_stop_str_in_output=include)
    ids = [token_ids(BYTE_LEVEL, "a"), token_ids(BYTE_LEVEL, "b")]
    deltas, text, stop = run(BYTE_LEVEL, ids, params, ended_by_stop_token=True)
    assert ("".join(deltas), text, stop) == (expected, expected, None)


def test_stop_strings_wait_for_min_tokens():
    """Of "ab" in tokens 1-2, 3-4 and 5-6, the one that ends in token 2 is too early for min_tokens=2."""
    ids = [[id_] for character in "ababab" for id_ in token_ids(BYTE_LEVEL, character)]
    for min_tokens, expected in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (6, "ababab")):
        params = SamplingParams(stop=["ab"], min_tokens=min_tokens)
        assert run(BYTE_LEVEL, ids, params)[1] == expected


def test_a_stop_string_that_came_too_early_is_not_found_later():
    """It is still in sight because another stop string is longer."""
    ids = [[id_] for character in "abehab" for id_ in token_ids(BYTE_LEVEL, character)]
    params = SamplingParams(stop=["ab", "a longer one"], min_tokens=2)
    assert run(BYTE_LEVEL, ids, params)[1:] == ("abeh", "ab")


@pytest.mark.parametrize(
    ("stops", "expected"), [(["he", "t"], (" ", "t")), (["he", "the"], (" ", "the")), (["e", "h"], (" t", "h"))]
)
def test_the_stop_string_complete_first_wins_inside_one_token(stops, expected):
    [token] = token_ids(BYTE_LEVEL, " the")
    assert run(BYTE_LEVEL, [[token]], SamplingParams(stop=stops))[1:] == expected


def test_leading_space_depends_on_the_prompt():
    ids = token_ids(SENTENCEPIECE, "a")
    bos = SENTENCEPIECE.bos_token_id
    for prompt, skip, expected in (
        ([], True, "a"),
        ([bos], True, "a"),
        ([bos], False, " a"),
        ([bos, *token_ids(SENTENCEPIECE, "the")], True, " a"),
    ):
        deltas, text, _ = run(SENTENCEPIECE, [ids], SamplingParams(skip_special_tokens=skip), prompt)
        assert "".join(deltas) == text == expected


@given(prompt=st.text("abcde ", min_size=1), answer=st.text("abcde ", min_size=1))
def test_prompt_and_answer_join_to_the_text_of_both(prompt, answer):
    prompt_ids, ids = token_ids(SENTENCEPIECE, prompt), token_ids(SENTENCEPIECE, answer)
    _, text, _ = run(SENTENCEPIECE, [ids], SamplingParams(), prompt_ids)
    assert SENTENCEPIECE.decode(prompt_ids) + text == SENTENCEPIECE.decode(prompt_ids + ids)


def test_without_text():
    ids = token_ids(BYTE_LEVEL, "abc")
    assert run(BYTE_LEVEL, [ids], SamplingParams(detokenize=False)) == ([""], "", None)
    assert run(None, [ids], SamplingParams()) == ([""], "", None)
    with pytest.raises(RequestError, match="stop needs a tokenizer") as error:
        IncrementalDetokenizer(None, [], SamplingParams(stop=["a"]))
    assert error.value.param == "stop"

"""Every way of asking becomes checked token ids."""

import pytest
from small_tokenizers import byte_level_backend
from tokenizers.processors import TemplateProcessing

from vllm_triton.errors import RequestError
from vllm_triton.tokenizer import RenderedPrompt, Renderer, Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if tools %}T{% endif %}"


def tokenizer_with_bos(template=TEMPLATE):
    backend = byte_level_backend()
    backend.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 264)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)


TOKENIZER = tokenizer_with_bos()
RENDERER = Renderer(TOKENIZER, vocab_size=270, max_model_len=50)


def refused(render, argument, message, param):
    with pytest.raises(RequestError, match=message) as error:
        render(argument)
    assert error.value.param == param


@pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}])
def test_text_gets_one_bos(prompt):
    rendered = RENDERER.render_prompt(prompt)
    assert rendered.text == "ab"
    assert rendered.token_ids == [264, *TOKENIZER.encode("ab", add_special_tokens=False)]


@pytest.mark.parametrize("prompt", [[5, 0, 269], {"prompt_token_ids": [5, 0, 269]}])
def test_token_ids_are_taken_as_they_are(prompt):
    assert RENDERER.render_prompt(prompt) == RenderedPrompt(None, [5, 0, 269])
    assert Renderer(None, 270, 50).render_prompt(prompt) == RenderedPrompt(None, [5, 0, 269])


def test_chat_has_one_bos_written_by_the_template():
    rendered = RENDERER.render_chat([{"role": "user", "content": "ab"}])
    assert rendered.text == "<s>user:ab;"
    assert rendered.token_ids == [264, *TOKENIZER.encode("user:ab;", add_special_tokens=False)]
    assert RENDERER.render_chat([{"role": "user", "content": "ab"}], tools=["t"]).text == "<s>user:ab;T"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = RENDERER.render_chat([{"role": "user", "content": "ab"}])
    assert RENDERER.render_chat([{"role": "user", "content": parts}]) == whole


def test_tool_calls_need_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert RENDERER.render_chat([message]).text == "<s>assistant:None;"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, 270], "from 0 to 269, got 270"),
        ([-1], "from 0 to 269, got -1"),
        ([1, "a"], "must be integers, got 'a'"),
        ([True], "must be integers, got True"),
        ([1.0], r"must be integers, got 1\.0"),
        ([[1]], r"must be integers, got \[1\]"),
        ({}, "one of the keys prompt, prompt_token_ids, got 0 keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got 2 keys"),
        ({"promt": "a"}, "unknown key 'promt'"),
        ({"prompt": [1]}, "prompt must be a string, got list"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of token ids, got str"),
        (None, "prompt must be a string.*got NoneType"),
        ("a\ud800", "not valid Unicode"),
        ([1] * 50, "50 tokens, but at most 49 fit into the context of 50.*max_model_len"),
        ("a" * 49, "50 tokens, but at most 49"),
    ],
)
def test_wrong_prompts(prompt, message):
    refused(RENDERER.render_prompt, prompt, message, "prompt")


def test_longest_prompt():
    assert len(RENDERER.render_prompt([1] * 49).token_ids) == 49
    assert len(RENDERER.render_prompt("a" * 48).token_ids) == 49


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], r"messages\[0\] must be a dict, got str"),
        ([{"content": "a"}], r"messages\[0\]\.role must be a string, got None"),
        ([{"role": 1, "content": "a"}], r"messages\[0\]\.role must be a string, got 1"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\]\.content must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'; only"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part of type 'text'; only"),
        ([{"role": "user", "content": ["a"]}], "part of type 'str'; only"),
        ([{"role": "user", "content": "a" * 60}], "tokens, but at most 49"),
        ([{"role": "user", "content": "a\ud800"}], "not valid Unicode"),
    ],
)
def test_wrong_messages(messages, message):
    refused(RENDERER.render_chat, messages, message, "messages")


def test_text_needs_a_tokenizer():
    renderer = Renderer(None, 270, 50)
    refused(renderer.render_prompt, "a", "without a tokenizer: send the prompt as token ids", "prompt")
    refused(renderer.render_chat, [{"role": "user", "content": "a"}], "without a tokenizer", "messages")


def test_empty_text_without_bos_is_refused():
    renderer = Renderer(Tokenizer(byte_level_backend(), None, "{{ messages[0].content }}"), 270, 50)
    refused(renderer.render_prompt, "", "prompt is empty", "prompt")
    refused(renderer.render_chat, [{"role": "user", "content": ""}], "messages is empty", "messages")


def test_tokenizer_larger_than_the_model():
    refused(Renderer(TOKENIZER, 200, 50).render_prompt, "a", "token id 264.*only 200 ids", "prompt")

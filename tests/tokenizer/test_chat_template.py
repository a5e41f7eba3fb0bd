"""Chat templates: what they may use, and how they fail."""

from datetime import datetime

import pytest
from small_tokenizers import byte_level_tokenizer

from vllm_triton.errors import RequestError
from vllm_triton.loading import find_demo_model, open_checkpoint

MESSAGES = [{"role": "user", "content": "Hi"}]


def rendered(template, messages=MESSAGES, **options):
    return byte_level_tokenizer(template).apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    ("messages", "add_generation_prompt"),
    [
        (MESSAGES, True),
        (MESSAGES, False),
        ([{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "Hello <&>"}], True),
    ],
)
def test_matches_transformers(tmp_path, messages, add_generation_prompt):
    from small_tokenizers import byte_level_backend
    from transformers import PreTrainedTokenizerFast

    ours = open_checkpoint(find_demo_model()).load_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=ours.chat_template)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.apply_chat_template(messages, add_generation_prompt) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}", "13"),
        ("a{% generation %}{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
    ],
)
def test_what_templates_may_use(template, expected):
    assert rendered(template) == expected


def test_variables_and_date():
    assert rendered("{{ enable_thinking }}{{ tools[0] }}", enable_thinking=False, tools=["t"]) == "Falset"
    assert rendered("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0]['content'] + messages[0]['missing'] }}", "refused the messages: .*missing"),
        ("{{ 1 + 'a' }}", "refused the messages"),
        ("{% if %}", "syntax error"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: .*unsafe"),
    ],
)
def test_failures_are_request_errors(template, message):
    with pytest.raises(RequestError, match=message) as error:
        rendered(template)
    assert error.value.param == "messages"


def test_no_template():
    with pytest.raises(RequestError, match="has no chat template") as error:
        rendered(None)
    assert error.value.param == "messages"

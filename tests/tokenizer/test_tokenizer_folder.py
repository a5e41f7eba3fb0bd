"""Tokenizers read from a folder in Hugging Face's layout."""

import json

import pytest
from small_tokenizers import byte_level_backend

from vllm_triton.errors import ModelError
from vllm_triton.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_vocabulary_alone(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("the 日")) == "the 日"
    assert tokenizer.eos_token is None
    assert tokenizer.special_token_ids == {264, 265}


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_named_tokens(folder, file, token):
    write(folder, file, {"eos_token": token, "bos_token": None, "add_bos_token": True})
    tokenizer = Tokenizer.from_folder(str(folder))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 265)
    assert tokenizer.bos_token is None


def test_tokenizer_config_wins_over_the_map(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    write(folder, "special_tokens_map.json", {"eos_token": "<s>", "bos_token": "<s>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("</s>", "<s>")


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "field"}}, "field"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain"),
        (
            {"chat_template.json": {"chat_template": "json"}, "tokenizer_config.json": {"chat_template": "field"}},
            "json",
        ),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "field"}}, "file"),
    ],
)
def test_places_of_the_chat_template(folder, files, expected):
    for name, value in files.items():
        write(folder, name, value)
    assert Tokenizer.from_folder(folder).chat_template == expected


def test_named_templates_without_a_default_are_logged(folder, caplog):
    write(folder, "tokenizer_config.json", {"chat_template": NAMED[:1]})
    assert Tokenizer.from_folder(folder).chat_template is None
    assert "tool_use" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json cannot be read as JSON"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token '<end>'"),
    ],
)
def test_damaged_files_are_named(folder, name, content, message):
    write(folder, name, content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(folder)


def test_folder_without_vocabulary(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_other_vocabularies_are_converted_by_transformers(tmp_path):
    """GPT-2's original two files, as published before tokenizer.json."""
    backend = byte_level_backend()
    model = json.loads(backend.to_str())["model"]
    vocabulary = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    write(tmp_path, "vocab.json", vocabulary)
    write(tmp_path, "merges.txt", "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a the 日") == backend.encode("a the 日").ids
    assert tokenizer.eos_token == "<|endoftext|>"


def test_vocabulary_that_cannot_be_converted(tmp_path):
    write(tmp_path, "tokenizer.model", "not a sentencepiece model")
    with pytest.raises(ModelError, match="transformers cannot convert its vocabulary"):
        Tokenizer.from_folder(tmp_path)

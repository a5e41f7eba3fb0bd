"""Reads a tokenizer from a folder in Hugging Face's layout."""

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers

from vllm_triton.errors import ModelError
from vllm_triton.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Vocabulary files of tokenizers that have no tokenizer.json; transformers converts them.
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_DEFAULT_TEMPLATE = "default"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises: ModelError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def load_folder(path: Path) -> Tokenizer:
    """The tokenizer of a folder, with its named tokens and chat template.

    tokenizer.json alone decides which special tokens are added around a text, as in transformers 5.
    Raises: ModelError, naming the file that is missing or wrong.
    """
    config = _read_if_there(path / "tokenizer_config.json")
    named_tokens = _named_tokens(_read_if_there(path / "special_tokens_map.json") | config)
    chat_template = _chat_template(path, config)
    if not (path / "tokenizer.json").is_file():
        return _convert_with_transformers(path, named_tokens, chat_template)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # The library raises plain Exception for a file that it cannot read.
        raise ModelError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    return Tokenizer(backend, named_tokens, chat_template)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, each written as a string or as an object with `content`."""
    named = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins over the field of tokenizer_config.json."""
    if (file := path / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    template = _read_if_there(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        templates = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = templates.get(_DEFAULT_TEMPLATE)
        if template is None:
            logger.warning("%s: no chat template is named %r among %s", path, _DEFAULT_TEMPLATE, sorted(templates))
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: chat_template must be a string or a list of named templates")
    return template


def _convert_with_transformers(path: Path, named_tokens: dict[str, str], chat_template: str | None) -> Tokenizer:
    if not any(any(path.glob(pattern)) for pattern in _OTHER_VOCABULARIES):
        raise ModelError(f"{path} has no tokenizer.json and no other vocabulary file")
    # Costs seconds to import, so only for folders that need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(path)
        backend = converted.backend_tokenizer
    except Exception as error:  # transformers raises whatever the converter of this vocabulary meets.
        raise ModelError(
            f"{path} has no tokenizer.json, and transformers cannot convert its vocabulary: {error}"
        ) from error
    return Tokenizer(backend, _named_tokens(converted.special_tokens_map) | named_tokens, chat_template)

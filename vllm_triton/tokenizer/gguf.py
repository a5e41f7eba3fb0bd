"""Builds a tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.

Two vocabularies: byte-level BPE ("gpt2") with its merges and a named pre-tokenizer, and sentencepiece's BPE ("llama")
with a score for each piece.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vllm_triton.errors import ModelError
from vllm_triton.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_SPACE_MARK = "▁"
# Kinds of token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Words of the Llama 3 and Qwen 2 tokenizers; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


@dataclass(frozen=True)
class _Style:
    """What a GGUF file leaves to the name of its pre-tokenizer.

    ignore_merges: a word that is a token is taken whole, whatever the merges say.
    adds_bos: whether BOS is added if the file does not say.
    """

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


_STYLES = {
    "gpt-2": _Style(_gpt2_words()),
    "smollm": _Style(_single_digits_then_gpt2_words()),
    "llama-bpe": _Style(_split_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
    "qwen2": _Style(_split_words(r"\p{N}"), normalizer=normalizers.NFC()),
}
_DEFAULT_NAMES = ("default", None)


def build_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises: ModelError, naming the field that is missing, or the vocabulary or pre-tokenizer that is not supported.
    """
    tokens = _required(metadata, "tokens")
    kinds = metadata.get(_PREFIX + "token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelError(f"GGUF field {_PREFIX}token_type has {len(kinds)} entries for {len(tokens)} tokens")
    model = _required(metadata, "model")
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens)
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens, kinds), True
    else:
        raise ModelError(f"GGUF field {_PREFIX}model is {model!r}; supported vocabularies are gpt2, llama")
    # Vocabulary entries already: added in the file's order, they keep their ids.
    backend.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    named_tokens = {name: token for key, name in _NAMED.items() if (token := _token(metadata, tokens, key)) is not None}
    before = ["bos_token"] if metadata.get(_PREFIX + "add_bos_token", adds_bos) else []
    after = ["eos_token"] if metadata.get(_PREFIX + "add_eos_token", False) else []
    _surround(backend, named_tokens, before, after)
    return Tokenizer(backend, named_tokens, metadata.get("tokenizer.chat_template"))


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    if _PREFIX + name not in metadata:
        raise ModelError(f"the GGUF file lacks the field {_PREFIX}{name}, so it has no usable tokenizer")
    return metadata[_PREFIX + name]


def _token(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    token_id = metadata.get(f"{_PREFIX}{key}_token_id")
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise ModelError(f"GGUF field {_PREFIX}{key}_token_id is {token_id}, but there are {len(tokens)} tokens")
    return tokens[token_id]


def _surround(backend: Backend, named_tokens: dict[str, str], before: list[str], after: list[str]) -> None:
    for name in before + after:
        if name not in named_tokens:
            raise ModelError(f"the GGUF file says to add {name}, but lacks the field {_PREFIX}{name}_id")
    if before or after:
        first, last = ([named_tokens[name] for name in names] for names in (before, after))
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*first, *last}],
        )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    name = metadata.get(_PREFIX + "pre")
    if name in _DEFAULT_NAMES:
        logger.warning(
            "the GGUF file does not name its pre-tokenizer: gpt-2's is used, and texts may split differently"
        )
        name = "gpt-2"
    if name not in _STYLES:
        raise ModelError(
            f"GGUF field {_PREFIX}pre is {name!r}; supported pre-tokenizers are {', '.join(sorted(_STYLES))}, default"
        )
    style = _STYLES[name]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges")]
    backend = Backend(_bpe(vocabulary, merges, ignore_merges=style.ignore_merges))
    if style.normalizer is not None:
        backend.normalizer = style.normalizer
    backend.pre_tokenizer = style.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, style.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Backend:
    scores = _required(metadata, "scores")
    if len(scores) != len(tokens):
        raise ModelError(f"GGUF field {_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    backend = Backend(
        _bpe(
            vocabulary,
            _merges_from_scores(tokens, kinds, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = metadata.get(_PREFIX + "add_space_prefix", True)
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces]) if adds_space else mark_spaces
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend


def _merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose joined piece has the highest score: every way to cut a piece in two.

    Pieces of equal score are joined in the order of their ids.
    """
    special = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)}
    pieces = {token: token_id for token_id, token in enumerate(tokens) if token not in special}
    merges = []
    for piece, token_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((-scores[token_id], token_id, pieces[left], pieces[right]))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(merges)]


def _bpe(vocabulary: dict[str, int], merges: list, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # The library raises plain Exception, for example for a merge of unknown tokens.
        raise ModelError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error

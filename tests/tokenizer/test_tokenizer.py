"""Token ids to text, against the decoders of the Rust library."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_backend, byte_level_tokenizer, sentencepiece_backend, sentencepiece_tokenizer
from tokenizers import decoders, models

from vllm_triton.errors import ModelError, RequestError
from vllm_triton.tokenizer import Tokenizer

BYTE_LEVEL_BACKEND, BYTE_LEVEL = byte_level_backend(), byte_level_tokenizer()
SENTENCEPIECE_BACKEND, SENTENCEPIECE = sentencepiece_backend(), sentencepiece_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" abcdeth\n\ré😀日"), max_size=30)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=30), skip=st.booleans())
def test_byte_level_decode_matches_the_library(ids, skip):
    """Any ids: cut characters, invalid bytes, special and added tokens, ids that do not exist."""
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL_BACKEND.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS)
def test_text_survives(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    marked = text.replace("▁", " ")
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == marked


@given(texts=st.lists(TEXTS | st.sampled_from(["<s>", "</s>"]), max_size=4), skip=st.booleans())
def test_sentencepiece_decode_matches_the_library(texts, skip):
    ids = [token_id for text in texts for token_id in SENTENCEPIECE_BACKEND.encode(text).ids]
    assert SENTENCEPIECE.decode(ids, skip) == SENTENCEPIECE_BACKEND.decode(ids, skip_special_tokens=skip)


def test_invalid_byte_tokens_become_replacement_characters():
    ids = [SENTENCEPIECE_BACKEND.token_to_id(token) for token in ("a", "<0xE6>", "<0x97>", "b", "<0xFF>", "c")]
    assert SENTENCEPIECE.decode(ids) == "a\ufffdb\ufffdc"


def test_decode_token_keeps_the_leading_space():
    backend = SENTENCEPIECE_BACKEND
    assert SENTENCEPIECE.decode_token(backend.token_to_id("▁the")) == " the"
    assert SENTENCEPIECE.decode_token(backend.token_to_id("<0x0A>")) == "\n"
    assert SENTENCEPIECE.decode_token(backend.token_to_id("<0xE6>")) == "\ufffd"
    assert SENTENCEPIECE.decode_token(10**6) == ""
    assert BYTE_LEVEL.decode_token(BYTE_LEVEL_BACKEND.token_to_id("Ġthe")) == " the"
    assert BYTE_LEVEL.decode_token(BYTE_LEVEL.eos_token_id) == "</s>"


def test_special_tokens():
    tokenizer = BYTE_LEVEL
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.vocab_size == 256 + 8 + 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (264, 265)
    assert tokenizer.special_token_ids == {264, 265}
    assert tokenizer.chat_template is None


def test_named_tokens_are_special_even_if_the_file_does_not_say():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    assert tokenizer.bos_token is None and tokenizer.bos_token_id is None
    assert tokenizer.decode([0, 1, 0]) == "a a"
    assert tokenizer.decode([0, 1, 0], skip_special_tokens=False) == "a </s> a"
    assert tokenizer.encode("a</s>") == [0, 1]


def test_missing_eos_token_is_named():
    with pytest.raises(ModelError, match="eos_token '<end>' is not in the tokenizer's vocabulary"):
        Tokenizer(byte_level_backend(), {"eos_token": "<end>"})


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abcabc")) == 6


def test_metaspace_and_no_decoder():
    backend = tokenizers.Tokenizer(models.WordLevel({"▁x": 0, "y": 1, "▁": 2}, unk_token="y"))
    assert Tokenizer(backend).decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "▁x y y"
    for scheme, text in (("always", "xy x"), ("never", " xy x")):
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert Tokenizer(backend).decode([0, 1, 0]) == backend.decode([0, 1, 0]) == text


def test_unsupported_decoder_is_named():
    backend = byte_level_backend()
    for decoder in (decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])):
        backend.decoder = decoder
        with pytest.raises(ModelError, match=r"(WordPiece|Strip).*supported are ByteLevel, Metaspace"):
            Tokenizer(backend)


def test_lone_surrogates_are_a_request_error():
    with pytest.raises(RequestError, match="not valid Unicode"):
        BYTE_LEVEL.encode("a\ud800")

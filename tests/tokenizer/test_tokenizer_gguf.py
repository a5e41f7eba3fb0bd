"""Tokenizers built from GGUF metadata, against constructions that do not share our code."""

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from vllm_triton.errors import ModelError
from vllm_triton.loading import find_demo_model, open_checkpoint
from vllm_triton.tokenizer import Tokenizer
from vllm_triton.tokenizer.token_text import byte_level_alphabet

TEXTS = [
    "",
    "Hello world",
    " leading and trailing ",
    "1234567890 and 3.14159, 2024-01-01",
    "a1b22c333 ٣٤ ½",
    "tabs\tand\n\nnewlines\r\n   three   spaces",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n",
    "it's we'll I'M you've",
    "🎉 family 👨‍👩‍👧‍👦 flag 🇩🇪",
    "日本語のテキスト 中文字符 한국어",
    "naïve café e\u0301 ŝ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a\u00a0b\u200bc\u2028d",
]


@pytest.fixture(scope="module")
def smollm():
    return open_checkpoint(find_demo_model()).load_tokenizer()


@pytest.fixture(scope="module")
def published_smollm():
    """transformers' conversion, with the published pre-tokenizer that the conversion drops."""
    from transformers import AutoTokenizer

    path = find_demo_model()
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_matches_the_published_tokenizer(smollm, published_smollm, text):
    ids = smollm.encode(text)
    assert ids == published_smollm.encode(text).ids
    assert smollm.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("019 \n'st日🎉"), max_size=40))
def test_smollm_matches_the_published_tokenizer_on_any_text(smollm, published_smollm, text):
    assert smollm.encode(text) == published_smollm.encode(text).ids


def test_smollm_special_tokens(smollm):
    assert (smollm.bos_token, smollm.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm.eos_token, smollm.eos_token_id) == ("<|im_end|>", 2)
    assert smollm.vocab_size == 49152
    assert smollm.special_token_ids == set(range(17))
    assert smollm.encode("<|im_end|>") == [2]
    assert len(smollm.encode("2024")) == 4


def byte_level_metadata(pre="gpt-2", merges=(), extra=(), **fields):
    alphabet = [*byte_level_alphabet(), *("".join(merge.split(" ")) for merge in merges)]
    tokens = [*alphabet, *(token for token, _ in extra)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(alphabet) + [kind for _, kind in extra],
        "tokenizer.ggml.merges": list(merges),
    }
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def words(tokenizer, text):
    """The pieces of a text, for a vocabulary in which every word is joined as far as its letters' merges allow."""
    return [tokenizer.decode_token(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


DIGIT_MERGES = ["1 1", "11 1", "11 11", "Ġ 1", "a a", "Ċ Ċ", "' s", "' S", "a !", "! a"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1111", " 1", "\n", "\n", "aa", "'s", "'", "S", "aa", "!", "a"]),
        ("smollm", ["1", "1", "1", "1", " ", "1", "\n", "\n", "aa", "'s", "'", "S", "aa", "!", "a"]),
        ("qwen2", ["1", "1", "1", "1", " ", "1", "\n\n", "aa", "'s", "'S", "aa", "!a"]),
        ("llama-bpe", ["111", "1", " ", "1", "\n\n", "aa", "'s", "'S", "aa", "!a"]),
    ],
)
def test_pre_tokenizers_split_as_published(pre, expected):
    """Merges across a split never happen, so the pieces show where each pre-tokenizer cuts."""
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, DIGIT_MERGES, add_bos_token=False))
    assert words(tokenizer, "1111 1\n\naa's'Saa!a") == expected


def test_qwen2_composes_characters_and_gpt2_does_not():
    assert (
        Tokenizer.from_gguf(byte_level_metadata("qwen2")).decode(
            Tokenizer.from_gguf(byte_level_metadata("qwen2")).encode("e\u0301")
        )
        == "\u00e9"
    )
    gpt2 = Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    assert gpt2.decode(gpt2.encode("e\u0301")) == "e\u0301"


def test_llama_bpe_takes_a_whole_word_that_no_merge_reaches():
    extra = [("abc", 1), ("<bos>", 3)]
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])):
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, extra=extra, bos_token_id=257))
        assert words(tokenizer, "abc") == expected


@pytest.mark.parametrize("pre", ["default", None])
def test_unnamed_pre_tokenizer_is_gpt2s_with_a_warning(pre, caplog):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, DIGIT_MERGES))
    assert "does not name its pre-tokenizer" in caplog.text
    assert words(tokenizer, "1111 1") == ["1111", " 1"]


EXTRA = [("<bos>", 3), ("<eos>", 3), ("<tool>", 4), ("<unused>", 5)]


@pytest.mark.parametrize(
    ("pre", "fields", "expected"),
    [
        ("qwen2", {}, "a"),
        ("llama-bpe", {}, "<bos>a"),
        ("llama-bpe", {"add_bos_token": False}, "a"),
        ("qwen2", {"add_bos_token": True}, "<bos>a"),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, "<bos>a<eos>"),
    ],
)
def test_tokens_added_around_a_text(pre, fields, expected):
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, extra=EXTRA, **ids, **fields))
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a", False) != []


def test_kinds_of_tokens():
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(extra=EXTRA, eos_token_id=257))
    assert tokenizer.special_token_ids == {256, 257}
    assert tokenizer.encode("<tool>") == [258]
    assert tokenizer.decode([258, 257]) == "<tool>"
    assert len(tokenizer.encode("<unused>")) == len("<unused>")


PIECES = [("▁", -1.0), ("a", -2.0), ("b", -3.0), ("ab", -6.0), ("▁a", -5.0), ("ba", -4.0), ("aba", -7.0)]


def sentencepiece_metadata(**fields):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in PIECES)]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [score for _, score in PIECES],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | fields
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


def best_pairs_first(text):
    """Sentencepiece's own rule: join the neighbours whose joined piece has the highest score, the leftmost first."""
    scores = dict(PIECES)
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [(scores[a + b], -n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joined:
            return pieces
        place = -max(joined)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@given(text=st.text("ab ", min_size=1, max_size=12))
def test_sentencepiece_joins_the_best_pair_first(text):
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[token_id] for token_id in tokenizer.encode(text, False)] == best_pairs_first(" " + text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_bytes_and_bos():
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert tokenizer.encode("a日\n") == [1, 263, 3 + 0xE6, 3 + 0x97, 3 + 0xA5, 3 + 0x0A]
    assert tokenizer.decode(tokenizer.encode("a日\n")) == "a日\n"
    assert tokenizer.special_token_ids == {0, 1, 2}
    # Special tokens are found before spaces are marked, and the text after one begins anew.
    assert tokenizer.encode("a</s>b", add_special_tokens=False) == [263, 2, 259, 261]
    without = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert without.encode("a") == [260]
    assert without.decode([263]) == " a"


def test_sentencepiece_matches_an_independent_construction():
    """The library's tokenizer, with the merges of PIECES written by hand."""
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    merges = [("b", "a"), ("▁", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.ByteFallback()
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    for text in ("abab", "aba ba", "b  ab", "日a"):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"lacks the field tokenizer\.ggml\.tokens"),
        (sentencepiece_metadata(scores=None), r"lacks the field tokenizer\.ggml\.scores"),
        (
            byte_level_metadata(model="bert"),
            r"tokenizer\.ggml\.model is 'bert'; supported vocabularies are gpt2, llama",
        ),
        (byte_level_metadata("gpt-4o"), r"pre is 'gpt-4o'; supported .* gpt-2, llama-bpe, qwen2, smollm, default"),
        (byte_level_metadata(eos_token_id=999), r"eos_token_id is 999, but there are 256 tokens"),
        (byte_level_metadata(add_bos_token=True), r"add bos_token, but lacks the field tokenizer\.ggml\.bos_token_id"),
        (byte_level_metadata() | {"tokenizer.ggml.merges": ["日 本"]}, "do not fit"),
        (byte_level_metadata() | {"tokenizer.ggml.token_type": [1]}, r"token_type has 1 entries for 256 tokens"),
    ],
)
def test_unusable_metadata_is_named(metadata, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata)

"""Tokenizers small enough to be written down, for tests without files."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from vllm_triton.tokenizer import Tokenizer
from vllm_triton.tokenizer.token_text import byte_level_alphabet

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("c", "d"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ċ", "Ċ")]
PIECES = ["▁", "▁the", "he", "t", "h", "e", "a", "b", "c", "d", "cd", "é", "▁a"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Every byte, a few merges (some cut characters in two), three added tokens of which two are special."""
    tokens = [*byte_level_alphabet(), *("".join(merge) for merge in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool 日>", special=False, normalized=False)])
    return backend


def byte_level_tokenizer(chat_template: str | None = None) -> Tokenizer:
    return Tokenizer(byte_level_backend(), {"bos_token": "<s>", "eos_token": "</s>"}, chat_template)


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Sentencepiece's conventions: spaces are marked, one is put in front, unknown characters become byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("h", "e"), ("c", "d"), ("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def sentencepiece_tokenizer() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>"})

"""From token ids to text, one token at a time.

Every tokenizer supported here writes a text as bytes: the text of a sequence is the UTF-8 text of its tokens' bytes,
put one after another. So a stream costs the same for each token, and a character cut by a token's end is simply a
character whose last byte has not come yet.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence

import tokenizers

from vllm_triton.errors import ModelError

SUPPORTED_DECODERS = "ByteLevel, Metaspace, ByteFallback, Fuse, Replace, Strip (one leading space), or none"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE.

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token adds to a text.

    Where invalid UTF-8 comes out, each wrong sequence becomes one U+FFFD, whichever the tokenizer.

    Attributes:
        strips_leading_space: a text's first space is not part of it, because the tokenizer put it there.
    Raises: ModelError for a decoder that is not made of the supported steps.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self.strips_leading_space = False
        self._steps: list[Callable[[str], str]] = []
        self._to_bytes: Callable[[str], bytes] = str.encode
        if backend.decoder is None:
            # The library then puts a space between tokens: the same as before each and none at the beginning.
            self._steps.append(lambda token: " " + token)
            self.strips_leading_space = True
            return
        decoder = json.loads(backend.decoder.__getstate__())
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            self._add_step(step)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id that the tokenizer does not have."""
        cached = self._cache.get(token_id)
        if cached is None:
            token = self._backend.id_to_token(token_id)
            cached = self._cache[token_id] = b"" if token is None else self._convert(token)
        return cached

    def _convert(self, token: str) -> bytes:
        for step in self._steps:
            token = step(token)
        return self._to_bytes(token)

    def _add_step(self, step: dict) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._to_bytes = _byte_level_bytes
            case {"type": "ByteFallback"}:
                self._to_bytes = _byte_fallback_bytes
            case {"type": "Fuse"}:
                pass  # joining the tokens is what a text stream does
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._steps.append(lambda token: token.replace(old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                self._steps.append(lambda token: token.replace(mark, " "))
                self.strips_leading_space |= scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_leading_space = True
            case _:
                raise ModelError(f"tokenizer decoder {step} is not supported; supported are {SUPPORTED_DECODERS}")


_BYTE_OF_CHARACTER = byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # an added token, stored as plain text


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


class TextStream:
    """Turns a sequence of tokens into text; what it has given is never changed by what follows.

    Args:
        skipped_ids: tokens without text, such as special tokens to be left out.
        context_ids: tokens before the stream's. If they have text, the stream's leading space is kept.
    """

    def __init__(self, token_bytes: TokenBytes, skipped_ids: frozenset[int], context_ids: Sequence[int] = ()):
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips = token_bytes.strips_leading_space and not any(
            self._bytes(token) for token in reversed(context_ids)
        )

    def push(self, token_id: int) -> str:
        """The characters that this token completes, maybe none."""
        added = self._bytes(token_id)
        if self._strips and added:
            self._strips = False
            added = added.removeprefix(b" ")
        return self._decoder.decode(added)

    def flush(self) -> str:
        """U+FFFD if the tokens ended in the middle of a character."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped_ids else self._token_bytes[token_id]

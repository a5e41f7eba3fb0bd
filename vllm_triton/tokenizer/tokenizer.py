"""Tokenizer: text to token ids and back, over the Rust library `tokenizers`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from vllm_triton.errors import ModelError, RequestError
from vllm_triton.tokenizer.chat_template import ChatTemplate
from vllm_triton.tokenizer.token_text import TextStream, TokenBytes

_NO_IDS: frozenset[int] = frozenset()


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: the library's tokenizer; this object owns it from now on.
        named_tokens: name -> text, for example {"eos_token": "<|im_end|>"}; templates see these names. They count as
            special tokens.
        chat_template: jinja2 source, or None.
    Attributes:
        vocab_size: number of token ids; the model's vocabulary may be larger (padded).
        bos_token, eos_token, bos_token_id, eos_token_id: None where the model has no such token.
        special_token_ids: ids left out of a text by skip_special_tokens.
    Raises: ModelError if bos_token or eos_token is not in the vocabulary, or the decoder is not supported.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        self._backend = backend
        # A tokenizer.json may carry its training's truncation and padding, which would change prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        self._named_tokens = dict(named_tokens or {})
        ids = {token: backend.token_to_id(token) for token in self._named_tokens.values()}
        named_ids = {token: token_id for token, token_id in ids.items() if token_id is not None}
        for name in ("bos_token", "eos_token"):
            token = self._named_tokens.get(name)
            if token is not None and ids[token] is None:
                raise ModelError(f"{name} {token!r} is not in the tokenizer's vocabulary")
        backend.add_special_tokens(list(named_ids))
        self.bos_token = self._named_tokens.get("bos_token")
        self.eos_token = self._named_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        flagged = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_token_ids = frozenset(flagged | set(named_ids.values()))
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self._token_bytes = TokenBytes(backend)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and the files beside it. Raises: ModelError, naming the file."""
        from vllm_triton.tokenizer.folder import load_folder

        return load_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's `tokenizer.*` metadata describe. Raises: ModelError."""
        from vllm_triton.tokenizer.gguf import build_from_gguf

        return build_from_gguf(metadata)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; add_special_tokens adds what the model expects around it, such as BOS.

        Raises: RequestError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text is not valid Unicode: {error}", "prompt") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        stream = self.text_stream(skip_special_tokens)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()

    def decode_token(self, token_id: int) -> str:
        """One token's own text, its leading space included; U+FFFD for bytes that are no whole character."""
        return self._token_bytes[token_id].decode(errors="replace")

    def text_stream(self, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()) -> TextStream:
        """Decodes a sequence that follows context_ids, token by token."""
        skipped = self.special_token_ids if skip_special_tokens else _NO_IDS
        return TextStream(self._token_bytes, skipped, context_ids)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text that the model was trained on, BOS included where the template writes it.

        Args:
            messages: {"role": ..., "content": ...} dicts; the template decides what else it reads.
            add_generation_prompt: ends the text where the assistant's answer begins.
            variables: further names for the template, such as tools.
        Raises: RequestError if the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: send a prompt to be completed instead", "messages")
        names = {**self._named_tokens, "tools": None, "documents": None, **variables}
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

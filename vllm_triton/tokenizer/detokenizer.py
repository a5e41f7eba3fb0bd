"""IncrementalDetokenizer: an answer's text while it grows, its stop strings, and what of it can be sent."""

import io
from collections.abc import Sequence

from vllm_triton.errors import RequestError
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one answer.

    What `next_delta` gives is never taken back: a character whose bytes are not all there waits inside the text
    stream, and a possible beginning of a stop string waits here. The result does not depend on how the tokens are cut
    into updates.

    Args:
        tokenizer: None for an engine without one; the text is then empty.
        prompt_token_ids: decide only whether the answer's leading space belongs to it.
        params: detokenize, stop, min_tokens, skip_special_tokens and include_stop_str_in_output are read.
    Raises: RequestError(param="stop") for stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        if tokenizer is None and params.stop:
            raise RequestError("stop needs a tokenizer: this engine runs on token ids alone", "stop")
        self._stream = None
        if tokenizer is not None and params.detokenize:
            self._stream = tokenizer.text_stream(params.skip_special_tokens, prompt_token_ids)
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        # Unlike a growing str, it is appended to and read in the middle without copying the whole.
        self._text = io.StringIO(newline="")
        self._length = 0  # characters of the text
        self._num_given = 0  # characters given out by next_delta
        self._num_tokens = 0
        self._stopped_by: str | None = None

    @property
    def text(self) -> str:
        """The whole text so far; complete once `next_delta(finished=True)` was called."""
        return self._text.getvalue()

    def update(self, new_token_ids: Sequence[int], ended_by_stop_token: bool = False) -> str | None:
        """Appends tokens; those after a stop string are dropped.

        Args:
            ended_by_stop_token: the last of them is EOS or a stop token: its text is kept only with
                include_stop_str_in_output.
        Returns: the stop string that ended the answer, or None.
        """
        if self._stream is None:
            return None
        num_tokens = len(new_token_ids)
        if ended_by_stop_token and not self._includes_stop:
            num_tokens -= 1
        for token_id in new_token_ids[:num_tokens]:
            if self._stopped_by is not None:
                break
            self._num_tokens += 1
            self._append(self._stream.push(token_id))
        return self._stopped_by

    def next_delta(self, finished: bool) -> str:
        """The text that was not given out yet and can no longer change; all of it if finished."""
        if finished and self._stream is not None and self._stopped_by is None:
            self._write(self._stream.flush())
        end = self._length if finished else self._length - self._num_held()
        delta = self._slice(self._num_given, end)
        self._num_given += len(delta)
        return delta

    def _append(self, piece: str) -> None:
        if not piece:
            return
        old_length = self._length
        self._write(piece)
        if self._stops and self._num_tokens > self._min_tokens:
            self._cut_at_stop(old_length)

    def _cut_at_stop(self, old_length: int) -> None:
        """Ends the text at the stop string that is complete first, the longest of several; it ends in the new part."""
        window_start = max(0, old_length - max(map(len, self._stops)) + 1)
        window = self._slice(window_start, self._length)
        matches = []
        for stop in self._stops:
            start = window.find(stop, max(0, old_length - window_start - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            end, start, self._stopped_by = min(matches)
            self._length = window_start + (end if self._includes_stop else start)
            self._text.truncate(self._length)

    def _num_held(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string to be cut off."""
        if not self._stops or self._includes_stop or self._stopped_by is not None:
            return 0
        longest = max(map(len, self._stops)) - 1
        tail = self._slice(max(self._num_given, self._length - longest), self._length)
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self._stops):
                return len(tail) - start
        return 0

    def _write(self, piece: str) -> None:
        self._text.seek(self._length)
        self._text.write(piece)
        self._length += len(piece)

    def _slice(self, start: int, end: int) -> str:
        self._text.seek(start)
        return self._text.read(end - start)

"""Tokens to text, bit by bit, and where the text has to stop.

Owns one completion's undecoded bytes and held-back characters. Knows no request: the caller
reads `stop_match` and cuts token ids, logprobs and usage by it.

    bytes of all tokens  | decoded                          | begun character |
    characters           | emitted          | held back     |
                                            a beginning of a stop string
"""

import codecs
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from stagecoach.text.stop_strings import StopFilter


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_name(self, token_id: int) -> str | None: ...


class StopMatch(NamedTuple):
    """A stop string was found."""

    stop: str
    num_tokens: int  # up to and including the token that completes it


def bytes_of(tokenizer: TokenBytes, token_id: int, *, skip_special_tokens: bool) -> bytes:
    """The bytes that `token_id` adds to the text."""
    # A padded head has ids beyond the vocabulary; they stand for nothing.
    if token_id >= tokenizer.vocab_size:
        return b""
    if skip_special_tokens and tokenizer.special_name(token_id) is not None:
        return b""
    return tokenizer.token_bytes(token_id)


class IncrementalDetokenizer:
    """Text of one completion; the same however its tokens are split into pushes.

    Without a stop string the text equals `bytes.decode("utf-8", errors="replace")` of all bytes.
    With one it ends before the first that a token numbered `min_tokens` or later completes
    (tokens count from 1), or after it with `include_stop_str_in_output`. Work is linear in the
    bytes, and at most three bytes and the longest stop string are ever held back.

    Attributes:
        stop_match: set once a stop string is found; nothing is emitted beyond it.
        num_tokens: tokens read; those after a stop string's last are not.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Iterable[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        stops = tuple(stop)
        self.stop_match: StopMatch | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop_filter = StopFilter(stops, is_stop_kept=include_stop_str_in_output)
        self._has_stops = bool(stops)
        self._are_specials_skipped = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Read tokens; return the text that is now certain."""
        if not self._has_stops:
            pieces = [self._bytes_of(token_id) for token_id in token_ids]
            self.num_tokens += len(pieces)
            return self._decoder.decode(b"".join(pieces))
        text = []
        for token_id in token_ids:
            if self.stop_match is not None:
                break
            self.num_tokens += 1
            text.append(self._filter(self._decoder.decode(self._bytes_of(token_id))))
        return "".join(text)

    def finish(self) -> str:
        """Return the rest: no token will follow. A begun character becomes U+FFFD."""
        if self.stop_match is not None:
            return ""
        text = self._filter(self._decoder.decode(b"", final=True))
        return text + self._stop_filter.finish()

    def _bytes_of(self, token_id: int) -> bytes:
        return bytes_of(self._tokenizer, token_id, skip_special_tokens=self._are_specials_skipped)

    def _filter(self, piece: str) -> str:
        text = self._stop_filter.push(piece, may_stop=self.num_tokens >= self._min_tokens)
        if self._stop_filter.stop is not None:
            self.stop_match = StopMatch(self._stop_filter.stop, self.num_tokens)
        return text

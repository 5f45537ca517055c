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

from stagecoach.text.stop_strings import StopStrings


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_name(self, token_id: int) -> str | None: ...


class StopMatch(NamedTuple):
    """A stop string was found."""

    stop: str
    num_tokens: int  # up to and including the token that completes it


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
        self._stop_strings = StopStrings(stops) if stops else None
        self._is_stop_kept = include_stop_str_in_output
        self._are_specials_skipped = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Read tokens; return the text that is now certain."""
        if self.stop_match is not None:
            return ""
        if self._stop_strings is None:
            pieces = [self._bytes_of(token_id) for token_id in token_ids]
            self.num_tokens += len(pieces)
            return self._decoder.decode(b"".join(pieces))
        text = self._held
        for token_id in token_ids:
            self.num_tokens += 1
            piece = self._decoder.decode(self._bytes_of(token_id))
            length = len(text)
            text += piece
            end = self._find_stop(self._stop_strings, piece)
            if end is not None:
                return self._cut(text, length + end)
        return self._hold_back(self._stop_strings, text)

    def finish(self) -> str:
        """Return the rest: no token will follow. A begun character becomes U+FFFD."""
        if self.stop_match is not None:
            return ""
        piece = self._decoder.decode(b"", final=True)
        text = self._held + piece
        if self._stop_strings is not None:
            end = self._find_stop(self._stop_strings, piece)
            if end is not None:
                return self._cut(text, len(self._held) + end)
        self._held = ""
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        # A padded head has ids beyond the vocabulary; they stand for nothing.
        if token_id >= self._tokenizer.vocab_size:
            return b""
        if self._are_specials_skipped and self._tokenizer.special_name(token_id) is not None:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _find_stop(self, stop_strings: StopStrings, piece: str) -> int | None:
        """Where in `piece` a stop string ends; sets `stop_match`."""
        for end, char in enumerate(piece, start=1):
            stop = stop_strings.step(char)
            if stop is not None and self.num_tokens >= self._min_tokens:
                self.stop_match = StopMatch(stop, self.num_tokens)
                return end
        return None

    def _cut(self, text: str, end: int) -> str:
        assert self.stop_match is not None
        self._held = ""
        return text[: end if self._is_stop_kept else end - len(self.stop_match.stop)]

    def _hold_back(self, stop_strings: StopStrings, text: str) -> str:
        num_certain = len(text) - stop_strings.num_held
        self._held = text[num_certain:]
        return text[:num_certain]

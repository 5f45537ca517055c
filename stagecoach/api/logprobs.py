"""Log-probabilities as OpenAI writes them, in both of its forms.

Owns the text and the bytes of a token by itself. Knows no request.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from stagecoach.request import TokenLogprobs
from stagecoach.text.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have stood there. `bytes` is what it is; `token` its text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the answer and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists of equal length, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a token of the prompt, or of one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str


# One entry a token of the prompt, by token id; the first is null.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token stands for; nothing, for ids that only a padded head has."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text; of a token that cuts a character, its bytes, so that no two share a name."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> ChatLogprobs:
    """One entry a token, as in /v1/chat/completions."""

    def likeliest(entry: TokenLogprobs) -> Iterator[TopLogprob]:
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            data = token_bytes(tokenizer, token_id)
            text = data.decode(errors="replace")
            yield TopLogprob(token=text, logprob=logprob, bytes=list(data))

    content = []
    for entry in entries:
        data = token_bytes(tokenizer, entry.token_id)
        content.append(
            TokenLogprob(
                token=data.decode(errors="replace"),
                logprob=entry.logprob,
                bytes=list(data),
                top_logprobs=list(likeliest(entry)),
            )
        )
    return ChatLogprobs(content=content)


class CompletionLogprobsWriter:
    """The parallel lists of /v1/completions, piece by piece.

    `text_offset` counts characters from the start of the text that the tokens give when decoded
    together: a token that ends inside a character does not move it, nor one that is left out.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        """`skip_special_tokens`: the text of outputs is without them."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._are_specials_skipped = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        *,
        num_prompt_tokens: int = 0,
    ) -> CompletionLogprobs:
        """The lists of these tokens, which follow those of the calls before.

        Args:
            entries: one a token; None for the first token of a prompt.
            num_prompt_tokens: so many of them are of the prompt, whose text is whole.
        """
        offsets = []
        for number, token_id in enumerate(token_ids):
            offsets.append(self._offset)
            is_special = self._tokenizer.special_name(token_id) is not None
            if is_special and self._are_specials_skipped and number >= num_prompt_tokens:
                continue
            data = token_bytes(self._tokenizer, token_id)
            self._offset += len(self._decoder.decode(data))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            tokens=[token_name(self._tokenizer, token_id) for token_id in token_ids],
            top_logprobs=[None if entry is None else self._likeliest(entry) for entry in entries],
        )

    def _likeliest(self, entry: TokenLogprobs) -> dict[str, float]:
        """By name; the token itself is always there."""
        likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
        named = {
            token_name(self._tokenizer, token_id): logprob
            for token_id, logprob in list(likeliest)[: self._num_top]
        }
        named.setdefault(token_name(self._tokenizer, entry.token_id), entry.logprob)
        return named


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """By token id, as vLLM writes them: the prompt's token first, then the likeliest."""

    def by_token_id(entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        found = {
            entry.token_id: (entry.logprob, entry.rank),
        }
        for rank, pair in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(pair[0], (pair[1], rank))
        return {
            str(token_id): PromptLogprob(
                logprob=logprob, rank=rank, decoded_token=token_name(tokenizer, token_id)
            )
            for token_id, (logprob, rank) in found.items()
        }

    return [None if entry is None else by_token_id(entry) for entry in entries]

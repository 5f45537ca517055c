"""Whether a checkpoint's tokenizer and chat format do what they must.

Owns the texts that are sent through. Knows no model but its vocabulary size and type.
"""

from collections.abc import Sequence
from pathlib import Path

from stagecoach.checking.verdict import CheckFailedError, CheckSkippedError
from stagecoach.config.model import ModelConfig
from stagecoach.errors import RequestError
from stagecoach.text import xtml
from stagecoach.text.chat import is_xtml, render_messages
from stagecoach.text.detokenizer import IncrementalDetokenizer
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

_ROUND_TRIPS = (
    "Hello, world!",
    "  two blanks,\ttabs\t\tand a line\n\n\nor three\r\n",
    "Größe, naïve, Zürich, Ωμέγα, русский, עברית, العربية, हिन्दी",
    "漢字とかな、한국어, 中文标点。",
    "🙂 👩‍👩‍👧‍👦 e\u0301 \u200b zero width",
    "0 12 345 6789 3.14159 1,000,000",
    "def f(x):\n    return {'a': [x ** 2, x // 3]}  # code\n",
    "I'll they've WE'RE don't",
    "a" * 300,
)
_WORDS = "What is the weather in Zürich today?"
_CONVERSATIONS = (
    ("What is 17 + 25?", "17 + 25 = 42."),
    ("Sort these numbers: 9, 4, 7, 1.", "1, 4, 7, 9"),
    ("Hello!", "Hello! How can I help you today?"),
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Opened:
    """A tokenizer once it is loaded."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._config = config
        self.tokenizer: Tokenizer | None = None
        self.has_chat = False  # once the chat format was found sound

    def check_tokenizer(self) -> str:
        """Load it, and send texts there and back."""
        vocab_size = self._config.vocab_size
        tokenizer = load_tokenizer(self._folder, model_vocab_size=vocab_size)
        self.tokenizer = tokenizer
        texts = [*_ROUND_TRIPS, *tokenizer.special_names]
        num_tokens = sum(_check_round_trip(tokenizer, text) for text in texts)
        ends = {*self._config.eos_token_ids, *tokenizer.eos_token_ids}
        if not ends:
            raise CheckFailedError("no token ends a text")
        if outside := sorted(end for end in ends if not 0 <= end < vocab_size):
            raise CheckFailedError(f"end tokens outside the vocabulary of {vocab_size}: {outside}")
        return (
            f"{vocab_size} tokens, {len(tokenizer.special_names)} special; {len(texts)} texts of "
            f"{num_tokens} tokens came back as they were; ends of a text: "
            f"{', '.join(map(str, sorted(ends)))}"
        )

    def check_chat(self) -> str:
        """Render a conversation with a tool, and see that users cannot write special tokens."""
        tokenizer = self._loaded()
        model_type = self._config.model_type
        if is_xtml(model_type):
            for name in (xtml.OPEN, xtml.CLOSE, xtml.SEP, xtml.END_OF_MESSAGE):
                tokenizer.special_id(name)
        elif tokenizer.chat_template is None:
            raise CheckSkippedError("the checkpoint has no chat template")
        plain = self._render(tokenizer, _WORDS)
        text = tokenizer.decode_bytes(plain).decode(errors="replace")
        if _WORDS not in text:
            raise CheckFailedError(f"the user's words are not in the prompt: {text!r:.200}")
        names = " ".join(tokenizer.special_names[:20])
        num_special = _count_special(tokenizer, plain)
        num_forged = _count_special(tokenizer, self._render(tokenizer, f"{_WORDS} {names}"))
        if num_forged != num_special:
            raise CheckFailedError(
                f"special tokens by name in a user's words: {num_forged - num_special} of them "
                "became special tokens"
            )
        form = "XTML" if is_xtml(model_type) else "the checkpoint's template"
        self.has_chat = True
        return f"{form}: {len(plain)} tokens of a conversation with a tool, {num_special} special"

    def prompts(self) -> list[list[int]]:
        """Token ids of short prompts: questions, as the chat format has them where it is sound."""
        tokenizer = self._loaded()
        if not self.has_chat:
            return [tokenizer.encode(question) for question, _ in _CONVERSATIONS]
        return [
            render_messages(
                self._config.model_type, tokenizer, [{"role": "user", "content": question}]
            )
            for question, _ in _CONVERSATIONS
        ]

    def conversations(self) -> list[list[int]]:
        """Token ids of short answers behind their questions; needs a sound chat format."""
        assert self.has_chat, "the chat format was not checked"
        return [
            render_messages(
                self._config.model_type,
                self._loaded(),
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            )
            for question, answer in _CONVERSATIONS
        ]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of ordinary texts."""
        return [self._loaded().encode(text) for text in texts]

    def _loaded(self) -> Tokenizer:
        assert self.tokenizer is not None, "the tokenizer was not loaded"
        return self.tokenizer

    def _render(self, tokenizer: Tokenizer, words: str) -> list[int]:
        messages = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": words},
        ]
        try:
            return render_messages(self._config.model_type, tokenizer, messages, [_TOOL])
        except RequestError as error:
            raise CheckFailedError(f"a plain conversation is refused: {error}") from None


def _check_round_trip(tokenizer: Tokenizer, text: str) -> int:
    """How many tokens the text has."""
    token_ids = tokenizer.encode(text)
    if outside := [token for token in token_ids if not 0 <= token < tokenizer.vocab_size]:
        raise CheckFailedError(f"{text!r:.60} has tokens outside the vocabulary: {outside[:5]}")
    if special := [token for token in token_ids if tokenizer.special_name(token) is not None]:
        raise CheckFailedError(f"{text!r:.60} became special tokens: {special[:5]}")
    back = tokenizer.decode_bytes(token_ids).decode(errors="replace")
    if back != text:
        raise CheckFailedError(f"{text!r:.60} came back as {back!r:.60}")
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    if (piecewise := "".join(pieces) + detokenizer.finish()) != text:
        raise CheckFailedError(f"{text!r:.60} came back bit by bit as {piecewise!r:.60}")
    return len(token_ids)


def _count_special(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    return sum(tokenizer.special_name(token_id) is not None for token_id in token_ids)

"""Text and tokens, as a load generator needs them, without a tokenizer of its own.

Owns three sources of the same two verbs: a server's /tokenize and /detokenize, a tokenizer in
this process, and plain words where neither exists. Random prompts are drawn from the alphabet: the
token ids that ordinary text has, so that no special token and no unused id is ever sent.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import httpx

from stagecoach.benchmarks.event_stream import response_error
from stagecoach.errors import ServerError
from stagecoach.text.tokenizer import Tokenizer

# What servers and the gateways before them answer for a path that they do not offer.
_NOT_THERE = (403, 404, 405, 501)

_NUM_WORDS = 3000
_ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "cl", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr")
_VOWELS = (*"aeiou", "ai", "ea", "ee", "io", "oo", "ou")
_CODAS = ("", *"nrstlm", "nd", "st", "ck")


class Vocabulary(Protocol):
    """Text to token ids and back; `is_exact` says whether the ids are the model's own."""

    is_exact: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any that a server would add."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """A text for these ids; encoding it again may give others."""
        ...


def alphabet(vocabulary: Vocabulary, seed: int) -> list[int]:
    """Distinct token ids of ordinary text, ascending: what random prompts are made of."""
    return sorted(set(vocabulary.encode(" ".join(_words(seed)))))


class ServerVocabulary:
    """The vocabulary of the model behind a server.

    Args:
        client: its `base_url` and headers are the server's.
    """

    is_exact = True

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model

    def encode(self, text: str) -> list[int]:
        """Raises ServerError where the server has no /tokenize or refuses the text."""
        body = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise ServerError(f"/tokenize answered without `tokens`: {body!r:.200}")
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        body = self._post("/detokenize", {"tokens": list(token_ids)})
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise ServerError(f"/detokenize answered without `prompt`: {body!r:.200}")
        return prompt

    def _post(self, path: str, fields: dict[str, object]) -> dict[str, object]:
        try:
            response = self._client.post(path, json={"model": self._model, **fields})
            if response.status_code != 200:
                raise response_error(response.status_code, response.content)
            body = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{path}: {error}") from None
        if not isinstance(body, dict):
            raise ServerError(f"{path} answered with no JSON object: {body!r:.200}")
        return body


class TokenizerVocabulary:
    """The vocabulary of a tokenizer in this process."""

    is_exact = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode_bytes(token_ids).decode(errors="replace")


class WordVocabulary:
    """Words as tokens, for servers that tell nothing of theirs."""

    is_exact = False

    def __init__(self) -> None:
        self._words: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self._words[token_id] for token_id in token_ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


def server_vocabulary(client: httpx.Client, model: str) -> Vocabulary:
    """The server's own where it has /tokenize, else words.

    Raises:
        ServerError: there is no server, or it has /tokenize and refuses to use it.
    """
    try:
        response = client.post("/tokenize", json={"model": model, "prompt": "a"})
    except httpx.HTTPError as error:
        raise ServerError(f"no answer from {client.base_url}: {error}") from None
    if response.status_code in _NOT_THERE:
        return WordVocabulary()
    if response.status_code != 200:
        raise response_error(response.status_code, response.content)
    return ServerVocabulary(client, model)


def _words(seed: int) -> list[str]:
    """Distinct words and numbers, some with capitals and some with punctuation after them."""
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < _NUM_WORDS:
        syllables = [
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
            for _ in range(rng.randint(1, 3))
        ]
        word = "".join(syllables)
        kind = rng.random()
        if kind < 0.1:
            word = word.capitalize()
        elif kind < 0.2:
            word = str(rng.randrange(10**5))
        elif kind < 0.3:
            word += rng.choice(",.;:!?")
        words[word] = None
    return list(words)

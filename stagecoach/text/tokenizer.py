"""The tokenizer: text to token ids, and token ids to bytes.

It owns the vocabulary of a checkpoint folder. Special tokens have ids but are never recognised in
text: only the chat format writes them. Decoding gives bytes, because a token may end inside a
UTF-8 character; turning bytes into text bit by bit is the detokenizer's work.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from stagecoach.json_file import read_json_object
from stagecoach.text.chat_template import ChatTemplate, read_chat_template

NUM_SPECIAL_TOKENS = 256

# Offsets of the named special tokens from the first id after the base ranks, in the original order.
SPECIAL_TOKEN_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|MASK|>": 8,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

# Published files disagree on the token that ends a turn, so each of these ends one.
END_TOKEN_NAMES = ("[EOS]", "<|end_of_msg|>", "[EOT]")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD_START}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_WORD_START}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The splitting regex recurses on long input; the original cuts at these lengths, and so must we.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000


class Tokenizer:
    """A vocabulary with its encoder, whatever file it came from."""

    def __init__(
        self,
        *,
        encode_ordinary: Callable[[str], list[int]],
        token_bytes: Sequence[bytes],
        special_ids: dict[str, int],
        eos_token_ids: Iterable[int],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._encode_ordinary = encode_ordinary
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._special_names = {token_id: name for name, token_id in special_ids.items()}
        self.vocab_size = len(token_bytes)
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        """Encode ordinary text; the name of a special token inside it is plain text.

        Half a surrogate pair, which JSON can bring, is no character: it becomes U+FFFD.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._encode_ordinary(text)

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of all special tokens."""
        return tuple(self._special_ids)

    def special_id(self, name: str) -> int:
        """The id of the special token `name`."""
        token_id = self._special_ids.get(name)
        if token_id is None:
            raise ValueError(f"the vocabulary has no special token {name!r}")
        return token_id

    def special_name(self, token_id: int) -> str | None:
        """The name of `token_id` if it is a special token, else None."""
        return self._special_names.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for; a special token stands for its name."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._token_bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, joined."""
        return b"".join(map(self.token_bytes, ids))


def load_tokenizer(path: str | Path, *, model_vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder: `tiktoken.model`, or else `tokenizer.json`.

    Args:
        path: the folder.
        model_vocab_size: of the model that it must belong to.

    Raises:
        ValueError, CheckpointError: no such file, one that cannot be read, or the vocabulary of
            another model.
    """
    folder = Path(path)
    if (folder / "tiktoken.model").is_file():
        tokenizer = _load_tiktoken(folder)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = _load_tokenizer_json(folder, model_vocab_size or 0)
    else:
        raise ValueError(f"{folder} holds neither tiktoken.model nor tokenizer.json")
    if model_vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's "
            f"vocab_size={model_vocab_size}"
        )
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken file: on each line the base64 of a token, a space, and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not 'base64 rank': {line!r}") from error
    if not ranks:
        raise ValueError(f"{path}: holds no token")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks are not 0..{len(ranks) - 1}, each once")
    return ranks


def special_token_names(num_base_tokens: int, added: dict[int, str]) -> dict[str, int]:
    """The 256 special tokens after the base ranks; an id that `added` lacks is a reserved one."""
    names = {
        added.get(token_id, f"<|reserved_token_{token_id}|>"): token_id
        for token_id in range(num_base_tokens, num_base_tokens + NUM_SPECIAL_TOKENS)
    }
    if len(names) != NUM_SPECIAL_TOKENS:
        raise ValueError("tokenizer_config.json: added_tokens_decoder names one token twice")
    return names


def build_encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """The byte-pair encoding of `ranks` under the K3 split pattern, without special tokens."""
    return tiktoken.Encoding(
        name="kimi_k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def _load_tiktoken(folder: Path) -> Tokenizer:
    ranks = read_ranks(folder / "tiktoken.model")
    config = _read_json(folder / "tokenizer_config.json")
    special_ids = special_token_names(len(ranks), _added_tokens(config))
    encoding = build_encoding(ranks)

    def encode_ordinary(text: str) -> list[int]:
        if len(text) <= MAX_RUN_CHARS:
            return encoding.encode_ordinary(text)
        return [token for part in _split_long(text) for token in encoding.encode_ordinary(part)]

    token_bytes = [b""] * (len(ranks) + len(special_ids))
    for token, rank in ranks.items():
        token_bytes[rank] = token
    for name, token_id in special_ids.items():
        token_bytes[token_id] = name.encode()
    return Tokenizer(
        encode_ordinary=encode_ordinary,
        token_bytes=token_bytes,
        special_ids=special_ids,
        eos_token_ids=_eos_token_ids(folder, config, special_ids),
        chat_template=read_chat_template(folder),
    )


def _added_tokens(config: dict[str, Any]) -> dict[int, str]:
    added = config.get("added_tokens_decoder", {})
    try:
        return {int(token_id): str(entry["content"]) for token_id, entry in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            "tokenizer_config.json: added_tokens_decoder must map token ids to objects with a "
            "`content`"
        ) from None


def _load_tokenizer_json(folder: Path, model_vocab_size: int) -> Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
    backend.encode_special_tokens = True
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        raise ValueError(f"{folder / 'tokenizer.json'}: only byte-level decoders are supported")
    added = backend.get_added_tokens_decoder()
    special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
    byte_of_char = byte_level_alphabet()
    vocab = backend.get_vocab(with_added_tokens=True)
    # Models are padded to round sizes; what no token stands for has no text.
    token_bytes = [b""] * max(model_vocab_size, max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            token_bytes[token_id] = token.encode()
        else:
            token_bytes[token_id] = bytes(byte_of_char[char] for char in token)

    def encode_ordinary(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    config = _read_json(folder / "tokenizer_config.json")
    return Tokenizer(
        encode_ordinary=encode_ordinary,
        token_bytes=token_bytes,
        special_ids=special_ids,
        eos_token_ids=_eos_token_ids(folder, config, special_ids),
        chat_template=read_chat_template(folder),
    )


def _eos_token_ids(
    folder: Path, config: dict[str, Any], special_ids: dict[str, int]
) -> Iterator[int]:
    for name in END_TOKEN_NAMES:
        if name in special_ids:
            yield special_ids[name]
    eos_token = config.get("eos_token")
    eos_name = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if isinstance(eos_name, str) and eos_name in special_ids:
        yield special_ids[eos_name]
    for file_name in ("generation_config.json", "config.json"):
        token_ids = _read_json(folder / file_name).get("eos_token_id")
        if token_ids is not None:
            yield from token_ids if isinstance(token_ids, list) else [token_ids]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _split_long(text: str) -> Iterator[str]:
    """Cut `text` so that no part is too long, nor any run of blanks or of non-blanks in it."""
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        piece = text[start : start + MAX_ENCODE_CHARS]
        part_start = 0
        run_length = 0
        run_is_space = piece[0].isspace()
        for position, char in enumerate(piece):
            is_space = char.isspace()
            run_length = run_length + 1 if is_space == run_is_space else 1
            run_is_space = is_space
            if run_length > MAX_RUN_CHARS:
                yield piece[part_start:position]
                part_start = position
                run_length = 1
        yield piece[part_start:]


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }

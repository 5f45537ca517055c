"""A tokenizer whose vocabulary is made up while a test writes: any bytes can be one token."""

import itertools
from collections.abc import Iterable, Sequence

from stagecoach.text.message_stream import MessageBuilder, MessageDelta, MessageParser

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "[EOT]", "<|pad|>")


class PieceTokenizer:
    """Ids of `bytes` are ordinary tokens, those of `str` special ones."""

    def __init__(self) -> None:
        self._ids: dict[bytes | str, int] = {}
        self._pieces: list[bytes | str] = []
        self.vocab_size = 1 << 30

    def ids(self, pieces: Iterable[bytes | str]) -> list[int]:
        return [self._id(piece) for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def special_name(self, token_id: int) -> str | None:
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) else None

    def _id(self, piece: bytes | str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def pieces_of(text: str, markers: Sequence[str] = MARKERS) -> list[bytes | str]:
    """One piece for each marker in `text`, and one for each other character."""
    pieces: list[bytes | str] = []
    while text:
        marker = next((name for name in markers if text.startswith(name)), None)
        pieces.append(text[0].encode() if marker is None else marker)
        text = text[len(marker or text[0]) :]
    return pieces


def cut(pieces: Iterable[bytes | str], sizes: Sequence[int]) -> list[bytes | str]:
    """The same text in other tokens: each run of ordinary ones anew, in bytes of `sizes`."""
    lengths = itertools.cycle(sizes)
    result: list[bytes | str] = []
    for is_text, run in itertools.groupby(pieces, key=lambda piece: isinstance(piece, bytes)):
        if not is_text:
            result += run
            continue
        data = b"".join(piece for piece in run if isinstance(piece, bytes))
        while data:
            length = next(lengths)
            result.append(data[:length])
            data = data[length:]
    return result


def deltas_of(
    parser: MessageParser, token_ids: Sequence[int], sizes: Sequence[int] = ()
) -> list[MessageDelta]:
    """Push the tokens in groups of `sizes` (the rest one by one); the last delta is the finish."""
    deltas, start = [], 0
    for size in (*sizes, *[1] * len(token_ids)):
        deltas.append(parser.push(token_ids[start : start + size]))
        start += size
    return [*deltas, parser.finish()]


def sum_of(deltas: Iterable[MessageDelta]) -> MessageBuilder:
    builder = MessageBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder

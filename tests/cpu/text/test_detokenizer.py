"""The detokenizer: nothing lost, nothing early, nothing beyond a stop, however tokens are cut."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagecoach.text.detokenizer import IncrementalDetokenizer, StopMatch
from stagecoach.text.stop_strings import StopStrings


class FakeTokenizer:
    """Token i stands for `tokens[i]`; the ids in `special_ids` are special."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self.special_ids = special_ids
        self.vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def special_name(self, token_id: int) -> str | None:
        return self.tokens[token_id].decode() if token_id in self.special_ids else None


def stream(
    tokens: Sequence[bytes], sizes: Sequence[int] = (), **options: object
) -> tuple[list[str], IncrementalDetokenizer]:
    """Push the tokens in groups of `sizes` (the rest one by one); the deltas, finish included."""
    detokenizer = IncrementalDetokenizer(FakeTokenizer(tokens), **options)  # type: ignore[arg-type]
    deltas, start = [], 0
    for size in (*sizes, *[1] * len(tokens)):
        end = min(start + size, len(tokens))
        deltas.append(detokenizer.push(range(start, end)))
        start = end
    deltas.append(detokenizer.finish())
    return deltas, detokenizer


def first_stop(
    tokens: Sequence[bytes], stops: Sequence[str], min_tokens: int
) -> tuple[str, StopMatch] | None:
    """Slow reference: the text of every prefix of tokens, searched anew for each character."""
    chars: list[tuple[str, int]] = []  # each character and the number of tokens that gave it
    detokenizer = IncrementalDetokenizer(FakeTokenizer(tokens))
    for number in range(1, len(tokens) + 1):
        chars += [(char, number) for char in detokenizer.push([number - 1])]
    chars += [(char, len(tokens)) for char in detokenizer.finish()]
    text = "".join(char for char, _ in chars)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and chars[end - 1][1] >= min_tokens:
            stop = max(found, key=len)
            return text[: end - len(stop)], StopMatch(stop, chars[end - 1][1])
    return None


# Few letters, so that stops overlap; pieces that cut characters; bytes that never are one.
PIECES = st.sampled_from(
    [b"a", b"b", b"ab", b"ba", b"aab", b"", "é".encode(), b"\xc3", b"\xa9", b"\xf0\x9f",
     b"\x98\x80", "가".encode()[:1], "가".encode()[1:], "나".encode(), b"\xff",
     b"\xe2\x28", "😀b".encode()]
)  # fmt: skip
TOKENS = st.lists(PIECES | st.binary(max_size=4), max_size=30)
SIZES = st.lists(st.integers(0, 7), max_size=10)
STOPS = st.lists(st.text("abé나😀\ufffd", min_size=1, max_size=4), min_size=1, max_size=4)


@given(TOKENS, SIZES)
@example([b"\xed", b"\xa0", b"\x80", b"\xf4", b"\x90"], [])
def test_text_is_the_decoded_bytes(tokens: list[bytes], sizes: list[int]) -> None:
    deltas, detokenizer = stream(tokens, sizes)
    assert "".join(deltas) == b"".join(tokens).decode("utf-8", errors="replace")
    assert detokenizer.stop_match is None
    assert detokenizer.num_tokens == len(tokens)


@given(TOKENS, SIZES, STOPS, st.integers(0, 12))
def test_text_ends_before_the_first_stop(
    tokens: list[bytes], sizes: list[int], stops: list[str], min_tokens: int
) -> None:
    deltas, detokenizer = stream(tokens, sizes, stop=stops, min_tokens=min_tokens)
    expected = first_stop(tokens, stops, min_tokens)
    if expected is None:
        assert "".join(deltas) == b"".join(tokens).decode("utf-8", errors="replace")
        assert detokenizer.stop_match is None
        return
    text, match = expected
    assert "".join(deltas) == text
    assert detokenizer.stop_match == match
    assert detokenizer.num_tokens == match.num_tokens >= min_tokens
    kept, _ = stream(
        tokens, sizes, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=True
    )
    assert "".join(kept) == text + match.stop


@given(TOKENS, STOPS, st.sampled_from([0, 5, 100]))
@example([b"a", b"b", b"b"], ["ab"], 100)
def test_only_a_beginning_of_a_stop_is_held_back(
    tokens: list[bytes], stops: list[str], min_tokens: int
) -> None:
    plain = IncrementalDetokenizer(FakeTokenizer(tokens))
    stopping = IncrementalDetokenizer(FakeTokenizer(tokens), stop=stops, min_tokens=min_tokens)
    decoded = emitted = ""
    for index in range(len(tokens)):
        decoded += plain.push([index])
        emitted += stopping.push([index])
        if stopping.stop_match is not None:
            return
        held = decoded[len(emitted) :]
        assert decoded.startswith(emitted)
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max((text for text in beginnings if decoded.endswith(text)), key=len, default="")
        assert held == longest


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), max_size=5))
def test_the_automaton_equals_searching(text: str, stops: list[str]) -> None:
    automaton = StopStrings(stops)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        assert automaton.step(text[end - 1]) == max(found, key=len, default=None)


def test_hangul_one_byte_at_a_time_loses_nothing() -> None:
    text = "안녕하세요. 무엇을 도와드릴까요? 값진 뷁"
    deltas, _ = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)
    assert "\ufffd" not in "".join(deltas)


def test_a_run_of_invalid_bytes_is_emitted_at_once() -> None:
    deltas, _ = stream([b"\xff"] * 50)
    assert deltas == [*["\ufffd"] * 50, ""]


def test_a_character_is_whole_or_absent() -> None:
    deltas, _ = stream([b"x\xf0\x9f", b"\x98", b"\x80y"])
    assert deltas == ["x", "", "😀y", ""]


def test_an_unfinished_character_becomes_one_replacement() -> None:
    deltas, _ = stream([b"a\xf0\x9f\x98"])
    assert deltas == ["a", "\ufffd"]


def test_a_stop_inside_a_block_of_tokens_drops_the_rest() -> None:
    tokens = [b"one", b" EN", b"D two", b" three"]
    deltas, detokenizer = stream(tokens, [4], stop=["END"])
    assert deltas[0] == "one " and set(deltas[1:]) == {""}
    assert detokenizer.stop_match == StopMatch("END", 3)
    assert detokenizer.push([3]) == ""


def test_hold_back_beside_wide_characters_cuts_between_characters() -> None:
    deltas, _ = stream(["漢字".encode(), "語😀".encode(), b"!", b"z"], stop=["😀!!"])
    assert deltas == ["漢字", "語", "", "😀!z", ""]


def test_a_disproved_beginning_is_released() -> None:
    deltas, detokenizer = stream([b"a", b"a", b"a", b"b", b"c"], stop=["aab!", "bd"])
    assert deltas == ["", "", "a", "", "aabc", ""]
    assert detokenizer.stop_match is None


def test_finish_flushes_a_beginning() -> None:
    deltas, _ = stream([b"so EN"], stop=["END"])
    assert deltas == ["so ", "EN"]


def test_a_stop_may_end_in_the_last_replacement() -> None:
    deltas, detokenizer = stream([b"aE", b"\xf0"], stop=["E\ufffd"])
    assert deltas == ["a", "", ""]
    assert detokenizer.stop_match == StopMatch("E\ufffd", 2)


def test_of_two_stops_the_first_to_end_counts_and_then_the_longest() -> None:
    assert stream([b"xabcd"], stop=["abcd", "bc"])[1].stop_match == StopMatch("bc", 1)
    assert stream([b"xabcd"], stop=["bc", "abc"])[1].stop_match == StopMatch("abc", 1)


def test_min_tokens_lets_early_stops_pass() -> None:
    tokens = [b"\n", b"a", b"\n", b"b", b"\n"]
    deltas, detokenizer = stream(tokens, stop=["\n"], min_tokens=3)
    assert "".join(deltas) == "\na"
    assert detokenizer.stop_match == StopMatch("\n", 3)
    deltas, detokenizer = stream(tokens, stop=["\n"], min_tokens=4)
    assert "".join(deltas) == "\na\nb"
    assert detokenizer.stop_match == StopMatch("\n", 5)


def test_a_stop_begun_before_min_tokens_counts_when_it_ends_after() -> None:
    deltas, detokenizer = stream([b"xE", b"N", b"D"], stop=["END"], min_tokens=3)
    assert "".join(deltas) == "x"
    assert detokenizer.stop_match == StopMatch("END", 3)


def test_special_tokens_are_skipped_or_shown_by_name() -> None:
    tokenizer = FakeTokenizer([b"a", b"<|end|>", b"b"], special_ids=[1])
    skipping = IncrementalDetokenizer(tokenizer, stop=["ab"])
    assert skipping.push([0, 1, 2]) == ""
    assert skipping.stop_match == StopMatch("ab", 3)
    showing = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert showing.push([0, 1, 2]) == "a<|end|>b"


def test_ids_of_a_padded_head_have_no_text() -> None:
    detokenizer = IncrementalDetokenizer(FakeTokenizer([b"a"]))
    assert detokenizer.push([0, 7, 0]) == "aa"
    assert detokenizer.num_tokens == 3


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        IncrementalDetokenizer(FakeTokenizer([b"a"]), stop=["ok", ""])


def test_work_is_linear_in_the_number_of_tokens() -> None:
    def seconds(num_tokens: int) -> float:
        tokenizer = FakeTokenizer([b"a", b"\xff"])
        detokenizer = IncrementalDetokenizer(tokenizer, stop=["a" * 50 + "b", "aab"])
        started = time.perf_counter()
        for index in range(num_tokens):
            detokenizer.push([index % 97 == 0])
        detokenizer.finish()
        return time.perf_counter() - started

    short = min(seconds(2_000) for _ in range(3))
    long = min(seconds(40_000) for _ in range(3))
    # Linear work takes 20 times as long, quadratic 400 times.
    assert long < 100 * short

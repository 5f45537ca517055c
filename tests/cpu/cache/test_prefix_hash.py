"""Equal names are equal prefixes of the same tenant, model and page size, and nothing else."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.prefix_hash import BlockChain, model_root, prefix_digest, salted_root

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


def chain(tokens: list[int], root: bytes = b"root", block_size: int = 3) -> BlockChain:
    return BlockChain(root, block_size, lambda start, end: tuple(tokens[start:end]))


@given(TOKENS, TOKENS)
def test_names_are_equal_as_far_as_the_blocks_are(one: list[int], other: list[int]) -> None:
    first, second = chain(one), chain(other)
    for num_blocks in range(min(len(one), len(other)) // 3 + 1):
        is_equal = one[: num_blocks * 3] == other[: num_blocks * 3]
        assert (first.hash_after(num_blocks) == second.hash_after(num_blocks)) == is_equal


@given(TOKENS, st.lists(st.integers(0, 4), max_size=6))
def test_names_do_not_depend_on_the_order_of_questions(tokens: list[int], asked: list[int]) -> None:
    asked = [number for number in asked if number * 3 <= len(tokens)]
    restless = chain(tokens)
    for number in asked:
        assert restless.hash_after(number) == chain(tokens).hash_after(number)


def test_a_block_is_named_by_what_comes_before_it_as_well() -> None:
    tokens = [1, 2, 3, 1, 2, 3]
    names = [chain(tokens).hash_after(number) for number in range(3)]
    assert len(set(names)) == 3


def test_each_block_is_read_once() -> None:
    spans = []

    def token_ids(start: int, end: int) -> tuple[int, ...]:
        spans.append((start, end))
        return tuple(range(start, end))

    asked = BlockChain(b"root", 4, token_ids)
    for number in (0, 2, 1, 2, 5, 3):
        asked.hash_after(number)
    assert spans == [(0, 8), (8, 20)]


def test_the_tail_is_what_stands_behind_the_last_full_block() -> None:
    tokens = [5, 6, 7, 8, 9]
    assert [chain(tokens).tail(position) for position in range(6)] == [
        (),
        (5,),
        (5, 6),
        (),
        (8,),
        (8, 9),
    ]


def test_roots_differ_in_every_field() -> None:
    fields = {"model": "m", "dtype": "float32", "block_size": 64, "adapter": None}
    roots = [model_root(**fields)]  # type: ignore[arg-type]
    for name, value in {"model": "n", "dtype": "f", "block_size": 6, "adapter": ""}.items():
        roots.append(model_root(**{**fields, name: value}))  # type: ignore[arg-type]
    # The same letters, divided otherwise.
    roots.append(model_root(model="mf", dtype="loat32", block_size=64))
    assert len(set(roots)) == len(roots)


def test_salts_are_tenants_and_none_is_the_shared_one() -> None:
    """Requests of two salts never share an entry (I59: nor does a hit cross them)."""
    salts = [None, "", "a", "b", "None", "a\ud800"]
    roots = [salted_root(b"root", salt) for salt in salts]
    assert roots[0] == b"root"
    assert len(set(roots)) == len(roots)


def test_the_digest_is_that_of_little_endian_tokens() -> None:
    tokens = [1, 70_000, 0]
    expected = hashlib.blake2b(struct.pack("<3i", *tokens), digest_size=8).digest()
    assert prefix_digest(tokens) == expected

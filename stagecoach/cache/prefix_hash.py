"""Names for prefixes: a chain of hashes, one a full block of tokens.

The hash after n blocks stands for the root and all tokens before it, so equal hashes mean equal
prefixes of the same tenant, model and page size. Strong (BLAKE2b, 16 bytes): prompts are chosen
by strangers, and a collision would hand out another one's memory. Knows no page and no slot.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

_HASH_BYTES = 16
_DIGEST_BYTES = 8


def model_root(*, model: str, dtype: str, block_size: int, adapter: str | None = None) -> bytes:
    """The hash of the empty prefix: what is cached with one of these never serves another.

    Args:
        model: what identifies the weights.
        dtype: of the activations.
        block_size: tokens a page.
        adapter: what identifies the adapter, if there is one.
    """
    return _hash_fields(b"model", model, dtype, str(block_size), adapter)


def salted_root(root: bytes, cache_salt: str | None) -> bytes:
    """The root of requests with this salt; None is a tenant of its own, as is ""."""
    return root if cache_salt is None else _hash_fields(root, cache_salt)


class PrefixDigest:
    """Stands for a whole prefix: BLAKE2b over int32 little-endian tokens, in eight bytes.

    For checks in debug mode; not a name in the index. Never changed: a longer prefix is another.
    """

    __slots__ = ("_hash",)

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(_token_bytes(token_ids), digest_size=_DIGEST_BYTES)

    def extended(self, token_ids: Sequence[int]) -> "PrefixDigest":
        """Of the prefix that these tokens follow."""
        longer = PrefixDigest.__new__(PrefixDigest)
        longer._hash = self._hash.copy()
        longer._hash.update(_token_bytes(token_ids))
        return longer

    def digest(self) -> bytes:
        return self._hash.digest()


def prefix_digest(token_ids: Sequence[int]) -> bytes:
    """The eight bytes of `PrefixDigest`, for a prefix known at once."""
    return PrefixDigest(token_ids).digest()


class BlockChain:
    """The hashes of one request's blocks, each computed once.

    One a request, for as long as it lives: committed tokens never change.
    """

    __slots__ = ("_block_size", "_hashes", "_token_ids", "num_published")

    def __init__(
        self, root: bytes, block_size: int, token_ids: Callable[[int, int], tuple[int, ...]]
    ) -> None:
        """`token_ids(start, end)` gives the committed tokens of that span."""
        self._hashes = [root]
        self._block_size = block_size
        self._token_ids = token_ids
        # Blocks that its admission has found or published: where publishing goes on.
        self.num_published = 0

    def hash_after(self, num_blocks: int) -> bytes:
        """The name of tokens [0, num_blocks * block_size); they are committed."""
        if num_blocks >= len(self._hashes):
            self._extend(num_blocks)
        return self._hashes[num_blocks]

    def tail(self, position: int) -> tuple[int, ...]:
        """Tokens between the last full block before `position` and `position`."""
        return self._token_ids(position - position % self._block_size, position)

    def _extend(self, num_blocks: int) -> None:
        start = (len(self._hashes) - 1) * self._block_size
        tokens = memoryview(_token_bytes(self._token_ids(start, num_blocks * self._block_size)))
        width = 4 * self._block_size
        assert len(tokens) == (num_blocks - len(self._hashes) + 1) * width, "not committed yet"
        last = self._hashes[-1]
        for offset in range(0, len(tokens), width):
            block = hashlib.blake2b(last, digest_size=_HASH_BYTES)
            block.update(tokens[offset : offset + width])
            last = block.digest()
            self._hashes.append(last)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _hash_fields(first: bytes, *fields: str | None) -> bytes:
    """Hash fields with their lengths, so that no two lists of fields look alike."""
    whole = hashlib.blake2b(first, digest_size=_HASH_BYTES)
    for field in fields:
        data = b"" if field is None else field.encode("utf-8", "surrogatepass")
        whole.update(b"-" if field is None else b"%d:" % len(data))
        whole.update(data)
    return whole.digest()

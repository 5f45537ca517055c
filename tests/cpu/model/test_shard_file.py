"""Parts of tensors out of a file, beside what safetensors itself reads; damaged headers."""

import errno
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from stagecoach.errors import CheckpointError
from stagecoach.model.shard_file import ShardFile, WantedPart

pytestmark = pytest.mark.cpu

TENSORS = {
    "matrix": torch.randn(40, 24000).bfloat16(),  # pieces of a row lie far apart
    "narrow": torch.randint(256, (50, 96), dtype=torch.uint8),
    "conv": torch.randn(12, 1, 4),
    "vector": torch.randn(7, dtype=torch.float64),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "fp8": torch.randn(8, 8).to(torch.float8_e4m3fn),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    ("name", "region"),
    [
        *((name, ()) for name in TENSORS),
        ("matrix", (slice(3, 9), slice(0, 24000))),
        ("matrix", (slice(3, 9), slice(100, 777))),
        ("matrix", (slice(0, 40), slice(23999, 24000))),
        ("narrow", (slice(1, 50), slice(32, 64))),
        ("narrow", (slice(7, 7), slice(0, 96))),
        ("conv", (slice(2, 5), slice(0, 1), slice(0, 4))),
        ("conv", (slice(2, 5), slice(0, 1), slice(1, 3))),
        ("vector", (slice(2, 6),)),
        ("fp8", (slice(1, 3), slice(2, 6))),
    ],
)
def test_a_region_is_what_safetensors_reads(
    path: Path, name: str, region: tuple[slice, ...]
) -> None:
    with safe_open(path, framework="pt") as file:
        part = file.get_slice(name)
        expected = part[region] if region else file.get_tensor(name)
    for into in (None, torch.full((4_000_000,), 7, dtype=torch.uint8)):
        found = ShardFile(path).read(name, region, into)
        assert found.is_contiguous() and found.dtype == expected.dtype
        assert torch.equal(found.float(), expected.float())
        if into is not None:
            assert (into[found.nbytes :] == 7).all(), "written behind the part"
            assert found.untyped_storage().data_ptr() == into.untyped_storage().data_ptr()


@pytest.mark.parametrize(("columns", "share"), [(slice(0, 600), 0.03), (slice(0, 24000), 0.3)])
def test_no_more_bytes_are_read_than_the_part_has(
    path: Path, monkeypatch: pytest.MonkeyPatch, columns: slice, share: float
) -> None:
    file = ShardFile(path)
    counts = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    part = file.read("matrix", (slice(0, 10), columns))
    assert sum(counts) == part.nbytes < share * TENSORS["matrix"].nbytes


def test_parts_that_follow_each_other_are_read_in_one_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ShardFile(path)
    order = sorted(TENSORS, key=lambda name: file.tensors[name].start)
    places = [torch.empty(TENSORS[name].nbytes + 5, dtype=torch.uint8) for name in order]
    calls = []
    preadv = os.preadv

    def few(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Less than was asked for, as a signal may have it."""
        calls.append(offset)
        if len(calls) == 1:
            return preadv(descriptor, [*buffers[:1], buffers[1][:1]], offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", few)
    wanted = [WantedPart(name, (), into) for name, into in zip(order, places, strict=True)]
    for name, found in zip(order, file.read_parts(wanted), strict=True):
        assert torch.equal(found.float(), TENSORS[name].float()), name
    assert len(calls) == 2
    rows = [
        WantedPart("conv", (slice(row, row + 1), slice(0, 1), slice(0, 4)), None)
        for row in (0, 1, 2, 5, 4)
    ]
    for part, found in zip(rows, file.read_parts(rows), strict=True):
        assert torch.equal(found, TENSORS["conv"][part.region])
    assert len(calls) == 2 + 3


def test_an_error_in_one_call_names_the_part_that_is_cut(path: Path) -> None:
    file = ShardFile(path)
    order = sorted(TENSORS, key=lambda name: file.tensors[name].start)
    last = next(name for name in reversed(order) if TENSORS[name].nbytes)
    os.truncate(path, file.tensors[last].start + 1)
    with pytest.raises(CheckpointError, match=rf"{last} cannot be read .*cut short"):
        file.read_parts([WantedPart(name, (), None) for name in order])


def test_threads_read_at_once(path: Path) -> None:
    file = ShardFile(path)
    wrong: list[int] = []

    def read(number: int) -> None:
        for start in range(30):
            region = (slice(start, start + 10), slice(number, number + 50))
            if not torch.equal(file.read("matrix", region), TENSORS["matrix"][region]):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_file_that_shrinks_and_a_disk_that_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ShardFile(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{path.name}: matrix cannot be read .*cut short"):
        file.read("matrix")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=rf"{path.name}: narrow cannot be read \(Input/outp"):
        file.read("narrow")


def write_header(path: Path, header: Any, num_data_bytes: int = 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))


def entry(start: int, end: int, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **changes}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"[]", "no JSON object"),
        (b"{", "Expecting"),
        ({"a": {"dtype": "F32"}}, "the entry of a is incomplete"),
        ({"a": 3}, "the entry of a is incomplete"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}',
            "a has .*not integers",
        ),
        (b"[" * 200_000, "nested too deeply"),
        ({"a": entry(0, 8, shape=[-1, -2])}, r"a has shape \[-1, -2\]"),
        ({"a": entry(0, 8, shape=[2.5])}, r"a has shape \[2.5\] .*not integers"),
        ({"a": entry(-8, 0)}, r"a has offsets \[-8, 0\]"),
        ({"a": entry(0, 8, shape=[3])}, r"a: 8 bytes for \[3\] of F32"),
        ({"a": entry(4, 8)}, "a begins at byte .*, not at"),
        ({"a": entry(0, 4), "b": entry(0, 8)}, "begins at byte"),
        ({"a": entry(0, 4)}, "bytes where the header says"),
        ({"a": entry(0, 12)}, "bytes where the header says"),
    ],
)
def test_a_header_that_cannot_be(tmp_path: Path, header: Any, text: str) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, header)
    with pytest.raises(CheckpointError, match=rf"{path.name}: damaged or cut short \(.*{text}"):
        ShardFile(path)


def test_a_tensor_without_values_may_be_named_behind_the_one_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, {"b": entry(0, 8), "a": entry(0, 0, shape=[0, 3])})
    file = ShardFile(path)
    assert file.read("a").shape == (0, 3) and file.read("b").shape == (2,)


def test_a_file_that_may_not_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=r"cannot be read \(needed\) \(Permission denied"):
            ShardFile(path, " (needed)")
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied"):
        ShardFile(path)


def test_a_thread_has_one_scratch_for_all_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [ShardFile(path), ShardFile(path)]
    into = torch.empty(49 * 32, dtype=torch.uint8)
    region = (slice(1, 50), slice(32, 64))
    files[0].read("narrow", region, into)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("memory for each file")

    monkeypatch.setattr(torch, "empty", refuse)
    assert torch.equal(files[1].read("narrow", region, into), TENSORS["narrow"][region])


def test_a_type_that_torch_lacks_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_header(path, {"a": entry(0, 8, dtype="F4", shape=[16])})
    file = ShardFile(path)
    assert file.tensors["a"].dtype == "F4"
    with pytest.raises(CheckpointError, match="a has dtype F4, which cannot be read"):
        file.read("a")

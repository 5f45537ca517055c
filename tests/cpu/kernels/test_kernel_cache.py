"""Compiled CUDA C++ on disk: found again, by everything that went into it, and no error without."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from stagecoach.kernels import kernel_cache, nvrtc

pytestmark = pytest.mark.cpu


class Arguments(ctypes.Structure):
    """Of a kernel that takes nothing."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_stored_is_found(folder: Path) -> None:
    name = kernel_cache.digest([b"source", b"options"])
    assert kernel_cache.find(name) is None
    kernel_cache.store(name, b"code")
    assert kernel_cache.find(name) == b"code"
    assert any(folder.iterdir())
    # Where one part ends and the next begins counts.
    assert kernel_cache.digest([b"sourceo", b"ptions"]) != name


def test_another_source_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "window.cu"
    source.write_text("first")
    (tmp_path / "notes.txt").write_text("first")
    monkeypatch.setattr(kernel_cache, "_PACKAGE", tmp_path)
    before = kernel_cache.source_digest()
    (tmp_path / "notes.txt").write_text("second")
    assert kernel_cache.source_digest() == before
    source.write_text("second")
    assert kernel_cache.source_digest() != before


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    name = kernel_cache.digest([b"source"])
    kernel_cache.store(name, b"code")
    assert kernel_cache.find(name) is None
    with knobs.cache.scope(), caplog.at_level("WARNING"):
        kernel_cache.use_writable_folder(tmp_path)
        assert "TRITON_CACHE_DIR names another" in caplog.text
        kernel_cache.store(name, b"code")
        assert kernel_cache.find(name) == b"code"
        # The processes that this one starts use it too.
        other = Path(os.environ["TRITON_CACHE_DIR"])
        assert other.parent == tmp_path and other.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    usual = str(tmp_path / "file" / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", usual)
    other = tmp_path / f"stagecoach-kernels-{os.getuid()}"
    other.mkdir()
    other.chmod(0o777)
    with knobs.cache.scope(), caplog.at_level("WARNING"):
        kernel_cache.use_writable_folder(tmp_path)
        assert knobs.cache.dir == usual
    assert "can be used for compiled kernels" in caplog.text


def test_a_folder_that_can_be_written_stays(folder: Path) -> None:
    kernel_cache.use_writable_folder()
    assert knobs.cache.dir == str(folder)


def test_cuda_sources_are_compiled_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    compiled: list[dict[str, int]] = []

    def compile_cubin(source: Path, architecture: str, definitions: dict[str, int]) -> bytes:
        compiled.append(definitions)
        return f"{source.read_text()} {architecture} {definitions}".encode()

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    source = tmp_path / "kernel.cu"
    source.write_text("first")
    code = nvrtc.find_or_compile(source, "sm_90a", {"WIDTH": 8})
    assert nvrtc.find_or_compile(source, "sm_90a", {"WIDTH": 8}) == code
    assert len(compiled) == 1
    nvrtc.find_or_compile(source, "sm_90a", {"WIDTH": 16})
    nvrtc.find_or_compile(source, "sm_100", {"WIDTH": 8})
    (tmp_path / "header.cuh").write_text("second")
    assert nvrtc.find_or_compile(source, "sm_90a", {"WIDTH": 8}) == code
    source.write_text("third")
    assert nvrtc.find_or_compile(source, "sm_90a", {"WIDTH": 8}) != code
    assert len(compiled) == 5


def test_kernels_compile_while_nothing_is_launched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that differ, and a launch is left out: here it would fail."""
    pytest.importorskip("cuda.bindings")
    compiled: list[int] = []

    def compile_cubin(source: Path, architecture: str, definitions: dict[str, int]) -> bytes:
        compiled.append(definitions["WIDTH"])
        return b"code"

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    source = tmp_path / "kernel.cu"
    source.write_text("")
    device = torch.device("cuda", 0)
    with nvrtc.nothing_launched():
        for width in (8, 16, 8):
            kernel = nvrtc.load_kernel(source, "kernel", device, (("WIDTH", width),))
            kernel.launch((1, 1, 1), 32, Arguments(), 100_000)
    # What is still on its way is waited for when it is needed.
    assert nvrtc.load_kernel(source, "kernel", device, (("WIDTH", 16),))._cubin.result() == b"code"
    assert kernel._cubin.result() == b"code"
    assert sorted(compiled) == [8, 16]

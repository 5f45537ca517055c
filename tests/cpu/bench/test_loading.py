"""Reading beside which loading is measured, and the command that a table names."""

import argparse
from pathlib import Path

import pytest

from bench import loading

pytestmark = pytest.mark.cpu


def test_a_file_that_shrinks_ends_the_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    assert loading.read_raw([path], 2) > 0
    read = loading.os.preadv

    def shrinking(*arguments: object) -> int:
        path.write_bytes(bytes(10))
        return read(*arguments)

    monkeypatch.setattr(loading.os, "preadv", shrinking)
    with pytest.raises(OSError, match=r"model\.safetensors became shorter"):
        loading.read_raw([path], 2)


@pytest.mark.parametrize(
    ("model", "named"), [(None, "loading --gib 0.5 "), ("a/folder", "loading --model a/folder ")]
)
def test_the_table_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str | None, named: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setattr(loading, "load", lambda *arguments: 1.0)
    arguments = argparse.Namespace(model=model, gib=0.5, dtype="bfloat16", device="cpu", rounds=1)
    assert named in loading.measure(tmp_path, arguments)

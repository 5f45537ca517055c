"""Names of models: which folder each one means, and how the made one appears."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.checkpoint_folder import cache_folder, checkpoint_folder, draft_folder
from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.config.model import load_model_config
from stagecoach.errors import ConfigError
from stagecoach.model import tiny
from stagecoach.resolve import resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stagecoach"


def _replace_writer(monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]) -> None:
    def write_tiny_model(folder: Path, config: dict[str, Any], seed: int) -> None:
        write(folder)

    monkeypatch.setattr(tiny, "write_tiny_model", write_tiny_model)


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert checkpoint_folder(str(tmp_path)) == tmp_path


def test_a_draft_may_be_a_path_too(tmp_path: Path) -> None:
    assert draft_folder(str(tmp_path)) == tmp_path


def test_a_home_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert checkpoint_folder("~/model") == tmp_path / "model"


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_no_folder_is_refused(tmp_path: Path, *, is_file: bool) -> None:
    path = tmp_path / "model"
    if is_file:
        path.touch()
    with pytest.raises(ConfigError, match=r"^--model=.* is not a folder .*demo or tiny\)"):
        checkpoint_folder(str(path))
    with pytest.raises(
        ConfigError, match=r"^--speculative-config model=.*demo-draft or tiny-draft"
    ):
        draft_folder(str(path))


def test_names_of_drafts_are_no_names_of_models() -> None:
    with pytest.raises(ConfigError, match="--model=tiny-draft: "):
        checkpoint_folder("tiny-draft")
    with pytest.raises(ConfigError, match="--speculative-config model=tiny: "):
        draft_folder("tiny")


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stagecoach"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / "home" / ".cache" / "stagecoach"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "stagecoach"


def test_tiny_is_a_complete_checkpoint(cache: Path) -> None:
    folder = checkpoint_folder("tiny")
    assert folder.parent == cache
    assert load_model_config(folder).model_type == "kimi_k3"
    assert list(folder.glob("*.safetensors"))


def test_tiny_draft_is_a_draft_of_tiny(cache: Path) -> None:
    config = EngineConfig(model="tiny", speculative_config=SpeculativeConfig(model="tiny-draft"))
    resolved = resolve(config)
    assert resolved.speculation is not None
    assert resolved.speculation.checkpoint.parent == resolved.checkpoint.parent == cache
    assert list(resolved.speculation.checkpoint.glob("*.safetensors"))
    assert draft_folder("tiny-draft") == resolved.speculation.checkpoint


def test_demo_draft_is_a_draft_of_demo_alone(cache: Path) -> None:
    speculative = SpeculativeConfig(model="demo-draft")
    assert resolve(EngineConfig(model="demo", speculative_config=speculative)).num_draft_tokens == 7
    with pytest.raises(ConfigError, match="the draft's hidden_size=256 and the target's"):
        resolve(EngineConfig(model="tiny", speculative_config=speculative))


def test_tiny_is_made_once_and_appears_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").write_text("{}", encoding="utf-8")

    _replace_writer(monkeypatch, write)
    folder = checkpoint_folder("tiny")
    assert checkpoint_folder("tiny") == folder
    assert len(written) == 1 and written[0] != folder
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert (folder / "config.json").read_text(encoding="utf-8") == "{}"


def test_a_failure_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("disk full")

    _replace_writer(monkeypatch, write)
    with pytest.raises(OSError, match="disk full"):
        checkpoint_folder("tiny")
    assert list(cache.iterdir()) == []


def test_who_comes_second_takes_what_the_first_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_first(folder: Path) -> None:
        (folder / "config.json").write_text("first", encoding="utf-8")

    def write_while_another_does(folder: Path) -> None:
        (folder / "config.json").write_text("second", encoding="utf-8")
        _replace_writer(monkeypatch, write_first)
        checkpoint_folder("tiny")

    _replace_writer(monkeypatch, write_while_another_does)
    folder = checkpoint_folder("tiny")
    assert (folder / "config.json").read_text(encoding="utf-8") == "first"
    assert list(cache.iterdir()) == [folder]

"""Small drafts that the draft tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.draft.tiny import write_tiny_draft

WriteDraft = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="session")
def write_draft(tmp_path_factory: pytest.TempPathFactory) -> WriteDraft:
    """Writes a random draft of a config to a fresh folder."""

    def write(config: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp("draft")
        write_tiny_draft(folder, config, seed=1)
        return folder

    return write

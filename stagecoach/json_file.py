"""The JSON files of a checkpoint folder, each of which holds one object.

Owns the errors of reading them; knows none of their keys.
"""

import json
from pathlib import Path
from typing import Any

from stagecoach.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Raises:
        CheckpointError: the file cannot be read, is no JSON in UTF-8, or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value

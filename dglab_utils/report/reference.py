"""Published figures, each with its source, from `data/reference/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dglab_utils.errors import LabError
from dglab_utils.paths import REFERENCE


def reference(name: str, folder: Path = REFERENCE) -> dict[str, Any]:
    """The content of `data/reference/<name>.yaml`.

    Raises:
        LabError: no such file, or one that is no YAML mapping.
    """
    path = folder / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise LabError(f"{path.name}: no such reference file; there are {there}") from None
    except yaml.YAMLError as error:
        raise LabError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise LabError(f"{path}: holds {type(content).__name__}, want a mapping")
    return content

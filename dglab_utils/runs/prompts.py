"""Files of prompts: text, a prompt a line, empty lines left out."""

from __future__ import annotations

from pathlib import Path

from dglab_utils.errors import LabError


def lines_of(path: Path) -> list[str]:
    """The prompts of a file. Raises LabError where it cannot be read or holds none."""
    try:
        # Lines end as in an editor; splitlines() would end them at a form feed too.
        lines = [line.rstrip("\r") for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read ({error}); give a text file, a prompt a line") from None
    if not lines:
        raise LabError(f"{path}: no prompt in it; write one a line")
    return lines

"""The one exception that a user is meant to read.

Everything a user can get wrong (a name, a value, a file) is raised as `LabError` with a single line that says
what is wrong, where, and what to do. The command line prints that line and exits with `exit_status`; notebooks
show it as an ordinary exception. Programming errors are not wrapped: they keep their traceback.
"""

from __future__ import annotations

import re


class LabError(ValueError):
    """A mistake in what was asked for, told in one line.

    It is a `ValueError`, so that library callers need not know the class.
    """

    exit_status = 2


def checkpoint_error(source: str, error: Exception) -> LabError:
    """One line for what Transformers' `from_pretrained` says in many, with the remedy."""
    text = " ".join(str(error).split())
    lowered = text.lower()
    if "trust_remote_code" in text:
        return LabError(f"{source}: needs Python code from the checkpoint; read it, then pass trust_remote_code=True")
    if "not a valid model identifier" in lowered:
        return LabError(
            f"{source}: no such model on the Hub, or a private one; check its name, log in (`hf auth login`)"
        )
    if "gated repo" in lowered or re.search(r"\b40[13] client error", lowered):
        return LabError(f"{source}: gated or private; accept its terms on its page and log in with `hf auth login`")
    if "safetensors" in text and "no file named" in text:
        return LabError(f"{source}: has no safetensors weights; other formats are not read")
    if re.search(r"couldn't connect|connection error|offline|max retries", lowered):
        return LabError(f"{source}: neither a folder here nor reachable on the Hub; check the name and the network")
    return LabError(f"{source}: cannot be loaded: {text[:300]}")

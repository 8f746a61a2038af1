"""What `from_pretrained` says in many lines is one, with a remedy that fits."""

from __future__ import annotations

import pytest

from dglab_utils.errors import checkpoint_error


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("You are trying to access a gated repo.\nMake sure to have access", "gated or private; accept its terms"),
        ("401 Client Error: Unauthorized for url", "gated or private; accept its terms"),
        ("a/b is not a local folder and is not a valid model identifier listed on the hub", "no such model on the Hub"),
        ("We couldn't connect to the hub to load the files", "check the name and the network"),
        ("requires you to execute code; set trust_remote_code=True", "needs Python code from the checkpoint"),
        ("size mismatch: 4032 against 401", "cannot be loaded: size mismatch: 4032 against 401"),
        ("Couldn't instantiate the backend tokenizer", "cannot be loaded: Couldn't instantiate"),
    ],
)
def test_remedies(said, told):
    error = str(checkpoint_error("a/b", OSError(said)))
    assert error.startswith("a/b: ") and told in error and "\n" not in error

"""Entering `generate()` without editing it: one instance's methods or inputs, changed while a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from dglab_utils.errors import LabError


@contextmanager
def replaced(model: PreTrainedModel, **methods: Callable) -> Iterator[None]:
    """Inside, calls of `model.NAME` reach the given functions (which take no `self`); after, the class's own again.

    Only this instance is touched, never the class, so that other models in the process are not affected.

    Raises:
        LabError: the model is no DiffusionGemma, or one of the methods is replaced already (contexts do not nest).
    """
    missing = [name for name in methods if not hasattr(type(model), name)]
    if missing:
        raise LabError(
            f"{type(model).__name__} has no {missing[0]}: give a DiffusionGemmaForBlockDiffusion "
            "(and a version of Transformers from 5.11 to 5.24)"
        )
    taken = [name for name in methods if name in vars(model)]
    if taken:
        raise LabError(f"this model is already being observed ({taken[0]} is replaced): leave the first context before")
    try:
        for name, method in methods.items():
            object.__setattr__(model, name, method)
        yield
    finally:
        for name in methods:
            vars(model).pop(name, None)


@contextmanager
def without_self_conditioning(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the decoder never sees the logits of the step before: every step is like the first of a canvas."""

    def dropped(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"self_conditioning_logits": None}

    handle = model.model.decoder.register_forward_pre_hook(dropped, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

"""Row by row: a batch in which chosen parts of the model compute each row as if it were alone.

    with row_wise(model, ["router", "self-conditioning"]):
        model.generate(**batch)

Kernels choose how to sum by the shape they are given, so a row of a batch and the same row alone may round
differently. Inside the context the chosen parts are called once for each row, with the shapes that the row has alone;
everything else stays a batch. With "all", encoder and decoder are: then each row has the bits of its single run, at the
speed of single runs.

No model code is edited or copied: the parts are modules, found by the names of their classes, whose `forward` is called
in a loop while the context lasts. One product is no module, the probabilities times the embedding in
self-conditioning; a `TorchFunctionMode` finds it by the weight that it multiplies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.utils import ModelOutput

from dglab_utils.errors import LabError

ALL = "all"
# Part to the ends of class names, in the order of a forward.
_CLASSES = {
    "norms": ("RMSNorm", "LayerNorm"),
    "attention": ("Attention",),
    "dense MLP": ("MLP",),
    "router": ("Router",),
    "experts": ("Experts",),
    "self-conditioning": ("SelfConditioning",),
}
# Arguments that all rows share, although their first dimension may be as long as the batch: a bias for each head.
_SHARED = ("position_bias",)
PARTS = (*_CLASSES, "LM head", ALL)


def parts_of(model: PreTrainedModel) -> list[str]:
    """Those of PARTS that this model has, "all" among them."""
    return [part for part in PARTS if part == ALL or modules_of(model, part)]


@contextmanager
def row_wise(model: PreTrainedModel, parts: Sequence[str]) -> Iterator[None]:
    """Inside, these parts of the model compute row by row. Contexts do not nest on one model.

    Args:
        model: a DiffusionGemma, or a causal language model of Transformers.
        parts: of PARTS; none changes nothing.

    Raises:
        LabError: a part that is unknown or that this model lacks; nested contexts; later, a static cache.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise LabError(f"row-wise: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if lacking := [part for part in parts if part != ALL and not modules_of(model, part)]:
        raise LabError(f"row-wise: {type(model).__name__} has no {lacking[0]}; it has {', '.join(parts_of(model))}")
    rows = _Rows()
    with ExitStack() as stack:
        for whole in _wholes(model):
            inner = _each_row(whole.forward, rows) if ALL in parts else whole.forward
            stack.enter_context(_forward_of(whole, rows.noted(inner)))
        for part in parts if ALL not in parts else ():
            for module in modules_of(model, part):
                stack.enter_context(_forward_of(module, _each_row(module.forward, rows)))
            if part == "self-conditioning":
                decoder = model.model.decoder
                product = _Product(decoder.embed_tokens.weight, rows)
                stack.enter_context(_forward_of(decoder, _within(product, decoder.forward)))
        yield


def _wholes(model: PreTrainedModel) -> list[nn.Module]:
    """What is given a batch: encoder and denoiser of a DiffusionGemma, any other model itself."""
    encoder = getattr(model.model, "encoder", None) if hasattr(model, "model") else None
    return [model] if encoder is None else [encoder, model]


def modules_of(model: PreTrainedModel, part: str) -> list[nn.Module]:
    """The modules that a part of PARTS is, but "all"; an empty list where this model has none."""
    if part == "LM head":
        head = model.get_output_embeddings()
        return [] if head is None else [head]
    found = [m for m in model.modules() if type(m).__name__.endswith(_CLASSES[part])]
    # One inside another would be cut twice; images are no rows of text.
    inner = {child for m in found for child in m.modules() if child is not m}
    vision = {m for name, tower in model.named_modules() if "vision" in name for m in tower.modules()}
    return [m for m in found if m not in inner and m not in vision]


@contextmanager
def _forward_of(module: nn.Module, forward: Callable) -> Iterator[None]:
    if "forward" in vars(module):
        raise LabError("row-wise: this model computes row by row already; leave the first context before")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _within(mode: TorchFunctionMode, forward: Callable) -> Callable:
    @wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return inside


class _Rows:
    """How many rows the batch has that is being computed, noted where it enters the model."""

    count = 1

    def noted(self, forward: Callable) -> Callable:
        """The same function, noting it; no hook, for generate() calls `forward`, which hooks do not see."""

        @wraps(forward)
        def noting(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("decoder_input_ids")
            if ids is None:
                ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
            if isinstance(ids, Tensor):
                self.count = len(ids)
            return forward(*args, **kwargs)

        return noting


def _each_row(forward: Callable, rows: _Rows) -> Callable:
    """The same function, called once for each row."""

    @wraps(forward)
    def looped(*args: Any, **kwargs: Any) -> Any:
        if rows.count == 1:
            return forward(*args, **kwargs)
        count, rows.count = rows.count, 1  # for parts inside of this one
        caches: dict[int, _Caches] = {}
        told = []
        try:
            for row in range(count):
                own_args = [cut(value, row, count, caches) for value in args]
                own_kwargs = cut(kwargs, row, count, caches)
                told.append(forward(*own_args, **own_kwargs))
        finally:
            rows.count = count
        for cache in caches.values():
            cache.give_back()
        return _joined(told, caches)

    return looped


def cut(value: Any, row: int, rows: int, caches: dict[int, _Caches]) -> Any:
    """What of an argument is the row's: a share of the first dimension, its own memory; what is shared stays."""
    if isinstance(value, Tensor):
        # One dimension longer than the batch is a range of positions, which rows share.
        if value.ndim == 0 or not len(value) or len(value) % rows or (value.ndim == 1 and len(value) != rows):
            return value
        share = len(value) // rows
        return value[row * share : (row + 1) * share].clone()
    if isinstance(value, Cache):
        return caches.setdefault(id(value), _Caches(value, rows)).of(row)
    if isinstance(value, dict):
        return {name: item if name in _SHARED else cut(item, row, rows, caches) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cut(item, row, rows, caches) for item in value)
    return value


def _joined(told: list[Any], caches: dict[int, _Caches]) -> Any:
    first = told[0]
    if isinstance(first, Tensor):
        return torch.cat(told)
    if isinstance(first, Cache):  # given back to the one that was cut, or one that each row made for itself
        given = next((cache.whole for cache in caches.values() if first is cache.of(0)), None)
        return _merged(copy.copy(first), told) if given is None else given
    if isinstance(first, ModelOutput):
        return type(first)(**{name: _joined([t[name] for t in told], caches) for name in first})
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items), caches) for items in zip(*told, strict=True))
    return first


class _Caches:
    """A dynamic cache as one for each row, and back."""

    def __init__(self, whole: Cache, rows: int):
        if isinstance(whole, StaticCache):
            raise LabError("row-wise: a static cache cannot be cut into rows; use the dynamic one")
        self.whole, self.rows = whole, [copy.copy(whole) for _ in range(rows)]
        for row, own in enumerate(self.rows):
            own.layers = [copy.copy(layer) for layer in whole.layers]
            for layer in own.layers:
                if layer.keys is not None and layer.keys.numel():
                    share = len(layer.keys) // rows
                    layer.keys, layer.values = (
                        kept[row * share : (row + 1) * share].clone() for kept in (layer.keys, layer.values)
                    )

    def of(self, row: int) -> Cache:
        return self.rows[row]

    def give_back(self) -> None:
        """Puts what the rows read into the whole."""
        _merged(self.whole, self.rows)


def _merged(whole: Cache, rows: list[Cache]) -> Cache:
    """`whole`, holding what the caches of the rows hold."""
    layers = []
    for of_rows in zip(*(own.layers for own in rows), strict=True):
        layer = copy.copy(of_rows[0])
        if layer.keys is not None:
            layer.keys, layer.values = (torch.cat([getattr(own, n) for own in of_rows]) for n in ("keys", "values"))
        layers.append(layer)
    whole.layers = layers
    return whole


class _Product(TorchFunctionMode):
    """Multiplies by one weight row by row."""

    def __init__(self, weight: Tensor, rows: _Rows):
        super().__init__()
        self.weight, self.rows = weight, rows

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[1] is self.weight:
            return torch.cat([func(row.clone(), self.weight) for row in args[0].chunk(self.rows.count)])
        return func(*args, **kwargs or {})

"""Where a batch begins to differ: every value of a forward, one row alone against copies of it, in the order computed.

    report = compare(model, work, copies=4)       # work(rows) runs the model on so many copies of one row
    report.first                                  # module, operation, share of the elements, largest difference
    report.by_module()                            # how far it spreads

Copies of a row must have the row's values, bit for bit. Each floating-point result of each operation that PyTorch
dispatches is cut into vectors along its last dimension; of a vector a checksum is kept, nothing else, so that comparing
takes no second set of activations. A vector of the batch that the single row does not have as often as there are copies
is a difference. Counting, and not matching places, lets operations that reorder rows (sorting tokens by expert) pass.

Left out: results that are views of others, and copies, which change no number; integers and truth values, which follow
from floats; what sums over rows, and therefore is of none (tokens an expert gets); draws of `sampling.noise`, which are
made row by row.

This module knows no model by name: anything whose `work` takes a number of rows can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from dglab_utils.errors import LabError
from dglab_utils.sampling import noise

OUTSIDE = "(sampler)"  # module of an operation that no module of the model computes
CHUNK = 1 << 20  # elements of which checksums are computed at a time: 8 MB of 64-bit products
_COPIES = (torch.ops.aten.clone.default,)  # made or not by how a tensor lies in memory, which batches change
LOOKED_AT = 4096  # vectors that differ, of which the nearest of the single row is looked for
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Work = Callable[[int], Any]


@dataclass(frozen=True)
class Operation:
    """One operation's result, in one row and in copies of it.

    Attributes:
        index: in the order of execution.
        module: innermost module that it is computed in; OUTSIDE where none is.
        name: PyTorch's, such as `aten.mm.default`.
        vectors: of one row.
        differing: vectors of the batch, over all copies, that the single row has not as often.
        copies: rows of the batch.
    """

    index: int
    module: str
    name: str
    vectors: int
    differing: int
    copies: int

    @property
    def share(self) -> float:
        """Of the batch's vectors, those that differ."""
        return self.differing / (self.vectors * self.copies)


@dataclass(frozen=True)
class First:
    """The first operation whose value differs, looked at element by element.

    Attributes:
        operation: which.
        elements: share of the batch's elements that differ in value; 0 where only the sign of a zero does.
        largest: difference at most, in absolute value; not finite where a value is.
        magnitude: largest value there is in the single row, to compare it with.
        another_path: what the batch computed instead, where it is another operation or another shape; else empty.
    """

    operation: Operation
    elements: float
    largest: float
    magnitude: float
    another_path: str = ""


@dataclass(frozen=True)
class Divergence:
    """What `compare` found.

    Attributes:
        copies: rows of the batch.
        operations: every operation compared, in order. Up to where the paths part, if they do.
        first: None where nothing differs.
    """

    copies: int
    operations: tuple[Operation, ...]
    first: First | None

    def by_module(self) -> dict[str, float]:
        """Module to the largest share of differing vectors of its operations, in the order of execution."""
        shares: dict[str, float] = {}
        for operation in self.operations:
            shares[operation.module] = max(shares.get(operation.module, 0.0), operation.share)
        return shares


def compare(model: nn.Module, work: Work, *, copies: int = 4, spread: bool = True) -> Divergence:
    """Compares one row with copies of it, operation by operation.

    Runs `work` three times for one row and two or three times for the copies: shapes of both, checksums of the one,
    comparison of the other, and the values at the first difference.

    Args:
        model: whose modules are named.
        work: runs the model on so many copies of one row; called again, it does the same.
        copies: 2 or more.
        spread: go on behind the first difference, for `by_module`.

    Raises:
        LabError: fewer than 2 copies; a work that is not the same when repeated.
    """
    if copies < 2:
        raise LabError(f"copies {copies}: a batch to compare with has 2 or more")
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    one = _run(_Shapes(), names, work, 1)
    many = _run(_Alignment(one, copies), names, work, copies)
    along = [seen.along for seen in many if not seen.parted]
    known = len(along)
    checksums = _run(_Checksums(along), names, work, 1)
    if len(checksums) < known:
        raise LabError(f"work: {known} operations once, {len(checksums)} when repeated; it must do the same each time")
    found = _run(_Comparison(along, checksums, copies, stop=not spread), names, work, copies)
    operations = tuple(
        Operation(i, module=one[i].place[0], name=one[i].place[1], vectors=vectors, differing=differing, copies=copies)
        for i, (vectors, differing) in found
    )
    first = next((op for op in operations if op.differing), None)
    if first is not None:
        values = [_run(_Value(first.index), names, work, rows)[0] for rows in (1, copies)]
        one_row, rows = (_rows_first(value, along[first.index]) for value in values)
        return Divergence(copies, operations, First(first, *_differences(one_row, rows, copies)))
    if known < len(one) or known < len(many):
        here = one[known] if known < len(one) else many[known]
        instead = " in ".join(reversed(many[known].place)) if known < len(many) else "nothing"
        module, name = here.place
        operation = Operation(known, module, name, 0, 0, copies)
        return Divergence(copies, operations, First(operation, 1.0, 0.0, 0.0, another_path=instead))
    return Divergence(copies, operations, None)


# -- what an operation computes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """One result: where, its shape, and the shapes of the tensors it was computed from.

    Attributes:
        along: the dimension in which the batch is longer; -1 where nothing depends on it; None where the result is of
            no row.
        parted: the single row computes something else here.
    """

    place: tuple[str, str]  # module, operation
    shape: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    along: int | None = None
    parted: bool = False


class _Watch(TorchDispatchMode):
    """Calls `saw` with each new floating-point result, in order, and knows the module it is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.index = -1
        self.told: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if noise.drawing() or func in _COPIES:
            return results
        returned = results if isinstance(results, (tuple, list)) else (results,)
        declarations = func._schema.returns
        if len(declarations) < len(returned):  # one list of tensors
            declarations = [*declarations] * len(returned)
        for value, declared in zip(returned, declarations, strict=False):
            is_view = declared.alias_info is not None and not declared.alias_info.is_write
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and not is_view:
                self.index += 1
                self.saw(value, func, args, kwargs or {})
        return results

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        raise NotImplementedError


class _Done(BaseException):
    """Leaves a work that has told enough; no `except Exception` on the way may hold it."""


def _run(watch: _Watch, names: dict[nn.Module, str], work: Work, rows: int) -> list[Any]:
    """What the watch has told after `work(rows)`, with the names of the modules entered on the way."""
    with _entered(names, watch.modules), torch.no_grad(), suppress(_Done), watch:
        work(rows)
    return watch.told


@contextmanager
def _entered(names: dict[nn.Module, str], stack: list[str]) -> Iterator[None]:
    """Keeps the modules that are being computed on the stack."""
    root, *parts = names
    official, own = root.forward, vars(root).get("forward")

    @wraps(official)
    def forward(*args: Any, **kwargs: Any) -> Any:
        stack.append(names[root])
        try:
            return official(*args, **kwargs)
        finally:
            stack.pop()

    def enter(name: str) -> Callable:
        return lambda *_: stack.append(name)

    handles = []
    for module in parts:
        handles += [
            module.register_forward_pre_hook(enter(names[module])),
            module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True),
        ]
    root.forward = forward  # generate() calls it past the hooks of the root
    try:
        yield
    finally:
        del root.forward
        if own is not None:
            root.forward = own
        for handle in handles:
            handle.remove()


class _Shapes(_Watch):
    """Tells a `_Seen` of each result."""

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        self.told.append(self.seen(value, func, _tensors(args, kwargs)))

    def seen(self, value: Tensor, func: Any, inputs: list[Tensor]) -> _Seen:
        place = (self.modules[-1] if self.modules else OUTSIDE, str(func))
        return _Seen(place, tuple(value.shape), tuple(tuple(x.shape) for x in inputs))


class _Alignment(_Shapes):
    """Tells a `_Seen` of each result of the batch, knowing those of the single row; ends where the paths part."""

    def __init__(self, one: list[_Seen], copies: int) -> None:
        super().__init__()
        self.one, self.copies = one, copies
        self.of_no_row = WeakTensorKeyDictionary()  # what sums over rows, and what is computed from that

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        inputs = _tensors(args, kwargs)
        many = self.seen(value, func, inputs)
        one = self.one[self.index] if self.index < len(self.one) else None
        if one is None or one.place != many.place:
            self.told.append(replace(many, parted=True))
            raise _Done
        along = self.aligned(one, many)
        if along == -1 and any(x in self.of_no_row for x in inputs):
            along = None
        if along is None:
            self.of_no_row[value] = True
        self.told.append(replace(many, along=along))

    def aligned(self, one: _Seen, many: _Seen) -> int | None:
        if one.shape == many.shape:
            return -1 if one.inputs == many.inputs else None
        longer = [d for d, (a, b) in enumerate(zip(one.shape, many.shape, strict=False)) if a != b]
        if len(one.shape) != len(many.shape) or len(longer) != 1:
            return None
        return longer[0] if many.shape[longer[0]] == self.copies * one.shape[longer[0]] else None


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]


class _Checksums(_Watch):
    """Tells the sorted checksums of each result's vectors; None where they are not compared."""

    def __init__(self, along: list[int | None]) -> None:
        super().__init__()
        self.along = along

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        if self.index >= len(self.along):
            raise _Done
        along = self.along[self.index]
        self.told.append(None if along is None else checksums(_rows_first(value, along)).sort().values)


class _Comparison(_Watch):
    """Tells (index, (vectors of one row, differing vectors of the batch)) of each result that is compared."""

    def __init__(self, along: list[int | None], of_one: list[Tensor | None], copies: int, *, stop: bool) -> None:
        super().__init__()
        self.along, self.of_one, self.copies, self.stop = along, of_one, copies, stop

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        if self.index >= len(self.along):
            raise _Done
        along, expected = self.along[self.index], self.of_one[self.index]
        if along is None or expected is None:
            return
        there = checksums(_rows_first(value, along))
        times = 1 if along == -1 else self.copies
        differing = _surplus(there, expected, times)
        self.told.append((self.index, (len(expected), differing * (self.copies // times))))
        if differing and self.stop:
            raise _Done


class _Value(_Watch):
    """Tells the value of one operation's result."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        if self.index == self.wanted:
            self.told.append(value.clone())
            raise _Done


# -- checksums -----------------------------------------------------------------------------------------------

_weights: dict[torch.device, Tensor] = {}


def checksums(vectors: Tensor) -> Tensor:
    """`[N]` int64, of `[N, F]` floating-point vectors: bits as integers, times odd random weights, summed modulo 2^64.

    Two vectors that differ in one element never have the same (an odd number has an inverse modulo 2^64); others have
    it with a chance of about 2^-64.
    """
    bits = vectors.contiguous().view(_BITS[vectors.element_size()])
    weights = _odd_weights(bits.shape[1], bits.device)
    step = max(1, CHUNK // bits.shape[1])
    parts = [(bits[i : i + step].long() * weights).sum(-1) for i in range(0, len(bits), step)]
    return torch.cat(parts)


def _odd_weights(count: int, device: torch.device) -> Tensor:
    if device not in _weights or len(_weights[device]) < count:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        _weights[device] = (drawn | 1).to(device)
    return _weights[device][:count]


def _rows_first(value: Tensor, along: int | None) -> Tensor:
    """`[N, F]`, vectors of the last dimension that is not the rows'; the rows come first."""
    if value.ndim == 0:
        return value.reshape(1, 1)
    moved = value if along in (-1, None) else value.movedim(along, 0)
    return moved.reshape(-1, moved.shape[-1]) if moved.ndim > 1 else moved.reshape(-1, 1)


def _surplus(there: Tensor, expected: Tensor, times: int) -> int:
    """How many of the checksums are not among the expected, each of which may be there so many times."""
    kinds, kind_of = torch.unique(torch.cat([expected, there]), return_inverse=True)
    wanted = times * torch.bincount(kind_of[: len(expected)], minlength=len(kinds))
    counted = torch.bincount(kind_of[len(expected) :], minlength=len(kinds))
    return int((counted - wanted).clamp(min=0).sum())


def _differences(one: Tensor, many: Tensor, copies: int) -> tuple[float, float, float]:
    """(share of the batch's elements that differ, largest difference, largest value of the single row).

    In place where the rows have kept theirs; else each vector that differs against the nearest that lacks a match.
    """
    magnitude = float(one.abs().max())
    other = many if len(many) == len(one) else many.reshape(copies, *one.shape)  # as many: it depends on no row
    in_place = other != one
    moved, single = checksums(many), checksums(one)
    kept = (moved.reshape(-1, len(one)) == single).float().mean()
    if kept >= 0.5:
        return float(in_place.float().mean()), float((other.double() - one.double()).abs().max()), magnitude
    left_many, left_one = many[~torch.isin(moved, single)], one[~torch.isin(single, moved)]
    if not len(left_one):
        left_one = one
    some, apart, largest = left_many[:LOOKED_AT], 0, 0.0
    step = max(1, CHUNK // len(left_one))
    for begin in range(0, len(some), step):  # a piece of the table of distances at a time
        these = some[begin : begin + step]
        nearest = left_one[torch.cdist(these.double(), left_one.double()).argmin(dim=1)]
        apart += int((these != nearest).sum())
        largest = max(largest, float((these.double() - nearest.double()).abs().max()))
    return apart / some.numel() * left_many.numel() / many.numel(), largest, magnitude

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
CHUNK = 1 << 17  # words of which checksums are computed at a time: 1 MB, which a cache holds
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


def compare(model: nn.Module, work: Work, *, copies: int = 4) -> Divergence:
    """Compares one row with copies of it, operation by operation.

    Runs `work` once for one row, keeping checksums, and once for the copies, comparing; and for both again as far as
    the first difference, for its values. Results whose last dimension is the rows' take another run of both, if there
    are any.

    Args:
        model: whose modules are named.
        work: runs the model on so many copies of one row; called again, it does the same.
        copies: 2 or more.

    Raises:
        LabError: fewer than 2 copies; a work that is not the same when repeated.
    """
    if copies < 2:
        raise LabError(f"copies {copies}: a batch to compare with has 2 or more")
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    one = _run(_Reference(), names, work, 1)
    many = _run(_Comparison(one, copies), names, work, copies)
    aligned = [(i, seen) for i, (seen, _) in enumerate(many) if not seen.parted]
    known = len(aligned)
    found = {i: counted for i, (_, counted) in enumerate(many) if counted is not None}
    if sideways := {i: seen.along for i, seen in aligned if _sideways(seen)}:
        found |= _looked_at_again(sideways, names, work, copies)
    operations = tuple(
        Operation(
            i, module=one[i][0].place[0], name=one[i][0].place[1], vectors=vectors, differing=differing, copies=copies
        )
        for i, (vectors, differing) in sorted(found.items())
    )
    first = next((op for op in operations if op.differing), None)
    if first is not None:
        values = [value for rows in (1, copies) for value in _run(_Value(first.index), names, work, rows)]
        if len(values) < 2:
            raise LabError(f"work: no operation {first.index} when repeated; it must do the same each time")
        one_row, rows = (_rows_first(value, many[first.index][0].along) for value in values)
        return Divergence(copies, operations, First(first, *_differences(one_row, rows, copies)))
    if known < len(one) or known < len(many):
        here = (one if known < len(one) else many)[known][0]
        instead = " in ".join(reversed(many[known][0].place)) if known < len(many) else "nothing"
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


class _Reference(_Watch):
    """Tells (what was seen, sorted checksums of its vectors) of each result of the single row."""

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        seen = self.seen(value, func, _tensors(args, kwargs))
        self.told.append((seen, checksums(_rows_first(value, -1)).sort().values))

    def seen(self, value: Tensor, func: Any, inputs: list[Tensor]) -> _Seen:
        place = (self.modules[-1] if self.modules else OUTSIDE, str(func))
        return _Seen(place, tuple(value.shape), tuple(tuple(x.shape) for x in inputs))


class _Comparison(_Reference):
    """Tells (what was seen, (vectors of one row, differing vectors of the batch)) of each result of the batch, knowing
    those of the single row; None where they are not compared. Ends where the paths part.
    """

    def __init__(self, one: list[tuple[_Seen, Tensor]], copies: int) -> None:
        super().__init__()
        self.one, self.copies = one, copies
        self.of_no_row = WeakTensorKeyDictionary()  # what sums over rows, and what is computed from that

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        inputs = _tensors(args, kwargs)
        many = self.seen(value, func, inputs)
        one, expected = self.one[self.index] if self.index < len(self.one) else (None, None)
        if one is None or one.place != many.place:
            self.told.append((replace(many, parted=True), None))
            raise _Done
        along = self.aligned(one, many)
        if along == -1 and any(x in self.of_no_row for x in inputs):
            along = None
        if along is None:
            self.of_no_row[value] = True
        many = replace(many, along=along)
        counted = None
        if along is not None and expected is not None and not _sideways(many):
            counted = _counted(checksums(_rows_first(value, along)), expected, along, self.copies)
        self.told.append((many, counted))

    def aligned(self, one: _Seen, many: _Seen) -> int | None:
        if one.shape == many.shape:
            return -1 if one.inputs == many.inputs else None
        longer = [d for d, (a, b) in enumerate(zip(one.shape, many.shape, strict=False)) if a != b]
        if len(one.shape) != len(many.shape) or len(longer) != 1:
            return None
        return longer[0] if many.shape[longer[0]] == self.copies * one.shape[longer[0]] else None


def _sideways(seen: _Seen) -> bool:
    """Whether the rows are its last dimension, so that its vectors lie along another."""
    return len(seen.shape) > 1 and seen.along == len(seen.shape) - 1


def _looked_at_again(
    along: dict[int, int | None], names: dict[nn.Module, str], work: Work, copies: int
) -> dict[int, tuple[int, int]]:
    """(vectors of one row, differing vectors of the batch) of the results of these indices, seen along the rows."""
    of_one = dict(_run(_Again(along), names, work, 1))
    of_many = dict(_run(_Again(along), names, work, copies))
    if len(of_one) < len(along):
        raise LabError("work: it did less when repeated; it must do the same each time")
    return {i: _counted(of_many[i], of_one[i].sort().values, along[i], copies) for i in along if i in of_many}


class _Again(_Watch):
    """Tells (index, checksums) of the results of some indices, their vectors cut with the rows first."""

    def __init__(self, along: dict[int, int | None]) -> None:
        super().__init__()
        self.along = along

    def saw(self, value: Tensor, func: Any, args: tuple, kwargs: dict) -> None:
        if self.index in self.along:
            self.told.append((self.index, checksums(_rows_first(value, self.along[self.index]))))
            if len(self.told) == len(self.along):
                raise _Done


def _counted(there: Tensor, expected: Tensor, along: int | None, copies: int) -> tuple[int, int]:
    """(vectors of one row, differing vectors of the batch). What depends on no row is there once, and is of all."""
    times = 1 if along == -1 else copies
    return len(expected), _surplus(there, expected, times) * (copies // times)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]


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
    """`[N]` int64, of `[N, F]` floating-point vectors: words of their bits, mixed and summed modulo 2^64.

    A word is eight bytes where vectors are so many long, else an element. It is multiplied by an odd random number of
    its place, its upper half is folded into the lower, and it is multiplied by another: each can be undone, so that two
    vectors that differ in one word never have the same sum. Without the fold, differences in the upper bits of two
    words, such as two signs, would cancel. Others have the same with a chance of about 2^-64.
    """
    rows, size = vectors.contiguous(), vectors.element_size()
    if rows.shape[1] * size % 8:
        bits = rows.view(_BITS[size])
    else:
        bits = (rows if not rows.storage_offset() * size % 8 else rows.clone()).view(torch.int64)
    first, second = _odd_weights(bits.shape[1], bits.device)
    step = max(1, CHUNK // bits.shape[1])
    sums = []
    for i in range(0, len(bits), step):
        words = bits[i : i + step] * first
        words ^= (words >> 32).bitwise_and_(0xFFFFFFFF)
        words *= second
        sums.append(words.sum(-1))
    return torch.cat(sums)


def _odd_weights(count: int, device: torch.device) -> Tensor:
    """`[2, count]` odd numbers of 64 bits."""
    if device not in _weights or _weights[device].shape[1] < count:
        # A place's are the same however many there are: a shorter vector's sum does not change.
        drawn = [
            torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(s)) for s in (0, 1)
        ]
        _weights[device] = (torch.stack(drawn) | 1).to(device)
    return _weights[device][:, :count]


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

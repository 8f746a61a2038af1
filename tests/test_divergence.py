"""Where a batch begins to differ: planted differences are found and named, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dglab_utils.errors import LabError
from dglab_utils.measure import divergence
from dglab_utils.measure.divergence import OUTSIDE, checksums, compare
from dglab_utils.models import build
from dglab_utils.sampling.noise import row_noise


class Planted(TorchDispatchMode):
    """Moves one element of the last row: one operation of one module, in batches only. By default by one unit in the
    last place.
    """

    def __init__(self, model: nn.Module, module: str, operation: str, move=None):
        super().__init__()
        self.operation, self.inside, self.rows, self.planted = operation, False, 1, 0
        self.move = move or (lambda value: torch.nextafter(value, torch.tensor(torch.inf)))
        target = model.get_submodule(module)
        target.register_forward_pre_hook(self.enter)
        target.register_forward_hook(self.leave)

    def enter(self, _, args):
        self.inside = True

    def leave(self, *_):
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.inside and self.rows > 1 and str(func) == self.operation and not self.planted:
            self.planted += 1
            flat = result.view(-1)
            flat[-2] = self.move(flat[-2])
        return result


@pytest.fixture(scope="module")
def model():
    return build("toy-1m")


def generating(model, planted=None, steps=1):
    prompt = torch.randint(2, 900, (1, 8), generator=torch.Generator().manual_seed(0))

    def work(rows):
        if planted is not None:
            # A run that was left in the middle of the module never left it by its hook.
            planted.rows, planted.planted, planted.inside = rows, 0, False
        with row_noise(model, [3] * rows):
            model.generate(prompt.repeat(rows, 1), max_new_tokens=256, max_denoising_steps=steps)

    return work


LAYERS = len(build("toy-1m").model.decoder.layers)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    ("part", "operation"),
    [("self_attn.o_proj", "aten.mm.default"), ("mlp.down_proj", "aten.mm.default"), ("router.proj", "aten.mm.default")],
)
def test_a_planted_difference_is_named(layer, part, operation):
    own = build("toy-1m")
    module = f"model.decoder.layers.{layer}.{part}"
    plain = compare(own, generating(own), copies=2)
    planted = Planted(own, module, operation)
    with planted:
        found = compare(own, generating(own, planted), copies=2)
    # Other machines' kernels may differ by themselves, and the planted one comes on top.
    more = next(op for op, by_itself in zip(found.operations, plain.operations, strict=True) if op != by_itself)
    assert (more.module, more.name) == (module, operation)
    assert more.differing == plain.operations[more.index].differing + 1
    if plain.first is None:
        assert found.first.operation == more and more.differing == 1
        assert found.first.elements == pytest.approx(1 / (256 * 2 * own.get_submodule(module).weight.shape[0]))
        assert 0 < found.first.largest < 1e-4


def test_a_difference_spreads_to_the_layers_after_it():
    """Of one position, and after attention of the next layer of all."""
    own = build("toy-1m")
    plain = compare(own, generating(own), copies=2).by_module()
    planted = Planted(own, "model.decoder.layers.0.mlp.down_proj", "aten.mm.default", move=lambda value: value + 1.0)
    with planted:
        shares = compare(own, generating(own, planted), copies=2).by_module()
    more = {name: share - plain[name] for name, share in shares.items()}
    assert not any(share for name, share in more.items() if "encoder" in name)
    assert more["model.decoder.layers.0.self_attn.o_proj"] == 0
    if not any(plain.values()):  # where the machine's kernels do not differ by themselves
        assert shares["model.decoder.layers.0.mlp.down_proj"] == pytest.approx(1 / 512)
        assert 0.45 < shares["model.decoder.layers.1.self_attn.o_proj"] <= 0.5  # nearly all of one of two rows


def test_a_model_of_single_rows_raises_no_alarm():
    """Elementwise work only, a hundred inputs: no row can know of another."""

    class Alone(nn.Module):
        def forward(self, x):
            return (x * 3 + 1).clamp(min=0.5) / 7

    alone = Alone()
    for seed in range(100):
        row = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed))
        found = compare(alone, lambda rows, row=row: alone(row.repeat(rows, 1, 1)), copies=3)
        assert found.first is None and len(found.operations) == 5  # with the copying


def test_rows_may_be_reordered_but_not_changed():
    class Sorting(nn.Module):
        """Tokens by expert, as grouped experts do, and what an expert gets of them."""

        def forward(self, x, wrong=False):
            flat = x.flatten(0, 1)
            order = flat[:, 0].argsort()
            counts = torch.histc((flat[:, 0] > 0).float(), bins=2)  # grows with the batch, and is of no row
            taken = flat[order] * 2.0
            if wrong:
                taken[0, 1] += 1.0
            return taken / (counts.sum() / counts.sum())

    sorting = Sorting()
    row = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    fine = compare(sorting, lambda rows: sorting(row.repeat(rows, 1, 1)), copies=4)
    assert fine.first is None
    spoilt = compare(sorting, lambda rows: sorting(row.repeat(rows, 1, 1), wrong=rows > 1), copies=4)
    assert spoilt.first.another_path or spoilt.first.operation.differing


def test_another_path_is_told():
    class Forked(nn.Module):
        def forward(self, x):
            return x.exp() if len(x) == 1 else x.sin()

    forked = Forked()
    found = compare(forked, lambda rows: forked(torch.ones(rows, 3)), copies=2)
    assert found.first.another_path == "aten.sin.default in Forked"
    assert found.first.operation.name == "aten.exp.default"


def test_a_copy_is_no_other_path():
    """Whether a tensor must be copied first depends on how it lies in memory, and changes no number."""

    class Copying(nn.Module):
        def forward(self, x):
            return (x.clone() if len(x) > 1 else x).exp() + 1

    copying = Copying()
    found = compare(copying, lambda rows: copying(torch.ones(rows, 3)), copies=3)
    assert found.first is None and [op.name for op in found.operations][-2:] == ["aten.exp.default", "aten.add.Tensor"]


def test_the_sign_of_a_zero_is_no_value():
    class Signed(nn.Module):
        def forward(self, x):
            return x * (1.0 if len(x) == 1 else torch.tensor([1.0, -1.0, 1.0]))

    signed = Signed()
    found = compare(signed, lambda rows: signed(torch.zeros(rows, 3)), copies=2)
    assert found.first is None or found.first.elements == 0.0


@pytest.mark.parametrize("looked_at", [4096, 40])
def test_what_moved_is_measured_in_pieces(monkeypatch, looked_at):
    """Rows in another order, some of them changed by 0.5 in one of four elements; by hand, whatever the pieces."""
    monkeypatch.setattr(divergence, "CHUNK", 300)
    monkeypatch.setattr(divergence, "LOOKED_AT", looked_at)
    one = torch.arange(400.0).reshape(100, 4)
    many = one.repeat(2, 1).flip(0).clone()
    many[:100, 0] += 0.5
    elements, largest, magnitude = divergence._differences(one, many, copies=2)
    assert (elements, largest, magnitude) == (pytest.approx(100 / 800), 0.5, 399.0)


def test_the_sampler_has_a_name_of_its_own(model):
    """Temperature, softmax and entropy are computed outside of every module."""
    names = {op.name for op in compare(model, generating(model), copies=2).operations if op.module == OUTSIDE}
    assert {"aten._softmax.default", "aten.div.Tensor"} <= names


def test_checksums_see_one_bit():
    vectors = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    same = checksums(vectors)
    assert torch.equal(same, checksums(vectors.clone())) and len(same.unique()) == 50
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        these = vectors.to(dtype)
        moved = these.clone()
        moved[20, 3] = torch.nextafter(moved[20, 3], torch.tensor(torch.inf, dtype=dtype))
        assert (checksums(these) != checksums(moved)).nonzero().flatten().tolist() == [20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("length", [7, 8, 64])
def test_checksums_see_two_differences(dtype, length):
    """Two signs, two last places, two elements exchanged: wherever, they do not cancel."""
    one = torch.randn(length, generator=torch.Generator().manual_seed(1)).abs().to(dtype) + 1
    pairs = [(i, j) for i in range(length) for j in range(i)]
    i, j = torch.tensor(pairs).T
    each = torch.arange(len(pairs))
    signs, places, exchanged = (one.repeat(len(pairs), 1) for _ in range(3))
    up = torch.nextafter(one, torch.tensor(torch.inf, dtype=dtype))
    for k in (i, j):
        signs[each, k] *= -1
        places[each, k] = up[k]
    exchanged[each, i], exchanged[each, j] = one[j], one[i]
    own = checksums(one[None])[0]
    assert (checksums(signs) != own).all() and (checksums(places) != own).all()
    assert (checksums(exchanged[one[i] != one[j]]) != own).all()


def test_one_copy_is_no_batch(model):
    with pytest.raises(LabError, match="copies 1"):
        compare(model, generating(model), copies=1)

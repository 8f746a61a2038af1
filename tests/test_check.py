"""`dglab check`: an invariant model passes, a planted difference is told, and bad input is one line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dglab_utils.measure import invariance, timing
from dglab_utils.measure.invariance import (
    WHAT,
    Placement,
    RowRun,
    compared,
    control,
    drawn_prompts,
    protocol,
    run_rows,
)
from dglab_utils.measure.invariance_fix import ONE_BY_ONE, Setting, holds, minimal_fix
from dglab_utils.measure.rowwise import ALL
from dglab_utils.models import build
from dglab_utils.models.nano import build_nano
from dglab_utils.runs import check, cli

FEW = {"max_denoising_steps": 2, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def model():
    return build_nano(seed=3)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(3, 40, (3, 8), generator=torch.Generator().manual_seed(0))


class Neighbourly:
    """While it lasts, the last norm lets each row know how many there are: the plainest dependence on a batch."""

    def __init__(self, model, amount):
        self.model, self.amount = model, amount

    def __enter__(self):
        norm = self.model.model.decoder.norm
        self.handle = norm.register_forward_hook(lambda _, args, out: out * (1 + self.amount * (len(out) - 1)))

    def __exit__(self, *_):
        self.handle.remove()


def test_row_by_row_nothing_depends_on_the_batch(model):
    """A hundred comparisons of a model whose rows cannot know of each other: no false alarm."""
    with Setting(parts=(ALL,)).on(model):
        found = list(protocol(model, drawn_prompts(model, 25), batch=2, **FEW))
    assert len(found) == 25 * (2 + 2)  # every row among copies, and among others
    assert all(c.same_text and c.same_stop and c.first is None and not any(c.growth) for c in found)


def test_a_dependence_is_found_at_its_first_step(model, prompts):
    with Neighbourly(model, 0.5):
        found = list(protocol(model, prompts[:1], batch=2, **FEW))
    assert len(found) == 2  # a single prompt has no different neighbours
    for c in found:
        assert c.first.step == 0 and c.first.position == 0 and c.first.what[:2] == ("logits", "entropy")
        assert c.growth[0] == 1.0


def test_a_run_is_told_row_by_row():
    """Two canvases, which no EOS ends early; what was noted belongs to the row, canvas after canvas."""
    toy = build("toy-1m")
    prompts = drawn_prompts(toy, 2)
    runs = run_rows(toy, prompts, [1, 2], max_denoising_steps=3, max_new_tokens=512)
    for run in runs:
        assert run.steps == (3, 3) and run.tokens.shape == (512,)
        assert {name: of.shape for name, of in run.iterations.items()} == dict.fromkeys(invariance.WHAT, (6, 256))
        assert np.array_equal(run.iterations["guess"][5], run.tokens[256:])
    assert not np.array_equal(runs[0].iterations["logits"], runs[1].iterations["logits"])
    same = compared(0, Placement(2, 0, True), runs[0], runs[0])
    assert same.first is None and same.growth == (0.0,) * 6


def test_without_pinned_noise_copies_differ(model, prompts):
    texts = control(model, prompts[:1], batch=3, **FEW)
    assert texts == {"drawn for the batch": 3, "pinned to the row": 1}


def test_the_fix_is_enough_and_minimal(model, prompts):
    """A dependence of the last norm is undone by the norms row by row, and not by switches."""
    norm = model.model.decoder.norm
    official = norm.forward
    type(norm).forward, kept = (
        (lambda self, x: kept(self, x) * (1.5 if self is norm and len(x) > 1 else 1.0)),
        type(norm).forward,
    )
    try:
        fix = minimal_fix(model, prompts[:1], batch=2, rounds=2, **FEW)
        plain = holds(model, Setting(), prompts[:1], batch=2, **FEW)
    finally:
        type(norm).forward = kept
    assert not plain and not fix.tried[Setting()]
    assert Setting(parts=(ALL,)) in fix.ways
    for way in fix.ways:
        assert "norms" in way.parts or way.parts == (ALL,)
        fewer = [tuple(other for other in way.parts if other != part) for part in way.parts]
        assert not any(fix.tried.get(replace(way, parts=parts)) for parts in fewer if parts)  # nothing can be left out
    assert set(fix.times) == {str(Setting()), ONE_BY_ONE, *map(str, fix.ways)}
    assert official == norm.forward


def test_a_way_must_hold_among_different_neighbours(model, prompts, monkeypatch):
    """Copies of itself hide what only another prompt beside it brings about."""

    def told(_, rows, seeds):
        seen = np.full((1, 1), int((rows != rows[0]).any()))
        return [RowRun(np.zeros(1), (1,), dict.fromkeys(WHAT, seen)) for _ in seeds]

    monkeypatch.setattr(invariance, "run_rows", told)
    assert holds(model, Setting(), prompts[:1], batch=2)
    assert not holds(model, Setting(), prompts[:2], batch=2)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("causal")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


def test_a_causal_model_is_checked(causal, capsys, tmp_path):
    arguments = ["check", str(causal), "--batch", "3", "--count", "2", "--steps", "5"]
    status = cli.main([*arguments, "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")])
    told = json.loads((tmp_path / "r.json").read_text())
    assert status == (0 if told["invariant"] else 1)
    assert len(told["comparisons"]) == 2 * (3 + 3) and told["prompt_tokens"] == 16
    printed = capsys.readouterr().out
    assert told["verdict"] in printed and "text differs" in printed
    page = (tmp_path / "r.html").read_text()
    assert told["verdict"] in page and "<script" not in page and "http" not in page


def test_a_dependence_is_told_with_status_one(causal, capsys, monkeypatch):
    def neighbourly(source, **asked):
        model = LlamaForCausalLM.from_pretrained(source).eval()
        model.model.norm.register_forward_hook(lambda _, args, out: out.flip(-1) if len(out) > 1 else out)
        return model

    monkeypatch.setattr(check, "load", neighbourly)
    assert cli.main(["check", str(causal), "--batch", "2", "--count", "1", "--steps", "4", "--no-fix"]) == 1
    printed = capsys.readouterr().out
    assert "Not invariant: the text of a request depends on its batch." in printed
    assert "starts in" in printed and "norm" in printed
    assert len(printed.splitlines()) < 30  # one page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nano", "--batch", "1"], "batch 1"),
        (["nano", "--prompts", "EMPTY"], "no prompt in it"),
        (["nano", "--prompts", "UNEVEN"], "prompts of different lengths: the first has 9 tokens, 'copy abcd=' has 11"),
        (["nano", "--prompts", "none.txt"], "none.txt: cannot be read"),
        (["no/such/folder/here"], "no such folder"),
        (["nano", "--device", "cuda:9"], "not on this machine"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, told):
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "UNEVEN").write_text("copy ab=\ncopy abcd=\n")
    given = [str(tmp_path / a) if (tmp_path / a).exists() else a for a in arguments]
    assert cli.main(["check", *given]) == 2
    error = capsys.readouterr().err
    assert told in error and error.rstrip().splitlines()[-1].startswith("dglab:")


def test_a_model_that_does_not_fit_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(timing, "free_memory", lambda device: 1000)
    assert cli.main(["check", "nano"]) == 2
    error = capsys.readouterr().err
    assert "nano: loading its weights needs" in error and "1,000 are free" in error


OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt, "broken off"), (RuntimeError(OOM), "out of memory")], ids=["ctrl-c", "oom"]
)
def test_what_ends_early_is_partial(monkeypatch, capsys, error, told):
    """In the middle: what was compared is told, and the status says that the rest is not known."""
    official = invariance.run_rows
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise error
        return official(*args, **kwargs)

    monkeypatch.setattr(invariance, "run_rows", interrupted)
    status = cli.main(["check", "nano", "--batch", "2", "--count", "2", "--steps", "1", "--no-fix"])
    printed = capsys.readouterr().out
    assert "partial" in printed and told in printed and status in (1, 2)

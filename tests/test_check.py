"""`dglab check`: an invariant model passes, a planted difference is told, and bad input is one line."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dglab_utils.measure import invariance, invariance_fix, timing
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
from dglab_utils.measure.invariance_fix import ONE_BY_ONE, Calls, Setting, calls_of, holds, minimal_fix
from dglab_utils.measure.rowwise import ALL
from dglab_utils.models import build
from dglab_utils.models.nano import CANVAS, build_nano
from dglab_utils.runs import check, cli
from dglab_utils.runs.check_page import Page, as_json, tell
from dglab_utils.runs.prompts import lines_of

OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
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
    type(norm).forward, kept = (
        (lambda self, x: kept(self, x) * (1.5 if self is norm and len(x) > 1 else 1.0)),
        type(norm).forward,
    )
    try:
        fix = minimal_fix(model, prompts[:1], batch=2, rounds=2, **FEW)
        plain = holds(model, Setting(), prompts[:1], batch=2, **FEW)
    finally:
        type(norm).forward = kept
    assert not any("forward" in vars(m) for m in model.modules())
    assert not plain and not fix.tried[Setting()]
    assert Setting(parts=(ALL,)) in fix.ways
    for way in fix.ways:
        assert "norms" in way.parts or way.parts == (ALL,)
        fewer = [tuple(other for other in way.parts if other != part) for part in way.parts]
        assert not any(fix.tried.get(replace(way, parts=parts)) for parts in fewer if parts)  # nothing can be left out
    assert set(fix.times) == {str(Setting()), ONE_BY_ONE, *map(str, fix.ways)}


def test_calls_of_a_part_are_counted_and_timed(model, prompts):
    """Each step calls the experts of each layer once, after the encoder did: for the batch, and for a row by itself."""
    layers = model.config.text_config.num_hidden_layers
    calls = calls_of(model, "experts", prompts[:1], batch=3, rounds=4, **FEW)
    assert (calls.count, calls.rows, len(calls.whole), len(calls.row)) == (layers * (1 + 2), 3, 4, 4)
    told = Calls(10, np.full(5, 2.0), np.full(5, 1.0), 4)
    assert told.more == 10 * (4 * 1.0 - 2.0)
    assert not any(m._forward_pre_hooks for m in model.modules())


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
    assert len(told["comparisons"]) == 2 * (2 + 3 + 3) and told["prompt_tokens"] == 16
    printed = capsys.readouterr().out
    assert told["verdict"] in printed and "another text" in printed
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
    assert "starts in" in printed  # other kernels may differ before
    assert len(printed.splitlines()) < 30  # one page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nano", "--batch", "1"], "batch 1"),
        (["nano", "--batch", "99999"], "1024 at most"),
        (["nano", "--steps", "0"], "steps 0"),
        (["nano", "--steps", "-3"], "steps -3"),
        (["nano", "--count", "0"], "count 0"),
        (["nano", "--seed", "9" * 30], "want 0 to 2^63 - 1"),
        (["nano", "--prompts", "UNKNOWN"], "'Hello, my name is' cannot be read by this tokenizer"),
        (["nano", "--json", "FOLDER"], "no plain file"),
        (["nano", "--json", "EMPTY/x.json"], "cannot be written"),
        (["nano", "--json", "same", "--html", "same"], "named twice"),
        (["nano", "--prompts", "EMPTY"], "no prompt in it"),
        (["nano", "--prompts", "UNEVEN"], "prompts of different lengths: the first has 9 tokens, 'copy abcd=' has 11"),
        (["nano", "--prompts", "none.txt"], "none.txt: cannot be read"),
        (["no/such/folder/here"], "no such folder"),
        (["nano", "--waves", "2"], "--waves is for a server; leave it out"),
        (["--server", "http://127.0.0.1:1/v1", "--no-fix"], "--no-fix is for a model on this machine; leave it out"),
        (["nano", "--device", "cuda:9"], "not on this machine"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, told):
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "UNEVEN").write_text("copy ab=\ncopy abcd=\n")
    (tmp_path / "UNKNOWN").write_text("Hello, my name is\n")
    (tmp_path / "FOLDER").mkdir()
    given = [str(tmp_path / a) if (tmp_path / a.split("/")[0]).exists() else a for a in arguments]
    assert cli.main(["check", *given]) == 2
    error = capsys.readouterr().err
    assert told in error and error.rstrip().splitlines()[-1].startswith("dglab:")


def test_a_model_that_does_not_fit_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(timing, "free_memory", lambda device: 1000)
    assert cli.main(["check", "nano"]) == 2
    error = capsys.readouterr().err
    assert "nano: loading its weights needs" in error and "1,000 are free" in error


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt, "broken off"), (RuntimeError(OOM), "out of memory")], ids=["ctrl-c", "oom"]
)
def test_what_ends_early_is_partial(monkeypatch, capsys, tmp_path, error, told):
    """In the middle: what was compared is told, and the status says that the rest is not known."""
    official = invariance.run_rows
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise error
        return official(*args, **kwargs)

    monkeypatch.setattr(invariance, "run_rows", interrupted)
    to_json = tmp_path / "r.json"
    status = cli.main(
        [*["check", "nano", "--batch", "2", "--count", "2", "--steps", "1", "--no-fix", "--json"], str(to_json)]
    )
    printed = capsys.readouterr().out
    assert f"{told}: 2 of 8 comparisons were made" in printed
    known = json.loads(to_json.read_text())["invariant"]  # the two may differ, in float32
    assert (status, known) in ((1, False), (2, None))
    assert ("Not known: " in printed) == (known is None) and "Invariant here" not in printed


# -- causal models of all kinds --------------------------------------------------------------------------------


def llama(folder, dtype=torch.float32, **more):
    """A small model in a folder. Its end of sequence is token 2."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": 64, "num_key_value_heads": 2} | sizes | more)).to(dtype)
    model.save_pretrained(folder)
    return model.eval()


def test_a_token_that_is_ruled_out_is_no_difference(tmp_path):
    """Its logit is -inf, and minus infinity times no chance is no number."""
    model = llama(tmp_path / "m")
    prompts = torch.arange(3, 19).reshape(2, 8)
    for ruled_out in ({"min_new_tokens": 4}, {"suppress_tokens": [5, 7]}):
        runs = invariance.run_rows(model, prompts, [0, 0], max_new_tokens=4, **ruled_out)
        assert all(np.isfinite(run.iterations["entropy"]).all() for run in runs)
    assert holds(model, Setting(parts=(ALL,)), prompts, batch=3, max_new_tokens=4, min_new_tokens=4)


def test_beams_are_not_compared(tmp_path):
    model = llama(tmp_path / "m")
    model.generation_config.num_beams = 3
    model.generation_config.num_return_sequences = 2
    runs = invariance.run_rows(model, torch.arange(3, 19).reshape(2, 8), [0, 0], max_new_tokens=4)
    assert len(runs) == 2 and runs[0].iterations["logits"].shape == (4, 1)


def test_the_checkpoint_s_own_precision_is_checked(tmp_path, capsys):
    llama(tmp_path / "m", dtype=torch.bfloat16)
    arguments = ["check", str(tmp_path / "m"), "--batch", "2", "--count", "1", "--steps", "2", "--no-fix"]
    cli.main(arguments)
    assert "bfloat16 on cpu" in capsys.readouterr().out
    cli.main([*arguments, "--dtype", "float32"])
    assert "float32 on cpu" in capsys.readouterr().out


def test_a_cause_that_cannot_be_looked_for_loses_nothing(tmp_path, capsys, monkeypatch):
    model = llama(tmp_path / "m")
    model.generation_config.cache_implementation = "static"
    model.generation_config.disable_compile = True
    model.model.norm.register_forward_hook(lambda _, args, out: out * (1 + 0.5 * (len(out) > 1)))
    monkeypatch.setattr(check, "load", lambda *_, **__: model)
    arguments = ["check", str(tmp_path / "m"), "--batch", "2", "--count", "1", "--steps", "3"]
    assert cli.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    printed = capsys.readouterr().out
    assert "not known (LabError: row-wise: a static cache cannot be cut into rows" in printed
    assert len(json.loads((tmp_path / "r.json").read_text())["comparisons"]) == 2


def test_what_depends_on_other_prompts_is_said_and_looked_for_among_them(tmp_path, capsys, monkeypatch):
    """Copies are alike, so cause and remedy are not looked for among copies."""
    asked = []

    def told(_, rows, seeds, **settings):
        asked.append(rows.tolist())
        seen = np.full((1, 1), int((rows != rows[0]).any()))
        return [RowRun(np.zeros(1), (1,), dict.fromkeys(WHAT, seen)) for _ in seeds]

    llama(tmp_path / "m")
    monkeypatch.setattr(invariance, "run_rows", told)
    arguments = ["check", str(tmp_path / "m"), "--batch", "2", "--count", "3", "--steps", "3"]
    assert cli.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    printed = capsys.readouterr().out
    page = json.loads((tmp_path / "r.json").read_text())
    assert {c["placement"]["neighbours"] for c in page["comparisons"] if c["first"]} == {True}
    assert "not known (it takes different prompts in a batch" in printed
    assert page["fix"]["tried"]["plain batch"] is False and page["helps"] is None
    assert "nothing that was tried" in printed
    searched = asked[asked.index(asked[0], 1) :]  # behind the protocol's: the first two prompts, alone and together
    assert len({tuple(map(tuple, rows)) for rows in searched if len(rows) == 1}) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError(OOM)])
def test_a_search_that_ends_early_says_so(tmp_path, capsys, monkeypatch, error):
    """Comparisons are all there; what is not known is not made up."""
    model = llama(tmp_path / "m")
    model.model.norm.register_forward_hook(lambda _, args, out: out.flip(-1) if len(out) > 1 else out)
    monkeypatch.setattr(check, "load", lambda *_, **__: model)

    def ended(*_, **__):
        raise error

    monkeypatch.setattr(invariance_fix, "minimal_fix", ended)
    assert cli.main(["check", str(tmp_path / "m"), "--batch", "2", "--count", "2", "--steps", "3"]) == 1
    printed = capsys.readouterr().out
    why = "broken off" if error is KeyboardInterrupt else "out of memory"
    assert f"{why}: all comparisons were made, not the search" in printed
    assert re.search(rf"helps here +not known \({why}\)", printed) and "Not invariant" in printed


def test_weights_are_counted_as_they_will_be(tmp_path):
    model = llama(tmp_path / "m", dtype=torch.bfloat16)
    count = sum(w.numel() for w in model.parameters())
    (tmp_path / "m" / "consolidated.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    assert check._weights(tmp_path / "m", "auto") == check._weights(tmp_path / "m", "bfloat16") == 2 * count
    assert check._weights(tmp_path / "m", "float32") == 4 * count
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert check._weights(tmp_path / "shards", "float32") == 4 * count


def test_what_helps_can_be_run_as_it_is_printed(model, prompts):
    """Word for word."""
    for setting in (Setting(parts=("norms",)), Setting(experts="eager", parts=("experts", "router"))):
        before = model.config._experts_implementation
        code = "\n".join(setting.code).replace("generate(...)", "generate(prompts, **FEW)")
        exec(code, {"dglab_utils": sys.modules["dglab_utils"], "model": model, "prompts": prompts, "FEW": FEW})
        model.set_experts_implementation(before)


def test_a_row_that_ended_in_an_earlier_canvas_has_no_more_text(model, prompts):
    """In a batch the others go on, and it is padded; alone it was not."""
    settings = {"max_denoising_steps": 2, "max_new_tokens": 2 * CANVAS}
    for seed in range(50):  # random weights: three of four canvases hold the end somewhere
        both = invariance.run_rows(model, prompts[:2], [seed, seed + 1], **settings)
        assert [len(run.tokens) for run in both] == [CANVAS * len(run.steps) for run in both]
        if {len(run.steps) for run in both} == {1, 2}:
            return
    pytest.fail("no two rows ended in different canvases")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: _without(folder, "model.norm.weight"), "1 weights are missing, such as model.norm.weight"),
        (lambda folder: _configured(folder, is_encoder_decoder=True), "an encoder-decoder; give a DiffusionGemma"),
        (lambda folder: _configured(folder, hidden_size="many"), "cannot be loaded"),
        (lambda folder: _configured(folder, max_position_embeddings=18), "the model has 18 positions"),
    ],
)
def test_a_checkpoint_that_cannot_be_checked_is_one_line(tmp_path, capsys, spoil, told):
    llama(tmp_path / "m")
    spoil(tmp_path / "m")
    assert cli.main(["check", str(tmp_path / "m"), "--count", "1", "--steps", "4"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.rstrip().splitlines()[-1].startswith("dglab:")


def _without(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _configured(folder, **more):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_a_model_that_fails_on_the_way_has_status_two(tmp_path, capsys, monkeypatch):
    """Status 1 would say that it is not invariant."""
    model = llama(tmp_path / "m")

    def broken(*_):
        raise IndexError("index out of range in self")

    model.model.norm.register_forward_hook(broken)
    monkeypatch.setattr(check, "load", lambda *_, **__: model)
    assert cli.main(["check", str(tmp_path / "m"), "--count", "1", "--steps", "2"]) == 2
    assert "could not be checked: IndexError: index out of range" in capsys.readouterr().err


def test_a_folder_without_tokenizer_is_told(tmp_path, capsys):
    llama(tmp_path / "m")
    (tmp_path / "p.txt").write_text("one\n")
    assert cli.main(["check", str(tmp_path / "m"), "--prompts", str(tmp_path / "p.txt")]) == 2
    assert "no tokenizer in this folder" in capsys.readouterr().err


def test_prompts_are_lines(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffcopy ab=\r\n\ncopy \x0ccd=\n".encode())
    assert lines_of(tmp_path / "p.txt") == ["copy ab=", "copy \x0ccd="]


# -- the page --------------------------------------------------------------------------------------------------


def page(**more):
    return Page("A verdict.", [("what", "it is")], {}, {"value": 1.0} | more)


def test_json_holds_numbers_or_nothing():
    told = json.loads(as_json(page(bad=[float("nan"), float("inf"), 2.0])), parse_constant=pytest.fail)
    assert told["bad"] == [None, None, 2.0] and told["value"] == 1.0


def test_files_are_written_whatever_the_terminal_shows(tmp_path, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    tell(Page("Größer.", [("a", "b \ud800")], {}, {}), tmp_path / "r.json", tmp_path / "r.html")
    stdout.seek(0)
    assert "Gr\\xf6\\xdfer." in stdout.read()
    assert "Größer." in (tmp_path / "r.html").read_text() and json.loads((tmp_path / "r.json").read_text())


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    tell(page(), tmp_path / "link.json", None)
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").is_file()

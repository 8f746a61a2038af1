"""The llama.cpp engine reads what the programs print, and says in one line what went wrong."""

from __future__ import annotations

import stat
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dglab_utils.engines.llamacpp import LlamaCpp, ProgramFailed, Timing, read_timing, thought_and_answer
from dglab_utils.engines.llamacpp_python import LlamaCppPython
from dglab_utils.errors import LabError

ONE_BLOCK = """
 The grinder hums, the red dust settles, and the cup is full.
total time: 4551.07ms, time per step: 216.72ms (21 steps over 1 blocks, entropy-bound)
throughput: 56.3 tok/s (256 tok in 4551.07ms), in-step parallel 1181 tok/s (256-tok canvas x 21.0 steps/block)
"""
CLOSING = ONE_BLOCK.split("\n", 2)[2]
SEVERAL_BLOCKS = """
A long answer, over three canvases.
total time: 12000.00ms, time per step: 200.00ms (60 steps over 3 blocks, entropy-bound)
throughput: 64.0 tok/s (768 tok in 12000.00ms), in-step parallel 1280 tok/s (256-tok canvas x 20.0 steps/block)
"""
# Stock builds, for LLaDA and Dream: a fixed number of steps, which they do not tell; all is logged.
STOCK = """diffusion_params: - steps                     u32              = 128

total time: 900.50ms, time per step: 7.04ms, sampling time per step: 1.13ms

An answer.
It has two lines.
llama_perf_context_print:        load time =     512.30 ms
~llama_context: graph reserve
"""
CAUSAL = """
common_perf_print:        load time =     512.30 ms
common_perf_print: prompt eval time =      41.20 ms /    12 tokens (    3.43 ms per token,   291.26 tokens per second)
common_perf_print:        eval time =     630.00 ms /    62 runs   (   10.16 ms per token,    98.41 tokens per second)
common_perf_print:       total time =     690.10 ms /    74 tokens
"""
CRASHED = "loading\n The first words of an\nGGML_ASSERT(n_tokens <= n_batch) failed\n"
UNKNOWN = "error loading model: unknown model architecture: 'diffusion-gemma'\nfailed to load model\n"
CUT = "gguf_init: tensor data is not within the file bounds, model is corrupted or incomplete\nfailed to load model\n"


def program(folder: Path, out: str = "", err: str = "", status: int = 0, sleep: float = 0, quiet: bool = False) -> Path:
    """A program that prints this and, unless it is quiet, the arguments it was given last."""
    path = folder / "llama-diffusion-cli"
    path.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        f"sys.stdout.write({out!r}); sys.stderr.write({err!r} + ('' if {quiet} else repr(sys.argv[1:])))\n"
        f"sys.stdout.flush(); time.sleep({sleep}); sys.exit({status})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (ONE_BLOCK, Timing(total_ms=4551.07, step_ms=216.72, steps=21, blocks=1, canvas=256, computed=256)),
        (SEVERAL_BLOCKS, Timing(total_ms=12000.0, step_ms=200.0, steps=60, blocks=3, canvas=256, computed=768)),
        (STOCK, Timing(total_ms=900.5, step_ms=7.04)),
        (CAUSAL, Timing(prompt_ms=41.2, prompt_tokens=12, eval_ms=630.0, eval_runs=62)),
        (f"noise\n{ONE_BLOCK}\nmore noise ms\n", read_timing(ONE_BLOCK)),
        (ONE_BLOCK + SEVERAL_BLOCKS, read_timing(SEVERAL_BLOCKS)),
        (
            SEVERAL_BLOCKS + "\nagain\ntotal time: 5.00ms, time per step: 5.00ms (1 steps over 1 blocks",
            Timing(5, 5, 1, 1),
        ),
        (CRASHED, Timing()),
        ("", Timing()),
    ],
)
def test_closing_lines_are_read(printed, told):
    assert read_timing(printed) == told


def test_an_answer_is_counted_to_its_end_and_not_to_the_canvas_s(tmp_path, gguf):
    """Twelve words and their end of a canvas of 256: the program's own 56.3 tokens a second counts all of it."""
    engine = LlamaCpp(program(tmp_path, ONE_BLOCK), gguf, count=lambda text: len(text.split()))
    answer = engine.generate("Write.", max_new_tokens=96)
    assert answer.text == "The grinder hums, the red dust settles, and the cup is full."
    assert (answer.tokens, answer.filled, answer.forwards, answer.steps) == (13, 256, 21, (21,))
    assert answer.seconds == pytest.approx(4.55107) and answer.tokens_per_second == pytest.approx(13 / 4.55107)
    assert not answer.notes and answer.ended


def test_what_could_not_be_read_is_named(tmp_path, gguf):
    answer = LlamaCpp(program(tmp_path, err=STOCK, quiet=True), gguf).generate("Write.", max_new_tokens=96)
    assert answer.text == "An answer.\nIt has two lines." and answer.seconds == pytest.approx(0.9005)
    assert [note.split()[0] for note in answer.notes] == ["steps", "blocks", "computed", "canvas", "tokens"]


def test_a_causal_run_is_read(tmp_path, gguf):
    answer = LlamaCpp(program(tmp_path, "Say it.it is said [end of text]\n", CAUSAL), gguf).generate(
        "Say it.", max_new_tokens=128
    )
    assert answer.text == "it is said"
    assert (answer.tokens, answer.forwards, answer.prefill_s) == (63, 62, pytest.approx(0.0412))
    assert answer.seconds == pytest.approx(0.6712)
    assert answer.ended and not answer.fault


def test_an_answer_that_met_its_limit_had_no_end(tmp_path, gguf):
    cut = LlamaCpp(program(tmp_path, "it is said\n\n", CAUSAL), gguf).generate("Say it.", max_new_tokens=63)
    assert (cut.tokens, cut.ended, cut.fault) == (63, False, "truncated")
    whole = " ".join(["word"] * 256)
    engine = LlamaCpp(program(tmp_path, f"{whole}\n{CLOSING}"), gguf, count=lambda text: len(text.split()))
    answer = engine.generate("Write.", max_new_tokens=256)
    assert (answer.tokens, answer.filled, answer.ended) == (256, 256, False)


def test_a_program_that_tells_a_rate_alone(tmp_path, gguf):
    """llama-cli of today: no times; the answer stands among what it draws."""
    run = LlamaCpp(program(tmp_path, "it is\n[ Prompt: 28.2 t/s | Generation: 4.2 t/s ]\n"), gguf).ask(
        "Say it.", max_new_tokens=63
    )
    assert run.whole_rate == run.timing.rate == 4.2 and run.answer.decode_s is None
    assert [note.split()[0] for note in run.answer.notes] == ["prompt_ms", "eval_ms", "eval_runs", "tokens"]


def test_arguments_never_meet_a_shell(tmp_path, gguf, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompt = "$(touch gone); `touch gone` 'x' \"y\" && z"
    _, err = LlamaCpp(program(tmp_path, ONE_BLOCK), gguf, arguments=["-ngl", "99"]).run(prompt, max_new_tokens=7)
    assert err == repr(["-m", str(gguf), "-p", prompt, "-n", "7", "-ngl", "99"])
    assert not list(tmp_path.glob("gone"))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"err": UNKNOWN, "status": 1}, "unknown model architecture: 'diffusion-gemma'; this build does not know"),
        (
            {"err": CUT, "status": 1},
            "not within the file bounds, model is corrupted or incomplete; the file is truncated",
        ),
        ({"out": CRASHED, "status": 134}, "exit status 134; its output ends: loading The first words of an"),
        (
            {"out": "so far", "sleep": 30},
            "no end within 1 s; give it more or ask for fewer tokens; its output ends: so far",
        ),
    ],
)
def test_a_program_that_fails_says_why_and_keeps_its_output(tmp_path, gguf, how, told):
    engine = LlamaCpp(program(tmp_path, **how), gguf, limit_s=1)
    with pytest.raises(ProgramFailed) as failed:
        engine.generate("Write.", max_new_tokens=5)
    assert told in str(failed.value) and "\n" not in str(failed.value)
    assert (how.get("out") or how["err"]) in failed.value.printed


def test_what_cannot_be_run_is_refused_before(tmp_path, gguf):
    with pytest.raises(LabError, match="nowhere: no program there"):
        LlamaCpp(tmp_path / "nowhere", gguf).generate("a", max_new_tokens=1)
    with pytest.raises(LabError, match=r"absent\.gguf: cannot be read"):
        LlamaCpp(program(tmp_path), tmp_path / "absent.gguf").generate("a", max_new_tokens=1)
    gguf.write_bytes(b"<html>not found")
    with pytest.raises(LabError, match="no GGUF file, or a damaged one"):
        LlamaCpp(program(tmp_path), gguf).generate("a", max_new_tokens=1)


THOUGHT = "<|channel>thought\nFirst the sum, then the rest.<channel|>The answer is 8."


def test_the_thought_channel_is_told_apart():
    assert thought_and_answer(THOUGHT) == ("First the sum, then the rest.", "The answer is 8.")
    assert thought_and_answer("The answer is 8.") == ("", "The answer is 8.")
    assert thought_and_answer("<|channel>thought\nNo end") == ("No end", "")  # it took the whole canvas


def test_a_run_tells_step_thought_and_what_lies_behind_the_end(tmp_path, gguf):
    engine = LlamaCpp(program(tmp_path, f"{THOUGHT}\n{CLOSING}"), gguf, count=lambda text: len(text.split()))
    run = engine.ask("Add.", max_new_tokens=256)
    assert run.parallel == pytest.approx(256 / 0.21672) and run.whole_rate == pytest.approx(256 / 4.55107)
    assert run.thought == 6 and run.answer.tokens == len(THOUGHT.split()) + 1
    assert run.behind_end == 256 - run.answer.tokens
    assert run.wall_s > 0 and CLOSING.strip() in run.printed
    blind = LlamaCpp(program(tmp_path, err=STOCK, quiet=True), gguf).ask("Add.", max_new_tokens=256)
    assert (blind.parallel, blind.behind_end, blind.thought) == (None, None, None)


def test_several_blocks_have_no_steps_of_their_own(tmp_path, gguf):
    run = LlamaCpp(program(tmp_path, SEVERAL_BLOCKS), gguf, count=lambda text: len(text.split())).ask(
        "Write.", max_new_tokens=768
    )
    assert (run.answer.steps, run.answer.forwards, run.answer.filled) == ((), 60, 768)
    assert run.answer.processed == 60 * 256
    assert run.parallel == pytest.approx(1280)


class Llama:
    """Stands in for llama_cpp.Llama: bytes for tokens, 0 the end; answers with the prompt backwards."""

    def __init__(self, path, n_ctx, n_threads, verbose):
        if Path(path).stat().st_size < 8:
            raise ValueError("Failed to load model from file")
        self.size, self._model, self.resets = n_ctx, SimpleNamespace(vocab=None), 0

    def n_ctx(self):
        return self.size

    def tokenize(self, text):
        return list(text)

    def reset(self):
        self.resets += 1

    def generate(self, tokens, temp, repeat_penalty):
        assert temp == 0 and repeat_penalty == 1
        yield from [*reversed(tokens), 0, 7, 7]

    def detokenize(self, tokens, prev_tokens):
        return bytes(tokens)


@pytest.fixture
def llama_cpp(monkeypatch):
    module = ModuleType("llama_cpp")
    module.Llama, module.llama_vocab_is_eog = Llama, lambda vocab, token: token == 0
    module.__spec__ = ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)


def test_llama_cpp_python_counts_up_to_its_end(gguf, llama_cpp):
    engine = LlamaCppPython(gguf, context=64)
    answer = engine.generate("abc", max_new_tokens=10)
    assert (answer.text, answer.tokens, answer.filled, answer.forwards, answer.ended) == ("cba", 4, 4, 3, True)
    assert 0 <= answer.prefill_s <= answer.seconds and engine.model.resets == 1
    cut = engine.generate("abc", max_new_tokens=2)
    assert (cut.text, cut.tokens, cut.ended, cut.fault) == ("cb", 2, False, "truncated")
    with pytest.raises(LabError, match="3 tokens of prompt and 62 of answer do not fit into 64"):
        engine.generate("abc", max_new_tokens=62)
    with pytest.raises(LabError, match="prompt: empty"):
        engine.generate(" ", max_new_tokens=2)


def test_llama_cpp_python_refuses_in_one_line(gguf, llama_cpp, monkeypatch):
    gguf.write_bytes(b"GGUF")
    with pytest.raises(LabError, match="cannot be loaded by llama-cpp-python: Failed to load"):
        LlamaCppPython(gguf)
    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.setattr("dglab_utils.engines.llamacpp_python.find_spec", lambda name: None)
    with pytest.raises(LabError, match="llama-cpp-python: not installed; `pip install llama-cpp-python`"):
        LlamaCppPython(gguf)

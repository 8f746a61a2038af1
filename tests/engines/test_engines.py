"""Engines agree with what they stand for, and count alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dglab_utils.engines.block_diffusion import BlockDiffusion, CausalEncoder
from dglab_utils.engines.causal import Causal
from dglab_utils.engines.compare import in_turns, prompts_of, seconds_of
from dglab_utils.engines.generation import Generation, up_to_end, with_peak
from dglab_utils.engines.masked_diffusion import MaskedCanvas, MaskedDiffusion, MaskedWhole
from dglab_utils.errors import LabError
from dglab_utils.measure.answers import a_token_at_a_time
from dglab_utils.models import load, load_tokenizer
from dglab_utils.models.nano import BOS_ID, CANVAS, EOS_ID, build_nano, tokenizer
from dglab_utils.models.nano_training import held_out_examples


@pytest.mark.parametrize(
    ("tokens", "ends", "told"),
    [
        ([5, 6, 2, 0, 0], [2], ([5, 6, 2], True)),
        ([5, 6, 2, 7, 2], [2], ([5, 6, 2], True)),
        ([2, 5], [2], ([2], True)),
        ([5, 6], [2], ([5, 6], False)),
        ([5, 9, 2], [2, 9], ([5, 9], True)),
        ([5, 6], [], ([5, 6], False)),
    ],
)
def test_tokens_count_up_to_and_including_the_first_end(tokens, ends, told):
    assert up_to_end(tokens, ends) == told


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=47, num_key_value_heads=2, eos_token_id=EOS_ID, **sizes)).eval()
    model.generation_config.pad_token_id = 0
    return model


def test_causal_is_generate(llama):
    asked = tokenizer()("copy abc=", return_tensors="pt")
    whole = llama.generate(**asked, do_sample=False, max_new_tokens=12)[0, asked["input_ids"].shape[1] :]
    answer = Causal(llama, tokenizer()).generate("copy abc=", max_new_tokens=12)
    tokens, ended = up_to_end(whole.tolist(), [EOS_ID])
    assert answer.text == tokenizer().decode(tokens, skip_special_tokens=True)
    assert (answer.tokens, answer.ended, answer.forwards) == (len(tokens), ended, len(whole) - 1)
    assert 0 < answer.prefill_s < answer.seconds


def test_block_diffusion_is_generate():
    model, words = load("nano"), load_tokenizer("nano")
    asked = words("sort hgfedcba=", return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**asked, max_new_tokens=CANVAS, return_dict_in_generate=True)
    torch.manual_seed(0)
    answer = BlockDiffusion(model, words).generate("sort hgfedcba=", max_new_tokens=CANVAS)
    assert answer.text == "abcdefgh" and answer.tokens == 9 and answer.filled == CANVAS and answer.ended
    told = output.sequences[0, asked["input_ids"].shape[1] :].tolist()
    assert answer.text == words.decode(up_to_end(told, [EOS_ID])[0], skip_special_tokens=True)
    assert answer.steps == (answer.forwards,) and 2 <= answer.forwards <= 48
    assert not model.model.encoder._forward_hooks and not model.model.decoder._forward_hooks


def test_a_seed_gives_the_same_answer_and_leaves_the_generator():
    model, words = load("nano"), load_tokenizer("nano")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    a, b = (BlockDiffusion(model, words, seed=1).generate("palindrome 12=", max_new_tokens=64) for _ in range(2))
    assert (a.text, a.steps) == (b.text, b.steps) and torch.equal(torch.get_rng_state(), state)
    texts = {BlockDiffusion(model, words, seed=n).generate("palindrome 12=", max_new_tokens=64).text for n in range(4)}
    assert len(texts) > 1


def test_the_encoder_says_what_it_says_in_a_batch():
    model, words = load("nano"), load_tokenizer("nano")
    examples = held_out_examples(1, seed="engines", tasks=["sort", "palindrome"])
    alone = [CausalEncoder(model, words).generate(e.prompt, max_new_tokens=128) for e in examples]
    for answer, told in zip(alone, a_token_at_a_time(model, examples), strict=True):
        assert (answer.text, answer.tokens, answer.forwards) == (told.text, told.tokens, told.forwards)
        assert answer.filled == answer.tokens and answer.ended
    assert CausalEncoder(model, words).generate("copy abcdefgh=", max_new_tokens=3).fault == "truncated"


def test_memory_of_an_answer():
    model, words = load("nano"), load_tokenizer("nano")
    few, many = (with_peak(CausalEncoder(model, words), f"copy {t}=", max_new_tokens=8) for t in ("a", "a" * 100))
    assert 0 < few.peak_bytes < many.peak_bytes and few.tokens == 2


class Slow:
    """Answers with its name and the number of the call."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def generate(self, prompt, *, max_new_tokens):
        self.calls.append((self.name, prompt))
        return Generation(self.name, "", prompt, 1, 1, True, 1, decode_s=float(len(self.calls)))


def test_engines_answer_in_turns():
    calls, bar = [], []
    told = in_turns(
        {n: Slow(n, calls) for n in "ab"}, ["x", "y"], max_new_tokens=1, rounds=2, each=lambda: bar.append(1)
    )
    assert calls[:2] == [("a", "x"), ("b", "x")]  # warm-up
    turns = [("a", "x"), ("b", "x"), ("b", "y"), ("a", "y"), ("b", "x"), ("a", "x"), ("a", "y"), ("b", "y")]
    assert calls[2:] == turns and len(bar) == 4
    assert [len(part) for part in told.values()] == [2, 2] and [len(rounds) for rounds in told["a"]] == [2, 2]
    assert seconds_of(told["a"]).tolist() == [5.5, 7.5]  # calls 3 and 8, 6 and 9
    with pytest.raises(LabError, match="0 prompts, 2 rounds"):
        in_turns({}, [], max_new_tokens=1, rounds=2)


def test_prompts_of_the_real_models():
    assert all(len(set(prompts_of(name))) >= 8 for name in ("math", "korean", "code"))
    with pytest.raises(LabError, match="prompts 'maths': there are code, korean, math"):
        prompts_of("maths")


def test_an_answer_without_a_time():
    answer = Generation("e", "m", " ", 1, 1, True, 1)
    assert answer.fault == "empty"
    with pytest.raises(LabError, match="e: told no time"):
        _ = answer.tokens_per_second


@pytest.fixture(scope="module")
def canvas():
    return MaskedCanvas(build_nano(seed=5), mask=BOS_ID)


@pytest.mark.parametrize("how", [{"steps": 16}, {"threshold": 0.03}])
@pytest.mark.parametrize("block", [CANVAS, 16])
def test_the_cache_changes_no_token(canvas, block, how):
    """What is before a canvas is read causally, so keeping it is exact; in whole blocks and in parts of a canvas."""
    plain, cached = (
        MaskedDiffusion(canvas, tokenizer(), block=block, cached=cached, **how) for cached in (False, True)
    )
    a, b = (engine.generate("copy abc=", max_new_tokens=2 * CANVAS) for engine in (plain, cached))
    assert (a.ids, a.steps, a.processed) == (b.ids, b.steps, b.processed) and a.processed == CANVAS * a.forwards
    assert a.forwards == sum(a.steps) and (a.prefill_s, b.prefill_s is None) == (None, False)


@pytest.mark.parametrize(("block", "steps"), [(64, 64), (64, 5), (16, 3), (16, 1)])
def test_a_fixed_number_of_steps_writes_equal_shares(canvas, block, steps, monkeypatch):
    written = []
    seen = canvas.logits

    def watched(tokens, start):
        written.append(int((tokens[0, start:] != BOS_ID).sum()))
        return seen(tokens, start)

    monkeypatch.setattr(canvas, "logits", watched)
    answer = MaskedDiffusion(canvas, tokenizer(), block=block, steps=steps).generate("copy abc=", max_new_tokens=CANVAS)
    assert answer.steps == (steps,) * (CANVAS // block) and answer.filled == CANVAS
    shares = np.diff([*written, CANVAS])
    assert shares.max() - shares.min() <= 1 and shares.sum() == CANVAS


def test_nothing_is_written_behind_the_block_that_ends_the_answer(canvas):
    """The same steps as without, as far as they go: a block does not see later ones but as masks."""
    how = {"block": 16, "steps": 4, "cached": True}
    whole, short = (MaskedDiffusion(canvas, tokenizer(), **how, stop=stop) for stop in (False, True))
    early = 0
    for prompt in ("copy abc=", "sort cab=", "say 7=", "palindrome 5="):
        a, b = (engine.generate(prompt, max_new_tokens=2 * CANVAS) for engine in (whole, short))
        assert (a.text, a.tokens, a.ended) == (b.text, b.tokens, b.ended)
        assert b.filled == (-(-b.tokens // 16) * 16 if b.ended else 2 * CANVAS)
        assert a.ids == b.ids and b.forwards == 4 * b.filled // 16 and a.filled in (CANVAS, 2 * CANVAS)
        early += b.ended and b.filled < a.filled
    assert early


def test_low_confidence_is_remasked(canvas):
    """By hand for one block: of what is still masked the most probable are kept, a share a step."""
    engine = MaskedDiffusion(canvas, tokenizer(), block=CANVAS, steps=4)
    tokens = torch.cat([tokenizer()("copy abc=", return_tensors="pt")["input_ids"], torch.full((1, CANVAS), BOS_ID)], 1)
    begin = tokens.shape[1] - CANVAS
    with torch.no_grad():
        for _ in range(4):
            told = canvas.logits(tokens, begin).softmax(-1)
            told[:, BOS_ID] = 0
            best, token = told.max(-1)
            best[tokens[0, begin:] != BOS_ID] = -1
            kept = best.topk(CANVAS // 4).indices
            tokens[0, begin + kept] = token[kept]
    text = tokenizer().decode(up_to_end(tokens[0, begin:].tolist(), [EOS_ID])[0], skip_special_tokens=True)
    assert engine.generate("copy abc=", max_new_tokens=CANVAS).text == text


def test_the_threshold_writes_at_least_one_and_all_that_are_sure(canvas):
    one = MaskedDiffusion(canvas, tokenizer(), block=CANVAS, threshold=0.999)
    many = MaskedDiffusion(canvas, tokenizer(), block=CANVAS, threshold=0.001)
    assert one.generate("copy abc=", max_new_tokens=CANVAS).forwards == CANVAS
    assert many.generate("copy abc=", max_new_tokens=CANVAS).forwards == 1


class WithCache(torch.nn.Module):
    """Attends in both directions over what it is given and what it kept: one layer, one head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.name_or_path, self.device = "kept", torch.device("cpu")
        self.generation_config = type("Config", (), {"eos_token_id": None})()
        self.embed, self.place = torch.nn.Embedding(47, 16), torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 47)
        self.seen = []

    def forward(self, input_ids, past_key_values=None, position_ids=None, use_cache=False):
        self.seen.append(input_ids.shape[1])
        at = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        hidden = self.embed(input_ids) + self.place(at)
        cache = past_key_values if past_key_values is not None else DynamicCache()
        keys, values = cache.update(hidden[:, None], hidden[:, None], 0)
        weights = (hidden[:, None] @ keys.transpose(-1, -2)).softmax(-1)
        told = self.head(hidden + (weights @ values)[:, 0])
        return type("Output", (), {"logits": 5 * told, "past_key_values": cache})()


def test_what_a_bidirectional_model_keeps_is_cut_at_the_block():
    """By hand: one pass over everything a block, then the window alone over the keys and values before it."""
    model = WithCache()
    engine = MaskedDiffusion(MaskedWhole(model, mask=BOS_ID), tokenizer(), block=4, steps=2, cached=True)
    answer = engine.generate("copy a=", max_new_tokens=8)
    prompt = tokenizer()("copy a=", return_tensors="pt")["input_ids"]
    length = prompt.shape[1]
    assert model.seen == [length + 8, 8, 8, length + 8, 4, 4]
    assert (answer.forwards, answer.steps, answer.processed) == (6, (2, 2), 8 + 2 * 8 + 8 + 2 * 4)
    tokens = torch.cat([prompt, torch.full((1, 8), BOS_ID)], 1)
    with torch.no_grad():
        for begin in (length, length + 4):
            cache = model(input_ids=tokens, use_cache=True).past_key_values
            cache.crop(begin - tokens.shape[1])
            kept = cache.layers[0].keys.clone()
            for _ in range(2):
                at = torch.arange(begin, length + 8)[None]
                told = model(input_ids=tokens[:, begin:], past_key_values=cache, position_ids=at).logits[0]
                cache.crop(begin - tokens.shape[1])
                assert torch.equal(cache.layers[0].keys, kept)
                best, token = told[:4].softmax(-1).index_fill(1, torch.tensor([BOS_ID]), 0).max(-1)
                best[tokens[0, begin : begin + 4] != BOS_ID] = -1
                chosen = best.topk(2).indices
                tokens[0, begin + chosen] = token[chosen]
    assert list(answer.ids) == tokens[0, length:].tolist()


class Both(torch.nn.Module):
    """A model that attends in both directions: embedding, the mean of all, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.name_or_path, self.device = "both", torch.device("cpu")
        self.generation_config = type("Config", (), {"eos_token_id": EOS_ID})()
        self.embed, self.head = torch.nn.Embedding(47, 16), torch.nn.Linear(16, 47)

    def forward(self, input_ids, use_cache=False):
        seen = self.embed(input_ids)
        places = torch.linspace(-1, 1, seen.shape[1])[None, :, None]
        return type("Output", (), {"logits": 9 * self.head(seen + seen.mean(1, keepdim=True) + places)})()


def test_a_bidirectional_model_runs_without_a_cache_and_says_that_it_has_none():
    model = MaskedWhole(Both(), mask=BOS_ID)
    answer = MaskedDiffusion(model, tokenizer(), block=8, steps=2).generate("copy abc=", max_new_tokens=20)
    assert answer.filled == 24 and answer.steps[0] == 2  # whole blocks
    with pytest.raises(LabError, match="both: keeps no keys and values"):
        MaskedDiffusion(model, tokenizer(), block=8, steps=2, cached=True).generate("copy abc=", max_new_tokens=20)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"block": 64}, "steps of a block, or a threshold"),
        ({"block": 64, "steps": 4, "threshold": 0.9}, "steps of a block, or a threshold"),
        ({"block": 48, "steps": 4}, "do not fill a canvas of 64"),
        ({"block": 64, "steps": 65}, "cannot be met"),
        ({"block": 64, "threshold": 1.0}, "cannot be met"),
        ({"block": 64, "threshold": 0.0}, "cannot be met"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(canvas, how, told):
    with pytest.raises(LabError, match=told):
        MaskedDiffusion(canvas, tokenizer(), **how)


@pytest.mark.parametrize("engine", ["causal", "block", "masked"])
def test_an_empty_prompt_is_one_line(engine, llama, canvas):
    made = {
        "causal": lambda: Causal(llama, tokenizer()),
        "block": lambda: BlockDiffusion(canvas.model, tokenizer()),
        "masked": lambda: MaskedDiffusion(canvas, tokenizer(), block=64, steps=4),
    }[engine]()
    with pytest.raises(LabError, match="prompt: empty"):
        made.generate("  ", max_new_tokens=4)

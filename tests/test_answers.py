"""Answers counted by diffusion and a token at a time: what is right, what a forward is, and the numbers over them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dglab_utils.errors import LabError
from dglab_utils.measure.answers import (
    Answer,
    a_token_at_a_time,
    aup,
    by_diffusion,
    forwards_of,
    repeated,
    share_of,
    total_correlation,
    variety,
    wall_time,
)
from dglab_utils.models import build
from dglab_utils.models.nano import CANVAS, EOS_ID, VOCABULARY, batch_of, build_nano, tokenizer
from dglab_utils.models.nano_tasks import TASKS, Example, asked_in
from dglab_utils.sampling.hooks import without_self_conditioning


@pytest.fixture(scope="module")
def model():
    return build_nano(seed=1)


def told(text: str) -> list[int]:
    return [VOCABULARY.index(c) for c in text] + [EOS_ID]


class Scripted:
    """Stands in for the LM head: logits that say a text, whatever the hidden states are."""

    def __init__(self, model, rows: list[list[int]]):
        self.model, self.rows = model, rows

    def __enter__(self):
        wanted = torch.zeros(len(self.rows), CANVAS, dtype=torch.long)
        for i, row in enumerate(self.rows):
            wanted[i, : len(row)] = torch.tensor(row)
        logits = 1e4 * torch.nn.functional.one_hot(wanted, len(VOCABULARY)).float()
        self.handle = self.model.lm_head.register_forward_hook(lambda *_: logits)

    def __exit__(self, *_):
        self.handle.remove()


def test_a_canvas_that_is_known_at_once_takes_two_steps(model):
    examples = [Example("copy", 3, "copy abc=", "abc"), Example("copy", 3, "copy abd=", "abd")]
    with Scripted(model, [told("abc"), told("abc")]):
        right, wrong = by_diffusion(model, examples, keep=True)
    assert (right.text, right.right, right.forwards, right.tokens) == ("abc", True, 2, 4)
    assert (wrong.text, wrong.right) == ("abc", False)
    assert [len(a.traces) for a in (right, wrong)] == [1, 1]
    assert forwards_of([right, wrong]).tolist() == [2, 2]


def test_an_answer_without_an_end_is_wrong(model):
    """Right letters, then none that ends: both canvases are full."""
    letters = [VOCABULARY.index("a")] * CANVAS
    with Scripted(model, [letters]):
        answer = by_diffusion(model, [Example("copy", 4, "copy aaaa=", "aaaa")])[0]
    assert (len(answer.text), answer.right, answer.tokens, answer.forwards) == (2 * CANVAS, False, 2 * CANVAS, 4)


def test_noise_is_a_rows_own(model):
    """Logits that do not depend on the batch give the same canvases in a batch of one and in a batch of others."""
    examples = [TASKS["copy"].example(4, i) for i in range(4)]
    settings = {"max_denoising_steps": 3, "max_new_tokens": CANVAS, "keep": True}
    flat = torch.linspace(0, 2, len(VOCABULARY)).expand(1, CANVAS, -1)
    handle = model.lm_head.register_forward_hook(lambda _, args, __: flat.expand(len(args[0]), -1, -1))
    together = by_diffusion(model, examples, **settings)
    apart = by_diffusion(model, examples, rows=1, **settings)
    handle.remove()
    for one, other in zip(together, apart, strict=True):
        assert one.text == other.text
        for name in ("current", "sampled", "accepted"):
            assert np.array_equal(getattr(one.traces[0], name), getattr(other.traces[0], name))
    settings.pop("keep")
    other_seed = by_diffusion(model, examples, keep=True, seed=1, **settings)
    assert not np.array_equal(other_seed[0].traces[0].current[0], together[0].traces[0].current[0])


def test_a_bound_reaches_the_sampler(model):
    examples = [TASKS["copy"].example(4, 0)]
    settings = {"max_denoising_steps": 2, "max_new_tokens": CANVAS, "keep": True}
    tight, loose = (by_diffusion(model, examples, entropy_bound=b, **settings)[0].traces[0] for b in (1e-9, 1e9))
    assert tight.commits_per_step.tolist() == [1, 1]
    assert loose.commits_per_step.tolist() == [CANVAS, CANVAS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_at_a_time_is_the_encoder_read_again_and_again(model, temperature):
    """Against the whole sequence encoded anew for each token, without a cache."""
    examples = [TASKS["copy"].example(3, i) for i in range(2)]
    found = a_token_at_a_time(model, examples, temperature=temperature, most=5, seed=3)
    ids = batch_of(tokenizer(), [e.prompt for e in examples])["input_ids"]
    start = ids.shape[1]
    torch.manual_seed(3)
    with torch.no_grad():
        for _ in range(5):
            hidden = model.model.encoder(input_ids=ids).last_hidden_state[:, -1]
            logits = 30 * torch.tanh(model.lm_head(hidden) / 30)
            drawn = torch.multinomial(logits.softmax(-1), 1) if temperature else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, drawn], dim=1)
    for row, answer in zip(ids[:, start:].tolist(), found, strict=True):
        assert answer.forwards == answer.tokens == (row.index(EOS_ID) + 1 if EOS_ID in row else 5)
        assert answer.text == "".join(VOCABULARY[t] for t in (row[: row.index(EOS_ID)] if EOS_ID in row else row))


def test_the_global_random_state_is_left_as_it_was(model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a_token_at_a_time(model, [TASKS["copy"].example(3, 0)], temperature=1.0, most=3)
    assert torch.equal(before, torch.get_rng_state())


def test_without_self_conditioning_every_step_is_like_a_first(model):
    asked = batch_of(tokenizer(), ["copy abc="])
    canvas = torch.full((1, CANVAS), 7)
    last = torch.randn(1, CANVAS, len(VOCABULARY))
    with torch.no_grad():
        first = model(**asked, decoder_input_ids=canvas).logits
        usual = model(**asked, decoder_input_ids=canvas, self_conditioning_logits=last).logits
        with without_self_conditioning(model):
            without = model(**asked, decoder_input_ids=canvas, self_conditioning_logits=last).logits
        again = model(**asked, decoder_input_ids=canvas, self_conditioning_logits=last).logits
    assert torch.equal(without, first) and torch.equal(again, usual) and not torch.equal(usual, first)


def test_a_share_has_wilsons_interval():
    """Eight of ten: worked out by hand from the formula."""
    z, n, p = 1.959964, 10, 0.8
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = share_of([True] * 8 + [False] * 2)
    assert (found.share, found.count) == (0.8, 10)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half), abs=1e-6)
    with pytest.raises(LabError, match="no case"):
        share_of([])


def test_aup_is_the_formula():
    """Three points by hand; the order in which they come does not matter, and a worse point counts for less."""
    weight = math.exp(-3 * (1 - 50 / 100))
    by_hand = 1 * 100 + (2 - 1) * (100 + 100) / 2 + (4 - 2) * (50 * weight + 100) / 2
    assert aup([1, 2, 4], [100, 100, 50]) == pytest.approx(by_hand)
    assert aup([4, 1, 2], [50, 100, 100]) == pytest.approx(by_hand)
    assert aup([2], [60]) == 120 and aup([1, 2], [0, 0]) == 0
    with pytest.raises(LabError, match="want as many"):
        aup([1, 2], [3])


def test_what_accepted_positions_share():
    accepted = np.zeros(CANVAS, dtype=bool)
    palindrome = Example("palindrome", 5, "palindrome 5=", "level")
    accepted[[0, 1, 4, 5, 9]] = True  # 0 and 4 mirror each other; 5 and 9 lie behind the answer
    assert total_correlation(palindrome, accepted) == pytest.approx(math.log(26))
    accepted[[2, 3]] = True  # the middle letter mirrors itself
    assert total_correlation(palindrome, accepted) == pytest.approx(2 * math.log(26))
    shuffle = Example("shuffle", 4, "shuffle abcd=", "dcba")
    assert total_correlation(shuffle, accepted) == pytest.approx(4 * math.log(4) - math.log(24))
    with pytest.raises(LabError, match="not counted for sort"):
        total_correlation(replace(shuffle, task="sort"), accepted)


def test_traces_of_an_answer_leave_out_the_padding(model):
    with Scripted(model, [told("abc")]):
        answer = by_diffusion(model, [Example("copy", 3, "copy abc=", "abc")], keep=True)[0]
    (cut,) = answer.answer_traces
    assert (cut.canvas_length, cut.steps, answer.traces[0].canvas_length) == (4, 2, CANVAS)
    assert np.array_equal(cut.entropy, answer.traces[0].entropy[:, :4])
    assert cut.commits_per_step.max() <= 4


def test_wall_times_are_of_whole_answers(model):
    """Both ways are timed as often as asked, and a canvas of two steps is not free."""
    with Scripted(model, [told("abc")]):
        diffusion = by_diffusion(model, [Example("copy", 3, "copy abc=", "abc")])
    assert diffusion[0].forwards == 2
    times = wall_time(model, [TASKS["copy"].example(3, 0)], rounds=2)
    assert {name: len(t) for name, t in times.items()} == {"diffusion": 2, "one at a time": 2}
    assert all((t > 0).all() for t in times.values())


def test_a_model_of_another_vocabulary_is_refused():
    with pytest.raises(LabError, match="not a nano: vocabulary and canvas are 1000 and 256, want 47 and 64"):
        by_diffusion(build("toy-1m"), [TASKS["copy"].example(3, 0)])


def test_no_example_is_refused(model):
    with pytest.raises(LabError, match="no examples"):
        by_diffusion(model, [])


def test_a_bound_of_nothing_is_refused(model):
    with pytest.raises(LabError, match="want more than 0 nats"):
        by_diffusion(model, [TASKS["copy"].example(3, 0)], entropy_bound=0)


# -- variety -------------------------------------------------------------------------------------------------


def drawn(texts, prompt="brackets 8=", task="brackets"):
    example = Example(task, 8, prompt, "")
    return [Answer(example, text, TASKS[task].accepts(prompt, text), 2, len(text) + 1) for text in texts]


def test_variety_counts_different_right_answers():
    found = variety(drawn(["()()()()", "(((())))", "()()()()", "((", "))))(((("]))
    assert (found.draws, found.distinct, found.ways) == (3, 2, 14)
    assert found.even == pytest.approx(14 * (1 - (13 / 14) ** 3))


def test_even_draws_of_very_many_are_all_different():
    """26^12 palindromes: the number to expect keeps its digits."""
    found = variety(drawn(["abba" * 6] * 200, "palindrome 24=", "palindrome"))
    assert (found.distinct, found.draws) == (1, 200)
    assert found.even == pytest.approx(200 - 200 * 199 / 2 / 26**12, abs=1e-9)


def test_variety_of_nothing_right_is_none():
    found = variety(drawn(["(", "abc"]))
    assert (found.draws, found.distinct, found.even) == (0, 0, 0)


@pytest.mark.parametrize("told", [[], drawn(["()"]) + drawn(["()"], "brackets 6=")], ids=["none", "two prompts"])
def test_variety_is_of_one_prompt(told):
    with pytest.raises(LabError, match=f"answers to one prompt, not to {len({a.example.prompt for a in told})}"):
        variety(told)


def test_repeated_prompts_are_held_out_and_one_a_level():
    found = repeated(3, seed="a", tasks=["copy", "shuffle"])
    assert [e.level for e in found] == [level for level in TASKS["shuffle"].shown for _ in range(3)]
    assert len({e.prompt for e in found}) == len(TASKS["shuffle"].shown)
    assert all(TASKS["shuffle"].is_held_out(asked_in(e.prompt), e.answer) for e in found)

"""nano's tasks: what is asked, what is right, and that training and held-out examples never meet."""

from collections import Counter
from itertools import product
from random import Random

import pytest

from dglab_utils.errors import LabError
from dglab_utils.models.nano_tasks import ALPHABET, TASKS, task_of


@pytest.mark.parametrize(
    ("prompt", "right", "wrong"),
    [
        ("copy abc=", ["abc"], ["acb", "abcc", ""]),
        ("reverse abc=", ["cba"], ["abc"]),
        ("sort cabc=", ["abcc"], ["abc", "cabc"]),
        ("double ab=", ["aabb"], ["abab"]),
        ("add 17+25=", ["042"], ["42", "043"]),
        ("add 99+99=", ["198"], ["1198"]),
        ("say 0=", ["zero"], [""]),
        ("say 15=", ["fifteen"], ["ten five"]),
        ("say 40=", ["forty"], ["forty zero"]),
        ("say 507=", ["five hundred seven"], ["five hundred and seven"]),
        ("say 9999=", ["nine thousand nine hundred ninety nine"], ["nine thousand"]),
        ("say 120000=", ["one hundred twenty thousand"], ["one hundred thousand twenty"]),
        ("palindrome 5=", ["level", "aaaaa"], ["levels", "abcde", "12321", "leve"]),
        ("shuffle abc=", ["bca", "abc"], ["abb", "ab", "abcd"]),
        ("sum 2=", ["07+35=42", "00+10=10"], ["07+35=43", "7+35=42", "40+60=100", "07+35=42=42", "+42=42", "03+04=07"]),
        ("brackets 4=", ["()()", "(())"], ["())(", "()", "(((("]),
    ],
)
def test_a_task_knows_right_from_wrong(prompt, right, wrong):
    task = task_of(prompt)
    assert [task.accepts(prompt, answer) for answer in right] == [True] * len(right)
    assert [task.accepts(prompt, answer) for answer in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_level_has_both_parts_and_they_never_meet(task):
    assert set(task.shown) <= set(task.levels) and not set(task.beyond) & set(task.levels)
    assert task.closed == (task.name in ("copy", "reverse", "sort", "double", "add", "say"))
    for level in (*task.levels, *task.beyond):
        parts = []
        for held_out in (False, True):
            drawn = [task.example(level, f"{level}/{i}", held_out=held_out) for i in range(5)]
            for example in drawn:
                assert task.accepts(example.prompt, example.answer)
                assert set(example.prompt + example.answer) <= set(ALPHABET)
            # What tells examples of one task apart: the prompt where that is drawn, the answer where only a level is.
            parts.append({e.answer if e.prompt == f"{task.name} {level}=" else e.prompt for e in drawn})
        assert not parts[0] & parts[1]


def test_an_eighth_is_held_out():
    draws = [TASKS["copy"].example(8, i) for i in range(4000)]
    held_out = sum(TASKS["copy"].is_held_out(e.answer, e.answer) for e in draws)
    assert 0.1 < held_out / 4000 < 0.15


def test_a_seed_is_an_example_on_every_machine():
    assert TASKS["reverse"].example(6, 0).prompt == "reverse vtkgnk="
    assert TASKS["sum"].example(3, 0).answer == "394+570=964"


def test_balanced_brackets_are_drawn_evenly():
    """Five words of length 6, 5,000 draws: each within four standard deviations of 1,000."""
    draw = Random(0)
    counts = Counter(TASKS["brackets"].solve("6", draw) for _ in range(5000))
    assert len(counts) == 5 and all(abs(n - 1000) < 4 * 28.3 for n in counts.values())


@pytest.mark.parametrize(
    ("task", "asked", "characters", "length"),
    [
        ("palindrome", "3", "abcdefghijklmnopqrstuvwxyz", 3),
        ("shuffle", "abcd", "abcd", 4),
        ("sum", "1", "0123456789+=", 5),
        ("brackets", "8", "()", 8),
        ("sort", "cab", "abc", 3),
    ],
)
def test_right_answers_are_counted(task, asked, characters, length):
    """Every text of these characters, tried."""
    texts = ("".join(text) for text in product(characters, repeat=length))
    assert TASKS[task].ways(asked) == sum(TASKS[task].is_valid(asked, text) for text in texts)


@pytest.mark.parametrize(
    ("task", "level", "told"),
    [
        ("copy", 0, "copy: level 0"),
        ("shuffle", 27, "there are 26 letters"),
        ("brackets", 7, "brackets: there is no level 7"),
        ("say", 7, "more than 6 digits"),
    ],
)
def test_an_impossible_level_is_refused(task, level, told):
    with pytest.raises(LabError, match=told):
        TASKS[task].example(level, 0)


@pytest.mark.parametrize("prompt", ["multiply 2*3=", "copy abc", "copy", ""])
def test_a_prompt_of_no_task_is_refused(prompt):
    with pytest.raises(LabError, match="want '<task> <what>='"):
        task_of(prompt)

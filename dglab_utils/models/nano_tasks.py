"""What nano is trained on: a question in characters, an answer that can be checked exactly, a dial of difficulty.

    >>> reverse = TASKS["reverse"]
    >>> example = reverse.example(level=6, seed=0)
    >>> example.prompt, example.answer
    ('reverse vtkgnk=', 'kngktv')

*Closed* tasks have one right answer:

    copy reverse sort    letters                    level: how many
    double               "abc" -> "aabbcc"          level: letters asked; above 31 the answer spans two canvases of 64
    add                  "17+25" -> "042"           level: digits of each number; the sum has one more, so that a
                                                    carry changes digits and never their places
    say                  "42" -> "forty two"        level: digits of the number

*Open* tasks have many, and a validator tells them from others. Their positions depend on each other:

    palindrome           "5" -> "level"             level: letters
    shuffle              "abc" -> "cab"             level: letters given, all different
    sum                  "3" -> "117+045=162"       level: digits of the result, and of both parts
    brackets             "6" -> "(())()"            level: characters

Train and held-out examples never meet: a checksum of what is asked (of the answer, where only a number is asked) puts
one example in eight aside. This module knows nothing of models, and draws from Python's own generator: the same
seed gives the same examples on every machine.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, digits

from dglab_utils.errors import LabError

END = "="  # of every prompt
LETTERS = ascii_lowercase
ALPHABET = LETTERS + digits + " +=()"
HELD_OUT_IN = 8  # one example in so many is held out


@dataclass(frozen=True)
class Example:
    """One question with one right answer (of several, where the task is open)."""

    task: str
    level: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        closed: one right answer, which `answer` computes from what is asked; else `is_valid` decides.
        levels: difficulties trained on, easiest first.
        shown: a few of them, for tables and figures.
        beyond: difficulties never trained on.
        ask: generator and level to what stands between the task's name and the END.
        solve: what is asked, and a generator where there is a choice, to an answer.
        is_valid: what is asked and an answer to whether it is right.
        ways: what is asked to how many answers are right.
    """

    name: str
    closed: bool
    levels: tuple[int, ...]
    shown: tuple[int, ...]
    beyond: tuple[int, ...]
    ask: Callable[[Random, int], str]
    solve: Callable[[str, Random], str]
    is_valid: Callable[[str, str], bool]
    ways: Callable[[str], int] = lambda _: 1

    def example(self, level: int, seed: int | str | Random, *, held_out: bool | None = None) -> Example:
        """One example of this level.

        Args:
            seed: of a generator of its own, or a generator.
            held_out: of the held-out part, of the training part, or (None) of either.

        Raises:
            LabError: a level below 1, or one of which that part has nothing.
        """
        if level < 1:
            raise LabError(f"{self.name}: level {level}; the smallest is 1")
        draw = seed if isinstance(seed, Random) else Random(seed)
        for _ in range(10_000):
            asked = self.ask(draw, level)
            answer = self.solve(asked, draw)
            if not self.is_valid(asked, answer):
                raise LabError(f"{self.name}: there is no level {level}")
            if held_out is None or self.is_held_out(asked, answer) == held_out:
                return Example(self.name, level, f"{self.name} {asked}{END}", answer)
        raise LabError(f"{self.name}: no {'held-out' if held_out else 'training'} example of level {level}")

    def is_held_out(self, asked: str, answer: str) -> bool:
        """Whether the example belongs to the part that training never sees."""
        told = answer if asked.isdecimal() and not self.closed else asked
        return zlib.crc32(f"{self.name} {told}".encode()) % HELD_OUT_IN == 0

    def accepts(self, prompt: str, answer: str) -> bool:
        """Whether this is a right answer to a prompt of this task."""
        return self.is_valid(asked_in(prompt), answer)


def task_called(name: str) -> Task:
    """The task of this name. Raises LabError when there is none."""
    if name not in TASKS:
        raise LabError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def task_of(prompt: str) -> Task:
    """The task that a prompt belongs to. Raises LabError when it is of none."""
    name = prompt.partition(" ")[0]
    if name not in TASKS or not prompt.endswith(END):
        raise LabError(f"prompt {prompt!r}: want '<task> <what>{END}' with a task of {', '.join(TASKS)}")
    return TASKS[name]


def asked_in(prompt: str) -> str:
    """What stands between the task's name and the END. The prompt must be one of a task (`task_of`)."""
    return prompt.partition(" ")[2].removesuffix(END)


# -- what is asked -------------------------------------------------------------------------------------------


def _letters(draw: Random, level: int) -> str:
    return "".join(draw.choices(LETTERS, k=level))


def _different_letters(draw: Random, level: int) -> str:
    if level > len(LETTERS):
        raise LabError(f"shuffle: level {level}, there are {len(LETTERS)} letters")
    return "".join(draw.sample(LETTERS, level))


def _two_numbers(draw: Random, level: int) -> str:
    return f"{_number(draw, level)}+{_number(draw, level)}"


def _number(draw: Random, level: int) -> str:
    """A number of so many digits, the first of them not 0."""
    return str(draw.randrange(10 ** (level - 1) if level > 1 else 0, 10**level))


def _level(_: Random, level: int) -> str:
    return str(level)


# -- answers -------------------------------------------------------------------------------------------------


def _added(asked: str, _: Random | None = None) -> str:
    left, _plus, right = asked.partition("+")
    return f"{int(left) + int(right):0{len(left) + 1}d}"


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def _said(asked: str, _: Random | None = None) -> str:
    return _words(int(asked))


def _words(n: int) -> str:
    if n >= 10**6:
        raise LabError(f"say: {n} has more than 6 digits")
    if n < 20:
        return _ONES[n]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            return f"{_words(n // size)} {name}" + (f" {_words(n % size)}" if n % size else "")
    return _TENS[n // 10] + (f" {_ONES[n % 10]}" if n % 10 else "")


def _doubled(asked: str, _: Random | None = None) -> str:
    return "".join(letter * 2 for letter in asked)


def _palindrome(asked: str, draw: Random) -> str:
    length = int(asked)
    half = _letters(draw, (length + 1) // 2)
    return half + half[: length // 2][::-1]


def _is_palindrome(asked: str, answer: str) -> bool:
    return len(answer) == int(asked) and set(answer) <= set(LETTERS) and answer == answer[::-1]


def _shuffled(asked: str, draw: Random) -> str:
    return "".join(draw.sample(asked, len(asked)))


def _a_sum(asked: str, draw: Random) -> str:
    digits, total = int(asked), int(_number(draw, int(asked)))
    part = draw.randint(0, total)
    return f"{part:0{digits}d}+{total - part:0{digits}d}={total}"


def _is_sum(asked: str, answer: str) -> bool:
    told = re.fullmatch(r"([0-9]+)\+([0-9]+)=([0-9]+)", answer)
    if told is None or {len(number) for number in told.groups()} != {int(asked)}:
        return False
    left, right, total = map(int, told.groups())
    return left + right == total and len(str(total)) == int(asked)


def _sums(asked: str) -> int:
    """A total t has t + 1 ways to be parted."""
    least, most = (10 ** (int(asked) - 1) if int(asked) > 1 else 0), 10 ** int(asked) - 1
    return sum(range(least + 1, most + 2))


def _balanced(asked: str, draw: Random) -> str:
    """A uniform draw, by the cycle lemma: of the rotations of n + 1 ups and n downs, one stays above zero throughout.

    Source: N. Dershowitz and S. Zaks, The cycle lemma and some applications, European J. Combinatorics 11 (1990).
    """
    pairs = int(asked) // 2
    steps = [1] * (pairs + 1) + [-1] * pairs
    draw.shuffle(steps)
    height, lowest, start = 0, 0, 0
    for i, step in enumerate(steps, 1):
        height += step
        if height <= lowest:  # the last lowest point: from there on, every prefix is above
            lowest, start = height, i
    rotated = steps[start:] + steps[:start]
    return "".join("(" if step > 0 else ")" for step in rotated[1:])  # the first up is the one too many


def _is_balanced(asked: str, answer: str) -> bool:
    height = 0
    for bracket in answer:
        height += {"(": 1, ")": -1}.get(bracket, -len(answer) - 1)
        if height < 0:
            return False
    return height == 0 and len(answer) == int(asked)


def _evens(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1, 2))


def _closed(
    name: str, last: int, shown: tuple[int, ...], beyond: tuple[int, ...], ask: Callable, solve: Callable
) -> Task:
    levels = tuple(range(1, last + 1))
    return Task(name, True, levels, shown, beyond, ask, solve, lambda asked, answer: answer == solve(asked, None))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _closed("copy", 24, (4, 8, 16, 24), (28, 32), _letters, lambda asked, _: asked),
        _closed("reverse", 24, (4, 8, 16, 24), (28, 32), _letters, lambda asked, _: asked[::-1]),
        _closed("sort", 24, (4, 8, 16, 24), (28, 32), _letters, lambda asked, _: "".join(sorted(asked))),
        _closed("double", 44, (8, 16, 28, 36, 44), (48,), _letters, _doubled),
        _closed("add", 6, (1, 2, 3, 4, 5, 6), (7, 8), _two_numbers, _added),
        _closed("say", 4, (1, 2, 3, 4), (5, 6), _number, _said),
        Task(
            "palindrome",
            False,
            tuple(range(2, 25)),
            (4, 8, 16, 24),
            (28, 32),
            _level,
            _palindrome,
            _is_palindrome,
            lambda asked: len(LETTERS) ** ((int(asked) + 1) // 2),
        ),
        Task(
            "shuffle",
            False,
            tuple(range(2, 17)),
            (4, 8, 12, 16),
            (18, 20),
            _different_letters,
            _shuffled,
            lambda asked, answer: sorted(answer) == sorted(asked),
            lambda asked: math.factorial(len(asked)),
        ),
        Task("sum", False, tuple(range(1, 6)), (1, 2, 3, 4, 5), (6, 7), _level, _a_sum, _is_sum, _sums),
        Task(
            "brackets",
            False,
            _evens(8, 24),
            (8, 12, 16, 24),
            (28, 32),
            _level,
            _balanced,
            _is_balanced,
            lambda asked: math.comb(int(asked), int(asked) // 2) // (int(asked) // 2 + 1),  # Catalan's number
        ),
    )
}

"""`dglab check --server URL`: do a running server's answers depend on the requests that share its batch?

What is asked is `measure.serving`'s; this module reads prompts, tells, and says how sure it is. Exit status 0 where
every answer was the one given alone, 1 where one was not or where a request alone has two answers, 2 where it could not
be found out: a server that is not there, requests that failed, a check that ended early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from dglab_utils.measure.serving import Asked, Changed, Reply, ask, printable, requests_of
from dglab_utils.runs.check_page import Page, refuse_unwritable, tell
from dglab_utils.runs.prompts import lines_of

PROMPTS = (  # where no file of prompts is given
    "In two sentences: why is the sky blue?",
    "List five prime numbers above fifty.",
    "Write a Python function that reverses a string.",
    "What is the difference between weather and climate?",
)
AROUND = 30  # characters that are shown on either side of a difference
MOST_LISTED = 8  # numbers in a line of the page


def check_server_and_tell(
    url: str,
    *,
    model: str | None,
    prompts: Path | None,
    waves: Sequence[int],
    max_tokens: int,
    timeout: float,
    most_requests: int,
    most_seconds: float,
    seed: int,
    to_json: Path | None,
    to_html: Path | None,
) -> int:
    """Asks, writes the files, prints the page; returns the exit status.

    Args:
        prompts: a text file, a prompt a line; None takes `PROMPTS`.
        to_json, to_html: where the page is written too.

    The others are those of `measure.serving.ask`, as is what is raised.
    """
    refuse_unwritable(to_json, to_html)
    asked_for = lines_of(prompts) if prompts else list(PROMPTS)
    with tqdm(total=requests_of(len(asked_for), waves), desc="asking", unit="request") as bar:
        told = ask(
            url,
            asked_for,
            waves=waves,
            model=model,
            max_tokens=max_tokens,
            seed=seed,
            timeout=timeout,
            most_requests=most_requests,
            most_seconds=most_seconds,
            each=lambda _: bar.update(),
        )
    tell(page_of(url, told), to_json, to_html)
    return status_of(told)


def status_of(told: Asked) -> int:
    """The exit status: 0 all was compared and is the same, 1 something differs, 2 neither is known."""
    if told.changed or told.unsteady:
        return 1
    return 0 if told.compared and not (told.failed or told.partial) else 2


def page_of(url: str, told: Asked) -> Page:
    """The page of a server's answers."""
    n, m, changed = len(told.prompts), len(told.compared), told.changed
    texts, stops = [c for c in changed if c.text_differs], [c for c in changed if c.stop_differs]
    lines = [("server", f"{url}, model {printable(told.model)}"), ("asked", _asked(told))]
    both = len(told.steady) + len(told.unsteady)
    without = f"; {n - both} without two answers" if both < n else ""
    lines.append(("asked alone twice", f"same answer for {len(told.steady)} of {_count(both, 'prompt')}{without}"))
    if m:
        of = f" ({len({c.prompt for c in texts})} of {_count(n, 'prompt')})" if texts else ""
        lines.append(("asked together", f"{len(texts)} of {_count(m, 'answer')} differ from the one given alone{of}"))
        lines.append(("why they ended", f"{len(stops)} of {_count(m, 'answer')} ended for another reason than alone"))
    else:
        lines.append(("asked together", "no answer could be compared with the one given alone"))
    if left := told.not_compared:
        which = sorted({reply.prompt + 1 for reply in left})
        where = f"prompt{'s' * (len(which) != 1)} {_listed(which)}"
        lines.append(("not compared", f"{_count(len(left), 'answer')}: no two equal ones alone for {where}"))
    if told.failed:
        lines.append(("failed", f"{_count(len(told.failed), 'request')}; the first: {told.failed[0].failed}"))
    if changed:
        lines.append(("for example", _shown(min(texts or stops, key=lambda c: (c.at or 0, c.prompt, c.at_once)))))
    if told.partial:
        lines.append(("ended early", f"{told.partial} ({len(told.replies)} of {told.wanted} requests came back)"))
    everything = asdict(told) | {
        "compared": m,
        "changed": [asdict(c) for c in changed],
        "unsteady": told.unsteady,
        "not_compared": sorted({reply.prompt for reply in told.not_compared}),
    }
    caption = "By requests sent together (versions: the most different texts for one prompt)"
    return Page(_verdict(told), lines, {caption: _by_concurrency(told)}, everything)


def _asked(told: Asked) -> str:
    waves = [wave.at_once for wave in told.waves]
    then = f", then together: {_listed(waves)} requests at the same time" if waves else ""
    return f"{_count(len(told.prompts), 'prompt')}, each alone twice{then}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:MOST_LISTED]]
    if len(numbers) > MOST_LISTED:
        shown.append(f"{len(numbers) - MOST_LISTED} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _shown(change: Changed) -> str:
    shown = f"prompt {change.prompt + 1}, sent together with {change.at_once - 1} more"
    if change.at is not None:
        span = slice(max(0, change.at - AROUND), change.at + AROUND)
        alone, there = change.alone[span], change.there[span]
        shown += f", from character {change.at + 1}: {alone!r} alone, {there!r} together"
    if change.stop_differs:
        alone, there = (printable(str(stop), 40) for stop in change.stops)
        shown += f"; ended for {alone!r} alone, {there!r} together"
    return shown


def _by_concurrency(told: Asked) -> list[tuple[str, ...]]:
    heads = ("together", "answers", "differ", "versions", "failed", "median s", "slowest s", "tokens/s")
    rows = [_row("1 (alone)", told.alone, "-", sum(reply.seconds for reply in told.alone))]
    for wave in told.waves:
        compared = any(there.at_once == wave.at_once for _, there in told.compared)
        differ = sum(c.at_once == wave.at_once and c.text_differs for c in told.changed)
        rows.append(_row(str(wave.at_once), wave.replies, str(differ) if compared else "-", wave.seconds))
    return [heads, *rows]


def _row(name: str, replies: Sequence[Reply], differ: str, seconds: float) -> tuple[str, ...]:
    answered = [r for r in replies if not r.failed]
    times = [r.seconds for r in answered]
    tokens = sum(r.tokens for r in answered)
    versions = defaultdict(set)
    for reply in answered:
        versions[reply.prompt].add(reply.text)
    return (
        name,
        str(len(answered)),
        differ,
        str(max(map(len, versions.values()))) if versions else "-",
        str(len(replies) - len(answered)),
        f"{np.median(times):.2f}" if times else "-",
        f"{max(times):.2f}" if times else "-",
        f"{tokens / seconds:.1f}" if tokens else "-",
    )


def _verdict(told: Asked) -> str:
    """What was found, and what that means for who uses the server."""
    m, changed = len(told.compared), told.changed
    if told.unsteady:
        return (
            f"Not steady: {len(told.unsteady)} of {_count(len(told.prompts), 'prompt')} got two different answers even "
            "when asked alone. The same request may be answered otherwise another time, whether or not others use the "
            "server."
        )
    if any(c.text_differs for c in changed):
        return (
            "Not invariant: an answer depends on the requests that are asked at the same time. The same request may be "
            "answered otherwise when others use the server."
        )
    if changed:
        return (
            "Not invariant: no text changed, but why an answer ends depends on the requests that are asked at the same "
            "time. Who reads the finish_reason may see another when others use the server."
        )
    if not m:
        return (
            "Not known: no answer could be compared with the one given alone. This says nothing about "
            "the server: mend what is told above, or let the check finish, and ask again."
        )
    if told.failed or told.partial:
        return (
            f"Not known: {_count(m, 'answer')} given together with others could be compared and no difference was "
            "seen, but some are missing. Those that are missing may differ."
        )
    return (
        f"Invariant here: all {m} answers given together with others were the ones given alone. With these prompts and "
        "so many requests, an answer did not depend on who else asked; other prompts or more requests may still tell."
    )

"""`dglab check --server URL`: do a running server's answers depend on the requests that share its batch?

What is asked is `measure.serving`'s; this module reads prompts, tells, and says how sure it is. Exit status 0 where
every answer was its answer alone, 1 where one was not, 2 where it could not be found out: a server that is not there,
requests that failed, a check that was broken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from dglab_utils.measure.serving import Asked, Changed, Reply, ask, requests_of
from dglab_utils.runs.check_page import Page, refuse_unwritable, tell
from dglab_utils.runs.prompts import lines_of

PROMPTS = (  # where no file of prompts is given
    "In two sentences: why is the sky blue?",
    "List five prime numbers above fifty.",
    "Write a Python function that reverses a string.",
    "What is the difference between weather and climate?",
)
AROUND = 30  # characters that are shown on either side of a difference


def check_server_and_tell(
    url: str,
    *,
    model: str | None,
    prompts: Path | None,
    waves: Sequence[int],
    max_tokens: int,
    timeout: float,
    most_requests: int,
    seed: int,
    to_json: Path | None,
    to_html: Path | None,
) -> int:
    """Asks, writes the files, prints the page; returns the exit status."""
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
            each=lambda _: bar.update(),
        )
    page = page_of(url, told)
    tell(page, to_json, to_html)
    if told.changed or told.unsteady:
        return 1
    return 2 if told.failed or told.partial else 0


def page_of(url: str, told: Asked) -> Page:
    """The page of a server's answers."""
    replies = [r for wave in told.waves for r in wave.replies if not r.failed]
    n, changed = len(told.prompts), told.changed
    stops = [c for c in changed if c.stops[0] != c.stops[1]]
    lines = [
        ("server", f"{url}, model {told.model}"),
        ("asked", f"{n} prompts: each alone twice, then among others at once"),
        ("unsteady alone", f"{len(told.unsteady)} of {n} prompts have two answers when asked alone"),
        (
            "answers differ",
            f"{len(changed)} of {len(replies)} in company, of {len({c.prompt for c in changed})} prompts",
        ),
        ("stops differ", f"{len(stops)} of {len(replies)}"),
        ("failed", f"{len(told.failed)} requests" + (f": {told.failed[0].failed}" if told.failed else "")),
    ]
    if changed:
        lines.append(("first", _shown(min(changed, key=lambda c: c.at), told)))
    if told.partial:
        lines.append(("partial", told.partial))
    everything = asdict(told) | {"changed": [asdict(c) for c in changed], "unsteady": told.unsteady}
    return Page(_verdict(told), lines, {"By requests at once": _by_concurrency(told)}, everything)


def _shown(change: Changed, told: Asked) -> str:
    span = slice(max(0, change.at - AROUND), change.at + AROUND)
    return (
        f"prompt {change.prompt + 1} with {change.at_once} at once, from character {change.at + 1}: "
        f"{change.alone[span]!r} alone, {change.there[span]!r} in company"
    )


def _by_concurrency(told: Asked) -> list[tuple[str, ...]]:
    heads = ("at once", "answers", "differ", "different answers", "failed", "median s", "slowest s", "tokens/s")
    alone = sum(reply.seconds for reply in told.alone)
    rows = [_row("1", told.alone, 0, alone)]
    for wave in told.waves:
        differ = sum(c.at_once == wave.at_once for c in told.changed)
        rows.append(_row(str(wave.at_once), wave.replies, differ, wave.seconds))
    return [heads, *rows]


def _row(name: str, replies: Sequence[Reply], differ: int, seconds: float) -> tuple[str, ...]:
    answered = [r for r in replies if not r.failed]
    times = [r.seconds for r in answered] or [float("nan")]
    tokens = sum(r.tokens for r in answered)
    distinct = len({(r.prompt, r.text, r.stop) for r in answered})
    return (
        name,
        str(len(answered)),
        str(differ),
        f"{distinct} to {len({r.prompt for r in answered})} prompts",
        str(len(replies) - len(answered)),
        f"{np.median(times):.2f}",
        f"{max(times):.2f}",
        f"{tokens / seconds:.1f}" if tokens else "not told",
    )


def _verdict(told: Asked) -> str:
    if told.changed:
        return "Not invariant: an answer depends on the requests that are asked at the same time."
    if told.unsteady:
        return "Not steady: a request has several answers even when it is asked alone."
    if told.failed or told.partial:
        return "Not known: every answer was the one given alone, but some requests have none."
    return "Invariant here: every answer was the one given alone."

"""The question of `invariance`, put to a running server: does an answer depend on the requests that share its batch?

    report = ask(url, prompts, waves=(2, 4))       # an OpenAI-compatible server: vLLM, SGLang, llama.cpp, ...

Each prompt is asked alone, twice, and again in waves of k requests that are under way together: the same seed,
temperature 0, the same limit of tokens. What a server batches is its own affair; the answers tell. Each request and
the whole check have a time limit, and there are as many requests as `requests_of` says, no more. A request that fails
is counted with its reason; it is an error when nothing was answered: at the end, or as soon as a failure says that no
such API is there or both of the first two prompts failed for the same reason.

The official client of OpenAI does the talking; this module knows no server by name.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from dglab_utils.errors import LabError

LATE = (
    "a request took longer than --timeout; the server may still be working on it, so nothing after it would be alone; "
    "raise --timeout"
)
NO_COMPLETION = "the answer is not that of a chat completion (no JSON, a stream, or other fields)"
NO_TEXT = "an answer without text (raise --max-tokens?)"
MOST_TOKENS = 2**31  # a count above is none


@dataclass(frozen=True)
class Reply:
    """One request and what came of it.

    Attributes:
        prompt: index among the prompts.
        at_once: requests that were under way together; 1 alone.
        text: the answer, as it came; with reasoning or tool calls, all of it, each part named. None where it failed.
        stop: why the answer ended; None where the server does not say or the request failed.
        tokens: of the answer, as the server counts them; 0 where it does not.
        seconds: from asking to the whole answer.
        failed: why, in few words; empty where it did not.
        late: it failed for the time limit: the server may still be working on it.
        no_api: it failed as others will: no server is there, it is no such API, or it lets nobody in.
    """

    prompt: int
    at_once: int
    text: str | None
    stop: str | None
    tokens: int
    seconds: float
    failed: str = ""
    late: bool = False
    no_api: bool = False

    @property
    def answer(self) -> tuple[str | None, str | None]:
        """What is compared."""
        return self.text, self.stop


@dataclass(frozen=True)
class Wave:
    """Requests together of one size, over all prompts.

    Attributes:
        at_once: requests that were under way together.
        replies: as they arrived.
        seconds: of the whole wave.
    """

    at_once: int
    replies: tuple[Reply, ...]
    seconds: float


@dataclass(frozen=True)
class Changed:
    """An answer that is another in a wave than alone: its text, why it ended, or both.

    Attributes:
        prompt: index among the prompts.
        at_once: requests that were under way together.
        at: first character that differs; None where the texts are the same.
        alone, there: the texts.
        stops: why the answer ended alone and there.
    """

    prompt: int
    at_once: int
    at: int | None
    alone: str
    there: str
    stops: tuple[str | None, str | None]

    @property
    def text_differs(self) -> bool:
        """Whether the texts are two."""
        return self.at is not None

    @property
    def stop_differs(self) -> bool:
        """Whether the answers ended for two reasons."""
        return self.stops[0] != self.stops[1]


@dataclass(frozen=True)
class Asked:
    """What a server answered.

    Attributes:
        model: as the server calls it.
        prompts: what was asked.
        alone: each prompt twice by itself: an answer that changes there does not need a batch to change.
        waves: those of which a reply arrived.
        wanted: requests that were to be made.
        partial: why it ended early; empty where it did not.
    """

    model: str
    prompts: tuple[str, ...]
    alone: tuple[Reply, ...]
    waves: tuple[Wave, ...]
    wanted: int
    partial: str = ""

    @property
    def replies(self) -> list[Reply]:
        """All that arrived, failed ones too."""
        return [*self.alone, *(reply for wave in self.waves for reply in wave.replies)]

    @property
    def failed(self) -> list[Reply]:
        """Requests without an answer."""
        return [reply for reply in self.replies if reply.failed]

    @property
    def steady(self) -> dict[int, Reply]:
        """Of each prompt that was answered alone twice, and the same: that answer."""
        return {i: a[0] for i, a in self._answered_alone().items() if len(a) == 2 and a[0].answer == a[1].answer}

    @property
    def unsteady(self) -> list[int]:
        """Prompts that have two answers when asked alone twice."""
        return [i for i, a in self._answered_alone().items() if len({reply.answer for reply in a}) > 1]

    @property
    def compared(self) -> list[tuple[Reply, Reply]]:
        """(the answer alone, an answer in a wave), wherever there are both and the prompt is steady alone."""
        alone = self.steady
        return [(alone[reply.prompt], reply) for reply in self._answered_in_waves() if reply.prompt in alone]

    @property
    def not_compared(self) -> list[Reply]:
        """Answers in waves that have no steady answer alone to be compared with."""
        alone = self.steady
        return [reply for reply in self._answered_in_waves() if reply.prompt not in alone]

    @property
    def changed(self) -> list[Changed]:
        """Of what was compared, where the answer in the wave is another than alone."""
        return [_change(alone, there) for alone, there in self.compared if alone.answer != there.answer]

    def _answered_alone(self) -> dict[int, list[Reply]]:
        answers: dict[int, list[Reply]] = {}
        for reply in self.alone:
            if not reply.failed:
                answers.setdefault(reply.prompt, []).append(reply)
        return answers

    def _answered_in_waves(self) -> list[Reply]:
        return [reply for wave in self.waves for reply in wave.replies if not reply.failed]


def _change(alone: Reply, there: Reply) -> Changed:
    a, b = alone.text or "", there.text or ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return Changed(there.prompt, there.at_once, None if a == b else at, a, b, (alone.stop, there.stop))


def requests_of(prompts: int, waves: Sequence[int]) -> int:
    """How many requests `ask` makes, at most."""
    return 2 * prompts + sum(prompts * k for k in set(waves))


def ask(
    url: str,
    prompts: Sequence[str],
    *,
    waves: Sequence[int] = (2, 4, 8),
    model: str | None = None,
    max_tokens: int = 64,
    seed: int = 0,
    timeout: float = 60.0,
    most_requests: int = 1000,
    most_seconds: float = 600.0,
    each: Callable[[Reply], object] = lambda _: None,
) -> Asked:
    """Asks every prompt alone, twice, and in waves of so many requests together.

    In a wave of k each prompt is asked k times: once as itself, beside k - 1 others in their order, and so for every
    prompt; with one prompt, beside copies of itself.

    It ends early, with what has arrived, on Ctrl-C, after `most_seconds`, and when a request alone runs into its time
    limit: what is asked after that might not be alone.

    Args:
        url: of the API, such as http://127.0.0.1:8000/v1. The key is that of the environment, OPENAI_API_KEY.
        waves: sizes, each from 2; one that is named twice is asked once.
        model: as the server calls it; None takes the only one it has.
        max_tokens: of an answer.
        timeout: seconds for one request.
        most_requests: refuse to make more.
        most_seconds: for the whole check.
        each: called with each reply as it comes.

    Raises:
        LabError: no server there, none that answers as OpenAI's API does, no request answered, or more of them than
            allowed.
        KeyboardInterrupt: before anything was answered.
    """
    waves = list(dict.fromkeys(waves))
    if not prompts or not all(prompts):
        raise LabError("server: no prompt, or an empty one; give one a line")
    if not waves or min(waves) < 2 or max_tokens < 1:
        raise LabError(f"server: waves {waves}, tokens {max_tokens}: want from 2, from 1")
    if not (0 < timeout < math.inf and 0 < most_seconds < math.inf):
        raise LabError(f"server: {timeout} s for a request, {most_seconds} s for all: want finite numbers above 0")
    if (count := requests_of(len(prompts), waves)) > most_requests:
        raise LabError(f"server: that is {count} requests, {most_requests} are allowed; give fewer prompts or waves")
    asking = _ask(url, tuple(prompts), waves, model, max_tokens, seed, timeout, most_seconds, each)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asking)  # which cancels it on Ctrl-C
    return _beside_a_running_loop(asking)


def _beside_a_running_loop(asking: Coroutine[Any, Any, Asked]) -> Asked:
    """Runs it in a thread, as a notebook has a loop that runs already. Ctrl-C reaches it as from `asyncio.run`."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(asking)
    with closing(loop), ThreadPoolExecutor(1) as pool:
        told = pool.submit(loop.run_until_complete, task)
        try:
            return told.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
        try:
            return told.result()
        except asyncio.CancelledError:  # nothing had been answered
            raise KeyboardInterrupt from None


async def _ask(
    url: str,
    prompts: tuple[str, ...],
    waves: list[int],
    model: str | None,
    max_tokens: int,
    seed: int,
    timeout: float,
    most_seconds: float,
    each: Callable[[Reply], object],
) -> Asked:
    replies: list[Reply] = []  # each as it arrives: what ends the check early loses none
    seconds: dict[int, float] = {}  # of each wave
    name, partial = model or "", ""

    async def one(prompt: int, at_once: int) -> Reply:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                told = await client.chat.completions.with_raw_response.create(
                    model=name,
                    messages=[{"role": "user", "content": prompts[prompt]}],
                    temperature=0,
                    seed=seed,
                    max_tokens=max_tokens,
                )
            text, stop, tokens = _completion(told.http_response.content)
            reply = Reply(prompt, at_once, text, stop, tokens, time.perf_counter() - began)
        except Exception as error:
            late = isinstance(error, (APITimeoutError, TimeoutError))
            took, why = time.perf_counter() - began, _reason(error, timeout)
            reply = Reply(prompt, at_once, None, None, 0, took, failed=why, late=late, no_api=_no_api(error))
        replies.append(reply)
        each(reply)
        return reply

    async def all_of_them() -> str:
        """Asks; returns why it ended early."""
        for prompt in range(len(prompts)):
            for _ in range(2):
                if (await one(prompt, 1)).late:
                    return LATE
            same = prompt > 0 and len({reply.failed for reply in replies}) == 1
            if all(reply.failed for reply in replies) and (same or replies[-1].no_api):
                return "nothing was answered"  # and the other prompts would fail as well
        for at_once in waves:
            began = time.perf_counter()
            try:
                for prompt in range(len(prompts)):
                    who = [(prompt + i) % len(prompts) for i in range(at_once)]
                    await asyncio.gather(*(one(i, at_once) for i in who))
            finally:
                seconds[at_once] = time.perf_counter() - began
        return ""

    try:
        async with asyncio.timeout(most_seconds), _client(url, timeout) as client:
            name = name or await _only_model(client, url, timeout)
            partial = await all_of_them()
    except TimeoutError:
        partial = f"ended after {most_seconds:g} s (--most-seconds)"
    except asyncio.CancelledError:  # Ctrl-C
        if all(reply.failed for reply in replies):
            raise
        partial = "broken off"
    if all(reply.failed for reply in replies):
        raise LabError(f"{url}: no request was answered: {replies[0].failed if replies else partial}")
    arrived = {k: tuple(reply for reply in replies if reply.at_once == k) for k in (1, *seconds)}
    done = tuple(Wave(k, arrived[k], took) for k, took in seconds.items() if arrived[k])
    return Asked(name, prompts, arrived[1], done, requests_of(len(prompts), waves), partial)


def _client(url: str, timeout: float) -> AsyncOpenAI:
    key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
    if not (key.isascii() and key.isprintable()):
        raise LabError("OPENAI_API_KEY: has characters that no header of a request can carry; copy the key again")
    example = "give one such as http://127.0.0.1:8000/v1"
    try:
        client = AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0)
    except Exception as error:  # whose class depends on which HTTP library the client brings
        raise LabError(f"server {url!r}: no address of a server ({printable(str(error))}); {example}") from None
    if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
        raise LabError(f"server {url!r}: no address with http:// or https:// and a host; {example}")
    return client


async def _only_model(client: AsyncOpenAI, url: str, timeout: float) -> str:
    try:
        async with asyncio.timeout(timeout):
            told = await client.models.with_raw_response.list()
    except Exception as error:
        why = _reason(error, timeout)
        raise LabError(f"{url}: {why}; is it the address of an OpenAI-compatible API?") from None
    try:
        names = [model["id"] for model in json.loads(told.http_response.content)["data"]]
        if not all(isinstance(name, str) and name for name in names):
            raise TypeError
    except Exception:  # of whatever a server can send
        raise LabError(f"{url}: its list of models has no names that can be read; name the model to ask") from None
    if len(names) != 1:
        some = ", ".join(printable(name) for name in names[:5]) or "none"
        raise LabError(f"{url}: serves {len(names)} models ({some}); name one")
    return names[0]


class _Unusable(Exception):
    """An answer with nothing to compare; says why."""


def _completion(body: bytes) -> tuple[str, str | None, int]:
    """(text, why it ended, tokens) of a chat completion; `_Unusable` where it is none or has no text.

    The JSON is read here and not by the client, which checks no types.
    """
    try:
        told = json.loads(body)
        choice = told["choices"][0]
        text, stop = _text(choice["message"]), choice.get("finish_reason")
        tokens = (told.get("usage") or {}).get("completion_tokens")
        if not isinstance(stop, str | None):
            raise TypeError
    except Exception:  # of whatever a server can send
        raise _Unusable(NO_COMPLETION) from None
    if not text:
        raise _Unusable(NO_TEXT)
    return text, stop, tokens if type(tokens) is int and 0 <= tokens < MOST_TOKENS else 0


def _text(message: dict[str, Any]) -> str:
    """All that a message says; any error where a part of it is of a wrong type."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise TypeError
        content = "".join(part["text"] for part in content)
    parts: list[tuple[str, Any]] = [
        ("reasoning", message.get("reasoning_content") or message.get("reasoning")),
        ("answer", content),
        ("refusal", message.get("refusal")),
    ]
    for call in message.get("tool_calls") or []:  # without its id, which is drawn anew for each
        parts.append(("call", call["function"]["name"] + "(" + call["function"]["arguments"] + ")"))
    if not all(isinstance(part, str | None) for _, part in parts):
        raise TypeError
    said = [(name, part) for name, part in parts if part]
    if [name for name, _ in said] == ["answer"]:
        return said[0][1]  # as it came
    # Named, so that a word that moves from one part to another is a difference.
    return "\n".join(f"[{name}] {part}" for name, part in said)


def _reason(error: Exception, timeout: float) -> str:
    """Few words for what went wrong with a request."""
    if isinstance(error, (APITimeoutError, TimeoutError)):
        return f"no answer within {timeout:g} s (raise --timeout?)"
    if isinstance(error, APIStatusError):
        told = str(error.message).removeprefix(f"Error code: {error.status_code} - ")
        return f"HTTP {error.status_code}: {printable(told)}"
    if isinstance(error, APIConnectionError):
        cause = printable(str(error.__cause__ or error)) or "the connection was closed"
        return f"no server answers ({cause})"
    if isinstance(error, (APIError, _Unusable)):
        return printable(str(error))
    return f"{type(error).__name__}: {printable(str(error))}"


def _no_api(error: Exception) -> bool:
    """Whether it is not about one request: no server, no such API, or one that lets nobody in."""
    if isinstance(error, APIStatusError):
        return error.status_code in (401, 403, 404)
    if isinstance(error, APIConnectionError):
        return not isinstance(error, APITimeoutError)
    return isinstance(error, _Unusable) and str(error) == NO_COMPLETION


def printable(text: str, most: int = 200) -> str:
    """One line of what a server sent, cut short; what is no letter or sign, such as a terminal's commands, escaped."""
    line = " ".join(text[: 2 * most].split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)[:most]

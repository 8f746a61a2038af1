"""The question of `invariance`, put to a running server: does an answer depend on the requests that share its batch?

    report = ask(url, prompts, waves=(1, 2, 4))       # an OpenAI-compatible server: vLLM, SGLang, llama.cpp, ...

Each prompt is asked alone, and again in waves of k requests at once, among the others: the same seed, temperature 0,
the same limit of tokens. What a server batches is its own affair; the answers tell. Every request has a time limit, and
there are as many as `requests_of` says, no more. A request that fails is counted with its reason; only a server that
answers nothing at all is an error.

The official client of OpenAI does the talking; this module knows no server by name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from dglab_utils.errors import LabError


@dataclass(frozen=True)
class Reply:
    """One request and what came of it.

    Attributes:
        prompt: index among the prompts.
        at_once: requests that were under way together.
        text, stop: the answer and why it ended; None where it failed.
        tokens: of the answer, as the server counts them; 0 where it does not.
        seconds: from asking to the whole answer.
        failed: why, in few words; empty where it did not.
    """

    prompt: int
    at_once: int
    text: str | None
    stop: str | None
    tokens: int
    seconds: float
    failed: str = ""


@dataclass(frozen=True)
class Wave:
    """Requests at once of one size, over all prompts.

    Attributes:
        seconds: of the whole wave.
    """

    at_once: int
    replies: tuple[Reply, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of what was answered."""
        return sum(reply.tokens for reply in self.replies) / self.seconds


@dataclass(frozen=True)
class Changed:
    """An answer that is another in a wave than alone."""

    prompt: int
    at_once: int
    at: int  # first character that differs
    alone: str
    there: str
    stops: tuple[str | None, str | None]


@dataclass(frozen=True)
class Asked:
    """What a server answered.

    Attributes:
        model: as the server calls it.
        alone: each prompt twice by itself: an answer that changes there does not need a batch to change.
        waves: by requests at once.
        partial: why it ended early; empty where it did not.
    """

    model: str
    prompts: tuple[str, ...]
    alone: tuple[Reply, ...]
    waves: tuple[Wave, ...]
    partial: str = ""

    @property
    def unsteady(self) -> list[int]:
        """Prompts that have two answers when asked alone twice."""
        answers = self._by_prompt(self.alone)
        return [prompt for prompt, told in answers.items() if len({(r.text, r.stop) for r in told}) > 1]

    @property
    def changed(self) -> list[Changed]:
        """Answers in waves that are not the first answer alone, without those that failed."""
        first = {prompt: told[0] for prompt, told in self._by_prompt(self.alone).items()}
        found = []
        for reply in (reply for wave in self.waves for reply in wave.replies if not reply.failed):
            alone = first.get(reply.prompt)
            if alone is None or (alone.text, alone.stop) == (reply.text, reply.stop):
                continue
            texts = alone.text or "", reply.text or ""
            at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            found.append(Changed(reply.prompt, reply.at_once, at, *texts, (alone.stop, reply.stop)))
        return found

    @property
    def failed(self) -> list[Reply]:
        """Requests without an answer."""
        return [r for r in (*self.alone, *(r for wave in self.waves for r in wave.replies)) if r.failed]

    @staticmethod
    def _by_prompt(replies: Sequence[Reply]) -> dict[int, list[Reply]]:
        answers: dict[int, list[Reply]] = {}
        for reply in replies:
            if not reply.failed:
                answers.setdefault(reply.prompt, []).append(reply)
        return answers


def requests_of(prompts: int, waves: Sequence[int]) -> int:
    """How many requests `ask` makes."""
    return 2 * prompts + sum(prompts * k for k in waves)


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
    each: Callable[[Reply], object] = lambda _: None,
) -> Asked:
    """Asks every prompt alone, twice, and in waves of so many requests at once.

    In a wave of k each prompt is asked k times: once as itself, beside k - 1 others in their order, and so for every
    prompt; with one prompt, beside copies of itself.

    Args:
        url: of the API, such as http://127.0.0.1:8000/v1.
        model: as the server calls it; None takes the only one it has.
        timeout: seconds for one request.
        each: called with each reply as it comes.

    Raises:
        LabError: no server there, none that answers as OpenAI's API does, or more requests than allowed.
    """
    if not prompts or not all(prompts):
        raise LabError("server: no prompt, or an empty one; give one a line")
    if not waves or min(waves) < 2 or timeout <= 0 or max_tokens < 1:
        raise LabError(f"server: waves {list(waves)}, timeout {timeout}, tokens {max_tokens}: want from 2, > 0, from 1")
    if (count := requests_of(len(prompts), waves)) > most_requests:
        raise LabError(f"server: that is {count} requests, {most_requests} are allowed; give fewer prompts or waves")
    asking = _ask(url, list(prompts), list(waves), model, max_tokens, seed, timeout, each)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asking)
    # A notebook has a loop that runs already; this one gets a thread to itself.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, asking).result()


async def _ask(
    url: str,
    prompts: list[str],
    waves: list[int],
    model: str | None,
    max_tokens: int,
    seed: int,
    timeout: float,
    each: Callable[[Reply], object],
) -> Asked:
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0) as client:
        model = model or await _only_model(client, url)

        async def one(prompt: int, at_once: int) -> Reply:
            began = time.perf_counter()
            try:
                answer = await asyncio.wait_for(
                    client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": prompts[prompt]}],
                        temperature=0,
                        seed=seed,
                        max_tokens=max_tokens,
                    ),
                    timeout,
                )
                choice = answer.choices[0]
                text, stop = choice.message.content or "", choice.finish_reason
                tokens = answer.usage.completion_tokens if answer.usage else 0
                told = Reply(prompt, at_once, text, stop, tokens, time.perf_counter() - began)
            except Exception as error:
                seconds = time.perf_counter() - began
                told = Reply(prompt, at_once, None, None, 0, seconds, failed=_reason(error, timeout))
            each(told)
            return told

        alone: list[Reply] = []
        done: list[Wave] = []
        try:
            for prompt in range(len(prompts)):
                alone += [await one(prompt, 1), await one(prompt, 1)]
            if all(reply.failed for reply in alone):
                raise LabError(f"{url}: no request was answered: {alone[0].failed}")
            for at_once in waves:
                began, replies = time.perf_counter(), []
                for prompt in range(len(prompts)):
                    who = [(prompt + i) % len(prompts) for i in range(at_once)]
                    replies += await asyncio.gather(*(one(i, at_once) for i in who))
                done.append(Wave(at_once, tuple(replies), time.perf_counter() - began))
        except asyncio.CancelledError:  # Ctrl-C
            if not alone:
                raise
            return Asked(model, tuple(prompts), tuple(alone), tuple(done), partial="broken off")
        return Asked(model, tuple(prompts), tuple(alone), tuple(done))


async def _only_model(client: AsyncOpenAI, url: str) -> str:
    try:
        names = [model.id async for model in client.models.list()]
    except Exception as error:
        told = _reason(error, client.timeout)
        raise LabError(f"{url}: {told}; is it the address of an OpenAI-compatible API?") from None
    if len(names) != 1:
        some = ", ".join(names[:5]) or "none"
        raise LabError(f"{url}: serves {len(names)} models ({some}); name one")
    return names[0]


def _reason(error: Exception, timeout: object) -> str:
    """Few words for what went wrong with a request."""
    if isinstance(error, (APITimeoutError, TimeoutError)):
        return f"no answer within {timeout} s"
    if isinstance(error, APIStatusError):
        return f"HTTP {error.status_code}: {' '.join(str(error.message).split())[:200]}"
    if isinstance(error, APIConnectionError):
        cause = error.__cause__ or error
        return f"no server answers ({' '.join(str(cause).split())[:200]})"
    if isinstance(error, APIError):
        return " ".join(str(error).split())[:200]
    # The client hands on what is no JSON as a bare string, and an answer without choices as it came.
    return "the answer is not that of a chat completion (no JSON, a stream, or other fields)"

"""`dglab check MODEL`: does a request's text depend on its batch, here? Where does that start, and what helps?

One page: in the terminal, and on request as JSON and as HTML. Exit status 0 where every request had the values of its
single run in every batch, 1 where not, 2 where it could not be found out.

What is measured is `measure.invariance`'s; this module reads prompts, asks, and tells. A check that is broken off, runs
out of memory, or cannot look for the cause, tells what it has until then and says what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import count as counting
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedModel

from dglab_utils.errors import LabError
from dglab_utils.measure import invariance, invariance_fix
from dglab_utils.measure.divergence import Divergence
from dglab_utils.measure.invariance import Comparison, capped, comparisons_of, copies_of, drawn_prompts, row_seeds
from dglab_utils.measure.invariance_fix import ONE_BY_ONE, Fix, Setting
from dglab_utils.measure.timing import out_of_memory, refuse_unless_fits, unless_out_of_memory
from dglab_utils.models.loading import TRAINED, load, load_tokenizer
from dglab_utils.models.nano_tasks import TASKS
from dglab_utils.models.shapes import as_device, as_dtype
from dglab_utils.runs.check_page import Page, refuse_unwritable, tell
from dglab_utils.runs.prompts import lines_of

TOKENS = 64  # of a causal model's answer, where no number is given
MOST_SEED = 2**63 - 1


@dataclass
class Report:
    """What was asked of which model where, and what came out; filled as the check goes on.

    Attributes:
        prompts_from: where the prompts are from, in words.
        comparisons: those that were made, of `wanted`.
        helps: the cheapest way found in which all prompts are independent of their batch, tried on all of them.
        confirmed: whether `helps` is known: looked for among all prompts.
        partial: why it ended early; empty where it did not.
        unexplained: what went wrong when looking for cause and remedy; empty where nothing did.
        why_no_cause: why a cause was not looked for; empty where it was.
        searched: whether a remedy was to be looked for.
    """

    model: str
    device: str
    dtype: str
    batch: int
    prompts: int
    prompt_tokens: int
    prompts_from: str
    wanted: int
    comparisons: list[Comparison] = field(default_factory=list)
    divergence: Divergence | None = None
    fix: Fix | None = None
    helps: Setting | None = None
    confirmed: bool = False
    partial: str = ""
    unexplained: str = ""
    why_no_cause: str = ""
    searched: bool = True

    @property
    def invariant(self) -> bool | None:
        """Whether nothing differed, at any step of any comparison; None where not all were made and none differed."""
        if not all(c.same for c in self.comparisons):
            return False
        return True if len(self.comparisons) == self.wanted else None

    def prompts_with(self, differs: Callable[[Comparison], object]) -> int:
        """Prompts of which a comparison differs so."""
        return len({c.prompt for c in self.comparisons if differs(c)})


def check(
    source: str,
    *,
    batch: int,
    prompts: Path | None,
    count: int,
    seed: int,
    device: str,
    dtype: str,
    steps: int | None,
    fix: bool,
) -> Report:
    """Runs the check.

    Args:
        prompts: a text file, a prompt a line, all of as many tokens; None draws `count`: tasks of its own for nano,
            random tokens for others.
        dtype: of the weights; "auto" for that of the checkpoint.
        steps: cap on denoising steps, or new tokens of a causal model; None leaves the checkpoint's settings, and takes
            TOKENS of a causal model.
        fix: look for the cheapest settings that help, where something differs.

    Raises:
        LabError: nothing could be compared.
    """
    if not 0 <= seed <= MOST_SEED or (steps is not None and steps < 1) or count < 1:
        raise LabError(f"check: seed {seed}, steps {steps}, count {count}: want 0 to 2^63 - 1, from 1, from 1")
    invariance.check_batch(torch.zeros(1, 1), batch)
    lines = lines_of(prompts) if prompts else None
    model = _loaded(source, device, dtype)
    tokens, prompts_from = _prompts(source, model, lines, prompts, count, seed)
    settings = _settings(model, tokens, steps)
    told = Report(
        model=model.name_or_path,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        batch=batch,
        prompts=len(tokens),
        prompt_tokens=tokens.shape[1],
        prompts_from=prompts_from,
        wanted=comparisons_of(len(tokens), batch),
        searched=fix,
    )

    def ask() -> bool:
        asked = invariance.protocol(model, tokens, batch=batch, seeds=row_seeds(len(tokens), seed), **settings)
        for found in tqdm(asked, total=told.wanted, desc="comparing", unit="row"):
            told.comparisons.append(found)
        if not told.invariant:
            _explain(told, model, tokens, seed, settings, fix)
        return True

    try:
        told.partial = "" if unless_out_of_memory(ask) else "out of memory"
    except KeyboardInterrupt:
        told.partial = "broken off"
    if not told.comparisons:
        raise LabError(f"{source}: {told.partial} before anything was compared; take a smaller batch or fewer steps")
    return told


def _loaded(source: str, device: str, dtype: str) -> PreTrainedModel:
    """The model; one line where its weights do not fit, before they are read where their files tell."""
    folder = Path(TRAINED.get(source, source))
    if folder.is_dir():
        remedy = "take another device" + (", or --dtype bfloat16" if dtype != "bfloat16" else "")
        refuse_unless_fits(_weights(folder, dtype), as_device(device), f"{source}: loading its weights", remedy)
    try:
        return load(source, device=device, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise LabError(f"{source}: its weights do not fit on {device}; take another device or dtype") from None


def _weights(folder: Path, dtype: str) -> int:
    """Bytes of a checkpoint's weights once they are loaded; 0 where its files do not tell."""
    total = 0
    try:
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for name in names:
            with safe_open(folder / name, "pt") as stored:
                for tensor in stored.keys():  # noqa: SIM118 (no mapping)
                    part = stored.get_slice(tensor)
                    size = _STORED.get(part.get_dtype(), 1) if dtype == "auto" else as_dtype(dtype).itemsize
                    total += size * torch.Size(part.get_shape()).numel()
    except LabError:
        raise
    except Exception:  # whatever is wrong with the files, `load` says it better
        return 0
    return total


_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def _settings(model: PreTrainedModel, tokens: Tensor, steps: int | None) -> dict[str, Any]:
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        return {} if steps is None else capped(model, steps)
    new, most = steps or TOKENS, getattr(model.config, "max_position_embeddings", None)
    if most is not None and tokens.shape[1] + new > most:
        raise LabError(f"prompts of {tokens.shape[1]} tokens and {new} new ones: the model has {most} positions")
    return {"max_new_tokens": new}


def _explain(
    told: Report, model: PreTrainedModel, tokens: Tensor, seed: int, settings: dict[str, Any], fix: bool
) -> None:
    """Where the earliest difference starts, and what helps. What goes wrong here loses nothing that was compared."""
    seeds = row_seeds(len(tokens), seed)
    differing = [c for c in told.comparisons if not c.same]
    copied = [c for c in differing if c.first and not c.placement.neighbours]
    if copied:
        worst = min(copied, key=lambda c: c.first.step if c.first else 0)
        who = [worst.prompt]
    else:  # copies are alike: it takes the others of its batch
        worst = differing[0]
        begin = worst.prompt - worst.placement.row
        who = [(begin + i) % len(tokens) for i in range(min(told.batch, len(tokens)))]
        told.why_no_cause = "it takes different prompts in a batch, and the search compares copies"
    some, own = tokens[who], [seeds[i] for i in who]
    try:
        if copied and worst.first:
            steps, rows = worst.first.step + 1, worst.placement.rows
            told.divergence = invariance.first_divergence(
                model, some, steps=steps, batch=rows, row_seed=own[0], **settings
            )
        if fix:
            with tqdm(desc="looking for what helps", unit="setting") as bar:
                told.fix = invariance_fix.minimal_fix(
                    model, some, batch=told.batch, seeds=own, each=lambda *_: bar.update(), **settings
                )
            told.helps = invariance_fix.confirmed(model, told.fix, tokens, batch=told.batch, seeds=seeds, **settings)
            told.confirmed = True
    except Exception as error:  # of any model there is
        if out_of_memory(error):
            raise
        told.unexplained = f"{type(error).__name__}: {_one_line(error)}"


def _prompts(
    source: str, model: PreTrainedModel, lines: list[str] | None, path: Path | None, count: int, seed: int
) -> tuple[Tensor, str]:
    """(`[N, P]` token ids, where they are from)."""
    if lines is not None:
        return _encoded(lines, path, source, model), f"of {path}"
    own = {folder.resolve() for folder in TRAINED.values()}
    if Path(TRAINED.get(source, source)).resolve() in own:
        # Random characters end at once; letters to shuffle keep it busy for a dozen steps.
        drawn = (TASKS["shuffle"].example(12, Random(f"check {seed} {i}"), held_out=True).prompt for i in counting())
        distinct: dict[str, None] = {}
        while len(distinct) < count:
            distinct.setdefault(next(drawn))
        return _encoded(list(distinct), path, source, model), "letters to shuffle, a task it was trained on"
    return drawn_prompts(model, count, seed=seed), "random tokens; give --prompts FILE for your own"


def _encoded(lines: list[str], path: Path | None, source: str, model: PreTrainedModel) -> Tensor:
    tokenizer = load_tokenizer(source)
    ids = []
    for line in lines:
        try:
            ids.append(tokenizer(line)["input_ids"])
        except Exception as error:  # tokenizers raises bare ones
            raise LabError(f"{path}: {line!r} cannot be read by this tokenizer ({_one_line(error)})") from None
    other = next((i for i, tokens in enumerate(ids) if len(tokens) != len(ids[0])), None)
    if other is not None:
        raise LabError(
            f"{path}: prompts of different lengths: the first has {len(ids[0])} tokens, {lines[other]!r} has "
            f"{len(ids[other])}; padding would be another cause of differences, so give prompts of one length"
        )
    return torch.tensor(ids, device=model.device)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# -- telling -------------------------------------------------------------------------------------------------


def page_of(told: Report) -> Page:
    """The page of a check."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    details: dict[str, list[tuple[str, ...]]] = {}
    if told.divergence and (shares := _reached(told.divergence)):
        details["How far it spreads"] = [
            ("part of the model", "positions whose values differ there"),
            *((module, f"{share:.1%}") for module, share in shares.items()),
        ]
    if told.fix and told.fix.ways:
        for_all = {str(told.helps): "all requests"} if told.helps else {}
        ways = [(way, str(told.fix.over_plain(way)), for_all.get(way, _enough_for(way))) for way in told.fix.times]
        tables["What each way costs"] = [("way", "times the plain batch", "known to be enough for"), *ways]
    details["How the difference grows"] = _growth(told)
    return Page(_verdict(told), _lines(told), tables, _everything(told), details)


def _enough_for(way: str) -> str:
    return "none" if way == str(Setting()) else "all requests" if way == ONE_BY_ONE else "the first that differed"


def _reached(divergence: Divergence) -> dict[str, float]:
    """Modules in which something differs, and how much of their worst operation."""
    return {module: share for module, share in divergence.by_module().items() if share}


def _growth(told: Report) -> list[tuple[str, ...]]:
    """Of all comparisons in which something differs, the mean share of positions with other logits, by step."""
    grown = [c.growth for c in told.comparisons if not c.same]
    steps = max(map(len, grown), default=0)
    rows = []
    for step in range(steps):
        there = [growth[step] for growth in grown if len(growth) > step]
        rows.append((str(step + 1), f"{sum(there) / len(there):.1%}", str(len(there))))
    return [("step", "positions with other logits", "comparisons that are still going"), *rows]


def _lines(told: Report) -> list[tuple[str, str]]:
    n = told.prompts
    copies = " and ".join(map(str, copies_of(told.batch)))
    of = f"{told.batch} different ones" if n >= told.batch else f"{told.batch} that hold all of them"
    others = f", and in batches of {of}" if n > 1 else ""
    requests = f"{n} request{'s' * (n != 1)}"
    lines = [
        ("model", f"{told.model}, {told.dtype} on {told.device}"),
        ("requests", f"{n} of {told.prompt_tokens} tokens ({told.prompts_from})"),
        ("compared", f"each alone, with itself among {copies} copies of it{others}"),
        ("another text", f"for {told.prompts_with(lambda c: not c.same_text)} of {requests}"),
        ("another number of steps", f"for {told.prompts_with(lambda c: not c.same_stop)} of {requests}"),
        ("another number on the way", f"for {told.prompts_with(lambda c: c.first)} of {requests}"),
    ]
    if told.partial:
        done = f"{len(told.comparisons)} of {told.wanted} comparisons were made"
        if len(told.comparisons) == told.wanted:
            done = "all comparisons were made, not the search for cause and remedy"
        lines.append(("partial", f"{told.partial}: {done}"))
    firsts = [c.first for c in told.comparisons if c.first]
    if firsts:
        earliest = min(firsts, key=lambda f: f.step)
        where = f"in step {earliest.step + 1}, at position {earliest.position + 1}"
        lines.append(("first seen", f"{where}: {_IN_WORDS[earliest.what[0]]}"))
    if told.divergence:
        lines += _start(told.divergence)
    elif told.invariant is False:
        lines.append(("starts in", f"not known ({told.why_no_cause or told.unexplained or told.partial})"))
    if told.invariant is False and told.searched:
        lines += _helps(told)
    return lines


_IN_WORDS = {
    "logits": "logits, the scores of the possible tokens",
    "entropy": "entropy, how unsure it is",
    "accepted": "which positions are accepted",
    "guess": "the most likely token",
}


def _start(divergence: Divergence) -> list[tuple[str, str]]:
    first = divergence.first
    if first is None:
        return [
            ("starts in", "not found: each value of the batch is one of the single row's, in another place perhaps")
        ]
    where = f"{first.operation.module}, {first.operation.name}"
    if first.another_path:
        return [
            ("starts in", f"{where} or before: the batch computes {first.another_path} there, and is not followed on")
        ]
    by = f"by {first.largest:.1e} at most, of values up to {first.magnitude:.1e}"
    if not isfinite(first.largest):
        by = "some of them are no finite numbers"
    if not first.elements:
        by = "in the sign of a zero only"
    lines = [("starts in", f"{where}: {first.elements:.2%} of the values differ, {by}")]
    reached = list(_reached(divergence))
    of = len(divergence.by_module())
    return [*lines, ("spreads to", f"{len(reached)} of the model's {of} parts, the last of them {reached[-1]}")]


def _helps(told: Report) -> list[tuple[str, str]]:
    fix, missing = told.fix, told.unexplained or told.partial
    if fix is None or (fix.ways and not told.confirmed):
        found = f"; for the first that differed: {fix.ways[0]}" if fix else ""
        return [("helps here", f"not known ({missing}){found}")]
    if fix.tried.get(Setting()):
        return [("helps here", "not known (the difference did not come again when it was looked for)")]
    if not fix.ways:
        return [("helps here", "nothing that was tried")]
    if told.helps is None:
        return [("helps here", f"nothing for all requests; for the first that differed: {fix.ways[0]}")]
    ratio, one = fix.over_plain(str(told.helps)), fix.over_plain(ONE_BY_ONE)
    return [
        ("helps here", f"{told.helps}, at {ratio.median:.2f} times the plain batch ({ONE_BY_ONE}: {one.median:.2f})"),
        *(("in Python" if not i else "", line) for i, line in enumerate(told.helps.code)),
    ]


def _verdict(told: Report) -> str:
    if told.invariant is None:
        return f"Not known: {told.partial} before all was compared; until then nothing differed."
    if told.invariant:
        return (
            "Invariant here: text, steps, logits, entropies and choices of each request were those of its single run, "
            "in every batch tried."
        )
    if told.prompts_with(lambda c: not c.same_text):
        return (
            "Not invariant: the text of a request depends on its batch. Who needs the same answer to the same request "
            "must fix the batch, or compute rows independently."
        )
    return (
        "Not invariant, though no text changed here: numbers behind the text depend on the batch, too little to change "
        "these texts. Where two tokens are nearly as likely, such a difference decides between them."
    )


def _everything(told: Report) -> dict[str, Any]:
    plain = asdict(replace(told, fix=None)) | {"invariant": told.invariant}
    plain["helps"] = None if told.helps is None else str(told.helps)
    if told.fix is not None:
        plain["fix"] = {
            "ways": [str(way) for way in told.fix.ways],
            "seconds": {way: seconds.tolist() for way, seconds in told.fix.times.items()},
            "tried": {str(setting): enough for setting, enough in told.fix.tried.items()},
        }
    return plain


def check_and_tell(source: str, *, to_json: Path | None, to_html: Path | None, **asked: Any) -> int:
    """Runs the check, writes the files, prints the page; returns the exit status."""
    refuse_unwritable(to_json, to_html)
    try:
        told = check(source, **asked)
    except (LabError, KeyboardInterrupt):
        raise
    except Exception as error:  # of any model there is: status 1 would say that it is not invariant
        raise LabError(f"{source}: could not be checked: {type(error).__name__}: {_one_line(error)}") from error
    tell(page_of(told), to_json, to_html)
    return {True: 0, False: 1, None: 2}[told.invariant]

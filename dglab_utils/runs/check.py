"""`dglab check MODEL`: does a request's text depend on its batch, here? Where does that start, and what helps?

One page: in the terminal, and on request as JSON and as HTML. Exit status 0 where every request had the values of its
single run in every batch, 1 where not, 2 where it could not be found out.

What is measured is `measure.invariance`'s; this module reads prompts, asks, and tells. A check that is broken off, or
runs out of memory, tells what it has until then and says that it is partial.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedModel

from dglab_utils.errors import LabError
from dglab_utils.measure import invariance, invariance_fix
from dglab_utils.measure.divergence import Divergence
from dglab_utils.measure.invariance import Comparison, capped, drawn_prompts
from dglab_utils.measure.invariance_fix import ONE_BY_ONE, Fix, Setting
from dglab_utils.measure.timing import out_of_memory, refuse_unless_fits, unless_out_of_memory
from dglab_utils.models.loading import TRAINED, load, load_tokenizer
from dglab_utils.models.shapes import as_device
from dglab_utils.runs.check_page import Page, as_text, write
from dglab_utils.runs.prompts import lines_of

SEARCH_STEPS = 2  # denoising steps, or tokens, that a fix is tried and timed on


@dataclass
class Report:
    """What was asked of which model where, and what came out; filled as the check goes on.

    Attributes:
        helps: the cheapest way found in which all prompts are independent of their batch, tried on all of them.
        partial: why it ended early; empty where it did not.
    """

    model: str
    device: str
    dtype: str
    batch: int
    prompts: int
    prompt_tokens: int
    comparisons: list[Comparison] = field(default_factory=list)
    divergence: Divergence | None = None
    fix: Fix | None = None
    helps: Setting | None = None
    partial: str = ""

    @property
    def invariant(self) -> bool:
        """Whether nothing differed, at any step of any comparison."""
        return all(c.same for c in self.comparisons)

    def prompts_with(self, differs: Any) -> int:
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
        prompts: a text file, a prompt a line, all of as many tokens; None draws `count` of random tokens.
        steps: cap on denoising steps, or new tokens of a causal model; None leaves the checkpoint's settings.
        fix: look for the cheapest settings that help, where something differs.

    Raises:
        LabError: nothing could be compared.
    """
    model = _loaded(source, device, dtype)
    tokens = _read_prompts(prompts, source, model) if prompts else drawn_prompts(model, count, seed=seed)
    settings = _settings(model, steps)
    told = Report(model.name_or_path, str(model.device), str(model.dtype).removeprefix("torch."), batch, *tokens.shape)

    def ask() -> bool:
        total = len(tokens) * batch * (2 if len(tokens) > 1 else 1)  # among copies, and among others
        asked = invariance.protocol(model, tokens, batch=batch, seed=seed, **settings)
        for found in tqdm(asked, total=total, desc="comparing", unit="row"):
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
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        refuse_unless_fits(weights, as_device(device), f"{source}: loading its weights")
    try:
        return load(source, device=device, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise LabError(f"{source}: its weights do not fit on {device}; take another device or dtype") from None


def _settings(model: PreTrainedModel, steps: int | None) -> dict[str, Any]:
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        return {} if steps is None else capped(model, steps)
    return {"max_new_tokens": steps or 64}


def _explain(
    told: Report, model: PreTrainedModel, tokens: Tensor, seed: int, settings: dict[str, Any], fix: bool
) -> None:
    """Where the earliest difference starts, and what helps."""
    first, earliest = min(((c.first.step, c.prompt) for c in told.comparisons if c.first), default=(0, 0))
    one = tokens[earliest : earliest + 1]
    asked: dict[str, Any] = {"batch": told.batch, "seed": seed}
    # So many steps that it is among them; a canvas more than the first is not looked into.
    seen = settings | capped(model, max(SEARCH_STEPS, first + 1))
    told.divergence = invariance.first_divergence(model, one, **asked, **seen)
    if not fix:
        return
    with tqdm(desc="looking for what helps", unit="setting") as bar:
        told.fix = invariance_fix.minimal_fix(
            model, one, steps=SEARCH_STEPS, each=lambda *_: bar.update(), **asked, **settings
        )
    told.helps = invariance_fix.confirmed(model, told.fix, tokens, **asked, **settings)


def _read_prompts(path: Path, source: str, model: PreTrainedModel) -> Tensor:
    lines = lines_of(path)
    tokenizer = load_tokenizer(source)
    ids = [tokenizer(line)["input_ids"] for line in lines]
    other = next((i for i, tokens in enumerate(ids) if len(tokens) != len(ids[0])), None)
    if other is not None:
        raise LabError(
            f"{path}: prompts of different lengths: the first has {len(ids[0])} tokens, {lines[other]!r} has "
            f"{len(ids[other])}; padding would be another cause of differences, so give prompts of one length"
        )
    return torch.tensor(ids, device=model.device)


# -- telling -------------------------------------------------------------------------------------------------


def page_of(told: Report) -> Page:
    """The page of a check."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    details: dict[str, list[tuple[str, ...]]] = {}
    if told.divergence:
        shares = [(module, f"{share:.1%}") for module, share in told.divergence.by_module().items() if share]
        details["How far it spreads"] = [("module", "vectors that differ"), *shares]
    if told.fix:
        ways = [(way, f"{told.fix.over_plain(way):.2f}") for way in told.fix.times]
        tables["What each way costs"] = [("way", "times the plain batch"), *ways]
    return Page(_verdict(told), _lines(told), tables, _everything(told), details)


def _lines(told: Report) -> list[tuple[str, str]]:
    n = told.prompts
    others = f", and {n} batches of different prompts" if n > 1 else ""
    lines = [
        ("model", f"{told.model}, {told.dtype} on {told.device}"),
        (
            "compared",
            f"{n} prompt{'s' * (n > 1)} of {told.prompt_tokens} tokens: each alone, {told.batch} copies of it{others}",
        ),
        ("text differs", f"for {told.prompts_with(lambda c: not c.same_text)} of {n} prompts"),
        ("stops elsewhere", f"for {told.prompts_with(lambda c: not c.same_stop)} of {n} prompts"),
        ("some number differs", f"for {told.prompts_with(lambda c: c.first)} of {n} prompts"),
    ]
    firsts = [c.first for c in told.comparisons if c.first]
    if firsts:
        earliest = min(firsts, key=lambda f: f.step)
        lines.append(("first seen", f"at step {earliest.step + 1}, position {earliest.position}: {earliest.what[0]}"))
    if told.divergence and (first := told.divergence.first):
        how = (
            f"the batch computes {first.another_path} instead"
            if first.another_path
            else f"{first.elements:.2%} of its elements, by {first.largest:.1e} at most"
        )
        lines.append(("starts in", f"{first.operation.module}, {first.operation.name}: {how}"))
        shares = told.divergence.by_module()
        reached = [module for module, share in shares.items() if share]
        if reached:
            lines.append(("spreads to", f"{len(reached)} of {len(shares)} modules, the last {reached[-1]}"))
    if told.fix:
        lines.append(("helps here", _helps(told)))
    if told.partial:
        lines.append(("partial", told.partial))
    return lines


def _helps(told: Report) -> str:
    fix = told.fix
    if fix is None or not fix.ways:
        return "nothing that was tried"
    if told.helps is None:
        return f"nothing for all prompts; for the one that differed first: {fix.ways[0]}"
    ratio, one = fix.over_plain(str(told.helps)), fix.over_plain(ONE_BY_ONE)
    return f"{told.helps}: {ratio:.2f} times the time of the plain batch ({ONE_BY_ONE}: {one:.2f})"


def _verdict(told: Report) -> str:
    if told.invariant:
        return "Invariant: no number of any request depended on its batch."
    if told.prompts_with(lambda c: not c.same_text):
        return "Not invariant: the text of a request depends on its batch."
    return "Not invariant, though no text changed here: numbers behind it depend on the batch."


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
    """Runs the check, prints the page, writes the files; returns the exit status."""
    told = check(source, **asked)
    page = page_of(told)
    print(as_text(page))
    write(page, to_json, to_html)
    if told.partial and told.invariant:
        return 2  # what was compared agreed; the rest is not known
    return 0 if told.invariant else 1

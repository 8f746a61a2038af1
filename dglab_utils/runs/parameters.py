"""The typed `parameters` cell of a notebook: what may be set, and the one function that checks what was set.

papermill pastes values behind this cell and checks neither names nor types, so the lab does, twice with the same
code: the `dglab` command before a kernel starts, and `checked()` in the notebook's own setup cell for whoever
runs it with plain papermill or in JupyterLab. A cell holds annotated literals and nothing else (a value derived
there would not be recomputed from a parameter that papermill pastes below it):

    seeds: int = 16                    # how many seeds, from 0 [1..1000]
    device: str = "cpu"                # where the model runs [cpu | cuda | mps]
    growths: list[float] = [0.5, 1.0]  # growth of the ramp, logits a step [> 0]
    limit: int | None = None           # stop after so many prompts [>= 1]

Types: bool, int, float, str, a list of one of them, each optionally `| None`. The last brackets of the comment
bound the value, or each element of a list: `lo..hi`, `> x`, `>= x`, `< x`, `<= x`, choices `a | b`; several are
joined by commas; `may be empty` allows an empty list. This module knows nothing of kernels and loads no notebook
library: `dglab list` must answer at once.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dglab_utils.errors import LabError
from dglab_utils.paths import NOTEBOOKS

SCALARS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
MAY_BE_EMPTY = "may be empty"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")
_BOUND = re.compile(rf"(>=|<=|>|<)\s*({_NUMBER})")


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell.

    Attributes:
        name, annotation, default: as written; `annotation` is the source text, such as `list[float]`.
        comment: what the parameter is, without the brackets.
        allowed: the text in the brackets, "" where there are none.
        scalar: type of the value, or of each element of a list.
        is_list, optional: whether the value is a list; whether None is allowed.
    """

    name: str
    annotation: str
    default: Any
    comment: str
    allowed: str
    scalar: type
    is_list: bool
    optional: bool

    @property
    def expected(self) -> str:
        """What is allowed, in words for an error: `int, 1..1000`."""
        return f"{self.annotation}, {self.allowed}" if self.allowed else self.annotation

    def value(self, given: Any) -> Any:
        """`given` as this parameter's type.

        Raises:
            ValueError: not of the type, not finite, or out of bounds; the message says why in a few words.
        """
        if given is None and self.optional:
            return None
        if not self.is_list:
            return self._element(given)
        if not isinstance(given, list | tuple):
            raise ValueError(f"is not a list, write [{given}]" if isinstance(given, self.scalar) else "is not a list")
        if not given and MAY_BE_EMPTY not in self.allowed:
            raise ValueError("is an empty list")
        return [self._element(element) for element in given]

    def _element(self, given: Any) -> Any:
        # bool is a subclass of int in Python; nobody means True when a count is asked for.
        accepted = (int, float) if self.scalar is float else (self.scalar,)
        if not isinstance(given, accepted) or (isinstance(given, bool) and self.scalar is not bool):
            raise ValueError(
                f"holds {given!r}, which is not {self.scalar.__name__}" if self.is_list else "has the wrong type"
            )
        value = self.scalar(given)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("is not finite")
        for rule in _rules(self.allowed):
            if not _holds(rule, value):
                raise ValueError(f"holds {value!r}, which is out of bounds" if self.is_list else "is out of bounds")
        return value


def parameters_in(source: str, notebook: str) -> tuple[Parameter, ...]:
    """The parameters that a cell's source declares, in order, their defaults checked against their own bounds.

    Raises:
        LabError: anything but annotated literals, a missing comment, a type or brackets this module cannot read.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise LabError(f"{notebook}: the parameters cell is not Python (line {error.lineno}: {error.msg})") from None
    comments = _comments(source)
    found: dict[str, Parameter] = {}
    for statement in statements:
        parameter = _parameter(statement, comments, notebook)
        if parameter.name in found:
            raise LabError(f"{notebook}: parameter {parameter.name} is declared twice; keep one line")
        found[parameter.name] = parameter
    return tuple(found.values())


def validated(notebook: str, parameters: Iterable[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every parameter: the given one where there is one, the default elsewhere.

    Raises:
        LabError: an unknown name, or a value of the wrong type or out of bounds; the line names the notebook, the
            parameter, the value and what is allowed.
    """
    known = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in known:
            raise LabError(f"{notebook}: no parameter {name!r}{did_you_mean(name, known)}")
    values = {}
    for name, parameter in known.items():
        value = given.get(name, parameter.default)
        try:
            values[name] = parameter.value(value)
        except ValueError as error:
            raise LabError(f"{notebook}: {name} = {value!r} {error}; allowed: {parameter.expected}") from None
    return values


def checked(notebook: str, namespace: Mapping[str, Any], folder: Path = NOTEBOOKS) -> SimpleNamespace:
    """The parameters of a running notebook, checked: for its setup cell.

        p = checked("01_untrained_model", globals())

    Args:
        notebook: its file name, without suffix.
        namespace: the notebook's globals, where the parameters cell (and papermill's, below it) left the values.

    Raises:
        LabError: as `validated`; or a name was passed to papermill that is no parameter of this notebook.
    """
    from dglab_utils.runs.catalogue import read_notebook

    parameters = read_notebook(folder / f"{notebook}.ipynb").parameters
    missing = [parameter.name for parameter in parameters if parameter.name not in namespace]
    if missing:
        raise LabError(f"{notebook}: {', '.join(missing)} not set: run the cell tagged `parameters` first")
    given = {parameter.name: namespace[parameter.name] for parameter in parameters}
    return SimpleNamespace(**validated(notebook, parameters, _injected_names(namespace) | given))


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """The source of a parameters cell, its defaults replaced with `values`, types and comments kept."""
    lines = source.split("\n")
    # From the end to the start, so that the positions of earlier statements stay valid.
    for statement in reversed(ast.parse(source).body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            old, name = statement.value, statement.target.id
            if name not in values or ast.literal_eval(old) == values[name]:
                continue
            assert old.end_lineno is not None and old.end_col_offset is not None
            # ast counts columns in UTF-8 bytes.
            head = lines[old.lineno - 1].encode()[: old.col_offset].decode()
            tail = lines[old.end_lineno - 1].encode()[old.end_col_offset :].decode()
            lines[old.lineno - 1 : old.end_lineno] = [f"{head}{values[name]!r}{tail}"]
    return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown name: the nearest known one, or all of them."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is: {', '.join(known) or 'none'}"


def _parameter(statement: ast.stmt, comments: Mapping[int, str], notebook: str) -> Parameter:
    text = ast.unparse(statement)
    if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
        raise LabError(
            f"{notebook}: the parameters cell holds `{_short(text)}`; only `name: type = literal` may stand there"
        )
    name, annotation = statement.target.id, ast.unparse(statement.annotation)
    where = f"{notebook}: parameter {name}"
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        raise LabError(
            f"{where}: `{_short(ast.unparse(statement.value))}` is no literal; derive values in the setup cell"
        ) from None
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    comment = " ".join(comments[line] for line in lines if line in comments)
    match = re.fullmatch(r"(.*?)\s*(?:\[([^\[\]]*)\])?", comment)
    what, allowed = match.groups() if match else (comment, None)
    if not what:
        raise LabError(f"{where} has no comment; say behind it what it is, and in which unit")
    scalar, is_list, optional = _type(annotation, where)
    parameter = Parameter(name, annotation, default, what, (allowed or "").strip(), scalar, is_list, optional)
    try:
        _rules(parameter.allowed)
        parameter.value(default)
    except ValueError as error:
        raise LabError(f"{where} = {default!r} {error}; declared: {parameter.expected}") from None
    return parameter


def _type(annotation: str, where: str) -> tuple[type, bool, bool]:
    """(scalar type, is a list, may be None) of an annotation's text."""
    match = re.fullmatch(r"(?:list\[(\w+)\]|(\w+))( \| None)?", annotation)
    scalar = SCALARS.get(match.group(1) or match.group(2)) if match else None
    if match is None or scalar is None:
        raise LabError(
            f"{where}: type `{annotation}` is not one of {', '.join(SCALARS)}, list[...] of those, or `... | None`"
        )
    return scalar, match.group(1) is not None, match.group(3) is not None


def _rules(allowed: str) -> list[str]:
    """The bounds in the brackets, one by one.

    Raises:
        ValueError: text that is no bound.
    """
    rules = [rule.strip() for rule in allowed.split(",") if rule.strip() and rule.strip() != MAY_BE_EMPTY]
    for rule in rules:
        if not (_RANGE.fullmatch(rule) or _BOUND.fullmatch(rule) or "|" in rule):
            raise ValueError(f"has brackets [{rule}] that are no bound (lo..hi, > x, >= x, a | b)")
    return rules


def _holds(rule: str, value: Any) -> bool:
    if match := _RANGE.fullmatch(rule):
        return not isinstance(value, str) and float(match[1]) <= value <= float(match[2])
    if match := _BOUND.fullmatch(rule):
        bound = float(match[2])
        return (
            not isinstance(value, str)
            and {
                ">": value > bound,
                ">=": value >= bound,
                "<": value < bound,
                "<=": value <= bound,
            }[match[1]]
        )
    choices = [choice.strip().strip("'\"") for choice in rule.split("|")]
    if isinstance(value, str):
        return value in choices
    return any(re.fullmatch(_NUMBER, choice) and float(choice) == value for choice in choices)


def _comments(source: str) -> dict[int, str]:
    """line number -> text of the comment that ends it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT}


def _injected_names(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """What papermill pasted into this kernel, from IPython's history; {} outside IPython."""
    names: dict[str, Any] = {}
    for source in namespace.get("In", []):
        if source.startswith("# Parameters\n"):
            targets = [
                t.id
                for s in ast.parse(source).body
                if isinstance(s, ast.Assign)
                for t in s.targets
                if isinstance(t, ast.Name)
            ]
            names |= {name: namespace.get(name) for name in targets}
    return names


def _short(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"

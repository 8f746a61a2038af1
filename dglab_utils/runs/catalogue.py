"""Which notebooks there are, which of them a command means, and the values each will run with.

Everything here happens before a kernel starts and without a notebook library: notebooks are read as the JSON they
are. A plan (notebook, checked values) is the only thing that execution needs to know.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dglab_utils.errors import LabError
from dglab_utils.paths import NOTEBOOKS
from dglab_utils.runs.parameters import Parameter, did_you_mean, parameters_in, validated

ALL = "all"  # the profile's section for every notebook that has the parameter


@dataclass(frozen=True)
class Notebook:
    """A notebook on disk.

    Attributes:
        name: file name without suffix, such as `02_commit_waves`.
        question: its first heading.
        parameters: from its cell tagged `parameters`.
        digest: SHA-256 of what its cells say (source, kind, tags), outputs left out.
    """

    path: Path
    question: str
    parameters: tuple[Parameter, ...]
    digest: str

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.parameters)


@dataclass(frozen=True)
class Plan:
    """One notebook and a checked value for each of its parameters."""

    notebook: Notebook
    values: dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    """The notebook at `path`, read as JSON.

    Raises:
        LabError: no such file, not a notebook, or not exactly one cell tagged `parameters`.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = [
            (cell["cell_type"], "".join(cell["source"]), cell.get("metadata", {}).get("tags", [])) for cell in cells
        ]
    except FileNotFoundError:
        raise LabError(f"{path}: no such notebook") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(f"{path}: not a notebook that can be read ({error!r}); restore it") from None
    declared = [source for _, source, tags in texts if "parameters" in tags]
    if len(declared) != 1:
        raise LabError(f"{path}: {len(declared)} cells are tagged `parameters`; there must be one")
    headings = (
        match[1] for kind, source, _ in texts if kind == "markdown" and (match := re.search(r"^# +(.+)$", source, re.M))
    )
    return Notebook(
        path=path,
        question=next(headings, "").strip(),
        parameters=parameters_in(declared[0], path.stem),
        digest=hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
    )


def notebooks_in(folder: Path = NOTEBOOKS) -> list[Notebook]:
    """All notebooks of a folder, by name.

    Raises:
        LabError: there is none, or one cannot be read.
    """
    found = [read_notebook(path) for path in sorted(folder.glob("*.ipynb"))]
    if not found:
        raise LabError(f"{folder}: no notebook there")
    return found


def select(names: Iterable[str], notebooks: Sequence[Notebook]) -> list[Notebook]:
    """The notebooks meant, in the catalogue's order, each once; all of them where no name is given."""
    meant = {find(name, notebooks).name for name in names}
    return [notebook for notebook in notebooks if not meant or notebook.name in meant]


def find(name: str, notebooks: Sequence[Notebook]) -> Notebook:
    """The notebook with this full name, number ("1", "01") or unambiguous prefix.

    Raises:
        LabError: none, or more than one.
    """
    by_name = {notebook.name: notebook for notebook in notebooks}
    if name in by_name:
        return by_name[name]
    if name.isdecimal():
        matches = [n for n in notebooks if (number := re.match(r"\d+", n.name)) and int(number[0]) == int(name)]
    else:
        matches = [n for n in notebooks if name and n.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise LabError(f"notebook {name!r} is ambiguous: {', '.join(n.name for n in matches)}; write more of the name")
    raise LabError(f"no notebook {name!r}{did_you_mean(name, by_name)}")


def profile_path(profile: str, folder: Path) -> Path:
    """The file of a named profile (`quick`) or of one given as a path (`mine.yaml`).

    Raises:
        LabError: neither; the line lists the named ones.
    """
    named = {path.stem: path for path in folder.glob("*.yaml")}
    if profile in named:
        return named[profile]
    path = Path(profile)
    if path.suffix not in (".yaml", ".yml"):
        raise LabError(f"no profile {profile!r}{did_you_mean(profile, named)} (or give a .yaml file)")
    if not path.is_file():
        raise LabError(f"{profile}: no such profile file")
    if path.stem in named and path.resolve() != named[path.stem].resolve():
        raise LabError(
            f"{profile}: its runs would land among those of the profile {path.stem!r}; give the file another name"
        )
    return path


def read_profile(path: Path, notebooks: Sequence[Notebook]) -> dict[str, dict[str, Any]]:
    """notebook name -> values, the section `all` spread over the notebooks that have the parameter.

    Raises:
        LabError: not a mapping of that form, or a notebook or parameter that does not exist.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: not YAML that can be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or not all(isinstance(v, dict | None) for v in content.values()):
        raise LabError(
            f"{path}: a profile maps a notebook's name (or `{ALL}`) to parameters: `02_commit_waves: {{seeds: 4}}`"
        )
    sections = {str(name): values or {} for name, values in content.items()}
    everywhere = sections.pop(ALL, {})
    _refuse_unknown(everywhere, notebooks, f"{path}: {ALL}")
    known = {notebook.name: notebook for notebook in notebooks}
    for name, values in sections.items():
        if name not in known:
            raise LabError(f"{path}: no notebook {name!r}{did_you_mean(name, known)}")
        _refuse_unknown(values, [known[name]], f"{path}: {name}")
    return {
        n.name: {k: v for k, v in everywhere.items() if k in n.parameter_names} | sections.get(n.name, {})
        for n in notebooks
    }


def overrides(assignments: Iterable[str], notebooks: Sequence[Notebook]) -> dict[str, dict[str, Any]]:
    """notebook name -> values, from the command line's `k=v` (every selected notebook that has k) and `NAME.k=v`.

    Args:
        notebooks: the selected ones.

    Raises:
        LabError: no `=`, a value that is not YAML, a parameter that no selected notebook has.
    """
    given: dict[str, dict[str, Any]] = {notebook.name: {} for notebook in notebooks}
    for assignment in assignments:
        left, equals, text = assignment.partition("=")
        if not equals:
            raise LabError(f"-p {assignment}: write -p parameter=value, or -p NOTEBOOK.parameter=value")
        name, _, key = left.strip().rpartition(".")
        targets = [find(name, notebooks)] if name else list(notebooks)
        _refuse_unknown([key], targets, f"-p {assignment}")
        for notebook in targets:
            if key in notebook.parameter_names:
                given[notebook.name][key] = _yaml_value(text, assignment)
    return given


def plans(notebooks: Sequence[Notebook], *layers: Mapping[str, Mapping[str, Any]]) -> list[Plan]:
    """One plan a notebook; later layers (profile, then command line) win over earlier ones and over the defaults."""
    result = []
    for notebook in notebooks:
        given: dict[str, Any] = {}
        for layer in layers:
            given |= layer.get(notebook.name, {})
        result.append(Plan(notebook, validated(notebook.name, notebook.parameters, given)))
    return result


def _refuse_unknown(keys: Iterable[str], notebooks: Sequence[Notebook], where: str) -> None:
    known = frozenset[str]().union(*(notebook.parameter_names for notebook in notebooks))
    for key in keys:
        if key not in known:
            searched = ", ".join(notebook.name for notebook in notebooks)
            raise LabError(f"{where}: no parameter {key!r} in {searched}{did_you_mean(str(key), known)}")


def _yaml_value(text: str, assignment: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        raise LabError(f"-p {assignment}: {text!r} is not a YAML value; quote text, write lists as [1, 2]") from None


def load_yaml(text: str) -> Any:
    """A YAML document, read by the core schema of YAML 1.2, in which no key is given twice; raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Yaml12)
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML's constructors take for granted that the text behind an explicit tag fits it: `!!int "x"`.
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from None


class _Yaml12(yaml.SafeLoader):
    """YAML's core schema. PyYAML's own is 1.1, in which `1e-3` is text, `no` is False and `1:30` is 90.

    PyYAML lets the last of two equal keys win; here they are an error, found before merge keys (`<<`) are filled in.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),  # 010 is text: constructed as an int it would be 8
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)

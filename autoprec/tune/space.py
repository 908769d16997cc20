"""SearchSpace: what may vary, read from TOML.

Rules, groups, overrides and ranges only; it knows no sampler and no model until ``tune.study_space`` binds it to one.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from autoprec.errors import SearchSpaceError, suggest
from autoprec.policy import PRECISIONS, Precision, Weights
from autoprec.records import Layer, Look

OverrideChoice = Literal["front", "fp32", "half", "pure"]
FAMILIES = ("default", "ampere", "ada", "hopper", "blackwell", "cpu")

Scale = Annotated[float, Field(gt=0, le=2.0**24, allow_inf_nan=False)]
# Under a hundred steps between doublings a small loss drives the scale to its end. Source: pytorch/pytorch#98828.
Interval = Annotated[int, Field(ge=100)]
Multiple = Annotated[int, Field(ge=0, le=1024)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Matcher(_Section):
    """Which layers are meant: globs on the name, on the class name, or on the names of their own aten operations."""

    name: str
    patterns: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()

    def matches(self, layer: Layer) -> bool:
        """True where any glob fits the layer's name, an alias, its class name or one of its operations."""
        names = (layer.name, *layer.aliases)
        return (
            any(fnmatchcase(name, glob) for glob in self.patterns for name in names)
            or any(fnmatchcase(layer.kind, glob) for glob in self.kinds)
            or any(fnmatchcase(_plain(op), glob) for glob in self.ops for op in layer.ops)
        )


class Rule(Matcher):
    """Layers that match may take ``allowed`` precisions only; the first rule that matches a layer decides."""

    allowed: Annotated[tuple[Precision, ...], Field(min_length=1)]
    why: str = ""
    source: str = ""


class Group(Matcher):
    """Layers that move together: children of one parent with these last names, or all that match the globs."""

    siblings: tuple[str, ...] = ()


class Override(Matcher):
    """A group with a study parameter of its own; ``front`` leaves it to the assignment front."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    choices: Annotated[tuple[OverrideChoice, ...], Field(min_length=1)] = ("front", "half", "pure")


class ScaleRange(_Section):
    """Initial loss scales to try."""

    values: Annotated[tuple[Scale, ...], Field(min_length=1)] = (4096.0, 8192.0, 16384.0)
    unit: str = "times the loss"
    source: str = ""


class IntervalRange(_Section):
    """Optimizer steps between two doublings of the loss scale."""

    values: Annotated[tuple[Interval, ...], Field(min_length=1)] = (500, 1000, 2000)
    unit: str = "optimizer steps"
    source: str = ""


class MicroBatchRange(_Section):
    """How far the batch may be split."""

    max_accumulation_steps: Annotated[int, Field(ge=1)] = 16
    max_choices: Annotated[int, Field(ge=1)] = 5
    unit: str = "samples"
    source: str = ""


class PaddingRange(_Section):
    """Multiples to which odd sizes are padded; 0 leaves them."""

    values: Annotated[tuple[Multiple, ...], Field(min_length=1)] = (0, 8, 16, 64)
    unit: str = "elements"
    source: str = ""


class FlagRange(_Section):
    """Values of the backend flags to try; a flag with one value is no parameter."""

    tf32: Annotated[tuple[bool, ...], Field(min_length=1)] = (False, True)
    channels_last: Annotated[tuple[bool, ...], Field(min_length=1)] = (False, True)
    cudnn_benchmark: Annotated[tuple[bool, ...], Field(min_length=1)] = (False, True)
    fp16_accumulation: Annotated[tuple[bool, ...], Field(min_length=1)] = (False,)
    source: str = ""


class WeightsRange(_Section):
    """Who makes the half copies of the weights; tried where speed is measured."""

    values: Annotated[tuple[Weights, ...], Field(min_length=1)] = ("fp32", "half_with_masters")
    source: str = ""


class Ranges(_Section):
    """The outer knobs."""

    init_scale: ScaleRange = ScaleRange()
    growth_interval: IntervalRange = IntervalRange()
    micro_batch: MicroBatchRange = MicroBatchRange()
    padding: PaddingRange = PaddingRange()
    weights: WeightsRange = WeightsRange()
    flags: FlagRange = FlagRange()


class SearchSpace(_Section):
    """What a study may vary. ``rules`` are ordered: the first match decides a layer's precisions."""

    version: Literal[1] = 1
    extends: str | None = None
    family: str = "custom"
    description: str = ""
    capabilities: tuple[str, ...] = ()
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = PRECISIONS
    rules: tuple[Rule, ...] = ()
    groups: tuple[Group, ...] = ()
    overrides: Annotated[tuple[Override, ...], Field(max_length=4)] = ()
    ranges: Ranges = Ranges()

    @field_validator("rules", "groups", "overrides")
    @classmethod
    def _each_names_something(cls, parts: tuple[Matcher, ...]) -> tuple[Matcher, ...]:
        for part in parts:
            if not (part.patterns or part.kinds or part.ops or getattr(part, "siblings", ())):
                raise ValueError(f"'{part.name}' names no layers: give patterns, kinds, ops or siblings")
        return parts

    def rule_for(self, layer: Layer) -> Rule | None:
        """The first rule that matches the layer, or None."""
        return next((rule for rule in self.rules if rule.matches(layer)), None)


def _plain(op: str) -> str:
    """``aten::linalg_svd.default`` and ``aten.linalg_svd`` are both ``linalg_svd``."""
    name = op.rpartition("::")[2].removeprefix("aten.")
    return name.partition(".")[0]


def packaged_spaces() -> Path:
    """The folder of the packaged files: inside the package in a wheel, at the repository's root otherwise."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "search_spaces", package.parent / "search_spaces"):
        if (folder / "default.toml").is_file():
            return folder
    raise SearchSpaceError("The packaged search spaces are missing.", hint="Reinstall autoprec, or give --search-space FILE.")


def load_search_space(
    name_or_path: str | os.PathLike[str], *, keep_fp32: Sequence[str] = (), init_scales: Sequence[float] | None = None
) -> SearchSpace:
    """Reads a packaged search space by name, or a file by path.

    Args:
        name_or_path: ``default``, ``ampere``, ``ada``, ``hopper``, ``blackwell``, ``cpu``, or a path to a TOML file.
        keep_fp32: globs on layer names that the user keeps in fp32; they come before every rule of the file.
        init_scales: initial loss scales instead of the file's.

    Raises:
        SearchSpaceError: no such file, not TOML, or values that are not allowed; every problem is listed with its path.
    """
    data = _read(os.fspath(name_or_path), ())
    if init_scales is not None:
        data["ranges"] = _merge(data.get("ranges", {}), {"init_scale": {"values": list(init_scales)}})
    space = _validate(data, os.fspath(name_or_path))
    if not keep_fp32:
        return space
    pins = tuple(
        Rule(name=f"--keep-fp32 {glob}", patterns=(glob,), allowed=("fp32",), why="pinned by the user") for glob in keep_fp32
    )
    return space.model_copy(update={"rules": (*pins, *space.rules)})


def search_space_for(architecture: str) -> SearchSpace:
    """The packaged search space of an architecture.

    Args:
        architecture: a family (``ada``, ``Ada Lovelace``), a compute capability (``8.9``, ``sm_89``) or ``cpu``. One that no
            packaged file names gets ``default``, which assumes nothing.
    """
    words = architecture.lower().split()
    if words and words[0] in FAMILIES:
        return load_search_space(words[0])
    digits = architecture.lower().removeprefix("sm_").removeprefix("compute_")
    capability = f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else digits
    spaces = (load_search_space(family) for family in FAMILIES)
    return next((space for space in spaces if capability in space.capabilities), load_search_space("default"))


def allowed_precisions(
    space: SearchSpace, look: Look, precisions: Sequence[Precision]
) -> tuple[dict[str, tuple[Precision, ...]], dict[str, str]]:
    """What each layer may take on this hardware, and why where a rule narrowed it.

    Args:
        space: the rules.
        look: the layers; ``forbids_fp16`` takes fp16 from all of them.
        precisions: what the hardware runs.

    Returns:
        Allowed precisions by layer name (never empty: fp32 where nothing else is left), and the rule's reason by layer name.

    Raises:
        SearchSpaceError: a rule's name pattern matches no layer.
    """
    _check_patterns(space, look)
    usable = [p for p in precisions if p in space.precisions and not (look.forbids_fp16 and p.startswith("fp16"))]
    allowed: dict[str, tuple[Precision, ...]] = {}
    reasons: dict[str, str] = {}
    for layer in look.layers:
        rule = space.rule_for(layer)
        chosen = tuple(p for p in usable if rule is None or p in rule.allowed)
        allowed[layer.name] = chosen or ("fp32",)
        if rule is not None and len(chosen) < len(usable):
            reasons[layer.name] = f"{rule.name}: {rule.why}" if rule.why else rule.name
    return allowed, reasons


def tied_groups(space: SearchSpace, look: Look) -> tuple[tuple[str, ...], ...]:
    """Layers that move together, at least two each, in order of first use. A layer is in one group at most: the first."""
    taken: set[str] = set()
    found: list[tuple[str, ...]] = []
    for group in space.groups:
        families: dict[str, list[str]] = {}
        for layer in look.layers:
            parent, _, last = layer.name.rpartition(".")
            if layer.name in taken:
                continue
            if last in group.siblings:
                families.setdefault(f"{parent}.", []).append(layer.name)
            elif group.matches(layer):
                families.setdefault("", []).append(layer.name)
        for names in families.values():
            if len(names) > 1:
                found.append(tuple(names))
                taken.update(names)
    return tuple(found)


def _check_patterns(space: SearchSpace, look: Look) -> None:
    names = [name for layer in look.layers for name in (layer.name, *layer.aliases)]
    for part in (*space.rules, *space.groups, *space.overrides):
        for glob in part.patterns:
            if not any(fnmatchcase(name, glob) for name in names):
                shown = ", ".join(name for name in names[:8] if name) + (", ..." if len(names) > 8 else "")
                raise SearchSpaceError(
                    f"'{part.name}': the pattern '{glob}' matches no layer.{suggest(glob, names)}",
                    hint=f"Layers are named {shown}; '*' matches any part of a name.",
                )


def _read(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The file's data on top of what it extends."""
    path = _resolve(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"Give a TOML file, or one of {', '.join(FAMILIES)}."
        raise SearchSpaceError(f"No search space at {path}.{suggest(name, FAMILIES)}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SearchSpaceError(f"Cannot read the search space {path}: {error}", hint="Give a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise SearchSpaceError(f"{path} is not valid TOML: {error}", hint="Mend the line named above.") from None
    base = data.get("extends")
    if not isinstance(base, str):
        return data
    if base in (*seen, name):
        raise SearchSpaceError(f"{path} extends itself through '{base}'.", hint="Remove one 'extends'.")
    return _merge(_read(base, (*seen, name)), data)


def _resolve(name: str) -> Path:
    looks_like_path = name.endswith(".toml") or os.sep in name or "/" in name
    if looks_like_path:
        return Path(name)
    if name not in FAMILIES:
        raise SearchSpaceError(
            f"No packaged search space '{name}'; there are {', '.join(FAMILIES)}.{suggest(name, FAMILIES)}",
            hint="Give one of these names, or the path of a .toml file.",
        )
    return packaged_spaces() / f"{name}.toml"


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; rules of the file on top come first; groups and overrides replace their namesakes."""
    merged = dict(base)
    for key, value in top.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        elif key in ("rules", "groups", "overrides") and isinstance(old, list) and isinstance(value, list):
            names = {item.get("name") for item in value if isinstance(item, dict)}
            merged[key] = [*value, *(item for item in old if item.get("name") not in names)]
        else:
            merged[key] = value
    return merged


def _validate(data: dict[str, Any], source: str) -> SearchSpace:
    try:
        return SearchSpace.model_validate(data)
    except ValidationError as error:
        lines = [f"  {_path(item['loc'])}: {_message(item['type'], item['loc'], item['msg'])}" for item in error.errors()]
        text = "\n".join(lines)
        hint = "Mend the lines named above; search_spaces/default.toml shows every key."
        raise SearchSpaceError(f"{source} is not a valid search space:\n{text}", hint=hint) from None


def _path(location: Iterable[int | str]) -> str:
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".") or "search space"


def _message(kind: str, location: tuple[int | str, ...], message: str) -> str:
    if kind != "extra_forbidden":
        return message.removeprefix("Value error, ")
    parts: dict[str, type[BaseModel]] = {"rules": Rule, "groups": Group, "overrides": Override}
    parts |= {name: _model(field.annotation) for name, field in Ranges.model_fields.items()} | {"ranges": Ranges}
    owner: type[BaseModel] = SearchSpace
    for step in location[:-1]:
        owner = parts.get(str(step), owner)
    return f"unknown key.{suggest(str(location[-1]), owner.model_fields)}"


def _model(annotation: Any) -> type[BaseModel]:
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation

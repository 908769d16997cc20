"""Policy: the product of a tune, and its file.

A policy is a plain frozen value without ranges or patterns. ``load_policy`` reads JSON and runs no code; it needs neither torch
nor optuna. Version history of the file:

* 1: first version.
* 2: ``outputs`` and ``weights``; a file of version 1 has both at ``fp32``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from autoprec.errors import PolicyError, suggest

FORMAT_VERSION: Literal[2] = 2

Precision = Literal["fp32", "fp16", "bf16", "fp16_pure", "bf16_pure"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "fp16_pure", "bf16_pure")
Execution = Literal["eager", "compile", "compile_cudagraphs"]
EXECUTIONS: tuple[Execution, ...] = ("eager", "compile", "compile_cudagraphs")
ReasonKind = Literal["range", "unsupported", "sensitivity", "divergence", "speed", "cast_cost", "pinned"]
Origin = Literal["measured", "predicted"]

Outputs = Literal["fp32", "computed"]
Weights = Literal["fp32", "half_with_masters"]

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_this_version(version: object) -> object:
    # What version 2 added has the older meaning as its default.
    return FORMAT_VERSION if type(version) is int and version == 1 else version


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]


class Part(BaseModel):
    """Base of every part of a policy: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")


class Reason(Part):
    """Why a layer departs from the default precision: the kind of evidence and a sentence with its figures."""

    kind: ReasonKind
    text: str


class LayerSetting(Part):
    """One exception: the precision of a layer, and of everything below it that has no setting of its own."""

    precision: Precision
    reason: Reason | None = None


class LossScale(Part):
    """Dynamic loss scaling, in the terms of ``torch.amp.GradScaler``; unused where no layer is fp16.

    ``growth_interval`` counts optimizer steps. ``floor`` is the least scale: below it training is reported as stuck.
    """

    init: PositiveFloat = 8192.0
    growth_interval: PositiveInt = 2000
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    floor: PositiveFloat = 1.0


class Batch(Part):
    """The batch in samples: ``micro`` times ``accumulation_steps`` is ``effective``, which the search holds constant."""

    effective: PositiveInt
    micro: PositiveInt
    accumulation_steps: PositiveInt = 1

    @model_validator(mode="after")
    def _product(self) -> Self:
        if self.micro * self.accumulation_steps != self.effective:
            raise ValueError(
                f"micro {self.micro} x accumulation_steps {self.accumulation_steps} is {self.micro * self.accumulation_steps}, "
                f"not the effective batch {self.effective}"
            )
        return self


class Padding(Part):
    """Sizes rounded up on the fly; no parameter changes.

    ``layers`` maps a layer's name to the multiple its feature or channel counts are padded to in forward.
    """

    layers: dict[str, PositiveInt] = {}
    data_axis_multiple: PositiveInt | None = None

    @field_validator("layers")
    @classmethod
    def _sorted(cls, layers: dict[str, int]) -> dict[str, int]:
        return dict(sorted(layers.items()))


class Backend(Part):
    """Process-wide torch flags and memory layout. ``fp16_accumulation`` lets matmuls add up in fp16 (CUDA only)."""

    tf32: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    fp16_accumulation: bool = False


class Loader(Part):
    """DataLoader settings; ``None`` leaves them to the user."""

    num_workers: Annotated[int, Field(ge=0)] | None = None
    pin_memory: bool | None = None
    prefetch_factor: PositiveInt | None = None


def layer_list_hash(layers: Mapping[str, str], idle: tuple[str, ...] = ()) -> str:
    """SHA-256 over the sorted layer list: names, signatures and idle modules."""
    text = json.dumps([sorted(layers.items()), sorted(idle)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Fingerprint(Part):
    """What the policy was made for.

    ``layers`` maps every layer's dotted name to its signature (kind and own parameter shapes); ``idle`` names modules that own
    parameters but issued no operation in the traced run, so that they are not mistaken for new layers.
    """

    layers: dict[str, str]
    idle: tuple[str, ...] = ()
    layer_list_sha256: str
    device: str
    capability: str | None = None
    torch_version: str
    workload_sha256: str

    @model_validator(mode="after")
    def _hash_agrees(self) -> Self:
        expected = layer_list_hash(self.layers, self.idle)
        if self.layer_list_sha256 != expected:
            given = self.layer_list_sha256[:12]
            raise ValueError(f"layer_list_sha256 is {given}... but the layer list hashes to {expected[:12]}...")
        return self

    @classmethod
    def of(
        cls,
        layers: Mapping[str, str],
        *,
        idle: tuple[str, ...] = (),
        device: str,
        capability: str | None,
        torch_version: str,
        workload_sha256: str,
    ) -> Fingerprint:
        """Builds a fingerprint whose layer list is sorted and whose hash agrees with it."""
        ordered, resting = dict(sorted(layers.items())), tuple(sorted(idle))
        return cls(
            layers=ordered,
            idle=resting,
            layer_list_sha256=layer_list_hash(ordered, resting),
            device=device,
            capability=capability,
            torch_version=torch_version,
            workload_sha256=workload_sha256,
        )


class Figures(Part):
    """One arm of the final comparison. Throughput in samples/s, peak memory in bytes, loss gap relative to FP32; None where
    nothing was measured or the loss did not stay finite (JSON has no infinity).
    """

    name: str
    samples_per_s: PositiveFloat | None
    peak_bytes: Annotated[int, Field(ge=0)] | None = None
    loss_gap: FiniteOrNone = None
    speed_origin: Origin


class Evidence(Part):
    """What the policy was chosen on. ``speedup_low`` and ``speedup_high`` bound the ratio to stock AMP."""

    run: str
    verdict: Literal["passed", "rejected", "inconclusive", "unverified"]
    speed_origin: Origin
    loss_gap: FiniteOrNone = None
    tolerance: PositiveFloat | None = None
    speedup_vs_fp32: PositiveFloat | None = None
    speedup_vs_stock_amp: PositiveFloat | None = None
    speedup_low: PositiveFloat | None = None
    speedup_high: PositiveFloat | None = None
    arms: tuple[Figures, ...] = ()
    note: str = ""


class Policy(Part):
    """A precision for every layer and the settings of the training around it.

    A layer takes the setting of its nearest named ancestor in ``layers``; the root has ``default``.

    ``outputs`` says in which dtype the model's floating outputs come back: float32, or as computed (as under stock autocast), which
    saves a cast where the loss makes it itself. ``weights`` says who makes the half copies of the float32 parameters: each layer its
    own, or one pass for all when the model's forward begins (the parameters are float32 masters either way).
    """

    version: Annotated[Literal[2], BeforeValidator(_of_this_version)] = FORMAT_VERSION
    default: Precision
    layers: dict[str, LayerSetting] = {}
    loss_scale: LossScale = LossScale()
    batch: Batch
    padding: Padding = Padding()
    outputs: Outputs = "fp32"
    weights: Weights = "fp32"
    backend: Backend = Backend()
    execution: Execution = "eager"
    loader: Loader = Loader()
    fingerprint: Fingerprint
    evidence: Evidence | None = None

    @field_validator("layers")
    @classmethod
    def _sorted(cls, layers: dict[str, LayerSetting]) -> dict[str, LayerSetting]:
        if "" in layers:
            raise ValueError("the root's precision is 'default'; a layer needs a name")
        return dict(sorted(layers.items()))

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        known = self.fingerprint.layers
        for where, names in (("layers", self.layers), ("padding.layers", self.padding.layers)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{where}: '{name}' is not in the fingerprint's layer list.{suggest(name, known)}")
        return self

    def precision_of(self, name: str) -> Precision:
        """The precision of a layer by inheritance: its own setting, its nearest named ancestor's, or the default."""
        while name:
            if name in self.layers:
                return self.layers[name].precision
            name = name.rpartition(".")[0]
        return self.default

    def precisions(self) -> dict[str, Precision]:
        """The precision of every layer in the fingerprint, by name."""
        return {name: self.precision_of(name) for name in self.fingerprint.layers}

    @property
    def needs_loss_scale(self) -> bool:
        """True where at least one layer runs in fp16, so that gradients need scaling."""
        used = {self.default, *(setting.precision for setting in self.layers.values())}
        return bool(used & {"fp16", "fp16_pure"})

    def setup_hash(self) -> str:
        """SHA-256 over everything that changes how training runs: the policy without its evidence and reasons."""
        data = self.model_dump(mode="json", exclude={"evidence"})
        for setting in data["layers"].values():
            setting.pop("reason")
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The file's text: version first, fixed key order, layers sorted, a newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def _problems(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(str(step) for step in item["loc"]) or "policy"
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = _fields_at(item["loc"][:-1])
            text = f"unknown key.{suggest(str(item['loc'][-1]), known)}"
        lines.append(f"  {path}: {text}")
    return "\n".join(lines)


def _fields_at(path: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys that are known at a path of the file; a layer's name or an arm's index counts as a step."""
    model: type[BaseModel] | None = Policy
    steps = iter(path)
    for step in steps:
        field = model.model_fields.get(str(step)) if model else None
        if field is None:
            return ()
        model = _part_in(field.annotation)
        if get_origin(field.annotation) in (dict, tuple):
            next(steps, None)
    return tuple(model.model_fields) if model else ()


def _part_in(annotation: object) -> type[BaseModel] | None:
    """The part that an annotation such as ``dict[str, LayerSetting]`` or ``Reason | None`` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for inner in get_args(annotation) if (part := _part_in(inner))), None)


def parse_policy(text: str, *, source: str = "policy") -> Policy:
    """Reads a policy from JSON text.

    Raises:
        PolicyError: not JSON, written by a newer autoprec, or with values that are not allowed; every problem is
            listed with its path.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PolicyError(
            f"{source} is not valid JSON: {error}",
            hint="The file is corrupt or cut short. Export the policy again, or restore it from version control.",
        ) from None
    if not isinstance(data, dict) or "version" not in data:
        hint = "Give a policy.json written by 'autoprec tune'."
        raise PolicyError(f"{source} is not an autoprec policy: it has no 'version'.", hint=hint)
    version = data["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PolicyError(f"{source}: version is {version!r}; allowed is a whole number from 1 to {FORMAT_VERSION}.")
    if version > FORMAT_VERSION:
        raise PolicyError(
            f"{source} has version {version}; this autoprec reads versions up to {FORMAT_VERSION}.",
            hint="Upgrade autoprec, or tune again with this version.",
        )
    try:
        return Policy.model_validate_json(text)
    except ValidationError as error:
        hint = "Mend the lines named above, or export the policy again."
        raise PolicyError(f"{source} is not a valid policy:\n{_problems(error)}", hint=hint) from None


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Reads a policy file; runs no code and needs no torch.

    Raises:
        PolicyError: the file is missing, unreadable or not a valid policy.
    """
    if not isinstance(path, str | os.PathLike):
        hint = "For JSON text in memory there is autoprec.policy.parse_policy."
        raise PolicyError(f"load_policy takes the path of a file, not a {type(path).__name__}.", hint=hint)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "Run 'autoprec tune model.py' first, or give the path of its policy.json."
        raise PolicyError(f"No policy at {os.fspath(path)}.", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"Cannot read {os.fspath(path)}: {error}", hint="Give the path of a policy.json.") from None
    return parse_policy(text, source=os.fspath(path))


def save_policy(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Writes the policy beside ``path`` and renames it, so that a reader never sees half a file."""
    write_atomically(Path(path), policy.to_json())


def write_atomically(path: Path, text: str) -> None:
    """Writes ``text`` to a temporary file in the same folder, flushes it to disk and renames it to ``path``."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def policy_schema() -> dict[str, Any]:
    """The JSON schema of the current policy version."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}

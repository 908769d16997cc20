"""Workload: what is trained, found in the user's ``model.py`` or in an object."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.bench.source import Found, find_source
from autoprec.bench.stream import dataset_batches, num_samples, once, whole_batches
from autoprec.errors import WorkloadError, suggest
from autoprec.runtime.scaler import needs_closure

DEFAULT_BATCH_SIZE = 128
# Source: torch.optim.AdamW's own default learning rate, and what most recipes start from.
DEFAULT_LEARNING_RATE = 1e-3
_FUNCTIONS = ("build_model", "batches", "dataset", "collate", "loss", "build_optimizer")
_SETTINGS = ("BATCH_SIZE", "GRAD_CLIP")
# How alike an unused name must be to a known one to be taken for a slip of the pen. Source: assumption; "build_optimiser" is
# 0.93 alike, "losses" for "loss" is 0.8 and is somebody's own helper.
_SLIP_CUTOFF = 0.88

Batches = Callable[[int, int], Iterator[Any]]


@dataclass(frozen=True)
class Workload:
    """What is trained; holds no precision and no results.

    Attributes:
        name: short name for folders and tables.
        reference: what ``load_workload`` accepts to load it again, in another process too; empty for an object in memory.
        build_model: makes a fresh model.
        batches: ``batches(batch_size, seed)``: a stream of CPU batches, whole ones only, the same for the same seed.
        loss: ``loss(model, batch)``: a scalar.
        build_optimizer: makes the optimizer of a model.
        batch_size: the effective batch, in samples, that the search holds constant.
        grad_clip: largest gradient norm of a step; None without clipping.
        sha256: hash of the user's sources and batch settings.
        batch_size_given: whether the user chose the batch size.
        num_samples: how many samples the dataset has, where there is one and it knows.
        step_needs_closure: the optimizer's ``step`` was found to want a closure though its signature has a default (SAM).
        notes: what a person should know (a default that was taken, a batch that was made smaller).
    """

    name: str
    reference: str
    build_model: Callable[[], nn.Module]
    batches: Batches
    loss: Callable[[nn.Module, Any], Tensor]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    grad_clip: float | None
    sha256: str
    batch_size_given: bool = True
    num_samples: Callable[[], int | None] | None = None
    step_needs_closure: bool = False
    notes: tuple[str, ...] = ()


def steps_with_closure(workload: Workload, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` must be given a closure: its signature says so, or the workload's check found out."""
    return workload.step_needs_closure or needs_closure(optimizer)


def load_workload(reference: str | os.PathLike[str] | object) -> Workload:
    """Finds the functions of a workload.

    Args:
        reference: ``path/model.py``, ``path/model.py:object``, ``package.module:object``, a module, or an object or class
            with the same attributes.

    Raises:
        WorkloadError: nothing is there, it does not load, or a function is missing, misspelt or of the wrong type.
    """
    if isinstance(reference, Workload):
        return reference
    found = find_source(reference)
    home = _instance(found)
    functions: dict[str, Any] = {name: _function(home, name, found.label) for name in _FUNCTIONS}
    _check_spelling(home, functions, found)
    if functions["dataset"] is not None:
        functions["dataset"] = once(functions["dataset"])
    if functions["build_model"] is None:
        raise _missing("build_model() -> torch.nn.Module", home, found, "build_model")
    batch_size, given = _batch_size(home, found.label)
    grad_clip = _grad_clip(home, found.label)
    return Workload(
        name=found.name,
        reference=found.reference,
        build_model=functions["build_model"],
        batches=_stream(functions, home, found),
        loss=functions["loss"] or default_loss,
        build_optimizer=functions["build_optimizer"] or default_optimizer,
        batch_size=batch_size,
        grad_clip=grad_clip,
        sha256=found.hash_with(f"BATCH_SIZE={batch_size} GRAD_CLIP={grad_clip}"),
        batch_size_given=given,
        num_samples=None if functions["batches"] is not None else num_samples(functions["dataset"]),
    )


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """``(x, y)``: cross-entropy of ``model(x)`` against ``y``; a dict: the ``loss`` of ``model(**batch)``.

    Raises:
        WorkloadError: the batch is neither.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
        loss = out["loss"] if isinstance(out, Mapping) and "loss" in out else getattr(out, "loss", None)
        if loss is None:
            raise WorkloadError(
                f"The batches are dicts and model(**batch) returned a {type(out).__name__} without a loss.",
                hint="Let the model return an object with .loss (pass it the labels), or define loss(model, batch).",
            )
        return loss  # type: ignore[no-any-return]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return F.cross_entropy(model(batch[0]), batch[1])
    raise WorkloadError(
        f"No loss(model, batch) is defined and the default does not fit a batch of type {type(batch).__name__}"
        f"{f' with {len(batch)} items' if isinstance(batch, (tuple, list)) else ''}.",
        hint="The default takes (x, y) pairs or dicts; define loss(model, batch) returning a scalar tensor.",
    )


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, fused where all of them are on a CUDA device."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=DEFAULT_LEARNING_RATE, fused=fused or None)


def _instance(found: Found) -> Any:
    if not isinstance(found.home, type):
        return found.home
    try:
        return found.home()
    except TypeError as error:
        raise WorkloadError(
            f"{found.label} is a class that cannot be made without arguments: {error}.",
            hint="Give its arguments defaults, or name an instance of it instead of the class.",
        ) from None


def _function(home: Any, name: str, label: str) -> Any:
    value = getattr(home, name, None)
    if value is not None and not callable(value):
        raise WorkloadError(
            f"{label}: {name} is a {type(value).__name__}; it must be a function.",
            hint=f"Write 'def {name}(...)' that makes it; a fresh one is needed for every training run.",
        )
    return value


def _public_names(home: Any) -> list[str]:
    """Names a user may have meant as one of the workload's: functions of their own and plain numbers."""
    own = getattr(home, "__name__", None)

    def is_own(value: Any) -> bool:
        if isinstance(value, (int, float)):
            return True
        return callable(value) and not isinstance(value, type) and (own is None or getattr(value, "__module__", own) == own)

    return [name for name in dir(home) if not name.startswith("_") and is_own(getattr(home, name, None))]


def _check_spelling(home: Any, functions: Mapping[str, Any], found: Found) -> None:
    missing = [name for name, value in functions.items() if value is None]
    missing += [name for name in _SETTINGS if not hasattr(home, name)]
    if functions["batches"] is not None or functions["dataset"] is not None:
        missing = [name for name in missing if name not in ("batches", "dataset")]
    known = {*_FUNCTIONS, *_SETTINGS}
    for name in (name for name in _public_names(home) if name not in known):
        meant = suggest(name, missing, cutoff=_SLIP_CUTOFF)
        if meant:
            raise WorkloadError(
                f"{found.label}: '{name}' is not a name autoprec knows.{meant}",
                hint=f"It reads {', '.join(_FUNCTIONS)}, {' and '.join(_SETTINGS)}. Rename it, or start it with '_'.",
            )


def _missing(what: str, home: Any, found: Found, *names: str) -> WorkloadError:
    public = _public_names(home)
    meant = next((near for near in (suggest(name, public) for name in names) if near), "")
    defined = ", ".join(public[:12]) or "nothing that fits"
    return WorkloadError(
        f"{found.label} has no {what}. It defines {defined}.{meant}",
        hint="A workload needs build_model() and either batches(batch_size, seed) or dataset(); the rest has defaults.",
    )


def _stream(functions: Mapping[str, Any], home: Any, found: Found) -> Batches:
    if functions["batches"] is not None:
        return whole_batches(functions["batches"])
    if functions["dataset"] is not None:
        return dataset_batches(functions["dataset"], functions["collate"])
    raise _missing("batches(batch_size, seed) and no dataset()", home, found, "batches", "dataset")


def _batch_size(home: Any, label: str) -> tuple[int, bool]:
    value = getattr(home, "BATCH_SIZE", None)
    if value is None:
        return DEFAULT_BATCH_SIZE, False
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WorkloadError(
            f"{label}: BATCH_SIZE is {value!r}; it must be a whole number from 1.",
            hint="It is the effective batch: samples of one optimizer step.",
        )
    return value, True


def _grad_clip(home: Any, label: str) -> float | None:
    value = getattr(home, "GRAD_CLIP", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise WorkloadError(
            f"{label}: GRAD_CLIP is {value!r}; it must be a number over 0, or None.",
            hint="It is the largest gradient norm of a step, as in torch.nn.utils.clip_grad_norm_.",
        )
    return float(value)

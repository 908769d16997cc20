"""StudySpace: a search space bound to one model and one target; parameters of a study to a policy and back.

``to_policy`` and ``to_params`` are inverses: a policy of the space gives the parameters that give the policy. Several parameters
can mean one policy (the loss scale of an all-fp32 plan, an override that changes nothing); ``canonical`` is the one that
``to_params`` returns for all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoprec.errors import SearchSpaceError
from autoprec.policy import Backend, Batch, Fingerprint, LayerSetting, LossScale, Padding, Policy, Precision
from autoprec.records import Look, Profile
from autoprec.tune.assignment import Assignment, assess, exceptions_of
from autoprec.tune.front_solver import solve_front
from autoprec.tune.overrides import BoundOverride, bound_overrides
from autoprec.tune.space import OverrideChoice, SearchSpace, allowed_precisions, tied_groups

Params = dict[str, Any]
FP16_ONLY = ("init_scale", "growth_interval", "fp16_accumulation")
# A size is padded to the asked multiple only where that adds at most this share of it. Own choice: past it the extra work costs more
# than better tiles give; three input channels padded to 64 would be 21 times as many.
MOST_ADDED = 1 / 16
FLAGS = ("tf32", "channels_last", "cudnn_benchmark")


def fingerprint_of(look: Look, *, device_name: str | None = None, capability: str | None = None) -> Fingerprint:
    """The fingerprint of the policies of a run; device and capability are the target's where they are given."""
    return Fingerprint.of(
        {layer.name: layer.signature for layer in look.layers},
        idle=look.idle,
        device=device_name or look.device_name,
        capability=capability or look.capability,
        torch_version=look.torch_version,
        workload_sha256=look.workload_sha256,
    )


def has_tf32(cuda: bool, capability: str | None) -> bool:
    """True on a CUDA device of compute capability 8.0 or newer. Source: NVIDIA, CUDA C++ Programming Guide, arithmetic types."""
    return cuda and capability is not None and int(capability.partition(".")[0]) >= 8


@dataclass(frozen=True)
class StudySpace:
    """What a study of one model on one target may vary.

    Attributes:
        look: the model.
        profile: times and sensitivities, for reasons and plan prices.
        fingerprint: goes into every policy.
        plans: whole assignments by compute type, equally many each; index 0 is fp32 everywhere, the last is the fastest; stock
            AMP is among them.
        overrides: groups with a parameter of their own.
        knobs: the outer parameters and their choices.
        pinned: a rule's reason by layer name.
    """

    look: Look
    profile: Profile
    fingerprint: Fingerprint
    plans: dict[Precision, tuple[Assignment, ...]]
    overrides: tuple[BoundOverride, ...]
    knobs: dict[str, tuple[Any, ...]]
    pinned: dict[str, str]

    @classmethod
    def bind(
        cls,
        space: SearchSpace,
        look: Look,
        profile: Profile,
        *,
        precisions: Sequence[Precision],
        cuda: bool,
        measured: bool = True,
        capability: str | None = None,
        device_name: str | None = None,
        front_size: int = 14,
    ) -> StudySpace:
        """Binds a search space to a model and a target; solves the assignment fronts.

        Args:
            space: what may vary.
            look: the model.
            profile: what its layers cost and risk.
            precisions: what the target runs.
            cuda: whether the target is a CUDA device (also where its speed is only predicted).
            measured: whether its speed is measured: what the prediction does not know is no knob.
            capability: the target's compute capability; None on a CPU.
            device_name: the target's name for the policy; the look's device where it is None.
            front_size: most assignments a compute type, without the two that are always there (fp32 and stock AMP).

        Raises:
            SearchSpaceError: a rule's pattern matches no layer.
        """
        allowed, pinned = allowed_precisions(space, look, precisions)
        usable = {p for options in allowed.values() for p in options}
        dtypes: tuple[Precision, ...] = tuple(p for p in ("fp16", "bf16") if p in usable) or ("fp32",)
        groups = tied_groups(space, look)
        fronts = {d: solve_front(look, profile, allowed, groups, dtype=d, size=front_size) for d in dtypes}
        plans = {d: _with_references(fronts[d], d, look, profile) for d in dtypes}
        longest = max(len(points) for points in plans.values())
        return cls(
            look=look,
            profile=profile,
            fingerprint=fingerprint_of(look, device_name=device_name, capability=capability),
            plans={d: _stretched(points, longest) for d, points in plans.items()},
            overrides=bound_overrides(space, look, profile, allowed, dtypes),
            knobs=_knobs(space, look, dtypes, cuda=cuda, measured=measured, tf32=has_tf32(cuda, capability)),
            pinned=pinned,
        )

    def params(self) -> dict[str, tuple[Any, ...]]:
        """Every parameter's choices in the order they are asked; those of FP16_ONLY count only where dtype is fp16."""
        first = next(iter(self.plans.values()))
        inner: dict[str, tuple[Any, ...]] = {"dtype": tuple(self.plans), "front_index": tuple(range(len(first)))}
        inner |= {override.name: override.choices for override in self.overrides}
        return inner | self.knobs

    def active(self, dtype: str) -> tuple[str, ...]:
        """Names of the parameters that count for a compute type."""
        return tuple(name for name in self.params() if dtype == "fp16" or name not in FP16_ONLY)

    def to_policy(self, params: Mapping[str, Any]) -> Policy:
        """The policy of a set of parameters.

        Raises:
            SearchSpaceError: a parameter that counts is missing or has a value outside its choices.
        """
        self._check(params)
        dtype: Precision = params["dtype"]
        plan = self._plan(dtype, params["front_index"], [params[override.name] for override in self.overrides])
        used = {plan.default, *plan.precisions.values()}
        scaled, low = bool({"fp16", "fp16_pure"} & used), used != {"fp32"}
        micro, effective = params["micro_batch"], self.look.effective_batch
        padding = params.get("padding", 0)
        flags = {name: params.get(name, False) for name in FLAGS}
        return Policy(
            default=plan.default,
            layers=self._settings(plan),
            loss_scale=LossScale(init=params["init_scale"], growth_interval=params["growth_interval"]) if scaled else LossScale(),
            batch=Batch(effective=effective, micro=micro, accumulation_steps=effective // micro),
            padding=Padding(layers=self._multiples(padding)),
            outputs="fp32" if plan.default == "fp32" else self.look.outputs,
            weights=params.get("weights", "fp32") if low else "fp32",
            backend=Backend(**flags, fp16_accumulation=scaled and params.get("fp16_accumulation", False)),
            fingerprint=self.fingerprint,
        )

    def to_params(self, policy: Policy) -> Params:
        """The parameters of a policy of this space.

        Raises:
            SearchSpaceError: the policy lies outside the space; the fields that do are named.
        """
        key = (policy.default, *policy.precisions().values())
        if key not in self._plan_index:
            raise _outside("its layers' precisions are on no plan")
        params = self._outer_params(policy, self._plan_index[key])
        if wrong := [name for name, value in params.items() if value not in self.params()[name]]:
            raise _outside(", ".join(f"{name} is {params[name]!r}" for name in wrong))
        if (made := self.to_policy(params)).setup_hash() != policy.setup_hash():
            fields = ("loss_scale", "batch", "padding", "outputs", "weights", "backend", "execution", "loader", "fingerprint")
            raise _outside(", ".join(f for f in fields if getattr(made, f) != getattr(policy, f)) or "layers")
        return params

    def canonical(self, params: Mapping[str, Any]) -> Params:
        """The one set of parameters that stands for all that give the same policy."""
        return self.to_params(self.to_policy(params))

    def nearest_params(self, policy: Policy) -> Params:
        """What a policy outside the space has in common with it, for its trial in the study.

        ``dtype`` and ``front_index`` are always there (the plan that differs in the fewest layers); a knob whose value is not
        among the choices is left out.
        """
        precisions = policy.precisions()
        key = (policy.default, *precisions.values())
        params = self._outer_params(policy, self._plan_index.get(key) or self._closest_plan(policy.default, precisions))
        choices = self.params()
        return {name: value for name, value in params.items() if value in choices[name]}

    def hopeless(self, params: Mapping[str, Any]) -> bool:
        """True where the plan breaks a hard risk: a search must not propose it (stock AMP may be such a plan)."""
        plan = self._plan(params["dtype"], params["front_index"], [params[override.name] for override in self.overrides])
        return plan.harm == float("inf")

    def fastest(self, dtype: Precision) -> Assignment:
        """The fastest plan of a compute type that breaks no hard risk; the fastest of all where each does."""
        return self.plans[dtype][self._fastest_index(dtype)]

    def _fastest_index(self, dtype: Precision) -> int:
        points = self.plans[dtype]
        sound = [index for index, plan in enumerate(points) if plan.harm < float("inf")]
        return sound[-1] if sound else len(points) - 1

    def neighbours(self, params: Mapping[str, Any]) -> Iterator[Params]:
        """Parameters one step from these, the most promising step first: flags, plan, overrides, batch, padding, scale."""
        choices = self.params()
        first = [name for name in FLAGS if name in choices]
        order = [*first, "front_index", *(o.name for o in self.overrides), "weights", "micro_batch", "padding", *FP16_ONLY]
        for name in order:
            if name not in params or name not in choices:
                continue
            options = choices[name]
            at = options.index(params[name])
            steps = (at + 1, at - 1) if name == "front_index" else (at - 1, at + 1)
            for step in steps:
                if 0 <= step < len(options):
                    yield {**params, name: options[step]}

    def starts(self, most: int = 4) -> list[Params]:
        """Starting points a practitioner would try: the fastest plan of each type with TF32 on, in both layouts.

        cudnn.benchmark is left to the search: its hunt for kernels takes seconds per set of shapes. channels_last was 1.87x on
        one convolution net and 0.71x on another (ResNet-50 and a UNet on an H200), so both layouts are tried.
        """
        choices = self.params()
        points: list[Params] = []
        for layout in reversed(choices.get("channels_last", (False,))):
            for dtype in choices["dtype"]:
                params: Params = {name: choices[name][0] for name in self.active(dtype)}
                params |= {"tf32": True} if True in choices.get("tf32", ()) else {}
                params |= {"dtype": dtype, "front_index": self._fastest_index(dtype)}
                params |= {"channels_last": layout} if "channels_last" in params else {}
                params |= {"padding": choices["padding"][-1]} if "padding" in params else {}
                params |= {"weights": choices["weights"][-1]} if "weights" in params else {}
                points.append(params)
        return [params for params in points if not self.hopeless(params)][:most]

    def sha256(self) -> str:
        """Identifies the space: a study may only be resumed in the same one."""
        plans = {dtype: [plan.key() for plan in points] for dtype, points in self.plans.items()}
        groups = [[o.name, sorted((name, *options) for name, options in o.layers.items())] for o in self.overrides]
        text = json.dumps([self.params(), plans, groups, self.fingerprint.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _check(self, params: Mapping[str, Any]) -> None:
        choices = self.params()
        for name in self.active(str(params.get("dtype"))):
            if name not in params:
                raise SearchSpaceError(f"The parameter '{name}' is missing.", hint=f"Give one of {choices[name]}.")
            if params[name] not in choices[name]:
                raise SearchSpaceError(f"{name} is {params[name]!r}; allowed are {choices[name]}.")

    def _outer_params(self, policy: Policy, inner: Params) -> Params:
        backend = policy.backend.model_dump()
        values: Params = {**inner, "micro_batch": policy.batch.micro, **{name: backend[name] for name in FLAGS}}
        values["padding"] = self._padding_of(policy.padding.layers)
        low = {policy.default, *policy.precisions().values()} != {"fp32"}
        values["weights"] = policy.weights if low else self.knobs.get("weights", ("fp32",))[0]
        scaled = policy.needs_loss_scale
        values["init_scale"] = policy.loss_scale.init if scaled else self.knobs.get("init_scale", (None,))[0]
        values["growth_interval"] = policy.loss_scale.growth_interval if scaled else self.knobs.get("growth_interval", (None,))[0]
        values["fp16_accumulation"] = backend["fp16_accumulation"]
        return {name: values[name] for name in self.active(values["dtype"])}

    def _multiples(self, padding: int) -> dict[str, int]:
        """The multiple of each odd layer: the one asked for, or the least of the space where that would add too much."""
        if not padding:
            return {}
        return _multiples(self.look, padding, min(choice for choice in self.knobs["padding"] if choice))

    def _padding_of(self, multiples: Mapping[str, int]) -> int:
        """The first choice that gives these multiples; their largest where none does, which is then outside the space."""
        choices = self.knobs.get("padding", (0,))
        return next((c for c in choices if self._multiples(c) == multiples), max(multiples.values(), default=0))

    def _plan(self, dtype: Precision, index: int, choices: Sequence[OverrideChoice]) -> Assignment:
        plan = self.plans[dtype][index]
        if index == 0 or all(choice == "front" for choice in choices):
            return plan
        key = (dtype, index, *choices)
        if key not in self._moved:
            precisions = dict(plan.precisions)
            for override, choice in zip(self.overrides, choices, strict=True):
                precisions = override.applied(precisions, dtype, choice)
            self._moved[key] = assess(precisions, plan.default, self.look, self.profile)
        return self._moved[key]

    def _settings(self, plan: Assignment) -> dict[str, LayerSetting]:
        key = plan.key()
        if key not in self._settings_made:
            self._settings_made[key] = exceptions_of(
                plan.precisions, plan.default, profile=self.profile, look=self.look, pinned=self.pinned
            )
        return self._settings_made[key]

    @cached_property
    def _moved(self) -> dict[tuple[object, ...], Assignment]:
        return {}

    @cached_property
    def _settings_made(self) -> dict[tuple[Precision, ...], dict[str, LayerSetting]]:
        return {}

    @cached_property
    def _plan_index(self) -> dict[tuple[Precision, ...], Params]:
        """The first (dtype, index, overrides) of every distinct plan, by the policy's default and layer precisions."""
        names = tuple(self.fingerprint.layers)
        found: dict[tuple[Precision, ...], Params] = {}
        for dtype, points in self.plans.items():
            for choices in itertools.product(*(override.choices for override in self.overrides)):
                for index in range(len(points)):
                    plan = self._plan(dtype, index, choices)
                    inner: Params = {"dtype": dtype, "front_index": index}
                    inner |= {override.name: choice for override, choice in zip(self.overrides, choices, strict=True)}
                    found.setdefault((plan.default, *(plan.precisions[name] for name in names)), inner)
        return found

    def _closest_plan(self, default: Precision, precisions: Mapping[str, Precision]) -> Params:
        wanted = (default, *precisions.values())
        return min(self._plan_index.items(), key=lambda item: sum(a != b for a, b in zip(item[0], wanted, strict=True)))[1]


def _multiples(look: Look, padding: int, least: int) -> dict[str, int]:
    shapes = {layer.name: [shape[:2] for shape in layer.parameters.values() if len(shape) >= 2] for layer in look.layers}
    adds_little = {
        name: all(-size % padding <= size * MOST_ADDED for shape in shapes[name] for size in shape) for name in look.odd_layers
    }
    return {name: padding if little else least for name, little in adds_little.items()}


def _outside(what: str) -> SearchSpaceError:
    return SearchSpaceError(f"The policy lies outside the search space: {what}.", hint="Widen the space, or tune again.")


def _with_references(front: Sequence[Assignment], dtype: Precision, look: Look, profile: Profile) -> tuple[Assignment, ...]:
    """The front with fp32 at its start and stock AMP where its time puts it, without repeats."""
    names = [layer.name for layer in look.layers]
    fp32 = assess(dict.fromkeys(names, "fp32"), "fp32", look, profile)
    stock = assess(dict.fromkeys(names, dtype), dtype, look, profile)
    points = {plan.key(): plan for plan in (*front, stock)}
    points.pop(fp32.key(), None)
    return (fp32, *sorted(points.values(), key=lambda plan: (-plan.time_s, plan.harm)))


def _stretched(points: tuple[Assignment, ...], length: int) -> tuple[Assignment, ...]:
    """Repeats points evenly so that every front has one range of indices and ends in its fastest."""
    if length == 1:
        return points
    return tuple(points[round(i * (len(points) - 1) / (length - 1))] for i in range(length))


def _knobs(
    space: SearchSpace, look: Look, dtypes: Sequence[Precision], *, cuda: bool, measured: bool, tf32: bool
) -> dict[str, tuple[Any, ...]]:
    ranges = space.ranges
    most = ranges.micro_batch.max_accumulation_steps
    micro = [m for m in look.micro_batches if look.effective_batch // m <= most][: ranges.micro_batch.max_choices]
    knobs: dict[str, tuple[Any, ...]] = {"micro_batch": tuple(micro) or (look.effective_batch,)}
    if (multiples := sorted({value for value in ranges.padding.values if value})) and look.odd_layers:
        # Of choices that give every layer the same multiples the first is enough.
        given = {tuple(_multiples(look, value, multiples[0]).items()): value for value in reversed(multiples)}
        knobs["padding"] = (0, *reversed(given.values()))
    if cuda and measured and dtypes != ("fp32",):
        knobs["weights"] = _distinct(ranges.weights.values)
    flags = ranges.flags
    if tf32:
        knobs["tf32"] = _distinct(flags.tf32)
    if look.has_conv:
        knobs["channels_last"] = _distinct(flags.channels_last)
    if look.has_conv and cuda:
        knobs["cudnn_benchmark"] = _distinct(flags.cudnn_benchmark)
    if "fp16" in dtypes:
        knobs["init_scale"] = _distinct(ranges.init_scale.values)
        knobs["growth_interval"] = _distinct(ranges.growth_interval.values)
        if cuda and True in flags.fp16_accumulation:
            knobs["fp16_accumulation"] = _distinct(flags.fp16_accumulation)
    return knobs


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))

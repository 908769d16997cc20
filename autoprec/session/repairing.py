"""Stage 7: of every compute type the fastest plan, as it is where it trains, with the fewest layers lifted where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.policy import Backend, LossScale, Padding, Policy, Precision, Reason
from autoprec.records import Candidate, Failure, Measurement, Outcome
from autoprec.session.budget import FEWEST_REPAIR_WINDOWS
from autoprec.session.context import Context
from autoprec.session.judging import at_settled_scale, does_harm, judged, trained_on_seeds
from autoprec.tune.assignment import Assignment, assess, exceptions_of, harm_of
from autoprec.tune.repair import smallest_repair
from autoprec.tune.space import SearchSpace, allowed_precisions
from autoprec.tune.study_space import StudySpace
from autoprec.tune.yardstick import Yardstick

# A repair that costs more than this many whole windows costs more than it gains; the front's safer points remain. Windows that fail at
# once cost next to nothing, so more of them may run. Own choice.
MAX_REPAIR_WINDOWS, MAX_REPAIR_EVALUATIONS = 16, 64


def repairs(
    context: Context, space: StudySpace, yardstick: Yardstick, candidates: Sequence[Candidate], search_space: SearchSpace
) -> dict[str, Policy]:
    """Policies by role to add to the study, each the fastest plan of a compute type.

    ``fastest_*`` where the plan trains as it is and no trial was it (a short study may not have come to it), ``repaired_*`` where
    layers had to be lifted.
    """
    tried = {candidate.policy.setup_hash() for candidate in candidates}
    allowed, _ = allowed_precisions(search_space, context.look, context.target.precisions)
    found: dict[str, Policy] = {}
    for dtype in space.plans:
        base = _base_policy(space, candidates, dtype)
        if dtype == "fp32" or base is None:
            continue
        repair = Repair(context, space, yardstick, base, space.fastest(dtype), allowed)
        keep_s = context.least_after_s() + context.kept_for_execution_s(context.least_after_s())
        if not context.may_start(context.window_s(repair.policy({}), context.trial_window()), keep_s):
            context.leave_out(f"a look at the fastest {dtype} plan")
            continue
        context.progress.stage(f"fastest plan in {dtype}", 1)
        policy, outcome = repair.trained({})
        feasible = yardstick.feasible(outcome)
        trains = feasible and not repair.harms(policy)
        context.progress.advance()
        if trains:
            found |= {} if policy.setup_hash() in tried else {f"fastest_{dtype}": policy}
            continue
        if not _lies_in_layers(outcome):
            continue
        if not context.may_start(FEWEST_REPAIR_WINDOWS * context.low_s(context.plan.trial_steps), keep_s):
            context.leave_out(f"repair of {dtype}")
            continue
        context.progress.stage(f"repair of {dtype}", MAX_REPAIR_WINDOWS)
        mended = repair.mended(outcome, strictly=feasible)
        if mended is not None:
            found[f"repaired_{dtype}"] = mended
    return found


def _lies_in_layers(outcome: Outcome) -> bool:
    """Whether other precisions could cure it: memory, a hang and a crash are not numerics."""
    return not isinstance(outcome, Failure) or outcome.kind in ("diverged", "scale_collapsed", "unsupported")


def _steps_run(outcome: Outcome) -> int:
    """Steps that a window trained, those on the way to the layer that failed included."""
    if isinstance(outcome, Measurement):
        return len(outcome.losses)
    return (1 + (outcome.layer is not None)) * ((outcome.step or 0) + 1)


def _base_policy(space: StudySpace, candidates: Sequence[Candidate], dtype: Precision) -> Policy | None:
    """The outer knobs to repair under: those of the fastest trial of the compute type, with a loss scale of the space."""
    of_dtype = [c for c in candidates if dtype in (c.policy.default, *c.policy.precisions().values())]
    if not of_dtype:
        return None
    policy = max(of_dtype, key=lambda c: c.outcome.samples_per_s if isinstance(c.outcome, Measurement) else 0.0).policy
    scales = space.params().get("init_scale", ())
    if not policy.needs_loss_scale or policy.loss_scale.init in scales or not scales:
        return policy
    return policy.model_copy(update={"loss_scale": LossScale(init=scales[len(scales) // 2])})


@dataclass(frozen=True)
class Repair:
    """The repair of one plan: which layers to lift so that it trains.

    Attributes:
        base: the outer knobs.
        plan: the plan to repair.
        allowed: precisions by layer.
    """

    context: Context
    space: StudySpace
    yardstick: Yardstick
    base: Policy
    plan: Assignment
    allowed: Mapping[str, Sequence[Precision]]

    def policy(self, lifted: Mapping[str, Precision], reasons: Mapping[str, Reason] | None = None) -> Policy:
        """The plan with some layers in other precisions."""
        merged = {**self.plan.precisions, **lifted}
        plan = assess(merged, merged.get("", self.plan.default), self.context.look, self.space.profile)
        settings = exceptions_of(
            plan.precisions, plan.default, profile=self.space.profile, look=self.space.look, pinned=self.space.pinned
        )
        for name, reason in (reasons or {}).items():
            if name in settings:
                settings[name] = settings[name].model_copy(update={"reason": reason})
        return self.base.model_copy(update={"default": plan.default, "layers": settings})

    def trained(self, lifted: Mapping[str, Precision]) -> tuple[Policy, Outcome]:
        """The policy with these layers lifted and its trial window, at the loss scale it settles at."""
        policy, window = self.policy(lifted), self.context.trial_window("repair")
        outcome = self.context.evaluate(policy, window, role="repair")
        settled = at_settled_scale(policy, [outcome])
        if settled is None or not self._has_time_for(settled):
            return policy, outcome
        again = self.context.evaluate(settled, window, role="repair")
        return (settled, again) if self.yardstick.feasible(again) else (policy, outcome)

    def harms(self, policy: Policy) -> bool:
        """Whether a policy that a trial window let pass does harm on the verification windows, while there is time to look."""
        context = self.context
        windows_s = sum(context.window_s(policy, context.verify_window(seed, "")) for seed in range(context.plan.verify_seeds))
        if not context.may_start(windows_s, context.least_after_s()):
            return False
        return does_harm(judged(context, trained_on_seeds(context, policy, "repair")))

    def passes(self, lifted: Mapping[str, Precision], *, strictly: bool) -> bool:
        """Whether the plan trains with these layers lifted.

        One window on one seed decides where it is clear. Between what verification lets pass and what a trial may depart, the
        verification windows decide, as they do everywhere where ``strictly``; those of the set that stays are needed anyway.
        """
        policy, outcome = self.trained(lifted)
        self.context.progress.advance()
        if not self.yardstick.feasible(outcome):
            return False
        clear = max(self.context.settings.tolerance, self.yardstick.noise_floor)
        return not self.harms(policy) if strictly or self.yardstick.gap(outcome) > clear else True

    def mended(self, failed: Outcome, *, strictly: bool) -> Policy | None:
        """The policy with the smallest set found lifted and its reasons; None where nothing less than plain FP32 cures it.

        Args:
            failed: what came of the plan.
            strictly: hold every set against the verification windows: the trial window did not show the harm.
        """
        soft: Precision | None = "bf16" if "bf16" in self.context.target.precisions and self.plan.default != "bf16" else None
        steps: list[int] = []
        most = MAX_REPAIR_WINDOWS * self.context.plan.trial_steps

        def passes(lifted: Mapping[str, Precision]) -> bool:
            if not self._has_time_for(self.policy(lifted)):
                return False  # not shown to pass: what passed so far stays
            steps.append(_steps_run(self.trained(lifted)[1]))
            return self.passes(lifted, strictly=strictly)

        suspects = self._suspects(failed)
        repair = smallest_repair(
            suspects,
            passes,
            allowed=self.allowed,
            soft=soft,
            max_evaluations=MAX_REPAIR_EVALUATIONS,
            is_spent=lambda: sum(steps) >= most,
        )
        if repair is None or list(repair[0].values()) == ["fp32"] * len(suspects):
            return self._under_plain_knobs(failed, strictly=strictly)
        lifted, lift = repair
        policy, _ = self.trained(lifted)
        if not strictly and self.harms(policy):
            return self.mended(failed, strictly=True)
        self.context.progress.found(f"repair: lifted {', '.join(lifted)} after {lift.evaluations} windows")
        reasons = {name: self._reason(name, failed) for name in lifted}
        return policy.model_copy(update={"layers": self.policy(lifted, reasons).layers})

    def _has_time_for(self, policy: Policy) -> bool:
        """Whether a trial window of a policy ends before the time that one arm's verification needs."""
        context = self.context
        return context.may_start(context.window_s(policy, context.trial_window()), context.least_after_s())

    def _suspects(self, failed: Outcome) -> list[str]:
        """The plan's low layers, the one that failed first, then by the harm the profile foretells."""
        profiles = {profile.layer: profile for profile in self.space.profile.layers}
        precisions = self.plan.precisions
        culprit = failed.layer if isinstance(failed, Failure) else None
        low = [name for name, precision in precisions.items() if precision != "fp32"]
        return sorted(low, key=lambda name: (name != culprit, -harm_of(profiles.get(name), precisions[name])))

    def _under_plain_knobs(self, failed: Outcome, *, strictly: bool) -> Policy | None:
        """Once more with torch's own flags and float32 weights: where no set of layers is at fault, they may be."""
        plain = self.base.model_copy(update={"backend": Backend(), "weights": "fp32", "padding": Padding()})
        if plain.setup_hash() == self.base.setup_hash():
            self.context.progress.found("repair: nothing less than every layer of the fastest plan in FP32 would cure it")
            return None
        self.context.progress.found("repair: nothing less than every layer in FP32 would cure it, so its flags are taken back")
        again = Repair(self.context, self.space, self.yardstick, plain, self.plan, self.allowed)
        policy, outcome = again.trained({})
        if self.yardstick.feasible(outcome) and not again.harms(policy):
            return policy
        return again.mended(outcome if _lies_in_layers(outcome) else failed, strictly=strictly)

    def _reason(self, name: str, failed: Outcome) -> Reason:
        gap = f"loss gap {self.yardstick.gap(failed):+.1%}"
        what = f"{failed.kind}: {failed.message}" if isinstance(failed, Failure) else gap
        text = f"in {self.plan.precisions[name]} the training window failed ({what}); lifted it tracks FP32"
        return Reason(kind="divergence", text=text)

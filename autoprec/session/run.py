"""``tune``: every stage in order, from a model.py to a policy."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprec import __version__
from autoprec.bench.bench import Bench
from autoprec.bench.source import check_reference
from autoprec.bench.target import Target, resolve_target
from autoprec.records import Look
from autoprec.session.budget import Costs, least_needs, low_share, plan_windows, plan_words, whole_needs
from autoprec.session.context import Context, Measuring
from autoprec.session.export import TuneResult, export
from autoprec.session.logbook import Logbook
from autoprec.session.opening import PROBES, Interrupted, first_look, fp32_that_fits, opened_bench, probed, workload_name
from autoprec.session.progress import Progress, Silent
from autoprec.session.reference import run_reference
from autoprec.session.search import run_search
from autoprec.session.settings import (
    DEFAULT_BUDGET_S,
    DEFAULT_TOLERANCE,
    DEFAULT_TRIALS,
    ExecutionChoice,
    Plan,
    Settings,
)
from autoprec.session.verification import run_verification
from autoprec.session.worth import stop_early
from autoprec.tune.identity import Identity, default_path
from autoprec.tune.run_folder import RunFolder, make_folder
from autoprec.tune.space import SearchSpace, load_search_space, search_space_for
from autoprec.tune.study_space import fingerprint_of

MOST_BASELINES = 8


def tune(
    workload: Any,
    *,
    gpu: str | None = None,
    predict: bool = False,
    trials: int = DEFAULT_TRIALS,
    budget_s: float = DEFAULT_BUDGET_S,
    out: str | Path | None = None,
    execution: ExecutionChoice = "auto",
    search_space: str | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    keep_fp32: tuple[str, ...] = (),
    seed: int = 0,
    anyway: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Finds the fastest mixed-precision set-up of a workload that trains like FP32.

    Args:
        workload: path of a model.py, ``path.py:object``, ``package.module:object``, or an object with the same attributes. It is
            the user's own code and runs as such; given as text it runs in a process of its own, which may die without harm.
        gpu: a card's name, ``cpu``, or None for the CUDA device that is here.
        predict: allow predicted speed when another CUDA card is here than the one named.
        trials: study trials beyond the baselines.
        budget_s: wall time of the whole tune, in seconds; overrun by no more than the window or compile that runs when it ends.
        out: the run's folder; None is ``reports/<model>-<gpu>``. An equal run in it is carried on.
        execution: ``auto`` also tries torch.compile and CUDA graphs where the speed is measured on CUDA.
        search_space: a packaged name or the path of a TOML file.
        tolerance: relative loss gap to FP32 that passes, unless the noise floor is larger.
        keep_fp32: patterns of layer names to keep in FP32.
        seed: of the search and of the first window.
        anyway: search also where the first look says that low precision cannot pay.
        progress: is told what happens; None is silent.

    Returns:
        The result with its policy, already written to the folder.

    Raises:
        UserError: something given is wrong; nothing already measured is lost.
    """
    settings = Settings(
        workload=workload,
        gpu=gpu,
        predict=predict,
        trials=trials,
        budget_s=budget_s,
        out=Path(out) if out is not None else None,
        execution=execution,
        search_space=search_space,
        tolerance=tolerance,
        seed=seed,
        keep_fp32=tuple(keep_fp32),
        anyway=anyway,
    )
    return run_tune(settings, progress or Silent())


def run_tune(settings: Settings, progress: Progress, *, started_s: float | None = None) -> TuneResult:
    """Runs a tune as the settings say; see ``tune``. The budget counts from ``started_s`` (of ``time.monotonic``), or from now."""
    started_s = time.monotonic() if started_s is None else started_s
    target = resolve_target(settings.gpu, predict=settings.predict)
    search_space = _search_space(settings, target)
    path = settings.out or default_path(workload_name(settings.workload), target.gpu.key if target.gpu else target.name)
    check_reference(settings.workload)
    make_folder(path)
    logbook = Logbook(progress)
    with opened_bench(settings.workload, target, Bench, path / "worker.log") as bench:
        for note in target.notes:
            logbook.found(note)
        look = first_look(bench, target, logbook)
        with RunFolder.open(path, _identity(settings, target, look, search_space)) as folder:
            try:
                return run_stages(settings, target, bench, look, folder, logbook, search_space, started_s)
            except KeyboardInterrupt:
                trials = sum(candidate.trial is not None for candidate in folder.candidates)
                raise Interrupted(
                    f"Stopped. {trials} finished trials of {len(folder.candidates)} windows in all are kept in {path}.",
                    hint="Run the same command again to go on from there.",
                ) from None


def run_stages(
    settings: Settings,
    target: Target,
    bench: Measuring,
    look: Look,
    folder: RunFolder,
    logbook: Logbook,
    search_space: SearchSpace,
    started_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """The stages after the look, on any bench and by any clock; each plans with the time that is really left."""
    plan = _plan(settings, target, bench, folder, look, started_s, clock)
    costs = Costs(plan.step_s, plan.overhead_s, low_share=low_share(target.device == "cuda"))
    context = Context(settings, target, bench, look, plan, folder, logbook, started_s, costs, clock)
    _say_plan(context)
    ended = stop_early(context, search_space)
    if ended is not None:
        return export(*ended, logbook)
    context = run_reference(context)
    found = run_search(context, search_space)
    return export(context, found, run_verification(context, found), logbook)


def _say_plan(context: Context) -> None:
    """What the budget holds and what it does not, as soon as that is known."""
    low, timed = low_share(context.target.device == "cuda"), context.target.timing == "measured"
    whole = whole_needs(
        context.plan,
        num_layers=len(context.look.layers),
        trials=context.settings.trials,
        num_baselines=MOST_BASELINES if context.look.has_conv else MOST_BASELINES // 2,
        low=low,
        timed=timed,
        compiles=context.compiles,
    )
    least = least_needs(context.plan, low=low, timed=timed)
    context.progress.found(plan_words(context.plan, whole, least, context.time_left_s, context.settings.budget_s))


def _search_space(settings: Settings, target: Target) -> SearchSpace:
    if settings.search_space is not None:
        return load_search_space(settings.search_space, keep_fp32=settings.keep_fp32)
    packaged = search_space_for(target.capability or "cpu")
    return load_search_space(packaged.family, keep_fp32=settings.keep_fp32)


def _identity(settings: Settings, target: Target, look: Look, search_space: SearchSpace) -> Identity:
    return Identity(
        workload=str(settings.workload),
        workload_sha256=look.workload_sha256,
        layer_list_sha256=fingerprint_of(look).layer_list_sha256,
        search_space_sha256=hashlib.sha256(search_space.model_dump_json().encode()).hexdigest(),
        target=f"{target.name} ({target.timing})",
        torch_version=look.torch_version,
        settings={"tolerance": settings.tolerance, "execution": settings.execution, "seed": settings.seed},
        budget={"trials": settings.trials, "budget_s": settings.budget_s},
        command=shlex.join(sys.argv),
        autoprec_version=__version__,
    )


def _plan(
    settings: Settings,
    target: Target,
    bench: Measuring,
    folder: RunFolder,
    look: Look,
    started_s: float,
    clock: Callable[[], float],
) -> Plan:
    """The window lengths: those of the folder's earlier session, so that its trials count, or from the time of a probe."""
    known = folder.load_stage("plan", Plan)
    if known is not None and any(candidate.trial is not None for candidate in folder.candidates):
        return known
    # The first window pays for loading kernels and making batches; the others show by the clock what a step and a window cost.
    policy = fp32_that_fits(bench, look)
    probe = probed(bench, policy, clock)
    measured_s = probe.measurement.step_s if target.timing == "measured" else 0.0
    plan = plan_windows(
        max(probe.step_s, measured_s),
        probe.overhead_s,
        settings,
        num_baselines=MOST_BASELINES if look.has_conv else MOST_BASELINES // 2,
        on_cuda=target.device == "cuda",
        time_left_s=started_s + settings.budget_s - clock(),
    )
    plan = plan.model_copy(
        update={"fp32_micro": policy.batch.micro, "fp32_step_s": measured_s, "host_bound": probe.measurement.host_bound}
    )
    folder.record("probe", policy, PROBES[1], probe.measurement)
    folder.save_stage("plan", plan)
    return plan

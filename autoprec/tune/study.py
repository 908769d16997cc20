"""The study: Optuna over a StudySpace, baselines first, bad trials counted against their region, resumable.

One trial runs at a time: two timing on one GPU would spoil each other's figures. The storage is one SQLite file with heartbeats.
"""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import optuna
from optuna import Study, Trial
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autoprec.errors import RunFolderError, SearchSpaceError
from autoprec.policy import Policy
from autoprec.records import Candidate, Measurement, Outcome, Window
from autoprec.tune.bisection import decided_by_numerics, next_index
from autoprec.tune.sampler import FreshSampler, random_untried
from autoprec.tune.study_space import Params, StudySpace
from autoprec.tune.trial_record import describe_policy, record_outcome
from autoprec.tune.yardstick import Yardstick

STUDY_NAME = "autoprec"
METRIC_NAMES = ("samples_per_s", "divergence")
# SQLite has one writer; the dashboard reads the same file. Source: optuna/optuna#820, 5 s is too short.
LOCK_TIMEOUT_S = 60.0
# A process silent for this long is dead. Own choice: Optuna asks for a grace period over the interval.
HEARTBEAT_S, GRACE_S = 30, 120
# The last trials refine the best found by single steps: a fifth of the budget, eight at most. Own choice.
REFINE_SHARE, MAX_REFINEMENTS = 5, 8
INTERRUPTED = "interrupted"
# Starting points are taken only where this many trials are left for the search itself. Own choice.
STARTS_NEED = 10
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)

Evaluate = Callable[[Policy, Window], Outcome]
OnTrial = Callable[[Candidate, Candidate | None], None]


def run_study(
    space: StudySpace,
    evaluate: Evaluate,
    yardstick: Yardstick,
    *,
    window: Window,
    baselines: Mapping[str, Policy],
    trials: int,
    storage: str | None = None,
    seed: int = 0,
    earlier: Sequence[Candidate] = (),
    on_trial: OnTrial | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    study_name: str = STUDY_NAME,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> list[Candidate]:
    """Runs or resumes a study.

    Args:
        space: what varies.
        evaluate: runs one window; a failure is a value. Whatever it raises ends the study.
        yardstick: FP32's losses and the limits.
        window: the recipe of every trial.
        baselines: policies by role that run first, whatever ``trials`` says; one whose role has finished is not run again, so a
            later call may bring further roles (a repaired policy, say).
        trials: finished trials in total, baselines and earlier sessions included.
        storage: a URL such as ``sqlite:///study.db``; None keeps the study in memory.
        seed: same seed, same study, where the same outcomes come back. A resumed study draws other numbers than before.
        earlier: candidates of earlier sessions; returned with the new ones.
        on_trial: called after each trial with its candidate and the best feasible one so far.
        should_stop: asked before each trial; True ends the study early.
        study_name: name inside the storage.
        lock_timeout_s: how long to wait for another process's write.

    Returns:
        Candidates of all finished trials that are known, by number, which is the trial's.

    Raises:
        RunFolderError: the study's file is locked, cannot be opened, or holds a study of another space.
        KeyboardInterrupt: as it came; the trial in flight is marked failed and tried again at the next call, finished ones stay.
    """
    with _quiet(), storage_errors(storage):
        tried: set[str] = set()
        study = open_study(storage, study_name=study_name, lock_timeout_s=lock_timeout_s)
        seed += len(study.get_trials(deepcopy=False))  # the same numbers again would propose the first session's trials again
        study.sampler = FreshSampler(space, seed, lambda params: _is_tried(space, params, tried))
        _check_space(study, space, storage)
        _revive(study, set(baselines))
        session = _Session(space, evaluate, yardstick, window, dict(baselines), study, tried, seed, list(earlier))
        session.prepare()
        while not should_stop() and session.queue_next(trials):
            study.optimize(session.objective, n_trials=1)
            if on_trial is not None:
                on_trial(session.candidates[-1], session.best())
    return sorted(session.candidates, key=lambda candidate: candidate.number)


def open_study(storage: str | None, *, study_name: str = STUDY_NAME, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Study:
    """Opens or creates the study: throughput up, divergence down, both named. Prints nothing."""
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeats and metric names work in Optuna 5 as they are used here
        study = optuna.create_study(
            storage=_backend(storage, lock_timeout_s),
            study_name=study_name,
            directions=("maximize", "minimize"),
            load_if_exists=True,
        )
        if study.metric_names is None:
            study.set_metric_names(list(METRIC_NAMES))
    return study


def _backend(storage: str | None, lock_timeout_s: float) -> BaseStorage | None:
    if storage is None:
        return None
    options = {"connect_args": {"timeout": lock_timeout_s}} if storage.startswith("sqlite") else {}
    return RDBStorage(
        storage,
        engine_kwargs=options,
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=_retry,
    )


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Trials that count: complete or pruned."""
    return study.get_trials(deepcopy=False, states=FINISHED)


class _Session:
    """One call of ``run_study``: what was tried, what is queued, what came of it."""

    def __init__(
        self,
        space: StudySpace,
        evaluate: Evaluate,
        yardstick: Yardstick,
        window: Window,
        baselines: dict[str, Policy],
        study: Study,
        tried: set[str],
        seed: int,
        earlier: list[Candidate],
    ) -> None:
        self._space, self._evaluate, self._yardstick, self._window = space, evaluate, yardstick, window
        self._baselines, self._study, self._tried = baselines, study, tried
        self._seed = seed
        self.candidates = [candidate for candidate in earlier if candidate.trial is not None]

    def prepare(self) -> None:
        """Notes what earlier sessions tried and queues what runs first; a resumed study keeps its queue."""
        known = self._study.get_trials(deepcopy=False)
        self._tried |= {
            str(trial.user_attrs["policy_sha256"])
            for trial in known
            if "policy_sha256" in trial.user_attrs and (trial.state in FINISHED or "retry_of" in trial.user_attrs)
        }
        present = {trial.user_attrs.get("role") for trial in known if trial.state in (*FINISHED, TrialState.WAITING)}
        for role, policy in self._baselines.items():
            if role not in present:
                self._study.enqueue_trial(self._space.nearest_params(policy), user_attrs={"role": role})

    def queue_next(self, trials: int) -> bool:
        """Makes sure that a trial worth running comes next; False where the study is over."""
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        left = trials - len(finished_trials(self._study))
        if left <= 0:
            return any(trial.user_attrs.get("role") in self._baselines for trial in waiting)
        if waiting:
            return True
        role, params = "start", self._start(trials) or self._bisection(trials)
        if params is None and left <= min(MAX_REFINEMENTS, trials // REFINE_SHARE):
            role, params = "refine", self._refinement()
        if params is not None:
            self._study.enqueue_trial(params, user_attrs={"role": role})
            return True
        rng = random.Random(self._seed + len(self._tried))
        return random_untried(self._space, lambda params: _is_tried(self._space, params, self._tried), rng) is not None

    def best(self) -> Candidate | None:
        """The fastest feasible candidate."""
        return max(
            (c for c in self.candidates if self._yardstick.feasible(c.outcome)), key=lambda c: _speed(c.outcome), default=None
        )

    def objective(self, trial: Trial) -> tuple[float, float]:
        """Evaluates one trial. Raises TrialPruned for a failed window."""
        trial.set_user_attr("process", _process())
        role = str(trial.user_attrs.get("role", "search"))
        if role == "search":
            trial.set_user_attr("role", role)
        policy = self._baseline(trial, role) if role in self._baselines else self._space.to_policy(self._suggested(trial))
        describe_policy(trial, policy)
        try:
            outcome = self._evaluate(policy, self._window)
        except KeyboardInterrupt:
            trial.set_user_attr("failure", INTERRUPTED)
            raise
        self._tried.add(policy.setup_hash())
        self.candidates.append(
            Candidate(number=trial.number, role=role, policy=policy, window=self._window, outcome=outcome, trial=trial.number)
        )
        return record_outcome(trial, outcome, self._yardstick)

    def _baseline(self, trial: Trial, role: str) -> Policy:
        policy = self._baselines[role]
        for name in self._space.nearest_params(policy):
            self._suggest(trial, name)
        return policy

    def _suggested(self, trial: Trial) -> Params:
        params: Params = {"dtype": self._suggest(trial, "dtype")}
        for name in self._space.active(params["dtype"]):
            params[name] = self._suggest(trial, name)
        return params

    def _suggest(self, trial: Trial, name: str) -> object:
        choices = self._space.params()[name]
        if name == "front_index":
            return trial.suggest_int(name, 0, len(choices) - 1)
        return trial.suggest_categorical(name, choices)

    def _start(self, trials: int) -> Params | None:
        """The next starting point not tried, where trials are left to learn from it and its plan is not known to diverge."""
        if trials < len(self._baselines) + STARTS_NEED:
            return None
        return next((p for p in self._space.starts() if not _is_tried(self._space, p, self._tried) and not self._fails(p)), None)

    def _fails(self, params: Params) -> bool:
        outcome = self._known(params)
        return outcome is not None and not self._yardstick.feasible(outcome)

    def _known(self, params: Params) -> Outcome | None:
        """What came of a policy, or of another with the same precisions where only these can have decided it."""
        policy = self._space.to_policy(params)
        alike = [c for c in self.candidates if c.policy.setup_hash() == policy.setup_hash()]
        if not alike:
            precisions = (policy.default, policy.precisions())
            same = (c for c in self.candidates if (c.policy.default, c.policy.precisions()) == precisions)
            alike = [c for c in same if decided_by_numerics(c.outcome) and not self._yardstick.feasible(c.outcome)]
        return alike[0].outcome if alike else None

    def _bisection(self, trials: int) -> Params | None:
        """The next plan of a bisection between fp32 and the fastest starting point, where that one is not feasible.

        Harm rises along the front, so a few trials tell where it becomes too much; TPE would take more to learn that.
        """
        ran = [(p, outcome) for p in self._space.starts() if (outcome := self._known(p)) is not None]
        if not ran or trials < len(self._baselines) + STARTS_NEED:
            return None
        start = max(ran, key=lambda item: _speed(item[1]))[0]
        index = next_index(
            self._space.plans[start["dtype"]],
            start["front_index"],
            lambda index: self._known({**start, "front_index": index}),
            self._yardstick,
        )
        params = None if index is None else {**start, "front_index": index}
        return None if params is None or _is_tried(self._space, params, self._tried) else params

    def _refinement(self) -> Params | None:
        """The first untried neighbour of the best candidate that lies in the space."""
        ranked = sorted(
            (c for c in self.candidates if self._yardstick.feasible(c.outcome)), key=lambda c: (-_speed(c.outcome), c.number)
        )
        for candidate in ranked:
            try:
                incumbent = self._space.to_params(candidate.policy)
            except SearchSpaceError:
                continue  # stock AMP starts its loss scale outside the space
            untried = (p for p in self._space.neighbours(incumbent) if not _is_tried(self._space, p, self._tried))
            return next(untried, None)
        return None


def _is_tried(space: StudySpace, params: Params, tried: set[str]) -> bool:
    return space.hopeless(params) or space.to_policy(params).setup_hash() in tried


def _speed(outcome: Outcome) -> float:
    return outcome.samples_per_s if isinstance(outcome, Measurement) else 0.0


def _process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _is_dead(process: object) -> bool:
    """True for a process of this machine that is gone, and for this very one (its number was used before)."""
    host, _, number = str(process).rpartition(":")
    if not number.isdigit() or (host == socket.gethostname() and int(number) == os.getpid()):
        return True
    if host != socket.gethostname():
        return False  # Optuna's heartbeat tells
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _revive(study: Study, baseline_roles: set[str]) -> None:
    """Marks running trials of dead processes as failed and queues their parameters, and those of interrupted ones, once more."""
    known = study.get_trials(deepcopy=False)
    retried = {trial.user_attrs.get("retry_of") for trial in known}
    for trial in known:
        if trial.state == TrialState.RUNNING and _is_dead(trial.user_attrs.get("process", "")):
            study.tell(trial.number, state=TrialState.FAIL)
        elif not (trial.state == TrialState.FAIL and trial.user_attrs.get("failure") == INTERRUPTED):
            continue
        if trial.number not in retried and trial.user_attrs.get("role") not in baseline_roles:
            _retry(study, trial)


def _retry(study: Study, trial: FrozenTrial) -> None:
    """Queues a dead trial's parameters, only once. Its constraints and attributes are not copied: they would count as set."""
    if trial.params and "retry_of" not in trial.user_attrs:
        role = trial.user_attrs.get("role", "search")
        study.enqueue_trial(trial.params, user_attrs={"role": role, "retry_of": trial.number})


def _check_space(study: Study, space: StudySpace, storage: str | None) -> None:
    known, now = study.user_attrs.get("space_sha256"), space.sha256()
    if known is None:
        study.set_user_attr("space_sha256", now)
    elif known != now:
        raise RunFolderError(
            f"The study in {storage or 'memory'} was made for another search space, model or device.",
            hint="Give another folder with --out, or run with the settings the study was started with.",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Optuna's log to warnings: progress is shown by the caller."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def storage_errors(storage: str | None) -> Iterator[None]:
    """Says in plain words what SQLAlchemy and Optuna say in many."""
    try:
        yield
    except Exception as error:
        cause = _sqlite_cause(error)
        if cause is None:
            raise
        if "locked" in str(cause):
            message = f"The study file is locked by another process: {storage}"
            hint = "End the other autoprec or dashboard process that writes to it, then run the same command to resume."
        else:
            message, hint = f"The study file cannot be used: {storage} ({cause})", "Check the path and its permissions."
        raise RunFolderError(message, hint=hint) from error


def _sqlite_cause(error: BaseException | None) -> sqlite3.DatabaseError | None:
    while error is not None:
        if isinstance(error, sqlite3.DatabaseError):
            return error
        error = error.__cause__ or error.__context__
    return None

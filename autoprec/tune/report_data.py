"""All that a report shows, as one frozen value; kept as ``report.json``, so that a report can be written again."""

from __future__ import annotations

from pathlib import Path

from autoprec.errors import RunFolderError
from autoprec.policy import Figures, Origin, Policy
from autoprec.records import Environment, Look, Profile, Record, Verdict
from autoprec.tune.charts import Curve
from autoprec.tune.long_run_section import LongRunSection
from autoprec.tune.rows import TrialRow


class Stage(Record):
    """What a stage of the tune found, in a sentence, and how long it took."""

    name: str
    text: str
    cost_s: float | None = None


class Rejected(Record):
    """Something that was tried and not taken, and why."""

    what: str
    why: str


class ReportData(Record):
    """Everything the report shows.

    Attributes:
        name: the run's name, as a rule the folder's.
        workload: the reference of the model's file.
        target: what was tuned for.
        speed_origin: whether speeds and memory were measured on the target or predicted for it.
        numerics: where and under which rules the losses were measured.
        policy: the answer.
        look: the model's layers.
        profile: their times and risks; None where the tune ended before profiling.
        trials: a row for every evaluated policy.
        chosen_number: candidate number of the answer; None where no candidate is it.
        arms: the final comparison; ``tuned_arm``, ``stock_arm`` and ``fp32_arm`` name three of them.
        verdict: of the answer; None where nothing was verified.
        noise_floor: relative gap between two FP32 runs.
        tolerance: relative gap that was allowed.
        long_runs: verifications over many steps, made since with ``autoprec verify``.
        curves: losses of FP32, its twins, stock AMP and the answer in the same window.
        stages: what each stage found.
        rejected: further things tried and not taken; failed trials are listed without being named here.
        not_worth_it: why mixed precision does not pay here; empty where it does.
        cut_short: why the policy is plain FP32 although nothing speaks against low precision: the budget was over; empty as a rule.
        grad_clip: the workload's gradient clipping, for the code that applies the policy.
        environment: where samples were taken.
        command: the command line.
        created: when, as text.
        autoprec_version: what wrote it.
        notes: anything else a reader should know.
    """

    name: str
    workload: str
    target: str
    speed_origin: Origin
    numerics: str
    policy: Policy
    look: Look
    profile: Profile | None = None
    trials: tuple[TrialRow, ...] = ()
    chosen_number: int | None = None
    arms: tuple[Figures, ...] = ()
    tuned_arm: str = "tuned"
    stock_arm: str = "amp_fp16"
    fp32_arm: str = "fp32"
    verdict: Verdict | None = None
    noise_floor: float = 0.0
    tolerance: float = 0.01
    long_runs: tuple[LongRunSection, ...] = ()
    curves: tuple[Curve, ...] = ()
    stages: tuple[Stage, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    not_worth_it: str = ""
    cut_short: str = ""
    grad_clip: float | None = None
    environment: Environment
    command: str = ""
    created: str = ""
    autoprec_version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """The relative gap that really was allowed: a tolerance below FP32's own noise cannot be held."""
        return max(self.tolerance, self.noise_floor)

    def arm(self, name: str) -> Figures | None:
        """The arm of that name; None where it did not run."""
        return next((arm for arm in self.arms if arm.name == name), None)


def speedup(data: ReportData, over: str) -> float | None:
    """Throughput of the tuned arm over that of another one; None where either is missing."""
    tuned, base = data.arm(data.tuned_arm), data.arm(over)
    if tuned is None or base is None or not tuned.samples_per_s or not base.samples_per_s:
        return None
    return tuned.samples_per_s / base.samples_per_s


def read_report_data(folder: Path) -> ReportData:
    """The data of a report that was written earlier.

    Raises:
        RunFolderError: there is none, or it cannot be read.
    """
    path = folder / "report.json"
    try:
        return ReportData.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        hint = "A tune writes it at its end; run the tune again to finish it."
        raise RunFolderError(f"No report data in {folder}.", hint=hint) from None
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise RunFolderError(f"Cannot read {path}: {first}", hint="Run the tune again to write it anew.") from None

"""The command line: one small function a command.

Imports happen inside the commands, so that ``autoprec --help`` answers at once.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from autoprec import __version__
from autoprec.errors import AutoprecError, UserError

_TIME_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """A time such as ``90s``, ``10m`` or ``1h``, in seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds from text; fails with what is allowed."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value).strip())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time; write it like 90s, 10m or 1h.", param, ctx)
        return float(match[1]) * _TIME_UNITS_S[match[2]]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="autoprec")
def cli() -> None:
    """Finds the fastest mixed-precision set-up that trains like FP32."""


@cli.command()
@click.argument("model")
@click.option("--gpu", help="Card to tune for, such as 4090d or h200, or 'cpu'. Default: the CUDA device that is here.")
@click.option("--predict", is_flag=True, help="Predict the speed when another CUDA card is here than the one named.")
@click.option("--trials", type=click.IntRange(min=0), default=24, show_default=True, help="Study trials beyond the baselines.")
@click.option("--budget", type=Duration(), default="4m", show_default=True, help="Wall time of the tune, such as 10m.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run. Default: reports/<model>-<gpu>.")
@click.option(
    "--execution",
    type=click.Choice(["auto", "eager", "compile"]),
    default="auto",
    show_default=True,
    help="auto also tries torch.compile and CUDA graphs where the speed is measured on CUDA.",
)
@click.option("--search-space", metavar="NAME|FILE", help="What may vary: a packaged name or a TOML file.")
@click.option("--tolerance", type=float, default=0.01, show_default=True, help="Loss gap to FP32 that passes.")
@click.option("--keep-fp32", multiple=True, metavar="PATTERN", help="Layers to keep in FP32; may be given several times.")
@click.option("--anyway", is_flag=True, help="Search also where the first look says that low precision cannot pay.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search and of the first window.")
def tune(
    model: str,
    gpu: str | None,
    predict: bool,
    trials: int,
    budget: float,
    out: Path | None,
    execution: str,
    search_space: str | None,
    tolerance: float,
    keep_fp32: tuple[str, ...],
    anyway: bool,
    seed: int,
) -> None:
    """Tune MODEL, the path of a model.py (path, path:object or package.module:object).

    MODEL is your own code and runs as such.
    """
    started_s = time.monotonic()  # importing torch takes seconds of the budget too
    from rich.console import Console

    from autoprec.session import Settings, run_tune
    from autoprec.terminal import TerminalProgress, print_result

    settings = Settings(
        workload=model,
        gpu=gpu,
        predict=predict,
        trials=trials,
        budget_s=budget,
        out=out,
        execution=execution,  # type: ignore[arg-type]  # click.Choice holds the same three words
        search_space=search_space,
        tolerance=tolerance,
        keep_fp32=keep_fp32,
        anyway=anyway,
        seed=seed,
    )
    console = Console()
    with TerminalProgress(console, budget, started_s=started_s) as progress:
        result = run_tune(settings, progress, started_s=started_s)
    print_result(console, result)


@cli.command()
@click.argument("policy", type=click.Path(path_type=Path))
@click.argument("model")
@click.option("--steps", type=int, help="Steps of every training. Default: 10 times the tune's trial window, or 1200.")
@click.option(
    "--seeds", type=int, default=3, show_default=True, help="Trainings of every set-up; up to twice as many if unclear."
)
@click.option("--tolerance", type=float, default=0.01, show_default=True, help="Loss gap to FP32 that passes.")
@click.option("--gpu", help="Card, or 'cpu'. Default: the CUDA device here; without one the CPU stands in for the policy's card.")
@click.option("--predict", is_flag=True, help="Let another CUDA card that is here stand in for the one named.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the evidence. Default: verify-<n> beside the policy.")
def verify(
    policy: Path,
    model: str,
    steps: int | None,
    seeds: int,
    tolerance: float,
    gpu: str | None,
    predict: bool,
    out: Path | None,
) -> None:
    """Train FP32 and a POLICY (a policy.json or a run's folder) of MODEL for many steps from the same start and compare the losses.

    For before a big training, and on a new card or torch version. Exit code 0: the policy passed; 1: it was rejected, or the
    answer is not clear. The same command carries on where it stopped. MODEL is your own code and runs as such.
    """
    from rich.console import Console

    from autoprec.session import VerifySettings, run_verify
    from autoprec.terminal import TerminalProgress, print_verification

    settings = VerifySettings(
        policy=policy, workload=model, steps=steps, seeds=seeds, tolerance=tolerance, gpu=gpu, predict=predict, out=out
    )
    console = Console()
    with TerminalProgress(console) as progress:
        result = run_verify(settings, progress)
    print_verification(console, result)
    if result.status != "passed":
        sys.exit(1)


@cli.command()
@click.argument("policy", type=click.Path(path_type=Path))
@click.option("--all", "every_layer", is_flag=True, help="List every layer instead of summaries.")
def show(policy: Path, every_layer: bool) -> None:
    """Print a POLICY file (or that of a run's folder): what differs from stock AMP, why, and on what evidence."""
    from rich.console import Console

    from autoprec.policy import load_policy
    from autoprec.tune.describe import describe_policy, description_rich, fingerprint_warnings, installed_torch_version

    loaded = load_policy(policy / "policy.json" if policy.is_dir() else policy)
    warnings = fingerprint_warnings(loaded, torch_version=installed_torch_version())
    Console().print(description_rich(describe_policy(loaded, every_layer=every_layer), warnings), highlight=False)


@cli.command()
def gpus() -> None:
    """Print the cards that --gpu knows, with the figures predictions rest on."""
    from rich.console import Console

    from autoprec.bench.gpus import GPUS
    from autoprec.terminal import gpu_table

    Console().print(gpu_table(GPUS))


def main() -> NoReturn:
    """Entry point: errors meant for people are printed without a traceback; exit 2 for a user's mistake, 130 after Ctrl-C."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _print_error(UserError("Stopped."), stopped=True)
        sys.exit(130)
    except AutoprecError as error:
        _print_error(error, stopped=error.exit_code == 130)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(0)


def _print_error(error: AutoprecError, *, stopped: bool = False) -> None:
    click.echo(("" if stopped else click.style("Error: ", fg="red", bold=True)) + error.message, err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)

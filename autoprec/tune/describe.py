"""A policy in words: what differs from stock AMP, why each exception is there, and on what evidence it was chosen."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoprec.policy import Evidence, LayerSetting, LossScale, Policy
from autoprec.records import Record
from autoprec.tune.quantities import NOTHING, gap, memory, ratio, throughput
from autoprec.tune.rows import role_words

# What torch.amp.GradScaler() starts with. Source: its signature in torch 2.9 to 2.14 (torch/amp/grad_scaler.py).
STOCK_LOSS_SCALE = LossScale(init=65536.0, growth_interval=2000, growth_factor=2.0, backoff_factor=0.5)

# A group of more layers than this is shown by its pattern and count.
MAX_NAMES = 4

PRECISION_WORDS = {
    "fp32": "float32",
    "fp16": "float16 autocast",
    "bf16": "bfloat16 autocast",
    "fp16_pure": "float16 in every operation",
    "bf16_pure": "bfloat16 in every operation",
}
EXECUTION_WORDS = {
    "eager": "eager",
    "compile": "torch.compile",
    "compile_cudagraphs": "torch.compile with CUDA graphs",
}
REASON_WORDS = {
    "range": "values out of range",
    "sensitivity": "sensitive to rounding",
    "divergence": "the loss departed from FP32",
    "speed": "faster",
    "cast_cost": "a cast would cost more",
    "unsupported": "does not run in this precision",
    "pinned": "pinned by a rule",
}


class Section(Record):
    """A heading and its lines; ``columns`` where they are a table's rows, padded with spaces."""

    title: str
    lines: tuple[str, ...]
    columns: bool = False


class LayerGroup(Record):
    """Exceptions that share a precision, a reason and the shape of their names.

    ``pattern`` has every run of digits replaced by ``*``; ``text`` is the reason's sentence where all share it, else one of them.
    """

    precision: str
    kind: str
    reason: str
    pattern: str
    names: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        """The names where there are few, else the pattern and a count."""
        if len(self.names) <= MAX_NAMES:
            return ", ".join(self.names)
        return f"{self.pattern} ({len(self.names)} layers)"


def group_layers(policy: Policy) -> tuple[LayerGroup, ...]:
    """The policy's exceptions in groups, largest first. Layers of one kind, precision and reason whose names differ in more
    than numbers become one group with the pattern ``*``."""
    groups: dict[tuple[str, str, str], list[tuple[str, LayerSetting]]] = defaultdict(list)
    for name, setting in policy.layers.items():
        kind = policy.fingerprint.layers[name].partition(" ")[0]
        reason = setting.reason.kind if setting.reason else ""
        groups[setting.precision, kind, reason].append((name, setting))
    made = (_group(*key, members) for key, members in groups.items())
    return tuple(sorted(made, key=lambda group: (-len(group.names), group.pattern)))


def _group(precision: str, kind: str, reason: str, members: Sequence[tuple[str, LayerSetting]]) -> LayerGroup:
    patterns = {re.sub(r"\d+", "*", name) for name, _ in members}
    texts = [setting.reason.text for _, setting in members if setting.reason]
    text = texts[0] if texts else ""
    if len(set(texts)) > 1:
        text = f"e.g. {members[0][0]}: {text}"
    return LayerGroup(
        precision=precision,
        kind=kind,
        reason=reason,
        pattern=_common_pattern(sorted(patterns)),
        names=tuple(name for name, _ in members),
        text=text,
    )


def _common_pattern(patterns: list[str]) -> str:
    if len(patterns) <= 2:
        return " | ".join(patterns)
    return f"{patterns[0]} | {patterns[1]} | … ({len(patterns)} patterns)"


def describe_policy(policy: Policy, *, every_layer: bool = False) -> tuple[Section, ...]:
    """The policy in sections of lines: set-up, exceptions, evidence, what it was made for.

    Args:
        policy: what to describe.
        every_layer: list each exception by itself instead of in groups.
    """
    sections = [
        Section(title="Differs from stock AMP in", lines=tuple(differences_from_stock_amp(policy)) or ("nothing",)),
        _exceptions(policy, every_layer),
        _evidence(policy.evidence),
        _arms(policy.evidence),
        _made_for(policy),
    ]
    return tuple(section for section in sections if section.lines)


def differences_from_stock_amp(policy: Policy) -> list[str]:
    """A line for everything that torch.autocast with a default GradScaler would do otherwise."""
    lines = [_precision_line(policy)]
    if policy.needs_loss_scale:
        lines += _loss_scale_lines(policy.loss_scale)
    elif policy.default == "fp32":
        lines.append("no loss scaling: no layer is float16")
    batch, padding, backend = policy.batch, policy.padding, policy.backend
    if batch.accumulation_steps > 1:
        lines.append(f"batch of {batch.effective} samples in {batch.accumulation_steps} micro-batches of {batch.micro}")
    if padding.layers:
        multiples = sorted(set(padding.layers.values()))
        to = " or ".join(str(multiple) for multiple in multiples)
        lines.append(f"{_count(len(padding.layers), 'layer')} padded on the fly to a multiple of {to} (parameters untouched)")
    if padding.data_axis_multiple:
        lines.append(f"the data's last axis padded to a multiple of {padding.data_axis_multiple}")
    if policy.outputs == "fp32" and policy.default != "fp32":
        lines.append("the model's outputs come back in float32: the loss computes with them outside autocast's float32 list")
    if policy.weights == "half_with_masters":
        lines.append("the half copies of all weights are made in one pass; the parameters are their float32 masters")
    flags = {
        "tf32": "TF32 for what stays float32",
        "cudnn_benchmark": "cudnn.benchmark on",
        "channels_last": "channels_last memory format",
        "fp16_accumulation": "matmuls may add up in float16",
    }
    lines += [text for flag, text in flags.items() if getattr(backend, flag)]
    if policy.execution != "eager":
        lines.append(f"runs under {EXECUTION_WORDS[policy.execution]}")
    loader = {name: value for name, value in policy.loader.model_dump().items() if value is not None}
    lines += [f"DataLoader {name}={value}" for name, value in loader.items()]
    return [line for line in lines if line]


def _precision_line(policy: Policy) -> str:
    counts: dict[str, int] = defaultdict(int)
    for precision in policy.precisions().values():
        counts[precision] += 1
    if set(counts) <= {policy.default} and policy.default == "fp16":
        return ""
    total = len(policy.fingerprint.layers)
    rest = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"default {policy.default} ({PRECISION_WORDS[policy.default]}); of {_count(total, 'layer')}: {rest}"


def _loss_scale_lines(scale: LossScale) -> list[str]:
    lines = []
    if scale.init != STOCK_LOSS_SCALE.init:
        lines.append(f"loss scale starts at {scale.init:g} (stock {STOCK_LOSS_SCALE.init:g})")
    if scale.growth_interval != STOCK_LOSS_SCALE.growth_interval:
        lines.append(f"loss scale grows after {scale.growth_interval} clean steps (stock {STOCK_LOSS_SCALE.growth_interval})")
    for field, word in (("growth_factor", "growth"), ("backoff_factor", "backoff")):
        mine, stock = getattr(scale, field), getattr(STOCK_LOSS_SCALE, field)
        if mine != stock:
            lines.append(f"loss scale {word} factor {mine:g} (stock {stock:g})")
    return lines


def _exceptions(policy: Policy, every_layer: bool) -> Section:
    title = f"Exceptions to {policy.default} ({len(policy.layers)})"
    if every_layer:
        lines = [
            f"{name}: {setting.precision}{_because(setting)}" for name, setting in sorted(policy.layers.items(), key=_natural)
        ]
    else:
        lines = [group_line(group) for group in group_layers(policy)]
    return Section(title=title, lines=tuple(lines))


def _natural(item: tuple[str, object]) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", item[0])]


def _because(setting: LayerSetting) -> str:
    return f"; {REASON_WORDS[setting.reason.kind]}: {setting.reason.text}" if setting.reason else ""


def group_line(group: LayerGroup) -> str:
    """A group in a line: its layers, their precision and why."""
    why = f"; {REASON_WORDS[group.reason]}" if group.reason else ""
    return f"{group.label}: {group.precision}{why}{f' ({group.text})' if group.text else ''}"


def _evidence(evidence: Evidence | None) -> Section:
    if evidence is None:
        return Section(title="Evidence", lines=("none: this policy has not been measured",))
    speeds = (("stock AMP", evidence.speedup_vs_stock_amp), ("FP32", evidence.speedup_vs_fp32))
    lines = [f"{ratio(value)} {name} ({evidence.speed_origin})" for name, value in speeds if value is not None]
    # Predicted step times are all equal: an interval over them would say nothing.
    measured = evidence.speed_origin == "measured"
    if lines and measured and evidence.speedup_low is not None and evidence.speedup_high is not None:
        lines[0] += f", 95% interval {ratio(evidence.speedup_low)} to {ratio(evidence.speedup_high)}"
    verdict = f"verdict {evidence.verdict}"
    if evidence.loss_gap is not None:
        allowed = f", allowed {gap(evidence.tolerance)}" if evidence.tolerance is not None else ""
        verdict += f": the loss departs from FP32 by {gap(evidence.loss_gap)}{allowed} (measured)"
    lines.append(verdict)
    lines += [evidence.note] if evidence.note else []
    return Section(title=f"Evidence (run {evidence.run})", lines=tuple(lines))


def _arms(evidence: Evidence | None) -> Section:
    """The final comparison in columns: set-up, throughput, memory, loss gap."""
    arms = evidence.arms if evidence else ()
    origins = " and ".join(sorted({arm.speed_origin for arm in arms}))
    table = [("", "samples/s", "memory", "loss gap")]
    for arm in arms:
        figures = (throughput(arm.samples_per_s), memory(arm.peak_bytes), gap(arm.loss_gap))
        table.append((role_words(arm.name), *(figures if arm.samples_per_s else ("failed", NOTHING, NOTHING))))
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = ("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in table)
    return Section(
        title=f"Compared with (speeds and memory {origins}, loss gaps measured)", lines=tuple(lines) if arms else (), columns=True
    )


def _made_for(policy: Policy) -> Section:
    made = policy.fingerprint
    capability = f", capability {made.capability}" if made.capability else ""
    batch = policy.batch
    lines = [
        f"{made.device}{capability}, torch {made.torch_version}",
        f"{_count(len(made.layers), 'layer')}, layer list {made.layer_list_sha256[:12]}, model file {made.workload_sha256[:12]}",
        f"effective batch {batch.effective:,}",
    ]
    return Section(title="Made for", lines=tuple(lines))


def fingerprint_warnings(
    policy: Policy, *, torch_version: str | None = None, device: str | None = None, workload_sha256: str | None = None
) -> tuple[str, ...]:
    """What is not as it was when the policy was made; only what is given is compared."""
    made, warnings = policy.fingerprint, []
    if torch_version is not None and _release(torch_version) != _release(made.torch_version):
        warnings.append(f"torch is {torch_version} here; the policy was made with {made.torch_version}")
    if device is not None and device != made.device:
        warnings.append(f"the device here is {device}; the policy was made for {made.device}, so its speed is unknown here")
    if workload_sha256 is not None and workload_sha256 != made.workload_sha256:
        warnings.append("the model's file has changed since the policy was made; tune again when the model learns otherwise")
    return tuple(warnings)


def installed_torch_version() -> str | None:
    """The version of the torch that is installed, found without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    return version.partition("+")[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def description_text(sections: Sequence[Section]) -> str:
    """The sections as plain text with a newline at the end."""
    blocks = ("\n".join((section.title, *(f"  {line}" for line in section.lines))) for section in sections)
    return "\n\n".join(blocks) + "\n"


def description_rich(sections: Sequence[Section], warnings: Sequence[str] = ()) -> Group:
    """The sections for a terminal, warnings first."""
    parts: list[Text | Table] = [Text(f"Warning: {warning}", style="yellow") for warning in warnings]
    for section in sections:
        parts.append(Text(section.title, style="bold"))
        grid = Table.grid(padding=(0, 1))
        for line in section.lines:
            # Text, not markup: a layer's name may hold brackets. A column of its own keeps wrapped lines indented.
            grid.add_row(Text("  " if section.columns else "  •"), Text(line))
        parts.append(grid)
        parts.append(Text(""))
    return Group(*parts)

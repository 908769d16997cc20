from __future__ import annotations

import io

import pytest
from made_up_run import evidence, fingerprint, policy
from rich.console import Console

from autoprec.policy import Backend, Batch, LayerSetting, LossScale, Padding, Policy, Reason
from autoprec.tune.baselines import STOCK_LOSS_SCALE as BASELINE_LOSS_SCALE
from autoprec.tune.describe import (
    STOCK_LOSS_SCALE,
    describe_policy,
    description_rich,
    description_text,
    differences_from_stock_amp,
    fingerprint_warnings,
    group_layers,
)


def printed(shown: Policy, width: int = 80, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(description_rich(describe_policy(shown, **options), ("torch is another",)), highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def stock(**changes: object) -> Policy:
    plain = {
        "layers": {},
        "loss_scale": STOCK_LOSS_SCALE,
        "batch": Batch(effective=128, micro=128),
        "padding": Padding(),
        "outputs": "computed",
        "backend": Backend(),
    }
    return policy(**{**plain, **changes})


def test_stock_amp_differs_from_itself_in_nothing():
    assert differences_from_stock_amp(stock()) == []
    assert describe_policy(stock())[0].lines == ("nothing",)
    assert STOCK_LOSS_SCALE == BASELINE_LOSS_SCALE


def test_everything_that_differs_is_a_line():
    assert differences_from_stock_amp(policy()) == [
        "default fp16 (float16 autocast); of 35 layers: 18 fp16, 16 fp16_pure, 1 fp32",
        "loss scale starts at 8192 (stock 65536)",
        "loss scale grows after 200 clean steps (stock 2000)",
        "batch of 128 samples in 2 micro-batches of 64",
        "1 layer padded on the fly to a multiple of 8 (parameters untouched)",
        "the model's outputs come back in float32: the loss computes with them outside autocast's float32 list",
        "TF32 for what stays float32",
        "cudnn.benchmark on",
        "channels_last memory format",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"execution": "compile_cudagraphs"}, "runs under torch.compile with CUDA graphs"),
        (
            {"weights": "half_with_masters"},
            "the half copies of all weights are made in one pass; the parameters are their float32 masters",
        ),
        ({"padding": Padding(data_axis_multiple=64)}, "the data's last axis padded to a multiple of 64"),
        ({"backend": Backend(fp16_accumulation=True)}, "matmuls may add up in float16"),
        ({"loss_scale": LossScale(init=65536.0, backoff_factor=0.25)}, "loss scale backoff factor 0.25 (stock 0.5)"),
        ({"default": "bf16"}, "default bf16 (bfloat16 autocast); of 35 layers: 35 bf16"),
    ],
)
def test_one_change_is_one_line(change, line):
    assert differences_from_stock_amp(stock(**change)) == [line]


def test_plain_fp32_says_that_nothing_is_scaled():
    assert differences_from_stock_amp(stock(default="fp32"))[-1] == "no loss scaling: no layer is float16"


def test_layers_of_one_kind_precision_and_reason_are_one_group():
    norms, head = group_layers(policy())
    assert (norms.label, len(norms.names), norms.precision, norms.kind) == (
        "stages.*.bn* (16 layers)",
        16,
        "fp16_pure",
        "BatchNorm2d",
    )
    assert (head.label, head.reason, head.text) == ("head", "range", "outputs reach 81,920, over 65,504")


def test_a_group_whose_reasons_differ_gives_one_as_an_example():
    settings = {
        f"stages.{i}.conv1": LayerSetting(precision="fp32", reason=Reason(kind="sensitivity", text=f"score {i}"))
        for i in range(6)
    }
    (group,) = group_layers(policy(layers=settings))
    assert group.label == "stages.*.conv* (6 layers)"
    assert group.text == "e.g. stages.0.conv1: score 0"


def test_a_long_list_of_layers_stays_short_unless_every_one_is_asked_for():
    grouped = next(section for section in describe_policy(policy()) if section.title.startswith("Exceptions"))
    every = next(section for section in describe_policy(policy(), every_layer=True) if section.title.startswith("Exceptions"))
    assert grouped.title == every.title == "Exceptions to fp16 (17)"
    assert len(grouped.lines) == 2
    assert len(every.lines) == 17
    assert "head: fp32; values out of range: outputs reach 81,920, over 65,504" in every.lines


def test_layer_2_comes_before_layer_10():
    layers = {f"h.{i}.ln": "LayerNorm" for i in range(12)}
    made = policy().fingerprint.of(layers, device="cpu", capability=None, torch_version="2.14.1", workload_sha256="0")
    shown = policy(fingerprint=made, layers={name: LayerSetting(precision="fp32") for name in layers}, padding=Padding())
    section = describe_policy(shown, every_layer=True)[1]
    assert [line.partition(":")[0] for line in section.lines] == list(layers)


def test_the_evidence_says_of_every_figure_whether_it_was_measured_or_predicted():
    text = description_text(describe_policy(policy(evidence=evidence())))
    assert "  2.07× stock AMP (predicted)\n" in text
    assert "  6.10× FP32 (predicted)\n" in text
    assert "verdict passed: the loss departs from FP32 by 0.24 %, allowed 1.0 % (measured)" in text
    assert "Compared with (speeds and memory predicted, loss gaps measured)" in text


def test_an_interval_is_given_only_where_speed_was_measured():
    measured = evidence().model_copy(update={"speed_origin": "measured"})
    assert "2.07× stock AMP (measured), 95% interval 2.01× to 2.13×" in description_text(
        describe_policy(policy(evidence=measured))
    )
    assert "interval" not in description_text(describe_policy(policy(evidence=evidence())))


def test_the_comparison_stands_in_columns_and_a_failed_arm_says_so():
    arms = (*evidence().arms[:2], evidence().arms[2].model_copy(update={"samples_per_s": None}))
    shown = policy(evidence=evidence().model_copy(update={"arms": arms}))
    (section,) = [section for section in describe_policy(shown) if section.columns]
    assert section.lines == (
        "                samples/s   memory  loss gap",
        "FP32                1,010  11.5 GB       0 %",
        "FP32 + TF32         2,137  11.5 GB   0.090 %",
        "stock AMP fp16     failed        –         –",
    )


def test_a_policy_without_evidence_says_so():
    assert "none: this policy has not been measured" in description_text(describe_policy(policy()))


def test_the_terminal_shows_warnings_first_and_keeps_wrapped_lines_indented():
    text = printed(policy(evidence=evidence()), width=60)
    assert text.startswith("Warning: torch is another\n")
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "stages.*.bn* (16 layers)" in line)
    assert lines[start].startswith("  • ")
    assert lines[start + 1].startswith("    ")
    assert max(map(len, lines)) <= 60


def test_brackets_in_a_layers_name_are_printed_as_they_are():
    made = fingerprint()
    named = made.of({"[bold]x": "Linear"}, device="cpu", capability=None, torch_version="2", workload_sha256="0")
    shown = policy(fingerprint=named, layers={"[bold]x": LayerSetting(precision="fp32")}, padding=Padding())
    assert "[bold]x: fp32" in printed(shown)


def test_what_is_not_as_it_was_is_warned_of():
    made = policy()
    assert fingerprint_warnings(made, torch_version="2.14.1+cpu", device=made.fingerprint.device) == ()
    texts = fingerprint_warnings(made, torch_version="2.11.0", device="NVIDIA H200", workload_sha256="cd" * 32)
    assert [text.split(";")[0] for text in texts] == [
        "torch is 2.11.0 here",
        "the device here is NVIDIA H200",
        "the model's file has changed since the policy was made",
    ]

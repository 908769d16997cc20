from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from made_up_run import ARMS, candidates, curves, evidence, policy, report_data

from autoprec.errors import RunFolderError
from autoprec.policy import Batch
from autoprec.tune.report import (
    apply_code,
    arm_failures,
    headline,
    pareto_points,
    rejections,
    render_html,
    render_markdown,
    shown_curves,
    tiles,
    write_report,
)
from autoprec.tune.report_data import ReportData, read_report_data
from autoprec.tune.rows import rows_of

NASTY = "<script>alert(1)</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that every tag is closed, and keeps the visible text and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_the_page_is_well_formed_and_asks_nothing_of_the_network():
    html = render_html(report_data())
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "img", "form"}
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src", "action")]
    assert links == ["data:,"]
    assert "http" not in html.replace("http-equiv", "")
    assert len(html) < 300_000


def test_the_page_tells_the_answer_the_comparison_and_how_to_apply_it():
    text = Page(render_html(report_data())).text
    assert "2.07× the speed of stock AMP, trains like FP32" in text
    for words in ("tuned policy", "6,160", "5.37 GB", "stages.*.bn* (16 layers)", "outputs reach 81,920, over 65,504"):
        assert words in text
    assert "policy = autoprec.load_policy('digits_cnn-4090d/policy.json')" in text


@pytest.mark.parametrize("origin", ["measured", "predicted"])
def test_every_tile_and_every_arm_says_whether_it_is_measured_or_predicted(origin):
    arms = tuple(arm.model_copy(update={"speed_origin": origin}) for arm in ARMS)
    html = render_html(report_data(speed_origin=origin, arms=arms))
    assert html.count('<div class="tile">') == 4
    for tile in re.findall(r'<div class="tile">.*?<div class="value">', html):
        assert "measured</span>" in tile or "predicted</span>" in tile
    assert html.count(f'<td class="full"><span class="origin {origin}">{origin}</span></td>') == len(ARMS)
    assert f"Speeds are {origin}, loss gaps measured." in html


def test_the_interval_is_shown_only_where_speed_was_measured():
    assert "interval" not in tiles(report_data())[0].detail
    assert tiles(report_data(speed_origin="measured"))[0].detail == "stock AMP fp16; 95% interval 2.01× to 2.13×"


def test_text_of_users_is_escaped():
    data = report_data(
        name=NASTY, workload=NASTY, target=NASTY, command=NASTY, notes=(NASTY,), not_worth_it=NASTY, numerics=NASTY
    )
    assert "<script" not in render_html(data)
    assert "\\<script\\>" in render_markdown(data.model_copy(update={"command": ""}))


def test_the_headline_follows_the_verdict():
    rejected = report_data().verdict.model_copy(update={"status": "rejected"})
    assert headline(report_data(verdict=rejected)) == "2.07× the speed of stock AMP, but it does not train like FP32"
    assert headline(report_data(verdict=None)) == "2.07× the speed of stock AMP, not verified"
    assert headline(report_data(not_worth_it="Too small.")) == "Stay with FP32: mixed precision does not pay here"
    assert headline(report_data(tuned_arm="amp_fp16")) == "Nothing beats stock AMP fp16 here"


def test_where_stock_amp_has_no_figures_the_headline_compares_with_fp32():
    failed = tuple(arm.model_copy(update={"samples_per_s": None}) if arm.name == "amp_fp16" else arm for arm in ARMS)
    assert headline(report_data(arms=failed)) == "6.10× the speed of FP32, trains like FP32"


def test_an_arm_without_figures_says_why():
    failed = tuple(arm.model_copy(update={"samples_per_s": None}) if arm.name == "amp_fp16" else arm for arm in ARMS)
    rows = list(report_data().trials)
    rows[2] = rows[2].model_copy(update={"outcome": "diverged", "failure": "the loss is nan"})
    data = report_data(arms=failed, trials=tuple(rows))
    assert arm_failures(data)["amp_fp16"] == "diverged"
    assert '<span class="rejected">diverged</span>' in render_html(data)
    assert "| stock AMP fp16 | – | – | 6.21 GB | 0.21 % | diverged |" in render_markdown(data)


def test_the_pareto_picture_holds_the_studys_trials_and_no_verification_windows():
    found = tuple(c.model_copy(update={"trial": None}) if c.number == 20 else c for c in candidates())
    gaps = dict.fromkeys(range(35), 0.002)
    data = report_data(trials=rows_of(found, loss_gaps=gaps, stock_samples_per_s=2976.0))
    points = pareto_points(data)
    assert len(points) == sum(row.outcome == "ok" for row in data.trials) - 1
    assert [point.style for point in points].count("baseline") == 5
    assert [point.label for point in points if point.style == "chosen"] == ["chosen"]


def test_trials_found_by_the_search_are_no_baselines():
    rows = tuple(row.model_copy(update={"role": "search"}) if row.role == "trial" else row for row in report_data().trials)
    styles = [point.style for point in pareto_points(report_data(trials=rows))]
    assert styles.count("baseline") == 5
    assert styles.count("chosen") == 1


def test_failures_of_one_reason_are_told_in_one_line():
    told = {item.why: item.what for item in rejections(report_data())}
    assert told["diverged: the loss is nan in head at step 14"] == "#9 trial, #17 trial, #25 trial and 1 more"
    assert told["verdict rejected: loss gap 0.33 % on its trial window"] == "#30 trial"
    assert told["values out of range: 81,920 is over 65,504"] == "head in fp16_pure"


def test_where_stock_amp_is_the_answer_its_curve_is_drawn_once():
    same = tuple(curve.model_copy(update={"name": "amp_fp16"}) if curve.style == "tuned" else curve for curve in curves())
    assert [curve.style for curve in shown_curves(report_data(curves=same))] == ["reference", "twin", "twin", "tuned"]
    assert len(shown_curves(report_data())) == 5


def test_a_report_of_next_to_nothing_still_renders():
    bare = report_data(
        trials=(), arms=(), verdict=None, curves=(), stages=(), profile=None, rejected=(), notes=(), policy=policy()
    )
    text = Page(render_html(bare)).text
    assert "A policy of unknown speed, not verified" in text
    assert "Against the baselines" not in text
    assert "| |" not in render_markdown(bare)


def test_the_loop_has_only_the_lines_its_policy_needs():
    plain = apply_code(policy(default="bf16", layers={}, batch=Batch(effective=64, micro=64)))
    assert "disabled: no layer is fp16" in plain
    for word in ("continue", "clip_grad", "compiled", "import torch"):
        assert word not in plain
    whole = apply_code(policy(execution="compile"), grad_clip=1.0)
    for line in (
        "import torch",
        "train_model = applied.compiled()",
        "        loss = criterion(train_model(x), y) / 2",
        "    scaler.unscale_(optimizer)",
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)",
    ):
        assert line in whole.splitlines()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("execution", ["eager", "compile"])
def test_the_loop_is_python(clip, execution):
    compile(apply_code(policy(execution=execution), grad_clip=clip), "loop", "exec")


def test_the_markdown_has_the_verdict_once_and_the_table_fastest_first():
    verdict = report_data().verdict.model_copy(update={"text": "Passed: the loss ends 0.24% above FP32's."})
    text = render_markdown(report_data(verdict=verdict))
    assert "Verdict **passed**: the loss ends 0.24% above FP32's." in text
    names = re.findall(r"^\| ([^|]+?) \| [\d,–]+ \|", text, flags=re.MULTILINE)
    assert names[0] == "**tuned policy**"
    assert names[-1] == "FP32"
    assert len(names) == 6


def test_a_report_is_written_and_its_data_read_back(tmp_path):
    data = report_data(policy=policy(evidence=evidence()))
    page = write_report(tmp_path, data)
    assert page == tmp_path / "report.html"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    again = read_report_data(tmp_path)
    assert again == data
    assert isinstance(again, ReportData)
    assert render_html(again) == page.read_text(encoding="utf-8")


def test_report_data_that_is_missing_or_corrupt_is_a_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match="No report data"):
        read_report_data(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(RunFolderError, match="Cannot read"):
        read_report_data(tmp_path)


def test_a_report_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match="Cannot write the report into"):
        write_report(tmp_path / "missing", report_data())

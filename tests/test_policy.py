from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from policy_strategies import policies
from pydantic import BaseModel, ValidationError

import autoprec.policy
from autoprec.errors import PolicyError
from autoprec.policy import (
    FORMAT_VERSION,
    Batch,
    Figures,
    Fingerprint,
    LayerSetting,
    Policy,
    Reason,
    load_policy,
    parse_policy,
    policy_schema,
    save_policy,
)

GOLDEN = Path(__file__).parent / "golden" / "policy_v2.json"
OLDER = {1: Path(__file__).parent / "golden" / "policy_v1.json"}
SCHEMA = Path(autoprec.policy.__file__).parent / "policy.schema.json"


def golden() -> dict[str, Any]:
    """The golden file's data, to be changed by a test."""
    data: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return data


def refusal(data: object) -> str:
    """The error text for data that must be refused."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(data if isinstance(data, str) else json.dumps(data), source="p.json")
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- Round trip and the golden file ---------------------------------------------------------------------------------------


@given(policies())
@hypothesis_settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_policy_survives_its_own_file(policy):
    again = parse_policy(policy.to_json())
    assert again == policy
    assert again.to_json() == policy.to_json()
    assert again.setup_hash() == policy.setup_hash()


def test_the_golden_file_loads_and_is_written_back_to_the_byte():
    assert load_policy(GOLDEN).to_json() == GOLDEN.read_text(encoding="utf-8")


def test_a_file_of_version_1_loads_as_what_it_meant_then():
    old, new = load_policy(OLDER[1]), load_policy(GOLDEN)
    assert (old.outputs, old.weights) == ("fp32", "fp32")
    assert old.model_copy(update={"outputs": "computed", "weights": "half_with_masters"}) == new
    assert json.loads(old.to_json())["version"] == FORMAT_VERSION


def test_the_golden_file_sets_every_field_to_something_else_than_its_default():
    left = _defaults(load_policy(GOLDEN), "")
    assert left == ["version"]


def _defaults(part: BaseModel, path: str) -> list[str]:
    """Paths of the fields that stand at their default, in a part and below it."""
    found = []
    for name, field in type(part).model_fields.items():
        value, where = getattr(part, name), f"{path}{name}"
        if not field.is_required() and value == field.default:
            found.append(where)
        below = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for item in below:
            found += _defaults(item, f"{where}.") if isinstance(item, BaseModel) else []
    return found


def test_the_golden_file_says_what_it_always_said():
    policy = load_policy(GOLDEN)
    assert policy.precisions() == {
        "blocks.0.attn": "fp16",
        "blocks.0.attn.qkv": "fp16",
        "blocks.0.norm": "fp16_pure",
        "head": "fp32",
        "stem": "bf16",
    }
    assert (policy.loss_scale.init, policy.loss_scale.growth_interval) == (16384.0, 500)
    assert policy.setup_hash() == "1dd80e03d68f38b87f361b81fd30ae5e89c304e02bd455ea5badc9f998b98b3d"


def test_the_file_begins_with_the_version_and_lists_layers_in_order():
    data = golden()
    assert next(iter(data)) == "version"
    assert list(data["layers"]) == sorted(data["layers"])
    shuffled = {**data, "layers": dict(reversed(data["layers"].items()))}
    assert parse_policy(json.dumps(shuffled)).to_json() == GOLDEN.read_text(encoding="utf-8")


def test_the_published_schema_is_that_of_this_version():
    published = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert published == policy_schema(), "write it anew: json.dumps(policy_schema(), indent=2) and a newline"


# --- Refusals -------------------------------------------------------------------------------------------------------------


def test_every_problem_is_listed_at_once_with_its_path():
    data = golden()
    data["default"] = "fp8"
    data["loss_scale"]["init"] = -1.0
    data["batch"]["micro"] = "16"
    data["layers"]["head"]["precision"] = "half"
    text = refusal(data)
    assert text.startswith("p.json is not a valid policy:\n")
    for path in ("  default: ", "  loss_scale.init: ", "  batch.micro: ", "  layers.head.precision: "):
        assert path in text
    assert "'fp32', 'fp16', 'bf16', 'fp16_pure' or 'bf16_pure'" in text


@pytest.mark.parametrize(
    ("path", "misspelt", "meant"),
    [
        ((), "exeution", "execution"),
        (("loss_scale",), "growth_intervall", "growth_interval"),
        (("layers", "head"), "precission", "precision"),
        (("layers", "head", "reason"), "txt", "text"),
        (("evidence",), "verdikt", "verdict"),
        (("evidence", "arms", 0), "los_gap", "loss_gap"),
        (("backend",), "chanels_last", "channels_last"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_one_suggested(path, misspelt, meant):
    data = golden()
    place = data
    for step in path:
        place = place[step]
    place[misspelt] = True
    assert f"{'.'.join(map(str, (*path, misspelt)))}: unknown key. Did you mean '{meant}'?" in refusal(data)


def test_a_newer_version_says_so_and_what_to_do():
    text = refusal({**golden(), "version": 99})
    assert f"p.json has version 99; this autoprec reads versions up to {FORMAT_VERSION}." in text
    assert "Upgrade autoprec" in text


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, None])
def test_a_version_that_is_no_whole_number_above_zero_is_refused(version):
    assert "allowed is a whole number from 1" in refusal({**golden(), "version": version})


@pytest.mark.parametrize("text", ["", "{", '{"version": 1,', "nonsense", GOLDEN.read_text(encoding="utf-8")[:-30]])
def test_a_file_that_is_cut_short_is_called_corrupt(text):
    refused = refusal(text)
    assert "is not valid JSON" in refused
    assert "corrupt or cut short" in refused


@pytest.mark.parametrize("text", ["[]", "3", "null", '"version"', "{}", '{"default": "fp16"}'])
def test_json_that_is_no_policy_is_refused_as_such(text):
    assert "p.json is not an autoprec policy: it has no 'version'." in refusal(text)


def test_a_deeply_nested_file_is_refused_and_not_a_crash():
    assert "p.json" in refusal("[" * 100_000)


def test_a_layer_that_the_fingerprint_does_not_know_is_refused_with_the_nearest_name():
    data = golden()
    data["layers"]["blocks.0.nrom"] = {"precision": "fp32"}
    assert "layers: 'blocks.0.nrom' is not in the fingerprint's layer list. Did you mean 'blocks.0.norm'?" in refusal(data)


def test_a_layer_list_that_was_edited_no_longer_fits_its_hash():
    data = golden()
    data["fingerprint"]["layers"]["head"] = "Linear weight=11x64"
    assert "but the layer list hashes to" in refusal(data)


def test_a_batch_that_does_not_multiply_out_is_refused_with_the_figures():
    data = golden()
    data["batch"]["accumulation_steps"] = 3
    assert "micro 32 x accumulation_steps 3 is 96, not the effective batch 128" in refusal(data)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(PolicyError, match=r"No policy at .*nowhere.json"):
        load_policy(tmp_path / "nowhere.json")
    with pytest.raises(PolicyError, match="Cannot read"):
        load_policy(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"version": "\xe9"}')
    with pytest.raises(PolicyError, match="Cannot read"):
        load_policy(tmp_path / "latin.json")


# --- Writing --------------------------------------------------------------------------------------------------------------


def test_a_saved_policy_is_readable_by_others_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "policy.json"
    save_policy(load_policy(GOLDEN), path)
    assert path.read_bytes() == GOLDEN.read_bytes()
    assert [item.name for item in tmp_path.iterdir()] == ["policy.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_old_policy_whole(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    path.write_text("the old one")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_policy(load_policy(GOLDEN), path)
    assert path.read_text() == "the old one"
    assert [item.name for item in tmp_path.iterdir()] == ["policy.json"]


# --- Meaning --------------------------------------------------------------------------------------------------------------


def small(**changes: Any) -> Policy:
    layers = {"a": "Block", "a.b": "Linear", "a.b.c": "Linear", "d": "Linear"}
    made_for = Fingerprint.of(layers, device="cpu", capability=None, torch_version="2.14.1", workload_sha256="0")
    return Policy(**{"default": "bf16", "batch": Batch(effective=8, micro=8), "fingerprint": made_for, **changes})


def test_a_layer_takes_the_setting_of_its_nearest_named_ancestor():
    policy = small(layers={"a": LayerSetting(precision="fp32"), "a.b.c": LayerSetting(precision="fp16")})
    assert policy.precisions() == {"a": "fp32", "a.b": "fp32", "a.b.c": "fp16", "d": "bf16"}
    assert policy.precision_of("") == "bf16"


@pytest.mark.parametrize(
    ("default", "exception", "needed"),
    [("fp32", "bf16", False), ("bf16", "fp16", True), ("fp16_pure", "fp32", True), ("bf16_pure", "fp32", False)],
)
def test_gradients_need_scaling_where_any_layer_is_fp16(default, exception, needed):
    assert small(default=default, layers={"d": LayerSetting(precision=exception)}).needs_loss_scale is needed


def test_the_setup_hash_ignores_reasons_and_evidence_and_nothing_else():
    bare = small(layers={"d": LayerSetting(precision="fp32")})
    told = small(layers={"d": LayerSetting(precision="fp32", reason=Reason(kind="range", text="81,920"))})
    with_evidence = load_policy(GOLDEN).evidence
    assert bare.setup_hash() == told.setup_hash() == told.model_copy(update={"evidence": with_evidence}).setup_hash()
    others = [small(), small(default="fp16", layers=bare.layers), small(layers=bare.layers, execution="compile")]
    assert len({bare.setup_hash(), *(other.setup_hash() for other in others)}) == 4


def test_the_root_has_no_name_of_its_own_among_the_layers():
    with pytest.raises(ValidationError, match="the root's precision is 'default'"):
        small(layers={"": LayerSetting(precision="fp32")})


@pytest.mark.parametrize("gap", [math.inf, -math.inf, math.nan])
def test_a_loss_gap_that_is_not_finite_is_kept_as_unknown_so_that_the_file_stays_json(gap):
    assert Figures(name="tuned", samples_per_s=1.0, loss_gap=gap, speed_origin="measured").loss_gap is None


def test_a_policy_in_memory_is_no_path():
    with pytest.raises(PolicyError, match="takes the path of a file, not a dict"):
        load_policy({"default": "bf16"})

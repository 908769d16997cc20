from __future__ import annotations

from pathlib import Path

import pytest
from decision_fakes import layer, look_of, small_model

from autoprec.errors import SearchSpaceError
from autoprec.policy import PRECISIONS
from autoprec.tune.space import (
    FAMILIES,
    SearchSpace,
    allowed_precisions,
    load_search_space,
    packaged_spaces,
    search_space_for,
    tied_groups,
)


def test_every_packaged_file_is_valid_and_gives_a_source_for_each_number() -> None:
    assert sorted(path.stem for path in packaged_spaces().glob("*.toml")) == sorted(FAMILIES)
    for family in FAMILIES:
        space = load_search_space(family)
        assert space.family == family
        ranges = space.ranges
        for part in (ranges.init_scale, ranges.growth_interval, ranges.micro_batch, ranges.padding, ranges.flags):
            assert part.source, f"{family}: {part}"
        assert all(rule.source and rule.why for rule in space.rules)


def test_the_initial_scales_are_two_to_the_12_to_14_unless_widened() -> None:
    assert load_search_space("default").ranges.init_scale.values == (4096.0, 8192.0, 16384.0)
    assert load_search_space("ada", init_scales=[1024, 65536]).ranges.init_scale.values == (1024.0, 65536.0)


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("ada", "ada"),
        ("Ada Lovelace", "ada"),
        ("8.9", "ada"),
        ("sm_89", "ada"),
        ("8.0", "ampere"),
        ("8.6", "ampere"),
        ("Hopper", "hopper"),
        ("9.0", "hopper"),
        ("12.0", "blackwell"),
        ("sm_120", "blackwell"),
        ("10.0", "blackwell"),
        ("cpu", "cpu"),
        ("7.5", "default"),
        ("volta", "default"),
    ],
)
def test_an_architecture_or_capability_finds_its_family(architecture: str, family: str) -> None:
    assert search_space_for(architecture).family == family


def test_a_family_keeps_the_rules_of_default_and_replaces_its_own_flags() -> None:
    default, hopper, ada = (load_search_space(name) for name in ("default", "hopper", "ada"))
    assert [rule.name for rule in ada.rules] == [rule.name for rule in default.rules]
    assert ada.ranges.flags.fp16_accumulation == (False, True)
    assert hopper.ranges.flags.fp16_accumulation == (False,)
    assert ada.ranges.flags.tf32 == (False, True)


def test_losses_and_transforms_stay_fp32_and_norms_may_be_pure() -> None:
    look = look_of(
        [
            layer("loss", "CrossEntropyLoss"),
            layer("spectrum", "Spectrum", ops=("aten::fft_rfft.default", "aten.mul.Tensor")),
            layer("solve", "Solver", ops=("linalg_solve",)),
            layer("norm", "LayerNorm"),
            layer("fc"),
        ]
    )
    allowed, reasons = allowed_precisions(load_search_space("default"), look, PRECISIONS)
    assert allowed["loss"] == allowed["spectrum"] == allowed["solve"] == ("fp32",)
    assert allowed["norm"] == allowed["fc"] == PRECISIONS
    assert sorted(reasons) == ["loss", "solve", "spectrum"]
    assert reasons["spectrum"].startswith("transforms: cuFFT")


def test_the_hardware_and_a_model_that_forbids_fp16_narrow_every_layer() -> None:
    look = look_of([layer("fc")], forbids_fp16="complex parameters")
    allowed, _ = allowed_precisions(load_search_space("default"), look, PRECISIONS)
    assert allowed == {"fc": ("fp32", "bf16", "bf16_pure")}
    allowed, _ = allowed_precisions(load_search_space("default"), look_of([layer("fc")]), ("fp32", "fp16"))
    assert allowed == {"fc": ("fp32", "fp16")}


def test_a_layer_that_may_take_nothing_the_hardware_has_is_fp32() -> None:
    space = SearchSpace.model_validate({"rules": [{"name": "pin", "patterns": ["fc"], "allowed": ["bf16"]}]})
    assert allowed_precisions(space, look_of([layer("fc")]), ("fp32", "fp16"))[0] == {"fc": ("fp32",)}


def test_keep_fp32_comes_before_every_rule() -> None:
    look, _ = small_model()
    space = load_search_space("ada", keep_fp32=["body.*.norm"])
    allowed, reasons = allowed_precisions(space, look, PRECISIONS)
    assert {name for name, options in allowed.items() if options == ("fp32",)} == {f"body.{i}.norm" for i in range(4)}
    assert reasons["body.0.norm"] == "--keep-fp32 body.*.norm: pinned by the user"


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    look, _ = small_model()
    with pytest.raises(SearchSpaceError, match=r"pattern 'heads' matches no layer\. Did you mean 'head'\?"):
        allowed_precisions(load_search_space("ada", keep_fp32=["heads"]), look, PRECISIONS)


def test_query_key_and_value_of_one_parent_move_together() -> None:
    names = [f"block.{i}.{p}" for i in range(2) for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    groups = tied_groups(load_search_space("default"), look_of([layer(name) for name in names]))
    assert groups == tuple(tuple(f"block.{i}.{p}_proj" for p in "qkv") for i in range(2))


def test_a_lone_projection_is_no_group() -> None:
    assert tied_groups(load_search_space("default"), look_of([layer("a.q_proj"), layer("b.k_proj")])) == ()


def test_a_users_file_overrides_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "ada"\n[[rules]]\nname = "head"\npatterns = ["head"]\nallowed = ["bf16"]\n[ranges.padding]\nvalues = [0, 32]\n'
    )
    space = load_search_space(path)
    assert [rule.name for rule in space.rules][:2] == ["head", "losses"]
    assert space.ranges.padding.values == (0, 32)
    assert space.ranges.flags.fp16_accumulation == (False, True)


def test_every_problem_of_a_file_is_listed_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        "rulez = []\n"
        '[[rules]]\nname = "a"\npatern = ["x"]\nkinds = ["Linear"]\nallowed = ["fp8"]\n'
        "[ranges.growth_interval]\nvalues = [10]\n"
        "[ranges.flags]\ntf33 = [true]\n"
        "[ranges.init_scale]\nvalues = [-1.0]\n"
    )
    with pytest.raises(SearchSpaceError) as caught:
        load_search_space(path)
    text = str(caught.value)
    assert "rulez: unknown key. Did you mean 'rules'?" in text
    assert "rules[0].patern: unknown key. Did you mean 'patterns'?" in text
    assert "rules[0].allowed[0]: Input should be 'fp32', 'fp16'" in text
    assert "ranges.growth_interval.values[0]: Input should be greater than or equal to 100" in text
    assert "ranges.flags.tf33: unknown key. Did you mean 'tf32'?" in text
    assert "ranges.init_scale.values[0]: Input should be greater than 0" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [", "is not valid TOML"),
        ('[[rules]]\nname = "none"\nallowed = ["fp32"]\n', "'none' names no layers"),
        ('extends = "adaa"\n', "No packaged search space 'adaa'; there are default, ampere"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SearchSpaceError, match=message):
        load_search_space(path)


def test_an_unknown_name_lists_the_known_ones_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SearchSpaceError, match=r"Did you mean 'hopper'\?"):
        load_search_space("hoper")
    with pytest.raises(SearchSpaceError, match=r"No search space at .*gone\.toml"):
        load_search_space(tmp_path / "gone.toml")


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(f'extends = "{two}"\n')
    two.write_text(f'extends = "{one}"\n')
    with pytest.raises(SearchSpaceError, match="extends itself"):
        load_search_space(one)

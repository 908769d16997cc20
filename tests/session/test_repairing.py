"""The repair of the fastest plan: exactly what does harm is lifted, and nothing for a loss scale, noise or a flag."""

from __future__ import annotations

from scripted_run import SEEDS, TRIAL_STEPS, Script, is_fp32, scripted, trained

from autoprec.policy import Backend, Policy
from autoprec.records import Candidate, Failure, Outcome, Window
from autoprec.session.repairing import repairs
from autoprec.session.search import TRIAL_SLACK
from autoprec.tune.space import load_search_space
from autoprec.tune.yardstick import Yardstick


def repaired(script: Script, *, base: dict | None = None, **options) -> tuple[dict[str, Policy], object]:
    """What the repair of a study with one fp16 trial gives."""
    context, space = scripted(script, **options)
    window = context.trial_window()
    yardstick = Yardstick(trained(window).losses, tolerance=TRIAL_SLACK * context.settings.tolerance)
    params = space.starts()[0] | {"front_index": 1, "tf32": False, "channels_last": False, "padding": 0}
    trial = space.to_policy(params).model_copy(update=base or {})
    candidates = [Candidate(number=0, role="search", policy=trial, window=window, outcome=trained(window), trial=0)]
    return repairs(context, space, yardstick, candidates, load_search_space("ada")), context


def low(policy: Policy) -> set[str]:
    return {name for name, precision in policy.precisions().items() if precision.startswith("fp16")}


def lifted_in(policy: Policy) -> set[str]:
    """Layers that the fastest plan has in half and the policy has not."""
    return low(repaired(lambda _policy, window: trained(window))[0]["fastest_fp16"]) - low(policy)


def hurts(*guilty: str, outcome: Outcome | None = None, gap: float = 0.5) -> Script:
    """Any of these layers in half spoils the training."""

    def script(policy: Policy, window: Window) -> Outcome:
        if not low(policy) & set(guilty):
            return trained(window)
        return outcome or trained(window, gap)

    return script


def test_a_plan_that_trains_is_offered_as_it_is() -> None:
    found, context = repaired(lambda _policy, window: trained(window))
    assert list(found) == ["fastest_fp16"]
    assert [window.steps for policy, window in context.asked if not is_fp32(policy)].count(TRIAL_STEPS) == 1


def test_exactly_the_guilty_layer_is_lifted_with_its_reason() -> None:
    found, _ = repaired(hurts("body.2.conv"))
    policy = found["repaired_fp16"]
    assert lifted_in(policy) == {"body.2.conv"}
    assert policy.layers["body.2.conv"].reason.kind == "divergence"


def test_a_scale_that_was_too_large_at_first_lifts_no_layer() -> None:
    def script(policy: Policy, window: Window) -> Outcome:
        if policy.loss_scale.init > 256:
            return trained(window, 0.02, skipped=5, final_scale=256.0)
        return trained(window)

    found, _ = repaired(script)
    assert list(found) == ["fastest_fp16"]
    assert found["fastest_fp16"].loss_scale.init == 256.0


def test_a_harm_that_only_the_verification_windows_show_is_found_there() -> None:
    """Each trial departs by less than a trial may, and by more than a verified policy may."""
    found, _ = repaired(hurts("body.1.conv", gap=0.02))
    assert list(found) == ["repaired_fp16"]
    assert lifted_in(found["repaired_fp16"]) == {"body.1.conv"}


def test_a_harm_that_shows_late_is_repaired_with_every_set_held_against_the_verification_windows() -> None:
    late = hurts("body.1.conv", gap=0.2)
    found, context = repaired(lambda policy, window: trained(window) if window.steps == TRIAL_STEPS else late(policy, window))
    assert lifted_in(found["repaired_fp16"]) == {"body.1.conv"}
    assert sum(window.steps > TRIAL_STEPS for policy, window in context.asked if not is_fp32(policy)) >= 2 * SEEDS


def test_noise_about_fp32s_own_loss_lifts_nothing() -> None:
    noise = (0.05, -0.05, 0.01)
    found, _ = repaired(lambda _policy, window: trained(window, noise[window.seed] if window.steps > TRIAL_STEPS else 0.0))
    assert list(found) == ["fastest_fp16"]


def test_many_layers_that_fail_at_once_are_all_found_and_no_other() -> None:
    guilty = ("body.0.conv", "body.1.conv", "body.2.conv", "body.3.conv", "body.0.norm", "body.2.norm")
    at_once = Failure(kind="diverged", message="the loss is NaN at step 0", step=0)
    found, context = repaired(hurts(*guilty, outcome=at_once))
    assert lifted_in(found["repaired_fp16"]) == set(guilty)
    assert sum(not is_fp32(policy) and window.steps == TRIAL_STEPS for policy, window in context.asked) > 16


def test_where_lifting_everything_does_not_help_the_flags_are_taken_back() -> None:
    def script(policy: Policy, window: Window) -> Outcome:
        return trained(window, 0.5 if policy.backend.channels_last else 0.0)

    found, context = repaired(script, base={"backend": Backend(channels_last=True)})
    assert list(found) == ["repaired_fp16"]
    assert not found["repaired_fp16"].backend.channels_last
    assert lifted_in(found["repaired_fp16"]) == set()
    assert any("its flags are taken back" in line for line in context.said)


def test_where_only_plain_fp32_trains_there_is_no_repair_and_that_is_said() -> None:
    found, context = repaired(lambda _policy, window: trained(window, 0.5))
    assert found == {}
    assert context.said[-1:] == ["repair: nothing less than every layer of the fastest plan in FP32 would cure it"]


def test_without_time_the_trial_window_alone_decides() -> None:
    found, context = repaired(hurts("body.1.conv", gap=0.02), budget_s=200.0)
    assert list(found) == ["fastest_fp16"]
    assert all(window.steps == TRIAL_STEPS for _, window in context.asked)


def test_running_out_of_memory_is_not_repaired_by_precisions() -> None:
    found, context = repaired(lambda _policy, _window: Failure(kind="out_of_memory", message="no room"))
    assert found == {} and len(context.asked) == 1

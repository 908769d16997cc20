"""What a workload must show before any search."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.bench.workload import Workload, load_workload
from autoprec.bench.workload_check import check_workload, fp16_obstacle, take_batches
from autoprec.errors import WorkloadError


def _batches(batch_size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)


def _workload(**changes: Any) -> Workload:
    return load_workload(
        SimpleNamespace(**{"build_model": lambda: nn.Linear(4, 3), "batches": _batches, "BATCH_SIZE": 8} | changes)
    )


def _refusal(**changes: Any) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        check_workload(_workload(**changes), "cpu")
    assert caught.value.hint
    return caught.value


def test_a_sound_workload_passes_and_nothing_global_changes() -> None:
    workload = _workload()
    state = torch.get_rng_state()
    assert check_workload(workload, "cpu") is workload
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("built", "said"), [(3, "a int"), (nn.Linear, "the class Linear"), (None, "a NoneType")])
def test_build_model_must_return_a_module(built: Any, said: str) -> None:
    assert f"build_model() returned {said}" in _refusal(build_model=lambda: built).message


def test_a_model_without_parameters_is_refused() -> None:
    assert "no trainable parameter" in _refusal(build_model=nn.ReLU).message


def test_an_error_in_build_model_shows_the_users_line() -> None:
    def build_model() -> nn.Module:
        return nn.Linear(4, undefined_width)  # type: ignore[name-defined]  # noqa: F821

    message = _refusal(build_model=build_model).message
    assert "build_model() raised NameError: name 'undefined_width' is not defined" in message
    assert "test_workload_check.py" in message
    assert "in build_model: return nn.Linear(4, undefined_width)" in message


def test_batches_that_ignore_their_seed_are_refused() -> None:
    def unseeded(batch_size: int, seed: int) -> Any:
        while True:
            yield torch.randn(batch_size, 4), torch.zeros(batch_size, dtype=torch.long)

    error = _refusal(batches=unseeded)
    assert "is not reproducible: batch 0 differs between two calls" in error.message
    assert "manual_seed(seed)" in error.hint


def test_batches_that_end_early_say_how_many_came_and_were_needed() -> None:
    workload = _workload(batches=lambda n, seed: itertools.islice(_batches(n, seed), 3))
    with pytest.raises(WorkloadError, match="ended after 3 batches; 10 are needed") as error:
        take_batches(workload, 0, 10)
    assert "while True" in error.value.hint
    assert "ended after 0 batches; 2 are needed" in _refusal(batches=lambda n, seed: iter([])).message


def test_a_generator_that_can_be_used_once_is_found_out() -> None:
    shared = itertools.islice(_batches(8, 0), 3)
    assert "ended after 1 batches; 2 are needed" in _refusal(batches=lambda n, seed: shared).message


def test_smaller_batches_than_asked_cap_the_effective_batch_with_a_note() -> None:
    checked = check_workload(_workload(batches=lambda n, seed: _batches(min(n, 5), seed)), "cpu")
    assert checked.batch_size == 5
    assert "asked for 8 samples and gave 5" in checked.notes[0]


def test_larger_batches_than_asked_are_refused() -> None:
    assert "gave a batch of 16 samples" in _refusal(batches=lambda n, seed: _batches(16, seed)).message


def test_a_small_dataset_decides_an_effective_batch_nobody_chose() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.zeros(20, dtype=torch.long))
    stand = SimpleNamespace(build_model=lambda: nn.Linear(4, 3), dataset=lambda: data)
    checked = check_workload(load_workload(stand), "cpu")
    assert checked.batch_size == 20
    assert "The dataset has 20 samples" in checked.notes[0]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: 3.0, "returned a float"),
        (lambda model, batch: model(batch[0]), "shape [8, 3]; it must be a scalar"),
        (lambda model, batch: model(batch[0]).argmax(), "returned int64"),
        (lambda model, batch: model(batch[0]).sum() * float("nan"), "is nan in plain FP32"),
        (lambda model, batch: model(batch[0]).sum() / 0.0, "inf in plain FP32"),
        (lambda model, batch: model(batch[0]).sum().detach(), "The loss has no gradient"),
        (lambda model, batch: model(batch[1]).sum(), "loss(model, batch) raised RuntimeError"),
    ],
)
def test_the_loss_must_be_a_finite_scalar_with_a_gradient(loss: Any, said: str) -> None:
    assert said in _refusal(loss=loss).message


def test_an_optimizer_of_another_model_is_found_by_identity() -> None:
    stranger = nn.Linear(4, 3)
    error = _refusal(build_optimizer=lambda model: torch.optim.SGD(stranger.parameters(), lr=0.1))
    assert "holds 2 parameters and none of them is the model's" in error.message


def test_a_loss_that_does_not_reach_the_trained_parameters_is_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    error = _refusal(build_model=Two, build_optimizer=lambda model: torch.optim.SGD(model.idle.parameters(), lr=0.1))
    assert "no gradient path to any of the 2 parameters" in error.message


def test_a_wrong_optimizer_type_is_refused() -> None:
    assert "returned a list" in _refusal(build_optimizer=lambda model: list(model.parameters())).message


def test_an_optimizer_with_a_closure_passes_and_forbids_fp16() -> None:
    workload = _workload(build_optimizer=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2))
    check_workload(workload, "cpu")
    assert fp16_obstacle(workload) == "LBFGS.step needs a closure, which loss scaling does not support"


def test_complex_parameters_forbid_fp16() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.fft(x) @ self.weight).abs()

    workload = _workload(build_model=Spectral)
    check_workload(workload, "cpu")
    assert fp16_obstacle(workload) == "parameter 'weight' is complex, and loss scaling has no complex path"


def test_an_ordinary_workload_has_no_obstacle() -> None:
    assert fp16_obstacle(_workload()) == ""


class InsistsOnAClosure(torch.optim.SGD):
    """As many of SAM's implementations: the closure has a default and is needed all the same."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        with torch.enable_grad():
            closure()
        return super().step(closure)


def test_an_optimizer_that_insists_on_its_optional_closure_passes_and_forbids_fp16() -> None:
    workload = _workload(build_optimizer=lambda model: InsistsOnAClosure(model.parameters(), lr=0.1))
    checked = check_workload(workload, "cpu")
    assert checked.step_needs_closure and not workload.step_needs_closure
    assert fp16_obstacle(checked) == "InsistsOnAClosure.step needs a closure, which loss scaling does not support"
    assert check_workload(checked, "cpu") is checked


def test_a_broken_optimizer_shows_its_own_error_and_not_one_about_closures() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no such state" if closure is None else "a later error")

    assert "no such state" in _refusal(build_optimizer=lambda model: Broken(model.parameters(), lr=0.1)).message

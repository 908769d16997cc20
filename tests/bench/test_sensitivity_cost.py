"""What scoring costs, told without a clock: which passes run, what counts as a pass, and how often memory is gone over."""

from __future__ import annotations

import pytest
import torch
from profiled import WIDTH, Net, stands_for_4090d, workload_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.bench import profile as profiling
from autoprec.bench.forcing import SameDraws
from autoprec.bench.look import trace_workload
from autoprec.bench.seeding import seeded

LARGE = 1000


class Made(TorchDispatchMode):
    """Elements of every large tensor that an operation answers with, by type; views and changes in place made nothing."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        fresh = isinstance(out, torch.Tensor) and not func._schema.is_mutable
        if fresh and out.numel() >= LARGE and all(result.alias_info is None for result in func._schema.returns):
            self.elements[out.dtype] = self.elements.get(out.dtype, 0) + out.numel()
        return out


def scene_of(middle):
    workload, target = workload_of(lambda: Net(middle()), batch_size=64), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    subject = profiling._subject(workload, target, look, trace, 0, 1)
    return look, profiling._scene(subject, subject.part(0, 64))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_low_pass_makes_nothing_in_double_and_little_of_its_own(precision):
    look, scene = scene_of(nn.Identity)
    tape = profiling.record(scene)
    with Made() as scored:
        profiling.score(scene, tape, {}, profiling._policies(look, precision), scale=1.0)
    assert torch.float64 not in scored.elements
    # Three layers of 64 x 16, two of which answer as many values: the pass itself, and the copies that it is handed.
    layer = 64 * WIDTH
    assert scored.elements[torch.float32] <= 16 * layer


def test_passes_are_the_low_pass_and_its_share_of_what_all_precisions_use(monkeypatch):
    seconds = iter([1.5, 2.5, 1.0, 3.0])  # recording, twin, and a low pass for each of two precisions
    monkeypatch.setattr(profiling, "seconds_of", lambda run: (run(), next(seconds)))
    monkeypatch.setattr(profiling, "run_plain", lambda scene: 0.5)
    workload, target = workload_of(lambda: Net(nn.Tanh())), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    subject = profiling._subject(workload, target, look, trace, 0, 1)
    ranges = [profiling._record(subject, 0)]
    scoring = profiling._score_part(subject, subject.part(0, 32), ("fp16", "bf16"), ranges)
    assert scoring.passes == {"fp16": (1.0 + 2.0) / 0.5, "bf16": (3.0 + 2.0) / 0.5}


def test_a_profile_says_what_every_low_precision_took():
    workload, target = workload_of(lambda: Net(nn.Tanh())), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    found = profiling.profile(workload, target, look, ("fp16", "bf16_pure"), trace=trace, steps=1)
    assert list(found.sensitivity_passes) == ["fp16", "bf16_pure"]
    assert all(passes > 1 for passes in found.sensitivity_passes.values())


def test_draws_are_the_same_in_half_and_in_float32_and_other_operations_pass_through():
    with seeded(3), SameDraws():
        first = torch.nn.functional.dropout(torch.ones(100).half(), 0.5)
        total = first.float().sum()
    with seeded(3):
        second = torch.nn.functional.dropout(torch.ones(100), 0.5)
    assert torch.equal(first.float(), second) and total == second.sum()


def test_seeding_leaves_the_same_numbers_as_torchs_own_and_puts_the_state_back():
    before = torch.get_rng_state()
    with seeded(11):
        drawn = torch.randn(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.randn(5, generator=torch.Generator().manual_seed(11)))

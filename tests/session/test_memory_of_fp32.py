"""A batch chosen for what mixed precision needs may be too large for FP32; FP32 is still what everything is held against."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.bench.bench import Bench
from autoprec.errors import WorkloadError
from autoprec.records import Candidate, Failure
from autoprec.session import tune


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Hungry(nn.Module):
    """Runs out of memory in FP32 with more than ``most`` samples at once."""

    def __init__(self, most):
        super().__init__()
        self.most, self.stem, self.norm, self.head = most, nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x):
        if len(x) > self.most and not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.head(self.norm(self.stem(x)))


def workload_of(most):
    class Workload:
        BATCH_SIZE = 64

        @staticmethod
        def build_model():
            return Hungry(most)

        @staticmethod
        def batches(batch_size, seed):
            generator = torch.Generator().manual_seed(seed)
            while True:
                x = torch.randn(batch_size, 8, generator=generator)
                yield x, (x[:, 0] > 0).long()

    return Workload


def test_fp32_runs_in_the_largest_micro_batch_that_fits_and_amp_in_the_whole(tmp_path):
    result = tune(workload_of(16), gpu="4090d", trials=1, budget_s=60, out=tmp_path / "run")
    assert result.policy.batch.effective == 64
    lines = (result.folder / "candidates.jsonl").read_text().splitlines()
    batches = {c.role: c.policy.batch for c in map(Candidate.model_validate_json, lines)}
    for role in ("reference", "fp32", "fp32_tf32"):
        assert (batches[role].micro, batches[role].accumulation_steps) == (16, 4), role
    for role in ("amp_fp16", "amp_bf16"):
        assert (batches[role].micro, batches[role].accumulation_steps) == (64, 1), role
    arms = {arm.name: arm for arm in result.arms}
    assert arms["FP32"].samples_per_s and arms["stock AMP bf16"].samples_per_s


def test_a_step_that_fits_in_no_micro_batch_is_refused_before_any_search(tmp_path):
    with pytest.raises(WorkloadError, match="An FP32 step runs out of memory with 8 samples") as caught:
        tune(workload_of(4), gpu="4090d", budget_s=5, out=tmp_path / "run")
    assert "lower BATCH_SIZE" in caught.value.hint


def test_windows_that_fit_in_no_micro_batch_are_refused_too(tmp_path, monkeypatch):
    """The optimizer's state is not part of the traced step."""
    asked = []

    def window(self, policy, window):
        asked.append(policy.batch.micro)
        return Failure(kind="out_of_memory", message="no room")

    monkeypatch.setattr(Bench, "window", window)
    with pytest.raises(WorkloadError, match="FP32 runs out of memory with micro-batches of 8") as caught:
        tune(workload_of(64), gpu="4090d", budget_s=5, out=tmp_path / "run")
    assert asked == [64, 32, 16, 8]
    assert "lower BATCH_SIZE" in caught.value.hint

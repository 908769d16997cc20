"""What the check of a workload changes is told, and never done in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.bench.bench import Bench
from autoprec.errors import WorkloadError
from autoprec.records import Failure
from autoprec.session import tune


class Capped:
    """65 samples however many are asked for: Lightning-AI/pytorch-lightning#3259."""

    BATCH_SIZE = 128

    @staticmethod
    def build_model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    @staticmethod
    def batches(batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(min(batch_size, 65), 4, generator=generator)
            yield x, (x[:, 0] > 0).long()


class Lines:
    def __init__(self):
        self.found_lines = []

    def stage(self, name, total):
        pass

    def advance(self, text=""):
        pass

    def found(self, text):
        self.found_lines.append(text)


def test_a_batch_smaller_than_asked_for_is_said_before_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Bench, "window", lambda self, policy, window: Failure(kind="out_of_memory", message="ends here"))
    said = Lines()
    with pytest.raises(WorkloadError):
        tune(Capped, gpu="4090d", out=tmp_path / "run", progress=said)
    assert "look: batches() was asked for 128 samples and gave 65: the effective batch is 65." in said.found_lines

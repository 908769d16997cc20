"""Which dtype the loss needs the model's outputs in, read from the traced operations."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from profiled import WIDTH, Net, stands_for_4090d, workload_of
from torch import nn

from autoprec.bench.look import trace_workload


def classes(model, batch):
    return F.cross_entropy(model(batch[0]).repeat(1, 4), (batch[1].flatten() > 0).long())


def reshaped_classes(model, batch):
    return F.cross_entropy(
        model(batch[0]).view(-1, 4, 1).transpose(0, 1).flatten(1).t(), batch[1].flatten()[::4].abs().clamp(max=0).long()
    )


def squared(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def by_hand(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()


def dice(model, batch):
    share = model(batch[0]).sigmoid()
    return 1 - 2 * (share * (batch[1] > 0)).sum() / (share.sum() + (batch[1] > 0).sum() + 1e-6)


def mean_of_outputs(model, batch):
    return model(batch[0]).mean()


def accuracy_beside(model, batch):
    out = model(batch[0]).repeat(1, 4)
    assert out.argmax(1).shape == (len(out),)
    return F.cross_entropy(out, (batch[1].flatten() > 0).long())


class OwnLoss(Net):
    """Computes its loss itself, as language models do: the caller only takes it out."""

    def forward(self, x):
        out = super().forward(x)
        return (out - 1).square().mean()


@pytest.mark.parametrize("loss", [classes, reshaped_classes, squared, accuracy_beside])
def test_outputs_may_stay_as_computed_where_the_loss_casts_them_itself(loss):
    look, _ = trace_workload(workload_of(lambda: Net(nn.Linear(WIDTH, WIDTH)), loss=loss), stands_for_4090d())
    assert look.outputs == "computed"


@pytest.mark.parametrize("loss", [by_hand, dice, mean_of_outputs])
def test_arithmetic_on_the_outputs_needs_them_in_float32(loss):
    look, _ = trace_workload(workload_of(lambda: Net(nn.Linear(WIDTH, WIDTH)), loss=loss), stands_for_4090d())
    assert look.outputs == "fp32"


def test_a_model_that_returns_its_loss_needs_no_cast():
    workload = workload_of(lambda: OwnLoss(nn.Linear(WIDTH, WIDTH)), loss=lambda model, batch: model(batch[0]))
    assert trace_workload(workload, stands_for_4090d())[0].outputs == "computed"

"""Small workloads with one hazard or none, for the tests of tracing and profiling."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.bench.gpus import find_gpu
from autoprec.bench.look import trace_workload
from autoprec.bench.profile import profile
from autoprec.bench.target import resolve_target
from autoprec.bench.workload import load_workload
from autoprec.policy import PRECISIONS

WIDTH = 16
ADA = find_gpu("4090d")


def stands_for_4090d():
    """The target of ``--gpu 4090d`` on a machine without CUDA, whatever machine runs the test."""
    target = resolve_target("cpu")
    return target.__class__(ADA.name, ADA, "cpu", "predicted", True, None, PRECISIONS, ADA.capability)


def regression(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, WIDTH, generator=generator)
        yield x, torch.sin(x.sum(1, keepdim=True) / 4) + 0.1 * torch.randn(batch_size, 1, generator=generator)


def squared_error(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


class Net(nn.Module):
    """Linear, the module under test, norm, Linear: everything but ``middle`` is harmless."""

    def __init__(self, middle):
        super().__init__()
        self.stem, self.middle = nn.Linear(WIDTH, WIDTH), middle
        self.calm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.calm(self.middle(self.stem(x))))


def workload_of(build_model, *, batches=regression, loss=squared_error, batch_size=32, **more):
    return load_workload(SimpleNamespace(build_model=build_model, batches=batches, loss=loss, BATCH_SIZE=batch_size, **more))


def profile_of(middle, precisions=PRECISIONS, **more):
    """The profile by layer of a net around a module, under CUDA's rules."""
    workload, target = workload_of(lambda: Net(middle()), **more), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    found = profile(workload, target, look, precisions, trace=trace)
    return {layer.layer: layer for layer in found.layers}


def hard(layers, precision):
    return {name for name, layer in layers.items() if any(risk.hard and risk.precision == precision for risk in layer.risks)}


def most_sensitive(layers, precision):
    return max(layers, key=lambda name: layers[name].sensitivity[precision])

"""The examples do what they say, and the plain loop trains with a policy as it does in FP32."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.policy import Batch, Fingerprint, LayerSetting, Policy, save_policy
from autoprec.runtime.layers import layer_signature, named_layers

EXAMPLES = Path(__file__).parents[1] / "examples"
WORKLOADS = ("digits_cnn", "bytes_gpt")


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "digits_cnn.py"))


def train(workload: dict[str, Any], batch_size: int, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = workload["build_model"]()
    optimizer = workload["build_optimizer"](model)
    batches = workload["batches"](batch_size, 0)
    losses = []
    for _ in range(steps):
        loss = workload["loss"](model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_are_endless_of_the_size_asked_for_and_the_same_for_the_same_seed(name: str) -> None:
    batches = runpy.run_path(str(EXAMPLES / f"{name}.py"))["batches"]

    def first(seed: int, count: int) -> list[Tensor]:
        stream = batches(500, seed)
        found = (next(stream) for _ in range(count))
        return [batch if isinstance(batch, Tensor) else batch[0] for batch in found]

    ours, same, other = first(3, 6), first(3, 6), first(4, 6)
    assert all(len(batch) == 500 for batch in ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    assert not torch.equal(ours[0], other[0])


@pytest.mark.parametrize(
    ("name", "batch_size", "steps", "start", "end"), [("digits_cnn", 64, 60, 2.2, 0.9), ("bytes_gpt", 4, 40, 5.4, 4.2)]
)
def test_an_example_really_learns(name: str, batch_size: int, steps: int, start: float, end: float) -> None:
    losses = train(runpy.run_path(str(EXAMPLES / f"{name}.py")), batch_size, steps)
    assert losses[0] > start
    assert sum(losses[-5:]) / 5 < end


def test_resnet50_batches_are_views_into_one_pool_and_wrap_round_its_end() -> None:
    source = (EXAMPLES / "resnet50.py").read_text()
    source = source.replace("IMAGE_SIZE = 224", "IMAGE_SIZE = 16").replace("POOL = 384", "POOL = 24")  # small enough for a test
    workload: dict[str, Any] = {"__name__": "resnet50"}
    exec(compile(source, "resnet50.py", "exec"), workload)
    stream = workload["batches"](8, 0)
    found = [next(stream) for _ in range(40)]
    assert {tuple(images.shape) for images, _ in found} == {(8, 3, 16, 16)}
    pool, labels = workload["_pool"]()
    inside = [images for images, _ in found if images.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()]
    assert 0 < len(inside) < 40
    for images, own in found:
        start = int((pool == images[0]).flatten(1).all(1).nonzero()[0])
        order = (start + torch.arange(8)) % 24
        assert torch.equal(images, pool[order])
        assert torch.equal(own, labels[order])
    loss = F.cross_entropy(workload["build_model"]()(found[0][0]), found[0][1])
    assert torch.isfinite(loss)


def policy_for(model: nn.Module, **changes: object) -> Policy:
    """A bf16 policy over the modules that own parameters."""
    owners = {name: module for name, module in named_layers(model).items() if [*module.parameters(recurse=False)]}
    layers = {name: layer_signature(module) for name, module in owners.items()}
    fingerprint = Fingerprint.of(layers, device="cpu", capability=None, torch_version=torch.__version__, workload_sha256="0" * 64)
    batch = Batch(effective=64, micro=32, accumulation_steps=2)
    return Policy(default="bf16", batch=batch, fingerprint=fingerprint, **changes)  # type: ignore[arg-type]


def test_the_plain_loop_prints_two_curves_that_fall_alike(digits: dict[str, Any], tmp_path: Path) -> None:
    policy = policy_for(digits["build_model"](), layers={"head": LayerSetting(precision="fp32")})
    save_policy(policy, tmp_path / "policy.json")
    command = [sys.executable, "train_with_policy.py", "digits_cnn.py", str(tmp_path / "policy.json"), "--steps", "48"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "|" in line]
    assert len(rows) == 12
    fp32, tuned = ([float(row[column]) for row in rows] for column in (1, 2))
    for curve in (fp32, tuned):
        assert curve[0] > 1.8
        assert curve[-1] < 1.1
    assert fp32 != tuned, "the policy changed nothing"
    assert max(abs(a - b) for a, b in zip(fp32, tuned, strict=True)) < 0.2


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(EXAMPLES.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

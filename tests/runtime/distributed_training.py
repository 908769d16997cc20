"""What each process of the distributed tests runs; importable, because processes are spawned."""

from __future__ import annotations

import copy
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from runtime_policies import Net, policy_for
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autoprec.policy import Policy
from autoprec.runtime import apply_policy


def enter(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )


def leave() -> None:
    """Ends a process whose checks all held, once its peer's did too.

    At once, without the interpreter's end: in torch 2.14 threads of the group may be left over there, and one process in some dozens
    aborted ("terminate called without an active exception") after all was checked.
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 28).reshape(4, 7) + rank


def train(model: nn.Module, applied: Any, rank: int, *, infinite_rank: int | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = applied.grad_scaler()
    for step in range(3):
        optimizer.zero_grad()
        with applied.autocast():
            loss = model(batch(rank)).square().mean()
        if step == 1 and rank == infinite_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert applied.step_was_skipped is (step == 1 and infinite_rank is not None)
    return scaler


def policy(model: nn.Module) -> Policy:
    islands = {"first": "fp32", "second.norm": "fp16_pure", "second.fc": "bf16"}
    return policy_for(model, "fp16", islands, pad={"stem": 8, "head": 8})  # type: ignore[arg-type]


def ddp(rank: int, store: str, order: str) -> None:
    enter(rank, store)
    model = Net()
    made_for = policy(model)
    if order == "apply first":
        applied = apply_policy(model, made_for)
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = DistributedDataParallel(model)
        applied = apply_policy(wrapped, made_for)
    scaler = train(wrapped, applied, rank, infinite_rank=1)
    assert scaler.get_scale() == 4096.0, "the other rank's infinity must halve this rank's scale too"
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(others, parameter.detach())
        assert torch.equal(others[0], others[1])
    leave()


def infinity_in_one_shard(model: nn.Module, applied: Any, scaler: Any, rank: int) -> None:
    """An overflow in the part of a gradient that one rank holds must skip the step on all, or their weights part."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    before = scaler.get_scale()
    scaler.scale(model(batch(rank)).square().mean()).backward()
    if rank == 1:
        shard = next(p.grad for p in model.parameters() if p.grad.to_local().numel()).to_local()  # type: ignore[union-attr]
        shard.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert applied.step_was_skipped
    assert scaler.get_scale() == before / 2


def fsdp2(rank: int, store: str, default: str) -> None:
    enter(rank, store)
    reference = Net()
    model = copy.deepcopy(reference)
    keys = list(model.state_dict())
    made_for = policy_for(model, default, {"first": "fp32", "second": f"{default}_pure"}, pad={"head": 8})  # type: ignore[arg-type,dict-item]
    applied = apply_policy(model, made_for)
    plain = apply_policy(reference, made_for)
    for block in (model.first, model.second):
        fully_shard(block)
    fully_shard(model)
    assert list(model.state_dict()) == keys
    with applied.autocast():
        loss = model(batch(0)).square().mean()
    loss.backward()
    with plain.autocast():
        expected = reference(batch(0)).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0.02, atol=0.02)
    scaler = train(model, applied, rank)
    if scaler.is_enabled():
        infinity_in_one_shard(model, applied, scaler, rank)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), model(batch(0)))
    applied.remove()
    assert type(model.first).__name__ == "FSDPBlock"
    assert model(batch(0)).dtype == torch.float32
    leave()

"""DDP and FSDP2 with two processes over gloo."""

from __future__ import annotations

from pathlib import Path

import distributed_training
import pytest
import torch
import torch.multiprocessing as multiprocessing


@pytest.mark.timeout(90)
@pytest.mark.parametrize("order", ["apply first", "wrap first"])
def test_ddp_keeps_ranks_equal_and_an_infinity_on_one_rank_skips_on_both(tmp_path: Path, order: str) -> None:
    multiprocessing.spawn(distributed_training.ddp, (str(tmp_path / "store"), order), nprocs=2)


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9),
    reason="FSDP2 before torch 2.9 does not run on a CPU here",
)
@pytest.mark.timeout(90)
@pytest.mark.parametrize("default", ["fp16", "bf16"])
def test_fsdp2_gives_the_unsharded_gradients(tmp_path: Path, default: str) -> None:
    multiprocessing.spawn(distributed_training.fsdp2, (str(tmp_path / "store"), default), nprocs=2)

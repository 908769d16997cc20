"""``verify`` on the card that is here: a TF32 twin, measured speed, and the compiled policy itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec import verify
from autoprec.bench.bench import Bench
from autoprec.bench.target import resolve_target
from autoprec.policy import Batch, Policy
from autoprec.tune.study_space import fingerprint_of

pytestmark = pytest.mark.gpu
TINY = str(Path(__file__).parent.parent / "workloads" / "tiny_mlp.py")


@pytest.mark.parametrize("execution", ["eager", "compile"])
def test_a_policy_is_verified_and_timed_on_the_card_that_is_here(tmp_path, execution):
    target = resolve_target(None)
    if "bf16" not in target.precisions:
        pytest.skip(f"{target.name} has no bf16, so TF32 is missing too")
    look = Bench(TINY, target).look()
    size = look.effective_batch
    policy = Policy(
        default="bf16", execution=execution, batch=Batch(effective=size, micro=size), fingerprint=fingerprint_of(look)
    )
    run = verify(policy, TINY, steps=40, seeds=2, tolerance=0.3, out=tmp_path / "out").long_run
    assert run.policy.execution == execution
    assert run.changes == ()
    assert run.status == "passed", run.text
    assert len(run.arm("fp32_tf32").runs) == 2
    assert run.environment.device == torch.cuda.get_device_name()
    assert run.environment.cuda_version == torch.version.cuda
    speeds = {speed.name: speed for speed in run.speeds}
    assert set(speeds) == {"FP32", "stock AMP fp16", "stock AMP bf16", "the policy"}
    assert speeds["FP32"].policy_ratio_low <= speeds["FP32"].policy_ratio <= speeds["FP32"].policy_ratio_high

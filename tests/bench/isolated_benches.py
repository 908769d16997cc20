"""Benches without a model, for the tests of the worker process; light to import, as every worker does it."""

from __future__ import annotations

import os
import signal
import sys
import time

from autoprec.errors import WorkloadError
from autoprec.policy import Batch, Fingerprint, Policy
from autoprec.records import Edge, Environment, Failure, Layer, LayerProfile, Look, Measurement, Profile, Risk

TARGET = "any value that pickles"
FINGERPRINT = Fingerprint.of({"a": "Linear"}, device="cpu", capability=None, torch_version="2", workload_sha256="0")


def policy(micro: int = 8) -> Policy:
    return Policy(default="fp32", batch=Batch(effective=8, micro=micro, accumulation_steps=8 // micro), fingerprint=FINGERPRINT)


ENVIRONMENT = Environment(device="d", capability="9.0", driver="1", torch_version="2", python_version="3", platform="p")
MEASUREMENT = Measurement(
    losses=(2.5, float("inf")),
    step_times_s=(0.1, 0.2),
    speed_origin="predicted",
    batch_samples=8,
    peak_bytes=2**33,
    skipped_steps=2,
    late_skipped_steps=1,
    host_bound=True,
    final_scale=4096.0,
    environment=ENVIRONMENT,
    note="a note",
)
FAILURE = Failure(kind="diverged", message="m", layer="a.b", step=3, traceback="t")
LOOK = Look(
    layers=(Layer(name="a", aliases=("b",), kind="Linear", parameters={"weight": (2, 3)}, ops=("addmm",), calls=2, flops=7),),
    idle=("c",),
    edges=(Edge(producer="a", consumer="b", elements=5),),
    matmul_share=0.5,
    num_parameters=6,
    effective_batch=8,
    micro_batches=(8, 4),
    loss=1.5,
    workload_sha256="0",
    device_name="d",
    capability=None,
    torch_version="2",
)
RISK = Risk(precision="fp16", kind="range", hard=True, text="over 65504")


def profile_of(precisions) -> Profile:
    layer = LayerProfile(
        layer="a",
        time_s=dict.fromkeys(precisions, 0.5),
        time_origin="measured",
        max_output=1e6,
        max_grad=1e-9,
        underflow_share=0.25,
        sensitivity=dict.fromkeys(precisions, 0.125),
        risks=(RISK,),
    )
    return Profile(layers=(layer,), cast_s_per_byte=1e-12, base_step_s=0.1, cost_s=3.0, precisions=precisions)


class Good:
    """Answers with values that use every kind of field."""

    def __init__(self, workload, target):
        self.given = (workload, target)

    def look(self):
        return LOOK

    def profile(self, precisions):
        return profile_of(precisions)

    def window(self, policy, window):
        return MEASUREMENT.model_copy(update={"note": f"{policy.batch.micro} {window.seed} {self.given}"})

    def interleave(self, policies, window):
        return [MEASUREMENT, FAILURE][: len(policies)]


class Broken:
    """Does not come into being."""

    def __init__(self, workload, target):
        raise ValueError(f"no bench for {workload}")


class Misbehaving:
    """Does what the window's purpose says."""

    def __init__(self, workload, target):
        self.calls = 0

    def window(self, policy, window):
        self.calls += 1
        return getattr(self, f"do_{window.purpose}")(policy, window)

    def interleave(self, policies, window):
        return [self.window(policy, window) for policy in policies]

    def look(self):
        os._exit(3)

    def profile(self, precisions):
        raise KeyError("a fault in profile")

    def do_count(self, policy, window):
        return Failure(kind="unsupported", message=str(self.calls), step=window.seed)

    def do_exit(self, policy, window):
        print("last words of the model", flush=True)
        os._exit(7)

    def do_kill(self, policy, window):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segfault(self, policy, window):
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_hang(self, policy, window):
        time.sleep(600)

    def do_user_error(self, policy, window):
        raise WorkloadError("what was given", hint="what to do")

    def do_hang_aloud(self, policy, window):
        print("about to wait")
        time.sleep(600)

    def do_hang_with_helper(self, policy, window):
        print(f"helper {start_helper()}")
        time.sleep(600)

    def do_exit_with_helper(self, policy, window):
        start_helper(5)
        os._exit(7)

    def do_unsendable(self, policy, window):
        return lambda: None

    def do_pid(self, policy, window):
        return Failure(kind="unsupported", message=str(os.getpid()))

    def do_open_files(self, policy, window):
        return Failure(kind="unsupported", message=str(open_files()))

    def do_path(self, policy, window):
        return Failure(kind="unsupported", message=os.pathsep.join(sys.path))

    def do_bug(self, policy, window):
        return 1 / 0

    def do_dead_device(self, policy, window):
        return Failure(kind="crashed", message="CUDA error: device-side assert triggered")

    def do_prints(self, policy, window):
        print("noise" * 10000)
        sys.stderr.write("noise")
        return Failure(kind="unsupported", message="quiet")


def start_helper(seconds: float = 600) -> int:
    """A forked process, which holds everything open that its parent does."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))

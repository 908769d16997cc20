"""Which dtype every traced operation would have under a policy, and which casts that takes.

Follows each value through the trace: autocast's op lists where a layer is under autocast, the island's rules where it is fp32 or
pure. A backward operation computes in the dtype of the forward operation whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from autoprec.bench.attribution import LOSS
from autoprec.bench.ops import cast_rule
from autoprec.bench.optrace import Op, OpTrace, Value
from autoprec.policy import Precision

Dtype = Literal["fp32", "fp16", "bf16"]
BYTES: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
_LOW: dict[Precision, Dtype] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp16_pure": "fp16", "bf16_pure": "bf16"}


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One operation under a policy.

    Attributes:
        dtype: what it computes in and answers in.
        casts: elements of each cast made for it in the forward pass; the backward pass casts as many gradients back.
        cast_bytes: bytes those forward casts read and write for tensors that grow with the batch.
        weight_cast_bytes: the same for tensors that do not.
    """

    dtype: Dtype
    casts: int = 0
    cast_bytes: int = 0
    weight_cast_bytes: int = 0


@dataclass
class _State:
    dtypes: dict[int, Dtype] = field(default_factory=dict)
    cast_done: set[tuple[str, int, Dtype]] = field(default_factory=set)

    def of(self, value: Value) -> Dtype:
        return self.dtypes.get(value.id, "fp32")


def plan_dtypes(trace: OpTrace, precision_of: Callable[[str], Precision]) -> list[PlannedOp]:
    """The dtype and casts of every operation of the trace, in its order, where each layer runs in ``precision_of(layer)``."""
    state = _State()
    plan: list[PlannedOp] = []
    for op in trace.ops:
        planned = _plan(op, "fp32" if op.layer == LOSS else precision_of(op.layer), state, plan)
        plan.append(planned)
        if op.kind != "view":
            for value in op.outputs:
                if value.floating:
                    state.dtypes[value.id] = planned.dtype
    return plan


def loss_needs_float32(trace: OpTrace) -> bool:
    """Whether the loss does arithmetic on the model's outputs that autocast leaves in half.

    Where its first operation on them is one that autocast computes in float32 itself (cross-entropy, say), the model need not cast
    them before: log_softmax reads half and answers in float32, and the model's own cast would cost memory traffic twice.
    """
    outputs: set[int] = set()
    for op in trace.ops:
        if op.phase == "backward":
            continue
        if op.layer != LOSS:
            outputs |= {value.id for value in op.outputs if value.floating}
        elif any(value.id in outputs for value in op.inputs):
            if op.kind in ("view", "copy"):
                outputs |= {value.id for value in op.outputs if value.floating}
            elif cast_rule(op.name) == "widest" and any(value.floating for value in op.outputs):
                return True
    return False


def _plan(op: Op, precision: Precision, state: _State, plan: list[PlannedOp]) -> PlannedOp:
    floats = [value for value in op.inputs if value.floating]
    if op.phase == "backward" and not op.recomputed:
        return PlannedOp(plan[op.forward].dtype if op.forward >= 0 else _widest(floats, state))
    if op.kind in ("view", "copy"):
        return PlannedOp(_widest(floats, state))
    dtype, rule = _compute_dtype(op, precision, floats, state)
    if rule == "widest":
        return PlannedOp(dtype)
    return _with_casts(op, precision, dtype, floats, state)


def _compute_dtype(op: Op, precision: Precision, floats: list[Value], state: _State) -> tuple[Dtype, str]:
    low = _LOW[precision]
    if precision == "fp32" or precision.endswith("_pure"):
        return low, "island"
    rule = cast_rule(op.name)
    if rule == "lower":
        return low, rule
    if rule == "float32":
        return "fp32", rule
    # A norm kernel reads half activations with float32 parameters and answers in half.
    found = _widest(floats[:1] if op.kind == "norm" else floats, state)
    # What enters a bf16 island in fp16 is cast at its border.
    return (low if (found, low) == ("fp16", "bf16") else found), rule


def _widest(floats: list[Value], state: _State) -> Dtype:
    """Type promotion: tensors with dimensions decide; single numbers only where there is nothing else."""
    deciding = [value for value in floats if value.shape] or floats
    kinds = {state.of(value) for value in deciding}
    return kinds.pop() if len(kinds) == 1 else "fp32"


def _with_casts(op: Op, precision: Precision, dtype: Dtype, floats: list[Value], state: _State) -> PlannedOp:
    casts = moved = fixed = 0
    island = precision == "fp32" or precision.endswith("_pure")
    for value in floats:
        source = state.of(value)
        if source == dtype:
            continue
        # Autocast casts a parameter once per forward and an activation for every use; an island casts at its border, once.
        cached = island or value.origin == "parameter"
        key = (op.layer if island else "", value.id, dtype)
        if cached and key in state.cast_done:
            continue
        if cached:
            state.cast_done.add(key)
        casts += 1
        size = value.elements * (BYTES[source] + BYTES[dtype])
        moved, fixed = (moved + size, fixed) if value.batched else (moved, fixed + size)
    return PlannedOp(dtype, casts, moved, fixed)

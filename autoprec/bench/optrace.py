"""The operations of one training step as plain values: what ran, for which layer, on what shapes. No tensor is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autoprec.bench.ops import HEAVY, NOT_WORK, OpKind

Origin = Literal["parameter", "buffer", "data", "made"]
Phase = Literal["forward", "backward"]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
}  # fmt: skip
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor an operation read or wrote.

    Attributes:
        id: same for all views of one piece of memory; a new result gets a new one.
        shape: its shape.
        dtype: name of its dtype, such as ``float32``.
        elements: distinct elements in memory (an expanded tensor counts once).
        origin: a parameter, a buffer, the batch, or made by an operation.
        batched: whether its size grows with the batch.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    elements: int
    origin: Origin
    batched: bool

    @property
    def floating(self) -> bool:
        """True for real floating-point tensors, whose dtype a policy may change."""
        return self.dtype in FLOATING

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in the dtype it had in the trace."""
        return ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched operation.

    Attributes:
        layer: the layer that issued it; ``<loss>`` outside every module; the root is ``""``.
        name: base name, such as ``addmm``.
        kind: class of work.
        phase: part of the forward or of the backward pass.
        inputs: tensors read.
        outputs: tensors written.
        flops: floating-point operations of matmuls, convolutions, attention and RNNs; 0 for the rest.
        forward: index of the forward operation whose gradient this one computes, or -1.
        recomputed: a forward operation run again inside the backward pass (activation checkpointing).
        draws: it draws random numbers.
    """

    layer: str
    name: str
    kind: OpKind
    phase: Phase
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    flops: int = 0
    forward: int = -1
    recomputed: bool = False
    draws: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written, in the dtypes of the trace."""
        return sum(value.elements * value.item_bytes for value in (*self.inputs, *self.outputs))

    @property
    def is_work(self) -> bool:
        """True for floating-point work: no view, no copy of layout, no pure integer operation."""
        return self.kind not in NOT_WORK and any(value.floating or value.dtype.startswith("complex") for value in self.outputs)

    @property
    def is_heavy(self) -> bool:
        """True for matmuls, convolutions, attention and RNNs."""
        return self.kind in HEAVY


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward pass, and the index of the operation that needs it (-1: unknown)."""

    value: Value
    op: int


@dataclass(frozen=True)
class OpTrace:
    """One FP32 training step of ``samples`` samples, without the optimizer's.

    Attributes:
        ops: operations in order.
        saved: activations kept for the backward pass.
        samples: samples in the traced batch.
        num_parameters: elements of all trained parameters.
        num_parameter_tensors: how many tensors they are.
        optimizer_state_bytes: what the optimizer keeps after its first step.
    """

    ops: tuple[Op, ...]
    saved: tuple[Saved, ...]
    samples: int
    num_parameters: int
    num_parameter_tensors: int
    optimizer_state_bytes: int

    @property
    def total_flops(self) -> int:
        """Floating-point operations of forward and backward together."""
        return sum(op.flops for op in self.ops)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Layers with forward work, in order of their first operation; ``<loss>`` included."""
        return tuple(dict.fromkeys(op.layer for op in self.ops if op.phase == "forward" and op.is_work))

    def saved_bytes(self, index: int) -> int:
        """Bytes that the operation at ``index`` keeps for the backward pass."""
        return sum(kept.value.elements * kept.value.item_bytes for kept in self.saved if kept.op == index)

    def work(self) -> Iterator[tuple[int, Op]]:
        """Index and operation, without views and layout-free bookkeeping."""
        return ((index, op) for index, op in enumerate(self.ops) if op.kind != "view")


def elements_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Distinct elements of a tensor: dimensions with stride 0 (expanded) count once."""
    return math.prod(size for size, stride in zip(shape, strides, strict=True) if stride != 0)

"""Which layer an operation belongs to, in the forward and in the backward pass.

Forward: a stack of the modules that are running, kept by module hooks. Backward: autograd numbers its nodes in order of creation,
so the numbers at which modules were entered and left tell which layer made the node that is running. Activation checkpointing
recomputes a forward inside the backward pass: the stack is then not empty and wins.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from autoprec.policy import Backend
from autoprec.runtime.backend import set_flags
from autoprec.runtime.layers import aliases, named_layers

LOSS = "<loss>"

_C: Any = torch._C
_LAST_NODE = 2**63


def layer_names(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module with all the dotted names it is registered under, the first one first; wrappers are looked through."""
    named = named_layers(model)
    names: dict[nn.Module, tuple[str, ...]] = {module: (name,) for name, module in named.items()}
    for alias, first in aliases(model).items():
        if alias != first:
            names[named[first]] = (*names[named[first]], alias)
    return names


def _owner(name: str) -> str:
    """A parametrization (weight_norm and the like) works for the module whose weight it computes."""
    return name.partition("parametrizations")[0].rstrip(".") if "parametrizations" in name.split(".") else name


def created_nodes() -> int:
    """How many autograd nodes this thread has numbered so far."""
    return int(_C._autograd._get_sequence_nr())


def running_node() -> int | None:
    """Sequence number of the autograd node this thread is running; None outside a backward pass."""
    node = _C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


class LayerStack:
    """The modules that are running now, by name, and who made each autograd node.

    Use as a context manager around forward, loss and backward; it installs process-wide module hooks and removes them again.
    Subclasses may override ``entered`` and ``left``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: _owner(names[0]) for module, names in layer_names(model).items()}
        self._stack: list[tuple[str, BaseException | None]] = []
        self._marks: dict[int, tuple[list[int], list[str]]] = {}
        self._outer_task: int | None = None
        self._handles: list[Any] = []
        self.calls: dict[str, int] = {}
        self.order: list[str] = []
        self.raised_in: str | None = None
        self._raised: BaseException | None = None

    def __enter__(self) -> LayerStack:
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._exit, always_call=True),
        ]
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()

    @property
    def inside(self) -> bool:
        """True while a module runs."""
        return bool(self._stack)

    @property
    def current(self) -> str:
        """Name of the innermost module that runs, or of the layer whose autograd node runs; ``<loss>`` where neither does."""
        if self._stack:
            return self._stack[-1][0]
        node = running_node()
        return LOSS if node is None else self.maker_of(node)

    def maker_of(self, node: int) -> str:
        """The layer that made the autograd node with this sequence number.

        Numbers are per thread. Nodes of the outermost backward pass come from the thread that ran the forward; those of a nested
        one (re-entrant checkpointing) were made by the thread that runs it.
        """
        task = int(_C._current_graph_task_id())
        if self._outer_task is None or task < 0:
            self._outer_task = task if task >= 0 else None
        thread = threading.get_ident()
        nested = task >= 0 and task != self._outer_task and thread in self._marks
        return self.maker_of_number(node, thread if nested else None)

    def maker_of_number(self, node: int, thread: int | None = None) -> str:
        """The layer that made the node numbered ``node`` by a thread; by the thread of the forward pass where none is named."""
        if node < 0 or node >= _LAST_NODE:
            return LOSS
        numbers, makers = self._marks[thread if thread is not None else next(iter(self._marks))]
        index = bisect_right(numbers, node) - 1
        return makers[index] if index >= 0 else LOSS

    def _mark(self) -> None:
        numbers, makers = self._marks.setdefault(threading.get_ident(), ([], []))
        name = self._stack[-1][0] if self._stack else LOSS
        numbers.append(created_nodes())
        makers.append(name)

    def entered(self, name: str) -> None:
        """Called when a module starts; ``name`` is the layer it counts as."""

    def left(self, name: str) -> None:
        """Called when a module ends, by return or by error."""

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        outer = self._stack[-1][0] if self._stack else LOSS
        name = self._names.get(module, outer)
        self._stack.append((name, sys.exc_info()[1]))
        if module in self._names:
            if name not in self.calls:
                self.order.append(name)
            self.calls[name] = self.calls.get(name, 0) + 1
        self._mark()
        self.entered(name)

    def _exit(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not self._stack:
            return
        name, before = self._stack.pop()
        error = sys.exc_info()[1]
        if error is not None and error is not before and error is not self._raised:
            self._raised, self.raised_in = error, name
        self._mark()
        self.left(name)


@contextmanager
def float32_reference() -> Iterator[None]:
    """Float32 means float32: TF32 and everything else a policy could switch is off inside, as it was afterwards."""
    undo = set_flags(Backend())
    try:
        yield
    finally:
        undo()

"""Which layer is at fault: runs a failed window again, watching, and names the module and the operation.

Watching costs a check of every operation's result, so it happens only after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from autoprec.runtime.tree import iter_tensors

# Operations that put infinities where somebody wants them: masks and constants.
_MASKS = frozenset({
    "fill_", "full", "full_like", "masked_fill", "masked_fill_", "new_full", "new_tensor", "tensor", "triu", "triu_", "tril",
    "tril_", "where", "zeros", "ones", "__setitem__", "empty", "empty_like", "new_empty", "load", "copy_",
})  # fmt: skip
# What answers no tensor of its own or only asks about one.
_QUESTIONS = frozenset({"__get__", "__set__", "isfinite", "isnan", "isinf", "is_floating_point", "size", "dim"})


@dataclass(frozen=True)
class Culprit:
    """The first thing that went wrong: the innermost module that was running (None outside the model) and the operation."""

    layer: str | None
    op: str
    dtype: str

    def describe(self) -> str:
        """For a message."""
        where = "outside the model" if self.layer is None else f"in '{self.layer}'" if self.layer else "in the model itself"
        kind = f" ({self.dtype})" if self.dtype else ""
        return f"{self.op}{kind} {where}" if self.op else where


class Watch(TorchFunctionMode):
    """Follows which module runs and what every operation returns.

    Attributes:
        first_bad: the first operation that made a value infinite or NaN out of finite ones.
        last: the last operation that was begun.
    """

    def __init__(self, model: nn.Module, *, values: bool) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._values = values
        self._stack: list[str] = []
        self.first_bad: Culprit | None = None
        self.last: Culprit | None = None

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watches inside; on an exception the stack stays as it was when it was raised."""
        entered = module_hooks.register_module_forward_pre_hook(self._enter)
        left = module_hooks.register_module_forward_hook(self._leave)
        try:
            with self:
                yield self
        finally:
            entered.remove()
            left.remove()

    def forget(self) -> None:
        """Begins anew, for the next step."""
        self._stack.clear()
        self.first_bad = self.last = None

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._names:
            self._stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in self._names and self._stack:
            self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _QUESTIONS:
            return func(*args, **(kwargs or {}))
        given = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.is_floating_point()]
        dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
        self.last = Culprit(self._stack[-1] if self._stack else None, name, dtype)
        was_fine = self._values and self.first_bad is None and name not in _MASKS and all(_finite(tensor) for tensor in given)
        out = func(*args, **(kwargs or {}))
        if was_fine:
            for tensor in iter_tensors(out):
                if tensor.is_floating_point() and not _finite(tensor):
                    made = str(tensor.dtype).removeprefix("torch.")
                    self.first_bad = Culprit(self.last.layer, name, made)
        return out

    def raised_in(self) -> Culprit | None:
        """The operation that was running when an exception came, in the innermost module that had not returned."""
        if self.last is None:
            return None
        return Culprit(self._stack[-1] if self._stack else None, self.last.op, self.last.dtype)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def who_raised(model: nn.Module, run: Callable[[], Any]) -> Culprit | None:
    """Runs something that raises and names the module and operation; None where it does not raise this time."""
    watch = Watch(model, values=False)
    try:
        with watch.watching():
            run()
    except Exception:  # the very exception that is looked into; its text is known already
        return watch.raised_in()
    return None


def first_bad_parameter(model: nn.Module) -> str | None:
    """The module of the last parameter, in the model's order, that is not finite: backward goes from last to first."""
    bad = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    return bad[-1].rpartition(".")[0] if bad else None

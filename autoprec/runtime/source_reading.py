"""What a class's code says about its attributes, read from the bytecode without running it.

Lets a pure island know beforehand which buffers a module replaces by new tensors, whether it may write any in place, and which
weights of its children it reads past their own forward. Code reached by other ways than names (``setattr``, a function in a
variable) is not seen.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

# Written by their callee although no name or operator says so.
_WRITING_NAMES = frozenset({"data", "batch_norm", "instance_norm"})


def _function_of(value: Any) -> types.FunctionType | None:
    value = getattr(value, "fget", value)  # a property
    value = getattr(value, "__func__", value)  # a static or class method
    value = getattr(value, "__wrapped__", value)  # behind a decorator
    return value if isinstance(value, types.FunctionType) else None


def _methods_of(kind: type) -> Iterator[types.FunctionType]:
    """Every method a class has of its own or inherits, up to ``nn.Module``, without ``__init__``."""
    for base in kind.__mro__:
        if base is not nn.Module and issubclass(base, nn.Module):
            for name, value in vars(base).items():
                function = _function_of(value)
                if function is not None and name != "__init__":
                    yield function


def _code_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions written inside it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


# Reading bytecode takes milliseconds a class, and a search applies hundreds of policies to one model.
_CODES_REMEMBERED = 1024


def assigned_names(kind: type) -> frozenset[str]:
    """Attributes that a method other than ``__init__`` sets to something new; ``self.count += 1`` works in place and is none."""
    return frozenset(name for function in _methods_of(kind) for code in _code_of(function) for name in _assigned_in(code))


@lru_cache(_CODES_REMEMBERED)
def _assigned_in(code: types.CodeType) -> frozenset[str]:
    found = set()
    in_place = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and not in_place:
            found.add(instruction.argval)
        # "a.b += c" is BINARY_OP with an argument that prints as "+=", a SWAP, and STORE_ATTR.
        if instruction.opname == "BINARY_OP":
            in_place = instruction.argrepr.endswith("=")
        elif instruction.opname not in ("SWAP", "EXTENDED_ARG"):
            in_place = False
    return frozenset(found)


def may_write_in_place(kind: type) -> bool:
    """Whether the class's methods, or functions they name outside torch, hold anything that writes a tensor in place."""
    pending = [function for function in _methods_of(kind) if not function.__name__.endswith("reset_parameters")]
    seen: set[types.FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in _code_of(function):
            keywords = any(isinstance(constant, tuple) and "out" in constant for constant in code.co_consts)
            if keywords or any(_writes(instruction) for instruction in dis.get_instructions(code)):
                return True
            pending += _named_functions(code.co_names, function.__globals__)
    return False


def _named_functions(names: tuple[str, ...], known: dict[str, Any]) -> Iterator[types.FunctionType]:
    """Functions outside torch that code names, directly or as ``module.function``."""
    values = [known[name] for name in names if name in known]
    modules = [value for value in values if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] != "torch"]
    for value in (*values, *(getattr(module, name, None) for module in modules for name in names)):
        called = _function_of(value)
        if called is not None and (called.__module__ or "").split(".")[0] != "torch":
            yield called


def _writes(instruction: dis.Instruction) -> bool:
    if instruction.opname == "STORE_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")):
        return True
    name = instruction.argval
    if not isinstance(name, str) or not instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")):
        return False
    return name in _WRITING_NAMES or (name.endswith("_") and not name.endswith("__"))


def attribute_chains(kind: type) -> frozenset[tuple[str, ...]]:
    """Dotted reads of two attributes and more in the class's methods: ``self.embed.weight`` gives ``("embed", "weight")``."""
    return frozenset(chain for function in _methods_of(kind) for code in _code_of(function) for chain in _chains_in(code))


@lru_cache(_CODES_REMEMBERED)
def _chains_in(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    found = set()
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR":
            chain.append(instruction.argval)
            continue
        if instruction.opname == "EXTENDED_ARG":
            continue
        if len(chain) > 1:
            found.add(tuple(chain))
        chain = []
    return frozenset(found)

"""Which modules of a model are swapped for a policy, and what each becomes."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autoprec.errors import PolicyError
from autoprec.policy import Policy, Precision
from autoprec.runtime.dtypes import HALF_DTYPES
from autoprec.runtime.islands import Island
from autoprec.runtime.layers import aliases, named_layers, own_shapes
from autoprec.runtime.padding import check_paddable
from autoprec.runtime.source_reading import attribute_chains, may_write_in_place

_FUSED_KINDS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

Plan = list[tuple[str, nn.Module, Island]]


def plan_islands(root: nn.Module, policy: Policy, names: dict[str, str]) -> Plan:
    """The modules to swap and what each becomes. The root is first; members of pure islands follow their boundary.

    Raises:
        PolicyError: a padded layer cannot be padded, or a TorchScript module would need a precision of its own.
    """
    named = named_layers(root)
    settings = {names[name]: setting.precision for name, setting in policy.layers.items() if name in names}
    multiples = {names[name]: multiple for name, multiple in policy.padding.layers.items() if name in names}
    for name in multiples:
        check_paddable(name, named[name])
    idle = {name for alias, name in aliases(root).items() if alias in policy.fingerprint.idle}
    main = _main_dtype(policy)
    slow = _slow_paths(named, policy.default, settings)
    plan = []
    for name, module in named.items():
        island = _island(name, module, policy.default, settings, idle=name in idle)
        precision = island.precision
        island = Island(
            precision=precision,
            outside=island.outside,
            rises=policy.outputs == "fp32" if not name else island.outside == "fp32",
            masters=not name and policy.weights == "half_with_masters",
            cached=precision is None or HALF_DTYPES.get(precision) in (None, main),
            multiple=multiples.get(name, 0),
            slow_path=name in slow,
        )
        if island != Island(outside=island.outside, rises=island.rises):
            plan.append((name, module, island))
    _check_no_script(plan)
    inherited = {name: _inherited(name, policy.default, settings) for name in named}
    return _with_reads(plan, named, inherited)


def _check_no_script(plan: Plan) -> None:
    for name, module, island in plan:
        if isinstance(module, torch.jit.ScriptModule):
            raise PolicyError(
                f"'{name or 'the model itself'}' is a TorchScript module and would need the precision {island.precision}: its "
                "compiled code takes none of its own, only the autocast around it.",
                hint="Build it without torch.jit.script, or give it and everything around it one of fp32, fp16 and bf16.",
            )


def _with_reads(plan: Plan, named: dict[str, nn.Module], inherited: dict[str, Precision]) -> Plan:
    """Adds to pure islands the weights below them that their own code reads: a head tied by hand to ``self.embed.weight``.

    A container without parameters becomes an island for that alone.
    """
    islands = {module: island for _, module, island in plan}
    chains: dict[type, frozenset[tuple[str, ...]]] = {}
    found = []
    for name, module in named.items():
        island = islands.get(module, Island())
        precision = island.precision or inherited[name]
        reads: set[tuple[str, ...]] = set()
        if precision in ("fp16_pure", "bf16_pure") and module._modules and "parametrizations" not in name.split("."):
            if type(module) not in chains:
                chains[type(module)] = attribute_chains(type(module))
            for chain in chains[type(module)]:
                path, owner = _parameter_at(module, chain)
                if owner is not module and owner in islands and islands[owner].precision == precision:
                    reads.add(path)
        if reads:
            outside = island.outside if module in islands else inherited[name]
            island = dataclasses.replace(island, precision=precision, outside=outside, reads=tuple(sorted(reads)))
        if precision in ("fp16_pure", "bf16_pure") and module in islands and _has_float_buffer(module):
            island = dataclasses.replace(island, writes=_may_write(module))
        if module in islands or reads:
            found.append((name, module, island))
    return found


def _may_write(module: nn.Module) -> bool:
    """Whether a module's code or that of a module below it, which it may hand a buffer to, writes tensors in place."""
    below = {type(child) for child in module.modules() if not type(child).__module__.startswith("torch.nn.")}
    return any(may_write_in_place(kind) for kind in below | {type(module)})


def _parameter_at(module: nn.Module, chain: tuple[str, ...]) -> tuple[tuple[str, ...], nn.Module]:
    """Path and owner of the parameter that a chain of attributes starting at a module leads to; the module itself if to none."""
    owner = module
    for depth, name in enumerate(chain):
        child = owner._modules.get(name)
        if child is not None:
            owner = child
            continue
        if owner._parameters.get(name) is not None and not isinstance(owner, (_NormBase, nn.RNNBase)):
            return chain[: depth + 1], owner
        break
    return (), module


def _island(name: str, module: nn.Module, default: Precision, settings: dict[str, Precision], *, idle: bool) -> Island:
    if not name:
        return Island(precision=default)
    outside = _inherited(name.rpartition(".")[0], default, settings)
    if name in settings:
        # The same as around it needs no boundary of its own.
        same = settings[name] == outside and not outside.endswith("_pure")
        return Island(precision=None if same else settings[name], outside=outside)
    # Below a pure boundary each module casts its own parameters, so that checkpointing recomputes it alike.
    if outside.endswith("_pure") and "parametrizations" not in name.split("."):
        computed = torch.nn.utils.parametrize.is_parametrized(module)
        if (own_shapes(module) and (computed or not idle)) or _has_float_buffer(module):
            return Island(precision=outside, outside=outside)
    return Island(outside=outside)


def _has_float_buffer(module: nn.Module) -> bool:
    return any(buffer is not None and buffer.dtype == torch.float32 for buffer in module._buffers.values())


def _inherited(name: str, default: Precision, settings: dict[str, Precision]) -> Precision:
    while name:
        if name in settings:
            return settings[name]
        name = name.rpartition(".")[0]
    return default


def _main_dtype(policy: Policy) -> torch.dtype:
    """The half type whose weight casts may be cached; the cache is keyed by the weight alone and cannot serve two."""
    return HALF_DTYPES.get(policy.default, torch.float16 if policy.needs_loss_scale else torch.bfloat16)


def _slow_paths(named: dict[str, nn.Module], default: Precision, settings: dict[str, Precision]) -> set[str]:
    """Encoders that hold anything but plain fp32: their fused inference path would skip the policy."""
    low = {name for name in named if _inherited(name, default, settings) != "fp32"}
    return {
        name
        for name, module in named.items()
        if isinstance(module, _FUSED_KINDS) and any(not name or f"{other}.".startswith(f"{name}.") for other in low)
    }

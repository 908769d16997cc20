"""CUDA's autocast rules on a CPU, so that a CPU can show what a GPU's mixed precision would compute.

CPU autocast keeps softmax, normalisation, exponentials and sums in half; CUDA's does them in float32. And the CPU's own half
kernels are slow. Inside ``cuda_autocast_rules()``:

* operations of CUDA's lower-precision list round their inputs to the autocast dtype, compute in float32 (as tensor cores
  accumulate) and round the result; gradients are rounded at the same places, so they overflow and underflow as on a GPU;
* operations of CUDA's float32 list compute and answer in float32, those of its promote list in the widest type given;
* with autocast off, the same heavy operations and norms on half tensors (the ``*_pure`` layers) also compute in float32 and
  answer in half;
* ``binary_cross_entropy`` under autocast raises, as it does on CUDA.

This is the only place that touches torch's private dispatcher API. The rules sit on a dispatch key that torch reserves for the
autocast of a device nobody has here; the key is switched on for the calling thread only, lies above the CPU's own autocast rules,
and autograd's backward pass on a CPU inherits it.

Source: the op lists in torch 2.9 to 2.14, ``aten/src/ATen/autocast_mode.h``; a test compares them with the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

_KEY = "AutocastIPU"
_C: Any = torch._C
_LOW = (torch.float16, torch.bfloat16)

# On the float32 list of torch 2.14 but not of 2.11. Source: rms_norm under CUDA autocast answers in bf16 on torch 2.11 (seen on an
# H200) and in float32 by 2.14's list; when it joined in between is an assumption.
_SINCE_2_12 = ("rms_norm",) if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else ()

# Cast to the autocast dtype on CUDA. RNNs are there as _cudnn_rnn; a CPU reaches them one level up.
LOWER_PRECISION = (
    "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear",
    "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
)  # fmt: skip
_LOWER_ON_CPU_TOO = (
    "_addmm_activation", "conv1d.padding", "conv2d.padding", "conv3d.padding", "gru.data", "gru.input", "lstm.data",
    "lstm.input", "rnn_relu.data", "rnn_relu.input", "rnn_tanh.data", "rnn_tanh.input",
)  # fmt: skip

# Computed and answered in float32 on CUDA.
FLOAT32 = (
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "dist", "erfinv", "exp", "expm1", "frobenius_norm.dim", "group_norm", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "layer_norm", "linalg_matrix_sqrth", "log", "log10", "log1p", "log2", "logsumexp",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss",
    "nll_loss2d", "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm", "nuclear_norm.dim", "pdist", "poisson_nll_loss",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm", *_SINCE_2_12, "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softplus", "tan", "triplet_margin_loss", "upsample_bicubic2d",
    "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d",
)  # fmt: skip

_NORMS = frozenset({"layer_norm", "native_layer_norm", "group_norm", "rms_norm"})

# The same, but a dtype that the caller names wins.
FLOAT32_UNLESS_GIVEN = (
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.int", "prod",
    "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
)  # fmt: skip

# Computed in the widest type of their arguments on CUDA.
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot",
)  # fmt: skip

# Forbidden under autocast on CUDA.
BANNED = ("binary_cross_entropy",)

# Half kernels that CUDA has and a CPU lacks or is not sure to have: computed in float32 and answered in the input's type.
_HALF_ON_CUDA_ONLY = (
    "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "fractional_max_pool2d", "fractional_max_pool3d",
    "grid_sampler_2d", "grid_sampler_3d", "max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip

Kernel = Callable[..., Any]


def _map(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``cast`` to the tensors of an operation's argument or result (tensors, lists and tuples of them)."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, cast) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _raise_low(value: Tensor) -> Tensor:
    return value.float() if value.dtype in _LOW else value


def _rounded_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Float32 values that ``dtype`` can hold; both casts are on autograd's tape, so gradients are rounded too."""

    def cast(value: Tensor) -> Tensor:
        if value.dtype in (torch.float32, *_LOW):
            return value.to(dtype).float()
        return value

    return cast


def _answer_in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda value: value.to(dtype) if value.dtype == torch.float32 else value


def _shared_low_dtype(args: Any) -> torch.dtype | None:
    """The one half type of all floating arguments, or None where they are float32 or mixed (torch then says what is wrong)."""
    kinds = {value.dtype for value in _tensors(args) if value.is_floating_point()}
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= set(_LOW) else None


def _op_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Below:
    """Leaves the autocast keys for the duration of a call, so that an operation's own kernel runs."""

    def __init__(self, *keys: str) -> None:
        self._keys = _C.DispatchKeySet(getattr(_C.DispatchKey, keys[0]))
        for key in keys[1:]:
            self._keys = self._keys | _C.DispatchKeySet(getattr(_C.DispatchKey, key))

    def __call__(self) -> Any:
        return _C._ExcludeDispatchKeyGuard(self._keys)


_below_both = _Below(_KEY, "AutocastCPU")


def own_arithmetic() -> AbstractContextManager[None]:
    """For arithmetic on a pass that is no part of it: no rule and no autocast of the CPU applies inside, which saves their cost."""
    return _below_both()  # type: ignore[no-any-return]


_below_cpu_autocast = _Below("AutocastCPU")


def _lower_precision(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype: torch.dtype | None = torch.get_autocast_dtype("cpu")
        else:
            dtype = _shared_low_dtype((args, tuple(kwargs.values())))
        with _below_both():
            if dtype is None:
                return op(*args, **kwargs)
            cast = _rounded_to(dtype)
            result = op(*_map(args, cast), **{key: _map(value, cast) for key, value in kwargs.items()})
            return _map(result, _answer_in(dtype))

    return kernel


def _float32(op: Any) -> Kernel:
    # CUDA's norm kernels add up in float32 whatever they read; the CPU's add the parameters' gradients up in half.
    accumulates = op._schema.name.rpartition("::")[2] in _NORMS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        cast = torch.is_autocast_enabled("cpu")
        low = _shared_low_dtype((args, tuple(kwargs.values()))) if accumulates and not cast else None
        with _below_both():
            if low is not None:
                return _map(op(*_map(args, _raise_low), **kwargs), _answer_in(low))
            if not cast:
                return op(*args, **kwargs)
            return op(*_map(args, _raise_low), **{key: _map(value, _raise_low) for key, value in kwargs.items()})

    return kernel


def _float32_unless_given(op: Any) -> Kernel:
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") or (args[position] if len(args) > position else None)
        cast = torch.is_autocast_enabled("cpu") and given is None
        with _below_both():
            return op(_raise_low(args[0]) if cast else args[0], *args[1:], **kwargs)

    return kernel


def _promote(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = _shared_low_dtype((args, tuple(kwargs.values())))
        promoting = torch.is_autocast_enabled("cpu")  # asked before the guard, inside which it reads as off
        with _below_both():
            if low is None and not promoting:
                return op(*args, **kwargs)
            result = op(*_map(args, _raise_low), **{key: _map(value, _raise_low) for key, value in kwargs.items()})
            return result if low is None else _map(result, _answer_in(low))

    return kernel


def _through_float32(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = _shared_low_dtype((args, tuple(kwargs.values())))
        with _below_both():
            if low is None:
                return op(*args, **kwargs)
            return _map(op(*_map(args, _raise_low), **kwargs), _answer_in(low))

    return kernel


def _banned(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA. "
                "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe."
            )
        with _below_both():
            return op(*args, **kwargs)

    return kernel


def _is_registered(name: str) -> bool:
    """False for operations that the installed torch does not have."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return found is not None and (overload or "default") in found.overloads()


def _native(op: Any) -> Kernel:
    """For what only the CPU's autocast lists: as if it were not listed. The parts of a composite still follow CUDA's rules."""
    composite = op.has_kernel_for_dispatch_key(_C.DispatchKey.CompositeImplicitAutograd)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if composite:
            return op.decompose(*args, **kwargs)
        with _below_both():
            return op(*args, **kwargs)

    return kernel


def _listed_on_cpu_only() -> set[str]:
    ours = {*LOWER_PRECISION, *_LOWER_ON_CPU_TOO, *FLOAT32, *FLOAT32_UNLESS_GIVEN, *PROMOTE, *BANNED, *_HALF_ON_CUDA_ONLY}
    names = (name for name in _C._dispatch_get_all_op_names() if name.startswith("aten::"))
    listed = {name[6:] for name in names if _C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")}
    return listed - ours


def _kernels() -> dict[str, Kernel]:
    """A kernel for every operation of the lists that the installed torch has."""
    kinds: list[tuple[Iterable[str], Callable[[Any], Kernel]]] = [
        ((*LOWER_PRECISION, *_LOWER_ON_CPU_TOO), _lower_precision),
        (FLOAT32, _float32),
        (FLOAT32_UNLESS_GIVEN, _float32_unless_given),
        (PROMOTE, _promote),
        (BANNED, _banned),
        (_HALF_ON_CUDA_ONLY, _through_float32),
        (_listed_on_cpu_only(), _native),
    ]
    return {name: build(_op_of(name)) for names, build in kinds for name in names if _is_registered(name)}


def _register() -> tuple[Any, ...]:
    """Registers the kernels; they stay idle until a thread switches their key on."""
    library: Any = torch.library.Library
    libraries = []
    if not _C._dispatch_has_backend_fallback(getattr(_C.DispatchKey, _KEY)):
        fallback = library("_", "IMPL", _KEY)
        fallback.fallback(torch.library.fallthrough_kernel, _KEY)
        libraries.append(fallback)
    rules = library("aten", "IMPL", _KEY)
    for name, kernel in _kernels().items():
        rules.impl(name, kernel)
    return (*libraries, rules)


# Registering takes some tens of milliseconds, so it happens once a process, when the rules are first entered.
_registered: list[Any] = []


def _switch(on: bool) -> None:
    _C._dispatch_tls_set_dispatch_key_included(_KEY, on)
    _C._dispatch_tls_set_dispatch_key_excluded(_KEY, not on)


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """CPU autocast follows CUDA's lists while active, and half matmuls and convolutions accumulate in float32.

    Acts on the calling thread, backward passes started from it included; may be nested. On exit everything is as before.
    """
    if not _registered:
        _registered.extend(_register())
    outer = bool(_C._dispatch_tls_is_dispatch_key_included(_KEY))
    _switch(True)
    try:
        yield
    finally:
        _switch(outer)

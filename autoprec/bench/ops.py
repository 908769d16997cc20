"""What kind of work an aten operation is: its class, what CUDA's autocast does with it, and its floating-point operations.

Names are those a dispatch mode sees, below composite operations: ``addmm`` rather than ``linear``, ``_softmax`` rather than
``softmax``. In-place and out variants count as their functional form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

OpKind = Literal["matmul", "conv", "attention", "rnn", "norm", "reduction", "elementwise", "gather", "linalg", "copy", "view"]
CastRule = Literal["lower", "float32", "widest"]

HEAVY: frozenset[OpKind] = frozenset({"matmul", "conv", "attention", "rnn"})
NOT_WORK: frozenset[OpKind] = frozenset({"copy", "view"})

_MATMUL = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv addr dot vdot linear matmul chain_matmul linalg_multi_dot linalg_vecdot "
    "_addmm_activation mkldnn_linear _scaled_mm _mkl_linear".split()
)
_CONV = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose", "conv_tbc", "conv_depthwise", "slow_conv", "_conv_")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_native_multi_head_attention", "flex_att")
_RNN = ("_cudnn_rnn", "mkldnn_rnn", "_thnn_fused", "lstm", "gru_", "miopen_rnn", "rnn_tanh", "rnn_relu")
_NORM = ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")
_LINALG = (
    "_fft_", "fft_", "linalg_", "_linalg", "lu_solve", "lu_unpack", "cholesky", "_cholesky", "logdet", "slogdet", "det",
    "inverse", "triangular_solve", "ormqr", "geqrf", "qr", "svd", "_svd", "pinverse", "lstsq", "symeig",
    "matrix_exp", "stft", "istft",
)  # fmt: skip
_NOT_LINALG = frozenset("linalg_vector_norm linalg_vecdot linalg_multi_dot linalg_cross linalg_matrix_norm".split())
_REDUCTION = frozenset(
    "sum mean prod amax amin max min var std var_mean std_mean norm linalg_vector_norm logsumexp _softmax _log_softmax "
    "softmax log_softmax cumsum cumprod logcumsumexp nansum nanmean _adaptive_avg_pool2d _adaptive_avg_pool3d aminmax "
    "adaptive_max_pool2d adaptive_max_pool3d nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy _cdist_forward _pdist_forward dist median kthvalue topk sort _embedding_bag segment_reduce "
    "_softmax_backward_data _log_softmax_backward_data _ctc_loss _safe_softmax".split()
)
_POOL = (
    "avg_pool",
    "max_pool",
    "adaptive_pool",
    "fractional_max_pool",
    "upsample_",
    "_upsample_",
    "grid_sampler",
    "im2col",
    "col2im",
)
_GATHER = frozenset("embedding embedding_dense_backward embedding_renorm index_add scatter_add scatter_reduce".split())
_COPY = frozenset(
    "_to_copy copy clone contiguous empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like "
    "new_zeros ones ones_like new_ones full full_like new_full fill zero arange linspace eye scalar_tensor rand rand_like randn "
    "randn_like randint randperm normal uniform random cat stack constant_pad_nd index select_scatter slice_scatter "
    "slice_backward select_backward as_strided_scatter diagonal_scatter index_put _unsafe_index _index_put_impl "
    "_unsafe_index_put "
    "index_select gather scatter masked_select roll flip repeat repeat_interleave tril triu one_hot _pack_padded_sequence "
    "_pad_packed_sequence _reshape_copy _unsafe_view lift_fresh lift_fresh_copy detach alias _fw_primal view_as_real "
    "view_as_complex complex real imag isfinite isnan isinf _local_scalar_dense item nonzero unfold_backward diag_embed trace "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d resize "
    "_resize_output "
    "pixel_shuffle pixel_unshuffle channel_shuffle meshgrid record_stream set_ _cudnn_init_dropout_state".split()
)

# In place, these read nothing of what was there, which may be uninitialised memory.
RANDOM = frozenset("bernoulli normal uniform exponential cauchy log_normal geometric random".split())

# Cast to the autocast dtype under CUDA's autocast, besides every HEAVY kind.
_LOWER = frozenset("prelu _prelu_kernel".split())
# Computed and answered in float32 under CUDA's autocast.
# Source: aten/src/ATen/autocast_mode.h (torch 2.9 to 2.14), by the names these operations have below composite ones.
_FLOAT32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus native_layer_norm layer_norm "
    "native_group_norm group_norm _fused_rms_norm rms_norm norm linalg_vector_norm cosine_similarity nll_loss_forward "
    "nll_loss2d_forward mse_loss smooth_l1_loss huber_loss l1_loss kl_div binary_cross_entropy_with_logits soft_margin_loss "
    "multi_margin_loss multilabel_margin_loss_forward dist _pdist_forward _cdist_forward renorm logsumexp sum prod cumsum "
    "cumprod _softmax _log_softmax softmax log_softmax upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d".split()
)
# Draws and returns what it drew, or what it made of it.
DRAWING = RANDOM | frozenset(
    "native_dropout rand_like randn_like randint_like rrelu_with_noise rand randn randint randperm "
    "multinomial poisson binomial".split()
)
# What grows or shrinks fast, and what adds up many elements: worth a warning in pure half precision.
EXP_LIKE = frozenset("exp expm1 sinh cosh pow softplus logsumexp reciprocal rsqrt tan cumprod prod square".split())
DEEP_SUMS = frozenset("sum cumsum nansum linalg_vector_norm norm mse_loss logcumsumexp".split())


def base_name(func: Any) -> str:
    """``aten.relu_.default`` -> ``relu``: the operation without its namespace, overload and in-place mark."""
    name: str = func._schema.name.rpartition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") and name != "set_" else name


def draws_random_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers: noise, dropout, or attention with dropout in its kernel."""
    name = base_name(func)
    if "attention" not in name:
        return name in DRAWING
    place = next((index for index, argument in enumerate(func._schema.arguments) if argument.name == "dropout_p"), None)
    if place is None:
        return False
    return float(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0.0


def kind_of(name: str, *, is_view: bool = False) -> OpKind:
    """Classifies an operation by its base name; backward operations count as their forward's kind."""
    if is_view:
        return "view"
    if name in _MATMUL:
        return "matmul"
    if name in _COPY:
        return "copy"
    if name in _GATHER:
        return "gather"
    if name in _REDUCTION or any(part in name for part in _POOL):
        return "reduction"
    for kind, parts in _FAMILIES:
        if any(part in name for part in parts):
            return kind
    return "linalg" if name.startswith(_LINALG) and name not in _NOT_LINALG and not name.startswith("detach") else "elementwise"


_FAMILIES: tuple[tuple[OpKind, tuple[str, ...]], ...] = (
    ("attention", _ATTENTION),
    ("conv", _CONV),
    ("norm", _NORM),
    ("rnn", _RNN),
)


def cast_rule(name: str) -> CastRule:
    """What CUDA's autocast does: cast to the low dtype, cast to float32, or compute in the widest type of the arguments."""
    if name in _FLOAT32:
        return "float32"
    if name in _LOWER or kind_of(name) in HEAVY:
        return "lower"
    return "widest"


def no_half_kernel(name: str) -> bool:
    """True for FFT and linear algebra, which have no half kernel or one only for some sizes.

    Source: torch's "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision" and
    "Low precision dtypes not supported" of logdet, inverse and friends.
    """
    return kind_of(name) == "linalg"


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations (two per multiply-add) of a matmul, convolution, attention or RNN; 0 for the rest.

    Source: ``torch.utils.flop_counter`` where it knows the operation. It counts nothing for RNNs and for the CPU's fused
    attention; those are counted here as the matmuls they stand for (a backward pass as twice the forward).
    """
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    name = base_name(func)
    if "attention_for_cpu" in name or "attention_math" in name:
        return _attention_flops(args, backward=name.endswith("_backward"))
    if kind_of(name) == "rnn":
        return _rnn_flops(args, backward=name.endswith("_backward"))
    if name in ("mv", "addmv", "dot", "vdot", "addr"):
        return 2 * max(value.numel() for value in args if isinstance(value, Tensor))
    return 0


def _attention_flops(args: Sequence[Any], *, backward: bool) -> int:
    """q k^T and its product with v; the backward pass recomputes the first and needs four more."""
    query, key, value = args[1:4] if backward else args[:3]
    *batch, rows, width = query.shape
    pairs = rows * key.shape[-2]
    for size in batch:
        pairs *= size
    first, second = 2 * pairs * width, 2 * pairs * value.shape[-1]
    return int(3 * first + 2 * second if backward else first + second)


def _rnn_flops(args: Sequence[Any], *, backward: bool) -> int:
    """Each step multiplies every row by every weight matrix once; a fused cell multiplies nothing itself."""
    sequence, weights = args[0], list(args[1]) if isinstance(args[1], (list, tuple)) else args[1:3]
    if sequence.dim() < 3 and not isinstance(args[1], (list, tuple)):
        return 0
    rows: int = sequence.numel() // max(sequence.shape[-1], 1)
    forward: int = 2 * rows * sum(value.numel() for value in weights if isinstance(value, Tensor) and value.dim() == 2)
    return 2 * forward if backward else forward


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [leaf for value in values for leaf in _flat(value)]
    return [values]


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in an operation's arguments or result, in order; nested lists and tuples are searched."""
    if isinstance(values, dict):
        values = list(values.values())
    return [leaf for leaf in _flat(values) if isinstance(leaf, torch.Tensor)]

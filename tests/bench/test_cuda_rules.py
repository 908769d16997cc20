"""CUDA's autocast rules on a CPU: types, numerics, gradients, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.bench import cuda_rules
from autoprec.bench.cuda_rules import cuda_autocast_rules

HALVES = (torch.float16, torch.bfloat16)


def _half_autocast(dtype: torch.dtype = torch.float16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).float()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) * 0.5
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
POSITIVE = X.abs() + 0.5
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(3))
KERNEL = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(4))
CUBE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(5))
LABELS = torch.tensor([0, 1, 2, 3])

TO_HALF: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W.to(x.dtype), torch.ones(8).to(x.dtype)),
    "matmul": lambda x: x @ W.to(x.dtype),
    "mm": lambda x: torch.mm(x, W.to(x.dtype)),
    "addmm": lambda x: torch.addmm(torch.ones(8).to(x.dtype), x, W.to(x.dtype)),
    "bmm": lambda x: torch.bmm(CUBE.to(x.dtype), CUBE.to(x.dtype).transpose(1, 2)),
    "einsum": lambda x: torch.einsum("bi,io->bo", x, W.to(x.dtype)),
    "conv2d": lambda x: F.conv2d(IMAGE.to(x.dtype), KERNEL.to(x.dtype), padding=1),
    "conv2d with padding by name": lambda x: F.conv2d(IMAGE.to(x.dtype), KERNEL.to(x.dtype), padding="same"),
    "conv_transpose2d": lambda x: F.conv_transpose2d(IMAGE.to(x.dtype), KERNEL.to(x.dtype)),
    "attention": lambda x: F.scaled_dot_product_attention(CUBE.to(x.dtype), CUBE.to(x.dtype), CUBE.to(x.dtype)),
}
TO_FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 1).log(),
    "pow": lambda x: x**2,
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "sum": lambda x: x.sum(),
    "sum over a dim": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(),
    "norm": lambda x: x.norm(),
    "norm over a dim": lambda x: x.norm(dim=-1),
    "softplus": F.softplus,
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x, dim=-1),
    "interpolate": lambda x: F.interpolate(IMAGE.to(x.dtype), scale_factor=2),
}
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "add": lambda x: x + x,
    "mean": lambda x: x.mean(),
    "max_pool2d": lambda x: F.max_pool2d(IMAGE.to(x.dtype), 2),
    "reflection pad": lambda x: F.pad(IMAGE.to(x.dtype), (1, 1, 1, 1), mode="reflect"),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "tensordot": lambda x: torch.tensordot(x, W.to(x.dtype), dims=1),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", TO_HALF)
@pytest.mark.parametrize("given", [torch.float32, None])
def test_heavy_operations_answer_in_the_autocast_dtype(name: str, dtype: torch.dtype, given: torch.dtype | None) -> None:
    with cuda_autocast_rules(), _half_autocast(dtype):
        assert TO_HALF[name](X.to(given or dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", TO_FLOAT32)
def test_operations_of_the_float32_list_answer_in_float32(name: str, dtype: torch.dtype) -> None:
    with cuda_autocast_rules(), _half_autocast(dtype):
        result = TO_FLOAT32[name](X.to(dtype))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, TO_FLOAT32[name](_rounded(X, dtype)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", KEPT)
def test_unlisted_operations_keep_the_type_they_are_given(name: str, dtype: torch.dtype) -> None:
    with cuda_autocast_rules(), _half_autocast(dtype):
        assert KEPT[name](X.to(dtype)).dtype == dtype
        assert KEPT[name](X).dtype == torch.float32


def test_mixed_arguments_promote_to_float32() -> None:
    with cuda_autocast_rules(), _half_autocast():
        assert (X.half() + X).dtype == torch.float32
        assert torch.cat([X.half(), X]).dtype == torch.float32
        assert torch.addcmul(X.half(), X, X.half()).dtype == torch.float32
        assert torch.dot(X[0].half(), X[0]).dtype == torch.float32


def test_a_dtype_that_the_caller_names_wins() -> None:
    with cuda_autocast_rules(), _half_autocast():
        assert X.half().sum(dtype=torch.float16).dtype == torch.float16
        assert X.half().softmax(-1, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", TO_HALF)
def test_numbers_are_the_rounded_float32_result_of_rounded_inputs(name: str, dtype: torch.dtype) -> None:
    if name == "attention":
        expected = F.scaled_dot_product_attention(*(_rounded(CUBE, dtype) for _ in range(3))).to(dtype)
    else:
        rounded = {"W": W, "IMAGE": IMAGE, "KERNEL": KERNEL, "CUBE": CUBE}
        with pytest.MonkeyPatch.context() as patch:
            for constant, value in rounded.items():
                patch.setitem(globals(), constant, _rounded(value, dtype))
            expected = TO_HALF[name](_rounded(X, dtype)).to(dtype)
    with cuda_autocast_rules(), _half_autocast(dtype):
        under_autocast = TO_HALF[name](X)
    with cuda_autocast_rules():
        pure = TO_HALF[name](X.to(dtype))
    assert torch.equal(under_autocast, expected)
    assert torch.equal(pure, expected)


@pytest.mark.parametrize("pure", [False, True])
def test_an_output_over_65504_becomes_infinite(pure: bool) -> None:
    big = torch.full((1, 64), 100.0)
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=torch.float16, enabled=not pure):
        result = F.linear(big.half() if pure else big, big.half() if pure else big)
    assert result.item() == float("inf")


def test_sums_inside_a_matmul_do_not_overflow_when_the_result_fits() -> None:
    row = torch.cat([torch.full((1, 8), 200.0), torch.full((1, 8), -200.0)], 1)
    with cuda_autocast_rules(), _half_autocast():
        assert F.linear(row, torch.full((1, 16), 200.0)).item() == 0.0


def test_weight_gradients_are_rounded_to_half_and_land_in_float32() -> None:
    layer = nn.Linear(8, 8)
    with cuda_autocast_rules():
        with _half_autocast():
            out = layer(X)
        out.backward(torch.full_like(out, 0.1))
    expected = (torch.full((8, 4), 0.1).half().float() @ _rounded(X, torch.float16)).half().float()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, expected)


def test_gradients_overflow_to_infinity_as_half_would() -> None:
    layer = nn.Linear(8, 1)
    with cuda_autocast_rules():
        with _half_autocast():
            out = layer(torch.full((2048, 8), 30.0))
        out.backward(torch.full_like(out, 100.0))
    assert layer.weight.grad is not None
    assert layer.weight.grad.isinf().all()


def test_small_gradients_underflow_to_zero_as_half_would() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    with cuda_autocast_rules():
        with _half_autocast():
            out = second(first(torch.ones(1, 4)))
        (out.float() * 2.0**-30).sum().backward()
    assert first.weight.grad is not None
    assert not first.weight.grad.any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_and_learn_in_half(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = kind(8, 8, batch_first=True)
    plain = layer(CUBE)[0]
    with cuda_autocast_rules():
        with _half_autocast(dtype):
            out, _ = layer(CUBE)
        out.float().square().sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), plain, rtol=0.05, atol=0.05)
    assert layer.weight_hh_l0.grad is not None
    assert layer.weight_hh_l0.grad.isfinite().all()
    assert layer.weight_hh_l0.grad.abs().sum() > 0


def test_a_packed_sequence_runs_in_half() -> None:
    layer = nn.LSTM(8, 8, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(CUBE, torch.tensor([3, 2]), batch_first=True)
    with cuda_autocast_rules(), _half_autocast():
        out, _ = layer(packed)
    assert out.data.dtype == torch.float16


def test_binary_cross_entropy_raises_as_on_cuda() -> None:
    probabilities = torch.full((3,), 0.5)
    with cuda_autocast_rules():
        with _half_autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(probabilities, probabilities)
        assert F.binary_cross_entropy(probabilities, probabilities).item() == pytest.approx(0.6931, abs=1e-4)
        with _half_autocast():
            assert F.binary_cross_entropy_with_logits(probabilities.half(), probabilities).dtype == torch.float32


def test_plain_float32_is_equal_to_the_bit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    plain = F.cross_entropy(model(X), LABELS)
    with cuda_autocast_rules():
        assert torch.equal(F.cross_entropy(model(X), LABELS), plain)


def test_complex_and_double_tensors_are_left_alone() -> None:
    with cuda_autocast_rules(), _half_autocast():
        assert (X.double() @ W.double()).dtype == torch.float64
        assert (X.to(torch.cfloat) @ W.to(torch.cfloat)).dtype == torch.complex64


def test_multi_head_attention_and_batch_norm_train_in_half() -> None:
    torch.manual_seed(0)
    attention, norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.BatchNorm2d(4)
    with cuda_autocast_rules():
        with _half_autocast():
            attended, _ = attention(CUBE, CUBE, CUBE, need_weights=False)
            normed = norm(F.conv2d(IMAGE, KERNEL))
        (attended.float().sum() + normed.float().square().sum()).backward()
    assert attended.dtype == normed.dtype == torch.float16
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_the_rules_nest_and_leave_nothing_behind() -> None:
    with cuda_autocast_rules():
        with cuda_autocast_rules(), _half_autocast():
            assert X.half().softmax(-1).dtype == torch.float32
        with _half_autocast():
            assert X.half().softmax(-1).dtype == torch.float32
    with _half_autocast(torch.bfloat16):
        assert X.bfloat16().softmax(-1).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), cuda_autocast_rules():
        raise ZeroDivisionError
    with _half_autocast(torch.bfloat16):
        assert X.bfloat16().exp().dtype == torch.bfloat16


def test_the_lists_agree_with_the_installed_torch() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    ours = {
        *cuda_rules.LOWER_PRECISION, *cuda_rules.FLOAT32, *cuda_rules.FLOAT32_UNLESS_GIVEN, *cuda_rules.PROMOTE,
        *cuda_rules.BANNED,
    }  # fmt: skip
    assert registered - ours <= {"_cudnn_rnn", "cat", "stack"}

"""Norms, masks, sums and factorisations as people write them: each kind is pinned where it breaks, whichever member it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from profiled import WIDTH, hard, most_sensitive, profile_of
from torch import nn

from autoprec.policy import PRECISIONS

FP16 = {"fp16", "fp16_pure"}
HALF = {*FP16, "bf16", "bf16_pure"}
LEAST = torch.finfo(torch.float32).min


class Scores(nn.Module):
    """Attention between 4 parts of a sample, each of which sees those before it; the first sees nothing."""

    def forward(self, x):
        parts = F.linear(x, torch.eye(WIDTH, dtype=x.dtype)).view(-1, 4, WIDTH // 4)
        masked = torch.triu(torch.ones(4, 4, dtype=torch.bool))
        weights = torch.softmax(self.mask(parts @ parts.transpose(1, 2), masked), -1)
        return (weights @ parts).flatten(1)


class FillsWithTheLeast(Scores):
    def mask(self, scores, masked):
        return scores.masked_fill(masked, LEAST)


class AssignsInPlace(Scores):
    def mask(self, scores, masked):
        return scores.masked_fill_(masked, -1e9)


class AddsLow(Scores):
    """-1e9 becomes -inf in fp16 and the row that sees nothing NaN; bf16 holds it."""

    def mask(self, scores, masked):
        return scores + (masked.float() * -1e9).to(scores.dtype)


class AddsTheLeastLow(Scores):
    """The least float32 rounds to -inf in bf16 too."""

    def mask(self, scores, masked):
        return scores + (masked.float() * LEAST).to(scores.dtype)


class Selects(Scores):
    def mask(self, scores, masked):
        return torch.where(masked, torch.tensor(-1e9), scores)


@pytest.mark.parametrize(
    ("mask", "pinned"),
    [(FillsWithTheLeast, HALF), (AssignsInPlace, FP16), (AddsLow, FP16), (AddsTheLeastLow, HALF), (Selects, FP16)],
)
def test_a_mask_is_pinned_to_the_module_that_applies_it_where_its_constant_does_not_fit(mask, pinned):
    """NVIDIA/apex#1052, huggingface/lerobot#710."""
    layers = profile_of(mask)
    for precision in PRECISIONS[1:]:
        assert hard(layers, precision) == ({"middle"} if precision in pinned else set()), precision


def test_a_layer_that_raises_says_which_operation_of_whose_file_did():
    text = next(risk.text for risk in profile_of(FillsWithTheLeast, ("bf16",))["middle"].risks)
    assert "without overflow" in text
    assert "at 'return scores.masked_fill(masked, LEAST)' (test_profile_by_hand.py, line " in text


class OwnNorm(nn.Module):
    """Normalises values around 800, whose squares pass 65504."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.norm(800 * x) * self.weight


class BySquares(OwnNorm):
    def norm(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-9)


class ByVariance(OwnNorm):
    def norm(self, x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


class OverTheBatch(OwnNorm):
    def norm(self, x):
        return (x - x.mean(0)) / torch.sqrt(x.var(0) + 1e-5)


class ByDotProduct(OwnNorm):
    def norm(self, x):
        return x * torch.rsqrt(torch.einsum("bi,bi->b", x, x)[:, None] / WIDTH + 1e-9)


class ByPower(OwnNorm):
    """CUDA's autocast computes pow and rsqrt in float32, so this one is safe but in pure fp16."""

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9)


@pytest.mark.parametrize(
    ("norm", "pinned"),
    [(BySquares, FP16), (ByVariance, FP16), (OverTheBatch, FP16), (ByDotProduct, FP16), (ByPower, {"fp16_pure"})],
)
def test_a_norm_of_ones_own_is_a_layer_and_kept_out_of_fp16_where_its_squares_overflow(norm, pinned):
    """All-zero output is finite: huggingface/transformers#10956, keras-team/keras#22586."""
    layers = profile_of(norm)
    for precision in PRECISIONS[1:]:
        assert hard(layers, precision) == ({"middle"} if precision in pinned else set()), precision
    if "fp16" in pinned:
        assert most_sensitive(layers, "fp16") == "middle"
        assert layers["middle"].sensitivity["fp16"] > 0.5


class EmptyRows(nn.Module):
    """A norm over rows of which every fourth is empty; its eps of 1e-9 is 0 in fp16, and 0 / 0 is NaN."""

    def forward(self, x):
        x = x * (torch.arange(len(x)) % 4 != 0)[:, None]
        return self.norm(x)


class EmptySquares(EmptyRows):
    def norm(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-9)


class EmptyMeans(EmptyRows):
    def norm(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + 1e-9)


@pytest.mark.parametrize("norm", [EmptySquares, EmptyMeans])
def test_a_norm_whose_eps_is_zero_in_fp16_is_kept_out_of_it(norm):
    layers = profile_of(norm)
    assert hard(layers, "fp16") == hard(layers, "fp16_pure") == {"middle"}
    assert hard(layers, "bf16") == hard(layers, "bf16_pure") == set()


class Overlap(nn.Module):
    """A ratio of sums over 131,072 values near 1."""

    def forward(self, x):
        p = torch.sigmoid(x + 9).repeat(1, 131072 // WIDTH)
        return x * (self.total(p * p) / self.total(p))

    def total(self, p):
        return p.sum(-1, keepdim=True)


class OverlapByMatmul(Overlap):
    def total(self, p):
        return p @ torch.ones(p.shape[1], 1, dtype=p.dtype)


class OverlapByEinsum(Overlap):
    def total(self, p):
        return torch.einsum("bi,bi->b", p, torch.ones_like(p))[:, None]


@pytest.mark.parametrize(("overlap", "pinned"), [(Overlap, {"fp16_pure"}), (OverlapByMatmul, FP16), (OverlapByEinsum, FP16)])
def test_a_sum_of_more_than_65504_is_pinned_where_autocast_does_not_raise_it(overlap, pinned):
    """qubvel-org/segmentation_models.pytorch#463: inf / inf is NaN for large images only."""
    layers = profile_of(overlap, batch_size=8)
    for precision in PRECISIONS[1:]:
        assert hard(layers, precision) == ({"middle"} if precision in pinned else set()), precision


FACTORISED = {
    "svd": lambda c: torch.linalg.svdvals(c)[:, 0],
    "eigh": lambda c: torch.linalg.eigvalsh(c)[:, 0],
    "cholesky": lambda c: torch.linalg.cholesky(c)[:, 0, 0],
    "qr": lambda c: torch.linalg.qr(c)[1][:, 0, 0],
    "solve": lambda c: torch.linalg.solve(c, c[:, 0])[:, 0],
    "inverse": lambda c: torch.inverse(c)[:, 0, 0],
    "pinv": lambda c: torch.linalg.pinv(c)[:, 0, 0],
    "logdet": torch.logdet,
    "matrix_exp": lambda c: torch.matrix_exp(c / 8)[:, 0, 0],
    "nuclear norm": lambda c: torch.linalg.matrix_norm(c, "nuc"),
    "fft of 3": lambda c: torch.fft.rfft(c[:, 0, :3]).abs()[:, 1],
    "fft of 4": lambda c: torch.fft.fft(c[:, 0]).abs()[:, 1],
    "stft": lambda c: torch.stft(c.flatten(1), 8, window=torch.ones(8), return_complex=True).abs()[:, 1, 1],
}


@pytest.mark.parametrize("name", FACTORISED)
def test_factorisations_and_transforms_stay_in_fp32_whatever_the_probe_of_this_size_said(name):
    """cuFFT takes half for powers of two only, so what passes here may fail for another length: advimman/lama#360."""

    class Factorised(nn.Module):
        def forward(self, x):
            parts = x.view(-1, 4, WIDTH // 4)
            return x + torch.tanh(FACTORISED[name](parts @ parts.transpose(1, 2) + torch.eye(4, dtype=x.dtype)))[:, None]

    layers = profile_of(Factorised)
    for precision in HALF:
        assert hard(layers, precision) == {"middle"}, precision
    assert any("no half-precision kernel" in risk.text for risk in layers["middle"].risks)

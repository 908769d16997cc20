"""Sizes and differences: exact where it matters, in whatever layout and range the tensors come."""

from __future__ import annotations

import math

import pytest
import torch

from autoprec.bench.magnitudes import Scratch, norm, read, serves_float32
from autoprec.bench.tape import HALF, LOST, Call, Size, Tape


def squares(tensor):
    return tensor.double().square().sum().item()


@pytest.mark.parametrize("elements", [0, 1, 4095, 8192, 10_000_001])
def test_a_norm_in_float32_is_right_to_six_digits_however_many_elements_there_are(elements):
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    assert norm(tensor).item() ** 2 == pytest.approx(squares(tensor), rel=2e-6)


def test_a_norm_takes_any_layout():
    tensor = torch.randn(4, 8, 33, 33, generator=torch.Generator().manual_seed(0))
    layouts = {
        "channels last": tensor.to(memory_format=torch.channels_last),
        "transposed": tensor.transpose(0, 1),
        "every other": tensor[:, ::2],
        "expanded": tensor[:1].expand(4, 8, 33, 33),
    }
    for name, laid_out in layouts.items():
        assert norm(laid_out).item() ** 2 == pytest.approx(squares(laid_out), rel=2e-6), name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("elements", [3, 20_000])
def test_a_norm_is_not_finite_where_one_value_is_not(value, elements):
    tensor = torch.zeros(elements)
    tensor[-1] = value
    assert not norm(tensor).isfinite()


@pytest.mark.parametrize(
    ("size", "elements", "serves"),
    [(1.0, 100, True), (0.0, 100, False), (1e-13, 1, True), (1e-13, 100, False), (1e19, 1, False), (math.inf, 1, False)],
)
def test_float32_serves_where_neither_squares_nor_errors_leave_its_range(size, elements, serves):
    assert serves_float32(size, elements) is serves


def test_scalars_of_several_types_are_read_in_their_order():
    scalars = [torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64), torch.tensor(True), torch.tensor(-4.0)]
    assert list(read(scalars)) == [1.5, 2.0, 1.0, -4.0]
    assert list(read([])) == []


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exact", [torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_difference_is_taken_in_the_wide_type_and_leaves_its_operands_alone(low, exact, wide):
    left, right = torch.tensor([[1.0, 2.5, 3.0]]).to(low), torch.tensor([[1.0, 2.0, 1e-4]]).to(exact)
    difference = Scratch().minus(left, right, wide, factor=4.0)
    assert difference.dtype == wide
    assert torch.equal(difference, left.to(wide) - 4 * right.to(wide))
    assert left.tolist() == [[1.0, 2.5, 3.0]] and right[0, 1] == 2.0


def test_differences_of_two_layouts_pair_the_same_elements():
    scratch, exact = Scratch(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    low = exact.contiguous().half()
    for first, second in ((low, exact), (low, exact[:, ::2]), (exact, low)):
        first = first[:, ::2] if second.shape != first.shape else first
        assert torch.equal(scratch.minus(first, second, torch.float32), first.float() - second.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 8192.0])
def test_a_product_is_rounded_once_and_is_nobody_elses_memory(dtype, factor):
    scratch, exact = Scratch(), torch.tensor([1.0, 1e-9, 1 / 3, 9.0])
    product = scratch.times(exact, factor, dtype)
    scratch.times(exact + 1, factor, dtype)
    assert torch.equal(product, (exact * factor).to(dtype))
    product.zero_()
    assert exact[0] == 1.0


def sealed(*values):
    tape = Tape(calls={"layer": [Call(outputs=list(values))]})
    tape.seal()
    return tape


def test_a_tape_knows_the_size_of_the_finite_values_of_what_it_recorded():
    plain, tiny, broken = torch.tensor([3.0, 4.0]), torch.full((4,), 1e-30), torch.tensor([1.0, math.inf, math.nan])
    tape = sealed(plain, tiny, broken, torch.zeros(2))
    assert tape.size(plain) == Size(25.0, is_finite=True, elements=2)
    assert tape.size(tiny).squares == pytest.approx(4e-60, rel=1e-6)
    assert tape.size(broken) == Size(1.0, is_finite=False, elements=3)
    assert tape.size(plain).sums_in(torch.float32) == torch.float32
    assert tape.size(tiny).sums_in(torch.float32) == tape.size(broken).sums_in(torch.float32) == torch.float64
    assert tape.size(plain).sums_in(torch.float64) == torch.float64


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("exponent", range(-30, 20, 2))
def test_a_half_type_keeps_what_its_rounding_leaves_whether_the_size_decides_or_a_look(dtype, exponent):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2.0**exponent
    lost = squares(value.to(dtype).float() - value)
    assert sealed(value).keeps(dtype, value) == (lost <= LOST**2 * squares(value))


def test_fp16_does_not_keep_an_infinity_it_makes_and_keeps_one_that_was_there():
    large, infinite = torch.tensor([1.0, 7e4]), torch.tensor([1.0, math.inf])
    tape = sealed(large, infinite)
    assert not tape.keeps(torch.float16, large)
    assert tape.keeps(torch.float16, infinite) and tape.keeps(torch.bfloat16, large)

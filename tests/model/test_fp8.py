"""Quantised rows: scales, round trips, and rows that are zero, huge or not finite."""

from __future__ import annotations

import pytest
import torch

from counterpoint.model.fp8 import FP8, FP8_MAX, ROWS_PER_BLOCK, quantise_rows, to_fp8

HALF_STEP = (
    2.0**-4
)  # e4m3 has three bits behind the leading one: rounding moves a number by at most this share of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 64), (ROWS_PER_BLOCK + 3, 32)])
def test_there_and_back(rows: int, size: int, dtype: torch.dtype):
    torch.seed()
    x = (torch.randn(rows, size) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    got = quantise_rows(x)
    assert (
        got.values_RK.dtype == FP8 and got.values_RK.is_contiguous() and got.shape == (rows, size)
    )
    smallest = got.scale_R[:, None] * 2.0**-10  # half of the least number that e4m3 has
    assert bool(
        ((got.dequantise() - x.float()).abs() <= x.float().abs() * HALF_STEP + smallest).all()
    )


def test_the_largest_of_a_row_is_the_largest_number():
    x = torch.randn(5, 48) * torch.tensor([1e-6, 1e-2, 1.0, 100.0, 3e4])[:, None]
    got = quantise_rows(x)
    assert got.values_RK.float().abs().amax(1).tolist() == [FP8_MAX] * 5
    assert torch.allclose(got.scale_R, x.abs().amax(1) / FP8_MAX)


def test_a_row_does_not_depend_on_its_neighbours():
    x = torch.randn(3, 64)
    alone, together = (
        quantise_rows(x[1:2]),
        quantise_rows(torch.stack([x[0] * 1e6, x[1], x[2] * 1e-6])),
    )
    assert torch.equal(alone.values_RK.float(), together.values_RK.float()[1:2])
    assert torch.equal(alone.scale_R, together.scale_R[1:2])


def test_zeros_stay_zeros():
    assert torch.equal(quantise_rows(torch.zeros(2, 16)).dequantise(), torch.zeros(2, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float):
    x = torch.randn(3, 16)
    x[1, 5] = bad
    wide = quantise_rows(x).dequantise()
    assert not bool(wide[1].isfinite().all())
    assert bool(wide[[0, 2]].isfinite().all())


def test_beyond_the_largest_it_saturates():
    assert to_fp8(torch.tensor([449.0, 1e9, -1e9, 447.0])).float().tolist() == [
        448.0,
        448.0,
        -448.0,
        448.0,
    ]
    assert bool(to_fp8(torch.tensor([float("nan")])).float().isnan().all())


def test_a_product_of_quantised_rows_is_near_the_product():
    """What W8A8 costs: each operand is off by up to a sixteenth, the sum over many by far less."""
    torch.seed()
    x, weight = torch.randn(8, 2048), torch.randn(64, 2048) * 0.02
    truth = x @ weight.T
    got = quantise_rows(x).dequantise() @ quantise_rows(weight).dequantise().T
    assert float((got - truth).norm() / truth.norm()) < 0.05

"""Deliberate errors of an estimator."""

from __future__ import annotations

import pytest

from benchmarks.roofline_check import decode
from counterpoint.cost_model.perturbed import Perturbed
from counterpoint.cost_model.roofline import Roofline
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS

LLAMA = PRESETS["llama-3.1-8b"]


ROOFLINE = Roofline(LLAMA, H200)


def test_perturbed_is_a_bounded_lasting_bias():
    wrong, again, other = (
        Perturbed(ROOFLINE, 0.2, seed=1),
        Perturbed(ROOFLINE, 0.2, seed=1),
        Perturbed(ROOFLINE, 0.2, seed=2),
    )
    steps = [(decode(1 << i, 1000, 32, 32), units) for i in range(9) for units in (16, 48, 132)]
    factors = [wrong.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    assert all(0.8 <= factor <= 1.2 for factor in factors)
    assert max(factors) > 1.1 and min(factors) < 0.9
    assert factors == [again.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    assert factors != [other.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    by_units = [
        wrong.seconds(steps[0][0], units) / ROOFLINE.seconds(steps[0][0], units)
        for units in (16, 24, 32, 48)
    ]
    assert len({round(factor, 6) for factor in by_units}) == 4, "another split, another error"
    near = decode(2, 1001, 32, 32), 16
    assert wrong.seconds(*near) / ROOFLINE.seconds(*near) == pytest.approx(factors[3]), (
        "one cell, one factor"
    )


def test_an_error_of_zero_changes_nothing():
    step = decode(8, 1000, 32, 32)
    assert Perturbed(ROOFLINE, 0.0).seconds(step, 64) == ROOFLINE.seconds(step, 64)
    with pytest.raises(ValueError, match="error is 1"):
        Perturbed(ROOFLINE, 1.0)

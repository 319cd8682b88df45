"""Units with work: waves, gaps, and what a profiler would show."""

from __future__ import annotations

import pytest

from benchmarks.roofline_check import decode, prefill
from counterpoint.cost_model.active_units import ActiveUnits
from counterpoint.cost_model.roofline import Roofline
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS

LLAMA = Roofline(PRESETS["llama-3.1-8b"], H200)
ACTIVE = ActiveUnits(LLAMA)


@pytest.mark.parametrize("units", [16, 60, 132])
@pytest.mark.parametrize(
    "work", [prefill(1024, 32, 32, 1), prefill(8192, 8, 32), decode(64, 2000, 32, 32)]
)
def test_no_more_units_work_than_there_are(work, units):
    assert 0 < ACTIVE(work, units) <= units


def test_long_prompts_fill_the_waves_that_short_ones_leave_idle():
    share = {tokens: ACTIVE(prefill(tokens, 32, 32), 132) / 132 for tokens in (128, 512, 16384)}
    assert share[128] < share[512] < share[16384]
    assert share[16384] > 0.9


def test_a_layer_group_has_the_share_of_the_whole():
    whole, part = prefill(4096, 32, 32), prefill(4096, 8, 32)
    assert ACTIVE(part, 132) == pytest.approx(ACTIVE(whole, 132))


def test_a_tiny_decode_is_mostly_gaps():
    small, large = decode(1, 16, 32, 32), decode(128, 4000, 32, 32)
    assert ACTIVE(small, 132) < ACTIVE(large, 132)

"""Devices as numbers."""

from __future__ import annotations

import pytest

from counterpoint.spec.device import H200, PRESETS, Curve, device_spec


def test_a_curve_is_straight_between_points_and_flat_outside():
    curve = Curve(((8, 100.0), (16, 200.0), (32, 240.0)))
    assert [curve.at(units) for units in (1, 8, 12, 16, 24, 32, 99)] == [
        100,
        100,
        150,
        200,
        220,
        240,
        240,
    ]


@pytest.mark.parametrize("spec", PRESETS.values(), ids=lambda spec: spec.name)
def test_presets_are_whole(spec):
    assert spec.peak(spec.dtype) > 0
    for curve in (spec.read_bandwidth, spec.attention.read_bandwidth):
        values = [curve.at(units) for units in range(spec.units + 1)]
        assert values[0] == 0 and values[1] > 0
        assert values == sorted(values), "more units must not read less"
    flops = [units * spec.gemm.efficiency.at(units) for units in range(1, spec.units + 1)]
    assert flops == sorted(flops), "more units must not compute less"
    for units in spec.partitions():
        assert units >= spec.smallest_units and spec.units - units >= spec.smallest_units
    assert spec.source


def test_only_what_was_measured_says_so():
    assert {name for name, spec in PRESETS.items() if spec.measured} == {"h200", "cpu-2"}


def test_datasheet_gpus_read_at_most_what_their_sheet_says():
    for name, most in {"h100": 3.35e12, "a100": 2.039e12, "h20": 4.0e12, "b200": 8.0e12}.items():
        assert 0.85 * most < device_spec(name).read_bandwidth.at(device_spec(name).units) <= most


def test_hopper_splits_in_eights():
    assert H200.partitions()[:3] == (8, 16, 24) and H200.partitions()[-1] == 120


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'h2000'; did you mean 'h200'\?; known: h200, h100, .*cpu-2"
    ):
        device_spec("h2000")
    assert device_spec("H200") is H200


def test_a_cpu_of_any_number_of_cores():
    assert device_spec("cpu-2") == PRESETS["cpu-2"]
    eight = device_spec("cpu-8")
    assert (
        eight.units == 8
        and not eight.measured
        and eight.peak("float16") == 4 * PRESETS["cpu-2"].peak("float16")
    )
    with pytest.raises(ValueError, match="unknown device 'cpu-0'"):
        device_spec("cpu-0")


def test_a_dtype_the_device_lacks_is_named():
    with pytest.raises(ValueError, match=r"a100 has no fp8 .* bfloat16, float16"):
        device_spec("a100").peak("fp8")


def test_a_curve_can_be_a_constant():
    assert Curve(((1, 5.0),)).at(100) == 5.0

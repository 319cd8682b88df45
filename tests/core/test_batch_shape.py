"""BatchShape: constructors and the sum of two shapes."""

from __future__ import annotations

import pytest

from counterpoint.types import BatchShape


def test_constructors_fill_the_sums():
    assert BatchShape.prefill(3, 5, 8, prompts=2) == BatchShape(6, 18, 30, 2, 0, 0, 2, 0, 8, 8)
    assert BatchShape.prefill(3, 5, 8, sampled=False).samples == 0
    assert BatchShape.decode(4, 100, 8) == BatchShape(0, 0, 0, 0, 4, 100, 4, 0, 8, 8)


def test_a_sum_adds_all_but_the_layers():
    mixed = BatchShape.prefill(3, 5, 8) + BatchShape.decode(4, 100, 8)
    assert mixed == BatchShape(3, 9, 15, 1, 4, 100, 5, 0, 8, 8) and mixed.kind == "mixed"


def test_an_empty_shape_adds_nothing_whatever_its_layers():
    prefill = BatchShape.prefill(3, 5, 8)
    assert prefill + BatchShape() == BatchShape() + prefill == prefill


def test_shapes_over_different_layers_have_no_sum():
    with pytest.raises(ValueError, match="different layers"):
        BatchShape.prefill(3, 5, 8).over_layers(0, 4) + BatchShape.decode(4, 100, 8)

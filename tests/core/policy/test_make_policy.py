"""Which policy a configuration gets."""

from __future__ import annotations

import pytest
from engine_harness import make_test_policy


@pytest.mark.parametrize("name", ["multiplex", "auto"])
def test_one_unit_cannot_be_split(name):
    assert len(make_test_policy(name, units=1).lanes) == 1

"""The online cost model: what it learns from steps, and how it forgets."""

from __future__ import annotations

import pytest
from policy_builders import (
    LinearEstimator,
)

from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.types import (
    BatchShape,
    Step,
    StepDone,
)


@pytest.mark.parametrize("truth", [0.5, 2.0])
def test_the_ratio_follows_actual_times_and_the_guard_covers_slow_steps(truth):
    model = OnlineCostModel(LinearEstimator())
    work = BatchShape.decode(4, 400, 6)
    raw = model.seconds(work, 2)
    for i in range(200):
        took = raw * truth * (1.3 if i % 10 == 0 else 1.0)
        model.observe(
            Step(i, 0, i, 0, 6, 2, (), work),
            StepDone(i, 0, started_s=0.0, ended_s=took, units=2),
            None,
        )
    assert model.seconds(work, 2) == pytest.approx(raw * truth, rel=0.1)
    assert model.expected_and_guarded_s(work, 2)[1] >= model.seconds(work, 2)
    ((kind, median, high, steps),) = model.errors()
    assert (kind, steps) == ("decode", 200)
    assert median < 0.1 and high < 0.4


def test_a_broken_reading_changes_little():
    model = OnlineCostModel(LinearEstimator())
    work = BatchShape.decode(1, 10, 6)
    raw = model.seconds(work, 4)
    model.observe(
        Step(1, 0, 1, 0, 6, 4, (), work), StepDone(1, 0, started_s=0.0, ended_s=1e6), None
    )
    assert model.seconds(work, 4) <= 5 * raw
    model.observe(
        Step(2, 0, 2, 0, 6, 4, (), work), StepDone(2, 0, started_s=5.0, ended_s=5.0), None
    )
    model.observe(
        Step(3, 0, 3, 0, 6, 4, (), work),
        StepDone(3, 0, started_s=0.0, ended_s=9.0, error="x"),
        None,
    )
    assert model.seconds(work, 4) <= 5 * raw


def test_one_slow_step_or_an_old_correction_does_not_last():
    model = OnlineCostModel(LinearEstimator())
    works = [BatchShape.decode(n, 400, 6) for n in (1, 2)]
    raw_s = model.seconds(works[0], 4)

    def observe(work: BatchShape, units: int, times: float) -> None:
        took_s = times * model.estimator.seconds(work, units)
        model.observe(
            Step(1, 0, 1, 0, 6, units, (), work),
            StepDone(1, 0, started_s=0.0, ended_s=took_s, units=units),
            None,
        )

    observe(works[0], 4, 20.0)
    assert model.seconds(works[0], 4) == raw_s, (
        "the first of its kind may have waited for what is done once"
    )
    for times in (1.0, 1.0, 1.0, 20.0):
        observe(works[0], 4, times)
    assert model.seconds(works[0], 4) < 1.06 * raw_s
    for _ in range(40):
        observe(works[0], 4, 3.0)
    assert model.seconds(works[0], 4) > 2 * raw_s
    for _ in range(4000):
        observe(works[1], 2, 1.0)
    assert model.seconds(works[0], 4) < 1.05 * raw_s, "nobody knows any more"


def test_a_step_that_was_co_running_for_part_of_its_time_corrects_nothing_wrongly():
    """A decode runs 2 s, for half of it with a prefill that halves its speed, as predicted."""
    model = OnlineCostModel(LinearEstimator(contention=2.0))
    decode = BatchShape.decode(1, 0, 6)  # 1 s alone on all, 4 s on one of four
    prompt = BatchShape.prefill(10, 0, 6)
    one, other = Step(1, 0, 1, 0, 6, 1, (), decode), Step(2, 1, 2, 0, 6, 3, (), prompt)
    beside_s, alone_s = model.seconds(prompt, 3, (decode, 1)), model.seconds(decode, 1)
    together_s = beside_s  # the prompt starts at 0 with the decode, and is done first
    ended_s = together_s + alone_s * (1 - together_s / (2 * alone_s))
    for _ in range(2):  # the first of a kind does not count
        model.observe(other, StepDone(2, 1, started_s=0.0, ended_s=together_s, units=3), one)
        model.observe(one, StepDone(1, 0, started_s=0.0, ended_s=ended_s, units=1), None)
    assert [(ratio, guard) for _, ratio, guard in model.cells()] == [
        (pytest.approx(1.0), pytest.approx(1.0))
    ] * 2
    assert all(high == pytest.approx(0.0, abs=1e-9) for _, _, high, _ in model.errors())


def test_the_guard_of_an_unused_cell_decays():
    model = OnlineCostModel(LinearEstimator())
    mixed = BatchShape.prefill(10, 0, 6) + BatchShape.decode(4, 400, 6)
    quiet = BatchShape.decode(4, 400, 6)
    took_s, alone_s = 3 * model.seconds(mixed, 4), model.seconds(quiet, 4)
    for i in range(1, 5):
        model.observe(
            Step(i, 0, i, 0, 6, 4, (), mixed),
            StepDone(i, 0, started_s=0.0, ended_s=took_s, units=4),
            None,
        )
    expected_s, wary_s = model.expected_and_guarded_s(mixed, 4)
    assert wary_s > 1.1 * expected_s
    for i in range(5, 600):
        model.observe(
            Step(i, 0, i, 0, 6, 4, (), quiet),
            StepDone(i, 0, started_s=0.0, ended_s=alone_s, units=4),
            None,
        )
    expected_s, wary_s = model.expected_and_guarded_s(mixed, 4)
    assert wary_s == pytest.approx(expected_s, rel=0.03)

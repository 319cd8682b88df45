"""When a worker with quarantined pages is restarted."""

from __future__ import annotations

from counterpoint.disagg.role_rebalancer import (
    CancelDrain,
    QuarantineRecovery,
    ReplaceWorker,
    StartDrain,
    WorkerQuarantine,
)


def worker(name: str, share: float, is_drained: bool = False) -> WorkerQuarantine:
    return WorkerQuarantine(name, share, is_drained)


def test_a_worn_worker_empties_and_is_replaced_and_then_the_next():
    wear = QuarantineRecovery(share=0.1, patience_s=30.0)
    both = [worker("d", 0.2), worker("e", 0.3), worker("f", 0.05)]
    assert wear.tick(0.0, both) == wear.tick(29.0, both) == []
    assert wear.tick(30.0, both) == [StartDrain("e")], "the worst first"
    assert wear.tick(31.0, both) == [], "one at a time"
    assert wear.tick(40.0, [both[0], worker("e", 0.3, is_drained=True)]) == [ReplaceWorker("e")]
    assert wear.tick(45.0, [both[0], worker("e", 0.0)]) == [StartDrain("d")]


def test_what_is_in_quarantine_for_a_moment_is_nothing():
    wear = QuarantineRecovery(share=0.1, patience_s=30.0)
    for now in range(0, 300, 20):
        assert wear.tick(now, [worker("d", 0.9 if now % 40 else 0.0)]) == []


def test_one_that_does_not_empty_goes_on():
    wear = QuarantineRecovery(share=0.1, patience_s=30.0, drain_s=100.0)
    worn = [worker("d", 0.5)]
    wear.tick(0.0, worn)
    assert wear.tick(30.0, worn) == [StartDrain("d")] and wear.tick(129.0, worn) == []
    assert wear.tick(130.0, worn) == [CancelDrain("d")]
    assert wear.tick(140.0, worn) == [] and wear.tick(170.0, worn) == [StartDrain("d")]


def test_one_that_ends_by_itself_is_no_matter():
    wear = QuarantineRecovery(share=0.1, patience_s=30.0)
    wear.tick(0.0, [worker("d", 0.5)])
    assert wear.tick(30.0, [worker("d", 0.5)]) == [StartDrain("d")]
    assert wear.tick(31.0, []) == [] and wear.tick(99.0, [worker("d", 0.0, is_drained=True)]) == []

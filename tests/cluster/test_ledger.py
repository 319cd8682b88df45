"""The ledger refuses what would corrupt a page."""

from __future__ import annotations

import pytest

from counterpoint.cluster.ledger import Hold, Ledger


def test_pages_are_counted_by_what_may_happen_to_them():
    ledger = Ledger()
    ledger.hold("a", Hold.SENDING, (1, 2))
    ledger.hold("b", Hold.RECEIVING, (3,))
    ledger.turn("a", Hold.PARKED)
    ledger.turn("b", Hold.QUARANTINE)
    assert [ledger.pages(hold) for hold in Hold] == [0, 2, 0, 1]
    ledger.check({1, 2, 3}, [4])
    for owner in "abc":
        ledger.drop(owner)
    assert ledger.empty and not any(ledger.pages(hold) for hold in Hold)


def test_readers_share_and_writers_do_not():
    ledger = Ledger()
    ledger.hold("a", Hold.SENDING, (1,))
    ledger.hold("b", Hold.SENDING, (1,))
    ledger.drop("a")
    with pytest.raises(AssertionError, match="written while it is read"):
        ledger.hold("c", Hold.RECEIVING, (1,))
    ledger.drop("b")
    ledger.hold("d", Hold.RECEIVING, (1,))
    for hold in (Hold.SENDING, Hold.RECEIVING):
        with pytest.raises(AssertionError, match="page 1 is e's, but d may have it written"):
            ledger.hold("e", hold, (1,))


def test_quarantine_ends_only_by_dropping():
    ledger = Ledger()
    ledger.hold("a", Hold.RECEIVING, (1,))
    ledger.turn("a", Hold.QUARANTINE)
    for hold in Hold:
        with pytest.raises(AssertionError):
            ledger.turn("a", hold)


def test_a_page_that_the_engine_thinks_free_is_found():
    ledger = Ledger()
    ledger.hold("a", Hold.RECEIVING, (1,))
    with pytest.raises(AssertionError, match="is free"):
        ledger.check({1}, [1])
    with pytest.raises(AssertionError, match="no request holds"):
        ledger.check({2}, [])

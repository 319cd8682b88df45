"""The page ledger refuses what would corrupt a page."""

from __future__ import annotations

import pytest

from counterpoint.disagg.handoff_context import PageHold, PageLedger


def test_pages_are_counted_by_what_may_happen_to_them():
    ledger = PageLedger()
    ledger.hold("a", PageHold.SENDING, (1, 2))
    ledger.hold("b", PageHold.RECEIVING, (3,))
    ledger.change_hold("a", PageHold.PARKED)
    ledger.change_hold("b", PageHold.QUARANTINE)
    assert [ledger.pages(hold) for hold in PageHold] == [0, 2, 0, 1]
    ledger.check({1, 2, 3}, [4])
    for owner in "abc":
        ledger.drop(owner)
    assert ledger.is_empty and not any(ledger.pages(hold) for hold in PageHold)


def test_readers_share_and_writers_do_not():
    ledger = PageLedger()
    ledger.hold("a", PageHold.SENDING, (1,))
    ledger.hold("b", PageHold.SENDING, (1,))
    ledger.drop("a")
    with pytest.raises(AssertionError, match="written while it is read"):
        ledger.hold("c", PageHold.RECEIVING, (1,))
    ledger.drop("b")
    ledger.hold("d", PageHold.RECEIVING, (1,))
    for hold in (PageHold.SENDING, PageHold.RECEIVING):
        with pytest.raises(AssertionError, match="e claims page 1, which d may have written"):
            ledger.hold("e", hold, (1,))


def test_quarantine_ends_only_by_dropping():
    ledger = PageLedger()
    ledger.hold("a", PageHold.RECEIVING, (1,))
    ledger.change_hold("a", PageHold.QUARANTINE)
    for hold in PageHold:
        with pytest.raises(AssertionError):
            ledger.change_hold("a", hold)


def test_a_page_that_the_engine_thinks_free_is_found():
    ledger = PageLedger()
    ledger.hold("a", PageHold.RECEIVING, (1,))
    with pytest.raises(AssertionError, match="is free"):
        ledger.check({1}, [1])
    with pytest.raises(AssertionError, match="no request holds"):
        ledger.check({2}, [])

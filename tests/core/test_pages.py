"""The page ledger: conservation, naming, eviction order."""

from __future__ import annotations

import pytest

from counterpoint.core.page_pool import PagePool, page_names, root_name


def test_names_are_chained_and_continue():
    tokens = list(range(40))
    names = page_names(tokens, 8, root_name(""))
    assert len(names) == 5 and len(set(names)) == 5
    assert page_names(tokens[16:], 8, names[1]) == names[2:]
    assert page_names([9, *tokens[1:]], 8, root_name(""))[4] != names[4], (
        "a change in the first page renames all after it"
    )
    assert page_names(tokens, 8, root_name("other"))[0] != names[0]
    assert page_names(tokens[:7], 8, root_name("")) == []


def test_take_release_evict():
    pages = PagePool(4)
    names = page_names(range(64), 16, root_name(""))
    table = pages.take(4)
    assert table is not None and pages.available == 0 and pages.take(1) is None
    for page, name in zip(table, names, strict=True):
        pages.publish(page, name)
    pages.release(table)
    pages.check({})
    assert (pages.free, pages.cached) == (0, 4)
    assert pages.find(names) == table
    taken = pages.take(1)
    assert taken == [table[3]], "the deepest page of a prefix goes first"
    assert pages.find(names) == table[:3]


def test_held_pages_are_not_evicted():
    pages = PagePool(3)
    names = page_names(range(32), 16, root_name(""))
    table = pages.take(2)
    assert table is not None
    for page, name in zip(table, names, strict=True):
        pages.publish(page, name)
    pages.release(table)
    pages.hold(pages.find(names))
    assert pages.available == 1 and pages.take(2) is None
    pages.check({table[0]: 1, table[1]: 1})
    pages.release(table)
    assert pages.available == 3 and pages.find(names) == table


def test_a_second_page_of_one_name_stays_private():
    pages = PagePool(2)
    [name] = page_names(range(16), 16, root_name(""))
    (first,), (second,) = pages.take(1) or (), pages.take(1) or ()
    pages.publish(first, name)
    pages.publish(second, name)
    pages.release([first, second])
    pages.check({})
    assert (pages.free, pages.cached) == (1, 1)


def test_releasing_twice_is_an_error():
    pages = PagePool(1)
    table = pages.take(1)
    assert table is not None
    pages.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(table)

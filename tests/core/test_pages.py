"""The page ledger: conservation, naming, eviction order."""

from __future__ import annotations

import pytest

from counterpoint.core.page_pool import PagePool, page_hashes, root_hash


def test_names_are_chained_and_continue():
    tokens = list(range(40))
    names = page_hashes(tokens, 8, root_hash(""))
    assert len(names) == 5 and len(set(names)) == 5
    assert page_hashes(tokens[16:], 8, names[1]) == names[2:]
    assert page_hashes([9, *tokens[1:]], 8, root_hash(""))[4] != names[4], (
        "a change in the first page renames all after it"
    )
    assert page_hashes(tokens, 8, root_hash("other"))[0] != names[0]
    assert page_hashes(tokens[:7], 8, root_hash("")) == []


def test_take_release_evict():
    pages = PagePool(4)
    names = page_hashes(range(64), 16, root_hash(""))
    table = pages.allocate(4)
    assert table is not None and pages.available == 0 and pages.allocate(1) is None
    for page, name in zip(table, names, strict=True):
        pages.register(page, name)
    pages.release(table)
    pages.check({})
    assert (pages.free, pages.cached) == (0, 4)
    assert pages.match(names) == table
    taken = pages.allocate(1)
    assert taken == [table[3]], "the deepest page of a prefix goes first"
    assert pages.match(names) == table[:3]


def test_held_pages_are_not_evicted():
    pages = PagePool(3)
    names = page_hashes(range(32), 16, root_hash(""))
    table = pages.allocate(2)
    assert table is not None
    for page, name in zip(table, names, strict=True):
        pages.register(page, name)
    pages.release(table)
    pages.ref(pages.match(names))
    assert pages.available == 1 and pages.allocate(2) is None
    pages.check({table[0]: 1, table[1]: 1})
    pages.release(table)
    assert pages.available == 3 and pages.match(names) == table


def test_a_second_page_of_one_name_stays_private():
    pages = PagePool(2)
    [name] = page_hashes(range(16), 16, root_hash(""))
    (first,), (second,) = pages.allocate(1) or (), pages.allocate(1) or ()
    pages.register(first, name)
    pages.register(second, name)
    pages.release([first, second])
    pages.check({})
    assert (pages.free, pages.cached) == (1, 1)


def test_releasing_twice_is_an_error():
    pages = PagePool(1)
    table = pages.allocate(1)
    assert table is not None
    pages.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(table)

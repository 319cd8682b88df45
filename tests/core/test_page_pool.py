"""The page pool: conservation, hashes, order of eviction."""

from __future__ import annotations

import pytest

from counterpoint.core.page_pool import PagePool, page_hashes, root_hash


def test_hashes_are_chained_and_continue():
    tokens = list(range(40))
    hashes = page_hashes(tokens, 8, root_hash(""))
    assert len(hashes) == 5 and len(set(hashes)) == 5
    assert page_hashes(tokens[16:], 8, hashes[1]) == hashes[2:]
    assert page_hashes([9, *tokens[1:]], 8, root_hash(""))[4] != hashes[4], (
        "a change in the first page changes every later hash"
    )
    assert page_hashes(tokens, 8, root_hash("other"))[0] != hashes[0]
    assert page_hashes(tokens[:7], 8, root_hash("")) == []


def test_allocate_release_evict():
    pages = PagePool(4)
    hashes = page_hashes(range(64), 16, root_hash(""))
    table = pages.allocate(4)
    assert table is not None and pages.available == 0 and pages.allocate(1) is None
    for page, page_hash in zip(table, hashes, strict=True):
        pages.register(page, page_hash)
    pages.release(table)
    pages.check({})
    assert (pages.free, pages.cached) == (0, 4)
    assert pages.match(hashes) == table
    taken = pages.allocate(1)
    assert taken == [table[3]], "the deepest page of a prefix goes first"
    assert pages.match(hashes) == table[:3]


def test_held_pages_are_not_evicted():
    pages = PagePool(3)
    hashes = page_hashes(range(32), 16, root_hash(""))
    table = pages.allocate(2)
    assert table is not None
    for page, page_hash in zip(table, hashes, strict=True):
        pages.register(page, page_hash)
    pages.release(table)
    pages.ref(pages.match(hashes))
    assert pages.available == 1 and pages.allocate(2) is None
    pages.check({table[0]: 1, table[1]: 1})
    pages.release(table)
    assert pages.available == 3 and pages.match(hashes) == table


def test_a_second_page_of_one_hash_stays_private():
    pages = PagePool(2)
    [page_hash] = page_hashes(range(16), 16, root_hash(""))
    (first,), (second,) = pages.allocate(1) or (), pages.allocate(1) or ()
    pages.register(first, page_hash)
    pages.register(second, page_hash)
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

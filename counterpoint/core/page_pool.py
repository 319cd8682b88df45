"""The KV cache's pages: who owns each, and which hold a known prefix.

Owns: the page ledger and the prefix index. Promises: a page is in exactly one of three places, and their sizes always sum to
`total`: *free*; *held* (one or more requests name it); *cached* (nobody names it, its content is published, it may be evicted).
Eviction is least recently used, deepest page of a prefix first.
Must not: know of requests, or publish a page whose content has not been computed.

A page's *name* is a chained hash of all tokens up to its end, so equal names mean equal content and equal position: names are
global, and another process can ask for a page by its name.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(salt: str) -> bytes:
    """The name before the first page: requests of different salts share nothing."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def page_hashes(tokens: Sequence[int], page_tokens: int, parent: bytes) -> list[bytes]:
    """Names of the full pages of `tokens`, which follow a page named `before`."""
    names = []
    content, size = array.array("q", tokens).tobytes(), 8 * page_tokens
    for start in range(0, len(content) - size + 1, size):
        parent = hashlib.blake2b(parent + content[start : start + size], digest_size=16).digest()
        names.append(parent)
    return names


class PagePool:
    """`total` pages. Every change keeps free + held + cached = total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._ref_counts = [0] * total
        self._hashes: list[bytes | None] = [None] * total
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # its order is eviction's (a dict's first key is slow to find)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    def contains(self, page_hash: bytes) -> bool:
        return page_hash in self._index

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages that hold the longest known run of `names` from its start. They are not held yet."""
        found = []
        for name in hashes:
            page = self._index.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: holding them takes so many from `available`."""
        return sum(1 for page in pages if page in self._cached)

    def ref(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that `find` gave."""
        for page in pages:
            self._ref_counts[page] += 1
            self._cached.pop(page, None)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder and no content, evicting if need be; None (and no change) if there are not so many."""
        if count > self.available:
            return None
        left = max(0, len(self._free) - count)
        taken = self._free[left:][::-1]
        del self._free[left:]
        taken += [self._evict() for _ in range(count - len(taken))]
        for page in taken:
            self._ref_counts[page] = 1
        return taken

    def register(self, page: int, page_hash: bytes) -> None:
        """The held `page` now holds the content called `name`. A second page of the same name stays private."""
        if page_hash not in self._index and self._hashes[page] is None:
            self._index[page_hash] = page
            self._hashes[page] = page_hash

    def release(self, pages: Sequence[int]) -> None:
        """Take one holder from each page of a block table. The last page goes first, so that a prefix is evicted from its end."""
        holders, names = self._ref_counts, self._hashes
        for page in reversed(pages):
            left = holders[page] = holders[page] - 1
            if left < 0:
                raise AssertionError(f"page {page} released more often than held")
            if left == 0:
                if names[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def check(self, ref_counts: dict[int, int]) -> None:
        """Raise unless the ledger agrees with `held` (page -> holders, as the block tables have it). For tests."""
        actual = {page: count for page, count in enumerate(self._ref_counts) if count}
        assert actual == ref_counts, f"holders {actual} but block tables say {ref_counts}"
        places = [*self._free, *self._cached, *actual]
        assert sorted(places) == list(range(self.total)), "a page is lost or in two places"
        for name, page in self._index.items():
            assert self._hashes[page] == name, f"index and page {page} disagree"
        assert all(self._hashes[page] is None for page in self._free), (
            "a free page still has a name"
        )

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        name = self._hashes[page]
        assert name is not None
        del self._index[name]
        self._hashes[page] = None
        return page

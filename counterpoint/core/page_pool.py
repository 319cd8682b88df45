"""The pages of the KV cache: who holds each, and which contain a known prefix.

A page is in exactly one of three states, and their counts always sum to `total`:

    free    no content
    held    one or more requests reference it
    cached  nobody references it, its content is registered, it may be evicted

Eviction takes the least recently used page, and the deepest page of a prefix first. The pool knows
no requests. Callers register a page only once its content has been computed.

The *hash* of a page covers all tokens up to its end. So equal hashes mean equal content at equal
position, in every process: another process can ask for a page by its hash.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(salt: str) -> bytes:
    """The hash before the first page: requests of different salts share nothing."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def page_hashes(tokens: Sequence[int], page_tokens: int, parent: bytes) -> list[bytes]:
    """Hashes of the full pages of `tokens`, which follow a page with hash `parent`."""
    hashes = []
    content, size = array.array("q", tokens).tobytes(), 8 * page_tokens
    for start in range(0, len(content) - size + 1, size):
        parent = hashlib.blake2b(parent + content[start : start + size], digest_size=16).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """`total` pages. Every change keeps free + held + cached = total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._ref_counts = [0] * total
        self._hashes: list[bytes | None] = [None] * total
        self._index: dict[bytes, int] = {}
        # In order of eviction. (The first key of a plain dict is slow to find.)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and evictable ones."""
        return len(self._free) + len(self._cached)

    def contains(self, page_hash: bytes) -> bool:
        return page_hash in self._index

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages that hold the longest registered prefix of `hashes`. Adds no reference."""
        pages = []
        for page_hash in hashes:
            page = self._index.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody references: `ref` would take so many from `available`."""
        return sum(1 for page in pages if page in self._cached)

    def ref(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that `match` gave."""
        for page in pages:
            self._ref_counts[page] += 1
            self._cached.pop(page, None)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference and no content, evicting if need be.

        None, and no change, if too few are available.
        """
        if count > self.available:
            return None
        keep = max(0, len(self._free) - count)
        pages = self._free[keep:][::-1]
        del self._free[keep:]
        pages += [self._evict() for _ in range(count - len(pages))]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def register(self, page: int, page_hash: bytes) -> None:
        """The held `page` now has the content of `page_hash`. A second such page stays private."""
        if page_hash not in self._index and self._hashes[page] is None:
            self._index[page_hash] = page
            self._hashes[page] = page_hash

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each page of a block table.

        The last page goes first, so that a prefix is evicted from its end.
        """
        ref_counts, hashes = self._ref_counts, self._hashes
        for page in reversed(pages):
            count = ref_counts[page] = ref_counts[page] - 1
            if count < 0:
                raise AssertionError(f"page {page} released more often than held")
            if count == 0:
                if hashes[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def check(self, ref_counts: dict[int, int]) -> None:
        """Raise unless the pool agrees with `ref_counts`, as block tables have them. For tests."""
        actual = {page: count for page, count in enumerate(self._ref_counts) if count}
        assert actual == ref_counts, f"references {actual} but block tables say {ref_counts}"
        pages = [*self._free, *self._cached, *actual]
        assert sorted(pages) == list(range(self.total)), "a page is lost or in two states"
        for page_hash, page in self._index.items():
            assert self._hashes[page] == page_hash, f"index and page {page} disagree"
        assert all(self._hashes[page] is None for page in self._free), "a free page has a hash"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        page_hash = self._hashes[page]
        assert page_hash is not None
        del self._index[page_hash]
        self._hashes[page] = None
        return page

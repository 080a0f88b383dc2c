"""Who owns which page of the cache: free pages, shared pages, and pages that hold a known prefix.

A page holds the keys and values of ``page_size`` consecutive tokens in every layer. Full pages of a prompt are
indexed by a digest of all tokens up to their end, so that a later request with the same beginning shares them; a
shared page is never written again. Pages that nobody uses stay indexed until their room is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence as Many

import numpy as np

NULL_PAGE = 0
"""A page that no sequence owns: padding rows of a batch write to it."""


class BlockManager:
    """Pages 1 .. ``num_pages`` of a cache (page 0 is :data:`NULL_PAGE`).

    Invariants: a page is new (never taken, from ``len(_references)`` on), or free, or indexed and unused (``_idle``),
    or has a positive reference count. Growing costs nothing: a small model's cache may have millions of pages.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.num_pages = 0
        self._free: deque[int] = deque()
        self._references: list[int] = [1]  # the null page is always taken
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.grow(num_pages)

    def grow(self, num_pages: int) -> None:
        """Let there be ``num_pages`` pages; they keep their numbers."""
        self.num_pages = max(self.num_pages, num_pages)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return self.num_pages + 1 - len(self._references) + len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages for writing, or None (and nothing taken) if there are not so many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            elif len(self._references) <= self.num_pages:
                page = len(self._references)
                self._references.append(0)
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._digest_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Many[int]) -> None:
        """One more owner for each of ``pages``."""
        for page in pages:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1

    def give(self, pages: Many[int]) -> None:
        """One owner less. Indexed pages stay findable; the end of a prefix is reused before its beginning."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} given back twice"
            if self._references[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _digests(self, tokens: np.ndarray, pages: int) -> list[bytes]:
        digest, out = b"", []
        for i in range(pages):
            block = tokens[i * self.page_size : (i + 1) * self.page_size]
            digest = hashlib.blake2b(digest + block.astype(np.int64).tobytes(), digest_size=16).digest()
            out.append(digest)
        return out

    def match(self, tokens: np.ndarray) -> list[int]:
        """Share the indexed pages that ``tokens`` begins with, leaving at least one token to compute."""
        found = []
        for digest in self._digests(tokens, (len(tokens) - 1) // self.page_size):
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        self.share(found)
        return found

    def publish(self, tokens: np.ndarray, pages: Many[int]) -> None:
        """Index the full pages of ``tokens``, whose keys and values are all written."""
        for digest, page in zip(self._digests(tokens, len(tokens) // self.page_size), pages, strict=False):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def forget(self) -> None:
        """Drop the index: what the pages hold comes from other weights."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

"""Which work comes next: chunks of prompts, or one more token for every running row.

Prompts go first, as a fuller batch decodes more tokens a second. Rows are preempted, latest first, when pages run
out: their pages are given back and they are computed again later from the tokens that they have. As the noise of a
token depends on nothing but the request's seed and the position, they then write the same tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from verl.rollout.native.blocks import BlockManager
from verl.rollout.native.sequence import Sequence


@dataclass
class Chunk:
    """Positions ``start .. start + length`` of a sequence, to be computed in one forward."""

    sequence: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        """The chunk ends the sequence, so its last logits give the next token."""
        return self.start + self.length == self.sequence.length


class Scheduler:
    """Waiting, prefilling and running sequences, and their pages.

    Args:
        lookahead: tokens that a running row must have room for before a decode step.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, lookahead: int = 1):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.composition = 0  # changes whenever the running rows do

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + sum(1 + len(s.followers) for s in self.prefilling)

    @property
    def active(self) -> bool:
        """Something is computed already from the present weights."""
        return bool(self.prefilling or self.running or any(s.tokens for s in self.waiting))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def chunks(self) -> list[Chunk]:
        """Admit what fits and return the prompt work of the next forward; empty if only decoding is left."""
        self._admit()
        budget, work = self.max_num_batched_tokens, []
        for sequence in self.prefilling:
            length = min(budget, sequence.length - sequence.computed)
            if length:
                work.append(Chunk(sequence, sequence.computed, length))
                budget -= length
        return work

    def _admit(self) -> None:
        places = self.max_num_seqs - len(self.running) - sum(1 + len(s.followers) for s in self.prefilling)
        tokens = sum(s.length - s.computed for s in self.prefilling)
        while self.waiting and places > 0 and tokens < self.max_num_batched_tokens:
            sequence = self.waiting[0]
            if not self._give_pages(sequence):
                return
            self.waiting.popleft()
            self.prefilling.append(sequence)
            tokens += sequence.length - sequence.computed
            places -= 1
            while self.waiting and places > 0 and self.same_prompt(sequence, self.waiting[0]):
                sequence.followers.append(self.waiting.popleft())
                places -= 1

    @staticmethod
    def same_prompt(leader: Sequence, other: Sequence) -> bool:
        return not leader.tokens and not other.tokens and leader.prompt_key == other.prompt_key

    def _give_pages(self, sequence: Sequence) -> bool:
        """Pages for all tokens of a waiting sequence and the next one. Running rows keep room for a page each."""
        blocks = self.blocks
        found = blocks.match(sequence.ids())
        reserve = len(self.running) if self.running or self.prefilling else 0
        needed = blocks.pages_for(sequence.length + 1) - len(found)
        pages = blocks.take(needed) if blocks.available >= needed + reserve else None
        if pages is None:
            blocks.give(found)
            return False
        sequence.pages = found + pages
        sequence.computed = len(found) * blocks.page_size
        return True

    def computed(self, chunk: Chunk) -> None:
        """``chunk`` is in the cache now."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.length
        full = min(sequence.computed, len(sequence.prompt)) // self.blocks.page_size
        self.blocks.publish(sequence.prompt[: full * self.blocks.page_size], sequence.pages)

    def fork(self, leader: Sequence) -> list[tuple[int, int]]:
        """Move a computed leader and its followers to the running rows.

        Returns:
            Pairs of pages (from, to) to be copied: the last, partly filled page of the prompt for each follower.
            Followers that get no page wait again.
        """
        self.prefilling.remove(leader)
        self.running.append(leader)
        followers, leader.followers = leader.followers, []
        copies: list[tuple[int, int]] = []
        full, rest = divmod(len(leader.prompt), self.blocks.page_size)
        group = object()
        if followers:
            leader.group, leader.shared_pages = group, full
        for i, follower in enumerate(followers):
            own = self.blocks.take(1)
            if own is None:
                self.waiting.extendleft(reversed(followers[i:]))
                break
            self.blocks.share(leader.pages[:full])
            follower.pages = leader.pages[:full] + own
            if rest:
                copies.append((leader.pages[full], own[0]))
            follower.computed = leader.computed
            follower.group, follower.shared_pages = group, full
            self.running.append(follower)
        self.composition += 1
        return copies

    def make_room(self) -> list[Sequence]:
        """Pages for the next ``lookahead`` tokens of every running row, preempting the latest if need be.

        Returns:
            The rows that are still running.
        """
        for sequence in sorted(self.running, key=lambda s: s.order):
            if not sequence.pages:
                continue  # preempted a moment ago
            ahead = sequence.length + min(self.lookahead, sequence.remaining) - 1
            missing = self.blocks.pages_for(ahead) - len(sequence.pages)
            while missing > 0:
                pages = self.blocks.take(missing)
                if pages is not None:
                    sequence.pages += pages
                    break
                victim = max((s for s in self.running if s.pages), key=lambda s: s.order)
                self._preempt(victim)
                if victim is sequence:
                    break
        self.running = [s for s in self.running if s.pages]
        return self.running

    def _preempt(self, victim: Sequence) -> None:
        self._drop_pages(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self.composition += 1

    def _drop_pages(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.pages)
        sequence.pages, sequence.computed = [], 0
        sequence.group, sequence.shared_pages = None, 0

    def retire(self) -> list[Sequence]:
        """Take out the running rows that have a finish reason."""
        done = [s for s in self.running if s.finish_reason is not None]
        if done:
            self.running = [s for s in self.running if s.finish_reason is None]
            for sequence in done:
                self._drop_pages(sequence)
            self.composition += 1
        return done

    def abort(self, ids: set[str] | None) -> list[Sequence]:
        """Take out the sequences named (all if None), wherever they are."""
        gone: list[Sequence] = []

        def stays(sequence: Sequence) -> bool:
            if ids is None or sequence.request.id in ids:
                sequence.finish_reason = "abort"
                gone.append(sequence)
                return False
            return True

        self.waiting = deque(s for s in self.waiting if stays(s))
        for leader in list(self.prefilling):
            leader.followers = [s for s in leader.followers if stays(s)]
            if not stays(leader):
                self.prefilling.remove(leader)
                self._drop_pages(leader)
                self.waiting.extendleft(reversed(leader.followers))
                leader.followers = []
        for sequence in self.running:
            stays(sequence)
        self.retire()
        return gone

"""What the directory has been told, and what it is to be told next. Pure: the clock is an argument.

Anchors are wished in (a segment became visible) or out (it went). `take` hands out the next batch, bounded in size and rate:
wishes first, in their order, then published anchors whose refresh is due, oldest first. Entries in the directory expire
after `ttl_s`, so what a dead node published goes by itself, and a living one refreshes at half of it. A batch that did not arrive
becomes wishes again, unless newer ones stand against it. When the directory lost its data, everything is wished in again.

A published key is neither pending nor in flight; a wish that is pending is newer than what is in flight. Memory: some 150 bytes an anchor, 1/16 of the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

BATCH_MAX: Final = 512  # 100 KB of commands: a millisecond of one directory's time
REFRESHES_A_TTL: Final = 2
# While the directory is gone, what came and went meanwhile would pile up; beyond this it is left to expire there.
PENDING_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """`puts` are published with the directory's ttl, `withdrawn` taken out. No key is in both."""

    puts: tuple[bytes, ...]
    withdrawn: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.puts) + len(self.withdrawn)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    published: int
    pending: int
    published_total: int  # refreshes included
    withdrawn_total: int
    failed_total: int  # told and not arrived; told again


class Publisher:
    """Belongs to the event loop; one batch is in flight at a time.

    Args:
        ttl_s: how long an entry lives in the directory.
        rate_max: anchors a second, refreshes included; a burst is what one second allows.
    """

    def __init__(
        self, ttl_s: float, rate_max: float, batch_max: int = BATCH_MAX, pending_max: int = PENDING_MAX
    ) -> None:
        """Raises: ValueError: nothing could ever be published."""
        if ttl_s <= 0 or rate_max <= 0 or batch_max < 1:
            raise ValueError(f"a publisher needs a ttl, rate and batch above 0, not {ttl_s}, {rate_max}, {batch_max}")
        self._ttl_s = ttl_s
        self._rate_max = rate_max
        self._batch_max = batch_max
        self._pending_max = pending_max
        self._pending: OrderedDict[bytes, bool] = OrderedDict()
        self._published: OrderedDict[bytes, float] = OrderedDict()  # by the time they were told
        self._flying: Batch | None = None
        self._puts_flying: frozenset[bytes] = frozenset()
        self._doubtful = False  # the batch in flight may have been lost with the directory's data
        self._tokens = rate_max
        self._tokens_s: float | None = None
        self._published_total = self._withdrawn_total = self._failed_total = 0

    def add(self, anchors: Iterable[bytes]) -> None:
        """They are held here. What is published already is not told again."""
        for key in anchors:
            if key in self._puts_flying:
                self._pending.pop(key, None)
            elif key not in self._published:
                self._pending[key] = True

    def remove(self, anchors: Iterable[bytes]) -> None:
        """They are held here no longer. Unknown ones are fine."""
        for key in anchors:
            if self._published.pop(key, None) is not None or key in self._pending or key in self._puts_flying:
                if len(self._pending) < self._pending_max or key in self._puts_flying:
                    self._pending[key] = False
                else:  # a stale entry costs who believes it one round trip
                    self._pending.pop(key, None)

    def take(self, now_s: float) -> Batch | None:
        """What to tell now, or None: nothing is due, the rate is used up, or a batch is in flight."""
        elapsed_s = now_s - self._tokens_s if self._tokens_s is not None else 0.0
        self._tokens = min(self._rate_max, self._tokens + max(0.0, elapsed_s) * self._rate_max)
        self._tokens_s = now_s
        room = min(self._batch_max, int(self._tokens))
        if self._flying is not None or room < 1:
            return None
        puts: list[bytes] = []
        withdrawn: list[bytes] = []
        for key, wanted in list(islice(self._pending.items(), room)):
            del self._pending[key]
            (puts if wanted else withdrawn).append(key)
        room -= len(puts) + len(withdrawn)
        due_s = now_s - self._ttl_s / REFRESHES_A_TTL
        for key, told_s in list(islice(self._published.items(), room)):
            if told_s > due_s:
                break
            del self._published[key]
            puts.append(key)
        if not puts and not withdrawn:
            return None
        self._flying, self._puts_flying, self._doubtful = Batch(tuple(puts), tuple(withdrawn)), frozenset(puts), False
        self._tokens -= len(self._flying)
        return self._flying

    def arrived(self, told_s: float) -> None:
        """The batch in flight is in the directory; `told_s` is from before it was sent."""
        if self._doubtful:
            self.lost()
            return
        batch = self._landed()
        for key in batch.puts:
            if key not in self._pending:  # else it was withdrawn meanwhile, and that wish stands
                self._published[key] = told_s
        self._published_total += len(batch.puts)
        self._withdrawn_total += len(batch.withdrawn)

    def lost(self) -> None:
        """Whether the batch in flight arrived is not known: its keys are told again, before all others."""
        batch = self._landed()
        self._failed_total += len(batch)
        for keys, wanted in ((batch.withdrawn, False), (batch.puts, True)):
            for key in keys:
                if key not in self._pending:
                    self._pending[key] = wanted
                    self._pending.move_to_end(key, last=False)

    def publish_again(self) -> None:
        """The directory may hold nothing of ours: all is told again, what was published first at first."""
        self._doubtful = True
        for key in reversed(self._published):
            self._pending[key] = True
            self._pending.move_to_end(key, last=False)
        self._published.clear()

    def stats(self) -> PublisherStats:
        flying = len(self._flying) if self._flying else 0
        return PublisherStats(
            published=len(self._published),
            pending=len(self._pending) + flying,
            published_total=self._published_total,
            withdrawn_total=self._withdrawn_total,
            failed_total=self._failed_total,
        )

    def wants(self) -> set[bytes]:
        """All keys that will be in the directory once it has been told everything. For tests."""
        held = set(self._published) | {key for key in self._puts_flying if self._pending.get(key, True)}
        return held | {key for key, wanted in self._pending.items() if wanted}

    def _landed(self) -> Batch:
        batch = self._flying
        if batch is None:
            raise ValueError("no batch is in flight")
        self._flying, self._puts_flying = None, frozenset()
        return batch

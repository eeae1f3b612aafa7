"""What the directory has been told, and what it is to be told next. Pure: the clock is an argument.

Anchors are wished in (a segment became visible) or out (it went). `take` hands out the next batch of wishes, in their order, bounded
in size and rate. A batch that did not arrive becomes wishes again, unless newer ones stand against it. When the directory
lost its data, everything is wished in again.

Nothing is refreshed: an entry counts for as long as its node is a member under the incarnation that wrote it, and goes with it
(sweeper.py). What a directory loses behind our back (a shard that came back empty, an eviction) is found by looking: `audit` names a
few of the published anchors every `audit_s`, each in its turn, and more as long as some of them are missing there.

A key is published, told again, or pending, never two of these; a wish that is pending is newer than what is in flight. Memory: some 150 bytes an anchor, 1/16 of the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

BATCH_MAX: Final = 512  # 50 KB of commands: a millisecond of one directory's time
AUDIT_S: Final = 60.0
AUDIT_KEYS: Final = 64  # of a directory that lost a tenth, one of them is missing in 999 of 1,000 looks
# While the directory is gone, what came and went meanwhile would pile up; beyond this it stays there as a stale entry.
PENDING_MAX: Final = 1 << 20
MERGED_MAX: Final = 1 << 11  # keys touched when all is to be told again: under a millisecond of the loop


@dataclass(frozen=True, slots=True)
class Batch:
    """`puts` are published, `withdrawn` taken out. No key is in both."""

    puts: tuple[bytes, ...]
    withdrawn: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.puts) + len(self.withdrawn)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    published: int
    pending: int
    published_total: int  # told again ones included
    withdrawn_total: int
    failed_total: int  # told and not arrived; told again
    missing_total: int  # audits found that the directory had lost them; told again


class Publisher:
    """Belongs to the event loop; one batch is in flight at a time.

    Args:
        rate_max: anchors a second, told or looked for; a burst is what one second allows.
        audit_s: between two looks, as long as nothing is missing.
    """

    def __init__(
        self,
        rate_max: float,
        batch_max: int = BATCH_MAX,
        pending_max: int = PENDING_MAX,
        *,
        audit_s: float = AUDIT_S,
        audit_keys: int = AUDIT_KEYS,
    ) -> None:
        """Raises: ValueError: nothing could ever be published."""
        if rate_max <= 0 or batch_max < 1:
            raise ValueError(f"a publisher needs a rate and batch above 0, not {rate_max}, {batch_max}")
        self._rate_max = rate_max
        self._batch_max = batch_max
        self._pending_max = pending_max
        self._audit_s, self._audit_keys = audit_s, audit_keys
        self._pending: OrderedDict[bytes, bool] = OrderedDict()
        self._published: OrderedDict[bytes, None] = OrderedDict()  # those that were not looked for longest come first
        # Were published, and are told again before all wishes, the first part first; few parts, each of many keys.
        self._again: list[OrderedDict[bytes, None]] = []
        self._flying: Batch | None = None
        self._puts_flying: frozenset[bytes] = frozenset()
        self._doubtful = False  # the batch in flight may have been lost with the directory's data
        self._tokens = rate_max
        self._tokens_s: float | None = None
        self._audit_due_s = float("-inf")
        self._audit_wide = False
        self._published_total = self._withdrawn_total = self._failed_total = self._missing_total = 0

    def add(self, anchors: Iterable[bytes]) -> None:
        """They are held here. What is published already is not told again."""
        for key in anchors:
            if key in self._puts_flying:
                self._pending.pop(key, None)
            elif key not in self._published and not any(key in part for part in self._again):
                self._pending[key] = True

    def remove(self, anchors: Iterable[bytes]) -> None:
        """They are held here no longer. Unknown ones are fine."""
        for key in anchors:
            told = [part for part in (self._published, *self._again) if key in part]
            for part in told:
                del part[key]
            known = told or key in self._pending or key in self._puts_flying
            if known:
                if len(self._pending) < self._pending_max or key in self._puts_flying:
                    self._pending[key] = False
                else:  # a stale entry costs who believes it one round trip
                    self._pending.pop(key, None)

    def take(self, now_s: float) -> Batch | None:
        """What to tell now, or None: nothing is wished, the rate is used up, or a batch is in flight."""
        room = min(self._batch_max, self._earned(now_s))
        self._again = [part for part in self._again if part]
        if self._flying is not None or room < 1 or not (self._pending or self._again):
            return None
        puts: list[bytes] = []
        withdrawn: list[bytes] = []
        for part in self._again:
            some = list(islice(part, room - len(puts)))
            for key in some:
                del part[key]
            puts += some
        for key, wanted in list(islice(self._pending.items(), room - len(puts))):
            del self._pending[key]
            (puts if wanted else withdrawn).append(key)
        self._flying, self._puts_flying, self._doubtful = Batch(tuple(puts), tuple(withdrawn)), frozenset(puts), False
        self._tokens -= len(self._flying)
        return self._flying

    def arrived(self) -> None:
        """The batch in flight is in the directory."""
        if self._doubtful:
            self.lost()
            return
        batch = self._landed()
        for key in batch.puts:
            if key not in self._pending:  # else it was withdrawn meanwhile, and that wish stands
                self._published[key] = None
        self._published_total += len(batch.puts)
        self._withdrawn_total += len(batch.withdrawn)

    def lost(self) -> None:
        """Whether the batch in flight arrived is not known: its keys are told again, before all others."""
        batch = self._landed()
        self._failed_total += len(batch)
        for key in batch.withdrawn:
            if key not in self._pending:
                self._pending[key] = False
                self._pending.move_to_end(key, last=False)
        if not self._again:
            self._again.append(OrderedDict())
        for key in batch.puts:
            if key not in self._pending:
                self._again[0][key] = None
                self._again[0].move_to_end(key, last=False)

    def publish_again(self) -> None:
        """The directory may hold nothing of ours: all is told again. Of hundreds of thousands none is touched here."""
        self._doubtful = True
        if self._again and len(self._published) <= MERGED_MAX:
            self._again[-1].update(self._published)
        else:
            self._again.append(self._published)
        self._published = OrderedDict()

    def audit(self, now_s: float) -> tuple[bytes, ...]:
        """Published anchors to look for in the directory now; the answer goes to `audited`. Empty: not yet."""
        room = min(self._batch_max if self._audit_wide else self._audit_keys, self._earned(now_s))
        if now_s < self._audit_due_s or room < 1:
            return ()
        keys = tuple(islice(self._published, room))
        for key in keys:
            self._published.move_to_end(key)
        self._tokens -= len(keys)
        self._audit_due_s, self._audit_wide = now_s + self._audit_s, False
        return keys

    def audited(self, missing: Iterable[bytes]) -> None:
        """The directory has these no longer. They are told again, and the next look is at once, and at more."""
        for key in missing:
            if key in self._published:  # else it went meanwhile
                del self._published[key]
                self._pending[key] = True
                self._missing_total += 1
                self._audit_due_s, self._audit_wide = float("-inf"), True

    def stats(self) -> PublisherStats:
        flying = len(self._flying) if self._flying else 0
        return PublisherStats(
            published=len(self._published),
            pending=sum(map(len, self._again)) + len(self._pending) + flying,
            published_total=self._published_total,
            withdrawn_total=self._withdrawn_total,
            failed_total=self._failed_total,
            missing_total=self._missing_total,
        )

    def wants(self) -> set[bytes]:
        """All keys that will be in the directory once it has been told everything. For tests."""
        held = {*self._published}.union(*self._again) | {
            key for key in self._puts_flying if self._pending.get(key, True)
        }
        return held | {key for key, wanted in self._pending.items() if wanted}

    def _earned(self, now_s: float) -> int:
        elapsed_s = now_s - self._tokens_s if self._tokens_s is not None else 0.0
        self._tokens = min(self._rate_max, self._tokens + max(0.0, elapsed_s) * self._rate_max)
        self._tokens_s = now_s
        return int(self._tokens)

    def _landed(self) -> Batch:
        batch = self._flying
        if batch is None:
            raise ValueError("no batch is in flight")
        self._flying, self._puts_flying = None, frozenset()
        return batch

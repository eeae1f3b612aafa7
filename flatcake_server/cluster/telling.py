"""What a node tells the directory of what it holds, looks for there, and takes out of it. `publisher` and `sweeper` decide.

    a segment became visible, or went -> anchors wished in or out -> batches, as the rate allows
    the start, or a wish that failed  -> all that is stored is wished in
    nothing to tell                   -> a few of what was told are looked for
    once a second                     -> some buckets are read, and the entries of dead nodes removed

All of it waits while the node is not joined, or a beat was not answered: then what others would read of it is not sure.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import numpy as np

from flatcake_server.catalog import Catalog
from flatcake_server.cluster.anchors import anchors_within
from flatcake_server.cluster.directory import TAG_BYTES, Directory, Holder
from flatcake_server.cluster.members import Beat, Membership, State
from flatcake_server.cluster.publisher import Batch, Publisher
from flatcake_server.cluster.sweeper import Sweeper
from flatcake_server.pace import Pace
from flatcake_server.records import SegmentRecord
from flatcake_transport.address import MISSING
from flatcake_transport.errors import FlatCakeError

log = logging.getLogger(__name__)

PUBLISH_PAUSE_S: Final = 0.1  # between two looks for what to publish: a commit is seen by others within it
RETRY_S: Final = 1.0
SWEEP_PAUSE_S: Final = 0.5


class Telling:
    """Belongs to the event loop. Its loops run until they are cancelled."""

    def __init__(
        self,
        catalog: Catalog,
        membership: Membership,
        directory: Directory,
        publisher: Publisher,
        sweeper: Sweeper,
        counts: Counter[str],
        now_s: Callable[[], float],
        unforeseen: Callable[[str, BaseException], None],
    ) -> None:
        self.publisher = publisher
        self._catalog, self._membership, self._directory = catalog, membership, directory
        self._sweeper, self._counts, self._now_s, self._unforeseen = sweeper, counts, now_s, unforeseen
        self._untold = asyncio.Event()  # something is held that the publisher does not know of
        self._untold.set()
        catalog.watch = self._changed

    def close(self) -> None:
        self._catalog.watch = None

    def beaten(self, beat: Beat, *, again: bool) -> None:
        """A beat was answered. `again`: the directory did not know us."""
        if again:
            self.publisher.publish_again()
        if beat.members is not None:
            self._sweeper.listed((*beat.members, self._membership.me))

    def _changed(self, segments: Iterable[SegmentRecord], visible: bool) -> None:
        """Segments were published or went: the catalog says so within the same step, which nothing here may fail."""
        try:
            self._wish(segments, visible)
        except Exception as error:  # noqa: BLE001 - it is told later
            self._unforeseen("what is held here is told later", error)
            self._counts["directory_failures"] += 1
            if visible:  # an entry of what went costs whom it misleads a round trip, and is taken out then
                self._untold.set()

    def _wish(self, segments: Iterable[SegmentRecord], visible: bool) -> None:
        for segment in segments:
            keys = segment.keys[anchors_within(segment.first_block, segment.blocks)]
            here = self._catalog.present(keys) != np.uint64(MISSING)  # another copy may stand
            changed = keys[here] if visible else keys[~here]
            (self.publisher.add if visible else self.publisher.remove)(key.tobytes() for key in changed)

    async def publishes_stored(self) -> None:
        await self._keeps_on(self._publish_stored, "told")

    async def _publish_stored(self) -> None:
        await self._untold.wait()
        self._untold.clear()
        try:
            await self.publish_stored()
        except BaseException:
            self._untold.set()
            raise

    async def publish_stored(self) -> None:
        """All that is here: at the start, or when something was not told. In steps: nobody's lookup waits for it."""
        pace = Pace()
        for segment in list(self._catalog.segments):
            self._wish((segment,), True)  # of one that went meanwhile nothing is in the index
            await pace.rest()

    async def publishes(self) -> None:
        await self._keeps_on(self._publish, "told")

    async def sweeps(self) -> None:
        await self._keeps_on(self._sweep, "swept")

    async def _keeps_on(self, step: Callable[[], Awaitable[None]], what: str) -> None:
        """Nothing that goes wrong ends it: a node that tells and sweeps no more would look well."""
        while True:
            try:
                await step()
            except FlatCakeError as error:
                log.info("the directory is %s later: %s", what, error)
            except Exception as error:  # noqa: BLE001 - see above
                self._unforeseen(f"the directory is {what} later", error)
            else:
                continue
            self._counts["directory_failures"] += 1
            await asyncio.sleep(RETRY_S)

    async def _publish(self) -> None:
        now_s = self._now_s()
        batch = self.publisher.take(now_s) if self._sure() else None
        keys = self.publisher.audit(now_s) if batch is None and self._sure() else ()
        if batch is not None:
            await self._tell(batch)
        elif keys:
            await self._audit(keys)
        else:
            await asyncio.sleep(PUBLISH_PAUSE_S)

    async def _tell(self, batch: Batch) -> None:
        self._counts["directory/tell"] += 1
        try:
            await self._directory.tell(self._membership.me, batch)
        except BaseException:
            self.publisher.lost()
            raise
        self.publisher.arrived()

    async def _audit(self, keys: tuple[bytes, ...]) -> None:
        self._counts["directory/audit"] += 1
        me = self._membership.me
        mine = Holder(me.node_id, me.incarnation[:TAG_BYTES])
        found = await self._directory.probe(keys, peer_time_s=0.0)
        self.publisher.audited([key for key, holders in zip(keys, found, strict=True) if mine not in holders])

    async def _sweep(self) -> None:
        await asyncio.sleep(SWEEP_PAUSE_S)
        now_s = self._now_s()
        buckets = self._sweeper.take(now_s, self._membership.me.node_id) if self._sure() else range(0)
        if buckets:
            self._counts["directory/sweep"] += 1
            dead = lambda holders: self._sweeper.dead(holders, now_s)  # noqa: E731
            self._counts["entries_swept"] += await self._directory.sweep(buckets, dead)

    def _sure(self) -> bool:
        return self._membership.state(self._now_s()) is State.JOINED and not self._membership.beats_failed

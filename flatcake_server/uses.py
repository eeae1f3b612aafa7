"""When sessions were used, for the journals: what is read often and extended seldom must not be the first to go after a restart.

A commit says when it was; a lookup is told once in so long, for all sessions used since, a batch a path. A session is written down
under its lock, so never after its own end, and only where the journal knows it by a segment. What is lost with a crash is the order of
the last moments.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from flatcake_server.catalog import Catalog, Session
from flatcake_server.disk import Disk

TELL_S: Final = 60.0
BATCH: Final = 256  # under a millisecond of the loop


async def tell_uses(catalog: Catalog, disks: Mapping[int, Disk]) -> None:
    """Write down when the sessions were used that `catalog.used` names, and forget these. Raises: Unavailable."""
    used, catalog.used = catalog.used, set()
    by_pool: dict[int, list[Session]] = defaultdict(list)
    for number in used:
        session = catalog.sessions.get(number)
        if session is not None and session.pool in disks:
            by_pool[session.pool].append(session)
    paths = [(disks[pool], sessions) for pool, sessions in by_pool.items() if not disks[pool].failure]
    # Side by side: one that hangs or fails keeps nothing from the others.
    results = await asyncio.gather(*(_tell_all(disk, sessions) for disk, sessions in paths), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error


async def _tell_all(disk: Disk, sessions: Sequence[Session]) -> None:
    for first in range(0, len(sessions), BATCH):
        await _tell(disk, sessions[first : first + BATCH])


async def _tell(disk: Disk, sessions: Iterable[Session]) -> None:
    # Whoever has a lock, or a turn under way, writes the session down itself, or ends it. By number, as all do that take several.
    # Each is asked just before: while one was waited for, a writer may have come, who may wait for room that others make.
    async with contextlib.AsyncExitStack() as locks:
        known = []
        for session in sorted(sessions, key=lambda session: session.session_no):
            if session.holds == 0 and not session.lock.locked():
                await locks.enter_async_context(session.lock)
                known.append(session)
        known = [session for session in known if not session.gone and any(f.committed_bytes for f in session.files)]
        await disk.run(disk.journal.put_session, *(session.record() for session in known))

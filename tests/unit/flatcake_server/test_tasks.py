"""Tasks that do not hear their first cancellation, and those that do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from flatcake_server.tasks import Background, end


def test_a_loop_that_loses_a_cancellation_ends_all_the_same():
    """As Python 3.11's `wait_for` loses it, when the answer came in the same turn of the loop."""

    async def deaf() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    async def work() -> None:
        tasks = [asyncio.ensure_future(each()) for each in (deaf, failing, asyncio.Event().wait)]
        await asyncio.wait(tasks, timeout=0)  # all have begun
        await end(tasks)
        assert all(task.done() for task in tasks)
        await end(tasks)
        await end(())

    asyncio.run(asyncio.wait_for(work(), 30))


def test_what_fails_behind_the_callers_back_is_told_and_counted(caplog):
    counts: Counter[str] = Counter()
    background, gate = Background(counts), asyncio.Event()

    async def fails() -> None:
        raise KeyError("slot")

    async def waits() -> None:
        await gate.wait()

    async def work() -> None:
        background.spawn(fails())
        background.spawn(waits())
        gate.set()
        await background.drain()
        gate.clear()
        background.spawn(waits())
        await background.end()

    asyncio.run(asyncio.wait_for(work(), 30))
    assert counts == {"unforeseen": 1}
    assert "KeyError: 'slot'" in caplog.text

"""Who waits for a window is told when there is one: nobody finds it only when he looks again by himself."""

from __future__ import annotations

import threading

import pytest
from waiting import until

from flatcake_transport import window as window_module
from flatcake_transport.errors import Overloaded
from flatcake_transport.window import StagingPool, Window, aligned_buffer

PAGE = 4096


@pytest.fixture(autouse=True)
def never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_LOOK_S", 1e6)


class Waiter:
    """One that waits for a window of a pool, and keeps it."""

    def __init__(self, pool: StagingPool) -> None:
        self.window: Window | None = None
        ahead = len(pool._changed._waiters)  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._ask, args=(pool,), daemon=True)
        self._thread.start()
        until(lambda: len(pool._changed._waiters) > ahead)  # type: ignore[attr-defined]

    def _ask(self, pool: StagingPool) -> None:
        self.window = pool.open_window(1e6)

    def served(self) -> bool:
        self._thread.join(20)
        return self.window is not None


def test_a_window_that_comes_back_is_told_of() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    taken = pool.open_window(0)
    waiter = Waiter(pool)
    taken.close()
    assert waiter.served()


def test_who_has_waited_tells_the_next() -> None:
    pool = StagingPool(4 * PAGE, PAGE)
    taken = [pool.open_window(0) for _ in range(2)]
    first, second = Waiter(pool), Waiter(pool)
    for window in taken:
        window.lose([])  # says nothing
    with pool._changed:
        pool._changed.notify()  # the first one looks
    assert first.served()
    assert second.served()


def test_a_window_that_could_not_be_made_leaves_its_place_to_who_waits() -> None:
    fails = threading.Event()

    def allocate(size_bytes: int) -> object:
        if not fails.is_set():
            fails.wait(30)
            raise OSError("no memory")
        return aligned_buffer(size_bytes)

    pool = StagingPool(2 * PAGE, PAGE, allocate=allocate)
    refused: list[Overloaded] = []

    def ask() -> None:
        try:
            pool.open_window(0)
        except Overloaded as error:
            refused.append(error)

    making = threading.Thread(target=ask)
    making.start()
    until(lambda: pool.stats().windows_out == 1)
    waiter = Waiter(pool)
    fails.set()
    making.join()
    assert refused
    assert waiter.served()

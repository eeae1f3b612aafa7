"""Bounded work, and locks that end."""

from __future__ import annotations

import threading

import pytest

import flatcake_client as fc
from flatcake_client.engines.lmcache_tasks import HELD_S_MAX, HITS_MAX, Locks, Workers


class FakeHit:
    def __init__(self):
        self.released = self.kept = 0
        self.lease = self

    def release(self):
        self.released += 1

    def keep(self):
        self.kept += 1


def test_what_is_too_much_is_refused_and_what_waits_at_the_end_is_cancelled():
    workers, go = Workers("test", 1, 2), threading.Event()
    first = workers.submit(go.wait)
    while not first.running():
        pass
    second, third = workers.submit(lambda: 2), workers.submit(lambda: 3)
    with pytest.raises(fc.Overloaded):
        workers.submit(lambda: 4)
    assert second.cancel()
    closer = threading.Thread(target=workers.close)
    closer.start()
    go.set()
    closer.join()
    assert first.result(1)
    assert third.cancelled() or third.result(1) == 3
    with pytest.raises(fc.Overloaded):
        workers.submit(lambda: 5)


def test_a_failure_is_passed_on():
    workers = Workers("test", 1, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0).result(5)
    assert workers.submit(lambda: 7).result(5) == 7
    workers.close()


def test_a_hit_is_kept_until_its_last_key_is_unlocked():
    locks, one, two = Locks(), FakeHit(), FakeHit()
    locks.hold("ab", one)
    locks.hold("bc", two)
    locks.unlock("a")
    assert not one.released
    locks.unlock("b")
    assert (one.released, two.released) == (1, 0)
    locks.unlock("bcc")
    assert two.released == 1
    locks.unlock("abc")
    assert (one.released, two.released, len(locks)) == (1, 1, 0)


def test_locks_are_renewed_and_end_by_themselves():
    clock = [0.0]
    locks = Locks(lambda: clock[0])
    old, young = FakeHit(), FakeHit()
    locks.hold("a", old)
    clock[0] = HELD_S_MAX / 2
    locks.hold("a", young)
    locks.tick()
    assert (old.kept, young.kept) == (1, 1)
    clock[0] = HELD_S_MAX + 1
    locks.tick()
    assert (old.released, young.released, young.kept) == (1, 0, 2)
    locks.unlock("a")
    assert young.released == 1


def test_locks_are_bounded_and_closed():
    locks = Locks()
    hits = [FakeHit() for _ in range(HITS_MAX + 1)]
    for number, hit in enumerate(hits):
        locks.hold([number], hit)
    assert [hit.released for hit in hits[:2]] == [1, 0]
    locks.close()
    assert all(hit.released == 1 for hit in hits)
    assert not len(locks)

"""What must wait until abandoned transfers rest.

Who stops waiting for a read or write (deadline, failure, close) may not give up at once what it still uses: a descriptor
closed under a read names another file a moment later, and a write grant given back under a write lets its bytes be used
twice. Such acts are left here, to a thread that looks after them and does nothing else: a caller is not held up by what
others left, and an engine that asks nothing more still gives back what it had.

Invariant: an act runs once, after all its transfers rest and its pause is over. Leaving one takes no lock, so a finalizer may.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from flatcake_transport.mover import Transfer

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05  # between two looks at transfers that have not come to rest


@dataclass(frozen=True, slots=True, eq=False)
class _Act:
    transfers: Sequence[Transfer]
    act: Callable[[], None]
    not_before_s: float


@dataclass(slots=True)
class _Waiting:
    """What the thread has taken in."""

    acts: list[_Act] = field(default_factory=list)
    settling: list[threading.Event] = field(default_factory=list)
    ended: bool = False


_Queue: TypeAlias = "queue.SimpleQueue[_Act | threading.Event | None]"


class Linger:
    """Acts that wait for transfers, or for a moment. Thread-safe. Its thread ends with it, when all is done."""

    def __init__(self) -> None:
        self._left: _Queue = queue.SimpleQueue()
        self._undone: set[_Act] = set()  # in the queue, with the thread, or being done
        threading.Thread(
            target=_look_after, args=(self._left, self._undone), name="flatcake-linger", daemon=True
        ).start()
        weakref.finalize(self, self._left.put, None)

    def leave(self, transfers: Sequence[Transfer], act: Callable[[], None], pause_s: float = 0.0) -> None:
        """Act later, in the thread, when all transfers rest, and not before `pause_s`."""
        left = _Act(transfers, act, time.monotonic() + pause_s)
        self._undone.add(left)
        self._left.put(left)

    def when_rested(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None:
        """Act now if all transfers rest, else later."""
        moving = [transfer for transfer in transfers if not transfer.done()]
        if moving:
            self.leave(moving, act)
        else:
            act()

    def settle(self, timeout_s: float) -> bool:
        """Wait for what is left, without its pauses. False: some transfer did not come to rest in time; its act is still to be done."""
        if not self._undone:
            return True  # with no time left, too: no thread need have its turn
        settled = threading.Event()
        self._left.put(settled)
        return settled.wait(timeout_s)


def _look_after(left: _Queue, undone: set[_Act]) -> None:
    waiting = _Waiting()
    while not waiting.ended or undone:
        _take_in(left, waiting)
        _act(waiting, undone)
        if not undone:
            for settled in waiting.settling:
                settled.set()
            waiting.settling.clear()


def _take_in(left: _Queue, waiting: _Waiting) -> None:
    with contextlib.suppress(queue.Empty):
        entry = left.get(timeout=LOOK_S if waiting.acts else None)
        if entry is None:
            waiting.ended = True
        elif isinstance(entry, _Act):
            waiting.acts.append(entry)
        else:
            waiting.settling.append(entry)


def _act(waiting: _Waiting, undone: set[_Act]) -> None:
    """Do what can be done by now. Nothing of it is kept: a thread that waits must not keep a client alive."""
    now_s = time.monotonic()
    acts, waiting.acts = waiting.acts, []
    for each in acts:
        if (waiting.settling or now_s >= each.not_before_s) and all(transfer.done() for transfer in each.transfers):
            try:
                each.act()
            except Exception as error:  # noqa: BLE001 - a thread's edge: without it nothing more would be given back
                log.warning("something left by a read or write could not be given back: %r", error)
            undone.discard(each)
        else:
            waiting.acts.append(each)

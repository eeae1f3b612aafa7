"""The seam of `flatcake replay`: what a store of KV blocks must do to be driven. FlatCake is one, a peer is an adapter.

Every system gets the same `Budget` and the same requests, and its bytes are checked by the harness, not by itself.

    lookup    at arrival       what is stored of the request's chain, and what restoring it costs
    restore   before prefill   those blocks into the engine's pages; what is in place when it returns counts as delivered
    store     after prefill    the blocks that were computed
    settle    at the end       wait for what still goes on behind the caller's back (offload to SSD)
    stats     at any time      counters
    close     last             give everything back, delete what was written

A block is `Budget.block_tokens` tokens; its key, 16 bytes, names the whole prefix up to and with it, so equal keys mean equal
bytes. Pages are one C-contiguous array (slots, planes, plane bytes) of uint8: block i of a call is `pages[slots[i]]`, all of its
planes one after the other; plane p alone is `pages[:, p]`. There is one such array in a run (`Budget.pages`), ordinary memory that
was touched before: a system may register it once.

An adapter is a Python file with

    def open_system(budget: Budget) -> System

run by `flatcake replay TRACE --adapter FILE.py`. Where it needs an environment of its own it lives in bench/peers/NAME.py and runs
in .venv-NAME, in which flatcake is installed, too; then `--system NAME` finds both. It may start processes of its own,
writes below `Budget.ssd_dir` and nowhere else, and prints nothing. Sizes it cannot work with are a ValueError that says which.

All verbs are called from several threads at once. None of them may raise for the store's sake: what cannot be had is a shorter
prefix, what cannot be stored is fewer blocks, and `SystemStats` says why. What they raise all the same is counted by the
harness as an error and is a miss.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flatcake_client.keys import KeyArray

Pages = NDArray[np.uint8]  # (slots, planes, plane bytes), C-contiguous
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Budget:
    """What a system may use, the same for all.

    Attributes:
        memory_bytes: host memory that holds blocks. Staging that a system needs besides is its own, and told by its stats.
        ssd_bytes: on the disk of `ssd_dir`; a hard limit.
        ssd_dir: an empty directory of this run alone.
        block_tokens: tokens a block.
        plane_bytes: bytes of a block in one layer; all layers are alike.
        planes: layers.
        pages: the engine's memory, where restores go to and stores come from. To register; the harness keeps it alive.
    """

    memory_bytes: int
    ssd_bytes: int
    ssd_dir: Path
    block_tokens: int
    plane_bytes: int
    planes: int
    pages: Pages

    @property
    def block_bytes(self) -> int:
        return self.planes * self.plane_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request, as an engine knows it when it arrives.

    Attributes:
        number: of the request in the run, from 0; unique.
        session, turn: of the conversation; turns count from 1.
        keys: of all full blocks of the prompt, (n, 16) uint8, from the first.
        input_tokens: of the prompt; what is behind the last full block is never stored.
        previous_reply_tokens: of the last reply in this session; None: first turn.
        share_counts: one a key: conversations that ask for the block in the whole replay, as an engine's prefix tree that has
            been warm for long would say.
        ending: a `restore` of it may call this once, when so little is left to read that the next had better begin. Who
            never does has the next one begin when it has returned.
    """

    number: int
    session: str
    turn: int
    keys: KeyArray
    input_tokens: int
    previous_reply_tokens: int | None
    share_counts: NDArray[np.int64]
    ending: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The longest stored prefix.

    Attributes:
        blocks: of the prompt's, from the first.
        bytes_by_medium: of these blocks by "memory" and "ssd". A system that does not know where they are says "ssd".
        pin: the system's own, handed back to `restore`.
    """

    blocks: int
    bytes_by_medium: Mapping[str, int] = field(default_factory=dict)
    pin: Any = None

    @property
    def ssd_bytes(self) -> int:
        return self.bytes_by_medium.get("ssd", 0)


@dataclass(frozen=True, slots=True)
class SystemStats:
    """Counters since the system was opened. What a system cannot know is None, never 0.

    Attributes:
        bytes_read: useful bytes restored, by "memory" and "ssd".
        read_commands: reads issued to the SSD.
        cancelled_restores: restores given up before their end for lack of staging, time or other room.
        rejected_blocks: blocks that `store` was given and the system refused.
        lost_blocks: accepted, then not to be had though the budget had room.
        dropped_blocks: evicted for room.
        staging_bytes: host memory used beside `Budget.memory_bytes`.
        more: anything else, for the report: plain JSON values.
    """

    bytes_read: Mapping[str, int] = field(default_factory=dict)
    read_commands: int | None = None
    cancelled_restores: int | None = None
    rejected_blocks: int | None = None
    lost_blocks: int | None = None
    dropped_blocks: int | None = None
    staging_bytes: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def counted_since(before: SystemStats, now: SystemStats) -> SystemStats:
    """What happened between two `stats`; `staging_bytes` and `more` as they are now."""

    def gained(name: str) -> int | None:
        was, is_now = getattr(before, name), getattr(now, name)
        return None if is_now is None else is_now - (was or 0)

    read = {medium: size_bytes - before.bytes_read.get(medium, 0) for medium, size_bytes in now.bytes_read.items()}
    return replace(
        now,
        bytes_read=read,
        read_commands=gained("read_commands"),
        cancelled_restores=gained("cancelled_restores"),
        rejected_blocks=gained("rejected_blocks"),
        lost_blocks=gained("lost_blocks"),
        dropped_blocks=gained("dropped_blocks"),
    )


def names_of(keys: KeyArray) -> list[bytes]:
    """Of blocks, to look up in a dict."""
    return [key.tobytes() for key in keys]


class Ledger:
    """What a store accepted, and what of it is not there when it is asked for again. Thread-safe.

    It is lost where all that was ever accepted fits `room_blocks`, and was dropped for room where not.
    """

    def __init__(self, room_blocks: int) -> None:
        self._room_blocks = room_blocks
        self._lock = threading.Lock()
        self._kept: dict[Hashable, None] = {}
        self._accepted = 0
        self.lost = self.dropped = 0

    def accept(self, keys: Iterable[Hashable]) -> None:
        with self._lock:
            before = len(self._kept)
            self._kept.update(dict.fromkeys(keys))
            self._accepted += len(self._kept) - before

    def known(self, keys: Iterable[Hashable]) -> set[Hashable]:
        """Those that were accepted and not missed since: to ask before the store is asked."""
        with self._lock:
            return {key for key in keys if key in self._kept}

    def miss(self, known: set[Hashable], keys: Iterable[Hashable]) -> None:
        """These are not there. Those of them that were `known` before count once, until they are accepted again."""
        with self._lock:
            gone = [key for key in keys if key in known and key in self._kept]
            for key in gone:
                del self._kept[key]
            if self._accepted <= self._room_blocks:
                self.lost += len(gone)
            else:
                self.dropped += len(gone)

    def kept(self) -> list[Any]:
        with self._lock:
            return list(self._kept)


class System(Protocol):
    """A store of blocks. Thread-safe.

    Attributes:
        name: in tables.
        prefetches_max: restores that it is best driven with at once, from the maker's documents or measured; say which in the file.
        settings: what it was started with, for the report: plain JSON values.
    """

    name: str
    prefetches_max: int
    settings: Mapping[str, Any]

    def lookup(self, asked: Asked) -> Found:
        """What is stored. What is found stays until its `restore` has returned, where the system can promise that."""
        ...

    def restore(self, asked: Asked, found: Found, pages: Pages, slots: Slots, timeout_s: float) -> int:
        """Bring blocks `0 .. found.blocks` to `pages[slots[i]]`. Called once for every `Found` with blocks.

        Returns:
            The prefix that is in place, in blocks; slots behind it hold anything. When this returns, nothing is written
            to `pages` any more.
        """
        ...

    def store(self, asked: Asked, first_block: int, pages: Pages, slots: Slots, timeout_s: float) -> int:
        """Keep the request's blocks from `first_block` on: they were computed. Block i is `pages[slots[i]]`, from i = 0.

        The blocks before were delivered, so they are stored, or were until a moment ago; they are in `pages`, too. Others may
        have stored some of the new ones meanwhile. When this returns, nothing is read from `pages` any more.

        Returns:
            How many of `first_block .. len(asked.keys)` are kept as far as the system says: stored now or before.
        """
        ...

    def settle(self, timeout_s: float) -> None: ...
    def stats(self) -> SystemStats: ...
    def close(self) -> None: ...


def open_adapter(file: Path, budget: Budget) -> System:
    """The system of an adapter file.

    Raises: ValueError: there is no such file, it is no adapter, it lacks a package, or it refuses the budget.
    """
    if not file.is_file():
        raise ValueError(f"--adapter {file} does not exist: give a Python file with open_system(budget)")
    spec = importlib.util.spec_from_file_location(f"flatcake_replay_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--adapter {file} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(f"--adapter {file} lacks a package here ({error}): run it in its own environment") from error
    opener = getattr(module, "open_system", None)
    if not callable(opener):
        raise ValueError(  # noqa: TRY004 - a caller's bug is ValueError
            f"--adapter {file} has no open_system(budget): it is no adapter of flatcake replay"
        )
    system: System = opener(budget)
    return system

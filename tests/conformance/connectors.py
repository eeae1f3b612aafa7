"""What must hold for every engine's connector: plain asserts, on a real connector over a real daemon.

A harness is one engine process as far as its KV goes: it puts the bytes it is given into the engine's own pages, by the
engine's own layout, and reads them back from there. Keys, slots, layers and transfers are the connector's. The suite makes
the bytes from the tokens, so any mix-up of blocks, layers or contexts shows, and no code of the connector is its own witness.

    check_connector(make, path)      make(endpoint, shape) -> Harness

Nothing that breaks may reach a harness as an exception: a connector has no right to raise into its engine.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import numpy as np
import pytest
from daemon import Daemon
from faults import files_of, flip
from waiting import pause, until

import flatcake_client as fc

Kv = list[np.ndarray]  # one array a layer, (blocks, plane_bytes) uint8

DEADLINE_S = 10.0  # no call of a harness takes longer, whatever the daemon does; engines are made with less
VERBS = (
    (fc.Space, "lookup"),
    (fc.Space, "begin_turn"),
    (fc.Hit, "restore"),
    (fc.Restore, "wait"),
    (fc.Restore, "wait_layer"),
    (fc.Turn, "write_layer"),
    (fc.Turn, "commit"),
)
ERRORS = (fc.Unavailable("x"), fc.Corrupt("x"), fc.Overloaded("x"), RuntimeError("x"))


@dataclass(frozen=True)
class Shape:
    """The model of an engine. Any difference is another space: its blocks are misses."""

    model: str = "check"
    layers: int = 3
    block_tokens: int = 16
    dtype: str = "bfloat16"


class Harness(Protocol):
    """An engine process: a connector with its engine's pages behind it. Calls come from several threads.

    Attributes:
        block_tokens: tokens of what the engine stores as one block.
        plane_bytes: bytes a block has in each layer.
    """

    block_tokens: int
    plane_bytes: Sequence[int]

    def store(self, tokens: np.ndarray, kv: Kv) -> bool:
        """Put the KV of the full blocks of a context into the engine's pages and have it stored; True when it is."""
        ...

    def lookup(self, tokens: np.ndarray) -> int:
        """Blocks of a context that the connector says are stored. What it pinned for that is given back."""
        ...

    def load(self, tokens: np.ndarray) -> tuple[int, Kv]:
        """Have a context brought into pages that hold other bytes; the blocks that came, and what their pages hold."""
        ...

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        """Begin to load a context and abort it as the engine does; then, how to read the pages it was to come to."""
        ...

    def close(self) -> None: ...


Make = Callable[[str, Shape], Harness]


def check_connector(make: Make, path: Path) -> None:
    """All that holds for every connector. `path`: an empty directory on a disk."""
    with Daemon(path, verify="all", lease_ttl="60s") as daemon:
        setting = Setting(daemon, make)
        for check in (
            check_miss_hit_and_partial,
            check_failures,
            check_abort,
            check_concurrency,
            check_other_layouts,
            check_damage,
            check_stopped_daemon,
            check_restarts,
        ):
            check(setting)
        setting.settled()
        daemon.check()


@dataclass
class Setting:
    daemon: Daemon
    make: Make

    @contextmanager
    def engine(self, shape: Shape = Shape(), *, answered: bool = True) -> Iterator[Engine]:
        """An engine while it lives. In the end it holds nothing at the daemon, if that has answered all it was told."""
        harness = self.make(self.daemon.endpoint, shape)
        try:
            yield Engine(harness)
            if answered:
                self.settled()
        finally:
            within(harness.close)

    def settled(self) -> None:
        self.daemon.until(lambda status: not status["leases"] and not status["open_turns"])


class Engine:
    """A harness, with every answer compared."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness

    def tokens(self, seed: int, blocks: int, after: np.ndarray | None = None) -> np.ndarray:
        """A context of so many blocks that only this seed has, and one token more: an engine always computes one."""
        size = blocks * self.harness.block_tokens
        fresh = np.random.default_rng(seed).integers(0, 250, size + 1, dtype=np.int64)
        return fresh if after is None else np.concatenate([after[:-1], fresh])

    def store(self, tokens: np.ndarray) -> bool:
        return within(lambda: self.harness.store(tokens, kv_of(self.harness, tokens)))

    def lookup(self, tokens: np.ndarray) -> int:
        return within(lambda: self.harness.lookup(tokens))

    def load(self, tokens: np.ndarray) -> int:
        """Blocks that came back. Each of them is compared, byte by byte."""
        blocks, pages = within(lambda: self.harness.load(tokens))
        assert len(pages) == len(self.harness.plane_bytes)
        for layer, (got, stored) in enumerate(zip(pages, kv_of(self.harness, tokens), strict=True)):
            assert np.array_equal(got[:blocks], stored[:blocks]), f"layer {layer}: other bytes came back"
        return blocks


def within(call: Callable[[], Any]) -> Any:
    started_s = time.monotonic()
    answer = call()
    took_s = time.monotonic() - started_s
    assert took_s < DEADLINE_S, f"an engine waited {took_s:.1f} s"
    return answer


def kv_of(harness: Harness, tokens: np.ndarray) -> Kv:
    """Bytes that follow from the tokens of a block, those before it, and the layer."""
    step, kv = harness.block_tokens, []
    for layer, size in enumerate(harness.plane_bytes):
        rows = []
        for end in range(step, len(tokens) // step * step + 1, step):
            text = tokens[:end].astype("<i8").tobytes() + bytes([layer])
            seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
            rows.append(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
        kv.append(np.array(rows, np.uint8).reshape(-1, size))
    return kv


def check_miss_hit_and_partial(setting: Setting) -> None:
    with setting.engine() as engine:
        whole = engine.tokens(1, 6)
        assert engine.lookup(whole) == 0
        assert engine.load(whole) == 0
        assert engine.store(whole)
        assert engine.lookup(whole) == 6
        assert engine.load(whole) == 6
        assert engine.store(whole), "what is stored already is no failure"
        longer = engine.tokens(2, 3, after=whole)
        assert engine.lookup(longer) == 6
        assert engine.load(longer) == 6
        assert engine.load(whole[: 4 * engine.harness.block_tokens + 1]) == 4
        forked = engine.tokens(3, 3, after=whole[: 2 * engine.harness.block_tokens + 1])
        assert engine.load(forked) == 2
        other_head = np.concatenate([engine.tokens(4, 1)[:-1], whole[engine.harness.block_tokens :]])
        assert engine.lookup(other_head) == 0, "equal tokens after another head are another context"
        assert engine.load(other_head) == 0
        assert engine.store(longer)
        assert engine.store(forked)
    with setting.engine() as engine:  # another process: nothing of the first is needed
        assert (engine.lookup(longer), engine.lookup(forked)) == (9, 5)
        assert (engine.load(longer), engine.load(forked), engine.load(whole)) == (9, 5, 6)


def check_failures(setting: Setting) -> None:
    """Every verb of the client fails in every way: no exception, never other bytes, and whole again afterwards."""
    with setting.engine() as engine:
        for number, (owner, verb) in enumerate(VERBS):
            known, fresh = engine.tokens(100 + number, 3), engine.tokens(200 + number, 2)
            assert engine.store(known)
            for error in ERRORS:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(owner, verb, raising(error))
                    assert engine.lookup(known) in (0, 3)
                    assert engine.load(known) in (0, 3)
                    engine.store(fresh)
                    assert engine.load(fresh) in (0, 2)
            until(lambda known=known: engine.load(known) == 3)
            until(lambda fresh=fresh: engine.store(fresh))
            until(lambda fresh=fresh: engine.load(fresh) == 2)
            setting.settled()


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def check_abort(setting: Setting) -> None:
    """After an abort the pages belong to others: nothing is written there any more, and nothing stays pinned."""
    with setting.engine() as engine:
        tokens = engine.tokens(300, 8)
        assert engine.store(tokens)
        for _ in range(5):
            pages = within(lambda: engine.harness.abort(tokens))
            before = pages()
            pause(0.05)
            assert pages() == before, "pages changed after the abort"
        assert engine.load(tokens) == 8


def check_concurrency(setting: Setting) -> None:
    """Two processes, two threads each, one head, contexts of their own and one that all store at once."""
    failures: list[BaseException] = []

    def converse(engine: Engine, seed: int, head: np.ndarray) -> None:
        try:
            context, common = head, engine.tokens(402, 3, after=head)
            for turn in range(3):
                assert engine.load(context) >= 2
                context = engine.tokens(1000 * seed + turn, 2, after=context)
                engine.store(context)
                engine.store(common)
                assert engine.load(context) == 2 + 2 * (turn + 1)
            assert engine.load(common) == 5
        except BaseException as error:
            failures.append(error)
            raise

    with setting.engine() as one, setting.engine() as two:
        head = one.tokens(401, 2)
        assert one.store(head)
        threads = [
            Thread(target=converse, args=(engine, 500 + n, head)) for n, engine in enumerate((one, two, one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def check_other_layouts(setting: Setting) -> None:
    """Whatever differs in the model's layout is a miss, though tokens and even sizes are the same."""
    base = Shape()
    changes = (
        replace(base, model="another"),
        replace(base, layers=base.layers + 1),
        replace(base, block_tokens=2 * base.block_tokens),
        replace(base, dtype="float16"),
    )
    with setting.engine() as engine:
        tokens = engine.tokens(600, 8)
        assert engine.store(tokens)
    for shape in changes:
        with setting.engine(shape) as engine:
            assert engine.lookup(tokens) == 0, f"{shape} found what another layout stored"
            assert engine.load(tokens) == 0
            assert engine.store(tokens)
            assert engine.load(tokens) == len(tokens) // engine.harness.block_tokens
    with setting.engine() as engine:
        assert engine.load(tokens) == 8


def check_damage(setting: Setting) -> None:
    """A flipped bit on the disk costs blocks, never text."""
    with setting.engine() as engine:
        before = set(files_of(setting.daemon.root / "ssd"))
        tokens = engine.tokens(700, 4)
        assert engine.store(tokens)
        fresh = [file for file in files_of(setting.daemon.root / "ssd") if file not in before]
        assert fresh, "a first turn's home is the disk"
        for file in fresh:
            flip(file, engine.harness.plane_bytes[0] + 5, bit=3)
        assert engine.load(tokens) < 4
        until(lambda: engine.store(tokens))
        until(lambda: engine.load(tokens) == 4)


def check_stopped_daemon(setting: Setting) -> None:
    """A daemon that does not answer costs each call its deadline."""
    with setting.engine(answered=False) as engine:
        known, fresh = engine.tokens(800, 3), engine.tokens(801, 3)
        assert engine.store(known)
        setting.daemon.signal(signal.SIGSTOP)
        try:
            assert engine.load(known) in (0, 3)
            assert engine.lookup(fresh) == 0
            assert not engine.store(fresh)
            assert engine.load(fresh) == 0
        finally:
            setting.daemon.signal(signal.SIGCONT)
        until(lambda: engine.load(known) == 3, 20)
        until(lambda: engine.store(fresh), 20)
        until(lambda: engine.load(fresh) == 3, 20)


def check_restarts(setting: Setting) -> None:
    """Of a daemon, under a living engine: killed and gone, back again, stopped and started."""
    with setting.engine() as engine:
        known, fresh = engine.tokens(900, 3), engine.tokens(901, 3)
        assert engine.store(known)
        setting.daemon.kill()
        assert engine.load(known) == 0
        assert engine.lookup(known) == 0
        assert not engine.store(fresh)
        setting.daemon.start()
        until(lambda: engine.load(known) == 3)
        setting.daemon.restart()
        until(lambda: engine.load(known) == 3)
        until(lambda: engine.store(fresh))
        assert engine.load(fresh) == 3

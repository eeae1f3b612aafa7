"""An engine of `test_torture.py`, a process of its own: `torture_engine.py ENDPOINT SEED STOP REPORT`. Random work until the file STOP is there.

Every byte that is delivered is compared with what its key says, slots that were not asked for with what was in them, and each call with the
time it was given. REPORT gets what was wrong, a line each, and as its last line what was done.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from kv import Kv
from waiting import pause

import flatcake_client as fc

LATE_S = 20.0  # beyond its own time, and not counting when this process stood still
EMPTY = 0xEE
TIMEOUT_S, TRANSFER_TIMEOUT_S = 2.0, 6.0
BLAMED = "wrong: "
SPACES: list[dict[str, Any]] = [
    {"model": "even", "layers": 3, "plane_bytes": 32768},
    {"model": "odd", "layers": 4, "plane_bytes": 3000},
]


class Pulse(threading.Thread):
    """Knows for how long this process was stopped: that time is nobody's fault."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._beat_s = time.monotonic()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=1000)
        self.start()

    def run(self) -> None:
        while True:
            pause(0.05)
            now_s = time.monotonic()
            if now_s - self._beat_s > 0.3:
                self._gaps.append((self._beat_s, now_s))
            self._beat_s = now_s

    def stood_s(self, began_s: float, ended_s: float) -> float:
        return sum(max(0.0, min(end, ended_s) - max(start, began_s)) for start, end in list(self._gaps))


class Engine:
    def __init__(self, client: Any, seed: int, pulse: Pulse) -> None:
        self.client, self.random, self.pulse = client, random.Random(seed), pulse
        self.spaces = [Kv(client, **spec) for spec in SPACES]
        self.held: list[tuple[Kv, Any, np.ndarray]] = []
        self.empty: deque[list[np.ndarray]] = deque()
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()

    def blame(self, what: str) -> None:
        self.wrong.append(what)
        print(f"{BLAMED}{what}", flush=True)  # at once: who is killed writes no report

    def step(self) -> None:
        work = self.random.choices(
            [self.store, self.restore, self.layers, self.cancelled, self.hold, self.lose], (6, 6, 3, 2, 3, 1)
        )
        with contextlib.suppress(fc.Overloaded, fc.Unavailable):
            work[0]()
        if len(self.empty) > 5 and any((pages != EMPTY).any() for pages in self.empty.popleft()):
            self.blame("slots were written after the restore had ended")

    @contextlib.contextmanager
    def within(self, what: str, limit_s: float) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            now_s = time.monotonic()
            if now_s - began_s > limit_s + LATE_S:
                pause(0.2)  # the pulse has its turn
                over_s = now_s - began_s - limit_s - self.pulse.stood_s(began_s, now_s)
                if over_s > LATE_S:
                    self.blame(f"{what} came {over_s:.1f} s too late")

    # Conversations that every engine can make up: a prompt, a session, a fork of it, so many turns.

    def conversation(self) -> tuple[Kv, np.ndarray, str | None]:
        kv, prompt = self.random.choice(self.spaces), self.random.randrange(3)
        session, fork = int(self.random.expovariate(0.1)), self.random.choice([0, 0, 1])
        tokens = kv.tokens(10**6 + prompt, 2 + prompt)
        for turn in range(self.random.randint(1, 5)):
            seed = ((prompt * 1000 + session) * 2 + (fork if turn > 1 else 0)) * 10 + turn
            tokens = kv.tokens(seed, 1 + seed * 7 % 5, after=tokens)
        return kv, kv.space.keys(tokens), self.random.choice([f"{prompt}.{session}.{fork}", None])

    def begin(self) -> tuple[Kv, Any, np.ndarray]:
        kv, keys, session = self.conversation()
        hints: dict[str, Any] = {}
        if self.random.random() < 0.4:
            hints["share_counts"] = [2] * 2 + [1] * (len(keys) - 2)
        if self.random.random() < 0.7:
            hints["previous_reply_tokens"] = self.random.choice([10, 10, 10_000])
        timeout_s = self.random.choice([0.001, 0.02]) if self.random.random() < 0.05 else None
        with self.within("begin_turn", TIMEOUT_S):
            return kv, kv.space.begin_turn(keys, session=session, timeout_s=timeout_s, **hints), keys

    def store(self) -> None:
        kv, turn, keys = self.begin()
        with self.within("a turn", kv.layers * TRANSFER_TIMEOUT_S), turn:
            kv.write(turn, keys)
            if self.random.random() < 0.9:
                turn.commit(self.random.choice([0.001, 0.05]) if self.random.random() < 0.1 else None)
                self.done["committed"] += 1

    def lose(self) -> None:
        """A turn that is neither committed nor aborted."""
        kv, turn, keys = self.begin()
        kv.write(turn, keys)

    def lookup(self) -> tuple[Kv, Any, np.ndarray]:
        kv, keys, _ = self.conversation()
        with self.within("lookup", TIMEOUT_S):
            hit = kv.space.lookup(keys)
        self.done["hits"] += bool(hit.blocks)
        return kv, hit, keys

    def target(self, kv: Kv, hit: Any) -> tuple[list[np.ndarray], np.ndarray]:
        slots = np.array(self.random.sample(range(hit.blocks + 3), hit.blocks), np.int64)
        return [np.full((hit.blocks + 3, kv.plane_bytes), EMPTY, np.uint8) for _ in range(kv.layers)], slots

    def compare(
        self, kv: Kv, keys: np.ndarray, target: list[np.ndarray], slots: np.ndarray, first: int, usable: int
    ) -> None:
        usable = min(usable, len(slots))
        for layer, pages in enumerate(target):
            if not np.array_equal(pages[slots[first:usable]], kv.bytes_of(keys[first:usable], layer)):
                self.blame(f"layer {layer}: other bytes came back")
            if (np.delete(pages, slots[first:], axis=0) != EMPTY).any():
                self.blame(f"layer {layer}: slots were written that nobody asked for")
        self.done["compared"] += max(0, usable - first)
        for pages in target:
            pages[:] = EMPTY
        self.empty.append(target)

    def bring(self, kv: Kv, hit: Any, keys: np.ndarray) -> None:
        target, slots = self.target(kv, hit)
        first = self.random.randint(0, hit.blocks) if self.random.random() < 0.3 else 0
        slots = slots[: self.random.randint(first, hit.blocks)] if self.random.random() < 0.3 else slots
        timeout_s = self.random.choice([0.0, 0.002, 0.02]) if self.random.random() < 0.2 else TRANSFER_TIMEOUT_S
        with self.within("a restore", timeout_s):
            usable = hit.restore(target, slots, first_block=first, timeout_s=timeout_s).wait()
        self.compare(kv, keys, target, slots, first, usable)

    def restore(self) -> None:
        kv, hit, keys = self.lookup()
        with hit:
            self.bring(kv, hit, keys)

    def hold(self) -> None:
        """Looked up now and restored some time later: what was found is not to go meanwhile, or past its lease is no hit."""
        self.held.append(self.lookup())
        if len(self.held) > self.random.choice([1, 1, 4]):
            kv, hit, keys = self.held.pop(0)
            with hit:
                self.bring(kv, hit, keys)

    def layers(self) -> None:
        kv, hit, keys = self.lookup()
        with hit:
            target, slots = self.target(kv, hit)
            restore, usable = hit.restore(target, slots), hit.blocks
            try:
                for layer in range(kv.layers):
                    restore.wait_layer(layer)
            except (fc.Unavailable, fc.Corrupt) as error:
                usable = getattr(error, "usable_blocks", 0)
            self.compare(kv, keys, target, slots, 0, usable)

    def cancelled(self) -> None:
        """Another thread ends the restore, or gives the hit back, while it is waited for."""
        kv, hit, keys = self.lookup()
        with hit:
            target, slots = self.target(kv, hit)
            restore = hit.restore(target, slots)
            ending = threading.Timer(
                self.random.choice([0.0, 0.002, 0.01]), self.random.choice([restore.close, hit.release])
            )
            ending.start()
            usable = restore.wait()
            ending.join()
            restore.close()
            self.compare(kv, keys, target, slots, 0, usable)


def main(endpoint: str, seed: int, stop: Path, report: Path) -> None:
    pulse = Pulse()
    client = fc.connect(endpoint, timeout_s=TIMEOUT_S, transfer_timeout_s=TRANSFER_TIMEOUT_S)
    engines = [Engine(client, 2 * seed + n, pulse) for n in range(2)]

    def work(engine: Engine) -> None:
        try:
            while not stop.exists() and not engine.wrong:
                engine.step()
                pause(0.02)
        except BaseException as error:  # noqa: BLE001 - told to the test
            engine.blame(repr(error))
        for _, hit, _ in engine.held:
            hit.release()

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with engines[0].within("close", 5.0):
        client.close()
    wrong = [line for engine in engines for line in engine.wrong]
    if client.stats().corrupt_segments:
        wrong.append("bytes differed from their checksums")
    done = sum((engine.done for engine in engines), Counter[str]())
    del client, engines, threads
    gc.collect()
    ends_s = time.monotonic() + 60
    while left := [each.name for each in threading.enumerate() if each.name.startswith("flatcake")]:
        if time.monotonic() > ends_s:
            wrong.append(f"threads are left: {left}")
            break
        pause(0.05)
    report.write_text("".join(f"{line}\n" for line in wrong) + json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))

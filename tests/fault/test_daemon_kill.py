"""kill -9 of the daemon at each step of commit, reclaim, growth, trim and drop; then: what was committed is a hit, all else free.

The daemon runs with a wrapper that ends its process by SIGKILL when a chosen call is made for the n-th time, before it or
after it. Nothing in the product knows.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from daemon import Daemon
from kv import Kv, connect

import flatcake_client as fc

ENGINE_ERRORS = (fc.Overloaded, fc.Unavailable)


def killer(root: Path, module: str, cls: str, method: str, *, at: int, after: bool) -> Path:
    """A wrapper file: SIGKILL at the `at`-th call of module.cls.method, before or after its work."""
    path = root / "killer.py"
    path.write_text(
        dedent(f"""
        import os, signal
        from {module} import {cls} as cls
        real, calls = cls.{method}, [0]
        def method(self, *a, **k):
            calls[0] += 1
            if calls[0] == {at} and not {after}: os.kill(os.getpid(), signal.SIGKILL)
            result = real(self, *a, **k)
            if calls[0] == {at} and {after}: os.kill(os.getpid(), signal.SIGKILL)
            return result
        cls.{method} = method
        """)
    )
    return path


FILES = "flatcake_server.session", "SessionFiles"
JOURNAL = "flatcake_server.journal", "Journal"
# What is on the disk after one step is what is there before the next, so not both are tried of each.
COMMIT_STEPS = [
    (*FILES, "create", "before", 1),
    (*FILES, "create", "after", 4),
    (*FILES, "open_write", "before", 4),
    (*FILES, "write_footer", "before", 4),
    (*FILES, "write_footer", "after", 1),
    (*JOURNAL, "commit", "before", 4),
    (*JOURNAL, "commit", "after", 1),
    (*JOURNAL, "commit", "after", 6),
]


def use_until_dead(daemon: Daemon, kv: Kv, contexts: list, *, turns: int = 40) -> list[tuple]:
    """Store turns until the daemon dies; (tokens) of those whose commit was answered."""
    committed = []
    for n in range(turns):
        if daemon.wait(0):
            break
        session, tokens = n % 3, contexts[n % 3]
        tokens = kv.tokens(100 + n, 2, after=tokens)
        try:
            kv.store(tokens, session=f"s{session}", context_tokens=10**6)
        except ENGINE_ERRORS:
            continue
        contexts[n % 3] = tokens
        committed.append((session, tokens))
    return committed


@pytest.mark.parametrize(
    ("module", "cls", "method", "when", "at"), COMMIT_STEPS, ids=lambda value: str(value).split(".")[-1]
)
def test_commit(tmp_path, module, cls, method, when, at):
    daemon = Daemon(tmp_path, wrapper=killer(tmp_path, module, cls, method, at=at, after=when == "after"))
    with daemon, connect(daemon) as client:
        kv = Kv(client)
        committed = use_until_dead(daemon, kv, [kv.tokens(n, 1) for n in range(3)])
        assert daemon.wait(5), "the wrapper never struck"
        daemon.wrapper = None
        daemon.start()
        first = adopted(daemon)
        newest = dict(committed)
        for tokens in newest.values():
            assert kv.hit(tokens) == len(tokens) // kv.block_tokens
        assert 0 <= first[2] - stored_blocks(kv, newest) <= 3, "no more than the turn that was under way"
        daemon.kill()
        daemon.start()
        assert adopted(daemon) == first, "a second start gives another store"
        kv.store(kv.tokens(999, 3), session="new")
        assert kv.hit(kv.tokens(999, 3)) == 3


def stored_blocks(kv: Kv, newest: dict) -> int:
    return sum(len(tokens) // kv.block_tokens for tokens in newest.values())


def adopted(daemon: Daemon) -> tuple:
    """What a start made of the path, after the law held."""
    report = daemon.check()
    pool = daemon.pool("ssd")
    assert pool["reserved_bytes"] == 0, "a start leaves nothing reserved"
    return report["sessions"], report["segments"], report["blocks"], pool["committed_bytes"], pool["free_bytes"]


# Tails go first, several together; then sessions.
RECLAIM_STEPS = [
    (*FILES, "truncate", "after"),
    (*JOURNAL, "drop", "before"),
    (*JOURNAL, "drop", "after"),
    (*FILES, "delete", "after"),
]


@pytest.mark.parametrize(("module", "cls", "method", "when"), RECLAIM_STEPS, ids=lambda value: value.split(".")[-1])
def test_reclaim(tmp_path, module, cls, method, when):
    """The store is filled until it reclaims; the daemon dies in the middle of it."""
    wrapper = killer(tmp_path, module, cls, method, at=2, after=when == "after")
    daemon = Daemon(tmp_path, wrapper=wrapper, ssd_bytes=16 << 20)
    with daemon, connect(daemon) as client:
        kv = Kv(client, plane_bytes=64 << 10)
        stored = []
        for n in range(60):
            try:
                kv.store(kv.tokens(n, 8), session=f"s{n}")
            except ENGINE_ERRORS:
                break
            stored.append(n)
        assert daemon.wait(5), "the wrapper never struck"
        daemon.wrapper = None
        daemon.start()
        first = adopted(daemon)
        hits = [n for n in stored if kv.hit(kv.tokens(n, 8)) == 8]
        assert len(hits) >= first[0] > 0, "sessions were adopted that are no hits"
        assert stored[-2] in hits, "the newest sessions are the last to go"
        daemon.kill()
        daemon.start()
        assert adopted(daemon) == first


@pytest.mark.parametrize(
    ("module", "cls", "method", "after"),
    [(*JOURNAL, "put_file", False), (*FILES, "truncate", False), (*FILES, "truncate", True)],
    ids=["put_file-before", "truncate-before", "truncate-after"],
)
def test_growth_and_trim(tmp_path, module, cls, method, after):
    """A session outgrows its file: a further one is made and the old one's tail is trimmed; the daemon dies in it."""
    daemon = Daemon(tmp_path, wrapper=killer(tmp_path, module, cls, method, at=1, after=after))
    with daemon, connect(daemon) as client:
        kv = Kv(client)
        tokens, stored = kv.tokens(0, 40), []
        for n in range(1, 60):
            try:
                kv.store(tokens, session="grows", context_tokens=10**6)
            except ENGINE_ERRORS:
                break
            stored.append(tokens)
            tokens = kv.tokens(n, 2, after=tokens)
        assert daemon.wait(5), "the wrapper never struck"
        daemon.wrapper = None
        daemon.start()
        first = adopted(daemon)
        assert kv.hit(stored[-1]) == len(stored[-1]) // kv.block_tokens
        daemon.kill()
        daemon.start()
        assert adopted(daemon) == first


@pytest.mark.parametrize(
    ("module", "cls", "method"), [(*JOURNAL, "put_file"), (*FILES, "truncate")], ids=["put_file", "truncate"]
)
def test_trim_of_an_idle_session(tmp_path, module, cls, method):
    """Nobody uses it: its tail is given back behind everybody's back, and the daemon dies in it."""
    daemon = Daemon(
        tmp_path,
        session_trim_after="1s",
        wrapper=killer(tmp_path, module, cls, method, at=1, after=method == "put_file"),
    )
    with daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 40))
        assert daemon.wait(15), "the wrapper never struck"
        daemon.wrapper = None
        daemon.start()
        first = adopted(daemon)
        assert kv.hit(kv.tokens(1, 40)) == 40
        daemon.kill()
        daemon.start()
        assert adopted(daemon) == first


@pytest.mark.parametrize(
    ("module", "cls", "method"),
    [(*JOURNAL, "load"), (*FILES, "list"), (*FILES, "delete"), (*FILES, "truncate")],
    ids=["load", "list", "delete", "truncate"],
)
def test_the_start_itself(tmp_path, module, cls, method):
    """Killed while it adopts, the next start does what this one would have."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 6), session="s")
        turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 6)), session="t")
        assert turn.blocks
        daemon.kill()  # a file without a journal entry, and one with a tail
        daemon.wrapper = killer(tmp_path, module, cls, method, at=1, after=True)
        with pytest.raises(AssertionError, match="the daemon ended"):
            daemon.start()
        daemon.wrapper = None
        daemon.start()
        assert kv.hit(kv.tokens(1, 6)) == 6
        assert adopted(daemon)[:2] == (1, 1)
        turn.abort()

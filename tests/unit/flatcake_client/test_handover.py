"""Descriptors from a daemon that answers late, wrong, in pages, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest
from fake_daemon import FakeDaemon
from waiting import until

from flatcake_client import handover as handover_module
from flatcake_client.handover import Descriptors, Handover
from flatcake_client.rpc import Rpc
from flatcake_transport.errors import Unavailable
from flatcake_transport.handoff import Verb
from flatcake_transport.window import OpenFile


def open_descriptors(daemon) -> int:
    """Of this process; none of those that the daemon, which is here too, has handed over."""
    with daemon.handing:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path, arena_bytes=1 << 20) as running:
        yield running


@pytest.fixture
def handover(daemon):
    rpc = Rpc(daemon.endpoint)
    welcome = rpc.hello("test", 5.0)
    connection = Handover(welcome.handover_path, welcome.client_id, welcome.token, 5.0)
    yield connection
    connection.close()
    rpc.close()


def add_files(daemon, count):
    for file_id in range(1, count + 1):
        daemon.files[file_id] = 0
        daemon.path(file_id).write_bytes(file_id.to_bytes(4, "little"))


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_all_pages_come(daemon, handover):
    add_files(daemon, 23)
    daemon.fds_a_message = 10
    found = handover.files(Verb.TURN, 1, 5.0)
    assert {file.device for file in found.files.values()} == {os.fstat(file.fd).st_dev for file in found.files.values()}
    assert sorted(found.files) == list(range(1, 24))
    for file_id, file in found.files.items():
        assert os.pread(file.fd, 4, 0) == file_id.to_bytes(4, "little")
        assert not os.get_inheritable(file.fd)
    fds = [file.fd for file in found.files.values()]
    found.close()
    found.close()
    assert not any(map(is_open, fds))


def test_forgotten_descriptors_are_closed(daemon, handover):
    add_files(daemon, 3)
    fds = [file.fd for file in handover.files(Verb.TURN, 1, 5.0).files.values()]
    assert not any(map(is_open, fds))


def bytes_of(found):
    return {file_id: os.pread(file.fd, 4, 0) for file_id, file in found.files.items()}


def test_files_that_were_read_are_not_asked_for_again(daemon, handover):
    add_files(daemon, 3)
    daemon.leases.add(7)
    first = handover.leased(7, {1, 2, 3}, 5.0)
    daemon.fail["hand"] = "is told"
    again = handover.leased(7, {1, 3}, 5.0)
    first.close()  # with its hit: what the next one reads from stays open
    assert bytes_of(again) == {file_id: file_id.to_bytes(4, "little") for file_id in (1, 3)}
    assert not any(os.get_inheritable(file.fd) for file in again.files.values())
    again.close()
    assert sorted(bytes_of(handover.leased(7, {1, 2}, 5.0))) == [1, 2]
    with pytest.raises(Unavailable, match="no such file"):
        handover.leased(7, {1, 4}, 5.0)


def test_files_that_were_written_are_kept_to_be_read_only(daemon, handover):
    add_files(daemon, 23)
    daemon.fds_a_message = 10
    written = handover.files(Verb.TURN, 1, 5.0)
    daemon.fail["hand"] = "is told"
    read = handover.leased(7, set(written.files), 5.0)
    assert sorted(bytes_of(read)) == list(range(1, 24))
    modes = [
        {fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE for file in each.files.values()} for each in (written, read)
    ]
    assert modes == [{os.O_RDWR}, {os.O_RDONLY}]


def test_few_files_are_kept_those_read_last(daemon, handover, monkeypatch):
    monkeypatch.setattr(handover_module, "KEPT_MAX", 2)
    add_files(daemon, 2)
    daemon.leases.add(7)
    handover.leased(7, {1, 2}, 5.0)
    handover.leased(7, {1}, 5.0)
    daemon.files.clear()
    daemon.files[3] = 0
    daemon.path(3).write_bytes(b"cccc")
    handover.leased(7, {3}, 5.0)
    kept = [file.fd for file in handover._kept._files.values()]
    daemon.fail["hand"] = "is told"
    assert sorted(handover.leased(7, {1, 3}, 5.0).files) == [1, 3]
    with pytest.raises(Unavailable, match="no such file"):
        handover.leased(7, {2}, 5.0)
    assert len(kept) == 2
    assert all(map(is_open, kept))
    handover.close()
    assert not any(map(is_open, kept))


def test_a_forked_child_keeps_nothing_open_whoever_had_the_lock(daemon, handover):
    add_files(daemon, 2)
    daemon.leases.add(7)
    handover.leased(7, {1, 2}, 5.0).close()
    kept = [file.fd for file in handover._kept._files.values()]
    with handover._kept._lock:  # of a thread that is not there
        handover.forget()
    assert len(kept) == 2
    assert not any(map(is_open, kept))


def test_what_is_closed_while_it_is_copied_is_not_taken_for_another_file(daemon, handover, monkeypatch):
    add_files(daemon, 2)
    daemon.leases.add(7)
    handover.leased(7, {1, 2}, 5.0)
    closing, real, others = threading.Thread(target=handover.close), os.dup, []

    def slow(fd):
        copy = real(fd)
        if not closing.ident:
            closing.start()
            closing.join(0.2)
            others.extend(real(daemon.arena) for _ in range(4))  # have the numbers of what was closed
        return copy

    monkeypatch.setattr(handover_module.os, "dup", slow)
    assert bytes_of(handover.leased(7, {1, 2}, 5.0)) == {n: n.to_bytes(4, "little") for n in (1, 2)}
    closing.join(20)
    assert not closing.is_alive()
    for fd in others:
        os.close(fd)


def test_a_process_that_can_open_no_more_asks(daemon, handover, monkeypatch):
    add_files(daemon, 2)
    daemon.leases.add(7)
    handover.leased(7, {1, 2}, 5.0)

    def full(fd):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as now:
        now.setattr(handover_module.os, "dup", full)
        asked = handover.leased(7, {1, 2}, 5.0)
        daemon.fail["hand"] = "is told"
        with pytest.raises(Unavailable, match="no such file"):
            handover.leased(7, {1, 2}, 5.0)
    assert sorted(bytes_of(asked)) == [1, 2]


def test_the_arena_is_shared(daemon, handover):
    arena = handover.arena(1 << 20, 5.0)
    assert handover.arena(1 << 20, 5.0) is arena
    arena[5] = 7
    assert os.pread(daemon.arena, 1, 5) == b"\x07"


def test_an_arena_shorter_than_promised_is_not_mapped(daemon, handover):
    with pytest.raises(Unavailable, match="no arena of"):
        handover.arena(1 << 30, 5.0)
    with pytest.raises(Unavailable, match="no arena of"):
        handover.arena(0, 5.0)


def test_what_has_ended_is_refused(handover):
    with pytest.raises(Unavailable, match="lease has ended"):
        handover.files(Verb.LEASE, 99, 5.0)
    assert not handover.lost()


def test_a_late_answer_is_not_taken_for_the_next(daemon, handover):
    add_files(daemon, 2)
    before = open_descriptors(daemon)
    stall = daemon.fail["hand"] = threading.Event()
    with pytest.raises(Unavailable, match="in time"):
        handover.files(Verb.TURN, 1, 0.01)
    with pytest.raises(Unavailable, match="in time"):
        handover.files(Verb.TURN, 1, 0.01)
    assert not handover.lost(), "a slow daemon has not taken anything back"
    del daemon.fail["hand"]
    stall.set()
    arena = handover.arena(1 << 20, 5.0)
    assert len(arena) == 1 << 20
    assert open_descriptors(daemon) <= before + 1, "the arena's"


def test_one_that_is_dropped_is_closed_without_a_warning(daemon):
    rpc = Rpc(daemon.endpoint)
    welcome = rpc.hello("test", 5.0)
    dropped = Handover(welcome.handover_path, welcome.client_id, welcome.token, 5.0)
    fd = dropped._socket.fileno()
    del dropped
    assert not is_open(fd)
    rpc.close()


def test_its_end_is_seen(daemon, handover):
    assert not handover.lost()
    daemon.stop()
    assert handover.lost()
    with pytest.raises(Unavailable, match="gone"):
        handover.files(Verb.TURN, 1, 5.0)
    daemon.start()
    assert handover.lost()


def test_closing_marks_it_lost_and_wakes_who_waits(daemon, handover):
    daemon.fail["hand"] = threading.Event()
    failures = []

    def ask():
        try:
            handover.files(Verb.TURN, 1, 30.0)
        except Unavailable as error:
            failures.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    while not handover._owed:
        pass
    handover.close()
    waiting.join(5)
    assert failures
    assert handover.lost()


def test_wrong_token_and_nobody(daemon, tmp_path):
    with pytest.raises(Unavailable, match="did not attach"):
        Handover(f"{tmp_path}/fake.sock.fds", 1, bytes(16), 5.0)
    with pytest.raises(Unavailable, match="on this machine"):
        Handover(f"{tmp_path}/nobody", 1, bytes(16), 5.0)


def test_descriptors_stay_open_under_a_transfer():
    from flatcake_client.linger import Linger

    read_end, write_end = os.pipe()
    linger = Linger()
    moving = type("Moving", (), {"rests": False, "done": lambda self: self.rests})()
    Descriptors({1: OpenFile(read_end, False), 2: OpenFile(write_end, False)}).close([moving], linger)
    assert is_open(read_end)
    moving.rests = True
    assert linger.settle(20)
    assert not is_open(read_end)


def test_who_asks_waits_no_longer_than_its_own_time_for_another_that_asks(daemon, handover):
    stall = daemon.fail["hand"] = threading.Event()
    patient = threading.Thread(target=lambda: handover.files(Verb.TURN, 1, 60.0), daemon=True)
    patient.start()
    until(lambda: handover._owed)
    hasty: list[Exception] = []

    def ask() -> None:
        for call in (lambda: handover.files(Verb.TURN, 1, 0.05), lambda: handover.arena(4096, 0.05)):
            try:
                call()
            except Unavailable as error:
                hasty.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)  # the daemon stalls for ten seconds
    assert len(hasty) == 2
    stall.set()
    patient.join(30)


def test_a_daemon_that_hands_nothing_over_holds_up_no_long_transfer(daemon, handover, monkeypatch):
    monkeypatch.setattr(handover_module, "ANSWER_S", 0.05)
    stall = daemon.fail["hand"] = threading.Event()
    for call in (lambda: handover.files(Verb.TURN, 1, 600.0), lambda: handover.arena(4096, 600.0)):
        with pytest.raises(Unavailable, match="in time"):
            call()
    stall.set()

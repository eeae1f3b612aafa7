"""What every journal does, whatever keeps its records: plain asserts, and a witness that reads the records by itself.

`make()` gives a new `Place`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from disk_path import same_segment
from journal_places import Place

from flatcake_server.journal import MARK_STEP
from flatcake_server.journal_records import RecordStore
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.space import SpaceSpec

SPACE = SpaceSpec(model="m", dtype="bf16", block_tokens=16, plane_bytes=(4096, 8192))
OTHER = replace(SPACE, model="é")
BOOT, NEXT_BOOT = b"b" * 16, b"c" * 16


def session_of(number: int, space: SpaceSpec = SPACE) -> SessionRecord:
    return SessionRecord(SessionNo(number), f"agent-{number}-é", space.fingerprint, number + 1, 1.5, number + 0.25)


def file_of(number: int, session_no: int, written: int = 1 << 20) -> FileRecord:
    return FileRecord(FileId(number), SessionNo(session_no), number % 4096 << 30, 1 << 21, written)


def segment_of(generation: int, file: FileRecord, *, blocks: int = 3, offset: int = 0) -> SegmentRecord:
    return SegmentRecord(
        generation=Generation(generation),
        session_no=file.session_no,
        address=Address.of(Medium.SSD, 5, file.base + offset),
        total_bytes=8192,
        turn=generation % 7,
        first_block=generation * 3,
        reason=("first-turn", "long-context")[generation % 2],
        keys=np.random.default_rng(generation).integers(0, 256, (blocks, 16), dtype=np.uint8),
        parent_key=bytes([generation % 256]) * 16,
        file_id=file.file_id,
        file_offset=offset,
    )


def number(value: int) -> bytes:
    return struct.pack(">Q", value)


def check_journal(make: Callable[[], Place]) -> None:
    """Every test of the contract, each on a new place."""
    for test in TESTS:
        test(make())


def an_empty_journal_has_nothing(place: Place) -> None:
    journal = place.open(BOOT)
    image = journal.load()
    assert (image.spaces, image.sessions, image.files, image.segments, image.meta) == ({}, {}, {}, [], {})
    assert (image.next_session_no, image.next_file_id, image.next_generation) == (1, 1, 1)
    assert image.blocks == 0
    journal.close()
    journal.close()


def what_is_committed_is_loaded(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    file = file_of(0x1234, 300)
    other = file_of(2, 4, written=9000)
    segments = [segment_of(n, file, blocks=n, offset=8192 * n) for n in (1, 2, 255, 256, 65536)[:2]]
    late = segment_of(65536, file, offset=65536)
    journal.commit(session_of(300), file, segments, {SPACE.fingerprint: SPACE})
    journal.commit(session_of(300), file, [late], {SPACE.fingerprint: SPACE})
    journal.commit(session_of(4, OTHER), other, [segment_of(256, other)], {OTHER.fingerprint: OTHER})
    journal.close()

    raw = place.raw()
    expected = {b"f" + number(0x1234), b"f" + number(2), b"n" + number(300), b"n" + number(4)}
    expected |= {b"g" + number(generation) for generation in (1, 2, 256, 65536)}
    expected |= {b"s" + SPACE.fingerprint, b"s" + OTHER.fingerprint, b"mmarks"}
    assert set(raw) - {b"mformat"} == expected
    assert raw[b"s" + OTHER.fingerprint] == OTHER.to_json()
    value = raw[b"g" + number(2)]
    assert struct.unpack_from("<QQQQQII", value) == (300, 0x1234, 16384, 8192, 6, 2, 2)
    assert value[48:64] == bytes([2]) * 16
    assert value[64:80] == bytes(16), "synced: no boot"
    assert value[80:] == segments[1].keys.tobytes() + b"first-turn"
    assert struct.unpack("<QQQQB", raw[b"f" + number(2)]) == (4, 2 << 30, 1 << 21, 9000, 0)
    assert struct.unpack_from("<Qdd", raw[b"n" + number(4)]) == (5, 1.5, 4.25)
    assert raw[b"n" + number(4)][24:] == OTHER.fingerprint + "agent-4-é".encode()

    image = place.open(BOOT).load(5)
    assert image.spaces == {SPACE.fingerprint: SPACE, OTHER.fingerprint: OTHER}
    assert image.sessions == {300: session_of(300), 4: session_of(4, OTHER)}
    assert image.files == {0x1234: file, 2: other}
    wanted = [*segments, segment_of(256, other), late]
    assert [segment.generation for segment in image.segments] == [1, 2, 256, 65536], "oldest first"
    assert all(same_segment(one, two) for one, two in zip(image.segments, wanted, strict=True))
    assert image.blocks == 1 + 2 + 3 + 3
    assert not image.fresh


def what_is_dropped_is_gone(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    one, two = file_of(1, 1), file_of(2, 2)
    for file, generations in ((one, (1, 2)), (two, (3, 4))):
        segments = [segment_of(n, file, offset=8192 * n) for n in generations]
        journal.commit(session_of(file.session_no), file, segments, {SPACE.fingerprint: SPACE})
    journal.drop(None, [], [Generation(3)])
    journal.drop(SessionNo(1), [FileId(1)], [Generation(1), Generation(2)])
    journal.drop(SessionNo(99), [FileId(99)], [Generation(99)])
    journal.drop(None, [], [])
    journal.close()
    assert {key for key in place.raw() if key[:1] in b"fgn"} == {b"f" + number(2), b"g" + number(4), b"n" + number(2)}
    image = place.open(BOOT).load()
    assert set(image.sessions) == {2}
    assert [segment.generation for segment in image.segments] == [4]


def records_are_replaced(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    files = [file_of(n, 1) for n in (1, 2)]
    for file in files:
        journal.commit(session_of(1), file, [], {SPACE.fingerprint: SPACE})
    cut = [replace(file, size_bytes=1 << 20, written_bytes=4096 * file.file_id, sealed=True) for file in files]
    used = replace(session_of(1), last_used_s=99.5, turns=77, name="other")
    journal.put_file(*cut)
    journal.put_session(used)
    journal.put_file()
    journal.put_session()
    journal.put_meta({"node": b"\0\xff", "incarnation": b""})
    with pytest.raises(ValueError, match="marks"):
        journal.put_meta({"marks": b"", "mine": b""})
    journal.close()
    image = place.open(BOOT).load()
    assert image.files == {1: cut[0], 2: cut[1]}
    assert image.sessions == {1: used}
    assert image.meta == {"node": b"\0\xff", "incarnation": b""}


def ids_are_never_used_again(place: Place) -> None:
    used = (0, 0, 0)
    for start in range(4):
        journal = place.open(BOOT)
        image = journal.load()
        first = (image.next_session_no, image.next_file_id, image.next_generation)
        assert all(one > two for one, two in zip(first, used, strict=True)), "an id is offered again"
        if start == 0:  # one that dies without a word: what it took is taken
            used = tuple(one + 10 for one in first)
        elif start == 1:
            used = (first[0] + MARK_STEP, first[1] + 7 * MARK_STEP, first[2] + 1)
            journal.cover(*used)
            journal.cover(1, 1, 1)
        elif start == 2:
            used = (first[0] + MARK_STEP * 3, first[1] + 2 * MARK_STEP, first[2] + 9 * MARK_STEP)
            file = file_of(used[1], used[0])
            journal.commit(session_of(used[0]), file, [segment_of(used[2], file)], {SPACE.fingerprint: SPACE})
            journal.drop(SessionNo(used[0]), [FileId(used[1])], [Generation(used[2])])
        if start % 2:
            place = place.kill()
        else:
            journal.close()
    journal.close()
    # Where the marks are lost, what is there still counts.
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1 << 40, 1 << 41)
    journal.commit(session_of(1 << 41), file, [segment_of(1 << 42, file)], {SPACE.fingerprint: SPACE})
    journal.close()
    place.put({b"mmarks": None})
    image = place.open(BOOT).load()
    assert (image.next_session_no, image.next_file_id, image.next_generation) == (2**41 + 1, 2**40 + 1, 2**42 + 1)


def marks_are_written_in_steps(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    journal.cover(0, 1, 0)
    before = place.kill().raw()[b"mmarks"]
    for n in range(1, MARK_STEP // 2, 997):
        journal.cover(n, n, n)
    assert place.kill().raw()[b"mmarks"] == before, "a mark is written once a step"
    journal.cover(0, MARK_STEP, 0)
    after = struct.unpack("<QQQ", place.kill().raw()[b"mmarks"])
    assert after[1] >= 2 * MARK_STEP
    assert after[0] == struct.unpack("<QQQ", before)[0]
    journal.close()


def what_was_not_synced_ends_with_the_boot(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1, 1)
    spaces = {SPACE.fingerprint: SPACE}
    journal.commit(session_of(1), file, [segment_of(1, file)], spaces, synced=False)
    journal.commit(session_of(1), file, [segment_of(2, file, offset=8192)], spaces)
    journal.close()
    journal = place.open(BOOT)
    image = journal.load()
    assert [s.generation for s in image.segments] == [1, 2], "a new process on a running machine loses nothing"
    assert image.forgotten == []
    journal.close()
    for lost in ([1], []):
        journal = place.open(NEXT_BOOT)
        image = journal.load()
        assert [s.generation for s in image.segments] == [2]
        assert image.forgotten == lost, "it is forgotten once, for good"
        journal.close()


def a_kill_loses_nothing_acknowledged(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1, 1)
    for n in range(1, 40):
        journal.commit(session_of(1), file, [segment_of(n, file, offset=8192 * n)], {SPACE.fingerprint: SPACE})
        if n % 4 == 0:
            journal.drop(None, [], [Generation(n - 2)])
    image = place.kill().open(BOOT).load(5)
    assert [s.generation for s in image.segments] == [n for n in range(1, 40) if n % 4 != 2 or n == 38]
    assert all(same_segment(s, segment_of(s.generation, file, offset=8192 * s.generation)) for s in image.segments)
    journal.close()


def a_segment_outside_its_file_is_a_bug(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1, 1, written=8192)
    for segment in (segment_of(1, file, offset=4096), segment_of(1, file_of(2, 1))):
        with pytest.raises(ValueError, match="not within"):
            journal.commit(session_of(1), file, [segment], {SPACE.fingerprint: SPACE})
    journal.commit(session_of(1), file, [segment_of(1, file)], {SPACE.fingerprint: SPACE})
    journal.close()
    assert [s.generation for s in place.open(BOOT).load().segments] == [1]


def damaged_records_are_corrupt(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1, 1)
    journal.commit(session_of(1), file, [segment_of(1, file)], {SPACE.fingerprint: SPACE})
    journal.close()
    good = place.raw()
    session, record, segment, space = (one + number(1) for one in (b"n", b"f", b"g", b"s"))
    space = b"s" + SPACE.fingerprint
    far = struct.pack("<QQQQB", 1, 1 << 30, 1 << 21, 4096, 0)
    for key, value in [
        (session, None),
        (record, None),
        (space, None),
        (record, far),  # the segment is beyond what it says is written
        (record, struct.pack("<QQQQB", 1, 0, 4096, 8192, 0)),
        (record, struct.pack("<QQQQB", 2, 1 << 30, 1 << 21, 1 << 20, 0)),
        (record, good[record][:-1]),
        (session, good[session][:30]),
        (session, good[session] + b"\xff"),
        (space, OTHER.to_json()),
        (space, b"{}"),
        (space, b"["),
        (segment, good[segment][:79]),
        (segment, good[segment][:100]),
        (segment, good[segment][:44] + bytes(4) + good[segment][48:]),
        (segment, good[segment] + b"\xff"),
        (b"mmarks", b"short"),
        (b"mformat", b"flatcake journal 2"),
        (b"g123", good[segment]),
        (b"n123", good[session]),
    ]:
        place.put({key: value})
        journal = place.open(BOOT)
        with pytest.raises(Corrupt, match="rebuild"):
            journal.load()
        journal.close()
        place.put({key: good.get(key)} if key != b"mformat" else {key: b"flatcake journal 1"})
    assert len(place.open(BOOT).load().segments) == 1


def many_threads_may_write(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()

    def work(which: int) -> None:
        file = file_of(which, which)
        for n in range(20):
            segment = segment_of(which * 1000 + n, file, offset=8192 * n)
            journal.commit(session_of(which), file, [segment], {SPACE.fingerprint: SPACE})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert len(place.open(BOOT).load().segments) == 80


class Failing:
    """A record store whose n-th write fails, and whose later ones would not."""

    def __init__(self, real: RecordStore, at: int) -> None:
        self.real, self.at = real, at

    def scan(self, prefix: bytes) -> object:
        return self.real.scan(prefix)

    def write(self, puts: object, deletes: object, *, sync: bool) -> None:
        self.at -= 1
        if self.at == 0:
            raise Unavailable("No space left on device")
        self.real.write(puts, deletes, sync=sync)  # type: ignore[arg-type]

    def close(self) -> None:
        self.real.close()


def after_a_failed_write_nothing_is_written(place: Place) -> None:
    journal = place.open(BOOT)
    journal.load()
    journal._records = Failing(journal._records, 2)  # type: ignore[assignment]
    file, spaces = file_of(1, 1), {SPACE.fingerprint: SPACE}
    journal.commit(session_of(1), file, [segment_of(1, file)], spaces)
    for n in (2, 3):
        with pytest.raises(Unavailable, match="No space left"):
            journal.commit(session_of(1), file, [segment_of(n, file, offset=8192 * n)], spaces)
    with pytest.raises(Unavailable, match="No space left"):
        journal.drop(None, [], [Generation(1)])
    journal.close()
    assert [s.generation for s in place.open(BOOT).load().segments] == [1]


TESTS: list[Callable[[Place], None]] = [
    an_empty_journal_has_nothing,
    what_is_committed_is_loaded,
    what_is_dropped_is_gone,
    records_are_replaced,
    ids_are_never_used_again,
    marks_are_written_in_steps,
    what_was_not_synced_ends_with_the_boot,
    a_kill_loses_nothing_acknowledged,
    a_segment_outside_its_file_is_a_bug,
    damaged_records_are_corrupt,
    many_threads_may_write,
    after_a_failed_write_nothing_is_written,
]

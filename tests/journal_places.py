"""Where a journal can live: RocksDB on a directory, and its twin in a dict, which tests of the store may use too."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rocksdict import AccessType, Options, Rdict

from flatcake_server.journal import Journal

KILLS_MAX = 100  # copies tried


class Place(Protocol):
    """Where a journal lives."""

    def open(self, boot_id: bytes) -> Journal: ...

    def raw(self) -> dict[bytes, bytes]:
        """All records, while no journal is open there."""
        ...

    def put(self, records: dict[bytes, bytes | None]) -> None:
        """Change records behind the journal's back; None removes."""
        ...

    def kill(self) -> Place:
        """The place as a kill of the process at this moment leaves it."""
        ...


class DictRecords:
    """The twin: the contract of `RecordStore` in a dict."""

    def __init__(self, records: dict[bytes, bytes] | None = None) -> None:
        self.records = {} if records is None else records
        self._lock = threading.Lock()

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            found = sorted((key, value) for key, value in self.records.items() if key[:1] == prefix)
        yield from found

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes], *, sync: bool) -> None:
        with self._lock:
            self.records.update(puts)
            for key in deletes:
                self.records.pop(key, None)

    def close(self) -> None:
        pass


class DictPlace:
    def __init__(self, records: dict[bytes, bytes] | None = None) -> None:
        self.records = {} if records is None else records

    def open(self, boot_id: bytes) -> Journal:
        return Journal(Path("/nowhere"), records=DictRecords(self.records), boot_id=boot_id)

    def raw(self) -> dict[bytes, bytes]:
        return dict(self.records)

    def put(self, records: dict[bytes, bytes | None]) -> None:
        for key, value in records.items():
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value

    def kill(self) -> DictPlace:
        return DictPlace(dict(self.records))


class RocksPlace:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "journal"

    def open(self, boot_id: bytes) -> Journal:
        return Journal(self.path, boot_id=boot_id)

    def raw(self) -> dict[bytes, bytes]:
        with self._database() as database:
            return dict(database.items())

    def put(self, records: dict[bytes, bytes | None]) -> None:
        with self._database(writable=True) as database:
            for key, value in records.items():
                if value is None:
                    del database[key]
                else:
                    database[key] = value

    @contextmanager
    def _database(self, *, writable: bool = False) -> Iterator[Rdict]:
        access = AccessType.read_write() if writable else AccessType.read_only(False)
        database = Rdict(str(self.path), Options(raw_mode=True), access_type=access)
        try:
            yield database
        finally:
            database.close()

    def kill(self) -> RocksPlace:
        """What is in the kernel's hands is what the next process reads; what is in this one's memory is gone."""
        return RocksPlace(copied_alive(self.root, self.root.with_name(self.root.name + "-killed")))


def copied_alive(root: Path, copy: Path) -> Path:
    """A copy of what a living RocksDB has on the disk, as a kill leaves it."""
    for again in range(KILLS_MAX):
        shutil.rmtree(copy, ignore_errors=True)
        try:
            shutil.copytree(root, copy)
            break
        except shutil.Error:  # it has deleted in the background what it needs no more: nobody died at such a moment
            if again == KILLS_MAX - 1:
                raise
    return copy

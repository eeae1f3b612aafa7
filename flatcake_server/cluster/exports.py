"""Which session files are exported, and for which leases. Pure: says what is to be exported and withdrawn, and does neither.

A file is exported while at least one remote lease needs it, once for all of them. Invariant: a file is listed here exactly
if a namespace for it exists or is being made; `ended` names it for withdrawal when its last lease is gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

File = TypeVar("File", bound=Hashable)
LeaseId = TypeVar("LeaseId", bound=Hashable)


class Exports(Generic[File, LeaseId]):
    """Belongs to the event loop."""

    def __init__(self, files_max: int) -> None:
        """Raises: ValueError: a bound below 1."""
        if files_max < 1:
            raise ValueError(f"files_max is {files_max}: expected 1 or more")
        self._files_max = files_max
        self._leases_of: dict[File, set[LeaseId]] = {}
        self._files_of: dict[LeaseId, set[File]] = {}

    def leased(self, lease: LeaseId, files: Iterable[File]) -> tuple[list[File], list[File]]:
        """A lease needs files.

        Returns: those to export now, and those that are beyond the bound: they are not of the lease, and served otherwise.
        """
        fresh, refused = [], []
        for file in files:
            leases = self._leases_of.get(file)
            if leases is None:
                if len(self._leases_of) >= self._files_max:
                    refused.append(file)
                    continue
                leases = self._leases_of[file] = set()
                fresh.append(file)
            leases.add(lease)
            self._files_of.setdefault(lease, set()).add(file)
        return fresh, refused

    def failed(self, file: File) -> None:
        """The file could not be exported: no lease has it any more."""
        for lease in self._leases_of.pop(file, ()):
            self._drop(lease, file)

    def ended(self, lease: LeaseId) -> list[File]:
        """A lease is over. Returns: files that nobody needs any more, to be withdrawn. Unknown leases are fine."""
        unused = []
        for file in self._files_of.pop(lease, ()):
            self._leases_of[file].discard(lease)
            if not self._leases_of[file]:
                del self._leases_of[file]
                unused.append(file)
        return unused

    def exported(self, lease: LeaseId) -> frozenset[File]:
        return frozenset(self._files_of.get(lease, ()))

    def __len__(self) -> int:
        return len(self._leases_of)

    def _drop(self, lease: LeaseId, file: File) -> None:
        files = self._files_of[lease]
        files.discard(file)
        if not files:
            del self._files_of[lease]

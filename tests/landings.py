"""Transfers moved by hand: nothing lands before the test says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.mover import Move


class Landing:
    """A transfer that lands, or fails with `error`, when the test says so."""

    def __init__(self, moves: Sequence[Move] = (), file: NDArray[np.uint8] | None = None) -> None:
        self.moves, self.landed = list(moves), False
        self.error: Exception | None = None
        self._file = file

    def land(self) -> None:
        for move in self.moves:
            move.target.data[:] = self._file[move.source.offset : move.source.offset + move.source.size_bytes]
        self.landed = True

    def done(self) -> bool:
        return self.landed

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.landed:
            raise TimeoutError
        if self.error is not None:
            raise self.error


class Hand:
    """A mover that reads from a file in memory, moved by hand."""

    def __init__(self, file: NDArray[np.uint8]) -> None:
        self.transfers: list[Landing] = []
        self._file = file

    def submit(self, moves: Sequence[Move]) -> Landing:
        self.transfers.append(Landing(moves, self._file))
        return self.transfers[-1]

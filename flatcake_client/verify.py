"""Checks what a restore reads against the footers of its segments.

A footer says whose bytes stand before it: the space, the keys, the place, and one checksum a granule. So it tells damaged
bytes, and also whole bytes of somebody else, from the ones that were looked up. It is read through the same descriptor or
mapping as the data. A shard whose writer computed no checksums (`verify = off` then) is checked by its footer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flatcake_client.keys import KeyArray
from flatcake_client.lease import Lease
from flatcake_client.records import Run
from flatcake_client.target import PlacedRun
from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import Corrupt
from flatcake_transport.footer import CHECKSUM_NONE, Footer, decode_footer
from flatcake_transport.space import SpaceSpec


class Verifier:
    """The footers of a restore's runs. Keys: (n, 16), one a position.

    Nothing is called corrupt, or reported, unless the lease is alive after the comparison: without it other bytes may stand
    there by right.
    """

    def __init__(
        self, spec: SpaceSpec, shard: int, keys: KeyArray, lease: Lease, report: Callable[[Sequence[Run]], None]
    ) -> None:
        self._fingerprint = spec.fingerprint
        self._shard = shard
        self._keys = keys
        self._lease = lease
        self._report = report
        self._footers: dict[int, Footer] = {}

    def knows(self, placed: PlacedRun) -> bool:
        """Whether the footer of the run's segment was learned already, for another run."""
        return int(placed.run.segment) in self._footers

    def learn(self, placed: PlacedRun, data: Any = None) -> None:
        """Take in the footer of a run's segment and compare what it says of the run.

        Args: data: the footer, 1-d uint8; not needed where `knows` is true.
        Raises: Corrupt: these are not the bytes that were looked up. Unavailable: the lease has ended.
        """
        run = placed.run
        try:
            footer = self._footers[int(run.segment)] if data is None else decode_footer(data.data)
        except Corrupt as error:
            raise self._corrupt(placed, str(error)) from error
        first, position = placed.first_block, placed.position
        keys = self._keys[position : position + placed.blocks]
        if (
            footer.spec.fingerprint != self._fingerprint
            or footer.blocks != run.segment_blocks
            or (footer.file_id, footer.file_offset)
            != (run.file_id, run.file_offset if run.file_id else run.segment.offset)
            or not np.array_equal(footer.keys[first : first + placed.blocks], keys)
        ):
            raise self._corrupt(placed, "another segment stands there than the one that was looked up")
        self._footers[int(run.segment)] = footer

    def first_bad(self, placed: PlacedRun, plane: int, first_block: int, blocks: int, data: Any) -> int | None:
        """The first position of the run whose granule differs, or None.

        Args:
            placed: the run; its footer was learned.
            plane: of the segment, shard-major.
            first_block: start of a granule.
            blocks: whole granules, or up to the end of the segment.
            data: their bytes, 1-d uint8.

        Raises: Unavailable: the lease has ended.
        """
        layout, footer = placed.layout, self._footers[int(placed.run.segment)]
        algorithm = footer.algorithms[self._shard]
        if algorithm == CHECKSUM_NONE:
            return None
        granule_blocks = int(layout.granule_blocks[plane])
        granules = layout.granules_of(plane, first_block, blocks)
        expected = footer.checksums[granules.start : granules.stop]
        actual = granule_checksums(data, layout.granule_bytes(plane), algorithm)
        bad = np.flatnonzero(actual != expected)
        if not len(bad):
            return None
        self._corrupt(placed, "")
        return placed.position + max(0, first_block + int(bad[0]) * granule_blocks - placed.first_block)

    def _corrupt(self, placed: PlacedRun, text: str) -> Corrupt:
        self._lease.check()
        self._report([placed.run])
        return Corrupt(f"{placed.run.segment}: {text}")

"""One file a way of moving bytes; `mover_for` says which one a local medium and a device need.

    medium   device   mover                                window
    memory   any      MemoryMover                          none: the arena is the source
    SSD      cpu      PosixMover, then MemoryMover         host
    SSD      cuda     GdsMover where cuFile can be used    on the device
                      else PosixMover, then MemoryMover    host, pinned

A restore always ends in the MemoryMover: it alone knows paged slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatcake_transport.address import Medium
    from flatcake_transport.mover import Mover


def mover_for(medium: Medium, device: str = "cpu") -> Mover:
    """Make the mover that brings bytes of a local medium to a window for `device` ("cpu", or e.g. "cuda:0").

    The caller owns and closes it. A `GdsMover` needs a window on the device, the others one in host memory; what a mover
    really does is in its `stats().path`.
    """
    # Here, so that the processes which run UCX, whose modules lie in this room, load no numpy.
    from flatcake_transport.address import Medium
    from flatcake_transport.movers import gds
    from flatcake_transport.movers.memory import MemoryMover
    from flatcake_transport.movers.posix import PosixMover

    if medium is Medium.MEMORY:
        return MemoryMover()
    if device.startswith("cuda") and gds.gds_available() is None:
        return gds.GdsMover()
    return PosixMover()

"""Which spaces are open on this node: the least recently used are forgotten when there are more than there may be. Pure.

Nothing depends on it but who asks: sessions and turns have their space themselves, and a client whose space is not known any
more opens it again and asks once more, as after a restart.
"""

from __future__ import annotations

from collections import OrderedDict

from flatcake_server.clients import UnknownSpace
from flatcake_transport.space import Fingerprint, SpaceSpec


class Spaces:
    """Belongs to the event loop."""

    def __init__(self, spaces_max: int) -> None:
        self._spaces_max = spaces_max
        self._specs: OrderedDict[Fingerprint, SpaceSpec] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._specs

    def open(self, spec: SpaceSpec, fingerprint: Fingerprint) -> None:
        """Raises: ValueError: the client computed another fingerprint."""
        if spec.fingerprint != fingerprint:
            raise ValueError(
                f"the client's fingerprint of the space is {fingerprint.hex()}, this daemon's {spec.fingerprint.hex()}: "
                "their versions differ"
            )
        self._specs[fingerprint] = spec
        self._specs.move_to_end(fingerprint)
        if len(self._specs) > self._spaces_max:
            self._specs.popitem(last=False)

    def spec(self, fingerprint: Fingerprint) -> SpaceSpec:
        """The space, used now. Raises: UnknownSpace."""
        spec = self._specs.get(fingerprint)
        if spec is None:
            raise UnknownSpace(f"space {fingerprint.hex()} is not open on this daemon: open it")
        self._specs.move_to_end(fingerprint)
        return spec

    def all(self) -> dict[Fingerprint, SpaceSpec]:
        return dict(self._specs)

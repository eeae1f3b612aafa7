"""Which UCX is here and what it can do, asked in a process of its own: a UCX that does not fit this machine may abort."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers import ucx_child
from flatcake_transport.movers.ucx_lib import load_ucx
from flatcake_transport.movers.ucx_worker import UcxWorker

# Transports over verbs: rc_verbs, ud_verbs, rc_mlx5, dc_mlx5, ud_mlx5 and their like.
_VERBS: Final = ("rc_", "dc_", "ud_")


@dataclass(frozen=True, slots=True)
class UcxHere:
    """`library`: version, origin and path. `transports`: each with its device, e.g. "rc_verbs/mlx5_0:1"."""

    library: str
    origin: str
    transports: tuple[str, ...]

    @property
    def verbs(self) -> bool:
        return any(transport.startswith(_VERBS) for transport in self.transports)


def describe_ucx(timeout_s: float = 10.0) -> UcxHere:
    """Raises: Unavailable: none loads, or it does not start, or it ends its process; the message says which."""
    child = ucx_child.spawn(__name__, "", [])
    try:
        said = child.communicate(timeout=timeout_s)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"UCX does not start within {timeout_s:g} s") from error
    finally:
        ucx_child.end(child)
    answer = said.splitlines()[-1:]
    if child.returncode or not answer:
        raise Unavailable(f"UCX ended its process with {child.returncode}: {said[-300:]}")
    told = json.loads(answer[0])
    if "error" in told:
        raise Unavailable(told["error"])
    return UcxHere(told["library"], told["origin"], tuple(told["transports"]))


def main() -> None:
    """The child."""
    try:
        library = load_ucx()
        worker = UcxWorker(library)
        told = asdict(UcxHere(library.named, library.origin, tuple(sorted(set(worker.transports())))))
        worker.close()
    except Unavailable as error:
        told = {"error": str(error)}
    print(json.dumps(told), flush=True)  # noqa: T201 - what the parent reads


if __name__ == "__main__":
    main()

"""Which UCX is here and what it can do, asked in a process of its own: a UCX that does not fit this machine may abort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_lib import FLAGS, load_ucx
from flatcake_transport.movers.ucx_worker import UcxWorker

# Transports over verbs: rc_verbs, ud_verbs, rc_mlx5, dc_mlx5, ud_mlx5 and their like.
_VERBS: Final = ("rc_", "dc_", "ud_")


@dataclass(frozen=True, slots=True)
class UcxHere:
    """`library`: version, origin and path. `transports`: each with its device, e.g. "rc_verbs/mlx5_0:1"."""

    library: str
    origin: str
    transports: tuple[str, ...]
    cuda: bool  # gets may land in CUDA memory

    @property
    def verbs(self) -> bool:
        return any(transport.startswith(_VERBS) for transport in self.transports)


def describe_ucx(timeout_s: float = 10.0) -> UcxHere:
    """Raises: Unavailable: none loads, or it does not start, or it ends its process; the message says which."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__],
            env=env, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"UCX does not start within {timeout_s:g} s") from error
    answer = run.stdout.strip().splitlines()[-1:]
    if run.returncode or not answer:
        raise Unavailable(f"UCX ended its process with {run.returncode}: {(run.stdout + run.stderr).strip()[-300:]}")
    told = json.loads(answer[0])
    if "error" in told:
        raise Unavailable(told["error"])
    return UcxHere(told["library"], told["origin"], tuple(told["transports"]), told["cuda"])


def main() -> None:
    """The child."""
    try:
        library = load_ucx()
        worker = UcxWorker(library)
        cuda = bool(worker.memory_types & 1 << FLAGS["UCS_MEMORY_TYPE_CUDA"])
        told = asdict(UcxHere(library.named, library.origin, tuple(sorted(set(worker.transports()))), cuda))
        worker.close()
    except Unavailable as error:
        told = {"error": str(error)}
    print(json.dumps(told), flush=True)  # noqa: T201 - what the parent reads


if __name__ == "__main__":
    main()

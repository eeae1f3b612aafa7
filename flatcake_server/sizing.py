"""How large a session's next file is. Pure.

A file is pre-allocated so that a session is contiguous on disk and its turns append; what is pre-allocated and not
written is disk nobody can use. Most first turns are never seen again, while a session that has grown long will mostly
grow on, so the first file takes little more than its turn needs and later ones double, up to a share of what the session
has written. bench/reserved.py measures both ends on real traces: bytes reserved / bytes written, files a session.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatcake_transport.layout import align_up


@dataclass(frozen=True, slots=True)
class SizingPolicy:
    """Shares are of bytes. `file_bytes_max` bounds what doubling may ask for, never what a turn needs.

    Defaults by bench/reserved.py, reserved / written of sessions used in the last 600 s, the strictest count there is
    (idle ones are trimmed, so over all sessions it was 1.002, 1.001 and 1.06; 1.03, 1.01 and 1.18
    where reclaim holds them to 1 TB), and files a session in place of segments:

                               Claude Code v8     v6, shared      Mooncake conversation
        headroom 0.1, growth 0.25   1.154  7.9      1.141  9.6      1.088  1.35
                 0.2         0.35   1.222  6.8      1.195  8.3      1.170  1.29     of 61, 54, 1.5 segments
                 0.2         0.5    1.311  6.0      1.266  7.2      1.181  1.27     above 1.25
    """

    headroom_share: float = 0.20  # of the first turn, on top of it
    growth_share: float = 0.35  # of what the session holds: the most a further file may be, if its turn needs no more
    file_bytes_max: int = 64 << 30

    def __post_init__(self) -> None:
        if self.headroom_share < 0 or self.growth_share < 0 or self.file_bytes_max < 1:
            raise ValueError("shares of headroom and growth are 0 or more, and a file may have bytes")


def file_bytes(need_bytes: int, session_written_bytes: int, previous_file_bytes: int, policy: SizingPolicy) -> int:
    """Bytes of the next file of a session whose turn needs `need_bytes` and does not fit what it has.

    Args:
        need_bytes: of the segment to write, footer included.
        session_written_bytes: committed in all files of the session; 0 before its first.
        previous_file_bytes: size its last file was created with, before any trim; 0 before its first.

    Returns:
        At least `need_bytes`, a multiple of 4 KiB.

    Raises:
        ValueError: need below 1, or a negative size.
    """
    if need_bytes < 1 or session_written_bytes < 0 or previous_file_bytes < 0:
        raise ValueError(f"sizes are bytes: need {need_bytes}, written {session_written_bytes}")
    if previous_file_bytes == 0:
        wanted = need_bytes + int(need_bytes * policy.headroom_share)
    else:
        wanted = min(2 * previous_file_bytes, int(session_written_bytes * policy.growth_share))
    return align_up(max(need_bytes, min(wanted, policy.file_bytes_max)))

"""The three errors of FlatCake, told apart by what the caller does next.

A miss or a partial hit is a value, never an error; a caller's bug is `ValueError`. Foreign exceptions (gRPC, OSError,
RocksDB) are translated once, at the edge where they appear, and chained. `Hangs` is a kind of `TimeoutError`, between movers and who
waits for them.
"""


class FlatCakeError(Exception):
    """Base of the three, for `except` clauses at an engine's edge. Never raised itself."""


class Overloaded(FlatCakeError):
    """A bound was met: quota, queue, sessions. Try later, or never; nothing was stored."""


class Unavailable(FlatCakeError):
    """The bytes or the daemon cannot be reached in time. Recompute; the next call may work again."""


class Corrupt(FlatCakeError):
    """Bytes differ from their checksum. They are quarantined: count a miss and recompute."""


class Hangs(TimeoutError):
    """Not landed, and what it waits for has not answered for long: whoever has another way had better take it."""

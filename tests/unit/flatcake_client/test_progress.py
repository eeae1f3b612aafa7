from __future__ import annotations

from flatcake_client.progress import Progress
from flatcake_transport.errors import Corrupt, Unavailable


def test_usable_needs_all_layers_and_all_before():
    progress = Progress(2, 5)
    progress.put(0, 0, 5)
    assert progress.usable() == 0
    progress.put(1, 2, 3)
    assert progress.usable() == 0, "blocks behind a hole are of no use"
    progress.put(1, 0, 1)
    assert progress.usable() == 1
    progress.put(1, 1, 1)
    assert progress.usable() == 5


def test_nothing_asked_is_all_there():
    assert Progress(3, 0).usable() == 0


def test_a_cut_keeps_what_lies_before():
    progress = Progress(1, 10)
    first, later = Corrupt("first"), Unavailable("later")
    progress.cut(6, first)
    progress.cut(8, later)
    assert progress.failure is first
    assert not progress.over
    assert [progress.wanted(at, 3) for at in (0, 4, 5, 6, 9)] == [3, 2, 1, 0, 0]
    progress.cut(0, later)
    assert progress.over


def test_stop_ends_it():
    progress = Progress(1, 10)
    progress.stop(Unavailable("deadline"))
    assert progress.over
    assert isinstance(progress.failure, Unavailable)

"""A load that finds nothing since the daemon could not be asked says so: it is no miss."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np

from flatcake_client import Unavailable
from flatcake_client.paged_kv import Loaded, PagedKv


def test_a_lookup_that_fails_is_said(caplog):
    kv, answers = PagedKv(SimpleNamespace(lookup=lambda _: contextlib.nullcontext(hit)), []), []
    for failure in (None, Unavailable("the daemon did not answer in 1 s")):
        hit = SimpleNamespace(blocks=0, failure=failure)
        answers.append(kv.load(np.zeros((4, 16), np.uint8), 2, np.zeros(2, np.int64), 1.0))
        assert ("the daemon did not answer in 1 s" in caplog.text) == (failure is not None)
    assert answers == [Loaded(0), Loaded(2)]

"""`check_journal` on RocksDB and on its twin in memory."""

from __future__ import annotations

import pytest
from conformance.journals import TESTS
from journal_places import DictPlace, RocksPlace


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
@pytest.mark.parametrize("kind", ["rocksdb", "twin"])
def test_journal(tmp_path, kind, test):
    test(RocksPlace(tmp_path / "place") if kind == "rocksdb" else DictPlace())

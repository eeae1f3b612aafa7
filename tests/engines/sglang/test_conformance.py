"""SGLang's storage and linker pass the suite of all connectors."""

from __future__ import annotations

from functools import partial

import pytest
from conformance.connectors import check_connector
from engines.sglang.harness import StorageHarness
from engines.sglang.linker_harness import LinkerHarness
from engines.sglang.pools import mla_pool

KINDS = {
    "layer first": StorageHarness,
    "page first, without prefix keys": partial(StorageHarness, layout="page_first", prefix=False),
    "MLA, page first direct": partial(StorageHarness, layout="page_first_direct", pool=mla_pool, is_mla_model=True),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_storage(make, tmp_path):
    check_connector(make, tmp_path)


@pytest.mark.parametrize("make", [LinkerHarness, partial(LinkerHarness, mla=True)], ids=["MHA", "MLA"])
def test_linker(make, tmp_path):
    check_connector(make, tmp_path)

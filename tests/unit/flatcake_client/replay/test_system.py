from __future__ import annotations

import pytest

from flatcake_client.replay.system import Found, Ledger, SystemStats, counted_since, open_adapter


def test_an_adapter_is_a_file_with_open_system(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def open_system(budget):\n    return ('mine', budget)\n")
    assert open_adapter(file, "a budget") == ("mine", "a budget")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("x = 1\n", "has no open_system"),
        ("import nothing_of_that_name\n", "lacks a package here"),
    ],
)
def test_what_is_no_adapter_is_said(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_adapter(file, None)


def test_a_find_says_what_lies_on_ssd():
    assert Found(3, {"ssd": 12, "memory": 5}).ssd_bytes == 12
    assert Found(0).ssd_bytes == 0


def test_what_happened_between_two_counts():
    before = SystemStats({"ssd": 5}, read_commands=3, staging_bytes=7)
    now = SystemStats({"ssd": 9, "memory": 2}, read_commands=10, lost_blocks=4, staging_bytes=8, more={"a": 1})
    found = counted_since(before, now)
    assert found == SystemStats({"ssd": 4, "memory": 2}, 7, lost_blocks=4, staging_bytes=8, more={"a": 1})


def test_what_is_gone_is_lost_only_while_everything_would_fit():
    roomy, full = Ledger(2), Ledger(1)
    for ledger in (roomy, full):
        ledger.accept(["a", "b"])
        ledger.accept(["a"])
        known = ledger.known(["a", "b", "c"])
        assert known == {"a", "b"}
        ledger.miss(known, ["b", "c"])
        ledger.miss(known, ["b"])
        assert ledger.kept() == ["a"]
    assert (roomy.lost, roomy.dropped) == (1, 0)
    assert (full.lost, full.dropped) == (0, 1)


def test_what_is_accepted_while_the_store_is_asked_is_not_lost():
    ledger = Ledger(2)
    known = ledger.known(["a"])
    ledger.accept(["a"])
    ledger.miss(known, ["a"])
    assert (ledger.lost, ledger.dropped) == (0, 0)

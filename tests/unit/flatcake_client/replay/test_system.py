from __future__ import annotations

import pytest

from flatcake_client.replay.system import Found, open_adapter


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

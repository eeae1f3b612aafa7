from __future__ import annotations

import pytest

from flatcake_client.replay.options import parse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace, or --profile"),
        (["x", "--profile", "chat"], "one of the two"),
        (["--profile", "nobody"], "unknown: choose claude-code, chat, api"),
        (["x", "--system", "redis"], "choose flatcake, none, mooncake, lmcache, or give --adapter"),
        (["x", "--ablation", "nothing"], "choose one-queue, eviction-layout, no-merge, window-of-one, memory-off"),
        (["x", "--ablation", "one-queue", "--system", "none"], "of --system flatcake only"),
        (["x", "--ablation", "memory-off", "--endpoint", "h:1"], "leave --endpoint out"),
        (["x", "--ablation", "eviction-layout", "--endpoint", "h:1"], "leave --endpoint out"),
        (["x", "--system", "none", "--endpoint", "h:1"], "--endpoint is of --system flatcake only"),
        (["x", "--adapter", "mine.py", "--endpoint", "h:1"], "--endpoint is of --system flatcake only"),
        (["x", "--short-reply-tokens", "0", "--endpoint", "h:1"], "leave --endpoint out"),
        (["x", "--load", "1,two"], "write one like"),
        (["x", "--load", "0"], "above 0"),
        (["x", "--workers", "0"], "above 0"),
        (["x", "--rate", "-1"], "--rate is above 0, not -1"),
        (["x", "--timeout", "0"], "--timeout is above 0"),
        (["x", "--limit", "-1"], "--limit is 0 or more, not -1"),
        (["x", "--max-tokens", "-5"], "--max-tokens is 0 or more"),
        (["x", "--prefetches", "-1"], "--prefetches is 0 or more"),
        (["x", "--prefetches", "1025"], "--prefetches is at most 1024"),
        (["x", "--agent-context-tokens", "-1"], "--agent-context-tokens is 0 or more"),
        (["x", "--short-reply-tokens", "-1"], "--short-reply-tokens is 0 or more"),
        (["x", "--load", "1,nan"], "above 0"),
        (["x", "--load", "inf"], "above 0"),
        (["x", "--rate", "nan"], "--rate is above 0, not nan"),
        (["x", "--prefill-rate", "inf"], "--prefill-rate is above 0, not inf"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_sizes_and_durations_have_units(capsys):
    options = parse(["x", "--ssd-bytes", "4GiB", "--dense", "1m30s", "--load", "0.5,2"])
    assert (options.ssd_bytes, options.shaping.dense_s, options.loads) == (4 << 30, 90.0, (0.5, 2.0))
    with pytest.raises(SystemExit):
        parse(["x", "--ssd-bytes", "much"])
    assert "is no size" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["x", "--dens", "5s"], ["x", "--nothing"], ["x", "--limit", "few"]])
def test_an_unknown_option_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("flatcake replay: ")
    assert said.endswith("See flatcake replay --help.\n")
    assert said.count("\n") == 1


def test_an_adapter_names_its_system():
    assert parse(["x", "--adapter", "somewhere/mine.py"]).system == "mine"
    assert parse(["x", "--system", "mooncake", "--adapter", "a.py"]).system == "mooncake"

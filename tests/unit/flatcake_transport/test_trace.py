from __future__ import annotations

import gzip
import json

import pytest
from traces import mooncake_lines, request

from flatcake_transport.trace import COMPACT, KV_CACHE_TESTER, MOONCAKE, read_trace, trace_format, write_trace

LINE = {"t": 0, "session": "a", "turn": 1, "input_tokens": 70, "output_tokens": 3, "block_tokens": 16}
LINE |= {"hash_delta": [0, 5, 4]}
MOON = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}
CALL = {"t": 0.5, "type": "s", "in": 130, "out": 9, "hash_ids": [1, 2]}
SESSION = {"id": "s", "block_size": 64, "requests": [CALL]}


def written(tmp_path, *lines, name="trace.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


@pytest.mark.parametrize(("line", "kind"), [(LINE, COMPACT), (MOON, MOONCAKE), (SESSION, KV_CACHE_TESTER)])
@pytest.mark.parametrize("zipped", [False, True])
def test_the_format_is_told_by_the_content(tmp_path, line, kind, zipped):
    data = (json.dumps(line) + "\n").encode()
    file = tmp_path / "some.name"
    file.write_bytes(gzip.compress(data) if zipped else data)
    assert trace_format(file) == kind
    (found,) = read_trace(file)
    assert len(found.ids) == (4 if kind == COMPACT else 2)


def test_each_field_is_read(tmp_path):
    (found,) = read_trace(written(tmp_path, LINE))
    assert (found.arrival_s, found.session, found.turn) == (0.0, "a", 1)
    assert (found.input_tokens, found.output_tokens, found.block_tokens) == (70, 3, 16)
    assert found.ids.tolist() == [5, 6, 7, 8]
    (found,) = read_trace(written(tmp_path, MOON))
    assert (found.arrival_s, found.session, found.turn, found.block_tokens) == (1.5, "inferred-1", 1, 512)
    (found,) = read_trace(written(tmp_path, SESSION))
    assert (found.arrival_s, found.session, found.input_tokens, found.output_tokens) == (0.5, "s", 130, 9)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LINE, "{not json"], ":2: broken JSON"),
        ([LINE, [1]], ":2: no JSON object"),
        ([LINE, LINE | {"t": "soon"}], ":2: t is 'soon'"),
        ([LINE, LINE | {"t": True}], ":2: t is True"),
        ([LINE, LINE | {"input_tokens": -1}], ":2: input_tokens is -1"),
        ([LINE, LINE | {"output_tokens": 1.5}], ":2: output_tokens is 1.5: expected a whole number"),
        ([LINE, LINE | {"session": None}], ":2: session is None"),
        ([LINE, LINE | {"hash_delta": None}], ":2: no hash_delta"),
        ([LINE, LINE | {"hash_delta": [0, 5]}], ":2: hash_delta is keep, then pairs"),
        ([LINE, LINE | {"hash_delta": [0, 5, 0]}], ":2: hash_delta is keep, then pairs"),
        ([LINE, LINE | {"hash_delta": [-1]}], ":2: hash_delta is keep, then pairs"),
        ([LINE, LINE | {"hash_delta": [0, 5, 10**12]}], ":2: hash_delta has more than"),
        ([LINE, LINE | {"t": 10**400}], ":2: t is 1000"),
        ([LINE, LINE | {"hash_delta": [5]}], ":2: keeps 5 ids of a, whose previous request has 4"),
        ([LINE, LINE | {"hash_delta": [1.5, 1, 2]}], ":2: hash_delta holds something other than integers"),
        ([LINE, LINE | {"input_tokens": 16}], ":2: 4 blocks of 16 tokens for an input of 16"),
        ([LINE, LINE | {"turn": 0}], ":2: turn 0"),
        ([LINE | {"t": 2}, LINE | {"t": 1}], ":2: arrives at 1.0 s, before"),
        ([{"t": 0, "session": "a", "input_tokens": 3}], ":1: has lengths but no block ids"),
        ([{"timestamp": 0, "input_length": 3}], ":1: has lengths but no block ids"),
        ([MOON, MOON | {"hash_ids": ["x"]}], ":2: hash_ids holds something other than integers"),
        ([MOON, MOON | {"hash_ids": [2**64]}], ":2: hash_ids holds something other than integers"),
        ([MOON, {k: v for k, v in MOON.items() if k != "hash_ids"}], ":2: hash_ids is missing"),
        ([SESSION | {"requests": [CALL, 7]}], ":1 (s, request 2): is no object"),
        ([SESSION | {"requests": [CALL | {"in": None}]}], ":1 (s, request 1): in is None"),
        ([SESSION | {"block_size": 0}], "block_tokens 0"),
        ([SESSION, SESSION | {"hash_id_scope": "global"}], "hash_id_scope is 'global'"),
        ([SESSION, MOON], ":2: no session of kv-cache-tester"),
        (["", "hello"], ":1: no trace"),
        ([""], ":1: no trace"),
        (['{"requests": ['], ":1: broken JSON"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path, lines, message):
    file = written(tmp_path, *lines)
    with pytest.raises(ValueError, match=r"trace\.jsonl") as error:
        list(read_trace(file))
    assert message in str(error.value)


def test_a_cut_gzip_file_is_named(tmp_path):
    file = tmp_path / "cut.gz"
    file.write_bytes(gzip.compress((json.dumps(LINE) + "\n").encode() * 500, mtime=0)[:-20])
    with pytest.raises(ValueError, match=r"cut\.gz:\d+: the gzip file is cut or damaged"):
        list(read_trace(file))


def test_a_directory_holds_sessions_and_nothing_else(tmp_path):
    with pytest.raises(ValueError, match=r"no \*\.json in this directory"):
        list(read_trace(tmp_path))
    written(tmp_path, MOON, name="moon.jsonl")
    with pytest.raises(ValueError, match="is a trace of its own"):
        list(read_trace(tmp_path))


def test_a_session_over_many_lines_and_several_in_one_file(tmp_path):
    many = written(tmp_path, json.dumps(SESSION, indent=2), name="many.json")
    assert [r.session for r in read_trace(many)] == ["s"]
    several = written(tmp_path, SESSION, SESSION | {"id": "t"}, name="several.json")
    assert sorted((r.session, r.ids.tolist()) for r in read_trace(several)) == [("s", [1, 2]), ("t", [4, 5])]


def test_a_file_is_opened_when_its_session_starts(tmp_path):
    """Only sessions that are open are in memory; the next to start is looked at, no further."""
    for n in range(6):
        written(tmp_path, SESSION | {"id": f"s{n}"}, name=f"{n}.json")
    read = read_trace(tmp_path, spread_s=1000.0)
    assert next(read).session == "s0"
    (tmp_path / "4.json").unlink()
    with pytest.raises(FileNotFoundError):
        list(read)


def test_progress_reaches_its_end(tmp_path):
    told = []
    file = tmp_path / "trace.gz"
    write_trace(file, (request(n, "s", [n]) for n in range(300)))
    list(read_trace(file, progress=lambda done, total: told.append((done, total))))
    assert told[-1] == (file.stat().st_size, file.stat().st_size)
    told.clear()
    written(tmp_path, SESSION, name="s.json")
    list(read_trace(tmp_path / "s.json", progress=lambda done, total: told.append((done, total))))
    assert told[-1][0] == told[-1][1] > 0


def test_requests_without_blocks_are_requests(tmp_path):
    file = written(tmp_path, *mooncake_lines([request(0, "", []), request(1, "", [4], block_tokens=512)]))
    assert [len(r.ids) for r in read_trace(file)] == [0, 1]
    out = tmp_path / "compact.gz"
    write_trace(out, read_trace(file))
    assert [r.ids.tolist() for r in read_trace(out)] == [[], [4]]


@pytest.mark.parametrize(("followers", "sessions"), [(6, 1), (7, 8)])
def test_a_block_that_many_follow_ends_nobody_s_turn(tmp_path, followers, sessions):
    """One request of one block, then others that go on from it, each otherwise."""
    chains = [[0], *([0, 1 + n] for n in range(followers))]
    requests = [request(n, "", ids, block_tokens=512) for n, ids in enumerate(chains)]
    read = list(read_trace(written(tmp_path, *mooncake_lines(requests))))
    assert len({r.session for r in read}) == sessions

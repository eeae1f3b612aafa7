"""Readers of three formats against naive decoding: dictionaries and lists, no numpy."""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from traces import mooncake_lines, paths, request, traffics

from flatcake_transport import trace as trace_module
from flatcake_transport.chains import FOLLOWERS_MAX
from flatcake_transport.trace import read_trace, write_trace


def same(one, other):
    fields = ("arrival_s", "session", "turn", "input_tokens", "output_tokens", "block_tokens")
    assert [[getattr(r, f) for f in fields] for r in one] == [[getattr(r, f) for f in fields] for r in other]
    assert [r.ids.tolist() for r in one] == [r.ids.tolist() for r in other]
    assert all(r.ids.dtype == np.int64 for r in one)


@given(traffics(), st.booleans())
def test_what_is_written_is_read(requests, plain):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl.gz"
        assert write_trace(file, iter(requests)) == len(requests)
        if plain:
            data, file = gzip.decompress(file.read_bytes()), Path(folder) / "trace.jsonl"
            file.write_bytes(data)
        same(list(read_trace(file)), requests)


runs = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4)), max_size=3)
lines = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), runs), min_size=1, max_size=10)


@given(lines)
def test_deltas_are_decoded_as_the_format_says(drawn):
    expected, held, texts = [], {}, []
    for n, (session, keep, added) in enumerate(drawn):
        before = held.get(session, [])
        keep = min(keep, len(before))
        ids = before[:keep] + [start + i for start, length in added for i in range(length)]
        held[session] = ids
        expected.append(ids)
        delta = [keep, *(number for run in added for number in run)]
        texts.append({"t": n, "session": session, "turn": 1, "input_tokens": 16 * len(ids), "output_tokens": 0})
        texts[-1] |= {"block_tokens": 16, "hash_delta": delta}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text("\n\n".join(map(json.dumps, texts)))
        assert [r.ids.tolist() for r in read_trace(file)] == expected


def inferred(chains, full):
    """Sessions as traces/README.md says, by dictionaries."""
    followers = {}
    for ids in chains:
        for block, after in itertools.pairwise(ids):
            followers.setdefault(block, set()).add(after)
    ended, turns, found = {}, {}, []
    for ids, blocks in zip(chains, full, strict=True):
        fit = [block for block in ids if block in ended and len(followers.get(block, ())) <= FOLLOWERS_MAX]
        session = ended[fit[-1]] if fit else len(turns)
        turns[session] = turns.get(session, 0) + 1
        if blocks:
            ended[ids[blocks - 1]] = session
        found.append((f"inferred-{session + 1}", turns[session]))
    return found


@given(st.data())
def test_sessions_of_mooncake_are_inferred(data):
    from traces import chained

    # Ten letters, so that more than FOLLOWERS_MAX blocks can come after one.
    wide = st.lists(st.text("abcdefghij", min_size=1, max_size=3), min_size=1, max_size=40)
    drawn = data.draw(st.one_of(paths.map(lambda found: [path for path in found if path]).filter(bool), wide))
    chains = chained(drawn)
    partial = data.draw(st.lists(st.booleans(), min_size=len(chains), max_size=len(chains)))
    size = trace_module.MOONCAKE_BLOCK_TOKENS
    requests = [
        request(n, "", ids, block_tokens=size, extra_tokens=-1 if cut else 0)
        for n, (ids, cut) in enumerate(zip(chains, partial, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mooncake.jsonl"
        file.write_text("\n".join(mooncake_lines(requests)))
        read = list(read_trace(file))
    expected = inferred(chains, [len(ids) - cut for ids, cut in zip(chains, partial, strict=True)])
    assert [(r.session, r.turn) for r in read] == expected
    assert [r.ids.tolist() for r in read] == chains


ids_of = st.lists(st.integers(0, 9), max_size=4)
calls = st.lists(st.tuples(st.integers(0, 20), ids_of), max_size=4)
agents = st.lists(st.tuples(st.integers(0, 20), calls), max_size=2)
documents = st.lists(st.tuples(calls, agents), min_size=1, max_size=4)


@given(documents, st.sampled_from(["local", "global", None]))
def test_sessions_of_kv_cache_tester_are_joined_by_time(drawn, scope):
    def entries(found):
        return [{"t": t, "type": "s", "in": 64 * len(ids), "out": 1, "hash_ids": ids} for t, ids in found]

    with tempfile.TemporaryDirectory() as folder:
        for n, (own, subagents) in enumerate(drawn):
            requests = entries(own)
            for k, (t, found) in enumerate(subagents):
                requests.append({"t": t, "type": "subagent", "agent_id": f"a{k}", "requests": entries(found)})
            document = {"id": f"s{n}", "block_size": 64, "requests": requests}
            document |= {"hash_id_scope": scope} if scope else {}
            # One line, or many: both are JSON.
            (Path(folder) / f"trace_{n:04}.json").write_text(json.dumps(document, indent=n % 2 or None))
        read = list(read_trace(Path(folder), spread_s=100.0))
    expected = {}
    for n, (own, subagents) in enumerate(drawn):
        start = n * trace_module._GOLDEN % 1.0 * 100.0
        for name, at, found in [(f"s{n}", 0, own), *((f"s{n}.a{k}", t, c) for k, (t, c) in enumerate(subagents))]:
            times = sorted((start + at + t, i) for i, (t, _) in enumerate(found))
            expected[name] = [(round(t, 6), turn, found[i][1]) for turn, (t, i) in enumerate(times, 1)]
    times = [r.arrival_s for r in read]
    assert times == sorted(times)
    by_session, offsets = {}, {}
    for r in read:
        ids = r.ids.tolist()
        if ids and scope != "global":
            known = expected[r.session][r.turn - 1][2]
            offset = offsets.setdefault(r.session.split(".")[0], ids[0] - known[0])
            ids = [number - offset for number in ids]
        by_session.setdefault(r.session, []).append((round(r.arrival_s, 6), r.turn, ids))
    assert by_session == {name: found for name, found in expected.items() if found}
    if scope != "global":
        owners = {}
        for r in read:
            for number in r.ids.tolist():
                assert owners.setdefault(number, r.session.split(".")[0]) == r.session.split(".")[0]

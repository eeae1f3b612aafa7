"""Spans, stack distances and sharing against the plainest rules there are."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traces import NaiveCache, paths, request, traffics

from flatcake_server.traffic.reuse import WINDOWS_S, analyse
from flatcake_server.traffic.spans import gather
from flatcake_transport.chains import DENSE_LIMIT, ChainNumbers


@given(traffics())
def test_spans_hold_the_trace(requests):
    traffic = gather(requests)
    first = np.concatenate(([0], np.cumsum(traffic.span_blocks)))
    number_of = {}
    for r, asked in enumerate(requests):
        numbers = [n for span in traffic.spans_of(r).tolist() for n in range(first[span], first[span + 1])]
        assert len(numbers) == len(asked.ids) == traffic.blocks[r]
        assert [number_of.setdefault(block, n) for block, n in zip(asked.ids.tolist(), numbers, strict=True)] == numbers
        assert traffic.sessions[traffic.session[r]] == asked.session
    assert len(set(number_of.values())) == len(number_of) == traffic.unique_blocks


@given(traffics())
def test_spans_are_as_long_as_they_can_be(requests):
    """Two spans that every request holds together, one behind the other, would be one."""
    traffic = gather(requests)
    holders = [
        {r for r in range(traffic.requests) if s in traffic.spans_of(r)} for s in range(len(traffic.span_blocks))
    ]
    for r in range(traffic.requests):
        spans = traffic.spans_of(r).tolist()
        for one, other in itertools.pairwise(spans):
            assert holders[one] != holders[other]


@given(traffics())
def test_one_pass_answers_for_every_cache_size(requests):
    traffic = gather(requests)
    sizes = np.arange(traffic.unique_blocks + 2)
    hits = analyse(traffic).runs.hits(sizes)
    for size in sizes.tolist():
        cache = NaiveCache(size)
        assert hits[size] == sum(cache.ask(asked.ids.tolist()) for asked in requests), size


@given(traffics(), st.floats(0, 1))
def test_the_cache_that_is_named_for_hits_has_them_and_a_smaller_one_has_not(requests, share):
    reuse = analyse(gather(requests))
    wanted = share * reuse.hit_blocks
    size = reuse.runs.cache_for(wanted)
    hits = reuse.runs.hits(np.array([size, max(0, size - 1)]))
    assert hits[0] >= wanted - 1e-6
    assert size == 0 or hits[1] < wanted + 1e-6


@given(traffics())
def test_counts_are_those_of_a_plain_count(requests):
    reuse = analyse(gather(requests))
    seen, own, counts, last = set(), {}, {}, {}
    hit = own_hit = hit_tokens = 0
    since, gaps = [], []
    for r, asked in enumerate(requests):
        ids = asked.ids.tolist()
        mine = own.setdefault(asked.session, set())
        found = [block for block in ids if block in seen]
        hit += len(found)
        hit_tokens += len(found) * asked.block_tokens
        own_hit += sum(block in mine for block in ids)
        for block in ids:
            if block in last:
                since.append(r - last[block])
                gaps.append(asked.arrival_s - requests[last[block]].arrival_s)
            counts[block] = counts.get(block, 0) + 1
            last[block] = r
        seen |= set(ids)
        mine |= set(ids)
    assert (reuse.hit_blocks, reuse.own_hit_blocks, reuse.hit_tokens) == (hit, own_hit, hit_tokens)
    assert reuse.once_blocks == sum(count == 1 for count in counts.values())
    assert sorted(np.repeat(reuse.runs.requests_since, reuse.runs.blocks).tolist()) == sorted(since)
    assert sorted(np.repeat(reuse.runs.gap_s, reuse.runs.blocks).tolist()) == sorted(gaps)
    distinct = dict(
        zip(dict.fromkeys(asked.session for asked in requests), reuse.sessions.distinct_blocks, strict=True)
    )
    assert distinct == {session: len(blocks) for session, blocks in own.items()}


@given(traffics())
def test_the_working_set_is_what_the_window_holds(requests):
    found = analyse(gather(requests)).working_set
    for i in range(0, len(found.at_s), 37):
        now = found.at_s[i]
        past = [asked for asked in requests if asked.arrival_s <= now]
        assert found.unique_blocks[i] == len({block for asked in past for block in asked.ids.tolist()})
        for w, window in enumerate(WINDOWS_S):
            recent = [asked for asked in past if asked.arrival_s > now - window]
            assert found.used_blocks[w, i] == len({block for asked in recent for block in asked.ids.tolist()})
        active = {asked.session for asked in past if asked.arrival_s > now - 300}
        assert found.active_sessions[i] == len(active)


# Ids of one letter only: they repeat within a chain and mean different prefixes, as in a trace that hashes contents.
lawless = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 70_000, DENSE_LIMIT + 5, -3]), max_size=6), min_size=1, max_size=12
)


@example([[1], [0, 1]])  # an unknown id before a known one
@example([[70_000, DENSE_LIMIT + 5], [70_000]])  # a table that is too small at first
@example([[0, 0], [0]])
@example([[0, 1], [2, 1], [2, 1, 1], [0, 1, 1]])
@settings(max_examples=300)
@given(lawless)
def test_equal_numbers_mean_equal_prefixes_whatever_the_ids(requests):
    chains, prefix_of, number_of = ChainNumbers(), {}, {}
    for ids in requests:
        before = chains.blocks
        numbers, known = chains.number(np.array(ids, np.int64))
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        assert known == sum(prefix in number_of for prefix in prefixes)
        assert numbers[known:].tolist() == list(range(before, before + len(ids) - known))
        for prefix, number in zip(prefixes, numbers.tolist(), strict=True):
            assert number_of.setdefault(prefix, number) == number
            assert prefix_of.setdefault(number, prefix) == prefix
    assert chains.blocks == len(number_of)


@given(paths.filter(any))
def test_ids_of_contents_alone_are_analysed_as_their_prefixes(drawn):
    """The same traffic, told with ids that keep the chain law and with ids that do not."""
    from traces import chained

    contents = [request(i, "x", [ord(letter) for letter in path]) for i, path in enumerate(drawn)]
    lawful = [request(i, "x", ids) for i, ids in enumerate(chained(drawn))]
    one, other = analyse(gather(contents)), analyse(gather(lawful))
    assert (one.hit_blocks, one.once_blocks) == (other.hit_blocks, other.once_blocks)
    assert one.runs.newer.tolist() == other.runs.newer.tolist()

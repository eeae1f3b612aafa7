"""Reads before writes, beside the rule said plainly: whoever comes, goes and ends, in whatever order and of whatever size."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from flatcake_transport.movers.precedence import PASSES_MAX, ReadsFirst

BYTES_MAX = 4
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "write"]), st.integers(1, 6)), st.tuples(st.just("end"), st.integers(0, 3))
    ),
    max_size=80,
)


@given(STEPS)
@example([("read", 2), ("write", 2), *[step for _ in range(2 * PASSES_MAX) for step in (("read", 2), ("end", 0))]])
def test_reads_pass_writes_and_no_write_waits_for_ever(steps: list[tuple[str, int]]) -> None:
    line: ReadsFirst[tuple[str, int]] = ReadsFirst(BYTES_MAX)
    waiting: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
    under_way: list[tuple[str, int]] = []
    passed = 0  # reads since a write went, while one waited
    for number, (step, size) in enumerate([*steps, *[("end", 0)] * 100]):
        if step == "end":
            if under_way:
                kind, ended = under_way.pop(size % len(under_way))
                line.ended(ended, yields=kind == "write")
        else:
            line.append((step, number), size, yields=step == "write")
            waiting[step].append((number, size))
        while line.ready:
            reading = any(kind == "read" for kind, _ in under_way)
            (kind, taken), size_bytes, yields = line.take()
            assert (yields, (taken, size_bytes)) == (kind == "write", waiting[kind].pop(0)), "first come first served"
            if kind == "write":
                assert passed == PASSES_MAX or not (waiting["read"] or reading), (
                    "a write went before a read, or beside one"
                )
                passed = 0
            else:
                passed += bool(waiting["write"])
                assert passed <= PASSES_MAX, "a write was passed too often"
            under_way.append((kind, size_bytes))
            assert len(under_way) == 1 or sum(each for _, each in under_way) <= BYTES_MAX
        assert len(line) == sum(map(len, waiting.values()))
        assert under_way or not line, "something waits, and nothing is under way"
        if waiting["read"] and passed < PASSES_MAX:
            room = BYTES_MAX - sum(each for _, each in under_way)
            assert waiting["read"][0][1] > room, "a read waits that would fit"
    assert not line
    assert not under_way

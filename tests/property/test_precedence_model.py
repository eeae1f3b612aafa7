"""Reads before writes, beside the rule said plainly: whoever comes and goes, in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.movers.precedence import PASSES_MAX, ReadsFirst

STEPS = st.lists(st.sampled_from(["read", "reads", "write", "take", "takes"]), max_size=40)


@given(STEPS)
def test_reads_pass_writes_and_no_write_waits_for_ever(steps: list[str]) -> None:
    line: ReadsFirst[tuple[str, int]] = ReadsFirst()
    waiting: dict[str, list[int]] = {"read": [], "write": []}
    passed = 0  # reads since a write went, while one waited
    for number, step in enumerate([*steps, *["takes"] * 40]):
        if "take" not in step:
            kind = "write" if step == "write" else "read"
            for more in range(10 if step == "reads" else 1):
                line.append((kind, 100 * number + more), yields=kind == "write")
                waiting[kind].append(100 * number + more)
            continue
        for _ in range(10 if step == "takes" else 1):
            assert len(line) == sum(map(len, waiting.values()))
            if not line:
                continue
            assert line.first() == line.first()
            first = line.first()
            kind, taken = line.popleft()
            assert (kind, taken) == first
            assert taken == waiting[kind].pop(0), "first come first served among equals"
            if kind == "write":
                assert not waiting["read"] or passed == PASSES_MAX, "a write went before a read"
                passed = 0
            else:
                passed += bool(waiting["write"])
                assert passed <= PASSES_MAX, "a write was passed too often"
    assert not line

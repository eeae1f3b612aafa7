"""Exports beside the naive rule: a file is exported while a lease has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_server.cluster.exports import Exports

FILES_MAX = 3

steps = st.lists(
    st.one_of(
        st.tuples(st.just("leased"), st.integers(0, 3), st.lists(st.integers(0, 4), max_size=4)),
        st.tuples(st.just("ended"), st.integers(0, 3), st.none()),
        st.tuples(st.just("failed"), st.integers(0, 4), st.none()),
    ),
    max_size=30,
)


@given(steps)
def test_a_file_is_exported_exactly_while_a_lease_has_it(steps):
    exports: Exports[int, int] = Exports(FILES_MAX)
    leases: dict[int, set[int]] = {}

    def held() -> set[int]:
        return set().union(*leases.values())

    for verb, number, files in steps:
        before = held()
        if verb == "leased":
            fresh, refused = exports.leased(number, files)
            leases.setdefault(number, set()).update(set(files) - set(refused))
            assert sorted(fresh) == sorted(held() - before)
            assert not set(refused) or len(held()) == FILES_MAX
        elif verb == "ended":
            gone = exports.ended(number)
            leases.pop(number, None)
            assert sorted(gone) == sorted(before - held())
        else:
            exports.failed(number)
            for lease in leases.values():
                lease.discard(number)
        assert len(exports) == len(held()) <= FILES_MAX
        for lease in range(4):
            assert exports.exported(lease) == leases.get(lease, set())


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="files_max"):
        Exports(0)

from __future__ import annotations

import pytest

from flatcake_server.lease import LeaseTable
from flatcake_transport.errors import Overloaded


def test_a_lease_pins_until_it_lapses_and_not_a_moment_longer() -> None:
    table = LeaseTable(10, 100)
    lease = table.grant(1, [7, 8, 7], 100.0)
    assert (lease.sessions, lease.expires_s) == ((7, 8), 110.0)
    assert table.expire(109.9) == 0
    assert (table.pins(7), table.pins(8), table.pins(9)) == (1, 1, 0)
    assert table.expire(110.0) == 1
    assert table.pins(7) == 0


def test_renewal_moves_the_end_and_tells_what_has_ended() -> None:
    table = LeaseTable(10, 100)
    one, other = table.grant(1, [7], 0).lease_id, table.grant(1, [8], 5).lease_id
    assert table.renew(1, [one], 9) == [one]
    assert table.renew(1, [other, one], 16) == [one]
    assert (table.pins(7), table.pins(8)) == (1, 0)


def test_releasing_twice_or_after_the_end_harms_nobody() -> None:
    table = LeaseTable(10, 100)
    mine, other = table.grant(1, [7], 0), table.grant(2, [7], 0)
    assert table.release(1, [mine.lease_id, mine.lease_id]) == 1
    assert table.release(1, [mine.lease_id, other.lease_id, 99]) == 0
    assert table.pins(7) == 1
    table.expire(10)
    assert table.release(2, [other.lease_id]) == 0
    assert table.pins(7) == 0
    table.check()


def test_a_client_takes_its_leases_with_it_and_no_others() -> None:
    table = LeaseTable(10, 100)
    for client in (1, 1, 2):
        table.grant(client, [7], 0)
    assert table.release_client(1) == 2
    assert table.release_client(1) == 0
    assert table.pins(7) == 1
    assert table.stats().orphaned_total == 2


def test_another_client_neither_renews_nor_releases() -> None:
    table = LeaseTable(10, 100)
    lease = table.grant(1, [7], 0)
    assert table.renew(2, [lease.lease_id], 5) == []
    assert table.release(2, [lease.lease_id]) == 0
    assert table.expire(10) == 1


def test_the_bound_counts_living_leases_only() -> None:
    table = LeaseTable(10, 2)
    table.grant(1, [7], 0)
    table.grant(1, [7], 1)
    with pytest.raises(Overloaded):
        table.grant(2, [8], 2)
    assert (table.pins(8), table.stats().refused_total) == (0, 1)
    table.grant(2, [8], 10)
    assert table.pins(7) == 1


def test_a_clock_that_goes_back_lengthens_no_lease() -> None:
    table = LeaseTable(10, 100)
    table.expire(100)
    assert table.grant(1, [7], 50).expires_s == 110
    table.check()


@pytest.mark.parametrize(("ttl_s", "leases_max"), [(0, 1), (-1, 1), (1, 0)])
def test_a_table_in_which_no_lease_can_live_is_refused(ttl_s: float, leases_max: int) -> None:
    with pytest.raises(ValueError):
        LeaseTable(ttl_s, leases_max)

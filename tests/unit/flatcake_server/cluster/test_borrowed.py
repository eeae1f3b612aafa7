"""Leases of other nodes: they end at the latest when their owner says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatcake_server.cluster.borrowed import Loan, Loans
from flatcake_transport.errors import Overloaded

LOAN = Loan(7, b"b" * 16, 42, 10.0, 110.0)


def test_a_loan_lives_until_its_end():
    loans = Loans(2)
    loans.add(1, LOAN)
    assert loans.get(1, 109.9) == LOAN
    assert loans.get(1, 110.0) is None
    loans.renewed(1, LOAN, 105.0)
    assert loans.get(1, 114.9) is not None
    assert loans.end([1, 2])[0].lease_id == 42
    assert len(loans) == 0


def test_a_renewal_of_an_earlier_loan_says_nothing_of_this_one():
    loans = Loans(2)
    loans.add(1, replace(LOAN, incarnation=b"c" * 16))
    loans.renewed(1, LOAN, 500.0)
    assert loans.get(1, 111.0) is None


def test_what_an_owner_lent_us_is_known_by_its_incarnation():
    loans = Loans(3)
    loans.add(1, LOAN)
    loans.add(2, replace(LOAN, node_id=8))
    loans.add(3, replace(LOAN, incarnation=b"c" * 16, lease_id=43))
    assert loans.of_node(7, b"b" * 16) == [42]
    assert loans.of_node(7, b"c" * 16) == [43]
    loans.end([1])
    assert loans.of_node(7, b"b" * 16) == []


def test_they_are_bounded_and_orphans_are_given_up():
    loans = Loans(1)
    loans.add(1, LOAN)
    with pytest.raises(Overloaded):
        loans.add(2, LOAN)
    assert loans.orphans([1].__contains__) == []
    assert loans.orphans([].__contains__) == [LOAN]
    assert len(loans) == 0

"""The lease on a node id, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatcake_server.cluster.members import Beat, Member, Membership, State, Verdict, decode_member

ME = Member(3, b"a" * 16, "10.0.0.3:7450", "1", b"f" * 16)
OTHER = replace(ME, incarnation=b"b" * 16, address="10.0.0.4:7450")


def joined(at_s=100.0):
    membership = Membership(ME, ttl_s=9.0)
    assert membership.answered(Beat(Verdict.FRESH), at_s)
    return membership


def test_a_member_comes_back_as_it_was_written():
    assert decode_member(ME.encode()) == ME
    for wrong in (b"", b"x" * 40, ME.encode()[:-3], b"a" * 16 + b"[]", b"a" * 16 + b'{"node": 1}', b"a" * 16 + b"\xff"):
        assert decode_member(wrong) is None


def test_the_lease_is_counted_from_before_it_was_asked():
    membership = Membership(ME, ttl_s=9.0)
    assert membership.state(0.0) is State.OUTSIDE
    membership.answered(Beat(Verdict.FRESH), 100.0)
    assert membership.state(108.9) is State.JOINED
    assert membership.state(109.0) is State.CUT_OFF


def test_beats_come_three_times_a_ttl():
    membership = joined()
    assert membership.wait_s(100.0) == pytest.approx(3.0)
    assert membership.wait_s(200.0) == 0.0


def test_renewed_is_no_reason_to_publish_again_but_fresh_is():
    membership = joined()
    assert not membership.answered(Beat(Verdict.RENEWED), 103.0)
    assert membership.answered(Beat(Verdict.FRESH), 106.0), "the directory had lost us"


def test_an_hour_without_the_directory():
    """Backoff grows to its bound and stays there; the first answer heals."""
    membership = joined()
    now_s, pauses = 103.0, []
    while now_s < 3700.0:
        membership.failed(now_s, jitter=0.999)
        pauses.append(membership.wait_s(now_s))
        now_s += pauses[-1]
    assert pauses[0] < 0.3
    assert 4.9 < pauses[-1] <= 5.0
    assert membership.state(now_s) is State.CUT_OFF
    assert membership.answered(Beat(Verdict.FRESH), now_s)
    assert membership.state(now_s) is State.JOINED
    assert membership.wait_s(now_s) == pytest.approx(3.0)


def test_a_taken_id_is_not_ours_though_it_was():
    membership = joined()
    membership.answered(Beat(Verdict.TAKEN, OTHER), 103.0)
    assert membership.state(103.0) is State.REFUSED
    assert membership.holder == OTHER


def test_a_dead_holder_is_followed_and_only_that_one():
    membership = Membership(ME, ttl_s=9.0)
    membership.answered(Beat(Verdict.TAKEN, OTHER), 1.0)
    membership.holder_is_dead(b"c" * 16)
    assert membership.takeover == b""
    membership.holder_is_dead(OTHER.incarnation)
    assert membership.takeover == OTHER.incarnation
    assert membership.wait_s(1.0) == 0.0
    assert membership.answered(Beat(Verdict.FRESH), 1.1)
    assert (membership.state(1.2), membership.takeover) == (State.JOINED, b"")


def test_a_late_answer_does_not_shorten_the_lease():
    membership = joined()
    membership.answered(Beat(Verdict.RENEWED), 103.0)
    membership.answered(Beat(Verdict.RENEWED), 101.0)
    assert membership.state(111.9) is State.JOINED


def test_who_left_stays_away():
    membership = joined()
    membership.leave()
    assert not membership.answered(Beat(Verdict.FRESH), 103.0)
    assert membership.state(103.0) is State.LEFT


def test_others_are_known_by_their_incarnation():
    membership = joined()
    seven, stranger = replace(OTHER, node_id=7), replace(OTHER, node_id=8, fingerprint=b"x" * 16)
    membership.answered(Beat(Verdict.RENEWED, members=(ME, seven, stranger)), 103.0)
    assert set(membership.known) == {7}, "neither oneself nor who speaks another format"
    assert membership.live(7, b"bbbb") == seven
    assert membership.live(7, b"aaaa") is None, "an entry of an earlier incarnation"
    assert membership.live(8, b"bbbb") is None
    membership.answered(Beat(Verdict.RENEWED, members=None), 106.0)
    assert set(membership.known) == {7}, "None says nothing changed"

"""What no client should send, sent: it is refused with words, nothing of it stays, and the daemon goes on."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from daemon import Daemon
from kv import Kv, connect
from wire import SPEC, Refused, Wire, ask, some_keys

from flatcake_proto.v1 import store_pb2
from flatcake_transport.handoff import Status, Verb, decode_reply
from flatcake_transport.space import SpaceSpec

STALE, UNKNOWN, BAD = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("bad")) as daemon:
        yield daemon


@pytest.fixture
def wire(node):
    """A client; what it left behind is gone when the test ends, and the law holds."""
    with Wire(f"unix:{node.options['socket']}") as client, client.handover() as life:
        assert decode_reply(life.recv(1 << 16)).status is Status.OK
        yield client
    node.until(lambda status: status["clients"] == status["open_turns"] == status["leases"] == 0)
    node.check()
    assert node.pool("memory")["reserved_bytes"] == 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("no_such_key", "1", "no-such-key"),
        ("memory_bytes", "lots", "memory_bytes"),
        ("memory_bytes", "4KiB", "memory_bytes"),
        ("ssd_bytes", "1KiB", "ssd_bytes"),
        ("ssd_paths", "/no/such/directory", "does not exist"),
        ("ssd_paths", "/dev/null", "no directory"),
        ("socket", "/proc/no/such/place", "/proc/no"),
        ("ssd_high_watermark", "0.1", "ssd_low_watermark"),
        ("grpc_listen", "nowhere", "nowhere"),
        ("node_id", "4096", "node_id"),
    ],
)
def test_a_wrong_configuration_is_refused_at_the_start(tmp_path, option, value, words):
    daemon = Daemon(tmp_path, **{option: value})
    with pytest.raises(AssertionError, match="the daemon ended"):
        start_as_it_is(daemon)
    assert words in daemon.log_tail()
    assert daemon.process is not None
    assert daemon.process.returncode not in (0, -9)
    assert "Traceback" not in daemon.log_tail()


def start_as_it_is(daemon: Daemon) -> None:
    """Start without making the directories that are wrong."""
    (daemon.root / "ssd").mkdir()
    type(daemon).ssd_paths, real = property(lambda _: []), type(daemon).ssd_paths
    try:
        daemon.start()
    finally:
        type(daemon).ssd_paths = real


@pytest.mark.parametrize(
    ("verb", "fields", "code", "words"),
    [
        ("Lookup", {"incarnation": bytes(16)}, STALE, "stale:"),
        ("Lookup", {"incarnation": b""}, STALE, "stale:"),
        ("Lookup", {"client_id": 7}, STALE, "stale:"),
        ("Lookup", {"fingerprint": bytes(16)}, UNKNOWN, "not open"),
        ("Lookup", {"fingerprint": b"short"}, BAD, "fingerprint has 16 bytes"),
        ("Lookup", {"fingerprint": SPEC.fingerprint, "keys": bytes(15)}, BAD, "keys of 15 bytes"),
        ("BeginTurn", {"fingerprint": bytes(16), "keys": bytes(16), "root_key": bytes(16)}, UNKNOWN, "not open"),
        ("BeginTurn", {"fingerprint": SPEC.fingerprint, "keys": bytes(17), "root_key": bytes(16)}, BAD, "17 bytes"),
        ("BeginTurn", {"fingerprint": SPEC.fingerprint, "keys": bytes(16), "root_key": b""}, BAD, "root_key"),
        ("CommitTurn", {"turn_id": 99}, UNKNOWN, "turn 99"),
        ("AbortTurn", {"turn_id": 99}, UNKNOWN, "turn 99"),
        ("Renew", {"client_id": 1}, STALE, "stale:"),
        ("ReportCorrupt", {"segments": [{"segment": 5 << 60}]}, BAD, "reserved medium 5"),
        ("ReportCorrupt", {"segments": [{"segment": (1 << 64) - 1}]}, BAD, "reserved medium 15"),
    ],
)
def test_a_wrong_request_is_refused(wire, verb, fields, code, words):
    with pytest.raises(Refused) as refused:
        wire.call(verb, **fields)
    assert refused.value.code is code
    assert words in refused.value.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"share_counts": [1, 2]}, "2 share counts for 3 keys"),
        ({"shard": 1}, "shard 1 of a space with 1"),
        ({"session": "x" * 4097}, "at most 4096 bytes"),
    ],
)
def test_a_turn_that_makes_no_sense_reserves_nothing(wire, node, fields, words):
    before = node.status()
    with pytest.raises(Refused, match=words):
        wire.begin(some_keys(1, 3), **fields)
    after = node.status()
    assert (after["pools"], after["sessions"], after["open_turns"]) == (before["pools"], before["sessions"], 0)


def test_another_protocol_is_refused(wire):
    with pytest.raises(Refused, match="update the older"):
        wire.raw("Hello", protocol=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fingerprint": bytes(16)}, "versions differ"),
        ({"fingerprint": b"x"}, "16 bytes"),
        ({"plane_bytes": [4096, 0]}, "plane_bytes\\[1\\] is 0"),
        ({"plane_bytes": []}, "0 entries"),
        ({"plane_bytes": [1 << 40]}, "expected 1 to"),
        ({"model": ""}, "needs a model"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"shards": 0}, "shards is 0"),
    ],
)
def test_a_space_that_is_none_is_refused(wire, node, fields, words):
    before = node.status()["spaces"]
    with pytest.raises(Refused, match=words) as refused:
        wire.open(SpaceSpec("other", "u8", 16, (4096,)), **fields)
    assert refused.value.code is BAD
    assert node.status()["spaces"] == before


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [store_pb2.PartChecksums()] * 2,
        [store_pb2.PartChecksums(algorithm=9)],
        [store_pb2.PartChecksums(algorithm=1, checksums=bytes(7))],
        [store_pb2.PartChecksums(algorithm=0, checksums=bytes(8))],
    ],
    ids=["none", "two", "algorithm", "too few", "too many"],
)
def test_checksums_that_do_not_fit_leave_the_turn_open(wire, parts):
    keys = some_keys(2, 3)
    turn = wire.begin(keys)
    with pytest.raises(Refused) as refused:
        wire.commit(turn, parts=parts)
    assert refused.value.code is BAD
    assert not wire.lookup(keys).runs
    wire.call("AbortTurn", turn_id=turn.turn_id)
    with pytest.raises(Refused, match="finished, aborted or lost"):
        wire.commit(turn)


def test_no_keys_are_nothing(wire):
    assert not wire.lookup(b"").runs
    assert wire.begin(b"").turn_id == 0


def test_keys_named_twice_are_stored_and_found(wire, node):
    one, other = some_keys(3, 1), some_keys(4, 1)
    keys = one + one + other + one
    wire.commit(wire.begin(keys, session="twice"))
    assert sum(run.blocks for run in wire.lookup(keys).runs) == 4
    assert sum(run.blocks for run in wire.lookup(one + other).runs) == 2
    assert wire.begin(keys).turn_id == 0
    node.check()
    with node.admin() as admin:
        wire.call("Release", lease_ids=[wire.lookup(keys).lease_id])
        node.until(lambda status: status["leases"] == 2)
        assert admin.drop(["twice"])["busy"] == ["twice"]


def test_200_000_keys_in_one_message(wire, node):
    """One turn of 200,000 blocks, looked up in one call; and as many unknown ones."""
    spec = SpaceSpec("tiny", "u8", 1, (16,))
    wire.open(spec)
    keys = some_keys(5, 200_000)
    turn = wire.begin(keys, fingerprint=spec.fingerprint, session="long")
    assert [(part.first_block, part.blocks) for part in turn.parts] == [(0, 200_000)]
    wire.commit(turn)
    found = wire.lookup(keys, fingerprint=spec.fingerprint)
    assert [run.blocks for run in found.runs] == [200_000]
    assert not wire.lookup(some_keys(6, 200_000), fingerprint=spec.fingerprint).runs
    assert node.status()["index"]["blocks"] >= 200_000
    assert wire.begin(keys, fingerprint=spec.fingerprint).turn_id == 0


def test_a_message_beyond_the_limit_is_refused(wire):
    with pytest.raises(Refused) as refused:
        wire.lookup(bytes(17 << 20))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("blocks", [1, 100_000])
def test_segments_of_one_block_and_of_100_000(node, blocks):
    """Through the client: every byte of every block comes back."""
    with connect(node) as client:
        kv = Kv(client, layers=2, plane_bytes=48, block_tokens=1, model=f"{blocks} blocks")
        tokens = kv.tokens(blocks, blocks)
        turn = kv.store(tokens, session=f"{blocks} blocks")
        assert [part.blocks for part in turn.parts] == [blocks]
        assert kv.hit(tokens) == blocks
    node.check()


def test_the_client_refuses_planes_of_nothing(node):
    with connect(node) as client, pytest.raises(ValueError, match="plane_bytes"):
        Kv(client, plane_bytes=0)


# -- the handover socket -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [b"", b"x", b"FCattch1", b"\0" * 32, b"FCreque2" + bytes(16), bytes(5000)])
def test_nonsense_ends_the_connection_and_nothing_else(wire, words):
    with wire.handover(attach=False) as connection:
        connection.send(words)
        assert connection.recv(100) == b""
    assert not wire.lookup(some_keys(7, 1)).runs


def test_nonsense_after_attaching_gives_back_what_was_held(node):
    with Wire(f"unix:{node.options['socket']}") as wire, wire.handover() as connection:
        connection.recv(1 << 16)
        wire.begin(some_keys(8, 2), session="nonsense")
        connection.send(b"nonsense")
        assert connection.recv(100) == b""
        node.until(lambda status: status["open_turns"] == status["clients"] == 0)
        with pytest.raises(Refused, match="stale:"):
            wire.lookup(some_keys(8, 2))
    node.check()


def test_a_wrong_token_and_a_second_life_line_are_refused(wire):
    for token in (bytes(16), wire.welcome.token):
        with wire.handover(token=token) as connection:
            assert decode_reply(connection.recv(1 << 16)).status is Status.REFUSED


def test_descriptors_go_to_their_holder_only(node):
    """A lease or turn of another client, and one that is over, have none."""
    with (
        Wire(f"unix:{node.options['socket']}") as one,
        Wire(f"unix:{node.options['socket']}") as other,
        one.handover() as mine,
        other.handover() as theirs,
    ):
        mine.recv(1 << 16)
        theirs.recv(1 << 16)
        keys = some_keys(9, 2)
        turn = one.begin(keys, session="held")
        assert decode_reply(ask(mine, Verb.TURN, turn.turn_id)).file_ids == (turn.parts[0].file_id,) * 2
        assert decode_reply(ask(theirs, Verb.TURN, turn.turn_id)).status is Status.GONE
        one.commit(turn)
        assert decode_reply(ask(mine, Verb.TURN, turn.turn_id)).status is Status.GONE
        lease = one.lookup(keys).lease_id
        assert decode_reply(ask(mine, Verb.LEASE, lease)).file_ids == (turn.parts[0].file_id,)
        assert decode_reply(ask(theirs, Verb.LEASE, lease)).status is Status.GONE
        other.call("Release", lease_ids=[lease])
        assert one.call("Renew", lease_ids=[lease]).alive == [lease]
        one.call("Release", lease_ids=[lease])
        assert decode_reply(ask(mine, Verb.LEASE, lease)).status is Status.GONE
        assert one.call("Renew", lease_ids=[lease]).alive == []
    node.check()


def test_a_client_that_floods_and_never_reads_is_cut_off(node):
    with Wire(f"unix:{node.options['socket']}") as wire, wire.handover() as connection:
        from flatcake_transport.handoff import Request, encode_request

        connection.recv(1 << 16)
        message = encode_request(Request(Verb.ARENA))
        with pytest.raises(OSError):
            flood(connection, message)
        node.until(lambda status: status["clients"] == 0)
    node.check()


def flood(connection, message):
    while True:
        connection.send(message)


def test_keys_are_16_bytes_at_the_client_too(node):
    with connect(node) as client:
        kv = Kv(client)
        for keys in (np.zeros((2, 15), np.uint8), np.zeros(16, np.uint8), np.zeros((2, 16), np.int64), b"x" * 16):
            with pytest.raises(ValueError):
                kv.space.lookup(keys)
        assert kv.space.lookup(np.zeros((0, 16), np.uint8)).blocks == 0

"""The daemon as any gRPC program meets it: health, reflection, TCP over IPv4 and IPv6, many clients at once."""

from __future__ import annotations

import threading
import urllib.request

import grpc
import pytest
from daemon import Daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kv import Kv, connect
from ports import free_port

import flatcake_client as fc


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """It listens on IPv4 and IPv6 with one address."""
    port, http = free_port(), free_port()
    root = tmp_path_factory.mktemp("wire")
    with Daemon(root, grpc_listen=f"[::]:{port}", http_listen=f"[::]:{http}") as daemon:
        daemon.port, daemon.http = port, http
        yield daemon


@pytest.mark.parametrize("service", ["", "flatcake.v1.Store", "flatcake.v1.Admin"])
def test_health(node, service):
    with grpc.insecure_channel(f"unix:{node.options['socket']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == 1


def test_health_says_when_it_stops(tmp_path):
    """A watcher sees NOT_SERVING while an open turn keeps the daemon."""
    with Daemon(tmp_path, drain_timeout="20s") as daemon, connect(daemon) as client:
        kv = Kv(client)
        turn = kv.space.begin_turn(kv.space.keys(kv.tokens(1, 2)))
        with grpc.insecure_channel(f"unix:{daemon.options['socket']}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            daemon.signal(15)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        turn.abort()
        assert daemon.stop() == 0


def test_reflection(node):
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=5))
        names = {service.name for service in answer.list_services_response.service}
        assert {"flatcake.v1.Store", "flatcake.v1.Admin", "grpc.health.v1.Health"} <= names
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="flatcake.v1.Store")
        assert next(stub.ServerReflectionInfo(iter([ask]), timeout=5)).file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_tcp(node, host):
    """Metadata over TCP, bytes over descriptors as always."""
    with fc.connect(f"{host}:{node.port}") as client:
        kv = Kv(client, model=host)
        kv.store(kv.tokens(1, 4), session=host)
        assert kv.hit(kv.tokens(1, 4)) == 4
    node.check()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_http(node, host):
    with urllib.request.urlopen(f"http://{host}:{node.http}/healthz", timeout=5) as answer:
        assert answer.status == 200


def test_a_port_that_is_taken_is_refused(node, tmp_path):
    other = Daemon(tmp_path, grpc_listen=f"127.0.0.1:{node.port}")
    with pytest.raises(AssertionError, match="the daemon ended"):
        other.start()
    assert "--grpc-listen" in other.log_tail()


def test_64_threads_store_and_read_at_once(node):
    """Two clients, 64 threads, 16 contexts that share a head: all succeed, one copy of each, every byte right."""
    with connect(node, timeout_s=20) as one, connect(node, timeout_s=20) as other:
        kvs = [Kv(client, model="threads") for client in (one, other)]
        head = kvs[0].tokens(0, 3)
        contexts = [kvs[0].tokens(number, 3, after=head) for number in range(1, 17)]
        before, errors = node.status(), []

        def work(number):
            kv, tokens = kvs[number % 2], contexts[number % 16]
            try:
                kv.store(tokens, session=f"t{number}")
                assert kv.hit(tokens) == 6
            except BaseException as error:  # noqa: BLE001 - told to the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(kv.hit(tokens) == 6 for kv in kvs for tokens in contexts)
        after = node.until(lambda status: status["open_turns"] == status["leases"] == 0)
        assert after["index"]["blocks"] - before["index"]["blocks"] == 3 + 16 * 3
        assert after["counters"]["turns_refused_total"] == before["counters"]["turns_refused_total"]
        node.check()

from __future__ import annotations

import asyncio
import json
import re
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from some_stats import some_stats

from flatcake_server.web import start_web, web_app
from flatcake_transport.errors import Unavailable
from flatcake_transport.units import Listen


def ask(listen: Listen, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    host = "[::1]" if listen.host == "::" else listen.host
    try:
        with urlopen(Request(f"http://{host}:{listen.port}{path}", method=method), timeout=10) as reply:
            return reply.status, dict(reply.headers), reply.read().decode()
    except HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def served(asking, listen=None, healthy=lambda: ""):
    """Runs `asking(where)` in a thread beside the site."""

    async def run():
        runner, where = await start_web(web_app(some_stats, healthy), listen or Listen("127.0.0.1", 0))
        try:
            return await asyncio.to_thread(asking, where)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_metrics_are_the_exposition():
    code, headers, text = served(lambda where: ask(where, "/metrics"))
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "flatcake_lookups_total 1001.0" in text


def test_health_is_200_or_503_with_the_reason():
    assert served(lambda where: ask(where, "/healthz"))[::2] == (200, "ok\n")
    assert served(lambda where: ask(where, "/healthz"), healthy=lambda: "no disk left")[::2] == (503, "no disk left\n")


def test_status_is_the_stats_as_json():
    code, _, text = served(lambda where: ask(where, "/status"), healthy=lambda: "no disk left")
    document = json.loads(text)
    assert code == 200
    assert (document["healthy"], document["why_not"]) == (False, "no disk left")
    assert document["counters"]["lookups_total"] == 1001
    assert document["pools"][1]["failure"] == "disk died"


def test_the_page_needs_no_other_host_and_trusts_no_text():
    code, headers, page = served(lambda where: ask(where, "/"))
    assert code == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(
        r"https?://|@import|innerHTML|insertAdjacentHTML|document\.write|<link[^>]+href=\"(?!data:)", page
    )
    fields = set(re.findall(r"stats\.(\w+)", page)) - {"healthy", "why_not"}
    assert fields <= set(some_stats().__slots__)
    assert set(re.findall(r"counters\.(\w+)", page)) <= set(some_stats().counters.__slots__)
    assert set(re.findall(r"pool\.(\w+)", page)) <= set(some_stats().pools[0].__slots__)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(method):
    assert served(lambda where: [ask(where, path, method)[0] for path in ("/", "/metrics", "/status")]) == [
        405,
        405,
        405,
    ]


def test_unknown_paths_are_404():
    assert served(lambda where: ask(where, "/../../etc/passwd"))[0] == 404


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here: listening on both families is not tested")
def test_one_address_serves_ipv4_and_ipv6():
    def both(where):
        return ask(where, "/healthz")[0], ask(Listen("127.0.0.1", where.port), "/healthz")[0]

    assert served(both, Listen("::", 0)) == (200, 200)


def test_a_taken_port_names_the_option_and_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            Unavailable, match=f"cannot listen on {listen}: Address already in use: choose another --http"
        ):
            served(lambda _: None, listen)


def test_a_name_that_nobody_knows_is_said(monkeypatch):
    def create_server(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(Unavailable, match="cannot listen on nowhere:7451: Name or service not known: choose"):
        served(lambda _: None, Listen("nowhere", 7451))


def test_what_is_no_http_is_counted_and_no_traceback(caplog):
    caplog.set_level("DEBUG", logger="flatcake_server.web")

    def scan(where):
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\xff\r\n\r\n",
            b"GET / HTTP/9.x\r\n\r\n",
            b"GET / HTTP/1.1\r\n: :\r\n\r\n",
        ):
            with socket.create_connection((where.host, where.port), timeout=10) as scanner:
                scanner.sendall(garbage)
                assert b" 400 " in scanner.makefile("rb").readline()
        return ask(where, "/healthz")[0]

    assert served(scan) == 200
    told = [record for record in caplog.records if record.name.startswith("flatcake_server.web")]
    assert [(record.levelname, record.exc_info) for record in told] == [("DEBUG", None)] * 3
    assert told[-1].getMessage() == "a request was no HTTP, the 3. since the start"
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]


def test_what_fails_in_the_site_keeps_its_traceback(caplog):
    def broken():
        raise RuntimeError("the test broke it")

    assert served(lambda where: ask(where, "/healthz"), healthy=broken)[0] == 500
    assert "the test broke it" in caplog.text

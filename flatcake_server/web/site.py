"""HTTP of one node: /metrics for Prometheus, /healthz for probes, /status for scripts, / for people.

Nothing here changes anything. The page needs no other host: style and script are in it, and the policy in its header
forbids everything else, so a session name with markup in it stays text.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable
from importlib import resources
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flatcake_server.metrics import CONTENT_TYPE, exposition
from flatcake_server.stats import StoreStats
from flatcake_transport.errors import Unavailable
from flatcake_transport.units import Listen

log = logging.getLogger(__name__)

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_STOP_TIMEOUT_S: Final = 2.0  # a browser that keeps its connection open does not hold up the end of the daemon


class _NotHttp(logging.Filter):
    """Of what aiohttp logs with a traceback: bytes that are no HTTP, which any port scan sends, are counted and a line for who looks."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or not isinstance(record.exc_info[1], HttpProcessingError):
            return True
        self._count += 1
        log.debug("a request was no HTTP, the %d. since the start", self._count)
        return False


def web_app(stats: Callable[[], StoreStats], healthy: Callable[[], str]) -> web.Application:
    """The application. Both callables are asked on the event loop, at each request.

    Args:
        healthy: the empty string while the node can serve; else why it cannot, and /healthz answers 503 with it.
    """
    page = (resources.files("flatcake_server.web") / "page.html").read_text(encoding="utf-8")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition(stats), headers=_HEADERS | {"Content-Type": CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        why_not = healthy()
        return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200, headers=_HEADERS)

    async def status(_: web.Request) -> web.Response:
        document = {"healthy": not healthy(), "why_not": healthy(), **dataclasses.asdict(stats())}
        return web.Response(text=json.dumps(document), content_type="application/json", headers=_HEADERS)

    async def index(_: web.Request) -> web.Response:
        headers = _HEADERS | {"Content-Security-Policy": _POLICY}
        return web.Response(text=page, content_type="text/html", headers=headers)

    application = web.Application(client_max_size=1024)
    application.add_routes(
        [
            web.get("/", index),
            web.get("/metrics", metrics),
            web.get("/healthz", healthz),
            web.get("/status", status),
        ]
    )
    return application


async def start_web(application: web.Application, listen: Listen) -> tuple[web.AppRunner, Listen]:
    """Serve until `await runner.cleanup()`.

    Returns:
        The runner, and where it listens: the port the kernel chose where `listen.port` is 0.

    Raises:
        Unavailable: the address is taken or not of this machine.
    """
    logger = logging.Logger(f"{__name__}.http")  # noqa: LOG001 - of this site alone: so is its filter
    logger.parent = log
    logger.addFilter(_NotHttp())
    runner = web.AppRunner(
        application, access_log=None, handle_signals=False, shutdown_timeout=_STOP_TIMEOUT_S, logger=logger
    )
    await runner.setup()
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        # asyncio keeps IPv4 out of IPv6 sockets; "[::]" is to mean both.
        dual = listen.host == "::" and socket.has_dualstack_ipv6()
        bound = socket.create_server((listen.host, listen.port), family=family, dualstack_ipv6=dual)
        await web.SockSite(runner, bound).start()
    except OSError as error:
        await runner.cleanup()
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error  # below: no name
        raise Unavailable(f"cannot listen on {listen}: {why}: choose another --http-listen") from error
    return runner, Listen(listen.host, bound.getsockname()[1])

"""What a node shows over HTTP, read only: metrics, health, status, and one page for people."""

from flatcake_server.web.site import start_web, web_app

__all__ = ["start_web", "web_app"]

"""The broker's page, for people and for Prometheus: ``--http 127.0.0.1:9464``, off by default, read-only.

=================  =====================================================================================
``/``              a live picture of the graph, the channels and the sessions
``/status.json``   what the page shows, as ``ipcsync status --json`` prints it
``/metrics``       for Prometheus (needs prometheus-client: ``pip install 'ipcsync[metrics]'``)
``/healthz``       200 if the broker's loop itself answered within two seconds, else 503
=================  =====================================================================================

It runs on threads of its own and asks the loop over its socket, as anybody would: it cannot answer for a loop that is
stuck, and a flood of requests costs the loop four questions a second at most.
"""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ipcsync.ask import Asker
from ipcsync.errors import InvalidArgument, IpcSyncError
from ipcsync.overview import KINDS, overview, rates

from . import metrics

FRESH = 0.25  # seconds that an answer of the loop serves every request
AT_ONCE = 32
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_POLICY = "default-src 'self'; frame-ancestors 'none'"


def address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` (``[HOST]:PORT`` for IPv6); port 0 takes a free one."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+)):(\d{1,5})", text)
    if not found or int(found[3]) > 65535:
        raise InvalidArgument(f"{text!r} is no address: give HOST:PORT, such as 127.0.0.1:9464")
    return found[1] or found[2], int(found[3])


class Looker:
    """What the loop said, at most FRESH seconds ago. Any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._asker = Asker(directory)
        self._lock = threading.Lock()
        self._seen: tuple[float, dict[str, Any]] | None = None
        self._before: tuple[float, dict[str, Any]] | None = None  # what rates are against
        self._rates: dict[int, float] = {}

    def look(self) -> dict[str, Any]:
        """The overview; ``BrokerUnavailable`` if the loop does not answer within two seconds."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen[0] > FRESH:
                self._seen = None
                seen = overview(self.directory, self._asker.status(2.0))
                self._seen = time.monotonic(), seen
                self._add_rates(*self._seen)
            return self._seen[1]

    def _add_rates(self, now: float, seen: dict[str, Any]) -> None:
        """``rate``: rounds a second, over the last second or more that somebody looked; None at first."""
        if self._before is None or now - self._before[0] >= 1.0:
            self._rates = rates(self._before and self._before[1], seen, now - self._before[0] if self._before else 0.0)
            self._before = now, seen
        for kind in KINDS:
            for thing in seen[kind]:
                thing["rate"] = self._rates.get(thing["incarnation"])

    def close(self) -> None:
        with self._lock:
            self._asker.close()


class Page(ThreadingHTTPServer):
    """Serves until ``stop()``; ``port`` is where."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, where: str, directory: Path) -> None:
        host, port = address(where)
        self.looker = Looker(directory)
        self.places = threading.BoundedSemaphore(AT_ONCE)
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            self.looker.close()
            raise InvalidArgument(f"--http {where}: {error.strerror or error}") from None
        self.port = int(self.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        # A page of another site may have its own name resolve to 127.0.0.1: then the Host header has that name.
        self.local = _loopback(str(self.server_address[0]))
        self._thread = threading.Thread(target=self.serve_forever, name="ipcsync-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(2.0)
        self.looker.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no news."""


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    server: Page
    timeout = 10.0
    server_version, sys_version = "ipcsync", ""

    def do_GET(self) -> None:
        if not self.server.places.acquire(blocking=False):
            self._say(503, "text/plain", b"too many requests at once\n")
            return
        try:
            self._answer()
        finally:
            self.server.places.release()

    do_HEAD = do_GET

    def _answer(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
        if self.server.local and not _loopback(host):
            self._say(403, "text/plain", b"this page answers to localhost only\n")
            return
        path = self.path.partition("?")[0]
        if path in _FILES:
            name, kind = _FILES[path]
            self._say(200, kind, (files(__package__) / "web" / name).read_bytes())
        elif path in ("/status.json", "/metrics", "/healthz"):
            self._ask(path)
        else:
            self._say(404, "text/plain", b"there is /, /status.json, /metrics and /healthz\n")

    def _ask(self, path: str) -> None:
        try:
            seen = self.server.looker.look()
        except (IpcSyncError, OSError) as error:
            self._say(503, "application/json", json.dumps({"ok": False, "why": str(error)}).encode())
            return
        if path == "/healthz":
            self._say(
                200, "application/json", json.dumps({"ok": True, "tick_age": seen["broker"]["tick_age"]}).encode()
            )
        elif path == "/status.json":
            self._say(200, "application/json", json.dumps(seen).encode())
        else:
            try:
                said = metrics.text(lambda: seen)
            except ImportError:
                self._say(501, "text/plain", b"this needs prometheus-client: pip install 'ipcsync[metrics]'\n")
                return
            self._say(200, metrics.CONTENT_TYPE, said)

    def _say(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The broker's log is for what happens to sessions."""

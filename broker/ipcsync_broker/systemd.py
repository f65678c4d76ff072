"""Telling systemd, if it started us, that we serve, that we live, and that we are leaving (sd_notify)."""

from __future__ import annotations

import os
import socket

from .logs import LOG


def notify(message: str) -> None:
    """Sends `message` to ``$NOTIFY_SOCKET``; without one it does nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        try:
            to.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            LOG.warning("sd_notify: %s", error)


class Watchdog:
    """``WATCHDOG=1`` from the loop itself, twice as often as systemd wants it (``WatchdogSec=``)."""

    def __init__(self) -> None:
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        ours = os.environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.every = int(microseconds) / 2e6 if ours and microseconds.isdigit() else 0.0
        self._next = 0.0

    def turn(self, now: float) -> None:
        if self.every and now >= self._next:
            self._next = now + self.every
            notify("WATCHDOG=1")

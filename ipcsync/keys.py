"""CURVE keys: who may reach a broker over ``tcp://``. They lie in one folder, as ZeroMQ certificates.

======================  ====================================================================================
``broker.key``          the broker's public key, which its clients must have
``broker.key_secret``   with its secret key: on the broker's side only
``client.key``          this user's public key, which the broker must allow
``client.key_secret``   with its secret key
``allowed/NAME.key``    the public keys that the broker lets in
======================  ====================================================================================

The folder is ``keys`` beside the user's configuration file, or the setting ``keys``. A client may have its keys from
the environment instead: ``IPCSYNC_SERVER_KEY`` (the broker's public key) and ``IPCSYNC_SECRET_KEY`` (its own).
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import config
from .errors import InvalidArgument, NotFound, PermissionDenied, Unsupported

if TYPE_CHECKING:
    import zmq

BROKER, CLIENT, ALLOWED = "broker", "client", "allowed"
SERVER_KEY, SECRET_KEY = "IPCSYNC_SERVER_KEY", "IPCSYNC_SECRET_KEY"
_WHO = re.compile(r"[A-Za-z0-9_.\-]{1,120}")
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(\d{1,5})")


def check_endpoint(text: str) -> str:
    """``tcp://HOST:PORT``, or ``InvalidArgument``."""
    found = _ENDPOINT.fullmatch(text)
    if not found or int(found[2]) > 65535:
        raise InvalidArgument(f"{text!r} is no endpoint: give tcp://HOST:PORT, such as tcp://127.0.0.1:5757")
    return text


def folder() -> Path:
    """Where the keys are; not made."""
    given = config.value("keys")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_config_dir("ipcsync")) / "keys"


def check_key(text: str) -> str:
    """A key in its 40 characters of Z85."""
    from zmq.utils import z85

    try:
        if len(z85.decode(text.encode("ascii"))) == 32:
            return text
    except (KeyError, ValueError, UnicodeEncodeError, TypeError):
        pass
    raise InvalidArgument(f"{text[:60]!r} is no CURVE key: 40 characters of Z85, as `ipcsync keys show` prints them")


def make(where: Path, name: str) -> str:
    """Makes the pair `name` ("broker" or "client") if there is none; its public key."""
    import zmq.auth

    _private(where)
    if not (where / f"{name}.key_secret").exists():
        before = os.umask(0o077)
        try:
            zmq.auth.create_certificates(where, name)
        finally:
            os.umask(before)
    return pair(where, name)[0]


def public(where: Path, name: str) -> str | None:
    """The public key of the pair, or of its public half alone; None when there is none."""
    import zmq.auth

    for path in (where / f"{name}.key", where / f"{name}.key_secret"):
        if path.exists():
            return check_key(zmq.auth.load_certificate(path)[0].decode())
    return None


def pair(where: Path, name: str) -> tuple[str, str]:
    """(public, secret). ``NotFound``, or ``PermissionDenied`` for a secret that others could read or have put there."""
    import zmq.auth

    path = where / f"{name}.key_secret"
    try:
        found = path.stat()
    except OSError:
        raise NotFound(f"there is no {path}: make it with `ipcsync keys make`", name=name) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionDenied(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to uid {found.st_uid}: it must be yours "
            "alone (`chmod 600`); if others could read it, make another pair",
            path=str(path),
        )
    ours, secret = zmq.auth.load_certificate(path)
    if secret is None:
        raise InvalidArgument(f"{path} has no secret key: remove it and `ipcsync keys make` again")
    return check_key(ours.decode()), check_key(secret.decode())


# -- the allow-list


def allow(where: Path, who: str, key: str) -> None:
    """Lets `key` in under the name `who`, at once; ``InvalidArgument`` if the name has another key."""
    if not _WHO.fullmatch(who):
        raise InvalidArgument(f"{who!r} is no name: 1 to 120 of A-Z a-z 0-9 _ . -")
    check_key(key)
    _private(where / ALLOWED)
    path = where / ALLOWED / f"{who}.key"
    if path.exists() and public(path.parent, who) != key:
        raise InvalidArgument(f"{who!r} has another key: `ipcsync keys revoke {who}` first, or choose another name")
    fresh = path.with_name(f".{secrets.token_hex(8)}")
    fresh.write_text(f'# {who}\ncurve\n    public-key = "{key}"\n')
    os.replace(fresh, path)


def revoke(where: Path, who: str) -> None:
    """Lets it in no longer, from the next message on."""
    try:
        (where / ALLOWED / f"{who}.key").unlink()
    except FileNotFoundError:
        raise NotFound(f"nobody called {who!r} is allowed: see `ipcsync keys list`", name=who) from None


def allowed(where: Path) -> dict[str, str]:
    """Public key -> name, of all that are let in; ``PermissionDenied`` where others could add some."""
    import zmq.auth

    there = where / ALLOWED
    if not there.is_dir():
        return {}
    _private(there)
    return {zmq.auth.load_certificate(path)[0].decode(): path.stem for path in sorted(there.glob("*.key"))}


class AllowList:
    """The allow-list as it is now: looked at again whenever its folder has changed."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._seen: tuple[int, ...] = ()
        self._allowed: dict[str, str] = {}

    def name(self, key: str) -> str | None:
        """Who it is; None: not allowed."""
        try:
            found = (self._where / ALLOWED).stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_mode, found.st_uid)
            if seen != self._seen:
                self._allowed = allowed(self._where)
                self._seen = seen
        except (OSError, ValueError, PermissionDenied):
            return None
        return self._allowed.get(key)


def _private(there: Path) -> None:
    there.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = there.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionDenied(
            f"{there} must be a directory of yours that nobody else may write to: `chmod 700 {there}`", path=str(there)
        )


# -- a client's


@dataclass(frozen=True)
class Line:
    """How a client reaches a broker over tcp."""

    endpoint: str
    server: str
    public: str
    secret: str

    def secure(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.server.encode()


def line(endpoint: str, environ: dict[str, str] | None = None) -> Line:
    """The keys for an endpoint, from the environment or the folder; what is missing is said with how to get it."""
    import zmq

    environ = dict(os.environ) if environ is None else environ
    check_endpoint(endpoint)
    if not zmq.has("curve"):
        raise Unsupported("this pyzmq's libzmq has no CURVE, so tcp:// cannot be used: install pyzmq's own wheel")
    where = folder()
    server = environ.get(SERVER_KEY) or public(where, BROKER)
    if server is None:
        raise NotFound(
            f"{endpoint} needs the broker's public key: {SERVER_KEY}, or {where / BROKER}.key "
            "(`ipcsync keys show` prints it where the broker runs)",
            name=BROKER,
        )
    secret = environ.get(SECRET_KEY)
    if secret:
        ours = zmq.curve_public(check_key(secret).encode()).decode()
    else:
        ours, secret = pair(where, CLIENT)
    return Line(endpoint, check_key(server), ours, secret)

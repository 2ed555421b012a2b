"""Who may talk to the server: the token, logins made from it, and the lists of hosts and origins.

Source: spec 003, D9; R10. Everything is refused that is not named here. What a web page elsewhere
can make a browser send, and what stops it:

| it sends | it fails at |
|---|---|
| a request to its own name, which it lets point to this machine (DNS rebinding) | the Host list |
| a cross-site request or WebSocket, with the browser's cookie for us | SameSite=Strict, then the Origin list |
| the same from another port of this machine, which is the same site | the Origin list, Sec-Fetch-Site |
| a form with a body that looks like JSON | the Origin list, Content-Type |
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from ..durable import Disk, FileLock
from ..durable.private import opened_for_reading
from ..errors import FileRefused, InvalidConfiguration, StoreWriteFailed

TOKEN = "serve.token"
_TOKEN_LOCK = "serve.token.lock"
TOKEN_BYTES = 32
#: of a login, and of a code that gives one
LOGIN_S = 7 * 86_400
CODE_S = 600
#: codes that were used and are remembered until they would have run out; more at once are refused
_USED_LIMIT = 1_000

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, slots=True)
class Admitted:
    """Somebody who was let in."""

    #: by something that a browser sends by itself
    by_cookie: bool
    #: wall-clock time after which a connection is closed; None: never
    until_s: float | None = None


class Auth(Protocol):
    """How somebody shows who they are. A host that mounts the server brings its own."""

    def admit(self, headers: Mapping[str, list[str]], scope: Scope) -> Admitted | Awaitable[Admitted | None] | None:
        """`headers` by lower-case name. None is nobody. Must compare secrets in constant time."""
        ...


class TokenAuth:
    """The home's token, as a bearer token or as a cookie that was made from it.

    Guarantees: no value from outside is compared with a secret but in constant time; the token is in
    no log and no address; a code gives one login. Tries are not counted: 256 bits are not guessed, and a
    count would let anybody on this machine lock its user out. What the lock protects: the used codes.
    """

    def __init__(self, token: str, *, now: Callable[[], float] = time.time) -> None:
        if len(token) < TOKEN_BYTES:
            raise InvalidConfiguration("the server's token is too short to be one; remove the file and start again")
        self._token = token.encode()
        self._now = now
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}
        self.cookie_name = "openjobs_" + hashlib.sha256(b"name:" + self._token).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"TokenAuth({self.cookie_name})"

    def admit(self, headers: Mapping[str, list[str]], scope: Scope) -> Admitted | None:
        given = headers.get("authorization", [])
        if given:
            scheme, _, token = given[0].partition(" ")
            if len(given) == 1 and scheme.lower() == "bearer" and self.is_token(token.strip()):
                return Admitted(by_cookie=False)
            return None
        for value in _cookies(headers, self.cookie_name):
            until = self._cookie_until(value)
            if until is not None:
                return Admitted(by_cookie=True, until_s=until)
        return None

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)

    # --- logins ---

    def cookie(self, *, secure: bool, path: str) -> str:
        """The header that a login answers with."""
        issued = int(self._now())
        value = f"{issued}.{self._sign('cookie', str(issued))}"
        return self._set_cookie(value, LOGIN_S, secure=secure, path=path)

    def no_cookie(self, *, secure: bool, path: str) -> str:
        return self._set_cookie("", 0, secure=secure, path=path)

    def _set_cookie(self, value: str, age_s: int, *, secure: bool, path: str) -> str:
        end = "; Secure" if secure else ""
        return f"{self.cookie_name}={value}; Max-Age={age_s}; Path={path}; HttpOnly; SameSite=Strict{end}"

    def _cookie_until(self, value: str) -> float | None:
        issued, _, signature = value.partition(".")
        if not self._is_signed("cookie", issued, signature):
            return None
        until = float(issued) + LOGIN_S
        return until if float(issued) <= self._now() + 60 and self._now() < until else None

    def code(self) -> str:
        """A new code for one login. Anybody who can read the token can make one, the server need not be asked."""
        text = f"{int(self._now()) + CODE_S}-{secrets.token_urlsafe(24)}"
        return f"{text}.{self._sign('code', text)}"

    def use_code(self, code: str) -> bool:
        """Whether it gives a login; it does so once."""
        text, _, signature = code.rpartition(".")
        if not self._is_signed("code", text, signature):
            return False
        until, now = float(text.partition("-")[0]), self._now()
        with self._lock:
            self._used = {used: end for used, end in self._used.items() if end > now}
            if not now < until <= now + CODE_S + 60 or text in self._used or len(self._used) >= _USED_LIMIT:
                return False
            self._used[text] = until
        return True

    def _sign(self, what: str, text: str) -> str:
        return hmac.new(self._token, f"{what}:{text}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _is_signed(self, what: str, text: str, signature: str) -> bool:
        good = hmac.compare_digest(self._sign(what, text).encode(), signature.encode("utf-8", "replace"))
        return good and text.isascii()


def _cookies(headers: Mapping[str, list[str]], name: str) -> list[str]:
    """Every value of that name: another site below ours may have put one of its own beside it."""
    found = []
    for header in headers.get("cookie", []):
        for part in header.split(";"):
            key, mark, value = part.strip().partition("=")
            if mark and key == name:
                found.append(value)
    return found[:8]


# --- the token's file -----------------------------------------------------------------------------------------


def read_token(home: Path) -> str | None:
    """None where there is none yet. Raises `FileRefused` for a file that others may read."""
    try:
        with opened_for_reading(home / TOKEN) as fd:
            token = os.read(fd, 1024).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if len(token) < TOKEN_BYTES:
        raise FileRefused(f"{home / TOKEN} holds no token: remove it and start the server again", path=str(home))
    return token


def have_token(home: Path, disk: Disk) -> str:
    """The home's token, made where there is none: 256 random bits, mode 0600."""
    lock = FileLock(home / _TOKEN_LOCK, disk)
    if not lock.acquire(attempts=50):
        raise StoreWriteFailed("another process is making the server's token and does not end; try again")
    try:
        token = read_token(home)
        if token is None:
            token = secrets.token_urlsafe(TOKEN_BYTES)
            disk.replace(home / TOKEN, token.encode() + b"\n")
        return token
    finally:
        lock.release()


# --- hosts and origins ------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Places:
    """Under which names the server may be spoken to, and from which pages.

    `hosts` None: any Host header (a Unix socket; or the host program has its own list). `origins` None:
    the page must come from the very host that it speaks to.
    """

    hosts: frozenset[str] | None = None
    origins: frozenset[str] | None = None
    #: where the server listens on a Unix socket too: no browser gets there, so any Host will do, and no Origin
    and_socket: bool = False

    def here(self, scope: Scope) -> Places:
        """The lists that hold for one connection."""
        server = scope.get("server")
        inside = self.and_socket and isinstance(server, tuple | list) and len(server) == 2 and server[1] is None
        return Places(hosts=None, origins=frozenset()) if inside else self

    @classmethod
    def loopback(cls, port: int, more_origins: Iterable[str] = ()) -> Places:
        hosts = {f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"}
        origins = {f"http://{host}" for host in hosts}
        if port == 80:  # a browser leaves it out
            hosts |= {"127.0.0.1", "localhost", "[::1]"}
            origins |= {"http://127.0.0.1", "http://localhost", "http://[::1]"}
        for origin in more_origins:
            origins.add(origin)
            hosts.add(check_origin(origin))
        return cls(hosts=frozenset(hosts), origins=frozenset(origins), and_socket=True)

    def knows_host(self, headers: Mapping[str, list[str]]) -> bool:
        given = headers.get("host", [])
        if len(given) != 1:
            return False
        return self.hosts is None or given[0] in self.hosts

    def knows_origin(self, origin: str, host: str) -> bool:
        if self.origins is not None:
            return origin in self.origins
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


def check_origin(origin: str) -> str:
    """The host of an origin as a browser writes it (`https://jobs.example.org`). Raises `InvalidConfiguration`."""
    scheme, mark, host = origin.partition("://")
    if not mark or scheme not in ("http", "https") or not host or host != host.lower() or set(host) & set("/?#@\\ *,"):
        raise InvalidConfiguration(
            f"{origin!r} is not an origin: it is http:// or https:// and a host in lower case, with a port where there"
            " is one, and nothing behind it"
        )
    return host


class Refusal(Exception):
    """Why somebody is not let in, or not answered: an HTTP status, what the error says, headers beside it."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or {}

    def as_fields(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


def check_places(places: Places, headers: Mapping[str, list[str]], *, navigation: bool) -> None:
    """Raises `Refusal` for a request that names us wrongly or comes from a page elsewhere.

    `navigation`: it asks for the panel's own files, which hold nothing and may be linked to.
    """
    if not places.knows_host(headers):
        raise Refusal(421, "forbidden", "this server does not answer to that name")
    origins = headers.get("origin", [])
    if len(origins) > 1 or (origins and not places.knows_origin(origins[0], headers["host"][0])):
        raise Refusal(403, "forbidden", "requests from that page are not answered")
    sites = headers.get("sec-fetch-site", [])
    if not navigation and any(site not in ("same-origin", "none") for site in sites):
        raise Refusal(403, "forbidden", "requests from other pages are not answered")


def check_origin_given(headers: Mapping[str, list[str]]) -> None:
    """What a browser sends by itself counts only where it says which page made it send that."""
    if not headers.get("origin"):
        raise Refusal(403, "forbidden", "a request with a cookie that changes something must name its Origin")


def headers_of(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found

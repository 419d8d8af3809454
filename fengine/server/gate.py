"""What stands before every path: keys, the Host of this machine, request ids, counts and the access log."""

import enum
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Mapping
from functools import lru_cache

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fengine.core.request import new_id
from fengine.server.errors import ApiError
from fengine.server.metrics import Meter

access_log = logging.getLogger("fengine.server.access")
ID = re.compile(rb"[\w.:/+=-]{1,128}")  # a client's X-Request-Id that is taken over


class Access(enum.Enum):
    """Who may ask. STEER: with the admin key, or the API key where there is no admin key. ADMIN: the admin key only."""

    OPEN = 0
    KEY = 1
    STEER = 2
    ADMIN = 3


def misdirected(scope: Scope) -> ApiError | None:
    """What came over the loopback must be meant for it. A web page whose name was pointed here (DNS rebinding) may send
    what it likes, but its own name stands in Host. Pure."""
    arrived, _ = scope.get("server") or ("", None)
    for value in _values(scope, b"host"):
        name = re.sub(r":[0-9]*$", "", value.decode("latin-1")).strip("[]").lower()
        if not (f".{name}".endswith(".localhost") or is_loopback(name)) and is_loopback(arrived):
            told = "not localhost: refused, as a web page may have sent it; to serve such names, set an API key."
            return ApiError(403, f"Host is {name!r:.200}, {told}", None, "foreign_host")
    return None


@lru_cache(256)  # nearly all requests name the same address
def is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def path_of(scope: Scope) -> str:
    """The path below the one where the app is mounted. Pure."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Gate:
    """Pure ASGI, so that streams pass untouched. `paths`: who may ask for each; others need the API key."""

    def __init__(
        self, app: ASGIApp, meter: Meter, paths: Mapping[str, Access], key: str | None, admin_key: str | None, log: bool
    ) -> None:
        self.app, self.meter, self.paths, self.log = app, meter, paths, log
        self.key, self.admin = (None if one is None else _digest(one.encode()) for one in (key, admin_key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = _values(scope, b"x-request-id")
        rid = given[0] if given and ID.fullmatch(given[0]) else new_id().encode()
        path, begun, status = path_of(scope), time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.meter.answers[path if path in self.paths else "other", status] += 1  # a client cannot add paths
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", rid)]
            await send(message)

        app, refusal = self.app, self._refusal(scope)
        if refusal is not None:
            app = JSONResponse(refusal.body_at(path), refusal.status, headers=dict(refusal.headers))
        try:
            await app(scope, receive, counted)
        finally:
            if self.log:
                took = 1000 * (time.perf_counter() - begun)
                access_log.info("%s %.200s %d %.0f ms %s", scope["method"], scope["path"], status, took, rid.decode())

    def _refusal(self, scope: Scope) -> ApiError | None:
        access = self.paths.get(path_of(scope), Access.KEY)
        steers = access is Access.ADMIN or access is Access.STEER and self.admin is not None
        if self.key is None and not steers:
            return misdirected(scope)
        if access is Access.OPEN:
            return None
        if steers and self.admin is None:
            return ApiError(403, f"{scope['path']} needs an admin key; start the server with one (serve.admin_key, or "
                            "the variable FENGINE_ADMIN_KEY).", None, "no_admin_key")  # fmt: skip
        given = self._given(scope)
        if hmac.compare_digest(given, self.admin or b"") or not steers and hmac.compare_digest(given, self.key or b""):
            return None
        kind = "admin key" if steers else "API key"
        return ApiError(401, f"the {kind} is missing or wrong: send Authorization: Bearer KEY.", None,
                       "invalid_api_key", {"WWW-Authenticate": "Bearer"})  # fmt: skip

    @staticmethod
    def _given(scope: Scope) -> bytes:
        """The digest of the key that comes with a request, so that keys are compared in constant time; none: of no
        key. Anthropic's clients send it as x-api-key."""
        bearers, alone = _values(scope, b"authorization"), _values(scope, b"x-api-key")
        kind, _, key = bearers[0].partition(b" ") if len(bearers) == 1 else (b"", b"", b"")
        if not bearers and len(alone) == 1:
            kind, key = b"bearer", alone[0]
        return _digest(key.strip()) if kind.lower() == b"bearer" else b"none"

"""One request and its answer, between an ASGI app and the bytes of a connection."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from fengine.server.app import WRITE

MOST_UNREAD = 1 << 16  # bytes of a body that nobody has asked for
STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Exchange:
    """One request on a `Connection`, and its answer: what ASGI calls scope, receive and send."""

    def __init__(self, connection: Any, scope: dict[str, Any], keep_alive: bool) -> None:
        self.connection, self.scope, self.keep_alive = connection, scope, keep_alive
        self.continues = scope["http_version"] == "1.1" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
        )
        self.body, self.more = bytearray(), True
        self.news = asyncio.Event()  # of the body, or of the end
        self.started = self.ended = self.gone = self.chunked = False

    def take(self, data: bytes | None) -> None:
        """A piece of the body; None: its end."""
        if data is None:
            self.more = False
        elif not self.ended:
            self.body += data
            if len(self.body) > MOST_UNREAD:
                self.connection.hold()
        self.news.set()

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self.news.set()

    async def run(self, app: Any) -> None:
        self.scope["state"] = {WRITE: self.write}
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:
            logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
        finally:
            self.scope["state"].clear()  # or all of it would wait for the garbage collector
            if not self.ended and not self.gone:
                self.connection.transport.abort()  # nothing could end this answer

    async def receive(self) -> dict[str, Any]:
        connection = self.connection
        if self.continues and not (self.started or self.gone or connection.transport.is_closing()):
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.continues = False
        if not self.gone and not self.ended:
            connection.read_on()
            await self.news.wait()
            self.news.clear()
        if self.gone or self.ended:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more}

    async def send(self, message: Any) -> None:
        if not self.connection.writable.is_set():
            await self.connection.writable.wait()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._head(message["status"], message.get("headers", ()))
        else:
            self._piece(message.get("body", b""), message.get("more_body", False))

    def write(self, data: bytes) -> bool:
        """Writes a piece, not the last, of the answer under way. False: that takes `send`, as the client has gone,
        takes nothing now, or knows no chunks."""
        transport = self.connection.transport
        if not self.chunked or transport.is_closing() or not self.connection.writable.is_set():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _head(self, status: int, headers: Any) -> None:
        assert not self.started, "an answer has one head"
        self.started = True
        lines, has_length, closes = [STATUS_LINES[status]], status in (204, 304), False
        for name, value in (*self.connection.server.default_headers, *headers):
            assert b"\n" not in value and b"\r" not in value, "a header is one line"
            has_length |= name == b"content-length"
            closes |= name.lower() == b"connection" and value.lower() == b"close"
            lines.append(b"%b: %b\r\n" % (name, value))
        self.chunked = not has_length and self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD"
        if self.chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        unsent = self.continues and self.more  # a body that was not asked for: it may come, or not
        self.keep_alive &= not closes and not unsent and (has_length or self.chunked)
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        self.connection.transport.write(b"".join((*lines, b"\r\n")))

    def _piece(self, data: bytes, more: bool) -> None:
        assert self.started and not self.ended, "a body comes behind its head, and ends once"
        if self.chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"" if more else b"0\r\n\r\n")
        if data and self.scope["method"] != "HEAD":
            self.connection.transport.write(data)
        if not more:
            self.ended = True
            self.news.set()
            self.connection.answered(self.keep_alive)

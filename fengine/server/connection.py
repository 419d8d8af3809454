"""One client's connection: HTTP/1.1 and 1.0, parsed by httptools, with limits on who is slow or sends too much.

It is what uvicorn calls a protocol. Of uvicorn's own two, the one over h11 takes half as long again for a request, and
the one over httptools has no limits, wants no Host, and sends chunks to clients of HTTP/1.0.
"""

import asyncio
import json
from collections import deque
from typing import Any
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.responses import JSONResponse

from fengine.server.config import ServeConfig
from fengine.server.exchange import STATUS_LINES, Exchange
from fengine.server.refusals import Refusal

MOST_AHEAD = 64  # requests on a connection that are not answered yet
MOST_HEADERS = 256  # of a request: as Python's objects they take many times their bytes


class Connection(asyncio.Protocol):
    """Requests are answered in the order in which they came. Bytes that are no HTTP get a 400 when their turn comes."""

    limits: ServeConfig  # set by `server_of`

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        """As uvicorn calls it."""
        self.app, self.server = config.loaded_app, server_state
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: Any = None
        self.parser: Any = HttpRequestParser(self)
        self.turns: deque[Exchange] = deque()  # whose heads have come; the first is being answered
        self.reading: Exchange | None = None  # whose body is coming
        self.in_head, self.head_bytes = True, 0
        self.silent_bytes = 0  # since the parser told of a request's begin, its head's end, or a piece of its body
        self.broken = False  # what comes is no HTTP, or no longer
        self.reason = "Invalid HTTP request received."  # if it is broken
        self.held = False  # reading is paused
        self.writable = asyncio.Event()
        self.writable.set()
        self._waits, self._timer, self._write_timer = "", None, None

    # -- the transport's calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ends = {"server": _address(transport, "sockname"), "client": _address(transport, "peername")}
        self.server.connections.add(self)
        if len(self.server.connections) > self.limits.max_connections:
            self.app = crowded
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self.broken:
            return
        self.silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as stop:
            self._ignore_upgrade(data[stop.args[0] :])
            return
        except HttpParserError:
            self._break()
        if self.silent_bytes > self.limits.max_header_bytes and not self.broken:  # of a head, or of trailers
            self._too_large()
            self._break()
        self._wait()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A server may; but the parser reads no more behind such a head. So it is read again, without that header."""
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.target, version, b"".join(lines)) + rest)

    def pause_writing(self) -> None:
        self.writable.clear()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self.writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def eof_received(self) -> None:
        """A client that ends its half has gone; what is written already may still reach it."""
        if self.turns:
            self.turns[0].leave()
        self.reading = None
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._timer, self._waits, self.broken, self.parser = None, "lost", True, None
        if self.turns:
            self.turns[0].leave()
        self.turns.clear()
        self.reading = None
        self.writable.set()

    def shutdown(self) -> None:
        """Called by uvicorn: the answer under way is the last."""
        if self._waits == "flush":
            self.transport.close()
        elif self.turns:
            self.turns[0].keep_alive = False
        else:
            self._close()

    # -- the parser's calls; what they raise makes it raise HttpParserError --------------------------------------------

    def on_message_begin(self) -> None:
        self.in_head, self.target, self.headers = True, b"", []
        self.head_bytes = self.silent_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # it stands behind a body
        self.head_bytes += len(name) + len(value)
        if len(self.headers) == MOST_HEADERS:
            raise self._fault(f"the head has more than {MOST_HEADERS} headers; send fewer.")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._fault("this server is no proxy: it answers no CONNECT.")
            return
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        hosts, encodings = names.count(b"host"), [v.lower() for n, v in self.headers if n == b"transfer-encoding"]
        if version not in ("1.0", "1.1") or hosts > 1 or version == "1.1" and not hosts:
            raise ValueError("no request of HTTP/1.1 or 1.0")
        if encodings not in ([], [b"chunked"]):
            raise self._fault("a Transfer-Encoding other than chunked is not built; send plain JSON.")
        if self.head_bytes + len(self.target) > self.limits.max_header_bytes:
            raise self._too_large()
        if len(self.turns) >= MOST_AHEAD:
            raise self._fault(f"more than {MOST_AHEAD} requests wait on this connection; read their answers first.")
        raw_path, query = self._path_and_query()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": version,
            "method": self.parser.get_method().decode("ascii"), "scheme": "http", "root_path": "",
            "path": unquote(raw_path.decode("ascii")), "raw_path": raw_path, "query_string": query,
            "headers": self.headers, **self.ends,
        }  # fmt: skip
        self.in_head, self.silent_bytes = False, 0
        self.reading = Exchange(self, scope, version == "1.1" and self.parser.should_keep_alive())
        self.turns.append(self.reading)
        if len(self.turns) == 1:
            self._start()

    def _path_and_query(self) -> tuple[bytes, bytes]:
        """Of the target, a path or a whole URL, whose host then stands in for the header's (RFC 9112, 3.2.2).
        Modifies: headers."""
        path, _, query = self.target.partition(b"?")
        if not path.startswith(b"/"):
            scheme, _, rest = path.partition(b"://")
            host, _, path = rest.partition(b"/")
            if scheme.lower() not in (b"http", b"https") or not host or b"@" in host:
                raise self._fault("a request must name a path or a URL of http, such as /v1/models.")
            path, others = b"/" + path, [header for header in self.headers if header[0] != b"host"]
            self.headers = [(b"host", host), *others]
        return path, query

    def on_body(self, data: bytes) -> None:
        assert self.reading is not None
        self.silent_bytes = 0
        self.reading.take(data)

    def on_message_complete(self) -> None:
        if self.reading is not None:  # and no head that is read again
            self.reading.take(None)
            self.reading = None

    def _fault(self, reason: str) -> ValueError:
        """The error to raise in a callback. Modifies: what the client is told."""
        self.reason = reason
        return ValueError(reason)

    def _too_large(self) -> ValueError:
        most = self.limits.max_header_bytes
        return self._fault(f"the headers are larger than {most} bytes (serve.max_header_bytes); send less.")

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Answers the first of the requests."""
        task = self.loop.create_task(self.turns[0].run(self.app))
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def answered(self, keep_alive: bool) -> None:
        """Called behind the last byte of an answer."""
        self.server.total_requests += 1
        self.turns.popleft()
        self.read_on()
        if not keep_alive:
            self._close()
        elif self.turns and not (self.broken and self.turns[0] is self.reading):
            self._start()
        elif self.broken:
            self._refuse()
        self._wait()

    def _break(self) -> None:
        """Nothing that comes from here on is read. The client is told now, or behind answers that are under way."""
        self.broken = True
        if not self.turns:
            self._refuse()
        elif self.turns[0] is self.reading:  # it is the body of this request
            if self.turns[0].started:
                self.transport.abort()
            else:
                self.turns[0].leave()
                self._refuse()

    def _refuse(self) -> None:
        body = json.dumps(Refusal(400, self.reason, code="invalid_http").body()).encode()
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINES[400], len(body)) + body)
        self._close()

    def hold(self) -> None:
        if not self.held:
            self.held = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        if self.held and not self.transport.is_closing():
            self.held = False
            self.transport.resume_reading()

    def _wait(self) -> None:
        """Sets the time in which the client must go on: with a head, with the rest of a body that has been answered
        already, or with anything at all."""
        if self._waits in ("flush", "lost"):
            return
        waits = "" if self.turns else "rest" if self.reading else "head" if self.in_head else "idle"
        if waits == self._waits:
            return  # a byte more does not put off the end
        if self._timer is not None:
            self._timer.cancel()
        self._waits, self._timer = waits, None
        if waits == "idle":
            self._timer = self.loop.call_later(self.limits.keep_alive_seconds, self._close)
        elif waits:
            self._timer = self.loop.call_later(self.limits.read_seconds, self.transport.abort)

    def _close(self) -> None:
        """Closes behind what is written already, which the client must take in time. If it is still sending, what it
        sends is read, and dropped: its system would drop the answer if that were refused."""
        if self._timer is not None:
            self._timer.cancel()
        sends = self.reading is not None or self.broken
        seconds = self.limits.read_seconds if sends else self.limits.write_seconds
        self._waits, self._timer = "flush", self.loop.call_later(seconds, self.transport.abort)
        if sends:
            self.broken = True
            self.read_on()
            self.transport.write_eof()
        else:
            self.transport.close()


async def crowded(scope: Any, receive: Any, send: Any) -> None:
    """The app of a connection that is one too many."""
    refusal = Refusal(503, "there are too many connections (serve.max_connections); try again later.", None,
                      "too_many_connections", {"Connection": "close", "Retry-After": "1"})  # fmt: skip
    await JSONResponse(refusal.body(), refusal.status, dict(refusal.headers))(scope, receive, send)


def _address(transport: Any, name: str) -> tuple[str, int] | None:
    """An end of the connection. Pure."""
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None

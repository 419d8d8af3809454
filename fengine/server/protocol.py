"""uvicorn's HTTP/1.1 protocol over httptools, with limits on who is slow or sends too much, and errors as JSON."""

import json
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fengine.server.config import ServerConfig
from fengine.server.errors import ApiError

MAX_PIPELINED = 64  # requests on a connection whose turn has not come
MAX_HEADERS = 256  # of a request: as Python's objects they take many times their bytes


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A client has `read_seconds` for a head, and for the rest of a body that was answered before its
    end; `write_seconds` to take what is written; `keep_alive_seconds` between two requests. The time for a body that
    the app reads is the app's."""

    limits: ServerConfig  # set by `server_of`

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.receiving = self.in_head = True  # a new connection owes a request
        self.silent_bytes = 0  # since the parser told of a request's begin, its head's end, or a piece of its body
        self.broken = False  # nothing that comes is read any more
        self.reason = "Invalid HTTP request received."
        self.running: Any = None  # the cycle whose app runs; `cycle` is the newest
        self._phase = ""
        self._timer = self._write_timer = None

    # -- the transport's calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.app = refusal()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.broken:
            return
        self._unset_keepalive_if_required()
        self.silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as stop:
            self._ignore_upgrade(data[stop.args[0] :])
            return
        except HttpParserError:
            self.send_400_response(self.reason)
        if self.silent_bytes > self.limits.max_header_bytes and not self.broken:  # of a head, or of trailers
            self.send_400_response(str(self._head_too_large()))
        self._watch()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A server may. But the parser reads neither body nor requests behind such a head: so the head is read again
        without that header. Clients of Java ask with every first request."""
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines)) + rest)

    def eof_received(self) -> None:
        """A client that ends its half has gone; what is written already may still reach it."""
        self._disconnect()
        self.transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnect()
        super().connection_lost(exc)
        self.broken = True
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    # -- the parser's calls: what they raise makes it raise HttpParserError --------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.receiving = self.in_head = True
        self.silent_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer
        if len(self.headers) == MAX_HEADERS:
            raise self._fault(f"the head has more than {MAX_HEADERS} headers; send fewer.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # it will come again
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or hosts > 1 or version == "1.1" and not hosts:
            raise ValueError("no request of HTTP/1.1 or 1.0")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise self._fault("a Transfer-Encoding other than chunked is not built; send plain JSON.")
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            raise self._head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._fault(f"more than {MAX_PIPELINED} requests wait on this connection; read their answers first.")
        super().on_headers_complete()
        self.flow.resume_reading()  # which uvicorn pauses behind a request that must wait: its client may go meanwhile
        self.in_head, self.silent_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        self.silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self.receiving = False
            super().on_message_complete()

    def _fault(self, reason: str) -> ValueError:
        """The error to raise in a callback. Modifies: what the client is told."""
        self.reason = reason
        return ValueError(reason)

    def _head_too_large(self) -> ValueError:
        most = self.limits.max_header_bytes
        return self._fault(f"the headers are larger than {most} bytes (serve.max_header_bytes); send less.")

    # -- requests and answers ------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.expect_100_continue and self.receiving:  # a body that was not asked for: it may come, or not
            self.transport.close()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Reads nothing from here on. Answers to whole requests are finished first, and then the connection is closed;
        otherwise the client is told the reason."""
        self.broken, answering = True, self._answering()
        if answering and (self.in_head or not self.receiving):
            self.cycle.keep_alive = False
        elif answering and (self.pipeline or self.cycle.response_started):
            self.transport.abort()
        else:
            self._disconnect()
            body = json.dumps(ApiError(400, self.reason, code="invalid_http").body()).encode()
            head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (STATUS_LINE[400], len(body)) + body)
            self.flow.resume_reading()
            self.transport.write_eof()  # and what still comes is dropped: a reset could overtake the answer

    def shutdown(self) -> None:
        super().shutdown()
        self._watch()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.disconnected

    def _disconnect(self) -> None:
        """Tells the apps of requests that are not answered yet."""
        for cycle in (self.running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Sets the time in which the client must go on. A byte more in the same phase does not put off its end."""
        limits, phase = self.limits, self._next_phase()
        if phase == self._phase:
            return
        if phase == "idle" and isinstance(self.app, JSONResponse):
            self.transport.close()
            phase = "flush"
        if self._timer is not None:
            self._timer.cancel()
        self._phase, self._timer = phase, None
        if phase == "idle":
            self._timer = self.loop.call_later(limits.keep_alive_seconds, self.shutdown)
        elif phase:
            seconds = limits.write_seconds if phase == "flush" else limits.read_seconds
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _next_phase(self) -> str:
        """What the server waits for; "": for itself. Pure."""
        if self.transport.is_closing():
            return "flush"
        if self._answering():
            return ""
        if self.broken:
            return "dropped"
        return ("head" if self.in_head else "rest") if self.receiving else "idle"


def refusal() -> JSONResponse:
    """The app of a connection that is one too many."""
    error = ApiError(503, "there are too many connections (serve.max_connections); try again later.",
                     code="too_many_connections", headers={"Retry-After": "1"})  # fmt: skip
    return JSONResponse(error.body(), error.status, dict(error.headers))

"""Broken HTTP, requests in a row, limits on heads, bodies, time and connections, hosts and keys."""

import contextlib
import json
import random
import re
import select

import pytest
import serving
from serving import GET, GOOD, POST, STREAMED, Live, live, read, request, until

from fengine.api.engine import Engine

engine, server, untouched = serving.engine, serving.server, serving.untouched  # fixtures


def test_methods_paths_and_types(server: Live) -> None:
    for asked in ("GET /v1/completions", "DELETE /v1/models", "POST /health", "PUT /metrics"):
        answer = server.ask(*asked.split())
        assert (answer.status, bool(answer.headers["allow"])) == (405, True) and answer.error
    for path in ("/", "/v1", "/v1/completions/", "/../etc/passwd", "/%00"):
        answer = server.ask("POST", path, GOOD)
        assert answer.status == 404 and answer.error["type"] == "not_found_error", path
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "", "json"):
        answer = server.ask("POST", "/v1/completions", GOOD, Content_Type=kind)
        assert answer.status == 415 and "application/json" in answer.error["message"]
    assert server.ask("POST", "/v1/completions", GOOD, Content_Encoding="gzip").status == 415
    assert server.ask("POST", "/v1/completions", GOOD, Content_Type="Application/JSON; charset=utf-8").status == 200


BROKEN = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,  # TLS
    b"GET /health HTTP/1.1\r\n\r\n",  # no Host
    b"GET /health HTTP/x\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", BROKEN, ids=[repr(d)[:30] for d in BROKEN])
def test_broken_http(data: bytes, server: Live) -> None:
    answer = server.send(data)
    assert answer.status == 400 and answer.error["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
TRAILED = HEAD + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n"
LARGE = [  # (what is sent, what the refusal names)
    (request("GET", "/health", X="a" * 100_000), "serve.max_header_bytes"),  # whole, in one read
    (request("GET", "/health?" + "a" * 70_000), "serve.max_header_bytes"),
    (request("GET", "/health", **{f"X{i}": "" for i in range(300)}), "256 headers"),
    (TRAILED + b"X: " + b"a" * 1_000_000, "serve.max_header_bytes"),  # and no end
    (TRAILED + b"X: a\r\n" * 200_000, "serve.max_header_bytes"),
]


@pytest.mark.parametrize(("data", "told"), LARGE, ids=range(len(LARGE)))
def test_headers_have_limits(data: bytes, told: str, server: Live) -> None:
    answer = server.send(data)
    assert answer.status == 400 and told in answer.error["message"]


def test_a_body_too_large_without_a_length(server: Live) -> None:
    chunk = b"2710\r\n" + b"a" * 10_000 + b"\r\n"
    answer = server.send(HEAD + CHUNKED + b"\r\n" + chunk * 20 + b"0\r\n\r\n")
    assert answer.status == 413 and answer.error["code"] == "body_too_large"


def test_a_client_that_is_still_sending_gets_its_refusal(engine: Engine, server: Live) -> None:
    """And no reset, which would make its system drop what it has not read."""
    data = request("POST", "/v1/completions", b"a" * 20_000_000)
    assert server.send(data).status == 413
    with live(engine, max_connections=1) as crowded, crowded.connect() as one:
        one.sendall(GET)
        assert read(one).status == 200
        assert crowded.send(data).status == 503


def test_a_head_that_comes_in_pieces_behind_a_large_body(server: Live) -> None:
    """The body does not count as a part of it."""
    with server.connect() as link:
        link.sendall(request("POST", "/nowhere", b"a" * 90_000) + GET[:9])
        assert read(link).status == 404
        link.sendall(GET[9:])
        assert read(link).status == 200


def test_several_requests_on_a_connection(server: Live) -> None:
    with server.connect() as link:
        statuses = []
        for data in (POST, request("POST", "/v1/completions", {"model": "no"}), request("GET", "/nope"), POST):
            link.sendall(data)
            statuses.append(read(link).status)
    assert statuses == [200, 404, 404, 200]


def chunked(*, behind: bytes) -> bytes:
    body = json.dumps(GOOD).encode()
    return HEAD + CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, behind)


SMUGGLED = [  # where another server may see the body end elsewhere, what hides in it must not become a request
    (b"Content-Length: 5\r\n" + CHUNKED, b"0\r\n\r\n"),
    (CHUNKED + b"Content-Length: 5\r\n", b"0\r\n\r\n"),
    (b"Content-Length: 2\r\nContent-Length: 2\r\n", b"{}"),
    (b"Content-Length: 2, 2\r\n", b"{}"),
    (b"Content-Length: +2\r\n", b"{}"),
    (b"Content-Length: 18446744073709551618\r\n", b"{}"),
    (b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding: gzip\r\n" + CHUNKED, b"0\r\n\r\n"),
    (b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    (b"X: a\nContent-Length: 2\r\n", b"{}"),
    (b"X: a\0\r\nContent-Length: 2\r\n", b"{}"),
    (CHUNKED, b"0x2\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"2\n{}\n0\n\n"),
]
UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
IN_A_ROW = [  # (what is sent at once, the statuses of what comes back until the server closes)
    (GET + POST + STREAMED + POST + GET, [200] * 5),
    (POST + b"\r\n\r\n" + GET, [200, 200]),
    (POST + b"}", [200]),
    (STREAMED + b"garbage\r\n\r\n" + GET, [200]),
    (b"garbage\r\n\r\n" + GET, [400]),
    (GET * 100, [200] * 65),
    (request("GET", "/health", Connection="close") + GET, [200]),
    (request("HEAD", "/health") + GET, [200, 200]),
    (b"GET /health HTTP/1.0\r\n\r\n" + GET, [200]),
    (chunked(behind=b"Host: example.com\r\n") + GET, [200, 200]),
    (request("GET", "/health", **UPGRADE) + request("POST", "/v1/completions", GOOD, **UPGRADE) + GET, [200] * 3),
    (request("POST", "/v1/completions", GOOD, Expect="100-continue"), [100, 200]),
    (request("POST", "/nowhere", b"{", Expect="100-continue")[:-1], [404]),  # a body not asked for need not come
    *((HEAD + head + b"\r\n" + body + GET, [400]) for head, body in SMUGGLED),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", [400]),
    (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", [400]),
    (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", [400]),
    (request("GET", "http://localhost/health") + GET, [200, 200]),
]


def test_requests_in_a_row(engine: Engine) -> None:
    """All that comes at once is answered in its order; what is no HTTP ends the connection behind that."""
    with live(engine, keep_alive_seconds=1) as server, contextlib.ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in IN_A_ROW]
        for link, (data, _) in zip(links, IN_A_ROW, strict=True):
            link.sendall(data)
        for link, (data, statuses) in zip(links, IN_A_ROW, strict=True):
            told = b""
            while piece := link.recv(1 << 16):
                told += piece
            assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", told)] == statuses, data


def test_slow_clients_are_cut_off(engine: Engine) -> None:
    pieces = (HEAD + b"Content-Length: 100\r\n\r\n{", b"", b"POST /v1/comple", GET + b"GET /he")
    with live(engine, read_seconds=1, keep_alive_seconds=1) as server, contextlib.ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in range(4)]
        for link, data in zip(links, pieces, strict=True):
            link.sendall(data)
        answer = read(links[0])
        assert answer.status == 408 and "serve.read_seconds" in answer.error["message"]
        for link in links[1:]:
            while link.recv(1 << 16):  # until the server closes
                pass


def test_a_body_in_small_pieces_is_held_no_longer_than_the_limit(engine: Engine) -> None:
    """Each piece is in time; the whole is not. Behind the answer nothing more is taken."""
    data = HEAD + CHUNKED + b"\r\n"
    with live(engine, read_seconds=1) as server, server.connect() as link:
        link.sendall(data)
        while not select.select([link], [], [], 0.2)[0]:
            link.sendall(b"1\r\n{\r\n")
        answer = read(link)
        assert answer.status == 408 and "serve.read_seconds" in answer.error["message"]
        until(lambda: not server.server.server_state.connections, 0.5)


def test_a_body_that_is_answered_before_its_end_is_no_way_to_stay(engine: Engine) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with live(engine, read_seconds=1) as server, server.connect() as link:
        link.sendall(head)
        assert read(link).status == 404
        with pytest.raises(OSError):
            while True:  # each byte would put off the end of an idle connection
                link.sendall(b"x")
                select.select([link], [], [], 0.02)


def mutated(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randrange(6)):
        at = draw.randrange(len(found) + 1)
        change = draw.randrange(4)
        if change == 0:
            found[at : at + 1] = draw.randbytes(1)
        elif change == 1:
            del found[at : at + draw.randrange(30)]
        elif change == 2:
            found[at:at] = draw.choice([b"\r\n", b"\r\n\r\n", b": ", b"Content-Length: 3\r\n", b"Host: a\r\n", b"\0"])
        else:
            found += draw.choice([GET, POST, STREAMED])
    return bytes(found)


def test_mangled_requests_leave_nothing_behind(engine: Engine) -> None:
    """Whatever comes, and in whatever pieces: no connection, task or row stays, and the next answer is whole."""
    draw = random.Random(1)
    seeds = [GET, POST, STREAMED, GET + POST, chunked(behind=b"X: y\r\n"), request("GET", "/health", **UPGRADE),
             request("POST", "/v1/completions", GOOD, Expect="100-continue")]  # fmt: skip
    with live(engine, read_seconds=1, write_seconds=1, keep_alive_seconds=1) as server:
        state = server.server.server_state
        for _ in range(10):
            with contextlib.ExitStack() as stack:
                for _ in range(40):
                    link, data = stack.enter_context(server.connect()), mutated(draw.choice(seeds), draw)
                    cut = draw.randrange(len(data) + 1)
                    with contextlib.suppress(OSError):
                        link.sendall(data[:cut])
                        link.sendall(data[cut:])
        until(lambda: not state.connections and not state.tasks and server.quiet())
        assert server.ask("POST", "/v1/completions", GOOD).status == 200


def test_a_target_may_be_a_whole_url(server: Live) -> None:
    models = server.ask("GET", "/v1/models").json
    for url in ("http://localhost", "HTTP://127.0.0.1:80", "https://[::1]:8000"):
        assert server.ask("GET", f"{url}/v1/models?a=http://b/c").json == models
    assert server.ask("POST", "http://localhost/v1/completions", GOOD).status == 200
    assert server.ask("GET", "http://localhost/v1/models", Host="example.com").error["code"] == "foreign_host"
    for root in ("http://localhost/", "/", "//localhost/v1/models"):
        assert server.ask("GET", root).status == 404
    for bad in ("*", "localhost:80", "v1/models", "http:///"):
        for method in ("GET", "OPTIONS"):
            assert server.ask(method, bad).status in (400, 404), bad
    assert server.ask("CONNECT", "localhost:80").status == 400


@pytest.mark.parametrize("host", ["a.com", "example.com:8000", "127.0.0.1.example.com", "localhost.a", "10.0.0.1"])
def test_a_web_page_cannot_speak_to_the_loopback(host: str, server: Live) -> None:
    """DNS rebinding: the name of the page stands in Host."""
    answer = server.ask("POST", "/v1/completions", GOOD, Host=host)
    assert (answer.status, answer.error["code"]) == (403, "foreign_host")


@pytest.mark.parametrize(
    "host", ["LOCALHOST:80", "127.0.0.1:1", "127.1.2.3", "[::1]:8000", "[::ffff:127.0.0.1]:8000", "box.localhost"]
)
def test_names_of_the_loopback_are_answered(host: str, server: Live) -> None:
    assert server.ask("GET", "/v1/models", Host=host).status == 200


def test_the_api_key(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(server: Live, path: str) -> list[int | None]:
        given = ["", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret", "bearer s3cret ", "Bearer s3cretX", "ß"]
        return [server.ask("GET", path, Authorization=key).status for key in given]

    with live(engine, api_key="s3cret") as server:
        assert statuses(server, "/v1/models") == [401, 401, 401, 401, 200, 200, 401, 401]
        assert statuses(server, "/metrics")[:3] == [401, 401, 401]
        assert statuses(server, "/nope")[3:5] == [401, 404] and server.ask("GET", "/health").status == 200
        answer = server.ask("POST", "/v1/completions", GOOD)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    monkeypatch.setenv("FENGINE_API_KEY", "s3cret")
    with live(engine) as server:
        assert statuses(server, "/v1/models")[3:5] == [401, 200]


def test_connections_have_an_end(engine: Engine) -> None:
    with live(engine, max_connections=2) as server:
        with server.connect() as one, server.connect() as two:
            for link in (one, two):
                link.sendall(GET)
                assert read(link).status == 200
            answer = server.ask("GET", "/health")
            assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        until(lambda: not server.server.server_state.connections)
        assert server.ask("GET", "/health").status == 200

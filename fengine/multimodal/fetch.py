"""Reads an image from http(s): from named hosts, bounded in bytes and time, redirected to public addresses only. A
name is resolved once and the connection goes to the address that was checked, at each redirect anew. When the time is
up the connection is cut: a server that sends a little now and then would keep each read of it alive."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

from fengine.errors import InvalidRequestError

TIMEOUT = 20.0  # seconds for all of it
REDIRECTS = 4
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # addresses of IPv4, behind a gateway


def is_public(address: str) -> bool:
    """Whether an address is of no private, local or reserved network, also as one of IPv4 within IPv6. Pure."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found.sixtofour is not None or found.is_site_local:
            return False
    return found.is_global and not found.is_multicast


def fetch(
    url: str, hosts: tuple[str, ...], most: int, allowed: Callable[[str], bool] = is_public, timeout: float = TIMEOUT,
    first: Callable[[str], bool] | None = None,
) -> bytes:  # fmt: skip
    """The body, at most `most` + 1 bytes. `allowed` says of an address whether it is read, `first` of the URL's own.
    Errors: InvalidRequestError."""
    deadline = time.monotonic() + timeout
    try:
        for hop in range(REDIRECTS + 1):
            found = _get(url, hosts, most, allowed if hop or first is None else first, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, InvalidRequestError):
            raise
        if time.monotonic() >= deadline:
            raise InvalidRequestError(f"{url!r:.200} takes too long") from error
        raise InvalidRequestError(f"{url!r:.200} cannot be read: {error or type(error).__name__}") from error
    raise InvalidRequestError(f"{url!r:.200}: more than {REDIRECTS} redirects")


def _get(url: str, hosts: tuple[str, ...], most: int, allowed: Callable[[str], bool], deadline: float) -> bytes | str:
    """The body, or where it is instead."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{url!r:.200} is no http(s) URL")
    if hosts and parts.hostname not in map(str.lower, hosts):
        raise InvalidRequestError(f"{parts.hostname!r:.200} is none of allowed_media_domains (multimodal.image_hosts)")
    left = deadline - time.monotonic()
    if left <= 0:
        raise InvalidRequestError(f"{url!r:.200} takes too long")
    connection = _connection(parts.scheme, parts.hostname, parts.port, allowed, left)
    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _cut, (connection.sock,))
    timer.start()
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Host": parts.netloc.rpartition("@")[2], "User-Agent": "fengine"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308) and (where := response.getheader("Location")):
            return where
        if response.status != 200:
            raise InvalidRequestError(f"{url!r:.200} answers {response.status}")
        return _body(response, url, most, deadline)
    finally:
        timer.cancel()
        connection.close()


def _cut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connected.shutdown(socket.SHUT_RDWR)


def _connection(
    scheme: str, host: str, port: int | None, allowed: Callable[[str], bool], timeout: float
) -> http.client.HTTPConnection:
    """To an address of the host that is allowed; its handshake comes with the first bytes."""
    port = port or (443 if scheme == "https" else 80)
    addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not addresses or not all(map(allowed, addresses)):
        raise InvalidRequestError(f"{host!r:.200} is in a private network, which is not read")
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    connection.sock = socket.create_connection((addresses[0], port), timeout)
    if scheme == "https":
        connection.sock = ssl.create_default_context().wrap_socket(
            connection.sock, do_handshake_on_connect=False, server_hostname=host
        )
    return connection


def _body(response: http.client.HTTPResponse, url: str, most: int, deadline: float) -> bytes:
    parts, count = [], 0
    while piece := response.read1(1 << 16):
        parts.append(piece)
        count += len(piece)
        if count > most:
            raise InvalidRequestError(f"{url!r:.200} has more than {most} bytes")
    if time.monotonic() >= deadline:  # it was cut
        raise InvalidRequestError(f"{url!r:.200} takes too long")
    return b"".join(parts)

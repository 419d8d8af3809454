"""From what callers give to pixels: every form, and every hostile file refused by name, the process alive."""

import base64
import contextlib
import errno
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from fengine.config import MultimodalConfig
from fengine.errors import FengineError, InvalidRequestError, UnsupportedFeatureError
from fengine.multimodal.decoder import Decoder
from fengine.multimodal.fetch import fetch, is_public
from fengine.multimodal.sources import Sources

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def encoded(image: Image.Image | None = None, kind: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    (image or Image.fromarray(PIXELS)).save(out, kind, **how)
    return out.getvalue()


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    made = Sources(MultimodalConfig(max_image_pixels=10_000, max_image_mib=1))
    yield made
    made.close()


def test_every_form_gives_the_same_pixels(sources: Sources, tmp_path: Path) -> None:
    path, data = tmp_path / "a picture.png", encoded()
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [path, str(path), f"/{path}", path.as_uri(), data, bytearray(data), memoryview(data), text, PIXELS,
             f"data:image/png;base64,{text}", f"DATA:image/png;BASE64,{quote(text)}", f"{text[:70]}\n{text[70:]}",
             {"url": f"data:image/png;base64,{text}"}, Image.fromarray(PIXELS),
             Image.open(io.BytesIO(data)), {"url": str(path), "detail": "high"}]  # fmt: skip
    for form in forms:
        assert np.array_equal(sources.pixels(form), PIXELS), type(form)


def test_modes_become_rgb(sources: Sources) -> None:
    image = Image.fromarray(PIXELS)
    transparent = image.convert("RGBA")
    transparent.putalpha(Image.fromarray(PIXELS[:, :, 1]))
    see_through = image.quantize(8)
    see_through.info["transparency"] = 3
    for one in (transparent, see_through, image.convert("LA")):
        want = np.asarray(convert_to_rgb(one, return_numpy=True))  # what transformers' processors begin with
        for form in (encoded(one), one, *([np.asarray(one)] if one.mode == "RGBA" else [])):
            assert np.array_equal(sources.pixels(form), want)
    gray = np.asarray(image.convert("L"))
    for form in (encoded(image.convert("L")), gray, gray[:, :, None], image.convert("L")):
        assert np.array_equal(sources.pixels(form), np.repeat(gray[:, :, None], 3, 2))
    turned = Image.Exif()
    turned[0x0112] = 6
    assert sources.pixels(encoded(exif=turned)).shape == (7, 5, 3)
    assert sources.pixels(encoded(Image.new("RGB", (1, 1)))).shape == (1, 1, 3)
    for kind in ("BMP", "TIFF", "PPM", "GIF"):
        assert sources.pixels(encoded(kind=kind)).shape == (5, 7, 3)
    assert np.array_equal(sources.pixels(encoded(kind="WEBP", lossless=True)), PIXELS)


def test_hostile_files_are_refused_and_the_next_one_is_read(sources: Sources, tmp_path: Path) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    huge = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    cases = {
        encoded(kind="JPEG")[:200]: "(?i)truncated|is damaged",
        huge + chunk(b"IDAT", zlib.compress(b"\0" * 1000)): "20000 × 20000 pixels, more than max_image_pixels",
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]): r"animated \(2 frames\)",
        b"%PDF-1.4 not a picture": "it is damaged, or none of PNG, JPEG",
        encoded(Image.new("L", (1, 201))): "1 × 201 pixels; one side may be at most 200 times the other",
        encoded(Image.fromarray(np.full((4, 4), 300, np.uint16))): "more than 8 bits",
        b"": "no bytes",
        b"x" * (1 << 20) + b"y": "max_image_mib = 1",
    }
    for data, why in cases.items():
        with pytest.raises(InvalidRequestError, match=why):
            sources.pixels(data)
        assert np.array_equal(sources.pixels(encoded()), PIXELS)
    (tmp_path / "large.png").write_bytes(encoded() + bytes(1 << 20))  # a picture, and more
    with pytest.raises(InvalidRequestError, match="max_image_mib = 1"):
        sources.pixels(tmp_path / "large.png")


class Broken:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise KeyError("no pixels")


@pytest.mark.parametrize(
    "item, why",
    [
        (5, "it must be a path"),
        (Broken(), "cannot be read as an array: KeyError: 'no pixels'"),
        (PIXELS.astype(np.float32), "must be uint8"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((201, 1), np.uint8), "1 × 201 pixels; one side"),
        (Image.new("F", (4, 4)), "more than 8 bits"),
        (Image.new("RGB", (0, 5)), "0 × 5 pixels"),
        ("", "it must be a path"),
        ([PIXELS], "a list: the images of a prompt are a flat one"),
        ({"url": "a.png", "max_pixels": 5}, "got 'max_pixels', too"),
        ({"url": "a.png", "detail": "best"}, "detail must be auto"),
        ("/no/such/file.png", "cannot be read"),
        ("data:image/png,abc", "a data URL must be"),
        ("data:image/png;base64,ab!cdefg", "no base64"),
        ("http://example.com/a.png", "allow_image_urls=True"),
        ("HTTP://example.com/a.png", "allow_image_urls=True"),
        ("ftp://example.com/a.png", "no URL of http, https, file or data"),
        (Image.new("RGB", (200, 200)), "200 × 200 pixels"),
    ],
)
def test_what_is_no_image_is_refused(sources: Sources, item: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        sources.pixels(item)


def test_embeddings_made_elsewhere_are_not_built(sources: Sources) -> None:
    with pytest.raises(UnsupportedFeatureError, match="precomputed_embedding"):
        sources.pixels({"format": "precomputed_embedding", "feature": []})
    with pytest.raises(UnsupportedFeatureError, match='detail="low"'):
        sources.pixels({"url": "a.png", "detail": "low"})


def test_paths_over_http_stay_in_their_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "shared", tmp_path / "secret.png"
    inside.mkdir()
    for path in (inside / "a.png", outside):
        path.write_bytes(encoded())
    (inside / "link.png").symlink_to(outside)
    beside = tmp_path / "shared too" / "a.png"
    beside.parent.mkdir()
    beside.write_bytes(encoded())
    sources = Sources(MultimodalConfig(image_folder=str(inside)))
    assert np.array_equal(sources.pixels(str(inside / "a.png"), inside=True), PIXELS)
    for path in (outside, inside / "link.png", inside / ".." / "secret.png", beside):
        with pytest.raises(InvalidRequestError, match="not below image_folder"):
            sources.pixels(path.as_uri(), inside=True)
    with pytest.raises(InvalidRequestError, match="not read over HTTP"):
        Sources(MultimodalConfig()).pixels(str(outside), inside=True)
    sources.close()


def test_a_decoder_that_dies_or_takes_long_costs_one_image() -> None:
    decoder = Decoder(10_000)
    assert decoder.decode(encoded()).shape == (5, 7, 3)
    (child,) = decoder._trials.children
    assert child is not None
    child.kill()
    child.wait()
    assert decoder.decode(encoded()).shape == (5, 7, 3)
    decoder.close()
    slow = Decoder(10**8, seconds=0.02)
    with pytest.raises(InvalidRequestError, match="more time than 0.02 s"):
        slow.decode(encoded(Image.new("RGB", (6000, 6000))))
    slow.close()


def test_an_answer_that_was_not_read_is_nobody_elses() -> None:
    decoder = Decoder(10_000)
    decoder.decode(encoded())
    (child,) = decoder._trials.children
    assert child is not None
    stdout = child.stdout

    def interrupted() -> str:
        child.stdout = stdout
        raise KeyboardInterrupt

    child.stdout = SimpleNamespace(readline=interrupted)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(encoded())
    assert decoder.decode(encoded(Image.new("RGB", (3, 4)))).shape == (4, 3, 3)
    decoder.close()


def test_a_decoder_that_cannot_start_is_told_and_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    decoder = Decoder(10_000)
    with monkeypatch.context() as patch, pytest.raises(FengineError, match="Too many open files"):
        patch.setattr("fengine.tokenizer.trial.subprocess.Popen", full)
        decoder.decode(encoded())
    assert np.array_equal(decoder.decode(encoded()), PIXELS)
    decoder.close()


class _Pictures(BaseHTTPRequestHandler):
    closing = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        if self.path == "/private":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.2:1/a.png")
            self.end_headers()
            return
        if self.path == "/never":  # an answer that goes on, each piece of it at once
            with contextlib.suppress(OSError):
                while not self.closing.is_set():  # not every kernel tells a writer at once that nobody reads
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        found = self.path == "/a.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(encoded() if found else b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), _Pictures)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    _Pictures.closing.clear()
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    _Pictures.closing.set()
    made.shutdown()
    made.server_close()


def test_urls_are_read_from_allowed_addresses_only(server: str) -> None:
    def here(address: str) -> bool:
        return address == "127.0.0.1"

    assert fetch(f"{server}/a.png", (), 1 << 20, here) == fetch(f"{server}/moved", (), 1 << 20, here) == encoded()
    assert fetch(f"{server}/a.png", ("127.0.0.1",), 1 << 20, here) == encoded()
    refused = [("/a.png", (), 1 << 20, is_public, "private network"), ("/private", (), 1 << 20, here, "private"),
               ("/a.png", ("example.com",), 1 << 20, here, "image_hosts"), ("/none", (), 1 << 20, here, "404"),
               ("/a.png", (), 10, here, "more than 10 bytes")]  # fmt: skip
    for path, hosts, most, allowed, why in refused:
        with pytest.raises(InvalidRequestError, match=why):
            fetch(server + path, hosts, most, allowed)
    with pytest.raises(InvalidRequestError, match="private"):
        fetch(f"{server}/moved", (), 1 << 20, first=here)
    with pytest.raises(InvalidRequestError, match="takes too long"):
        fetch(f"{server}/never", (), 1 << 20, here, 0.1)


def test_who_may_name_a_private_address(server: str) -> None:
    """Whoever calls this process, and, over HTTP, nobody but for a host that is listed."""
    for hosts in ((), ("127.0.0.1",)):
        sources = Sources(MultimodalConfig(allow_image_urls=True, image_hosts=hosts))
        assert np.array_equal(sources.pixels(f"{server}/a.png"), PIXELS)
        if hosts:
            assert np.array_equal(sources.pixels(f"{server}/a.png", inside=True), PIXELS)
        for path, inside in (("/moved", False), ("/moved", True), *([] if hosts else [("/a.png", True)])):
            with pytest.raises(InvalidRequestError, match="private network"):
                sources.pixels(server + path, inside)
        sources.close()


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1%eth0", "192.168.0.1", "224.0.0.1", "fec0::1",
    "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_of_a_private_network_is_public(address: str) -> None:
    assert not is_public(address) and is_public("8.8.8.8") and is_public("64:ff9b::808:808")

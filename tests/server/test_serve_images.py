"""Images over HTTP and in chats: each answer is that of the engine's call behind it; no local file is read."""

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
from serving import Live, live, until
from tiny_vision import picture

from fengine import Engine
from fengine.api.chat_images import without_images
from fengine.errors import FengineError, InvalidRequestError

GREEDY = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}
SAMPLING = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
TEXT = "user: <image>\nwhat is it?\nassistant: "


def data_url(seed: int) -> str:
    out = io.BytesIO()
    picture(seed).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part(url), {"type": "text", "text": "what is it?"}]}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tiny_vision.write_with_text(tmp_path_factory.mktemp("llava"))
    with Engine(model_path=str(path), device="cpu", max_total_tokens=4096) as made:
        yield made


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine) as made:
        yield made
        until(made.quiet)


def ids_of(engine: Engine, seed: int) -> list[int]:
    return engine.generate(TEXT, GREEDY, image_data=picture(seed))["output_ids"]


def test_chats_take_images_in_every_form(engine: Engine) -> None:
    want = ids_of(engine, 1)
    one = {"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what is it?"}]}
    assert engine.chat([one], GREEDY)["output_ids"] == want
    assert engine.chat(asked(data_url(1)), GREEDY)["output_ids"] == want
    several = engine.chat([asked(data_url(1)), [{"role": "user", "content": "hi"}], asked(data_url(2))], GREEDY)
    assert [o["output_ids"] for o in several[::2]] == [want, ids_of(engine, 2)]
    assert asyncio.run(engine.async_chat(asked(data_url(1)), GREEDY))["output_ids"] == want
    assert want != ids_of(engine, 2)


def test_text_that_looks_like_a_placeholder_stays_text(engine: Engine) -> None:
    chat = asked(data_url(1))
    chat[0]["content"][1]["text"] = "what is <image>?"
    assert engine.chat(chat, GREEDY)["meta_info"]["completion_tokens"] == 5
    with pytest.raises(InvalidRequestError, match="1 image, but the prompt has 2 placeholders"):
        engine.generate("<image> what is <image>?", GREEDY, image_data=picture(1))


def test_completions_of_chats(engine: Engine, server: Live) -> None:
    body = {
        "model": server.service.model,
        "messages": asked(data_url(1)),
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
    }
    want = engine.generate(TEXT, GREEDY, image_data=picture(1))
    body |= {"model": server.service.model}
    answer = server.ask("POST", "/v1/chat/completions", body).json
    assert answer["choices"][0]["message"]["content"] == want["text"]
    assert answer["usage"]["prompt_tokens"] == want["meta_info"]["prompt_tokens"]
    native = {"text": TEXT, "sampling_params": GREEDY, "image_data": data_url(1)}
    assert server.ask("POST", "/generate", native).json["output_ids"] == want["output_ids"]
    blocks = [{"type": "input_image", "image_url": data_url(1)}, {"type": "input_text", "text": "what is it?"}]
    said = {"input": [{"role": "user", "content": blocks}], "max_output_tokens": 5, **SAMPLING}
    said |= {"model": server.service.model}
    del said["max_tokens"]
    assert server.ask("POST", "/v1/responses", said).json["output"][0]["content"][0]["text"] == want["text"]
    source = {"type": "base64", "media_type": "image/png", "data": data_url(1).partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    told = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 5,
        "temperature": 0,
        "model": server.service.model,
    }
    assert server.ask("POST", "/v1/messages", told).json["content"][0]["text"] == want["text"]
    count = want["meta_info"]["prompt_tokens"]
    counted = {name: told[name] for name in ("messages", "model")}
    assert server.ask("POST", "/v1/messages/count_tokens", counted).json == {"input_tokens": count}
    assert server.ask("POST", "/tokenize", {"messages": asked(data_url(1))}).json["count"] == count
    begun = server.ask("POST", "/v1/messages", told | {"stream": True}).body.decode().partition("\n\n")[0]
    assert f'"input_tokens": {count}' in begun
    cut = server.ask("POST", "/v1/chat/completions", body | {"truncate_prompt_tokens": 5})
    assert cut.status == 400 and b"truncate_prompt_tokens of a chat with images" in cut.body


def test_a_part_that_is_not_built_is_named(server: Live) -> None:
    content = [{"type": "video_url", "video_url": {"url": "a.mp4"}}, {"type": "text", "text": "what?"}]
    body = {"model": server.service.model, "messages": [{"role": "user", "content": content}]}
    answer = server.ask("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and b"a part of type 'video_url' is not built" in answer.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_files_of_this_machine_are_not_read(server: Live, tmp_path: Path, path: str) -> None:
    secret = tmp_path / "secret.png"
    picture(1).save(secret)
    for url in (str(secret), secret.as_uri(), "http://127.0.0.1/a.png"):
        native = {"text": TEXT, "sampling_params": GREEDY, "image_data": [url]}
        chat = {"model": server.service.model, "messages": asked(url), **SAMPLING}
        body = native if path == "/generate" else chat
        answer = server.ask("POST", path, body)
        assert answer.status == 400 and b"image_data[0]" in answer.body


def test_embeddings_of_chats(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "secret.png")
    path = tiny_vision.write_with_text(tmp_path / "llava")
    with Engine(model_path=str(path), device="cpu", is_embedding=True) as engine, live(engine) as server:
        want = engine.encode(asked(data_url(1)))["embedding"]
        assert want == engine.encode(TEXT, image_data=picture(1))["embedding"]
        body = {"model": server.service.model, "messages": asked(data_url(1))}
        assert server.ask("POST", "/v1/embeddings", body).json["data"][0]["embedding"] == want
        assert server.ask("POST", "/encode", {"text": asked(data_url(1))}).json["embedding"] == want
        several = server.ask("POST", "/encode", {"text": [asked(data_url(1)), asked(data_url(2))]}).json
        assert several[0]["embedding"] == want != several[1]["embedding"]
        for url in (str(tmp_path / "secret.png"), (tmp_path / "secret.png").as_uri()):
            bodies = {"/encode": {"text": asked(url)}, "/v1/embeddings": body | {"messages": asked(url)}}
            for where, told in bodies.items():
                answer = server.ask("POST", where, told)
                assert answer.status == 400 and b"paths are not read over HTTP" in answer.body
        until(server.quiet)


def test_sessions_keep_their_images(engine: Engine) -> None:
    first, more = TEXT, "\nuser: and <image>\nassistant: "
    session = engine.open_session(0)
    assert session is not None
    one = engine.generate(first, GREEDY, image_data=picture(1), session_params={"id": session})
    two = engine.generate(more, GREEDY, image_data=picture(2), session_params={"id": session})
    three = engine.generate("\nuser: so?", GREEDY, session_params={"id": session})
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode(first) + one["output_ids"] + tokenizer.encode(more)
    whole = engine.generate(None, GREEDY, prompt, image_data=[picture(1), picture(2)])
    assert two["output_ids"] == whole["output_ids"]
    prompt += two["output_ids"] + tokenizer.encode("\nuser: so?")
    whole = engine.generate(None, GREEDY, prompt, image_data=[picture(1), picture(2)])
    assert three["output_ids"] == whole["output_ids"]
    assert three["meta_info"]["cached_tokens"] > 0
    cut = {"id": session, "rid": one["meta_info"]["id"], "offset": one["meta_info"]["prompt_tokens"]}
    branch = engine.generate(more, GREEDY, image_data=picture(2), session_params=cut)
    whole = engine.generate(first + more, GREEDY, image_data=[picture(1), picture(2)])
    assert branch["output_ids"] == whole["output_ids"]
    engine.close_session(session)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"image_url": {"url": "", "detail": "low"}}, 'detail="low"'),
        ({"detail": "low"}, 'detail="low"'),
        ({"detail": 5}, "detail must be auto"),
        ({"max_pixels": 5}, r"messages\[0\]\['content'\]\[0\] has 'max_pixels'"),
        ({"url": "a.png"}, "with several of image_url"),
        ({"image_url": None}, "with none of image_url"),
        ({"image_url": {"url": "a.png", "size": 3}}, "got 'size', too"),
    ],
)
def test_what_a_part_has_beside_its_image_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(FengineError, match=why):
        without_images([{"role": "user", "content": [part("a.png") | change]}])
    harmless = part("a.png") | {"detail": "auto", "cache_control": {"type": "ephemeral"}, "file_id": None}
    assert without_images([{"role": "user", "content": [harmless]}])[1] == ["a.png"]

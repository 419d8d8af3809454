"""`scripts/custom_server.py` is what its text says: SGLang's custom server, over an engine of this process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve")
pytest.importorskip("httpx2", reason="openai's client brings it, of the extra dev")

from starlette.testclient import TestClient  # noqa: E402

PATH = Path(__file__).resolve().parents[2] / "scripts" / "custom_server.py"


def test_it_answers_and_streams() -> None:
    spec = importlib.util.spec_from_file_location("custom_server", PATH)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asked = {"prompt": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    with TestClient(module.make_app(model_path="box", enable_torch_compile=False)) as client:
        text = client.post("/generate", json=asked).json()["response"]
        assert "Paris" in text
        assert client.post("/generate_stream", json=asked).text == text
        for path in ("/generate", "/generate_stream"):
            answer = client.post(path, json={"prompt": 5})
            assert answer.status_code == 400 and "prompt must be" in answer.json()["error"]
    assert len(PATH.read_text().splitlines()) < 70

"""The script that trains a small vision model: what it writes is a model of the engine's, and transformers' own."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from fengine import Engine
from fengine.eval.tasks import drawn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    small = [
        "--steps",
        "3",
        "--workers",
        "1",
        "--held-out",
        "2",
        "--alone",
        "0.4",
        "--batch",
        "2",
        "--width",
        "64",
        "--inner",
        "64",
        "--layers",
        "2",
    ]
    command = [sys.executable, str(ROOT / "scripts" / "box_vl_train.py"), "--out", str(out), *small]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_answers_are_those_of_transformers(folder: Path) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine(model_path=str(folder), device="cpu", dtype="float32") as engine:
        for row in islice(drawn.rows(1), 3):
            content = [{"type": "image", "image": row["picture"]}, {"type": "text", "text": row["question"]}]
            asked = [{"role": "user", "content": content}]
            found = engine.chat(asked, {"max_new_tokens": 5, "temperature": 0.0}, return_logprob=True)
            pictures = engine._parts.images.read(row["picture"])
            plain = [{"role": "user", "content": [{"type": "image"}, content[1]]}]
            ids = engine._parts.images.prompt(engine.tokenizer.encode_chat(plain), pictures).ids
            assert len(ids) == found["meta_info"]["prompt_tokens"]
            pixels = torch.from_numpy(pictures[0].pieces[0].arrays["pixels_CHW"])[None, None]
            with torch.no_grad():
                whole = torch.tensor([ids + found["output_ids"]])
                logprobs = reference(input_ids=whole, pixel_values=pixels).logits[0].log_softmax(-1)
            for at, (logprob, token, _) in enumerate(found["meta_info"]["output_token_logprobs"], len(ids) - 1):
                assert token == logprobs[at].argmax() and abs(logprob - logprobs[at, token]) < 1e-3

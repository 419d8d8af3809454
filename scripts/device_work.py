"""What the cases of `check_device.py` write and ask."""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[1:1] = [str(TESTS), str(TESTS / "parity")]
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
PERSON = json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                     "age": {"type": "integer"}}, "required": ["name", "age"]})  # fmt: skip


# -- what is asked ----------------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 500 + 3 for j in range(n)] for i, n in enumerate((1, 5, 17, 48, 64, 100, 150, 33))]


def text(count: int = 40, **more: Any) -> dict[str, Any]:
    """Greedy and drawn, with the logprobs of prompts."""
    params = [
        {"max_new_tokens": count, "ignore_eos": True, "temperature": i % 2 * 1.0, "sampling_seed": i}
        for i in range(len(prompts()))
    ]
    return {"input_ids": prompts(), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0} | more


def long() -> dict[str, Any]:
    """Rows of several thousand tokens, between short ones."""
    ids = [[(7 * i + 13 * j + j * j // 7) % 500 + 3 for j in range(n)] for i, n in enumerate((3000, 40, 1700, 2500))]
    return text(40, input_ids=ids, sampling_params=text()["sampling_params"][:4])


def sampled(**params: Any) -> dict[str, Any]:
    work = text()
    work["sampling_params"] = [given | params for given in work["sampling_params"]]
    return work


def repeating() -> dict[str, Any]:
    """What can be guessed: prompts that repeat themselves, and rows that are led to say the same again and again."""
    work = text(60, input_ids=[(prompt * 9)[:120] for prompt in prompts()])
    for given in work["sampling_params"][::3]:
        given["logit_bias"] = {"7": 60.0}
    return work


def several() -> dict[str, Any]:
    return sampled(n=3, temperature=0.9) | {"logprob_start_len": None}


def adapted() -> dict[str, Any]:
    return text(24, lora_path=["a", "b", None, "a", "b", "c", "c", None])


def grammar() -> dict[str, Any]:
    kinds = ({"json_schema": PERSON}, {"regex": "[a-z]{3,9}( [a-z]+){1,4}"}, {}, {"ebnf": 'root ::= "yes" | "no"'})
    params = [{"max_new_tokens": 40, "temperature": i % 2 * 0.8, "sampling_seed": i, **kinds[i % 4]} for i in range(8)]
    return {"prompt": ["Once upon a time", "2 + 3 ="] * 4, "sampling_params": params, "return_logprob": True}


def stops() -> dict[str, Any]:
    params = [{"max_new_tokens": 60, "temperature": i % 2 * 0.8, "sampling_seed": i, "stop": [".", " the"],
               "min_new_tokens": i}
              for i in range(6)]  # fmt: skip
    return {"prompt": ["Once upon a time", "Hello, my", "The"] * 2, "sampling_params": params, "return_logprob": True}


def images() -> dict[str, Any]:
    """With placeholders that `prepared` writes out."""
    from tiny_vision import TOKEN, picture

    pictures = [picture(seed, 20 + 7 * seed, 60 - 5 * seed) for seed in range(6)]
    one, two = [5, 122, TOKEN, 123, 7, 8], [9, TOKEN, 10, TOKEN, 11, 12, 13]
    ids = [one, two, [5, 6, 7, 8, 9], [TOKEN, 4], two, one]
    given = [pictures[0], pictures[1:3], None, pictures[3], [pictures[0], pictures[0]], pictures[5]]
    params = [{"max_new_tokens": 24, "ignore_eos": True, "temperature": i % 2 * 1.0, "sampling_seed": i}
              for i in range(6)]  # fmt: skip
    asked = {"return_logprob": True, "logprob_start_len": 0}
    return {"input_ids": ids, "image_data": given, "sampling_params": params, **asked}


def prepared(work: dict[str, Any], engine: Any) -> dict[str, Any]:
    if "image_data" in work:
        from test_vision import in_place

        pairs = zip(work["input_ids"], work["image_data"], strict=True)
        work["input_ids"] = [in_place(engine, ids, [] if given is None else given) for ids, given in pairs]
    return work


# -- what is written --------------------------------------------------------------------------------------------------


def plain(folder: Path, family: str, seed: int = 0, name: str = "model", **config: Any) -> dict[str, Any]:
    import tiny_checkpoints

    sizes = {key: value for key, value in (SIZES | config).items() if value is not None}
    return {"model": str(tiny_checkpoints.write(folder / name, family, seed=seed, dtype=torch.bfloat16, **sizes))}


def config_of_test(folder: Path, case: str) -> dict[str, Any]:
    """A configuration of tests/parity/test_models.py, in its own odd sizes."""
    import test_models
    import tiny_checkpoints

    told = {"dtype": torch.bfloat16, "vocab_size": 512} | test_models.CASES[case]
    return {"model": str(tiny_checkpoints.write(folder / "model", case.partition("-")[0], **told))}


def quantized(folder: Path, case: str, **config: Any) -> dict[str, Any]:
    """A case of tests/parity/test_quantized.py, and its dequantized checkpoint."""
    import quantized_checkpoints
    import test_quantized

    told, make, given = test_quantized.CASES[case]
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    few, dense = quantized_checkpoints.write(folder, told, test_quantized.keep(make), **(given | sizes | config))
    return {"model": str(few), "dense": str(dense)}


def microscaled(folder: Path) -> dict[str, Any]:
    import test_quantized

    few, dense = test_quantized.mxfp4(folder, vocab_size=512, hidden_size=256, intermediate_size=256, head_dim=64)
    return {"model": str(few), "dense": str(dense)}


def drafted(folder: Path, family: str = "llama", **config: Any) -> dict[str, Any]:
    """A model, a draft that is the model with a little noise, and an EAGLE-3 head."""
    import eagle_heads
    from safetensors.torch import load_file, save_file

    found = plain(folder, family, **config)
    told, generator = json.loads((Path(found["model"]) / "config.json").read_text()), torch.Generator().manual_seed(3)
    (folder / "draft").mkdir()
    tensors = load_file(Path(found["model"]) / "model.safetensors")
    noisy = {k: (x + 0.003 * torch.randn(x.shape, generator=generator)).to(x.dtype) for k, x in tensors.items()}
    save_file(noisy, folder / "draft" / "model.safetensors", {"format": "pt"})
    (folder / "draft" / "config.json").write_text(json.dumps(told))
    return found | {"draft": str(folder / "draft"), "eagle": eagle_heads.write(folder / "eagle", told, head=128)}


def with_adapters(folder: Path, family: str = "", case: str = "", **config: Any) -> dict[str, Any]:
    """Of a family, or over a case of `quantized`."""
    import tiny_adapters

    found = quantized(folder, case, **config) if case else plain(folder, family, **config)
    names = {
        name: str(tiny_adapters.random_adapter(folder / name, found["model"], rank, seed=rank))
        for name, rank in (("a", 8), ("b", 16), ("c", 3))
    }
    return found | {"adapters": names}


def pictured(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    import tiny_vision

    return {"model": str(tiny_vision.write(folder / "model", family, **config))}


def encoder(folder: Path, case: str, kind: str = "Model") -> dict[str, Any]:
    """An encoder of tests/parity/test_encoders.py, what transformers says of a row, and rows."""
    import test_encoders

    more = {"num_labels": 3} if kind != "Model" else {}
    model = test_encoders.write(folder, case, kind, vocab_size=4096, hidden_size=64, **more)

    def reference(row: list[int]) -> list[float]:
        output = model(torch.tensor([row]))
        if kind != "Model":
            return output.logits[0].tolist()
        return torch.nn.functional.normalize(output.last_hidden_state[0, -1], dim=0).tolist()

    return {"model": str(folder), "rows": test_encoders.prompts(), "reference": reference}


def embedder(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    """A decoder read for embeddings: of the last token, normalised."""
    import transformers

    path = plain(folder, family, **config)["model"]
    model: Any = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    def reference(row: list[int]) -> list[float]:
        return torch.nn.functional.normalize(model(torch.tensor([row])).last_hidden_state[0, -1], dim=0).tolist()

    return {"model": path, "rows": prompts(), "reference": reference}


def box(folder: Path) -> dict[str, Any]:
    return {"model": "box"}


def two(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    return plain(folder, family, **config) | {"other": plain(folder, family, 1, "other", **config)["model"]}


# -- what transformers says -------------------------------------------------------------------------------------------


def reads(path: str, device: str, family: str) -> Any:
    """Logprobs of all that may follow each token of a prompt."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()  # pyright: ignore
    return lambda ids, _: model(torch.tensor([ids], device=device)).logits[0].float().log_softmax(-1)


def sees(path: str, device: str, family: str) -> Any:
    """The same of prompts with pictures; on the CPU."""
    import test_vision
    import tiny_vision
    import transformers

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    case = test_vision.Case(None, model, tiny_vision.FAMILIES[family][1]())  # type: ignore[arg-type]

    def logprobs(ids: list[int], given: Any) -> torch.Tensor:
        if given is None:
            return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return test_vision.reference_logprobs(case, ids, given if isinstance(given, list) else [given])

    return logprobs

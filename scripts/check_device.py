"""Every feature on a device, on small random checkpoints: `python scripts/check_device.py --json FILE`.

Each case of `device_cases.py` has a process of its own, several at once. Its requests run together, alone, over a warm
cache, and under each of its layouts: tokens, logprobs and all else that is answered must have the same bits. Families,
images and encoders are also compared with transformers, within --tolerance, both in float32: in bfloat16 a router may
choose other experts. `--device cpu` runs the same.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import device_work
import torch
from device_cases import BASE, CASES, Case
from device_work import prepared
from measure import environment

from fengine import Engine

ANSWERED = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs",
            "output_token_ids_logprobs", "hidden_states", "finish_reason")  # fmt: skip
GUESSES = ("n-grams", "a draft", "EAGLE-3")
EVIDENCE = {
    "preempted": "preemptions",
    **dict.fromkeys(GUESSES, "correct_draft_tokens"),
}  # a layout proves nothing unless this was counted
Answer = dict[str, Any]
NEAR = "worst |difference| to transformers"
WHOLE = {"dtype": "float32", "disable_cuda_graph": True}


# -- bits -------------------------------------------------------------------------------------------------------------


def answers(engine: Engine, work: dict[str, Any]) -> list[Answer]:
    outputs: Any = engine.generate(**work)
    found = []
    for output in outputs if isinstance(outputs, list) else [outputs]:
        meta = output["meta_info"]
        own = {name: meta[name] for name in ANSWERED if name in meta}
        found.append({"output_ids": output["output_ids"], "text": output.get("text"), **own})
    return found


def one(work: dict[str, Any], i: int) -> dict[str, Any]:
    return {name: value[i] if isinstance(value, list) else value for name, value in work.items()}


def unlike(want: Any, got: Any, at: str = "") -> str | None:
    """Where two answers differ first, and how. Pure."""
    if isinstance(want, dict) and isinstance(got, dict):
        pairs: Any = [(f"{at} {key}", value, got.get(key)) for key, value in want.items()]
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(want) == len(got):
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got, strict=True))]
    else:
        return None if want == got else f"{at}: {str(want)[:60]} != {str(got)[:60]}"
    return None if want == got else next((found for pair in pairs if (found := unlike(pair[1], pair[2], pair[0]))), at)


def verdict(want: list[Any], got: list[Any]) -> str:
    wrong = [(i, a, b) for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]
    if not wrong:
        return "same"
    return f"{len(wrong)} of {len(want)} rows differ, first row {wrong[0][0]}{unlike(*wrong[0][1:])}"


def finite(found: list[Answer]) -> bool:
    """Whether all logprobs are numbers, and not all rows say the same."""
    logprobs = [entry[0] for row in found for entry in row["output_token_logprobs"]]
    return all(math.isfinite(lp) for lp in logprobs) and len(set(logprobs)) > len(logprobs) // 4


def bits(case: Case, paths: dict[str, Any], device: str, told: dict[str, Any]) -> None:
    with Engine(**options(case, paths, device, {})) as engine:
        work = prepared(case.work(), engine)
        rows = len(work["sampling_params"])
        want = answers(engine, work)
        told["logprobs are finite and many"] = "same" if finite(want) else f"NOT: {str(want[0])[:200]}"
        engine.flush_cache()
        told["alone"] = verdict(want, [row for i in range(rows) for row in answers(engine, one(work, i))])
        short = {name: value for name, value in work.items() if name not in ("logprob_start_len",)}
        outputs = [{k: v for k, v in row.items() if not k.startswith(("input", "hidden"))} for row in want]
        warm = [{k: row.get(k) for k in outputs[0]} for row in answers(engine, short)]
        told["cached"] = verdict(outputs, warm)
        told["stats"] = engine.stats()
    for name, layout in case.layouts.items():
        with Engine(**options(case, paths, device, layout)) as engine:
            told[name] = verdict(want, answers(engine, work))
            stats = told["stats of " + name] = engine.stats()
            if name in EVIDENCE and not stats[EVIDENCE[name]]:
                told[name] = f"proves nothing: no {EVIDENCE[name]}"
    if names := work.get("lora_path"):
        bare = [i for i, name in enumerate(names) if name is None]
        with Engine(**options(case, paths, device, {"lora_paths": None, "max_lora_rank": None})) as engine:
            got = [row for i in bare for row in answers(engine, one(work, i))]
        told["rows without an adapter, without LoRA"] = verdict([want[i] for i in bare], got)
    if case.near:
        with Engine(**options(case, paths, device, WHOLE)) as engine:
            found = answers(engine, work)
        told[NEAR] = round(worst(paths["model"], device, work, found, case.given["family"]), 5)


def options(case: Case, paths: dict[str, Any], device: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Of an engine; "{draft}" stands for what the writer named so."""
    given = {"model_path": "{model}", "device": device, **BASE, **case.options, **layout}
    return {k: paths.get(v.strip("{}"), v) if isinstance(v, str) else v for k, v in given.items()}


def worst(path: str, device: str, work: dict[str, Any], found: list[Answer], family: str) -> float:
    """The largest distance of a prompt's logprobs from transformers', both in float32."""
    reference, gap = (device_work.sees if "image_data" in work else device_work.reads)(path, device, family), 0.0
    for i, (prompt, answer) in enumerate(zip(work["input_ids"], found, strict=True)):
        with torch.no_grad():
            logprobs = reference(prompt, work["image_data"][i] if "image_data" in work else None)
        want = logprobs[range(len(prompt) - 1), prompt[1:]].tolist()
        got = [entry[0] for entry in answer["input_token_logprobs"][1:]]
        gap = max([gap, *(abs(a - b) for a, b in zip(want, got, strict=True))])
    return gap


# -- other oracles ----------------------------------------------------------------------------------------------------


def encoded(case: Case, paths: dict[str, Any], device: str, told: dict[str, Any]) -> None:
    """Embeddings: alone the same bits as together; near those of transformers."""
    rows, reference = paths["rows"], paths["reference"]
    with Engine(**options(case, paths, device, {})) as engine:
        want = [output["embedding"] for output in engine.encode(rows)]
        told["alone"] = verdict(want, [engine.encode(row)["embedding"] for row in rows])
        told["again"] = verdict(want, [output["embedding"] for output in engine.encode(rows)])
    for name, layout in case.layouts.items():
        with Engine(**options(case, paths, device, layout)) as engine:
            told[name] = verdict(want, [output["embedding"] for output in engine.encode(rows)])
    with Engine(**options(case, paths, device, WHOLE)) as engine, torch.no_grad():
        pairs = zip((output["embedding"] for output in engine.encode(rows)), map(reference, rows), strict=True)
        told[NEAR] = round(max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)), 5)


def conversation(case: Case, paths: dict[str, Any], device: str, told: dict[str, Any]) -> None:
    """Turns of a session against plain calls of the whole context, over an empty cache."""
    asked = {"sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}, "return_logprob": True}
    with Engine(**options(case, paths, device, {})) as engine:
        sid, context, contexts, turns = engine.open_session(1000), [], [], []
        for ids in ([5, 6, 7] * 9, [8], [9, 10] * 20, [11, 12, 13, 14]):
            contexts.append([*context, *ids])
            turns += answers(engine, {"input_ids": ids, "session_params": {"id": sid}, **asked})
            context = [*contexts[-1], *turns[-1]["output_ids"]]
        engine.flush_cache()
        plain = [answers(engine, {"input_ids": ids, **asked})[0] for ids in contexts]
    told["plain calls"] = verdict(
        [row["output_token_logprobs"] for row in plain], [row["output_token_logprobs"] for row in turns]
    )


def memory(case: Case, paths: dict[str, Any], device: str, told: dict[str, Any]) -> None:
    """Memory released and taken again; weights of another checkpoint, and back, against engines loaded afresh."""
    from safetensors.torch import load_file

    work = case.work()
    with Engine(**options(case, paths, device, {"model_path": paths["other"]})) as engine:
        other = answers(engine, work)
    with Engine(**options(case, paths, device, {"enable_weights_cpu_backup": True})) as engine:
        want = answers(engine, work)
        for tags in (["kv_cache"], ["cuda_graph"], ["weights"], None):
            engine.release_memory_occupation(tags)
            engine.resume_memory_occupation(tags)
            told[f"released: {tags}"] = verdict(want, answers(engine, work))
        tensors = load_file(Path(paths["other"]) / "model.safetensors")
        on_device = [(name, tensor.to(device)) for name, tensor in tensors.items()]
        assert engine.update_weights_from_tensor(on_device).success
        told["tensors of another"] = verdict(other, answers(engine, work))
        assert engine.update_weights_from_disk(paths["model"]).success
        told["back from disk"] = verdict(want, answers(engine, work))


# -- processes --------------------------------------------------------------------------------------------------------


def passed(told: dict[str, Any], tolerance: float) -> bool:
    judged = {name: value for name, value in told.items() if not name.startswith("stats")}
    return all(value == "same" if isinstance(value, str) else value <= tolerance for value in judged.values())


def work_of(name: str, device: str, folder: Path) -> None:
    """One case, in a process of its own."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    result: dict[str, Any] = {"found": told}
    case = CASES[name]
    try:
        paths = getattr(device_work, case.write)(folder, **case.given)
        globals()[case.check](case, paths, device, told)
    except Exception as error:  # one case's failure is a row of the table
        last = (str(error).strip() or "no message").splitlines()[-1]
        result |= {"error": f"{type(error).__name__}: {last}", "trace": traceback.format_exc()}
    (folder / "result.json").write_text(json.dumps(result, default=str))


def row_of(name: str, folder: Path, seconds: float, code: int | None, tolerance: float) -> dict[str, Any]:
    result = folder / "result.json"
    row = json.loads(result.read_text()) if result.exists() else {"found": {}, "error": f"ended with status {code}"}
    if code is None:
        row["error"] = "took too long"
    row |= {"case": name, "seconds": round(seconds, 1)}
    row["ok"] = "error" not in row and passed(row["found"], tolerance)
    if not row["ok"]:
        row["log"] = (folder / "log").read_text(errors="replace")[-4000:] if (folder / "log").exists() else ""
    return row


def line(row: dict[str, Any], tolerance: float) -> str:
    far = {k: v for k, v in row["found"].items() if not passed({k: v}, tolerance)}
    near = row["found"].get(NEAR)
    said = "ok" + ("" if near is None else f", {near} to transformers")
    if not row["ok"]:
        said = "; ".join([*(f"{k}: {v}" for k, v in far.items()), *([row["error"]] if "error" in row else [])])
    return f"{'  ' if row['ok'] else '! '}{row['case']:38} {row['seconds']:6.1f} s  {said[:300]}"


def run(names: list[str], device: str, jobs: int, limit: float, tolerance: float) -> list[dict[str, Any]]:
    importlib.import_module("tiny_checkpoints")  # and transformers, once for all processes
    fork, begin, rows = multiprocessing.get_context("fork"), time.monotonic(), []
    waiting, running = list(names), {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        while waiting or running:
            now = time.monotonic()
            spent = now - begin > limit
            while waiting and len(running) < jobs and not spent:
                name = waiting.pop(0)
                folder = Path(root) / str(len(names) - len(waiting))
                folder.mkdir()
                process = fork.Process(target=work_of, args=(name, device, folder))
                process.start()
                running[name] = process, folder, now
            for name, (process, folder, start) in list(running.items()):
                code = process.exitcode
                if code is None and not spent:
                    continue
                process.kill()
                del running[name]
                rows.append(row_of(name, folder, now - start, code, tolerance))
                print(line(rows[-1], tolerance), flush=True)
            if spent:
                break
            time.sleep(0.05)
    rows += [{"case": name, "found": {}, "ok": False, "error": "not begun", "seconds": 0} for name in waiting]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", help="cases whose names contain this; may be given again")
    parser.add_argument("--skip", action="append", default=[], help="cases whose names do not contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=180, help="seconds for all of it")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of logprobs in float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = [n for n in CASES if not given.only or any(part in n for part in given.only)]
    names = [n for n in names if not any(part in n for part in given.skip)]
    begin = time.monotonic()
    rows = run(names, given.device, given.jobs, given.limit, given.tolerance)
    good, missing = sum(row["ok"] for row in rows), [row["case"] for row in rows if row.get("error") == "not begun"]
    print(f"{good} of {len(rows)} ok in {time.monotonic() - begin:.0f} s; not begun: {', '.join(missing) or 'none'}")
    if given.json:
        given.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    sys.exit(good < len(rows))


if __name__ == "__main__":
    main()

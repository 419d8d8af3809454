"""A task of inspect-ai over data of this repository; its prompts are texts to be continued, not chats.

inspect eval scripts/harness/capitals.py --model fengine/box -M use_chat_template=false --temperature 0 --max-tokens 16
"""

import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

DATA = Path(__file__).resolve().parents[2] / "conf" / "task" / "data" / "capitals.jsonl"


@task
def capitals() -> Task:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    return Task(
        [Sample(input=row["prompt"], target=row["answer"]) for row in rows], solver=generate(), scorer=includes()
    )

"""The pictures of rows beside them, small and of bounded size. No torch."""

import base64
from pathlib import Path
from typing import Any

from fengine.errors import FengineError
from fengine.eval.report.facts import mapping
from fengine.eval.runs.record import record_of
from fengine.eval.runs.records import Records
from fengine.eval.tasks.columns import digest_of, read_image
from fengine.eval.tasks.drawn import png
from fengine.multimodal.decoder import Decoder

SIDE = 128  # pixels of a longer one are left out
MOST_PIXELS = 1 << 26


def add_thumbnails(found: list[dict[str, Any]], records: Records, budget: int) -> None:
    """Gives rows `img`, the data URLs of their pictures that are still what they were, of about `budget` bytes in all.
    Modifies: found. Errors: StorageError."""
    config, origin = mapping(records.identity.get("config")), mapping(records.manifest.get("origin"))
    column, decoder = str(config.get("task.images") or ""), Decoder(MOST_PIXELS)
    folder = (Path(str(origin.get("base", ""))) / str(config.get("task.data") or "")).parent
    for row in found if column else ():
        record = None if "lost" in row else record_of(records.line(row["n"]))
        pictures = mapping(mapping(record).get("data")).get(column)
        for one in pictures if isinstance(pictures, list) else ():
            try:
                data = read_image(one["image"], folder)
                pixels_HWC = decoder.decode(data) if digest_of(one["image"], data) == one["sha256"] else None
            except (OSError, ValueError, KeyError, TypeError, FengineError):
                continue  # it is gone, or none
            if pixels_HWC is not None:
                step = -(-max(pixels_HWC.shape[:2]) // SIDE)
                url = f"data:image/png;base64,{base64.b64encode(png(pixels_HWC[::step, ::step])).decode()}"
                budget -= len(url)
                if budget < 0:
                    return decoder.close()
                row.setdefault("img", []).append(url)
    decoder.close()

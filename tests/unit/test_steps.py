"""Steps told as plain data: they agree with the plans, the requests and the page pool."""

import threading
from collections import Counter

import pytest
from checksum import checksum_engine

from fengine.api.engine import Engine
from fengine.core.step_trace import StepRecord

PROMPT = [5, 9, 2, 7] * 6


def told(engine: Engine, prompts: list[list[int]], tokens: int = 8) -> list[StepRecord]:
    records: list[StepRecord] = []
    with engine.steps_told(records.append):
        rids = [f"r{i}" for i in range(len(prompts))]
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": tokens, "ignore_eos": True}, rid=rids)
    return records


def test_records_tell_every_token_once() -> None:
    with checksum_engine() as engine:
        before = engine.stats()
        records = told(engine, [PROMPT, [*PROMPT, 3], [8] * 5])
        after = engine.stats()
    assert [r.step for r in records] == list(range(before["steps"], after["steps"]))
    lengths, computed = {"r0": 24, "r1": 25, "r2": 5}, dict[str, list[int]]()
    for record in records:
        assert record.kind in ("decode", "prefill", "mixed") and record.launched <= record.landed
        for rid, start, count in zip(record.rids, record.starts, record.counts, strict=True):
            computed.setdefault(rid, []).extend(range(start, start + count))
        behind = [start >= lengths[rid] for rid, start in zip(record.rids, record.starts, strict=True)]
        assert list(record.decodes) == behind  # nobody is preempted here
    hits = Counter({n.rid: n.hits for r in records for n in r.new_pages if n.first == 0})
    size = engine.config.cache.page_size
    assert size is not None
    for rid, length in lengths.items():  # the last drawn token is never fed
        assert computed[rid] == list(range(hits[rid] * size, length + 8 - 1))
    assert sum(hits.values()) > 0  # r1 begins as r0 does


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pool", "windows"), [(256, (0,)), (92, (0,)), (256, (8,)), (92, (0, 8))])
def test_pages_told_balance_with_the_pool(pool: int, windows: tuple[int, ...], overlap: bool) -> None:
    with checksum_engine(pool=pool, overlap=overlap, windows=windows) as engine:
        records = told(engine, [[i, *PROMPT[i:]] for i in range(6)], tokens=40)
        preempted = sum(len(r.preempted) for r in records)
        assert engine.stats()["preemptions"] == preempted and (preempted > 0) == (pool == 92)
        holding: dict[str, tuple[int, ...]] = {}
        for record in records:
            assert set(record.preempted) <= set(record.released)
            for rid in record.released:
                del holding[rid]
            for new in record.new_pages:
                holding[new.rid] = (*holding.get(new.rid, ())[: new.first], *new.pages)
            assert record.held == len({page for pages in holding.values() for page in pages})
            assert record.held + record.cached <= record.pages


def test_a_teller_that_fails_ends_the_telling_and_nothing_else() -> None:
    def fail(record: StepRecord) -> None:
        raise ZeroDivisionError(threading.current_thread().name)

    with checksum_engine() as engine:
        with pytest.raises(ZeroDivisionError, match="fengine-steps"), engine.steps_told(fail):
            assert len(engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4})["output_ids"]) == 4
        assert engine._parts.core.stepper.watchers == ()

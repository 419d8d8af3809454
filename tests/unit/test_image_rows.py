"""Rows of the table of embeddings, and what a scheduler has encoded when: against a table that is written by hand."""

import random

import pytest

from fengine.core.images import Image, ImageRows, ImageSpan, page_salts
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import CapacityError


def image(name: int, tokens: int = 4, patches: int = 10, bidirectional: bool = False) -> Image:
    return Image(b"%d" % name, tokens, patches, {}, bidirectional)


def request(rid: str, images: list[Image], words: int = 3, new: int = 4, behind: int | None = None) -> Request:
    spans, ids = [], list[int]()
    for one in images:
        ids += [7] * words
        spans.append(ImageSpan(len(ids), one))
        ids += [1] * one.tokens
    ids += [8] * (words if behind is None else behind)
    return Request(rid, len(ids), ids, SamplingParams(), 0, new, frozenset(), images=tuple(spans))


class World:
    """A scheduler, and the table as steps write it."""

    def __init__(self, capacity: int, budget: int, pages: int = 200, cached: bool = True) -> None:
        pool = PagePool(pages)
        self.images = ImageRows(capacity, budget)
        self.scheduler = Scheduler(
            pool, PrefixCache(pool, 4) if cached else None, page_size=4, max_running_requests=8, max_step_tokens=16,
            images=self.images,
        )  # fmt: skip
        self.table: dict[int, bytes] = {}
        self.rows: dict[int, dict[int, bytes]] = {}  # by row slot: prompt position -> whose embedding it needs
        self.places: dict[int, dict[int, int]] = {}
        self.inside: dict[int, set[int]] = {}  # by row slot: what would be cut by a step that ends in front of it
        self.requests: dict[str, Request] = {}
        self.encoded: list[list[Image]] = []

    def add(self, new: Request) -> None:
        self.requests[new.rid] = new
        self.scheduler.add(new)

    def step(self) -> SchedulerOutput | None:
        """Every token of an image that the step computes finds the embedding of its own image; no step ends inside an
        image whose tokens see each other."""
        output = self.scheduler.schedule()
        if output is None:
            return None
        self.encoded.append([job.image for job in output.encodes])
        for job in output.encodes:
            assert len(job.rows) == job.image.tokens == len(set(job.rows))
            self.table.update(dict.fromkeys(job.rows, job.image.key))
        for new in output.new_rows:
            spans = self.requests[new.rid].images
            self.rows[new.row] = {s.start + i: s.image.key for s in spans for i in range(s.image.tokens)}
            self.inside[new.row] = {
                s.start + i for s in spans if s.image.bidirectional for i in range(1, s.image.tokens)
            }
            self.places[new.row] = {start + i: row for start, rows in new.placed for i, row in enumerate(rows)}
        for slot, start, count in zip(output.rows, output.starts, output.counts, strict=True):
            assert start + count not in self.inside[slot]
            for position in range(start, start + count):
                if position in self.rows[slot]:
                    assert self.table[self.places[slot][position]] == self.rows[slot][position]
        draws = [9] * output.num_draws
        self.scheduler.update(output, draws, [0.0] * len(draws))
        return output


def test_an_image_is_encoded_once_and_others_drive_it_out() -> None:
    world = World(capacity=8, budget=100)
    for i, name in enumerate((1, 1, 2, 3, 1)):
        world.add(request(str(i), [image(name)]))
        while world.step():
            pass
    assert [one.key for step in world.encoded for one in step] == [b"1", b"2", b"3", b"1"]


def test_what_was_planned_for_one_who_left_is_not_encoded() -> None:
    rows, one, other = ImageRows(capacity=4, budget=100), request("one", [image(1)]), request("other", [image(2)])
    rows.plan([one], [one], whole=False)
    rows.leave("one")
    rows.plan([other], [other], whole=False)  # it takes the rows, in the same step
    assert [encode.image.key for encode in rows.hand_out()] == [b"2"] and rows.num_encoded == 1
    rows.leave("other")
    rows.plan([one], [one], whole=False)
    assert rows.ready("one") and [encode.image.key for encode in rows.hand_out()] == [b"1"]
    rows.leave("one")
    rows.plan([one], [one], whole=False)  # encoded, so it stays
    assert rows.ready("one") and not rows.hand_out()


def test_decoding_rows_wait_for_one_budget_at_most() -> None:
    """64 images come at once: every step until the last is encoded computes the decoding row, and few patches."""
    world = World(capacity=1000, budget=25, pages=2000)
    world.add(request("decodes", [], new=200))
    world.step()
    for i in range(64):
        world.add(request(str(i), [image(i, patches=10 if i % 8 else 90)], new=1))
    while any(not world.images.ready(str(i)) and world.requests[str(i)].finish is None for i in range(64)):
        output = world.step()
        assert output is not None and world.requests["decodes"].row in output.rows
        patches = [one.patches for one in world.encoded[-1]]
        assert len(patches) == 1 or sum(patches) <= 25
    assert world.images.num_encoded == 64


@pytest.mark.parametrize("words", [5, 30])
def test_an_image_that_is_computed_at_once_takes_the_pages_of_later_requests(words: int) -> None:
    """The earliest running request always gets on, also where one step needs several pages for it; of a later one whose
    prompt was under way nothing is computed then, though there is budget for a token."""
    world = World(capacity=40, budget=100, pages=20, cached=False)
    world.add(request("before", [], words=4, new=0))
    world.add(request("first", [image(1, 12, bidirectional=True)]))
    world.add(request("later", [], words=words, new=40))
    output = world.step()
    assert output is not None and list(output.counts) == [4, 3, min(words, 9)]  # up to the image
    pool = world.scheduler.pool
    assert pool.allocate(pool.num_available - 2)  # two are left, and two are the later request's
    output = world.step()
    assert output is not None and list(zip(output.rows, output.counts, strict=True)) == [(1, 15)]  # and words
    assert world.requests["later"].num_preempted == 1


def test_who_found_too_few_pages_begins_as_soon_as_it_can_share_those_of_a_prompt() -> None:
    world = World(capacity=40, budget=100, pages=9)
    for rid in ("first", "same"):
        world.add(request(rid, [image(1, 14, bidirectional=True)], behind=1))
    steps = [world.step(), world.step()]
    assert [step and list(zip(step.rows, step.starts, step.counts, strict=True)) for step in steps] == [
        [(0, 0, 3)],  # up to the image
        [(0, 3, 15), (1, 16, 1)],
    ]


def test_nobody_begins_while_an_image_waits_for_a_step_of_its_own() -> None:
    """It takes all of a step, so first who decodes must end, and a newcomer would decode, too."""
    world = World(capacity=40, budget=100)
    world.add(request("decodes", [], new=5))
    world.step()
    world.add(request("first", [image(1, 16, bidirectional=True)]))
    world.step()  # up to the image
    world.add(request("later", []))
    began = []
    while (later := world.requests["later"]).row is None:
        assert world.step() is not None
        began.append((world.requests["decodes"].finish is None, world.requests["first"].num_computed))
    assert later.row is not None and began[-1] == (False, 22) and {3, 19, 22} == {count for _, count in began}


def test_what_could_never_fit_is_refused() -> None:
    world = World(capacity=7, budget=100)
    with pytest.raises(CapacityError, match="images of 8 tokens, but 7 embeddings"):
        world.add(request("0", [image(1), image(2)]))
    with pytest.raises(CapacityError, match="17 tokens, which see each other and so need one step"):
        World(capacity=40, budget=100).add(request("2", [image(2, 17, bidirectional=True)]))
    world.add(request("1", [image(1), image(1)]))  # the same one twice takes its rows once
    assert world.step()


def test_images_that_do_not_fit_together_come_one_after_the_other() -> None:
    """Who comes later does not take the rows of one that waits before it, which would take them back, and so on."""
    world = World(capacity=7, budget=100)
    for name in range(3):
        world.add(request(f"{name}", [image(name)], new=2))
    while world.scheduler.has_work:
        assert world.step() is not None
    assert [one.key for step in world.encoded for one in step] == [b"0", b"1", b"2"]


def test_rows_of_what_was_never_encoded_go_first_and_one_request_alone_goes_beyond_the_budget() -> None:
    images = ImageRows(capacity=12, budget=25)
    several = [request(str(name), [image(name)]) for name in range(3)]
    images.plan(several, [], True)
    assert [job.image.key for job in images.hand_out()] == [b"0", b"1"]
    images.enter("2", several[2].images)
    for one in several:  # the last to go has nothing in its rows
        images.leave(one.rid)
    images.enter("3", request("3", [image(3)]).images)
    assert images._entries.keys() == {b"0", b"1", b"3"}


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_all_end_with_their_own_embeddings(seed: int) -> None:
    """Small tables and pools, aborts, retractions, changes of weights, preemptions: nobody waits for ever."""
    rng = random.Random(seed)
    world = World(rng.randrange(12, 40), rng.choice([5, 30]), rng.randrange(12, 40), cached=rng.random() < 0.7)
    sizes = 5 if seed % 2 else 7
    names = [image(i, rng.randrange(1, sizes), rng.randrange(1, 40), rng.random() < 0.5) for i in range(9)]
    for i in range(60):
        if rng.random() < 0.5:
            chosen = [rng.choice(names) for _ in range(rng.randrange(3))]
            one = request(f"{i}", chosen, rng.randrange(1, 4), rng.randrange(1, 12))
            one.priority = rng.choice([0, 0, 1])
            world.add(one)
        if rng.random() < 0.1 and world.requests:
            world.scheduler.abort(rng.choice(list(world.requests)))
        if rng.random() < 0.05:
            world.scheduler.retract()
            world.scheduler.flush_cache()
        world.step()
    for _ in range(2000):
        if not world.scheduler.has_work:
            break
        assert world.step() is not None
    assert not world.scheduler.has_work and not world.images._holders
    assert all(one.finish is not None for one in world.requests.values())


def test_pages_are_told_apart_by_what_images_lie_in_them() -> None:
    one, other = ImageSpan(3, image(1, 6)), ImageSpan(3, image(2, 6))
    assert page_salts(None, [], 4) == {}
    assert page_salts("s", [one], 4).keys() == {0, 1, 2}
    assert all(page_salts(None, [one], 4)[page] != page_salts(None, [other], 4)[page] for page in range(3))
    assert page_salts(None, [ImageSpan(4, one.image)], 4)[1] != page_salts(None, [ImageSpan(5, one.image)], 4)[1]
    both = page_salts(None, [ImageSpan(0, image(1, 2)), ImageSpan(2, image(2, 2))], 4)
    assert both.keys() == {0} and both != page_salts(None, [ImageSpan(0, image(2, 2)), ImageSpan(2, image(1, 2))], 4)

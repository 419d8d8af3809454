"""`Admission`: which waiting requests begin to run in a step. No torch."""

from fengine.core.batch import Batch
from fengine.core.images import Encode, ImageRows
from fengine.core.request import Request
from fengine.core.running import Rows
from fengine.core.waiting_queue import WaitingQueue


class Admission:
    """Modifies: itself, rows and queue with their requests, `images`."""

    def __init__(self, rows: Rows, waiting: WaitingQueue, images: ImageRows | None, whole_prompts: bool) -> None:
        """`whole_prompts`: each takes one step. `images`: of a model that takes images."""
        self.rows, self.waiting, self.images, self.whole_prompts = rows, waiting, images, whole_prompts
        self.blocked = False  # the next to admit found too few pages, and nothing has changed since
        self.encodes: list[Encode] = []  # of images, planned for the next step

    def admit(self, batch: Batch, left: int) -> None:
        """Starts waiting requests until budget, row slots or pages run out. Never preempts."""
        if self.blocked or not self.rows.num_free:
            return
        if self.images is not None:
            self._schedule_encodes(self.images)
        for request in self.waiting.admissible(self.rows.num_free, self._fits):
            if not left:
                return
            if self.whole_prompts and len(request.token_ids) > left:
                return
            if not (count := self._start(batch, request, left)):
                self.blocked = True  # none goes in its place, or pages might never suffice for a large request
                return
            left -= count

    def _fits(self, request: Request) -> bool:
        """Whether its adapter has a slot, and its images are encoded, or are before this step."""
        ready = not request.images or (self.images is not None and self.images.ready(request.rid))
        return ready and (request.adapter is None or self.rows.adapters.fits(request.adapter))

    def _schedule_encodes(self, images: ImageRows) -> None:
        """Plans what to encode before this step for requests that may be admitted soon: up to the budget, or one image;
        where nothing runs, all of one request."""
        left, whole = images.budget, not self.rows.num_running
        for request in self.waiting.candidates(self.rows.num_free):
            if not request.images or images.ready(request.rid):
                continue
            if not images.enter(request.rid, request.images):
                for other in self.waiting.requests():  # whoever comes later must not keep it from its rows
                    images.leave(other.rid)
                if not images.enter(request.rid, request.images):
                    return
            for image in images.lacking(request.images):
                if self.encodes and left < image.patches and not whole:
                    return
                self.encodes.append(images.encode(image))
                left -= image.patches
            whole = False

    def _start(self, batch: Batch, request: Request, left: int) -> int:
        """Admits a request with its first chunk. Returns the tokens of the chunk, 0 if there are too few pages.

        Pages must suffice for all its known tokens and for the reserve of those that run, or it might be preempted at
        once. When nothing runs, every page is free or idle, and `add` has made sure that it fits.
        """
        rows, known = self.rows, len(request.token_ids)
        pages = rows.hit(request)
        need = rows.pages_for(known) - len(pages)
        if not rows.admits(need):
            self.rows.pool.release(pages, self.rows.pool.window_start(len(pages) * self.rows.page_size))
            return 0
        self.waiting.admit(request)
        batch.adapters += rows.enter(request, pages)
        if request.images and self.images is not None:
            request.placed = self.images.placed(request.images)
        count = min(known - request.num_computed, left, self.rows.pool.room * self.rows.page_size)
        rows.compute(batch, request, count, 0)
        return count

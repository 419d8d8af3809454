"""`retract`: every running request goes back to the queue, to be computed again from its tokens. No torch.

That is what a change of the weights asks for: the KV of running requests belongs to the old ones. So does what they
found out about their prompts: `forget_prompts` has it found again, where no token tells yet which weights it came from.
"""

from operator import attrgetter

from fengine.core.record import Record
from fengine.core.request import Request, Status
from fengine.core.scheduler import Scheduler
from fengine.errors import InvariantError


def retract(scheduler: Scheduler) -> list[Request]:
    """Takes row slots and pages from all running requests and forgets their KV; none is lost, and their order stays.

    No step may be in flight. Modifies: the scheduler and its requests. Returns them in order of arrival. Errors:
    InvariantError.
    """
    rows = scheduler._rows
    running = sorted(rows.prompting + rows.decoding, key=attrgetter("arrival"))
    if rows.draining or any(request.num_pending for request in running):
        raise InvariantError("requests were retracted while a step was in flight")
    for request in reversed(running):  # the latest first: each one goes to the queue's front
        rows.leave(request, cached=False)
        request.status = Status.WAITING
        request.num_preempted += 1
        scheduler.num_preemptions += 1
        scheduler._waiting.put_back(request)
    scheduler._blocked = False
    return running


def forget_prompts(scheduler: Scheduler) -> None:
    """Empties the records of unfinished requests that have drawn nothing: no prompt is read by two sets of weights.

    The record of a prompt is thus of the weights that drew the first token. No step may be in flight. Modifies: the
    requests.
    """
    for request in scheduler._requests.values():
        if request.record is not None and not request.num_output:
            request.record, request.num_cached, request.num_scored, request.num_seen = Record(), 0, 0, 0

"""One plan after the other: does it hold, and if not, with how few events does it still fail?"""

from dataclasses import replace

from simulated_clients import ACTIONS
from simulated_engine import World
from simulated_plan import Plan
from simulated_ranks import RanksPlan, RanksWorld


def world_of(plan: Plan) -> World:
    """The schedule, before it begins."""
    return RanksWorld(plan) if isinstance(plan, RanksPlan) else World(plan, ACTIONS)


def violation(plan: Plan) -> str | None:
    """What goes wrong in this schedule. The same plan always gives the same answer."""
    try:
        world_of(plan).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrunk(plan: Plan) -> Plan:
    """Drops events and jobs as long as something still goes wrong."""
    going = True
    while going:
        going = False
        smaller = [plan.without({event.name}) for event in plan.events] + [
            replace(plan, events=tuple(replace(e, jobs=e.jobs[:i] + e.jobs[i + 1 :]) if e is event else e
                                       for e in plan.events))
            for event in plan.events for i in range(len(event.jobs)) if len(event.jobs) > 1
        ]  # fmt: skip
        for candidate in smaller:
            if candidate.events and violation(candidate):
                plan, going = candidate, True
                break
    return plan

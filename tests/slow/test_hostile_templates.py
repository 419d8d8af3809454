"""All hostile chat templates of tests/hostile_templates.py end; the inner loop tries some."""

import hostile_templates as hostile
import pytest

from fengine.tokenizer.trial import Limits, Refused, Trials


def test_every_runaway_template_ends() -> None:
    child, count = Trials("fengine.tokenizer.templates", 1, Limits(0.03, 96 << 20)), 0
    for name, source in hostile.RUNAWAY.items():
        with pytest.raises(Refused):
            raise AssertionError(name, child.ask([source, {"messages": hostile.CHAT}, hostile.MAX_CHARS])[:80])
        count += 1
    child.close()
    assert count == len(hostile.RUNAWAY) > 90

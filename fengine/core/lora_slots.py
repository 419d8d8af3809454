"""`AdapterSlots`: which LoRA adapter lies in which of the device's few slots. No torch.

    free  --enter-->  in use  --last leave-->  idle  --enter, of the same adapter-->  in use
                                                `--enter of another one, if this is the least recently used-->

An adapter is written to a slot when the first request that needs it is admitted, so never while its slot is read by
another. A slot in use, or of a pinned adapter, is not given away."""

from fengine.core.request import Adapter
from fengine.errors import InvariantError


class _Slot:
    __slots__ = ("adapter", "users", "used")

    def __init__(self) -> None:
        self.adapter: Adapter | None = None
        self.users = 0  # running requests
        self.used = 0  # the clock when the last of them went


class AdapterSlots:
    """Deterministic. Modifies: itself."""

    __slots__ = ("_slots", "_clock")

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._clock = 0  # counts uses

    def fits(self, adapter: Adapter) -> bool:
        """Whether a request with this adapter may run beside those that do. Pure."""
        return self._find(adapter) is not None

    def enter(self, adapter: Adapter) -> tuple[int, bool]:
        """A slot for one more request of the adapter, which must fit, and whether the adapter must be written there."""
        index = self._find(adapter)
        if index is None:
            raise InvariantError(f"no slot for LoRA adapter {adapter.name!r}: every one is in use")
        slot = self._slots[index]
        new = slot.adapter is not adapter
        slot.adapter = adapter
        slot.users += 1
        return index, new

    def leave(self, index: int) -> None:
        """One request of the slot's adapter has ended, or was preempted."""
        slot = self._slots[index]
        slot.users -= 1
        self._clock += 1
        slot.used = self._clock

    def _find(self, adapter: Adapter) -> int | None:
        """Its own slot, or a free one, or the one that was idle for longest."""
        best = None
        for index, slot in enumerate(self._slots):
            if slot.adapter is adapter:
                return index
            if slot.users or (slot.adapter is not None and slot.adapter.pinned):
                continue
            if best is None or slot.used < self._slots[best].used:
                best = index
        return best

"""What goes wrong in a virtual fleet, where, and when."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Fault:
    kind: str
    name: str
    step: int
    phase: str
    seconds: float = 0.0
    slice: int = 0


class FaultScript:
    """What goes wrong, where, and when. `fired` says what did.

    Phases, and the step that they are counted by: that which is being computed for joined, forward, backward (one part
    is sent), half (of a payload is sent) and sent; the last one applied for committed (the averages are here), applied,
    evaluating, save due, parcel (half of its state is sent, to whomever) and catching up (half of one has come).
    """

    def __init__(self) -> None:
        self.pending: list[Fault] = []
        self.fired: list[str] = []
        self.poisoned: set[int] = set()
        """Steps in which a gradient is none, or was: a second time in a step is the end of the run."""
        self.flips = False
        """Whether averages may have been formed from wrong weights, and be sent again."""

    def _add(self, *given: Any, **named: Any) -> "FaultScript":
        self.pending.append(Fault(*given, **named))
        return self

    def kill(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """Nothing of it runs from then on; what it has sent arrives."""
        return self._add("kill", name, at_step, phase)

    def silence(self, name: str, *, at_step: int, seconds: float, phase: str = "forward") -> "FaultScript":
        """It is stopped, as by SIGSTOP: not even its heart beats."""
        return self._add("silence", name, at_step, phase, seconds)

    def stall(self, name: str, *, at_step: int, seconds: float, phase: str = "forward") -> "FaultScript":
        """It does nothing, but its heart beats."""
        return self._add("stall", name, at_step, phase, seconds)

    def cut(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """Its connection breaks; it joins again by itself."""
        return self._add("cut", name, at_step, phase)

    def leave(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """It is asked to stop, and leaves politely."""
        return self._add("leave", name, at_step, phase)

    def quit(self, name: str, *, at_step: int, phase: str = "applied") -> "FaultScript":
        """Its script ends with 0, as if all were done."""
        return self._add("quit", name, at_step, phase)

    def drift(self, name: str, *, at_step: int) -> "FaultScript":
        """A bit of its weights flips while it applies a step."""
        return self._add("drift", name, at_step, "applying")

    def flip(self, name: str, *, at_step: int, phase: str, slice: int = 0) -> "FaultScript":
        """A bit of its weights flips in its memory."""
        self.flips = True
        return self._add("flip", name, at_step, phase, slice=slice)

    def poison(self, name: str, *, at_step: int, slice: int) -> "FaultScript":
        """One number of its gradient of a slice is none."""
        self.poisoned.add(at_step)
        return self._add("poison", name, at_step, "gradient", slice=slice)

    def poison_loss(self, name: str, *, at_step: int, slice: int) -> "FaultScript":
        return self._add("poison_loss", name, at_step, "loss", slice=slice)

    def take(self, name: str, phase: str, step: int, slice: int = 0) -> Fault | None:
        for fault in self.pending:
            if (fault.name, fault.phase, fault.step, fault.slice) == (name, phase, step, slice):
                self.pending.remove(fault)
                self.fired.append(f"{fault.kind} {name}")
                return fault
        return None

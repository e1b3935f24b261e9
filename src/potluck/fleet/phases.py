"""Where a worker or its host is in its work, told to tests, which end it, stop it or change its weights there."""

from collections.abc import Callable
from typing import Any

listeners: list[Callable[..., None]] = []
"""Each is called with the phase, the step it belongs to, and whatever else enter_phase() was given."""


def enter_phase(phase: str, step: int, **what: Any) -> None:
    """Announces that a phase begins. Costs nothing while nobody listens."""
    for listener in listeners:
        listener(phase, step, **what)

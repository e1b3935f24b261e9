"""A fleet that nobody closes: a trainer's script ends when it ends."""

import atexit
import sys
from typing import Any

from potluck.engine.engine import Engine
from potluck.engine.start import init


def fleet_until_exit(**options: Any) -> Engine:
    """As init(); closed when the script ends, and if by an exception, told so. A host has the last weights then."""
    fleet = init(**options)
    atexit.register(_close, fleet)
    return fleet


def _close(fleet: Engine) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None and fleet.run.replica is not None:
        fleet.lifecycle.end_with_script()
    fleet.__exit__(None, error, None)

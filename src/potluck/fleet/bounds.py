"""Bounds what a worker's message may say: figures and texts beyond are refused before anything is kept. Pure.

So nothing that the coordinator keeps grows with what a peer merely claims, and no sum of figures leaves the floats.
"""

import json
from dataclasses import replace

from potluck.errors import TheirProtocolError
from potluck.fleet.description import MAX_SLICES, Description
from potluck.wire.messages import (
    Applied,
    BaseFiles,
    EvaluateNext,
    Heartbeat,
    Hello,
    JoinRequest,
    Leave,
    LookOn,
    Message,
    Ready,
    SliceReport,
    StateBegin,
    Wrote,
)

MOST_WORKERS = 4096
"""At once, those included who are not ready yet."""
MOST_WATCHERS = 16
"""At once, of those who take no part."""
MOST_NAME, MOST_TEXT = 255, 4096
"""Characters of a name or a hash, and of a sentence."""
MOST_WRITTEN = 1000
"""Characters of what the model writes."""
MOST_NAMES = 1 << 13
"""The most letters of an evaluation's names of figures, together."""
MOST_HEADER = 1 << 16
"""The most letters of a parcel's header: 64 names and sizes are far shorter."""
LEAST_BUSY_S, MOST_BUSY_S = 1e-6, 1e9
"""Bounds of the seconds for one piece of work: speeds are quotients of these, and shares are quotients of speeds."""


_MOST: dict[type[Message], dict[str, int]] = {
    Heartbeat: {"node_id": MOST_TEXT},
    Hello: {"name": MOST_NAME, "kind": MOST_NAME},
    JoinRequest: {"node_id": MOST_NAME, "backend": MOST_NAME},
    Ready: {"digest": MOST_NAME},
    Applied: {"digest": MOST_NAME, "fault": MOST_TEXT},
    Leave: {"reason": MOST_TEXT},
    SliceReport: {"figures": MOST_TEXT},
    EvaluateNext: {"names": MOST_NAMES},
    StateBegin: {"header": MOST_HEADER},
    BaseFiles: {"header": 0},
    LookOn: {"secret": MOST_NAME},
    Wrote: {"prompt": MOST_WRITTEN, "text": MOST_WRITTEN},
}
"""Characters of each text that is kept, told or compared."""


def check(message: Message, described: Description | None) -> Message:
    """The message as it may be looked at; TheirProtocolError says which part of it no honest worker sends."""
    for name, most in _MOST.get(type(message), {}).items():
        if (length := len(getattr(message, name))) > most:
            whose = f"{type(message).__name__}.{name}"
            raise TheirProtocolError(f"{whose} has {length:,} characters, and at most {most:,} are taken.")
    return _check_report(message, described) if isinstance(message, SliceReport) else message


def _check_report(report: SliceReport, described: Description | None) -> SliceReport:
    parameters = sum(len(part.sizes) for part in described.parts) if described is not None else 0
    if len(report.slices) > MAX_SLICES or len(report.used) > -(-parameters // 8):
        raise TheirProtocolError(f"SliceReport tells of more than {MAX_SLICES:,} slices or {parameters:,} parameters.")
    if not 0 <= report.busy_s <= MOST_BUSY_S:
        raise TheirProtocolError(f"SliceReport.busy_s is {report.busy_s}, which is no time that work can take.")
    figures_of(report)
    rows = described.rows if described is not None else 0
    busy_s = max(report.busy_s, LEAST_BUSY_S) if report.busy_s else 0.0
    return replace(report, busy_s=busy_s, batches=min(report.batches, rows))


def figures_of(report: SliceReport) -> dict[str, float]:
    """The figures that a policy asked for; TheirProtocolError where they are no numbers by name."""
    try:
        found = json.loads(report.figures or "{}")
        return {str(name): float(figure) for name, figure in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        raise TheirProtocolError("SliceReport.figures are no numbers by name.") from None

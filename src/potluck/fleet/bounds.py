"""Bounds what a worker's message may say: figures and texts beyond are refused before anything is kept. Pure.

So nothing that the coordinator keeps grows with what a peer merely claims, and no sum of figures leaves the floats.
"""

import json
from dataclasses import replace

from potluck.errors import TheirProtocolError
from potluck.fleet.description import MAX_SLICES, Description
from potluck.wire.messages import TEXTS, Message, SliceReport

MOST_WORKERS = 4096
"""At once, those included who are not ready yet."""
MOST_WATCHERS = 16
"""At once, of those who take no part."""
LEAST_BUSY_S, MOST_BUSY_S = 1e-6, 1e9
"""Bounds of the seconds for one piece of work: speeds are quotients of these, and shares are quotients of speeds."""


def check(message: Message, described: Description | None) -> Message:
    """The message as it may be looked at; TheirProtocolError says which part of it no honest worker sends."""
    for name, letters in TEXTS[type(message)].items():
        if (length := len(getattr(message, name))) > letters.most:
            whose = f"{type(message).__name__}.{name}"
            raise TheirProtocolError(f"{whose} has {length:,} characters, and at most {letters.most:,} are taken.")
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

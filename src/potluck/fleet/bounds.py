"""What an honest worker's message can say: figures and texts beyond that are refused before anything is kept. Pure.

So nothing that the coordinator keeps grows with what a peer merely claims, and no sum of figures leaves the floats.
"""

from dataclasses import replace

from potluck.errors import TheirProtocolError
from potluck.fleet.description import MAX_SLICES, Description
from potluck.wire.messages import Applied, Hello, JoinRequest, Leave, Message, Ready, SliceReport, StateBegin

MOST_WORKERS = 4096
"""At once, those included who are not ready yet."""
MOST_NAME, MOST_TEXT = 255, 4096
"""Characters of a name or a hash, and of a sentence."""
MOST_HEADER = 1 << 16
"""Of a parcel: 64 names and sizes are far shorter."""
LEAST_BUSY_S, MOST_BUSY_S = 1e-6, 1e9
"""Of one piece of work: speeds are quotients of these, and shares are quotients of speeds."""


def check(message: Message, described: Description | None) -> Message:
    """The message as it may be looked at; TheirProtocolError says which part of it no honest worker sends."""
    match message:
        case Hello():
            _insist_on_short("Hello.name", message.name, MOST_NAME)
            _insist_on_short("Hello.kind", message.kind, MOST_NAME)
        case JoinRequest():
            _insist_on_short("JoinRequest.node_id", message.node_id, MOST_NAME)
            _insist_on_short("JoinRequest.backend", message.backend, MOST_NAME)
        case Ready():
            _insist_on_short("Ready.digest", message.digest, MOST_NAME)
        case Applied():
            _insist_on_short("Applied.digest", message.digest, MOST_NAME)
            _insist_on_short("Applied.fault", message.fault, MOST_TEXT)
        case Leave():
            _insist_on_short("Leave.reason", message.reason, MOST_TEXT)
        case StateBegin():
            _insist_on_short("StateBegin.header", message.header, MOST_HEADER)
        case SliceReport():
            return _check_report(message, described)
    return message


def _check_report(report: SliceReport, described: Description | None) -> SliceReport:
    parameters = sum(len(part.sizes) for part in described.parts) if described is not None else 0
    if len(report.slices) > MAX_SLICES or len(report.used) > -(-parameters // 8):
        raise TheirProtocolError(f"SliceReport tells of more than {MAX_SLICES:,} slices or {parameters:,} parameters.")
    if not 0 <= report.busy_s <= MOST_BUSY_S:
        raise TheirProtocolError(f"SliceReport.busy_s is {report.busy_s}, which is no time that work can take.")
    rows = described.rows if described is not None else 0
    busy_s = max(report.busy_s, LEAST_BUSY_S) if report.busy_s else 0.0
    return replace(report, busy_s=busy_s, batches=min(report.batches, rows))


def _insist_on_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise TheirProtocolError(f"{name} has {len(text):,} characters, and at most {most:,} are taken.")

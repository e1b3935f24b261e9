"""The protocol's state machine: (now, peer, message) -> effects. Pure: no sockets, no threads, no clock, no files.

The server runs it behind real sockets, and the tests' fleet in one process with a clock of its own. It decides who is
in, who computes which slices, when a step is done, who gives the weights to a newcomer, and when the run ends. It never
sees gradients: only that they have all arrived.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from potluck.agree.windows import Decision, Report, Windows
from potluck.errors import TheirProtocolError
from potluck.events import (
    CheckpointSaved,
    Decided,
    EpochDone,
    Stalled,
    Validated,
    WentBack,
    WorkerCame,
    WorkerWent,
)
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.effects import (
    AbandonStep,
    BeginStep,
    Close,
    Describe,
    Discard,
    Effect,
    Emit,
    Expect,
    Finish,
    Record,
    Restore,
    SaveAbort,
    SaveBegin,
    SaveChunk,
    Send,
    SendCheckpoint,
    SetScale,
    StepApplied,
    StepRecord,
    Subscribe,
    Widen,
)
from potluck.fleet.invite import is_right_secret
from potluck.fleet.ledger import Range, prove
from potluck.fleet.membership import Member, Membership, Phase
from potluck.fleet.tree import Node, cover, decide_quotas, share_nodes, sized_rows, slice_rows
from potluck.wire.messages import (
    Admitted,
    Applied,
    Committed,
    Evaluated,
    EvaluateNext,
    EvaluateRange,
    Heartbeat,
    Hello,
    JoinAccepted,
    JoinRequest,
    Leave,
    Message,
    Ready,
    Refusal,
    Saved,
    SaveDue,
    ShardAssignment,
    Shutdown,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    StateRequest,
    Welcome,
    Work,
)

PROTOCOL = 1
CHUNKS_AHEAD = 4
"""Of a parcel: so many may be on their way before the first has left here."""
LEAST_SAMPLES, MOST_SAMPLES, MOST_LOSS = 1e-6, 1e15, 1e300
"""What a slice may report: beyond these, sums of them would overflow or vanish."""
MOST_WINDOW = (1 << 32) - 1
"""Rows of a window: the size of a slice is a u32."""
SAVE = 0
"""The transfer that is a checkpoint for the host's disk; all others are for newcomers."""

LEGAL: dict[Phase, tuple[type[Message], ...]] = {
    Phase.GREETED: (Ready, Heartbeat, Leave),
    # It may have been ready before, and not know yet that its weights are to be replaced.
    Phase.CATCHING_UP: (Applied, SliceReport, EvaluateNext, SaveDue, StateBegin, StateChunk, Heartbeat, Leave),
    Phase.READY: (
        SliceReport,
        Applied,
        EvaluateNext,
        SaveDue,
        StateBegin,
        StateChunk,
        Heartbeat,
        Leave,
    ),
}
"""What a worker of ours may send. Gradients are not listed: the server takes them only where they were asked for."""


@dataclass
class Standing:
    """Where the run stands: what a restart goes on from."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    rows_seen: int = 0
    ranges: list[Range] = field(default_factory=list)
    """Of this epoch, committed."""

    def position(self) -> str:
        return json.dumps({"step": self.step, "epoch": self.epoch, "row": self.row, "rows_seen": self.rows_seen})


@dataclass
class Slice:
    samples: float
    loss_sum: float
    worker_id: int


@dataclass(frozen=True)
class Plan:
    """What a step consists of, and who computes it."""

    bounds: list[Range]
    """Of each slice."""
    nodes: list[list[Node]]
    """For each worker."""
    batch: int = 0
    """Rows of a step that a worker takes by itself; 0: it takes none."""
    decision: Decision | None = None
    """Why, where workers step by themselves: then this step is a window."""


@dataclass
class StepUnderWay:
    """Where workers step by themselves, a window: one agreement, whatever it is over."""

    step: int
    bounds: list[Range]
    """Of each slice."""
    started: float
    batch: int = 0
    decision: Decision | None = None
    workers: tuple[int, ...] = ()
    """Ids, in the order of the decision."""
    reports: dict[int, Slice] = field(default_factory=dict)
    computed_by: dict[int, int] = field(default_factory=dict)
    """slice -> worker id, once its payload is wholly in the sums."""
    orphans: list[Node] = field(default_factory=list)
    """Nodes that nobody has: there was no worker to take them."""
    bad: dict[int, str] = field(default_factory=dict)
    """slice -> who computed it badly."""
    used: bytearray = field(default_factory=bytearray)
    busy: dict[int, float] = field(default_factory=dict)
    """worker id -> seconds"""
    batches: dict[int, int] = field(default_factory=dict)
    """worker id -> steps that it took by itself"""
    first_report: float | None = None
    last_report: float = 0.0
    loss: float = math.nan
    samples: float = 0.0

    @property
    def row(self) -> int:
        return self.bounds[0][0]

    @property
    def rows(self) -> int:
        return self.bounds[-1][1] - self.bounds[0][0]

    @property
    def slices(self) -> int:
        return len(self.bounds)


@dataclass
class Evaluation:
    rows: int
    size: int
    next: int = 0
    returned: list[Range] = field(default_factory=list)
    done: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """start -> (end, loss sum, samples)"""
    waiting: list[int] = field(default_factory=list)

    def take(self) -> Range | None:
        if self.returned:
            return self.returned.pop()
        if self.next >= self.rows:
            return None
        start = self.next
        self.next = min(self.rows, start + self.size)
        return start, self.next

    @property
    def is_done(self) -> bool:
        return sum(end - start for start, (end, _, _) in self.done.items()) >= self.rows


@dataclass
class Transfer:
    """The state of one worker, on its way to another."""

    number: int
    sponsor: int | None
    """None: the host's own disk."""
    to: int
    step: int
    left: int | None = None
    """Bytes that have yet to come from the sponsor, once it has said how many there are."""

    @property
    def is_whole(self) -> bool:
        """It no longer needs its sponsor."""
        return self.sponsor is None or self.left == 0


class Coordinator:
    def __init__(
        self,
        *,
        patience_s: float,
        secret: str,
        recipe: str = "",
        at_least: int = 1,
        plain_peers: bool = False,
        standing: Standing | None = None,
        previous: Standing | None = None,
        description: Description | None = None,
        next_id: int = 0,
        expected: int = 0,
    ) -> None:
        """`expected`: how many workers were in when the coordinator before this one ended."""
        self.patience_s = patience_s
        self.recipe = recipe
        self.at_least = at_least
        self.plain_peers = plain_peers
        self.standing = standing or Standing()
        self.previous = previous
        self.description = description
        self.membership = Membership(next_id)
        self.stopping = False
        self.finished: str | None = None
        self.refused: Counter[str] = Counter()
        """What was turned away, by kind."""
        self.now: StepUnderWay | None = None
        self._secret = secret
        self._expected = expected
        self._alone_since: float | None = None
        self._restoring = False
        self._ahead: Standing | None = None
        """After the step that is being computed again: it is on record, and somebody may have applied it."""
        self._digests: dict[int, dict[int, tuple[str, str]]] = {}
        """step -> worker id -> (kind, hash of its parameters)"""
        self._transfers: dict[int, Transfer] = {}
        self._next_transfer = 1
        self._waiting: list[tuple[int, Ready]] = []
        """Newcomers for whom nobody has the weights yet."""
        self._evaluations: dict[int, Evaluation] = {}
        self._evaluated: dict[int, Evaluated] = {}
        self._save_due: SaveDue | None = None
        self._saving: int | None = None
        """The peer whose state is on its way to the disk."""
        self._saved = Saved(0, "", "")
        self._records: dict[int, StepRecord] = {}
        """Committed, and not yet told as applied."""
        self._drifted = False
        self._clock = 0.0
        self._last_quotas: list[int] | None = None
        self._last_peers: list[int] | None = None
        self._saver = -1
        """The worker that is to send the checkpoint that is due."""
        self._leader = -1
        """The worker that speaks for all, as of the last committed step."""
        self._windows: Windows | None = None
        self._steps: dict[int, int] = {}
        """After each of the last windows, how many batches of the run were done."""
        self._rows_limit = description.rows_limit if description is not None else 0
        self._worked: tuple[int, ...] = ()
        """Who took part in the last window."""
        self._committed_at = 0.0
        self._applying_s = 0.0
        """How long the last of them needed to apply it, from the moment when it was formed."""
        self._divergence: dict[int, float] = {}
        """worker id -> what it told when it applied the last window"""
        self._drift = 0.0
        """The largest of them when they were last counted in."""

    @property
    def steps_done(self) -> int:
        """Batches of the run. The standing's step counts agreements, and there may be several batches to one."""
        standing = self.standing
        if self.description is None or self.description.windowed is None:
            return standing.step
        return self.description.steps_at(standing.epoch, standing.row)

    @property
    def steps_total(self) -> int:
        """Batches of the whole run; 0: nobody has said how long it is."""
        described = self.description
        return described.steps_at(*divmod(self._rows_limit, described.rows)) if described is not None else 0

    # What comes in

    def on_message(self, now: float, peer: int, message: Message) -> list[Effect]:
        """A whole message of any kind but gradients."""
        self._clock = now
        member = self.membership.members.get(peer)
        if member is None:
            match message:
                case Hello():
                    return self._on_hello(now, peer, message)
                case JoinRequest():
                    return self._on_join_request(now, peer, message)
            return self._refuse(peer, "unknown", "")
        member.heard_at = now
        if member.plain:
            if isinstance(message, Heartbeat):
                return [Send(peer, message)]
            return self._refuse(peer, "illegal", "")  # a Refusal is not among the messages that it knows
        if type(message) not in LEGAL[member.phase]:
            return self._illegal(member, message)
        match message:
            case Heartbeat():
                return []  # heard, and that is all: a thousand who wait would get as many answers that nobody reads
            case Ready():
                return self._on_ready(now, member, message)
            case SliceReport():
                return self._on_report(now, member, message)
            case Applied():
                return self._on_applied(now, member, message)
            case EvaluateNext():
                return self._on_evaluate_next(member, message)
            case SaveDue():
                return self._on_save_due(member, message)
            case StateBegin():
                return self._on_state_begin(member, message)
            case StateChunk():
                return self._on_state_chunk(member, message)
            case Leave():
                return self._on_leave(now, member, message)
        raise AssertionError(f"{type(message).__name__} is legal, and nothing is done with it")

    def on_closed(self, now: float, peer: int, why: str) -> list[Effect]:
        """The connection is gone, whoever closed it."""
        member = self.membership.remove(peer)
        self._waiting = [(p, ready) for p, ready in self._waiting if p != peer]
        if member is None:
            return []
        effects: list[Effect] = [
            Emit(
                WorkerWent(
                    worker=member.worker_id,
                    name=member.name,
                    reason=why,
                    polite=member.leaving,
                    workers=len(self.membership.ready),
                )
            )
        ]
        effects += self._end_transfers_of(peer)
        effects += self._return_evaluations(member)
        if self._saving == peer:
            self._saving = None
            effects.append(SaveAbort())
        effects += self._ask_for_save()
        if self.now is not None and (nodes := list(member.nodes)):
            if member.plain:  # what its rows weigh was only taken for granted
                for number in (number for node in nodes for number in range(*node)):
                    self.now.reports.pop(number, None)
            effects += self._hand_out(now, nodes)
        if member.is_ready and not self.membership.holders:
            effects += self._nobody_holds(now, may_come_back=not member.leaving)
        if self.stopping and not self.finished and not self.membership.holders:
            effects += self._interrupt()
        if self._is_everybody_gone() and self.finished:
            effects.append(Finish(self.finished))
        return effects

    def on_heard(self, now: float, peer: int) -> None:
        """Any byte counts as life."""
        if (member := self.membership.members.get(peer)) is not None:
            member.heard_at = max(now, member.heard_at)

    def on_tick(self, now: float) -> list[Effect]:
        self._clock = now
        effects: list[Effect] = []
        for member in self.membership.late(now, self.patience_s):
            silent_s = now - member.heard_at
            why = f"silent for {silent_s:.1f} s while {member.doing(self.standing.step)}"
            effects.append(Close(member.peer, why))
            effects += self.on_closed(now, member.peer, why)
        effects += self._tell_stalls(now)
        is_anybody_waiting = bool(self._waiting or self._stranded) and not self.finished
        if is_anybody_waiting and not self.membership.holders and not self._restoring:
            waited_s = now - (self._alone_since if self._alone_since is not None else now)
            if not self._expected or waited_s >= self.patience_s:
                self._restoring = True
                effects.append(Restore())
        if self.finished and self._is_everybody_gone():
            effects.append(Finish(self.finished))
        return effects

    def on_payload(self, now: float, peer: int, step: int, node: Node) -> list[Effect]:
        """All parts of a node are in the sums."""
        member = self.membership.members.get(peer)
        if member is None or self.now is None or self.now.step != step or node not in member.nodes:
            return []
        member.heard_at = now
        member.nodes.remove(node)
        for number in range(*node):
            self.now.computed_by.setdefault(number, member.worker_id)
        return []

    def on_plain_payload(self, now: float, peer: int, step: int, node: Node, loss: float) -> list[Effect]:
        """A plain peer's loss, which comes after its gradients."""
        member = self.membership.members.get(peer)
        if self.now is None or self.now.step != step or member is None or node not in member.nodes:
            return []
        for number in range(*node):
            told = self.now.reports[number]
            told.loss_sum = loss * told.samples
        return self.on_payload(now, peer, step, node)

    def on_bad(self, now: float, peer: int, step: int, node: Node, why: str) -> list[Effect]:
        """A payload that must not reach the others. Its slices are computed again, one by one, by somebody else."""
        member = self.membership.members.get(peer)
        if member is None or self.now is None or self.now.step != step or node not in member.nodes:
            return []
        self.refused["bad payload"] += 1
        member.nodes.remove(node)
        again = [number for number in range(*node) if number in self.now.bad]
        if again:
            return self._give_up(member, again[0], why)
        for number in range(*node):
            # What it told of the slice stays: parts that came before the bad one may be in the sums, and be scaled.
            self.now.bad[number] = member.name
        slices = [(number, number + 1) for number in range(*node)]
        return [
            Discard(peer, node),
            Emit(
                Stalled(
                    worker=member.worker_id,
                    name=member.name,
                    doing=f"its gradient of slices {_tell(node)} of step {step} {why}; they are computed again",
                    seconds=0.0,
                )
            ),
            *self._hand_out(now, slices, avoid=peer),
        ]

    def on_mean(self, now: float, step: int) -> list[Effect]:
        """Every part's average is formed, and on its way."""
        if self.now is None or self.now.step != step:
            return []
        return self._commit(now)

    def on_saved(self, now: float, step: int, folder: str, error: str, size: int = 0) -> list[Effect]:
        self._saving = None
        self._saved = Saved(step, folder, error)
        if self._save_due is not None and step >= self._save_due.step:
            self._save_due = None
        self._saver = -1
        effects: list[Effect] = [
            Send(m.peer, self._saved) for m in self.membership.members.values() if not m.plain and not m.leaving
        ]
        for member in [m for m in self.membership.members.values() if m.leaving]:
            effects += self._let_go(member) if not error else [Send(member.peer, Shutdown())]
        if not error:
            saved = CheckpointSaved(step=self._steps.get(step, step), folder=folder, stall_s=0.0, bytes=size)
            effects.append(Emit(saved))
            self._steps = {version: steps for version, steps in self._steps.items() if version >= step}
        return effects + self._ask_for_save()

    def restored(self, now: float, standing: Standing | None) -> list[Effect]:
        """The run goes on from the newest checkpoint, or from its beginning where there is none."""
        self._restoring = False
        self._expected = 0
        had, before = standing is not None, self.steps_done
        self.standing = standing or Standing()
        self.previous = self._ahead = self._save_due = None
        self._digests.clear()
        self._records.clear()
        self._evaluations.clear()
        if self._saved.step > self.standing.step:  # it turned out to be damaged
            self._saved = Saved(0, "", "")
        effects: list[Effect] = []
        if self.steps_done < before:
            effects.append(Emit(WentBack(from_step=before, step=self.steps_done)))
        for member in self._stranded:
            if had:
                effects += self._send_checkpoint(member)
            else:  # it comes again, with the weights that it made itself
                why = "the run begins anew"
                effects += [Close(member.peer, why), *self.on_closed(now, member.peer, why)]
        waiting, self._waiting = self._waiting, []
        for peer, ready in waiting:
            newcomer = self.membership.members.get(peer)
            if newcomer is None:
                continue
            if had and not self.membership.holders:
                effects += self._send_checkpoint(newcomer)
            else:
                effects += self._place(now, newcomer, ready)
        return effects

    def request_stop(self, now: float) -> list[Effect]:
        """Ctrl-C on the host: the step under way is the last, and is saved."""
        self.stopping = True
        return self._interrupt() if self.now is None else []

    def _interrupt(self) -> list[Effect]:
        """There is no step under way to wait for."""
        self.finished = "interrupted"
        told: list[Effect] = [Send(m.peer, Shutdown()) for m in self.membership.members.values()]
        return told if self.membership.holders else [*told, Finish("interrupted")]

    # Coming in

    def _on_hello(self, now: float, peer: int, hello: Hello) -> list[Effect]:
        if not is_right_secret(hello.secret, self._secret):
            return self._refuse(peer, "wrong secret", "")
        if hello.protocol != PROTOCOL:
            return self._refuse(
                peer, "wrong version", f"This host speaks protocol {PROTOCOL}, and you speak {hello.protocol}."
            )
        if self.finished:
            return self._refuse(peer, "too late", f"The run has ended: {self.finished}.")
        member = self.membership.add(now, peer, hello.name, hello.kind, plain=False)
        return [Send(peer, Welcome(member.worker_id, int(self.patience_s * 1000), self.recipe))]

    def _on_join_request(self, now: float, peer: int, request: JoinRequest) -> list[Effect]:
        if not self.plain_peers:
            return self._refuse(peer, "plain peer", "")
        if self.standing.step or self.finished:
            self.refused["plain peer came late"] += 1
            return [Send(peer, Shutdown()), Close(peer, "a plain peer cannot be given the weights, and the run is on")]
        if self.description is not None and self.description.windowed is not None:
            return self._turn_away_plain(peer)
        member = self.membership.add(now, peer, request.node_id, f"plain {request.backend}", plain=True)
        self.membership.admit(member)
        return [
            Send(peer, JoinAccepted(member.worker_id, len(self.membership.ready))),
            Subscribe(peer, 1),
            self._tell_came(member),
            *self._start_step(now),
        ]

    def _turn_away_plain(self, peer: int) -> list[Effect]:
        """It knows no message to hear why; the host's log has it."""
        self.refused["plain peer"] += 1
        why = f"a plain peer trains under sync alone, and this run's policy is {self._described.policy}"
        return [Send(peer, Shutdown()), Close(peer, why), *self.on_closed(self._clock, peer, why)]

    def _on_ready(self, now: float, member: Member, ready: Ready) -> list[Effect]:
        if self.finished:
            return [Send(member.peer, Shutdown())]
        try:
            described = Description.from_json(ready.description)
        except TheirProtocolError as error:
            return self._refuse(member.peer, "wrong model", str(error))
        effects: list[Effect] = []
        if self.description is None:
            self.description = described
            effects.append(Describe(described))
            if described.windowed is not None:
                for plain in [m for m in self.membership.members.values() if m.plain]:
                    effects += self._turn_away_plain(plain.peer)
        elif (difference := self.description.difference(described)) is not None:
            return self._refuse(member.peer, "wrong model", difference)
        if self.membership.holders and (difference := self._differing_length(described)) is not None:
            return self._refuse(member.peer, "other length", difference)
        if described.rows_limit or not self.membership.holders:
            self._rows_limit = described.rows_limit  # a run that goes on may be longer than it was
        return effects + self._place(now, member, ready)

    def _differing_length(self, described: Description) -> str | None:
        """Whoever ended sooner would end the run for all, and whoever ended later would wait for work for ever."""
        mine, theirs, rows = self._rows_limit, described.rows_limit, described.rows
        if not mine or not theirs or abs(mine - theirs) < rows:
            return None
        return f"This run ends after {mine / rows:g} epochs, and yours would after {theirs / rows:g}. Ask for as many."

    def _place(self, now: float, member: Member, ready: Ready) -> list[Effect]:
        """Whether a worker that has built its model may go on with its own weights, or where it gets the run's."""
        step = self.standing.step
        known = self._digests.get(ready.step, {})
        if not self.membership.holders:
            if ready.holds and self.previous is not None and ready.step == self.previous.step:
                # The step after it is on record, but nobody came back who had applied it: it is computed again.
                self._ahead = self.standing
                self.standing, self.previous = self.previous, None
                step = self.standing.step
            is_origin = not ready.holds and step == 0
            if is_origin or (ready.holds and ready.step == step):
                return self._admit(now, member, ready, since=step + 1)
            if ready.holds and not step:
                return self._refuse(
                    member.peer,
                    "forgotten weights",
                    "Nobody has this run's weights any more, so that it begins anew, and yours are of step"
                    f" {ready.step}. Start this worker again.",
                )
            self._waiting = [(p, theirs) for p, theirs in self._waiting if p != member.peer]
            self._waiting.append((member.peer, ready))
            if self._alone_since is None:
                self._alone_since = now
            return self.on_tick(now) if not self._expected else [self._tell_nobody_holds(member)]
        is_window = self._described.windowed is not None  # one that is computed again has other bits
        if ready.holds and self._ahead is not None and ready.step == self._ahead.step and not is_window:
            return self._admit(now, member, ready, since=ready.step + 1)
        same = any(ready.digest == told for _, told in known.values())
        if ready.step == step and (same or (ready.holds and not known and not is_window)):
            return self._admit(now, member, ready, since=step + 1)
        return self._catch_up(member)

    def _tell_nobody_holds(self, member: Member) -> Emit:
        """Else a newcomer would see a host that stands still and says nothing."""
        doing = (
            f"{member.name} has joined and needs them; if nobody comes back within {self.patience_s:.0f} s, the run"
            " continues from its newest checkpoint"
        )
        name = f"a worker that has the weights of step {self.steps_done}"
        return Emit(Stalled(worker=member.worker_id, name=name, doing=doing, seconds=0.0))

    def _admit(self, now: float, member: Member, ready: Ready, since: int) -> list[Effect]:
        member.applied, member.since = ready.step, since
        self._digests.setdefault(ready.step, {})[member.worker_id] = (member.kind, ready.digest)
        return [
            Send(member.peer, Admitted(ready.step, 0, self.standing.position())),
            Subscribe(member.peer, since),
            *self._take_in(now, member),
        ]

    def _take_in(self, now: float, member: Member) -> list[Effect]:
        self.membership.admit(member)
        self._alone_since = None
        effects: list[Effect] = [self._tell_came(member)]
        if self.now is not None and self.now.orphans:
            orphans, self.now.orphans = self.now.orphans, []
            effects += self._hand_out(now, orphans)
        effects += self._start_step(now) + self._ask_for_save()
        waiting, self._waiting = self._waiting, []
        for peer, theirs in waiting:
            if (other := self.membership.members.get(peer)) is not None:
                effects += self._place(now, other, theirs)
        for other in self._stranded:
            effects += self._catch_up(other)
        return effects

    def _tell_came(self, member: Member) -> Emit:
        return Emit(
            WorkerCame(
                worker=member.worker_id,
                name=member.name,
                kind=member.kind,
                step=member.applied,
                workers=len(self.membership.ready),
            )
        )

    def _catch_up(self, member: Member) -> list[Effect]:
        """The weights of a worker that has them, as of the end of the step under way, and the averages since."""
        busy = Counter(transfer.sponsor for transfer in self._transfers.values())
        sponsor = min(self.membership.holders, key=lambda m: (m.leaving, busy[m.peer]))
        after = self.now.step if self.now is not None else self.standing.step
        self.membership.set_back(member, Phase.CATCHING_UP)
        member.since = after + 1
        number = self._new_transfer(sponsor.peer, member.peer, after)
        return [
            Send(member.peer, Admitted(after, 1, self.standing.position())),
            Subscribe(member.peer, after + 1),
            Send(sponsor.peer, StateRequest(number, after)),
        ]

    def _send_checkpoint(self, member: Member) -> list[Effect]:
        self.membership.set_back(member, Phase.CATCHING_UP)
        member.since = self.standing.step + 1
        number = self._new_transfer(None, member.peer, self.standing.step)
        return [
            Send(member.peer, Admitted(self.standing.step, 1, self.standing.position())),
            Subscribe(member.peer, self.standing.step + 1),
            SendCheckpoint(member.peer, number),
        ]

    def _new_transfer(self, sponsor: int | None, to: int, step: int) -> int:
        number, self._next_transfer = self._next_transfer, self._next_transfer + 1
        self._transfers[number] = Transfer(number, sponsor, to, step)
        return number

    @property
    def _stranded(self) -> list[Member]:
        """Those who were being given the weights by somebody who is gone. They may have had all of them."""
        given = {transfer.to for transfer in self._transfers.values()}
        return [m for m in self.membership.inside if not m.is_ready and m.peer not in given]

    def _end_transfers_of(self, peer: int) -> list[Effect]:
        effects: list[Effect] = []
        for transfer in list(self._transfers.values()):
            if transfer.to == peer:
                del self._transfers[transfer.number]
                if transfer.sponsor in self.membership.members:
                    effects.append(Send(transfer.sponsor, StateMore(transfer.number, 0)))
            elif transfer.sponsor == peer and not transfer.is_whole:
                del self._transfers[transfer.number]
                newcomer = self.membership.members.get(transfer.to)
                if newcomer is not None and self.membership.holders:
                    effects += self._catch_up(newcomer)
        return effects

    # A step

    @property
    def _described(self) -> Description:
        assert self.description is not None
        return self.description

    @property
    def _latest(self) -> int:
        """The last step that anybody can have applied: also the one under way, if it is being computed again."""
        return self._ahead.step if self._ahead is not None else self.standing.step

    def _start_step(self, now: float) -> list[Effect]:
        ready = self.membership.ready
        if self.now is not None or self.finished or not ready or self.description is None:
            return []
        if self.stopping and self.standing.step:
            return []
        if not self.standing.step and len(ready) < self.at_least:
            return []
        described, standing = self.description, self.standing
        has_buffers = any(part.component == BUFFERS for part in described.parts)
        working = [m for m in ready if not m.leaving and m.since <= standing.step + 1]
        working = [m for m in working if not (m.plain and has_buffers)]  # they could not send them
        if not any(not m.plain for m in working):
            return []
        plan = self._plan_window(working) if described.windowed is not None else self._plan_step(working)
        if plan is None:
            return []
        ids = tuple(m.worker_id for m in working)
        self.now = StepUnderWay(standing.step + 1, plan.bounds, now, plan.batch, plan.decision, ids)
        for member in ready:
            member.nodes, member.busy_s = [], 0.0
            member.reported.clear()
        several = any(len(nodes) > 1 for nodes in plan.nodes)
        # A plain peer sends its parts in another order than ours, so that all of them must be able to wait.
        count = 1 if any(m.plain for m in working) else sum(map(len, plan.nodes))
        effects: list[Effect] = [BeginStep(self.now.step, self.now.slices, count, several)]
        if plan.decision is not None:
            effects.append(self._tell_decision(plan.decision))
        for member, nodes in zip(working, plan.nodes, strict=True):
            effects += self._give(now, member, nodes)
        return effects

    def _plan_step(self, working: list[Member]) -> Plan:
        """One batch, in as many slices as ever, to each as many as its speed allows."""
        described, standing = self._described, self.standing
        rows = min(described.batch, described.rows - standing.row)
        slices = min(described.slices, rows)
        peers = [m.peer for m in working]
        before = self._last_quotas if self._last_peers == peers else None
        quotas = decide_quotas(slices, [m.speed for m in working], before)
        shared = share_nodes(slices, quotas)
        _spare_plain_peers(working, shared)
        self._last_quotas, self._last_peers = quotas, peers
        return Plan(slice_rows(standing.row, rows, slices), shared)

    def _plan_window(self, working: list[Member]) -> Plan | None:
        """One slice for each worker, as large as its speed allows; none if the run is over."""
        described, standing = self._described, self.standing
        policy = described.windowed
        assert policy is not None
        rows_left = min(described.rows - standing.row, MOST_WINDOW)
        if self._rows_limit:
            rows_left = min(rows_left, self._rows_limit - standing.rows_seen)
        if rows_left <= 0:
            return None
        names = _labels(working)
        if self._windows is None:
            self._windows = Windows(policy, names, may_be_alone=True)
        self._windows.change(names)
        batch = min(-(-described.batch // len(working)), MOST_WINDOW)
        decision = self._windows.decide(rows_left, batch, least=described.batch)
        nodes: list[list[Node]] = []
        sizes: list[int] = []
        for rows in decision.rows:
            nodes.append([(len(sizes), len(sizes) + 1)] if rows else [])
            sizes += [rows] if rows else []
        return Plan(sized_rows(standing.row, sizes), nodes, batch, decision)

    def _tell_decision(self, decision: Decision) -> Emit:
        return Emit(
            Decided(
                step=self.steps_done,
                rows=decision.rows,
                reason=decision.reason,
                version=self.standing.step,
                anchor=decision.anchor,
                divergence=self._drift,
            )
        )

    def _give(self, now: float, member: Member, nodes: list[Node]) -> list[Effect]:
        if not nodes or self.now is None:
            return []
        under = self.now
        if under.batch and len(nodes) > 1:  # each is a replica of its own
            return [effect for node in nodes for effect in self._give(now, member, [node])]
        member.nodes = member.nodes + nodes
        member.working_since = now
        if not member.plain:
            flat = np.array([edge for node in nodes for edge in node], "<u4")
            sizes = [end - start for start, end in under.bounds] if under.batch else []
            work = Work(
                under.step,
                self.standing.epoch,
                under.row,
                under.rows,
                under.slices,
                flat,
                np.array(sizes, "<u4"),
                under.batch,
            )
            return [Expect(member.peer, under.step, tuple(nodes), (1.0,) * len(nodes)), Send(member.peer, work)]
        effects: list[Effect] = []
        bounds = under.bounds
        for node in nodes:
            start, end = bounds[node[0]][0], bounds[node[1] - 1][1]
            weight = (end - start) * self._described.samples_per_row * self._described.unit
            for number in range(*node):
                samples = (bounds[number][1] - bounds[number][0]) * self._described.samples_per_row
                under.reports[number] = Slice(samples, math.nan, member.worker_id)
            effects.append(Expect(member.peer, under.step, (node,), (weight,)))
            effects.append(Send(member.peer, ShardAssignment(under.step, start, end)))
        return effects + self._scale()

    def _hand_out(self, now: float, nodes: list[Node], avoid: int | None = None) -> list[Effect]:
        """Nodes that have lost their worker, to the others, within the same step."""
        assert self.now is not None
        able = [m for m in self.membership.holders if m.since <= self.now.step and not m.leaving]
        able = able or [m for m in self.membership.holders if m.since <= self.now.step]
        able = able or [m for m in self.membership.ready if m.since <= self.now.step]
        able = [m for m in able if m.peer != avoid] or able
        if not able and self._ahead is not None and self.membership.holders:
            return self._skip_ahead(now)
        if not able:
            self.now.orphans += nodes
            return []
        slices = [number for node in nodes for number in range(*node)]
        quotas = decide_quotas(len(slices), [m.speed for m in able], None)
        effects: list[Effect] = [Widen(self.now.step)]
        given = 0
        for member, quota in zip(able, quotas, strict=True):
            mine = set(slices[given : given + quota])
            given += quota
            # Within each lost node: what was already added of it must not be added again as part of a larger one.
            parts = [
                piece
                for node in nodes
                if (inside := sorted(mine & set(range(*node))))
                for piece in cover(self.now.slices, inside[0], inside[-1] + 1)
            ]
            effects += self._give(now, member, parts)
        return effects

    def _skip_ahead(self, now: float) -> list[Effect]:
        """Whoever is left has applied the step that was being computed again."""
        assert self._ahead is not None
        self.previous, self.standing, self._ahead, self.now = self.standing, self._ahead, None, None
        return [AbandonStep(), *self._start_step(now)]

    def _on_report(self, now: float, member: Member, report: SliceReport) -> list[Effect]:
        under = self.now
        if under is None or report.step != under.step:
            self.refused["stale report"] += 1
            return []
        mine = {number for node in member.nodes for number in range(*node)}
        told = [int(number) for number in report.slices]
        if not (len(told) == len(report.samples) == len(report.loss_sums)) or not mine.issuperset(told):
            self.refused["foreign report"] += 1
            return []
        if not mine:  # it was taken from it meanwhile
            return []
        bad: list[Node] = []
        for number, samples, loss_sum in zip(told, report.samples, report.loss_sums, strict=True):
            member.reported.add(number)
            is_told = abs(loss_sum) < MOST_LOSS or (under.batch > 0 and math.isnan(loss_sum))  # none of its steps had
            if not (is_told and (samples == 0 or LEAST_SAMPLES < samples < MOST_SAMPLES)):
                bad += [node for node in member.nodes if node[0] <= number < node[1] and node not in bad]
            else:
                under.reports.setdefault(number, Slice(float(samples), float(loss_sum), member.worker_id))
        _either(under.used, bytes(report.used))
        if told:
            under.first_report = under.first_report if under.first_report is not None else now
            under.last_report = now
        if not under.batch:
            member.measure(len(mine & member.reported), report.busy_s)
        elif 0 < report.busy_s < math.inf:  # slices are of many sizes
            member.measure(sum(under.bounds[n][1] - under.bounds[n][0] for n in told), report.busy_s)
            under.batches[member.worker_id] = under.batches.get(member.worker_id, 0) + report.batches
        member.busy_s += report.busy_s
        under.busy[member.worker_id] = member.busy_s
        effects: list[Effect] = []
        for node in bad:
            effects += self.on_bad(now, member.peer, under.step, node, "has a loss that is not finite")
        return effects + self._scale()

    def _scale(self) -> list[Effect]:
        under = self.now
        if under is None or len(under.reports) < under.slices:
            return []
        slices = [under.reports[number] for number in range(under.slices)]
        under.samples = math.fsum(found.samples for found in slices)
        # A plain peer that sends blocks never tells its loss.
        told = [found for found in slices if not math.isnan(found.loss_sum)]
        weight = math.fsum(found.samples for found in told)
        under.loss = _total(found.loss_sum for found in told) / weight if weight else math.nan
        weighed = under.samples * self._described.unit
        scale = 1 / weighed if weighed else 0.0
        return [SetScale(under.step, scale, under.loss)]

    def _commit(self, now: float) -> list[Effect]:
        under, standing, described = self.now, self.standing, self._described
        assert under is not None
        self._scale()  # plain peers tell their loss after their gradients
        bounds = under.bounds
        for member in self.membership.members.values():
            for number in (number for node in member.nodes for number in range(*node)):
                under.computed_by.setdefault(number, member.worker_id)
        by = {number: under.computed_by.get(number, under.reports[number].worker_id) for number in under.reports}
        ranges = tuple((*bounds[number], by[number]) for number in sorted(by))
        workers = tuple(
            {
                "rank": m.worker_id,
                "name": m.name,
                "rows": sum(end - start for start, end, who in ranges if who == m.worker_id),
                "samples": sum(under.reports[n].samples for n in by if by[n] == m.worker_id),
                "busy_s": round(under.busy.get(m.worker_id, 0.0), 6),
                "wait_s": round(max(0.0, now - under.started - under.busy.get(m.worker_id, 0.0)), 6),
            }
            for m in self.membership.ready
        )
        record = StepRecord(
            under.step,
            standing.epoch,
            under.row,
            under.rows,
            standing.rows_seen + under.rows,
            under.samples,
            under.loss,
            workers,
            ranges,
        )
        if under.decision is not None:
            self._measure_window(now, under)
        self._ahead = None
        self.previous = Standing(standing.step, standing.epoch, standing.row, standing.rows_seen, list(standing.ranges))
        standing.step, standing.row = under.step, under.row + under.rows
        standing.rows_seen += under.rows
        standing.ranges += [(start, end) for start, end, _ in ranges]
        self._records[under.step] = record
        for old in [step for step in self._digests if step < under.step - 2]:
            del self._digests[old]
        epoch = self._end_epoch() if standing.row >= described.rows else None
        if under.decision is not None:
            self._steps[standing.step] = self.steps_done
        holders = self.membership.holders
        self._leader = holders[0].worker_id if holders else 0
        told = json.dumps({"workers": workers, "epoch": epoch and _as_table(epoch), "seconds": now - under.started})
        effects: list[Effect] = [Record(record)]
        committed = Committed(
            under.step,
            under.rows,
            under.samples,
            under.loss,
            bytes(under.used),
            self._leader,
            int(self.stopping),
            told,
        )
        for member in self.membership.inside:
            if not member.plain and member.since <= under.step:
                effects.append(Send(member.peer, committed))
        if epoch is not None:
            effects.append(Emit(epoch))
        if self.stopping:
            effects += [Send(m.peer, Shutdown()) for m in self.membership.members.values() if m.plain]
        self.now = None
        return effects + self._start_step(now)

    def _measure_window(self, now: float, under: StepUnderWay) -> None:
        """What the next one is planned by. How long the last took to be applied is known only now, and so counts here:
        the next is handed out before this one is applied."""
        assert self._windows is not None
        reports = [
            Report(
                wall_s=under.busy.get(who, 0.0) if who in under.batches else 0.0,
                batches=under.batches.get(who, 0),
                divergence=self._divergence.get(who, 0.0),
            )
            for who in under.workers
        ]
        if any(report.batches for report in reports):
            self._windows.report(reports, max(0.0, now - under.last_report) + self._applying_s)
        self._worked, self._committed_at, self._applying_s = under.workers, now, 0.0
        self._drift = max(self._divergence.values(), default=0.0)
        self._divergence = {}

    def _end_epoch(self) -> EpochDone:
        standing = self.standing
        proof = prove(standing.ranges, self._described.rows)
        weights = "all workers hold the same weights" if not self._drifted else "WORKERS' WEIGHTS HAD DRIFTED APART"
        done = EpochDone(
            epoch=standing.epoch,
            used=proof.used if proof.holds else -1,
            total=proof.total,
            same_weights=not self._drifted,
            sentence=f"Epoch {standing.epoch + 1}: {proof}; {weights}.",
        )
        standing.epoch, standing.row, standing.ranges = standing.epoch + 1, 0, []
        self._drifted = False
        return done

    def _on_applied(self, now: float, member: Member, applied: Applied) -> list[Effect]:
        if applied.step > self._latest:
            self.refused["applied too early"] += 1
            return []
        if self._awaits_weights(member):
            return []  # said before it read that it will be given other weights
        member.applied = max(member.applied, applied.step)
        if member.worker_id in self._worked and applied.step == self.standing.step:
            self._applying_s = max(self._applying_s, now - self._committed_at)
            self._divergence[member.worker_id] = applied.divergence if applied.divergence >= 0 else math.inf
        effects: list[Effect] = []
        if (record := self._records.pop(applied.step, None)) is not None:
            effects.append(StepApplied(record, applied.lr, applied.norm, applied.fault))
        self._digests.setdefault(applied.step, {})[member.worker_id] = (member.kind, applied.digest)
        wrong = self._drifted_at(applied.step, member.kind)
        for other in [m for m in self.membership.members.values() if m.worker_id in wrong]:
            if other.applied <= applied.step and not self._awaits_weights(other):
                effects += self._on_drift(other, applied.step)
        if member.worker_id in wrong:
            return effects
        if member.phase is Phase.CATCHING_UP and applied.step >= self.standing.step:
            for number in [t.number for t in self._transfers.values() if t.to == member.peer]:
                del self._transfers[number]
            member.since = min(member.since, applied.step + 1)
            effects += self._take_in(now, member)
        return effects

    def _awaits_weights(self, member: Member) -> bool:
        """It will be given others, whatever it says of those it has."""
        return any(t.to == member.peer and not t.is_whole for t in self._transfers.values())

    def _drifted_at(self, step: int, kind: str) -> list[int]:
        """Workers of a kind whose hash is not that of most of them, or, where it is a draw, not the first of them's."""
        told = {who: found for who, (theirs, found) in self._digests[step].items() if theirs == kind}
        counts = Counter(told.values())
        right = min(told, key=lambda who: (-counts[told[who]], who))
        return [who for who, found in told.items() if found != told[right]]

    def _on_drift(self, member: Member, step: int) -> list[Effect]:
        """Its parameters are not the others': it gets theirs."""
        self.refused["drifted"] += 1
        self._drifted = True
        others = [m for m in self.membership.holders if m is not member and m.applied >= step - 1]
        effects: list[Effect] = [
            Emit(
                Stalled(
                    worker=member.worker_id,
                    name=member.name,
                    doing=f"its weights after step {step} are not the others', and are sent to it anew",
                    seconds=0.0,
                )
            )
        ]
        if not others:
            return effects
        nodes = list(member.nodes)
        member.nodes = []
        self.membership.set_back(member, Phase.CATCHING_UP)
        if nodes and self.now is not None:
            effects += [Discard(member.peer, node) for node in nodes]
            effects += self._hand_out(self._clock, nodes)
        return effects + self._rely_no_more_on(member) + self._catch_up(member)

    def _rely_no_more_on(self, member: Member) -> list[Effect]:
        """What it was to compute or to send with its weights comes from the others."""
        effects = self._return_evaluations(member)
        for transfer in [t for t in self._transfers.values() if t.sponsor == member.peer and not t.is_whole]:
            del self._transfers[transfer.number]
            effects.append(Send(member.peer, StateMore(transfer.number, 0)))
            effects += self._catch_up(self.membership.members[transfer.to])
        if self._saving == member.peer:
            self._saving = None
            effects += [SaveAbort(), Send(member.peer, StateMore(SAVE, 0))]
        return effects + self._ask_for_save()

    def _nobody_holds(self, now: float, *, may_come_back: bool) -> list[Effect]:
        self._alone_since = now
        effects: list[Effect] = []
        if self.now is not None:
            self.now = None
            effects.append(AbandonStep())
        if self._ahead is not None:  # whoever comes back may have applied what was being computed again
            self.previous, self.standing, self._ahead = self.standing, self._ahead, None
        self._expected = int(may_come_back)
        return effects

    def _give_up(self, member: Member, number: int, why: str) -> list[Effect]:
        under = self.now
        assert under is not None
        start, end = under.bounds[number]
        first = under.bad[number]
        who = f"on {first} and again on {member.name}" if first != member.name else f"twice on {member.name}"
        self.finished = (
            f"The gradient of slice {number} of step {under.step} {why}, {who}. It is positions {start} to {end - 1}"
            f" of epoch {self.standing.epoch + 1}'s order. Look at those samples, or try a lower learning rate or"
            " step.clip; the weights are those of the step before"
        )
        refusal = Refusal(4, self.finished + ".")
        effects: list[Effect] = [Send(m.peer, refusal) for m in self.membership.members.values() if not m.plain]
        effects += [Send(m.peer, Shutdown()) for m in self.membership.members.values() if m.plain]
        self.now = None
        return [*effects, AbandonStep(), Finish(self.finished + ".", failed=True)]

    # Between steps

    def _on_evaluate_next(self, member: Member, ask: EvaluateNext) -> list[Effect]:
        if (done := self._evaluated.get(ask.step)) is not None:
            member.evaluating = None
            return [Send(member.peer, done)]
        if not 0 < ask.rows <= 1 << 48 or not 0 < ask.size <= ask.rows:
            return self._refuse(member.peer, "illegal", "EvaluateNext has no rows.")
        if member.phase is Phase.CATCHING_UP:  # it will have other weights; those who keep theirs look
            return [Send(member.peer, Evaluated(ask.step, 0.0, 0.0))]
        evaluation = self._evaluations.setdefault(ask.step, Evaluation(ask.rows, ask.size))
        effects: list[Effect] = []
        if member.evaluating == (ask.step, ask.start, ask.end):
            evaluation.done[ask.start] = (ask.end, ask.loss_sum, ask.samples)
            member.evaluating = None
        else:
            effects = self._return_evaluations(member)
        if evaluation.is_done:
            total = _total(loss for _, loss, _ in evaluation.done.values())
            samples = _total(samples for _, _, samples in evaluation.done.values())
            done = Evaluated(ask.step, total, samples)
            self._evaluated = {ask.step: done}
            del self._evaluations[ask.step]
            loss = total / samples if samples else math.nan
            peers = [member.peer, *evaluation.waiting]
            validated = Validated(step=self._steps.get(ask.step, ask.step), loss=loss)
            return [Emit(validated), *(Send(peer, done) for peer in peers)]
        return effects + self._next_range(member, ask.step, evaluation)

    def _next_range(self, member: Member, step: int, evaluation: Evaluation) -> list[Effect]:
        found = evaluation.take()
        if found is None:
            evaluation.waiting.append(member.peer)
            return []
        member.evaluating = (step, *found)
        return [Send(member.peer, EvaluateRange(step, *found))]

    def _return_evaluations(self, member: Member) -> list[Effect]:
        for evaluation in self._evaluations.values():
            evaluation.waiting = [peer for peer in evaluation.waiting if peer != member.peer]
        if member.evaluating is None:
            return []
        (step, start, end), member.evaluating = member.evaluating, None
        found = self._evaluations.get(step)
        if found is None:
            return []
        found.returned.append((start, end))
        if not found.waiting:
            return []
        return self._next_range(self.membership.members[found.waiting.pop(0)], step, found)

    def _on_save_due(self, member: Member, due: SaveDue) -> list[Effect]:
        if self._saved.step >= due.step and self._saved.folder:
            return [Send(member.peer, self._saved)]
        if due.step > self._latest:
            self.refused["due too early"] += 1
            return []
        if self._save_due is None or due.step > self._save_due.step:
            self._save_due = due
            self._saver = self._leader
        return self._ask_for_save()

    def _ask_for_save(self) -> list[Effect]:
        """A checkpoint is due, and whoever was to send it is gone."""
        holders = self.membership.holders
        if self._save_due is None or self._saving is not None or not holders:
            return []
        if any(member.worker_id == self._saver for member in holders):
            return []
        self._saver = holders[0].worker_id
        # What it has now, if that is news: it may be waiting for a save itself, and apply nothing before it.
        return [Send(holders[0].peer, StateRequest(SAVE, max(self._saved.step + 1, holders[0].applied)))]

    def _on_state_begin(self, member: Member, begin: StateBegin) -> list[Effect]:
        if begin.transfer == SAVE:
            is_old = bool(self._saved.folder) and begin.step <= self._saved.step  # the leader has changed meanwhile
            if self._saving is not None or not member.is_ready or is_old:
                return [Send(member.peer, StateMore(SAVE, 0))]
            self._saving, self._saver = member.peer, member.worker_id
            keep = self._save_due.keep_last if self._save_due is not None else 2
            return [
                SaveBegin(member.peer, begin.step, begin.header, keep),
                Send(member.peer, StateMore(SAVE, CHUNKS_AHEAD)),
            ]
        transfer = self._transfers.get(begin.transfer)
        if transfer is None or transfer.sponsor != member.peer:
            return [Send(member.peer, StateMore(begin.transfer, 0))]
        try:
            transfer.left = sum(int(size) for _, size in json.loads(begin.header))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return self._refuse(member.peer, "illegal", "StateBegin.header is not a list of files.")
        newcomer = self.membership.members[transfer.to]
        newcomer.since = max(newcomer.since, begin.step + 1)
        return [Send(transfer.to, begin), Send(member.peer, StateMore(begin.transfer, CHUNKS_AHEAD))]

    def _on_state_chunk(self, member: Member, chunk: StateChunk) -> list[Effect]:
        if chunk.transfer == SAVE:
            return [SaveChunk(member.peer, chunk.data)] if self._saving == member.peer else []
        transfer = self._transfers.get(chunk.transfer)
        if transfer is None or transfer.sponsor != member.peer or transfer.left is None:
            return []
        transfer.left = max(0, transfer.left - len(chunk.data))
        return [Send(transfer.to, chunk, credit=(member.peer, chunk.transfer))]

    # Going

    def _on_leave(self, now: float, member: Member, leave: Leave) -> list[Effect]:
        member.leaving = True
        if leave.finished:
            self.finished = self.finished or ("interrupted" if self.stopping else "finished")
            members = list(self.membership.members.values())
            shut: list[Effect] = [Send(m.peer, Shutdown()) for m in members]
            return shut + [Close(m.peer, "the run is over") for m in members if m.plain]
        return self._let_go(member)

    def _let_go(self, member: Member) -> list[Effect]:
        """The last who has the weights leaves them behind: those it has, for it will apply no other step."""
        others = [m for m in self.membership.holders if m is not member and not m.leaving]
        is_kept = self._saved.step >= member.applied and bool(self._saved.folder)
        if member.is_ready and not others and member.applied and not is_kept and not self.stopping:
            self._save_due = SaveDue(member.applied, self._save_due.keep_last if self._save_due is not None else 2)
            if self._saving is not None:
                return []  # once that one is kept
            self._saver = member.worker_id
            return [Send(member.peer, StateRequest(SAVE, member.applied))]
        return [Send(member.peer, Shutdown())]

    def _is_everybody_gone(self) -> bool:
        return not self.membership.members

    def _illegal(self, member: Member, message: Message) -> list[Effect]:
        return self._refuse(
            member.peer,
            "illegal",
            f"{type(message).__name__} is not expected from a worker that is {member.phase.name}.",
        )

    def _refuse(self, peer: int, kind: str, sentence: str) -> list[Effect]:
        """Without a sentence the peer hears nothing at all."""
        self.refused[kind] += 1
        told: list[Effect] = [Send(peer, Refusal(1, sentence))] if sentence else []
        return [*told, Close(peer, sentence or kind), *self.on_closed(self._clock, peer, sentence or kind)]

    def _tell_stalls(self, now: float) -> list[Effect]:
        """Whoever keeps the others waiting is named, with what it is doing and for how long."""
        effects: list[Effect] = []
        late = [member for member in self.membership.members.values() if member.nodes]
        # What the others send is held back until it is wanted, so that only those who still compute are waited for.
        for member in [m for m in late if m.is_computing] or late:
            since = member.working_since
            if self.now is not None and self.now.batch:  # a window may be long: nobody is late before another is done
                since = max(since, self.now.first_report if self.now.first_report is not None else now)
            seconds = now - since
            if seconds > self.patience_s and now - member.warned_at > self.patience_s:
                member.warned_at = now
                doing = member.doing(self.standing.step)
                effects.append(Emit(Stalled(worker=member.worker_id, name=member.name, doing=doing, seconds=seconds)))
        return effects


def _spare_plain_peers(working: list[Member], shared: list[list[Node]]) -> None:
    """A plain peer sends one payload per step: of several nodes it keeps the largest, and ours take the others."""
    ours = [index for index, member in enumerate(working) if not member.plain]
    for index, member in enumerate(working):
        if member.plain and len(shared[index]) > 1:
            kept = max(shared[index], key=lambda node: node[1] - node[0])
            shared[ours[0]] += [node for node in shared[index] if node != kept]
            shared[index] = [kept]


def _labels(members: list[Member]) -> list[str]:
    """Their names, each with its id where there are two of one name."""
    counts = Counter(member.name for member in members)
    return [m.name if counts[m.name] == 1 else f"{m.name} ({m.worker_id})" for m in members]


def _total(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # inf - inf
        return math.nan


def _either(bits: bytearray, others: bytes) -> None:
    if len(bits) < len(others):
        bits.extend(bytes(len(others) - len(bits)))
    for index, byte in enumerate(others):
        bits[index] |= byte


def _as_table(epoch: EpochDone) -> dict[str, Any]:
    return {name: getattr(epoch, name) for name in ("epoch", "used", "total", "same_weights", "sentence")}


def _tell(node: Node) -> str:
    return str(node[0]) if node[1] - node[0] == 1 else f"{node[0]} to {node[1] - 1}"

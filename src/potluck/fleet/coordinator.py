"""The protocol's state machine: (now, peer, message) -> effects. Pure: no sockets, no threads, no clock, no files.

The server runs it behind real sockets, and the tests' fleet in one process with a clock of its own. It decides who is
in, who computes which slices, when a step is done, who gives the weights to a newcomer, and when the run ends. It never
sees gradients: only that they have all arrived.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from potluck.agree.shares import without_singles
from potluck.agree.terms import UNCOMPARED
from potluck.agree.windows import Decision, Report, Windows
from potluck.errors import TheirProtocolError
from potluck.events import (
    CheckpointFailed,
    CheckpointSaved,
    Decided,
    EpochDone,
    Stalled,
    Validated,
    WentBack,
    WorkerCame,
    WorkerWent,
)
from potluck.fleet import bounds
from potluck.fleet.description import BAD_BUFFERS, BUFFERS, MAX_TOTAL, Description
from potluck.fleet.effects import (
    AbandonStep,
    Agreed,
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
from potluck.fleet.evaluation import MOST_AT_ONE_STEP, Evaluation, Look, is_plausible
from potluck.fleet.invite import is_right_secret
from potluck.fleet.ledger import Range, prove
from potluck.fleet.membership import Member, Membership, Phase
from potluck.fleet.parcel import files_in, most_bytes
from potluck.fleet.returns import Returns
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

PROTOCOL = 2
TOO_SOON = 5
"""The code of a refusal after which a worker waits, and comes again."""
CHUNKS_AHEAD = 4
"""Of a parcel: so many may be on their way before the first has left here."""
LEAST_SAMPLES, MOST_SAMPLES, MOST_LOSS = 1e-6, 1e15, 1e300
"""What a slice may report: beyond these, sums of them would overflow or vanish."""
MOST_WINDOW = (1 << 32) - 1
"""Rows of a window: the size of a slice is a u32."""
LONG = 4
"""A worker that takes this many times longer than expected is no longer waited for, where others have nothing to do."""
MOST_KEPT = 1000
"""Checkpoints: so many at most are kept for anybody."""
SLOW_PARCEL = 4
"""Times `patience` without a byte of a state that is wanted: then another is asked for it."""
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


class Told(NamedTuple):
    """What a worker said of its weights after a step."""

    kind: str
    digest: str
    computed: bool
    """It took the step itself, and was not given the weights."""


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
    granted: set[int] = field(default_factory=set)
    """Slices of a plain peer that is gone: the report of whoever computes them next takes the place of what was taken
    for granted. Until then that stays, so that a step never lacks a report."""
    used: bytearray = field(default_factory=bytearray)
    buffers: bytes = b""
    """What the first slice changed in buffers that have no mean, as the first who computed it told."""
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
class Transfer:
    """The state of one worker, on its way to another."""

    number: int
    sponsor: int | None
    """None: the host's own disk."""
    to: int
    step: int
    left: int | None = None
    """Bytes that have yet to come from the sponsor, once it has said how many there are."""
    moved_at: float = 0.0

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
        agreed: dict[int, dict[str, str]] | None = None,
    ) -> None:
        """`expected`: how many workers were in when the coordinator before this one ended. `agreed`: of the last steps,
        by kind, the right weights' digest."""
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
        self._returns = Returns(patience_s)
        self._expected = expected
        self._alone_since: float | None = None
        self._restoring = False
        self._ahead: Standing | None = None
        """After the step that is being computed again: it is on record, and somebody may have applied it."""
        self._digests: dict[int, dict[int, Told]] = {}
        """step -> worker id -> what it told first"""
        self._agreed: dict[int, dict[str, str]] = agreed or {}
        """step -> kind -> the digest that is right: whoever tells another has wrong weights."""
        self._changed: dict[int, str] = {}
        """worker id -> another digest of the last step than it told first, before it told anything of the next."""
        self._alike: set[str] = set()
        """Kinds that have come to the same bits as another."""
        self._apart: set[str] = set()
        """Kinds that have not, and are compared among themselves."""
        self._transfers: dict[int, Transfer] = {}
        self._next_transfer = 1
        self._waiting: list[tuple[int, Ready]] = []
        """Newcomers for whom nobody has the weights yet."""
        self._evaluations: dict[Look, Evaluation] = {}
        self._evaluated: dict[Look, Evaluated] = {}
        """The last few that are done."""
        self._save_due: SaveDue | None = None
        self._saving: int | None = None
        """The peer whose state is on its way to the disk."""
        self._saved = Saved(0, "", "")
        """The last that is on the disk."""
        self._keep_last = 1
        """The most that a worker wanted to be kept."""
        self._save_moved_at = 0.0
        self._passed_over: set[int] = set()
        """Worker ids that were to send the checkpoint that is due, and did not."""
        self._unpaid: Counter[tuple[int, int]] = Counter()
        """(peer, transfer) -> chunks that came from it and have not left here."""
        self.most_floats = MAX_TOTAL
        """What there is memory for."""
        self._save_again_at: float | None = None
        """A checkpoint could not be written, and is asked for again then."""
        self.save_fault = ""
        """Why the last one could not; empty once one could."""
        self._records: dict[int, StepRecord] = {}
        """Committed, and not yet told as applied."""
        self._drifted = False
        self._clock = 0.0
        self._ticked_at: float | None = None
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
        """Of all epochs, as the first who held the weights told it; 0: nobody knows."""
        self._over_at: int | None = None
        """The step after which a worker said that the run is over."""
        self._over_since = 0.0
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

    def on_message(self, now: float, peer: int, message: Message, address: str = "") -> list[Effect]:
        """A whole message of any kind but gradients. `address`: of the machine that it came from."""
        self._clock = now
        member = self.membership.members.get(peer)
        try:
            message = bounds.check(message, self.description)
        except TheirProtocolError as error:
            is_secret = member is None or member.plain  # whoever has not shown its secret yet hears nothing
            return self._refuse(peer, "implausible", "" if is_secret else str(error))
        if member is None:
            match message:
                case Hello():
                    return self._on_hello(now, peer, message, address)
                case JoinRequest():
                    return self._on_join_request(now, peer, message, address)
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
                effects = self._on_applied(now, member, message)
                self._forget_digests()
                return effects
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
                    polite=member.leaving or self.finished is not None,
                    workers=len(self.membership.ready),
                )
            )
        ]
        effects += self._hold_off(now, member)
        effects += self._end_transfers_of(peer)
        for key in [key for key in self._unpaid if key[0] == peer]:
            del self._unpaid[key]
        effects += self._return_evaluations(member)
        if self._saving == peer:
            self._saving = None
            effects.append(SaveAbort())
        effects += self._ask_for_save()
        if self.now is not None and (nodes := list(member.nodes)):
            if member.plain:  # what its rows weigh was only taken for granted: whoever computes them now knows better
                self.now.granted.update(number for node in nodes for number in range(*node))
            effects += self._hand_out(now, nodes)
        if member.is_ready and not self.membership.holders:
            effects += self._nobody_holds(now, may_come_back=not member.leaving)
        if self.stopping and not self.finished and not self.membership.holders:
            effects += self._interrupt()
        if self._is_said_to_be_over and not self.finished and not self.membership.holders:
            effects += self._end()
        if self._is_everybody_gone() and self.finished:
            effects.append(Finish(self.finished))
        return effects

    def _hold_off(self, now: float, member: Member) -> list[Effect]:
        """Whoever comes and goes in a loop is let in less and less often."""
        times, wait_s = self._returns.went(now, member.address, member.name, member.came_at)
        if not wait_s or self.finished:
            return []
        doing = f"it has come and gone {times} times, each time within {self.patience_s:g} s, and is held off"
        return [Emit(Stalled(worker=member.worker_id, name=member.name, doing=doing, seconds=wait_s))]

    def on_heard(self, now: float, peer: int) -> None:
        """Any byte counts as life."""
        if (member := self.membership.members.get(peer)) is not None:
            member.heard_at = max(now, member.heard_at)

    def on_tick(self, now: float) -> list[Effect]:
        self._clock = now
        self._forgive_pause(now)
        effects: list[Effect] = []
        for member in self.membership.late(now, self.patience_s):
            why = f"silent for {member.silent_s(now):.1f} s while {member.doing(self.standing.step)}"
            effects.append(Close(member.peer, why))
            effects += self.on_closed(now, member.peer, why)
        effects += self._relieve_sleepers(now)
        effects += self._tell_stalls(now)
        effects += self._tire_of_ranges(now)
        effects += self._tire_of_parcels(now)
        effects += self._tire_of_the_end(now)
        if self._save_again_at is not None and now >= self._save_again_at and not self.finished:
            self._save_again_at = None
            effects += self._ask_for_save()
        is_anybody_waiting = bool(self._waiting or self._stranded) and not self.finished
        if is_anybody_waiting and not self.membership.holders and not self._restoring:
            waited_s = now - (self._alone_since if self._alone_since is not None else now)
            if not self._expected or waited_s >= self.patience_s or self._is_last_kept:
                effects += self._go_on_without_them(now)
        if self.finished and self._is_everybody_gone():
            effects.append(Finish(self.finished))
        return effects

    def _go_on_without_them(self, now: float) -> list[Effect]:
        """Nobody came who has the last step: from a checkpoint, or from the step before if somebody has that."""
        self._expected = 0
        step = self.previous.step if self.previous is not None and not self._is_last_kept else -1
        for peer, ready in self._waiting:
            member = self.membership.members[peer]
            if ready.holds and ready.step == step and self._is_believed(member, ready):
                self._waiting.remove((peer, ready))
                return self._place(now, member, ready)
        self._restoring = True
        return [Restore()]

    def _forgive_pause(self, now: float) -> None:
        """This host itself may not have run: a stopped process, a sleeping laptop, a hung disk. Whoever could not be
        heard meanwhile must not be given up for it."""
        gap = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if gap > self.patience_s / 4:
            self.membership.forgive(now, gap)
            for transfer in self._transfers.values():
                transfer.moved_at += gap
            self._save_moved_at, self._over_since = self._save_moved_at + gap, self._over_since + gap
            if self._alone_since is not None:
                self._alone_since = min(now, self._alone_since + gap)

    def has_reported(self, peer: int, node: Node) -> bool:
        """A gradient is taken only after the report of its slices: a mean is never formed without all of them."""
        member = self.membership.members.get(peer)
        return member is not None and (member.plain or member.reported.issuperset(range(*node)))

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

    def on_plain_loss(self, now: float, peer: int, step: int, node: Node, loss: float) -> list[Effect]:
        """A plain peer's loss stands behind its gradients. It is told before the last of them reach the sums: these
        may complete the step."""
        member = self.membership.members.get(peer)
        if self.now is None or self.now.step != step or member is None or node not in member.nodes:
            return []
        for number in range(*node):
            told = self.now.reports[number]
            told.loss_sum = loss * told.samples
        return self._scale()

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
        under = self.now
        if under is None or under.step != step or len(under.reports) < under.slices:
            return []
        effects = self._judge_changes()
        return effects if self.now is not under else effects + self._commit(now)

    def on_saved(
        self, now: float, step: int, folder: str, error: str, size: int = 0, *, theirs: bool = False
    ) -> list[Effect]:
        """`theirs`: what came is no checkpoint, so that its sender goes, and another is asked."""
        if theirs and self._saving is not None:
            self._clock = now
            return self._refuse(self._saving, "bad checkpoint", error)
        sender, self._saving, self._saver = self._saving, None, -1
        self._passed_over.clear()
        if error:
            return self._on_save_failed(now, sender, Saved(step, "", error))
        self._saved, self.save_fault, self._save_again_at = Saved(step, folder, ""), "", None
        if self._save_due is not None and step >= self._save_due.step:
            self._save_due = None
        effects: list[Effect] = [
            Send(m.peer, self._saved) for m in self.membership.members.values() if not m.plain and not m.leaving
        ]
        for member in [m for m in self.membership.members.values() if m.leaving and m.shut_at is None]:
            effects += self._let_go(member)
        saved = CheckpointSaved(step=self._steps.get(step, step), folder=folder, stall_s=0.0, bytes=size)
        effects.append(Emit(saved))
        self._steps = {version: steps for version, steps in self._steps.items() if version >= step}
        return effects + self._ask_for_save()

    def _on_save_failed(self, now: float, sender: int | None, told: Saved) -> list[Effect]:
        """No worker ends for it, and none that has the only copy may go: it is asked for again after a while.

        A later one that is due takes its place.
        """
        self.save_fault = told.error
        self._save_due = self._save_due or SaveDue(told.step, self._keep_last)
        self._save_again_at = now + self.patience_s
        effects: list[Effect] = [Emit(CheckpointFailed(step=self._steps.get(told.step, told.step), reason=told.error))]
        if sender in self.membership.members:  # else the rest of this one would be in the way of the next
            effects.append(Send(sender, StateMore(SAVE, 0)))
        return effects + [Send(m.peer, told) for m in self.membership.members.values() if not m.plain]

    def found(self, step: int, folder: str) -> None:
        """The newest checkpoint on the disk, from before this coordinator was there."""
        if step <= self.standing.step:
            self._saved = Saved(step, folder, "")

    def restored(self, now: float, standing: Standing | None) -> list[Effect]:
        """The run goes on from the newest checkpoint, or from its beginning where there is none."""
        self._restoring = False
        self._expected = 0
        had, before = standing is not None, self.steps_done
        self.standing = standing or Standing()
        self.previous = self._ahead = self._save_due = self._save_again_at = None
        self._digests.clear()
        self._agreed.clear()
        self._records.clear()
        self._evaluations.clear()
        if self._saved.step > self.standing.step:  # it turned out to be damaged
            self._saved = Saved(0, "", "")
        effects = self._turn_away_all_plain("the run goes back to a checkpoint, and a plain peer cannot go with it")
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
        told = self._end()
        return told if self.membership.holders else [*told, Finish("interrupted")]

    # Coming in

    def _on_hello(self, now: float, peer: int, hello: Hello, address: str) -> list[Effect]:
        if not is_right_secret(hello.secret, self._secret):
            return self._refuse(peer, "wrong secret", "")
        if hello.protocol != PROTOCOL:
            return self._refuse(
                peer, "wrong version", f"This host speaks protocol {PROTOCOL}, and you speak {hello.protocol}."
            )
        if self.finished:
            return self._refuse(peer, "too late", f"The run has ended: {self.finished}.")
        if len(self.membership.members) >= bounds.MOST_WORKERS:
            return self._refuse(peer, "too many", f"This host has {bounds.MOST_WORKERS:,} workers, the most it takes.")
        if wait_s := self._returns.wait_s(now, address, hello.name):
            sentence = (
                f"You have come and gone again and again, each time within {self.patience_s:g} s. Come again in"
                f" {math.ceil(wait_s)} s, and look at why this worker ends so soon."
            )
            self.refused["too soon"] += 1
            return [Send(peer, Refusal(TOO_SOON, sentence)), Close(peer, sentence)]
        member = self.membership.add(now, peer, hello.name, hello.kind, plain=False, address=address)
        return [Send(peer, Welcome(member.worker_id, int(self.patience_s * 1000), self.recipe))]

    def _on_join_request(self, now: float, peer: int, request: JoinRequest, address: str) -> list[Effect]:
        if not self.plain_peers:
            return self._refuse(peer, "plain peer", "")
        if self._returns.wait_s(now, address, request.node_id):
            return self._refuse(peer, "too soon", "")
        if len(self.membership.members) >= bounds.MOST_WORKERS:
            return self._refuse(peer, "too many", "")
        if self.standing.step or self.finished:
            return self._turn_away_plain(peer, "a plain peer cannot be given the weights, and the run is on")
        if (why := self._why_no_plain_peers) is not None:
            return self._turn_away_plain(peer, why)
        member = self.membership.add(
            now, peer, request.node_id, f"plain {request.backend}", plain=True, address=address
        )
        self.membership.admit(member)
        effects: list[Effect] = [
            Send(peer, JoinAccepted(member.worker_id, max(self.at_least, len(self.membership.ready)))),
            Subscribe(peer, 1),
            self._tell_came(member),
        ]
        if self.now is not None:  # the first step is under way, and its average will come to this peer too
            effects += self._give_nothing(member)
        return effects + self._start_step(now)

    @property
    def _why_no_plain_peers(self) -> str | None:
        """What keeps the published worker from taking part in this run; none if nothing does."""
        if self.description is None:
            return None
        if self.description.windowed is not None:
            return f"a plain peer trains under sync alone, and this run's policy is {self.description.policy}"
        if any(part.component == BUFFERS for part in self.description.parts):
            return "a plain peer cannot send buffers, such as running statistics, and this run's model has some"
        return None

    def _turn_away_plain(self, peer: int, why: str) -> list[Effect]:
        """It knows no message to hear why; the host's log has it."""
        self.refused["plain peer"] += 1
        return [Send(peer, Shutdown()), Close(peer, why), *self.on_closed(self._clock, peer, why)]

    def _turn_away_all_plain(self, why: str) -> list[Effect]:
        plain = [m.peer for m in self.membership.members.values() if m.plain]
        return [effect for peer in plain for effect in self._turn_away_plain(peer, why)]

    def _on_ready(self, now: float, member: Member, ready: Ready) -> list[Effect]:
        if self.finished:
            return self._shut(member)
        try:
            described = Description.from_json(ready.description)
        except TheirProtocolError as error:
            return self._refuse(member.peer, "wrong model", str(error))
        effects: list[Effect] = []
        if described.floats > self.most_floats:
            return self._refuse(
                member.peer,
                "too large",
                f"Your model has {described.floats:,} trained numbers, and this host has memory for the mean of"
                f" {self.most_floats:,}. Start the host on a machine with more memory.",
            )
        if self.description is None:
            self.description = described
            effects.append(Describe(described))
            if (why := self._why_no_plain_peers) is not None:
                effects += self._turn_away_all_plain(why)
        elif (difference := self.description.difference(described)) is not None:
            return self._refuse(member.peer, "wrong model", difference)
        elif (completed := self.description.completed(described)) != self.description:
            self.description = completed
            effects.append(Describe(completed, is_new=False))
        if self.membership.holders and (difference := self._differing_length(described)) is not None:
            return self._refuse(member.peer, "other length", difference)
        # Whoever says it twice is placed once: as the first who is in it would else be sent its own weights.
        self._waiting = [(peer, theirs) for peer, theirs in self._waiting if peer != member.peer]
        if not self.membership.holders:  # a run that is resumed may be longer than it was; a newcomer changes nothing
            self._rows_limit = described.rows_limit
        return effects + self._place(now, member, replace(ready, description=""))  # it may wait, and be long

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
        is_window = self._described.windowed is not None  # one that is computed again has other bits
        holds = bool(ready.holds) and self._is_believed(member, ready)
        if not self.membership.holders:
            is_before = holds and self.previous is not None and ready.step == self.previous.step
            if is_before and not self._may_have_the_last(now):
                # The step after it is on record, but nobody came back who had applied it: it is computed again.
                assert self.previous is not None
                if is_window:
                    self._digests.pop(step, None)
                    self._agreed.pop(step, None)
                self._ahead = self.standing
                self.standing, self.previous = self.previous, None
                step = self.standing.step
            is_origin = not ready.holds and step == 0
            if is_origin or (holds and ready.step == step):
                return self._admit(now, member, ready, since=step + 1)
            if ready.holds and not step:
                return self._refuse(
                    member.peer,
                    "forgotten weights",
                    "Nobody has this run's weights any more, so that it begins anew, and yours are of step"
                    f" {ready.step}. Start this worker again.",
                )
            self._waiting.append((member.peer, ready))
            if self._alone_since is None:
                self._alone_since = now
            effects: list[Effect] = []
            if ready.holds and not holds:
                effects.append(self._tell_drift(member, ready.step, "are not those that were agreed on"))
            return effects + (self.on_tick(now) if not self._expected else [self._tell_nobody_holds(member)])
        if holds and self._ahead is not None and ready.step == self._ahead.step and not is_window:
            return self._admit(now, member, ready, since=ready.step + 1)
        same = any(ready.digest == told.digest for told in known.values())
        if ready.step == step and (same or (holds and not known and not is_window)):
            return self._admit(now, member, ready, since=step + 1)
        return self._catch_up(member)

    def _may_have_the_last(self, now: float) -> bool:
        """Whether the last step may come from a checkpoint, or from somebody who has yet to come back: a window that
        is computed again has other bits, and whoever has ended with it would have other weights than the rest."""
        if self._described.windowed is None:
            return False
        if self._is_last_kept:
            return True
        came = 1 + sum(bool(theirs.holds) for _, theirs in self._waiting)
        waited_s = now - (self._alone_since if self._alone_since is not None else now)
        return came < self._expected and waited_s < self.patience_s

    @property
    def _is_last_kept(self) -> bool:
        return bool(self._saved.folder) and self._saved.step == self.standing.step

    def _is_believed(self, member: Member, ready: Ready) -> bool:
        """Whether the weights that it comes with are those that were agreed on, as far as anybody knows."""
        agreed = self._agreed.get(ready.step, {})
        is_unknown = self._compared_as(member.kind) not in agreed
        return bool(ready.digest) and (is_unknown or ready.digest in agreed.values())

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
        self._digests.setdefault(ready.step, {})[member.worker_id] = Told(member.kind, ready.digest, computed=False)
        kind = self._compared_as(member.kind)
        return [
            *(self._agree(ready.step, kind, ready.digest) if kind not in self._agreed.get(ready.step, {}) else []),
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

    def _catch_up(self, member: Member, avoid: int | None = None) -> list[Effect]:
        """The weights of a worker that has them, as of the end of the step under way, and the averages since."""
        busy = Counter(transfer.sponsor for transfer in self._transfers.values())
        # Of its own kind if it can be: another's weights differ in their last bits, and would be taken for drift.
        sponsor = min(self._trusted, key=lambda m: (m.peer == avoid, m.leaving, m.kind != member.kind, busy[m.peer]))
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
        self._transfers[number] = Transfer(number, sponsor, to, step, moved_at=self._clock)
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
        if self.now is not None or self.finished or not ready or self.description is None or self._is_complete:
            return []
        if self.stopping and self.standing.step:
            return []
        if not self.standing.step and len(ready) < self.at_least:
            return []
        described, standing = self.description, self.standing
        working = [m for m in ready if not m.leaving and m.since <= standing.step + 1 and m.applied >= m.relieved]
        working = [m for m in working if not (m.plain and m.assigned > standing.step)]  # the step is begun anew
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
            if member.plain and not nodes:
                effects += self._give_nothing(member)
        return effects

    def _give_nothing(self, member: Member) -> list[Effect]:
        """The published worker takes an average only after an assignment: where there are no rows for it, an empty
        one, whose answer nobody expects."""
        assert self.now is not None
        member.assigned = self.now.step
        return [Send(member.peer, ShardAssignment(self.now.step, self.now.row, self.now.row))]

    @property
    def _is_complete(self) -> bool:
        """All rows of the run are in the weights, where it is known how many there are."""
        return 0 < self._rows_limit <= self.standing.rows_seen

    def _plan_step(self, working: list[Member]) -> Plan:
        """One batch, in as many slices as ever, to each as many as its speed allows."""
        described, standing = self._described, self.standing
        rows = min(described.batch, described.rows - standing.row)
        slices = min(described.slices, rows)
        if described.in_pairs and described.batch > described.slices:  # also where an epoch's last batch is short
            slices = min(slices, max(1, rows // 2))
        peers = [m.peer for m in working]
        before = self._last_quotas if self._last_peers == peers else None
        quotas = decide_quotas(slices, [m.speed for m in working], before)
        _give_each_plain_peer_one(working, quotas)
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
        if described.in_pairs and batch > 1:
            decision = replace(decision, rows=tuple(without_singles(decision.rows)))
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
        if member.relieved == under.step:  # there is nobody else: what it reports counts again
            member.relieved = 0
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
        member.assigned = under.step
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
        able = [m for m in self.membership.holders if m.since <= self.now.step]
        able = [m for m in able if not m.leaving] or able
        able = [m for m in able if m.relieved < self.now.step] or able
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
        if report.step == member.relieved:  # of no use any more, but for what it tells of its speed
            member.measure(member.relieved_amount, report.busy_s)
            return []
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
            elif number not in under.reports or number in under.granted:
                under.granted.discard(number)
                under.reports[number] = Slice(float(samples), float(loss_sum), member.worker_id)
        _either(under.used, bytes(report.used))
        if 0 in mine and not under.buffers:
            under.buffers = bytes(report.buffers)
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
        self._forget_digests()
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
            under.buffers,
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
        unseen = "" if self._described.data else UNCOMPARED
        compared, left_out = self._tell_compared()
        done = EpochDone(
            epoch=standing.epoch,
            used=proof.used if proof.holds else -1,
            total=proof.total,
            same_weights=not self._drifted,
            not_compared=left_out,
            sentence="; ".join([f"Epoch {standing.epoch + 1}: {proof}{unseen}", *compared]) + ".",
        )
        standing.epoch, standing.row, standing.ranges = standing.epoch + 1, 0, []
        self._drifted = False
        return done

    def _tell_compared(self) -> tuple[list[str], tuple[str, ...]]:
        """Whose weights were compared, as parts of a sentence; and the names of those whose were not."""
        ready = self.membership.ready
        names = dict(zip((m.worker_id for m in ready), _labels(ready), strict=True))
        kinds: dict[str, list[Member]] = {}
        for member in self.membership.holders:
            kinds.setdefault(self._compared_as(member.kind), []).append(member)
        plain = [names[m.worker_id] for m in ready if m.plain]
        groups = [[names[m.worker_id] for m in group] for group in kinds.values() if len(group) > 1]
        single = [group[0] for group in kinds.values() if len(group) == 1]
        told = [f"the {len(group)} workers of one kind ({_list(group)}) hold the same weights" for group in groups]
        if len(groups) == 1 and not single and not plain:
            told = ["all workers hold the same weights"]
        if self._drifted:
            told = ["WORKERS' WEIGHTS HAD DRIFTED APART"]
        if len(ready) == 1:
            return told, ()
        told += [f"{names[m.worker_id]} is alone of its kind ({m.kind}) and was not compared" for m in single]
        told += [f"{name} is a plain peer and was not compared" for name in plain]
        return told, tuple(sorted([*plain, *(names[m.worker_id] for m in single)]))

    def _on_applied(self, now: float, member: Member, applied: Applied) -> list[Effect]:
        if applied.step > self._latest:
            self.refused["applied too early"] += 1
            return []
        if self._awaits_weights(member):
            return []  # said before it read that it will be given other weights
        told = self._digests.setdefault(applied.step, {})
        first = told.get(member.worker_id)
        if first is not None and first.digest != applied.digest:
            return self._on_change(member, applied)
        member.applied = max(member.applied, applied.step)
        if first is None and member.worker_id in self._worked and applied.step == self.standing.step:
            self._applying_s = max(self._applying_s, now - self._committed_at)
            self._divergence[member.worker_id] = applied.divergence if applied.divergence >= 0 else math.inf
        effects: list[Effect] = []
        if (record := self._records.pop(applied.step, None)) is not None:
            effects.append(StepApplied(record, applied.lr, applied.norm, applied.fault))
        told[member.worker_id] = Told(member.kind, applied.digest, applied.step >= member.since)
        effects += self._judge(applied.step, self._compared_as(member.kind))
        if member.phase is not Phase.CATCHING_UP or applied.step < self.standing.step:
            return effects + self._start_step(now)  # where all who are left had been relieved
        if self._restoring or member.worker_id not in self._digests.get(applied.step, {}):
            return effects  # it has been found wrong
        for number in [t.number for t in self._transfers.values() if t.to == member.peer]:
            del self._transfers[number]
        member.since = min(member.since, applied.step + 1)
        return effects + self._take_in(now, member)

    # Whose weights are right

    def _forget_digests(self) -> None:
        """Of steps so old that nobody is compared by them; whoever replays them tells them one by one."""
        for old in [step for step in self._digests if step < self.standing.step - 2]:
            del self._digests[old]
            self._agreed.pop(old, None)

    def _compared_as(self, kind: str) -> str:
        """Workers of which this is the same come to the same bits from the same average: theirs are compared."""
        if self._described.windowed is not None:
            return ""  # a window's average is only subtracted, which is the same on every device
        return kind if kind in self._apart else kind.rpartition("; ")[2]

    @property
    def _trusted(self) -> list[Member]:
        """Holders whose weights have not changed since they told their digest; if there is none, all holders."""
        holders = self.membership.holders
        return [m for m in holders if m.worker_id not in self._changed] or holders

    def _agree(self, step: int, kind: str, digest: str) -> list[Effect]:
        agreed = self._agreed.setdefault(step, {})
        if agreed.get(kind) == digest:
            return []
        agreed[kind] = digest
        return [Agreed(step, kind, digest)]

    def _judge(self, step: int, kind: str, *, at_once: bool = False) -> list[Effect]:
        """What most of those who came to the same bits so far tell of a step is right. Where it is a draw, those who
        have yet to tell decide it; if they are not to be waited for, or none are left, nobody can."""
        found = {who: told for who, told in self._digests[step].items() if self._compared_as(told.kind) == kind}
        voices = {who: told for who, told in found.items() if told.computed} or found
        counts = Counter(told.digest for told in voices.values()).most_common()
        if len(counts) > 1:
            # After a window there is nothing to set apart: all subtract alike.
            if self._described.windowed is None and (apart := self._find_unlike(voices.values())):
                self._apart |= apart
                kinds = {self._compared_as(told.kind) for told in found.values()}
                return [effect for each in sorted(kinds) for effect in self._judge(step, each, at_once=at_once)]
            if counts[0][1] == counts[1][1]:
                missing = [m for m in self.membership.holders if m.applied < step and m.since <= step]
                if not at_once and any(self._compared_as(m.kind) == kind for m in missing):
                    return []
                return self._on_draw(step, kind, found)
        elif step and len({told.kind for told in voices.values() if told.computed}) > 1:
            self._alike |= {told.kind for told in voices.values()}
        return self._agree(step, kind, counts[0][0]) + self._condemn(step, found, counts[0][0])

    def _find_unlike(self, voices: Iterable[Told]) -> set[str]:
        """Kinds that have never come to the bits of the others: that is no fault, but how they compute."""
        kinds: dict[str, set[str]] = {}
        for told in voices:
            kinds.setdefault(told.digest, set()).add(told.kind)
        sets = list(kinds.values())
        is_one_in_two = sum(map(len, sets)) > len(set().union(*sets))
        return set() if is_one_in_two else set().union(*sets) - self._alike

    def _condemn(
        self, step: int, found: dict[int, Told], right: str, what: str = "are not the others'"
    ) -> list[Effect]:
        effects: list[Effect] = []
        wrong = {who for who, told in found.items() if told.digest != right}
        for other in [m for m in self.membership.members.values() if m.worker_id in wrong]:
            if other.applied <= step and not self._awaits_weights(other):
                effects += self._on_drift(other, step, what)
        return effects

    def _on_draw(self, step: int, kind: str, found: dict[int, Told]) -> list[Effect]:
        """Both had the same weights before, so only computing the steps since the checkpoint again can tell."""
        right = found[min(found)].digest  # of whoever has been in for longest, where nothing better is known
        if not self._can_go_back:
            what = "are not the others' (no checkpoint can tell whose are right)"
            return self._agree(step, kind, right) + self._condemn(step, found, right, what)
        what = "are not the others', and nobody can tell whose are right: all go back to the last checkpoint"
        wrong = [m for m in self.membership.holders if m.worker_id in found and found[m.worker_id].digest != right]
        self._drifted = True
        return [*(self._tell_drift(member, step, what) for member in wrong), *self._go_back()]

    def _on_change(self, member: Member, applied: Applied) -> list[Effect]:
        """Its weights are not what it told of them after the same step."""
        if applied.step != self.standing.step or member.reported:
            return self._on_drift(member, applied.step, "changed in its memory")
        # Between two steps its own loop may have changed them: then every worker's does. See _judge_changes().
        self._changed[member.worker_id] = applied.digest
        is_alone = len(self.membership.holders) == len(self._changed)
        return [] if is_alone else self._rely_no_more_on(member)

    def _judge_changes(self) -> list[Effect]:
        """Before a step is committed: it must not be computed from weights that are known to be wrong."""
        step = self.standing.step
        effects: list[Effect] = []
        for kind in sorted({self._compared_as(told.kind) for told in self._digests.get(step, {}).values()}):
            effects += self._judge(step, kind, at_once=True)
        changed, self._changed = self._changed, {}
        holders = [m for m in self.membership.holders if m.applied >= step]
        for kind in sorted({self._compared_as(m.kind) for m in holders if m.worker_id in changed}):
            alike = [m for m in holders if self._compared_as(m.kind) == kind]
            counts = Counter(changed.get(m.worker_id) for m in alike)
            right = None if None in counts else counts.most_common(1)[0][0]
            if right is not None:  # by the loop itself, on every worker
                effects += self._agree(step, kind, right)
            for member in alike:
                if changed.get(member.worker_id) != right:
                    effects += self._on_drift(member, step, "changed in its memory")
                elif right is not None:
                    self._digests[step][member.worker_id] = Told(member.kind, right, computed=False)
        return effects

    def _awaits_weights(self, member: Member) -> bool:
        """It will be given others, whatever it says of those it has."""
        return any(t.to == member.peer and not t.is_whole for t in self._transfers.values())

    def _tell_drift(self, member: Member, step: int, what: str) -> Emit:
        doing = f"its weights after step {step} {what}"
        return Emit(Stalled(worker=member.worker_id, name=member.name, doing=doing, seconds=0.0))

    def _on_drift(self, member: Member, step: int, what: str) -> list[Effect]:
        """Its weights are wrong: it gets those of the others, or all get those of the checkpoint."""
        self.refused["drifted"] += 1
        self._drifted = True
        for told in self._digests.values():
            told.pop(member.worker_id, None)
        self._changed.pop(member.worker_id, None)
        others = [m for m in self.membership.holders if m is not member and m.applied >= step - 1]
        if not others and not self._can_go_back:
            return [self._tell_drift(member, step, f"{what}; there is neither a worker nor a checkpoint to mend it")]
        if not others:
            return [self._tell_drift(member, step, f"{what}; the run goes back to its checkpoint"), *self._go_back()]
        effects: list[Effect] = [self._tell_drift(member, step, f"{what}, and are sent to it anew")]
        nodes = list(member.nodes)
        has_sent = bool(member.reported) or (self.now is not None and member.worker_id in self.now.computed_by.values())
        member.nodes = []
        self.membership.set_back(member, Phase.CATCHING_UP)
        if has_sent:
            effects += self._begin_anew()
        elif nodes and self.now is not None:
            effects += [Discard(member.peer, node) for node in nodes]
            effects += self._hand_out(self._clock, nodes)
        return effects + self._rely_no_more_on(member) + self._catch_up(member)

    def _begin_anew(self) -> list[Effect]:
        """The step under way has gradients of wrong weights in its sums. They cannot be taken out again."""
        if self.now is None:
            return []
        self.now = None
        return [AbandonStep(), *self._start_step(self._clock)]

    @property
    def _can_go_back(self) -> bool:
        return bool(self._saved.folder) and not any(m.plain for m in self.membership.members.values())

    def _go_back(self) -> list[Effect]:
        """Nobody is known to have the right weights: all get those of the newest checkpoint."""
        effects: list[Effect] = []
        for transfer in self._transfers.values():
            if transfer.sponsor in self.membership.members:
                effects.append(Send(transfer.sponsor, StateMore(transfer.number, 0)))
        self._transfers.clear()
        if self._saving is not None:
            effects += [SaveAbort(), Send(self._saving, StateMore(SAVE, 0))]
            self._saving = None
        for member in self.membership.holders:
            member.nodes = []
            self.membership.set_back(member, Phase.CATCHING_UP)
        self._changed.clear()
        effects += self._nobody_holds(self._clock, may_come_back=False)
        self._restoring = True
        return [*effects, Restore()]

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
        advice = "Look at those samples, or try a lower learning rate or step.clip"
        if why == BAD_BUFFERS:
            advice = "Look at what the model's forward writes into its buffers, or register them with persistent=False"
        self.finished = (
            f"The gradient of slice {number} of step {under.step} {why}, {who}. It is positions {start} to {end - 1}"
            f" of epoch {self.standing.epoch + 1}'s order. {advice}; the weights are those of the step before"
        )
        refusal = Refusal(4, self.finished + ".")
        effects: list[Effect] = [Send(m.peer, refusal) for m in self.membership.members.values() if not m.plain]
        effects += [Send(m.peer, Shutdown()) for m in self.membership.members.values() if m.plain]
        self.now = None
        return [*effects, AbandonStep(), Finish(self.finished + ".", failed=True)]

    # Between steps

    def _on_evaluate_next(self, member: Member, ask: EvaluateNext) -> list[Effect]:
        look = ask.step, ask.rows, ask.size
        if (done := self._evaluated.get(look)) is not None:
            member.evaluating = None
            return [Send(member.peer, done)]
        if not is_plausible(ask.rows, ask.size):
            return self._refuse(member.peer, "illegal", "EvaluateNext has no rows, or too many ranges.")
        if member.phase is Phase.CATCHING_UP:  # it will have other weights; those who keep theirs look
            return [Send(member.peer, Evaluated(ask.step, 0.0, 0.0))]
        if not self._may_look(member, ask.step, is_new=look not in self._evaluations):
            return self._refuse(member.peer, "illegal", "EvaluateNext is of a step to come, or one of very many.")
        effects: list[Effect] = []
        evaluation = self._evaluations.get(look)
        if evaluation is not None and member.evaluating == (look, ask.start, ask.end):
            seconds = self._clock - member.evaluating_since
            evaluation.add(ask.end - ask.start, ask.loss_sum, ask.samples, seconds)
            member.evaluating = None
        else:
            effects = self._return_evaluations(member)
            evaluation = self._evaluations.setdefault(look, Evaluation(ask.rows, ask.size))
        if evaluation.is_done:
            return effects + self._end_evaluation(member, look, evaluation)
        return effects + self._next_range(member, look, evaluation)

    def _may_look(self, member: Member, step: int, *, is_new: bool) -> bool:
        """One worker keeps no more than one set open, and begins only some at one step."""
        before, count = member.looks
        count = (count if before == step else 0) + is_new
        member.looks = step, count
        return step <= self._latest and count <= MOST_AT_ONE_STEP

    def _end_evaluation(self, member: Member, look: Look, evaluation: Evaluation) -> list[Effect]:
        step = look[0]
        total, samples = _total(evaluation.loss_sums), _total(evaluation.samples)
        done = Evaluated(step, total, samples)
        self._evaluated[look] = done
        for old in list(self._evaluated)[:-4]:
            del self._evaluated[old]
        del self._evaluations[look]
        validated = Validated(step=self._steps.get(step, step), loss=total / samples if samples else math.nan)
        return [Emit(validated), *(Send(peer, done) for peer in (member.peer, *evaluation.waiting))]

    def _next_range(self, member: Member, look: Look, evaluation: Evaluation) -> list[Effect]:
        found = evaluation.take()
        if found is None:
            evaluation.waiting.append(member.peer)
            return []
        member.evaluating, member.evaluating_since = (look, *found), self._clock
        return [Send(member.peer, EvaluateRange(look[0], *found))]

    def _return_evaluations(self, member: Member) -> list[Effect]:
        """It looks at nothing any more: others do its range, and what nobody looks at is forgotten."""
        for evaluation in self._evaluations.values():
            evaluation.waiting = [peer for peer in evaluation.waiting if peer != member.peer]
        effects: list[Effect] = []
        if member.evaluating is not None:
            (look, start, end), member.evaluating = member.evaluating, None
            if (found := self._evaluations.get(look)) is not None:
                found.returned.append((start, end))
                if found.waiting:
                    effects = self._next_range(self.membership.members[found.waiting.pop(0)], look, found)
        busy = {m.evaluating[0] for m in self.membership.members.values() if m.evaluating is not None}
        for look in [look for look, found in self._evaluations.items() if look not in busy and not found.waiting]:
            del self._evaluations[look]
        return effects

    def _tire_of_ranges(self, now: float) -> list[Effect]:
        """A range that takes far longer than any other, while somebody waits, is given to whoever waits."""
        effects: list[Effect] = []
        for member in [m for m in self.membership.members.values() if m.evaluating is not None]:
            found = self._evaluations.get(member.evaluating[0]) if member.evaluating is not None else None
            if found is None or not found.waiting:
                continue
            is_slow = now - member.evaluating_since > self.patience_s + SLOW_PARCEL * found.longest_s
            if is_slow or self._is_silent(now, member):
                effects += self._return_evaluations(member)
        return effects

    def _on_save_due(self, member: Member, due: SaveDue) -> list[Effect]:
        if self._saved.step >= due.step and self._saved.folder:
            return [Send(member.peer, self._saved)]
        if due.step > self._latest:
            self.refused["due too early"] += 1
            return []
        self._keep_last = min(MOST_KEPT, max(self._keep_last, due.keep_last))
        if self._save_due is None or due.step > self._save_due.step:
            self._save_due, self._save_again_at = due, None
            self._saver, self._save_moved_at = self._leader, self._clock
        return self._ask_for_save()

    def _ask_for_save(self) -> list[Effect]:
        """A checkpoint is due, and whoever was to send it is gone."""
        holders = self._trusted
        if self._save_due is None or self._saving is not None or self._save_again_at is not None or not holders:
            return []
        if any(member.worker_id == self._saver for member in holders):
            return []
        asked = min(holders, key=lambda m: (m.worker_id in self._passed_over, m.worker_id))
        self._saver, self._save_moved_at = asked.worker_id, self._clock
        # What it has now, if that is news: it may be waiting for a save itself, and apply nothing before it.
        return [Send(asked.peer, StateRequest(SAVE, max(self._saved.step + 1, asked.applied)))]

    def _on_state_begin(self, member: Member, begin: StateBegin) -> list[Effect]:
        transfer = self._transfers.get(begin.transfer)
        is_asked = transfer is not None and transfer.sponsor == member.peer and transfer.left is None
        if begin.transfer == SAVE:
            if not self._may_save(member, begin):
                return [Send(member.peer, StateMore(SAVE, 0))]
        elif not is_asked:
            return [Send(member.peer, StateMore(begin.transfer, 0))]
        described, total = self._described, 0
        try:
            total = sum(size for _, size in files_in(begin.header))
        except TheirProtocolError as error:
            return self._refuse(member.peer, "illegal", str(error))
        most = most_bytes(max(described.state_bytes, 4 * described.floats))
        if total > most or begin.step > self._latest:
            return self._refuse(
                member.peer,
                "illegal",
                f"StateBegin announces {total:,} bytes of step {begin.step}; the state of this run's model has at most"
                f" {most:,}, and its last step is {self._latest}.",
            )
        self._unpaid.pop((member.peer, begin.transfer), None)
        more = Send(member.peer, StateMore(begin.transfer, CHUNKS_AHEAD))
        if transfer is None:
            self._saving, self._saver, self._save_moved_at = member.peer, member.worker_id, self._clock
            return [SaveBegin(member.peer, begin.step, begin.header, self._keep_last), more]
        transfer.left, transfer.moved_at = total, self._clock
        newcomer = self.membership.members[transfer.to]
        newcomer.since = max(newcomer.since, begin.step + 1)
        return [Send(transfer.to, begin), more]

    def _may_save(self, member: Member, begin: StateBegin) -> bool:
        is_old = bool(self._saved.folder) and begin.step <= self._saved.step  # the leader has changed meanwhile
        if self._saving is not None and self._saver == member.worker_id and self._saving != member.peer:
            self._saver = -1  # it is turned away now: should the one under way fail, somebody is asked anew
        return self._save_due is not None and self._saving is None and member in self._trusted and not is_old

    def _on_state_chunk(self, member: Member, chunk: StateChunk) -> list[Effect]:
        transfer = self._transfers.get(chunk.transfer)
        if chunk.transfer == SAVE:
            if self._saving != member.peer:
                return []
        elif transfer is None or transfer.sponsor != member.peer or not transfer.left:
            return []
        self._unpaid[member.peer, chunk.transfer] += 1
        if self._unpaid[member.peer, chunk.transfer] > 2 * CHUNKS_AHEAD:  # what an ended parcel was allowed may be left
            return self._refuse(member.peer, "illegal", "StateChunk came before StateMore allowed it.")
        if transfer is None:
            self._save_moved_at = self._clock
            return [SaveChunk(member.peer, chunk.data)]
        transfer.left, transfer.moved_at = max(0, (transfer.left or 0) - len(chunk.data)), self._clock
        return [Send(transfer.to, chunk, credit=(member.peer, chunk.transfer))]

    def on_taken(self, now: float, peer: int, transfer: int) -> list[Effect]:
        """A chunk that came from this peer has been written, or has left."""
        self._clock = now
        if self._unpaid[peer, transfer] > 1:
            self._unpaid[peer, transfer] -= 1
        else:
            del self._unpaid[peer, transfer]
        return [Send(peer, StateMore(transfer, 1))] if peer in self.membership.members else []

    def _tire_of_parcels(self, now: float) -> list[Effect]:
        """Whoever was to send a state, and sends nothing of it, is passed over while there are others to ask."""
        effects: list[Effect] = []
        latest = now - SLOW_PARCEL * self.patience_s
        for transfer in list(self._transfers.values()):
            sponsor = self.membership.members.get(transfer.sponsor) if transfer.sponsor is not None else None
            if sponsor is None or sponsor.applied < transfer.step:
                transfer.moved_at = now
            elif not transfer.is_whole and transfer.moved_at < latest and len(self.membership.holders) > 1:
                del self._transfers[transfer.number]
                effects.append(Send(sponsor.peer, StateMore(transfer.number, 0)))
                effects += self._catch_up(self.membership.members[transfer.to], avoid=sponsor.peer)
        if self._save_due is None or self._save_moved_at >= latest:
            return effects
        self._save_moved_at = now
        saving = self.membership.members.get(self._saving) if self._saving is not None else None
        slow = saving.worker_id if saving is not None else self._saver
        if all(holder.worker_id == slow for holder in self.membership.holders):
            return effects
        self._passed_over.add(slow)
        self._saver = -1
        if saving is not None:
            self._saving = None
            effects += [SaveAbort(), Send(saving.peer, StateMore(SAVE, 0))]
        return effects + self._ask_for_save()

    # Going

    def _on_leave(self, now: float, member: Member, leave: Leave) -> list[Effect]:
        """It goes. That it has finished ends the run for all only once nobody else who holds the weights is at work."""
        member.leaving = True
        is_last = member.is_ready and member.applied >= self.standing.step
        if not (leave.finished and is_last and self._may_be_over):
            return self._let_go(member)
        self._over_at, self._over_since = self.standing.step, now
        if any(not m.leaving for m in self.membership.holders):
            return self._shut(member)
        return self._end()

    @property
    def _may_be_over(self) -> bool:
        """Of a run whose length nobody told, only the workers know."""
        return self.stopping or not self._rows_limit or self.standing.rows_seen >= self._rows_limit

    @property
    def _is_said_to_be_over(self) -> bool:
        """By a worker that held the weights of the last step; whoever took another since then knows better."""
        return self._over_at is not None and self._over_at >= self.standing.step

    def _end(self) -> list[Effect]:
        self.finished = self.finished or ("interrupted" if self.stopping else "finished")
        return [effect for member in list(self.membership.members.values()) for effect in self._shut(member)]

    def _shut(self, member: Member) -> list[Effect]:
        """The run is over for it: it has `patience` to go."""
        member.leaving = True
        member.shut_at = self._clock if member.shut_at is None else member.shut_at
        return [Send(member.peer, Shutdown()), *([Close(member.peer, "the run is over")] if member.plain else [])]

    def _tire_of_the_end(self, now: float) -> list[Effect]:
        """Whoever was told to go, and whoever has nothing left to do and does not say so, keeps nobody waiting."""
        effects: list[Effect] = []
        for member in [m for m in self.membership.members.values() if m.shut_at is not None]:
            if now - (member.shut_at or 0.0) > self.patience_s:
                why = f"the run is over for it, and it has not gone for {self.patience_s:g} s"
                effects += [Close(member.peer, why), *self.on_closed(now, member.peer, why)]
        self._end_without_them(now)
        if self.finished or not self._is_said_to_be_over or not (self.stopping or self._rows_limit):
            return effects
        if self._saving is not None or self._save_due is not None or self._evaluations:
            self._over_since = now
        elif now - self._over_since > self.patience_s:
            effects += self._end()
        return effects

    def _end_without_them(self, now: float) -> None:
        """All is done and kept, and those who were in when this host, or their connection, was lost have not come back
        to say so: they may have ended, and nobody else need come."""
        is_done = self._is_complete and self._is_last_kept
        if self.finished or self.membership.members or not self._expected or not is_done:
            return
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self.patience_s:
            self.finished = "finished"

    def _let_go(self, member: Member) -> list[Effect]:
        """The last who has the weights leaves them behind: those it has, for it will apply no other step."""
        others = [m for m in self.membership.holders if m is not member and not m.leaving]
        is_kept = self._saved.step >= member.applied and bool(self._saved.folder)
        if member.is_ready and not others and member.applied and not is_kept and not self.stopping:
            self._save_due, self._save_moved_at = SaveDue(member.applied, self._keep_last), self._clock
            if self._saving is not None:
                return []  # once that one is kept
            self._save_again_at = None
            self._saver = member.worker_id
            return [Send(member.peer, StateRequest(SAVE, member.applied))]
        return self._shut(member)

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

    # Those who keep the others waiting

    def _is_silent(self, now: float, member: Member) -> bool:
        """Longer than two heartbeats: it may be gone, or asleep."""
        return member.silent_s(now) > self.patience_s / 2

    def _tell_stalls(self, now: float) -> list[Effect]:
        """Whoever keeps the others waiting is named, with what it is doing and for how long."""
        effects: list[Effect] = []
        late = [member for member in self.membership.members.values() if member.nodes or member.evaluating]
        # What the others send is held back until it is wanted: those who are silent are waited for, or else those who
        # still compute.
        asleep = [m for m in late if self._is_silent(now, m)]
        for member in asleep or [m for m in late if m.is_computing] or late:
            is_silent = member in asleep
            seconds = member.silent_s(now) if is_silent else now - self._waited_since(now, member)
            least = self.patience_s / 2 if is_silent else self.patience_s
            if seconds > least and now - member.warned_at > least:
                member.warned_at = now
                doing = f"{'silent while ' * is_silent}{member.doing(self.standing.step)}"
                effects.append(Emit(Stalled(worker=member.worker_id, name=member.name, doing=doing, seconds=seconds)))
        return effects

    def _waited_since(self, now: float, member: Member) -> float:
        if member.evaluating:
            return member.evaluating_since
        if self.now is None or not self.now.batch:
            return member.working_since
        # A window may be long: nobody is late before another is done.
        return max(member.working_since, self.now.first_report if self.now.first_report is not None else now)

    def _relieve_sleepers(self, now: float) -> list[Effect]:
        """What a worker owes and does not deliver is given to those who have nothing left to do, before patience is
        over where it is silent. It stays in, and is given work again once it has applied the step."""
        under, holders = self.now, self.membership.holders
        if under is None:
            return []
        for member in [m for m in holders if m.is_computing and self._delivers_nothing(now, m)]:
            able = [m for m in holders if m is not member and m.since <= under.step and not m.leaving]
            # Those who were relieved themselves have nothing to do either, and must not be relied on.
            if any(not m.is_computing and m.relieved < under.step and not self._is_silent(now, m) for m in able):
                return self._relieve(now, member)  # one at a time: the next may have been given this one's part
        return []

    def _delivers_nothing(self, now: float, member: Member) -> bool:
        """It is silent, or takes far longer than it should, though its heart beats."""
        if self._is_silent(now, member):
            return True
        expected_s = self._expected_s(member)
        most_s = max(self.patience_s, LONG * (self.patience_s if expected_s is None else expected_s))
        return now - self._waited_since(now, member) > most_s

    def _expected_s(self, member: Member) -> float | None:
        """How long its part of the step under way should take, by its own speed or that of the slowest other; none
        where nobody's is known yet: a first step may be slow."""
        known = [m.speed for m in self.membership.holders if m.speed]
        speed = member.speed or min(known, default=0.0)
        return self._amount(member) / speed if speed else None

    def _amount(self, member: Member) -> float:
        """What it has yet to deliver: slices, or where workers step by themselves, rows."""
        under = self.now
        if under is None:
            return 0.0
        numbers = [number for node in member.nodes for number in range(*node)]
        return sum(under.bounds[n][1] - under.bounds[n][0] for n in numbers) if under.batch else len(numbers)

    def _relieve(self, now: float, member: Member) -> list[Effect]:
        assert self.now is not None
        is_silent, doing = self._is_silent(now, member), member.doing(self.standing.step)
        seconds = member.silent_s(now) if is_silent else now - member.working_since
        member.relieved, member.relieved_amount, member.relieved_of = self.now.step, self._amount(member), doing
        nodes, member.nodes, member.warned_at = member.nodes, [], now
        stalled = Stalled(
            worker=member.worker_id,
            name=member.name,
            doing=f"{'silent while ' * is_silent}{doing}",
            seconds=seconds,
            then=f"the others compute its part of step {self.now.step}",
        )
        return [
            Emit(stalled),
            *(Discard(member.peer, node) for node in nodes),
            *self._hand_out(now, nodes, avoid=member.peer),
        ]


def _give_each_plain_peer_one(working: list[Member], quotas: list[int]) -> None:
    """The published worker expects rows in every step; one of ours bears a step without any."""
    for index, member in enumerate(working):
        if member.plain and not quotas[index]:
            giver = max(range(len(quotas)), key=lambda other: (not working[other].plain, quotas[other]))
            if not quotas[giver]:
                giver = max(range(len(quotas)), key=lambda other: quotas[other])
            if quotas[giver] > working[giver].plain:  # a plain peer keeps its last
                quotas[giver], quotas[index] = quotas[giver] - 1, 1


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


def _list(names: list[str]) -> str:
    """All of a few, the first of many."""
    return ", ".join(names if len(names) <= 8 else [*names[:7], f"{len(names) - 7} more"])


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
    return {name: getattr(epoch, name) for name in EpochDone.__slots__}


def _tell(node: Node) -> str:
    return str(node[0]) if node[1] - node[0] == 1 else f"{node[0]} to {node[1] - 1}"

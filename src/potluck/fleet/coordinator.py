"""The protocol's state machine: (now, peer, message) -> effects. Pure: no sockets, no threads, no clock, no files.

The server runs it behind real sockets, and the tests' fleet in one process with a clock of its own. It decides who is
in, who computes which slices, when a step is done, who gives the weights to a newcomer, and when the run ends. It never
sees gradients: only that they have all arrived.

Here is who is told of what comes in. What is done about it is decided by machines, each with a state of its own:
rounds, transfers, evaluations, gatherings, saving, plain peers, weights, ending.
"""

import math
from collections.abc import Callable
from typing import Any

from potluck.agree.records import Position
from potluck.errors import TheirProtocolError
from potluck.events import Sampled, WentBack, WorkerWent
from potluck.fleet import bounds
from potluck.fleet.coordinator_state import CoordinatorState, Resumed, stalled
from potluck.fleet.digests import Digests
from potluck.fleet.effects import Effect, Emit, Finish, Send, SendBase, ShowTo
from potluck.fleet.ending import Ending
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.gathering import Gatherings
from potluck.fleet.invite import is_right_secret
from potluck.fleet.membership import FETCHER, WorkerPhase, WorkerRecord
from potluck.fleet.orders import Orders
from potluck.fleet.plain_peers import PlainPeers
from potluck.fleet.planning import StepUnderWay
from potluck.fleet.rejoin_limiter import RejoinLimiter
from potluck.fleet.saving import Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.fleet.stragglers import Stragglers
from potluck.fleet.transfers import Transfers
from potluck.fleet.tree import Node
from potluck.fleet.weights import Weights
from potluck.wire.messages import (
    PROTOCOL,
    TOO_SOON,
    Applied,
    BaseFiles,
    BaseWanted,
    EndRun,
    EvaluateNext,
    Gather,
    Heartbeat,
    Hello,
    JoinRequest,
    Leave,
    LookOn,
    Message,
    Ready,
    SaveDue,
    SliceReport,
    StateBegin,
    StateChunk,
    Using,
    Welcome,
    Wrote,
)
from potluck.wire.words import clean

WRITTEN_EVERY_S = 5.0
"""How often it is told what the model writes, at most."""

_FOR_PEOPLE = (Wrote, Using)
_STATE = (SaveDue, StateBegin, StateChunk)
_INSIDE = (Applied, SliceReport, EvaluateNext, Gather, *_STATE, Heartbeat, Leave, EndRun, *_FOR_PEOPLE)
LEGAL: dict[WorkerPhase, tuple[type[Message], ...]] = {
    WorkerPhase.GREETED: (Ready, BaseFiles, BaseWanted, Heartbeat, Leave, Using),
    WorkerPhase.CATCHING_UP: _INSIDE,  # it may not know yet that its weights will be replaced
    WorkerPhase.READY: _INSIDE,
}
"""Messages that a worker of ours may send in each phase. Gradients are not listed: the server takes them only where
they were asked for."""


class Coordinator(CoordinatorState):
    def __init__(
        self,
        *,
        patience_s: float,
        secret: str,
        recipe: str = "",
        at_least: int = 1,
        plain_peers: bool = False,
        resumed: Resumed = Resumed(),
    ) -> None:
        super().__init__(patience_s, at_least, resumed)
        self._recipe = recipe
        self._secret = secret
        self._returns = RejoinLimiter(patience_s)
        self._watchers: set[int] = set()
        self._wrote_at: float | None = None
        # Each knows those above it, and none below.
        self.digests = Digests(self, dict(resumed.agreed))
        self.evaluations = Evaluations(self)
        self.gatherings = Gatherings(self, self.evaluations, resumed.expected, self.standing.version)
        self.saving = Saving(self, self.digests)
        self.rounds = StepDispatcher(self, self.digests)
        self.stragglers = Stragglers(self, self.rounds)
        self.transfers = Transfers(self, self.digests, self.rounds, self.saving)
        self.plain_peers = PlainPeers(self, self.rounds, self._returns, plain_peers)
        self.weights = Weights(
            self, self.digests, self.rounds, self.transfers, self.saving, self.evaluations, self.plain_peers
        )
        self.ending = Ending(self, self.rounds, self.saving, self.evaluations, self.gatherings, self.weights)
        self.orders = Orders(self, self.rounds, self.saving, self.ending)

    @property
    def now(self) -> StepUnderWay | None:
        return self.rounds.now

    def at(self, now: float) -> "Coordinator":
        """Set the run's time, before anything that comes in then."""
        self.clock = now
        return self

    def has_reported(self, peer: int, node: Node) -> bool:
        """A gradient is taken only after the report of its slices: a mean is never formed without all of them."""
        member = self.membership.members.get(peer)
        return member is not None and (member.plain or member.reported.issuperset(range(*node)))

    # What workers send

    def on_message(self, peer: int, message: Message, address: str = "") -> list[Effect]:
        """A whole message of any kind but gradients. `address`: of the machine that it came from."""
        member = self.membership.members.get(peer)
        try:
            message = bounds.check(message, self.description)
        except TheirProtocolError as error:
            is_secret = member is None or member.plain  # a peer that has not shown its secret yet hears nothing
            return self.refuse(peer, "implausible", "" if is_secret else str(error))
        if member is None:
            match message:
                case Hello():
                    return self._on_hello(peer, message, address)
                case JoinRequest():
                    return self.plain_peers.on_join_request(peer, message, address)
                case LookOn():
                    return self._on_watch(peer, message)
            return self.refuse(peer, "unknown", "")
        member.hear(self.clock)
        if not isinstance(message, Heartbeat):
            member.stack = ""
        if member.plain:
            if isinstance(message, Heartbeat):
                return [Send(peer, message)]
            return self.refuse(peer, "illegal", "")  # a Refusal is not among the messages that it knows
        if type(message) not in LEGAL[member.phase]:
            name = type(message).__name__
            return self.refuse(peer, "illegal", f"{name} is not expected from a worker that is {member.phase.name}.")
        return _HEAR[type(message)](self, member, message)

    def _on_hello(self, peer: int, hello: Hello, address: str) -> list[Effect]:
        if refusal := self._check_opening(peer, hello):
            return refusal
        if self.finished:
            return self.refuse(peer, "too late", f"The run has ended: {self.finished}.")
        if len(self.membership.members) >= bounds.MOST_WORKERS:
            return self.refuse(peer, "too many", f"This host has {bounds.MOST_WORKERS:,} workers, the most it takes.")
        if wait_s := self._returns.wait_s(self.clock, address, hello.name):
            sentence = (
                f"You have come and gone again and again, each time within {self.patience_s:g} s. Come again in"
                f" {math.ceil(wait_s)} s, and look at why this worker ends so soon."
            )
            return self.refuse(peer, "too soon", sentence, TOO_SOON)
        member = self.membership.add(self.clock, peer, hello.name, hello.kind, plain=False, address=address)
        return [Send(peer, Welcome(member.worker_id, int(self.patience_s * 1000), self._recipe))]

    def _check_opening(self, peer: int, words: Hello | LookOn) -> list[Effect]:
        if not is_right_secret(words.secret, self._secret):
            return self.refuse(peer, "wrong secret", "")
        if words.protocol != PROTOCOL:
            return self.refuse(
                peer, "wrong version", f"This host speaks protocol {PROTOCOL}, and you speak {words.protocol}."
            )
        return []

    def _on_watch(self, peer: int, watch: LookOn) -> list[Effect]:
        """It takes no part, has no id, and is known by nothing but its connection."""
        if refusal := self._check_opening(peer, watch):
            return refusal
        if len(self._watchers) >= bounds.MOST_WATCHERS:
            return self.refuse(
                peer, "too many", f"{bounds.MOST_WATCHERS} watch this host, the most at once. Come again later."
            )
        self._watchers.add(peer)
        return [Send(peer, Welcome(0, int(self.patience_s * 1000), "")), ShowTo(peer)]

    def _on_wrote(self, member: WorkerRecord, wrote: Wrote) -> list[Effect]:
        """Shown now and then, however often it is told."""
        if self._wrote_at is not None and self.clock - self._wrote_at < WRITTEN_EVERY_S:
            return []
        self._wrote_at = self.clock
        prompt, text = ("\n".join(map(clean, told.splitlines())) for told in (wrote.prompt, wrote.text))
        return [Emit(Sampled(step=min(wrote.step, self.steps_done), prompt=prompt, text=text))]

    def on_heard(self, at: float, peer: int) -> None:
        """Notes that the peer is alive: any byte counts."""
        if (member := self.membership.members.get(peer)) is not None:
            member.hear(at)

    def on_closed(self, peer: int, why: str) -> list[Effect]:
        """The connection is gone, no matter which side closed it."""
        self._watchers.discard(peer)
        member = self.membership.remove(peer)
        self.weights.forget(peer)
        if member is None:
            return []
        has_fetched = member.kind == FETCHER and not member.is_refused
        went = WorkerWent(
            worker=member.worker_id,
            name=member.name,
            reason="it came for the script's arguments or the base model, and took no part"
            if has_fetched
            else member.goodbye or why,
            polite=member.leaving or has_fetched or self.finished is not None,
            workers=len(self.membership.ready),
            owed=bool(member.nodes),
            stack=member.stack,
            took_part=member.has_come,
            refused=member.is_refused,
        )
        effects: list[Effect] = [Emit(went), *self._hold_off(member)]
        effects += self.transfers.on_gone(peer)
        effects += self.evaluations.give_back(member)
        self.gatherings.give_back(member)
        effects += self.saving.pass_over(peer)
        effects += self.rounds.on_gone(member)
        effects += self.transfers.pass_over_leavers()
        effects += self.gatherings.settle()
        if member.is_ready and not self.membership.holders:
            effects += self.weights.on_nobody_holds(may_come_back=not member.leaving)
        return effects + self.ending.on_gone()

    def _hold_off(self, member: WorkerRecord) -> list[Effect]:
        """A worker that comes and goes in a loop is let in less and less often."""
        times, wait_s = self._returns.went(self.clock, member.address, member.name, member.came_at)
        if not wait_s or self.finished:
            return []
        doing = f"it has come and gone {times} times, each time within {self.patience_s:g} s, and is held off"
        return [stalled(member, doing, wait_s)]

    # What became of gradients

    def on_mean(self, step: int) -> list[Effect]:
        """Every part's average is formed, and on its way."""
        under = self.rounds.now
        if under is None or under.step != step or not under.is_reported:
            return []
        effects = self.weights.judge_changes()
        return effects if self.rounds.now is not under else effects + self.rounds.commit()

    # What became of checkpoints

    def on_saved(self, step: int, folder: str, error: str, size: int = 0, theirs: bool = False) -> list[Effect]:
        """`theirs`: what came is no checkpoint, so that its sender goes, and another is asked."""
        if theirs and self.saving.sender is not None:
            self.saving.is_writing = False
            return self.refuse(self.saving.sender, "bad checkpoint", error)
        return self.saving.on_saved(step, folder, error, size)

    def restored(self, standing: Position | None) -> list[Effect]:
        """The run resumes from the newest checkpoint, or from its beginning where there is none."""
        before = self.steps_done
        self.standing = standing or Position()
        self.previous, self.ahead, self.skipped = None, None, 0
        self.weights.is_restoring, self.expected = False, 0
        self.saving.on_restored()
        self.rounds.on_restored()
        self.digests.clear()
        self.evaluations.open.clear()
        self.gatherings.forget()
        effects = self.plain_peers.turn_away_all(
            "the run goes back to a checkpoint, and a plain peer cannot go with it"
        )
        if self.steps_done < before:
            effects.append(Emit(WentBack(from_step=before, step=self.steps_done)))
            effects += self.transfers.part_with_receivers()
        return effects + self.weights.on_restored(had=standing is not None)

    # Time

    def on_tick(self) -> list[Effect]:
        effects: list[Effect] = []
        for member in self.membership.late(self.clock, self.patience_s):
            why = f"silent for {member.silent_s(self.clock):.1f} s while {member.doing(self.standing)}"
            effects += self.close(member.peer, why)
        effects += self.stragglers.relieve()
        effects += self.stragglers.tell()
        effects += self.evaluations.on_tick()
        effects += self.gatherings.on_tick()
        effects += self.transfers.expire_slow()
        effects += self.saving.expire_slow()
        effects += self.ending.expire_slow()
        effects += self.saving.ask_again()
        effects += self.weights.on_tick()
        return effects + self.ending.finish()


_Hear = Callable[[Coordinator, WorkerRecord, Any], list[Effect]]
_HEAR: dict[type[Message], _Hear] = {
    Heartbeat: lambda core, member, beat: member.hear_stack(beat.node_id),  # no answer: a thousand may wait
    Ready: lambda core, member, ready: core.weights.on_ready(member, ready),
    BaseFiles: lambda core, member, asked: [SendBase(member.peer, asked)],
    BaseWanted: lambda core, member, asked: [SendBase(member.peer, asked)],
    SliceReport: lambda core, member, report: core.rounds.on_report(member, report),
    Applied: lambda core, member, applied: core.weights.on_applied(member, applied) + core.gatherings.settle(),
    EvaluateNext: lambda core, member, ask: core.evaluations.on_next(member, ask),
    Gather: lambda core, member, ask: core.gatherings.on_gather(member, ask),
    SaveDue: lambda core, member, due: core.saving.on_due(member, due),
    StateBegin: lambda core, member, begin: core.transfers.on_begin(member, begin),
    StateChunk: lambda core, member, chunk: core.transfers.on_chunk(member, chunk),
    Leave: lambda core, member, leave: core.ending.on_leave(member, leave),
    EndRun: lambda core, member, wish: core.ending.on_end_run(member, wish),
    Wrote: lambda core, member, wrote: core._on_wrote(member, wrote),
    Using: lambda core, member, using: member.hear_use(using),
}
"""Not of the object: a coordinator holds nothing but what it knows, so that it can be written down."""

Heard = dict[int, float]
"""Peer -> when a byte of it last came, by this machine's clock."""


def _tick(core: Coordinator, heard: Heard, waits_for: list[int]) -> list[Effect]:
    """`waits_for`: peers that have not taken the averages of the step before, which the next cannot replace."""
    core.note_tick()
    for peer, at in heard.items():
        core.on_heard(core.own_time(at), peer)
    return core.on_tick() + core.stragglers.part_with_silent(set(waits_for))


INPUTS: dict[str, Callable[..., list[Effect]]] = {
    "message": Coordinator.on_message,
    "closed": Coordinator.on_closed,
    "tick": _tick,
    "payload": lambda core, peer, step, node: core.rounds.on_payload(peer, step, tuple(node)),
    "bad": lambda core, peer, step, node, why: core.rounds.on_bad(peer, step, tuple(node), why),
    "loss": lambda core, peer, step, node, loss: core.rounds.on_plain_loss(peer, step, tuple(node), loss),
    "mean": Coordinator.on_mean,
    "taken": lambda core, peer, transfer: core.transfers.on_taken(peer, transfer),
    "saved": Coordinator.on_saved,
    "restored": Coordinator.restored,
    "order": lambda core, action, worker: core.orders.carry_out(action, worker),
    "stop": lambda core: core.ending.request_stop(),
    "fail": lambda core, sentence: [Finish(sentence, failed=True)],
}
"""Each call by which anything reaches the coordinator, by its name. The server, the tests' fleet and `potluck replay`
feed this table, so that what is written down of a run is all that its coordinator ever heard."""


def feed(core: Coordinator, now: float, name: str, *what: Any) -> list[Effect]:
    """`now`: by this machine's clock."""
    return INPUTS[name](core.at(core.pass_time(now)), *what)

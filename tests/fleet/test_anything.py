"""Whatever invited workers and plain peers send, in whatever order, with whatever figures: nothing fails or grows."""

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck.agree.policy import Async, Cadence, Sync
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import settings_of
from potluck.fleet.effects import AbandonStep, Effect, Finish, Record, Restore, SaveBegin, Send
from potluck.fleet.membership import WorkerPhase, WorkerRecord
from potluck.wire.codec import decode, encode, is_bulk
from potluck.wire.messages import (
    MESSAGES,
    MOST_NAME,
    PROTOCOL,
    SAVE,
    Applied,
    EvaluateNext,
    Gather,
    Heartbeat,
    Hello,
    JoinRequest,
    Kind,
    Leave,
    Message,
    Ready,
    SaveDue,
    SliceReport,
    StateBegin,
    StateChunk,
    layout,
)
from tests.fleet.virtual import SECRET, described

pytestmark = pytest.mark.timeout(120)
POLICIES = {"sync": Sync(), "cadence": Cadence.published(anchor=2), "async": Async.published(anchor=2)}
PEERS = 6
WITHOUT_GRADIENTS = [kind for kind in MESSAGES if not is_bulk(kind)]
ODD = [0.0, -0.0, 1.0, -1.0, 5e-324, 1e-30, 1e-9, 1e-6, 1e9, 1e15, 1e300, 1.7e308, math.inf, -math.inf, math.nan]
TEXTS = ["", "x", "w-7", "\x1b[2J\n", "é" * 50, "y" * 300, "{}", "[", '[["state", 1]]', '[["a", 1e999]]', "[" * 2000]


class Rogues:
    """Peers that send anything, with enough sense in it to come far; and what a server would tell of their payloads."""

    def __init__(self, seed: int, policy: str) -> None:
        self.draw = random.Random(seed)
        self.description = described(policy=policy, settings=settings_of(POLICIES[policy]))
        self.core = Coordinator(
            patience_s=10, secret=SECRET, plain_peers=self.draw.random() < 0.5, at_least=self.draw.randint(1, 2)
        )
        self.now = 100.0
        self.sums: set[int] = set()
        self.step = 0
        self.steps: list[int] = []
        self.finished = False
        self.saving: int | None = None
        self.sent = 0

    def live(self, events: int) -> None:
        acts: list[Callable[[], list[Effect]]] = [self.tick, self.close, self.payload, self.bad, self.saved, self.speak]
        for _ in range(events):
            self.now += self.draw.choice([0.0, 0.001, 0.01, 0.1, 1.0])
            if self.finished:
                return
            self.do(self.draw.choices(acts, [2, 0.3, 10, 0.1, 1, 20])[0]())
            self.check()

    # What comes in

    def tick(self) -> list[Effect]:
        return self.core.at(self.now).on_tick()

    def close(self) -> list[Effect]:
        return self.core.at(self.now).on_closed(self.draw.randrange(PEERS), "it went")

    def working(self) -> tuple[WorkerRecord, Any] | None:
        found = [(m, node) for m in self.core.membership.members.values() for node in m.nodes]
        return self.draw.choice(found) if found and self.core.now is not None else None

    def payload(self) -> list[Effect]:
        """All of a node is in the sums; once every slice is, and was reported, the mean is formed."""
        if (found := self.working()) is None:
            return []
        member, node = found
        under = self.core.now
        if not member.plain and not all(number in under.reports for number in range(*node)):
            return []  # the server hears of the report first
        if member.plain and self.draw.random() < 0.5:
            effects = self.core.at(self.now).rounds.on_plain_loss(member.peer, under.step, node, self.draw.choice(ODD))
            effects += self.core.at(self.now).rounds.on_payload(member.peer, under.step, node)
        else:
            effects = self.core.at(self.now).rounds.on_payload(member.peer, under.step, node)
        self.sums |= {*range(*node)}
        if under is self.core.now and len(self.sums) == under.slices == len(under.reports):
            effects += self.core.at(self.now).on_mean(under.step)
        return effects

    def bad(self) -> list[Effect]:
        if (found := self.working()) is None:
            return []
        return self.core.at(self.now).rounds.on_bad(found[0].peer, self.core.now.step, found[1], "is not finite")

    def saved(self) -> list[Effect]:
        if self.saving is None:
            return []
        step, self.saving = self.saving, None
        error = self.draw.choice(["", "", "it is no checkpoint"])
        return self.core.at(self.now).on_saved(
            step, "" if error else "a folder", error, 1, theirs=bool(error) and self.draw.random() < 0.5
        )

    def speak(self) -> list[Effect]:
        peer = self.draw.randrange(PEERS)
        member = self.core.membership.members.get(peer)
        is_sensible = self.draw.random() < 0.95
        message = self.sensible(member) if is_sensible else self.anything(self.draw.choice(WITHOUT_GRADIENTS))
        self.sent += 1
        return self.core.at(self.now).on_message(peer, decode(encode(message)[4:]), f"10.0.0.{peer % 3}")

    # Messages

    def sensible(self, member: WorkerRecord | None) -> Message:
        draw, step = self.draw, self.core.standing.version
        if member is None:
            name = draw.choice(["a", "b", "c-1", "c-2"])
            return draw.choice([Hello(PROTOCOL, SECRET, name, draw.choice("kl")), JoinRequest(name, 1, "cpu")])
        if member.plain:
            return Heartbeat("p", 1)
        if member.phase is WorkerPhase.GREETED:
            text = self.description.to_json() if draw.random() < 0.8 else self.odd_description()
            return Ready(text, draw.choice([0, step]), draw.choice(["", "same"]), draw.randint(0, 1))
        under = self.core.now
        mine = [number for node in member.nodes for number in range(*node)]
        figures = [draw.choice(ODD) if draw.random() < 0.02 else draw.uniform(0.1, 4) for _ in mine]
        busy_s = draw.choice(ODD) if draw.random() < 0.2 else draw.uniform(0.01, 1)
        batches = draw.choice([0, 1, 3, 2**32 - 1])
        report = SliceReport(
            under.step if under is not None else 1,
            np.array(mine, "<u4"),
            np.array([draw.choice([1.0, 2.0]) for _ in mine], "<f8"),
            np.array(figures, "<f8"),
            busy_s,
            b"",
            batches,
        )
        return draw.choice(
            [
                report,
                report,
                report,
                Applied(draw.choice([step, step, max(0, step - 1)]), "same", 0.1, 1.0, "", draw.choice(ODD)),
                Applied(step, draw.choice(["same", "other"]), 0.1, 1.0, "", 0.0),
                EvaluateNext(step, 10, 3, 0, 0, 0.0, 0.0),
                Gather(step, draw.choice([0, 0, 1]), draw.choice([1, 2]), draw.choice([b"", b"xx"])),
                self.answer(member) or Heartbeat("w", 1),
                SaveDue(step, draw.choice([0, 2, 2**32 - 1])),
                StateBegin(draw.choice([SAVE, *self.core.transfers.under_way]), step, '[["state", 5]]'),
                StateChunk(draw.choice([SAVE, *self.core.transfers.under_way]), b"xxxxx"),
                Leave(draw.randint(0, 1), "") if draw.random() < 0.1 else Heartbeat("w", 1),
            ]
        )

    def answer(self, member: WorkerRecord) -> EvaluateNext | None:
        if member.evaluating is None:
            return None
        (step, rows, size), start, end = member.evaluating
        return EvaluateNext(step, rows, size, start, end, self.draw.choice(ODD), self.draw.choice(ODD))

    def odd_description(self) -> str:
        table = json.loads(self.description.to_json())
        values = [0, -1, 1, 2**40, 10**4000, 0.5, 5e-324, math.inf, math.nan, "", None, True, [], {}]
        inside = self.draw.choice([table, table["settings"] or table, table["parts"][0]])
        inside[self.draw.choice(sorted(inside))] = self.draw.choice(values)
        return json.dumps(table)

    def anything(self, kind: type[Message]) -> Message:
        return kind(*(self.any_of(how) for _, how in layout(kind)))

    def any_of(self, how: Kind) -> Any:
        draw, step = self.draw, self.core.standing.version
        count = draw.choice([0, 1, 3])
        match how:
            case Kind.U8:
                return draw.choice([0, 1, 255])
            case Kind.U32:
                return draw.choice([0, 1, 7, 2**32 - 1])
            case Kind.U64:
                return draw.choice([0, 1, step, step + 1, 10, 2**40, 2**63, 2**64 - 1])
            case Kind.F32:
                return np.float32(draw.choice([0.0, 1.0, math.nan, math.inf]))
            case Kind.F64:
                return draw.choice(ODD)
            case Kind.STRING:
                return draw.choice([*TEXTS, SECRET, self.description.to_json()])
            case Kind.BYTES:
                return draw.randbytes(draw.choice([0, 1, 2, 5000]))
            case Kind.F32S:
                return np.zeros(count, np.float32)
            case Kind.U32S:
                return np.array([draw.choice([0, 1, 9, 2**32 - 1]) for _ in range(count)], "<u4")
            case Kind.F64S:
                return np.array([draw.choice(ODD) for _ in range(count)], "<f8")

    # What goes out, and what must hold

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    encode(effect.message)
                    if effect.credit is not None and self.draw.random() < 0.8:
                        self.do(self.core.at(self.now).transfers.on_taken(*effect.credit))
                case SaveBegin():
                    assert effect.step <= self.core.latest and 1 <= effect.keep_last <= 1000
                    self.saving = effect.step
                case Record():
                    self.record(effect)
                case Restore():
                    self.steps = []
                    self.do(self.core.at(self.now).restored(None))
                case Finish():
                    self.finished = True
        under = self.core.now
        if under is None or under.step != self.step or any(isinstance(effect, AbandonStep) for effect in effects):
            self.sums, self.step = set(), under.step if under is not None else 0

    def record(self, effect: Record) -> None:
        record = effect.step
        ranges = sorted((start, end) for start, end, _ in record.ranges)
        assert ranges[0][0] == record.row and ranges[-1][1] == record.row + record.rows <= self.core.description.rows
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        self.steps.append(record.step)

    def check(self) -> None:
        core, members = self.core, self.core.membership.members
        assert len(core.evaluations.open) <= len(members) and len(core.evaluations.done) <= 4
        assert len(core.digests.told) <= 4 and len(core.weights.waiting) <= len(members)
        assert all(not ready.description for _, ready in core.weights.waiting)
        assert {t.to for t in core.transfers.under_way.values()} <= {*members}
        assert len(core.transfers.under_way) <= 2 * len(members) and {peer for peer, _ in core.transfers.unpaid} <= {
            *members
        }
        assert core.saving.sender is None or core.saving.sender in members
        assert len(core.refused) < 30 and len(core._returns._known) <= 30
        for member in members.values():
            assert member.speed is None or 0 < member.speed < math.inf
            assert len(member.name) <= MOST_NAME
        if core.now is not None:
            nodes = [node for m in members.values() for node in m.nodes]
            given = {number for node in nodes for number in range(*node)} | {*core.now.computed_by}
            assert given == {*range(core.now.slices)}, "a slice is nobody's"
            assert core.now.rows <= core.description.rows


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_peers_send_the_coordinator_neither_fails_nor_grows(policy: str) -> None:
    sent = steps = 0
    for seed in range(20):
        rogues = Rogues(seed, policy)
        try:
            rogues.live(400)
        except BaseException as error:
            raise AssertionError(f"policy {policy}, seed {seed}, after {rogues.sent} messages") from error
        sent, steps = sent + rogues.sent, steps + len(rogues.steps)
    assert sent > 1500 and steps > 20, (sent, steps)

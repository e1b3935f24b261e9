"""What must hold after each event of a virtual run, whatever happened; it is found out by no code of the fleet."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from potluck.events import Decided, WentBack
from potluck.fleet.effects import StepRecord
from potluck.fleet.member import MemberPhase
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.stragglers import LONG
from potluck.fleet.tree import Node
from tests.fleet.virtual.fleet import Fleet
from tests.fleet.virtual.line import Line, Payload
from tests.fleet.virtual.process import Receive
from tests.fleet.virtual.toy import CHUNK, ROWS, SLICES, UNIT, Floats, loss_of
from tests.fleet.virtual.worker import Worker

IDLE_TIMES = 3
"""Times patience: longer than that nobody waits while there is work and somebody to do it."""
OFTEN_S = 0.1
"""How often waits are looked at."""


class Watch:
    def __init__(self, run: Fleet) -> None:
        self._run = run
        self._records: dict[int, StepRecord] = {}
        self._lives: dict[int, int] = {}
        """By step, how often the run had been restored when it was recorded."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Of each worker, the version that was compared, in which of the run's lives."""
        self._owed: dict[int, list[Node]] = {}
        """By peer, what those owed who hang."""
        self._hung: set[int] = set()
        """The peers that hung before what has just happened."""
        self._came: dict[tuple[int, Node], list[Floats]] = {}
        """By part and node, what has come of the step under way; twice, where a lost worker's was handed to another."""
        self._slices = 0
        """Of that step."""
        self._idle_since = self._waiting_since = run.clock.now
        self._waiting_in = 0, 0
        """The step in which somebody waits, and how many values were given to those who gather some."""
        self._looked_at = run.clock.now
        self.events = 0
        run.on_record = self._on_record
        run.on_parting = self._on_parting
        run.on_begin = self._on_begin
        run.on_payload = self._on_payload
        run.clock.after_each = self._look

    # After each event

    def _look(self) -> None:
        self.events += 1
        run = self._run
        members, agreed = run.core.membership.members, dict[int, Worker]()
        is_host_awake = run.host.is_up and not run.host.clock.is_stopped
        for worker in run.workers.values():
            if worker.dead or worker.done or worker.member.phase is not MemberPhase.IN or worker.line is None:
                continue
            assert worker.member.version == worker.state.step, f"{worker} thinks it is at {worker.member.version}"
            member = members.get(worker.line.peer)
            if member is None or not member.is_ready:
                continue
            self._look_at_burden(member)
            if member.applied == worker.state.step:
                self._look_at_weights(worker, agreed)
                self._look_at_place(worker)
            if member.nodes and is_host_awake and isinstance(worker.waits, Receive):
                is_told = not _knows_nothing(worker, worker.line)
                assert is_told, f"{worker} does not know of {member.nodes}: {run.describe()}"
        self._hung = {member.peer for member in members.values() if _hangs(member)}
        if not is_host_awake or run.core.now is None:
            self._idle_since = self._waiting_since = run.clock.now
        if is_host_awake and run.clock.now > self._looked_at + OFTEN_S:
            self._looked_at = run.clock.now
            self._look_at_transfers(members)
            if run.core.now is not None:
                self._look_for_idleness(run.core.membership.ready)

    def _look_at_weights(self, worker: Worker, agreed: dict[int, Worker]) -> None:
        """All of whom the host knows that they took a step hold the same weights after it."""
        step = worker.state.step
        other = agreed.setdefault(step, worker)
        now = (step, self._run.restores)
        if self._seen.get(worker.name) == now and self._seen.get(other.name) == now:
            return
        self._seen[worker.name] = now
        # A step with plain peers that is taken anew has other bits. The next may round them away from so few weights,
        # and not from their momentum: the host sees that the step after does differ.
        may_differ = self._run.plain and self._run.lost_at
        assert other.weights == worker.weights or may_differ, f"{other} and {worker} differ"
        is_right = not worker.is_like_sync or self._run.is_undisturbed(worker)
        assert is_right, f"{worker} has not the weights of one machine"

    def _look_at_place(self, worker: Worker) -> None:
        """Who has the run's weights has those of its rows, and no others."""
        standing, state = self._run.standing(), worker.state
        seen = state.epoch * ROWS + state.row
        assert state.step != standing.version or seen == standing.rows_seen, f"{worker} is not at {standing}"

    def _look_at_burden(self, member: WorkerRecord) -> None:
        """Nothing is given to one that hangs since an earlier step while another is there who does not."""
        under, before = self._run.core.now, self._owed.pop(member.peer, [])
        if under is None or not _hangs(member):
            return
        self._owed[member.peer] = list(member.nodes)
        if not all(node in before for node in member.nodes):
            others = [m for m in self._run.core.membership.holders if m.since <= under.step and not m.leaving]
            # Where all hang, all are given some, and one that was relieved of this very step counts again from then on.
            is_last_resort = all(_hangs(m) or (m.nodes and m.peer in self._hung) for m in others)
            assert is_last_resort, f"{member.name} hangs, and is given {member.nodes}: {self._run.describe()}"

    def _look_for_idleness(self, ready: Sequence[WorkerRecord]) -> None:
        """While a step is under way, somebody who is there, and stays, owes something of it; and nobody who could
        compute waits for long for one that computes nothing."""
        run, now = self._run, self._run.clock.now
        staying = [member for member in ready if not member.leaving]
        if not staying or any(member.nodes or member.evaluating for member in staying):
            self._idle_since = now
        computing = [member for member in staying if member.is_computing]
        under = run.core.now
        # Those whose speed is not known are measured by the slowest other; a window's slices are measured in rows.
        most = under.rows if under is not None and under.decision is not None else SLICES
        is_slow = any(m.speed and m.speed < most / run.patience_s for m in ready)
        step = under.step if under is not None else 0
        # Each step may wait for one that saves, or is far away: as long as one follows the other, nobody hangs. So may
        # those who gather values, from each one that gives its own to the next.
        given = sum(len({*found.first_ids.values()}) for found in run.core.gatherings.open.values())
        is_next, self._waiting_in = (step, given) != self._waiting_in, (step, given)
        if is_next or is_slow or not computing or not any(_is_free(run, member) for member in staying):
            self._waiting_since = now
        assert now - self._idle_since < IDLE_TIMES * run.patience_s, f"all wait: {run.describe()}"
        assert now - self._waiting_since < 2 * LONG * run.patience_s, f"some wait: {run.describe()}"

    def _look_at_transfers(self, members: dict[int, WorkerRecord]) -> None:
        """Nobody waits for weights from a worker that will never have them: one that leaves takes no other step."""
        for transfer in self._run.core.transfers.under_way.values():
            sponsor = members.get(transfer.sponsor) if transfer.sponsor is not None else None
            if sponsor is not None and sponsor.leaving and not transfer.is_whole:
                latest = self._run.standing().version
                assert transfer.step <= max(sponsor.applied, latest), f"{transfer} is from {sponsor}"

    # What the host does

    def _on_record(self, record: StepRecord) -> None:
        """Every row of the step was reported by somebody, and by one; and it follows the step before."""
        for later in [step for step in self._records if step >= record.step]:
            del self._records[later]  # the run has gone back: they never were
        reached = record.row
        for start, end, _ in sorted(record.ranges):
            assert start == reached, f"rows {reached} to {start} of step {record.step} are lost or used twice"
            reached = end
        assert reached == record.row + record.rows, f"rows from {reached} of step {record.step} are lost"
        described = self._run.core.description
        if described is not None and described.windowed is not None and not math.isnan(record.loss):
            losses = [loss_of(record.epoch, start, end) for start, end, _ in record.ranges]
            is_close = math.isclose(record.loss, math.fsum(losses) / record.rows, rel_tol=1e-6, abs_tol=1e-9)
            assert is_close, f"what was told of step {record.step} is of other rows"
            decided = next(event for event in reversed(self._run.events) if isinstance(event, Decided))
            if decided.anchor:  # else all took the step together, and its sums are of several slices
                self._look_at_mean(record)
        before = self._records.get(record.step - 1)
        if self._run.lost_at and self._lives.get(record.step - 1) != self._run.restores:
            before = (
                None  # the run may be back at a checkpoint of a step that the journal lost, and another took its number
            )
        place = (
            (before.epoch * ROWS + before.row + before.rows) if before is not None else record.rows_seen - record.rows
        )
        assert record.epoch * ROWS + record.row == place, f"{record} does not follow {before}"
        assert record.rows_seen == place + record.rows
        self._records[record.step] = record
        self._lives[record.step] = self._run.restores

    def _on_begin(self, slices: int) -> None:
        self._came.clear()
        self._slices = slices

    def _on_payload(self, payload: Payload) -> None:
        if np.isfinite(payload.gradients).all():
            self._came.setdefault((payload.part, payload.node), []).append(payload.gradients.copy())

    def _look_at_mean(self, record: StepRecord) -> None:
        """A window's mean is that of what came of each of its slices, once. Chunks of a lost worker's may be in it:
        those of the worker that computes the slice again are passed over then."""
        mean = self._run.host.exchange.mean
        assert mean is not None
        for part, result in enumerate(mean.results):
            came = [self._came_of(part, number) for number in range(0, self._slices, 2)]
            for at in range(0, len(result), CHUNK):
                chunks = [[values[at : at + CHUNK] for values in found if len(values) > at] for found in came]
                sums = (np.sum(found, axis=0) for found in itertools.product(*chunks))
                wanted = (total / np.float32(record.rows * UNIT) for total in sums)
                is_mean = any(np.allclose(result[at : at + CHUNK], found, rtol=1e-4, atol=1e-6) for found in wanted)
                assert is_mean, f"part {part} of window {record.step} is not the mean of what came"

    def _came_of(self, part: int, number: int) -> list[Floats]:
        """What came of a worker's part; or of what it did of it before it left, and of the rest, together."""
        whole, done, rest = (
            self._came.get((part, node), [])
            for node in ((number, number + 2), (number, number + 1), (number + 1, number + 2))
        )
        both = [a[: len(b)] + b[: len(a)] for a, b in itertools.product(done, rest)]
        return [*whole, *(both if rest else done)]  # without a rest the window ended there

    def _on_parting(self, line: Line, why: str) -> None:
        """Nobody is given up for a silence of the host's own: of its bytes, none came for a long time."""
        # Some of it may have come while the host did not run for a moment that its clock took for one too short to be
        # forgiven: then what counts is how long nothing had come when it last looked.
        ran_at = self._run.host.ran_at
        quiet_s = ran_at - max((at for at in line.arrivals if at <= ran_at), default=ran_at)
        # For averages that it has not taken, it is parted from once its silence is longer than its link's ever was.
        least_s = self._run.patience_s / (20 if "take averages" in why else 2)
        is_just = "silent for" not in why or quiet_s > least_s
        assert is_just, f"peer {line.peer} is {why}, and was heard of {quiet_s:.2f} s before the host looked last"

    # At the end

    def finish(self) -> None:
        """Every row of every epoch was used once, by the record of what the host wrote down."""
        run = self._run
        last = max(self._records)
        # Where the journal lost its last step, a checkpoint may be all that is left of it: a run that goes back to that
        # has as many rows as it says, and no record of them.
        done = run.standing() if run.lost_at else self._records[last]
        assert done.rows_seen == run.epochs * ROWS, f"{done.rows_seen} rows were seen, of {run.epochs * ROWS}"
        assert run.lost_at or sorted(self._records) == list(range(1, last + 1))
        # A step that a disk forgot, or before which the run went back, is computed again without its plain peers, whose
        # sums are in no tree: then those who hold the old one have in fact other bits, if not at once, for the toy's
        # weights may be the same while its momentum is not.
        are_others = run.plain and (run.lost_at or run.told(WentBack))
        assert are_others or not run.core.refused["drifted"], "weights were taken for wrong"


def _is_free(run: Fleet, member: WorkerRecord) -> bool:
    """It can compute, is heard, and was given nothing of the step under way, or has sent it."""
    under = run.core.now
    if under is not None and under.batch and not any(m.speed for m in run.core.membership.holders):
        return False  # nobody knows how long a window takes
    is_able = not member.plain and under is not None and member.since <= under.step
    # One that hangs is not free in the steps after that either, and must not hide that all the others compute.
    return is_able and not _hangs(member) and not member.nodes and not run.core.is_silent(member)


def _hangs(member: WorkerRecord) -> bool:
    """Others were given its work, and it has not applied that step yet."""
    return member.applied < member.relieved


def _knows_nothing(worker: Worker, line: Line) -> bool:
    """It waits, nothing is on its way to it or from it, and it has been given nothing that it could do."""
    is_waiting = not (worker.inbox or worker.unread or line.coming_down or line.coming_up or line.up)
    has_work = worker.member.work is not None or bool(worker.member._later)
    return is_waiting and line.is_open and not line.closing and not has_work and not worker.clock.is_stopped

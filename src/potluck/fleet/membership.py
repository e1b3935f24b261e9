"""Who is in, what each is doing, and who is late. Pure: the time comes in as an argument."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto

from potluck.agree.records import Position
from potluck.fleet.effects import Effect
from potluck.fleet.tree import Node
from potluck.wire.messages import Using
from potluck.wire.words import clean

Look = tuple[int, int, int]
"""An evaluation: (step, rows, rows of a range). A worker that names another set evaluates it alone."""

Call = tuple[int, int]
"""A gathering: (step, how many there were at that step before it)."""

LEAST_S = 1e-6
"""The least time that a slice can take."""


class WorkerPhase(Enum):
    """How far a worker has come. What it may send depends on it."""

    GREETED = auto()  # let in; it builds its model and its data
    CATCHING_UP = auto()  # it gets the run's weights, and the averages since
    READY = auto()  # it holds the run's weights and takes part


def beat_s(patience_s: float) -> float:
    """How long a worker of ours sends nothing at most: then it sends a Heartbeat."""
    return min(patience_s / 4, max(0.25, patience_s / 40))


PAUSE = 2
"""Times the longest silence between beats for which a host has not run before it judges anybody's, and then waits."""
WATCHED = 10
"""Times `patience` in which a link's lateness is remembered, at least."""
MOST_SILENT = 1024
"""Workers that were parted from and may come back, of whom something is remembered."""
MOST_LINES, MOST_OF_LINE = 20, 200
MOST_CORES = 1e5
"""The most lines, and characters of a line, that say where a worker is stuck."""
FETCHER = "base"
"""The kind of one who asks for the base model's files alone: it goes once it has them, and comes again as a worker."""
LATE = 3
"""Times the longest silence that a link has shown, after which a worker is taken for silent."""


@dataclass
class Lateness:
    """The longest silences on a worker's link while it took part: how late this link ever is, of late."""

    since: float | None = None
    began: float = 0.0
    longest_s: float = 0.0
    before_s: float = 0.0

    def note(self, now: float, silence_s: float) -> None:
        if self.since is None:
            self.since = self.began = now
        self.longest_s = max(self.longest_s, silence_s)

    def silence_limit_s(self, now: float, patience_s: float) -> float:
        """Half of `patience`; less where the link was watched for that long and was never nearly as late, but never so
        little that one which has nothing to say is taken for silent before its next heartbeat."""
        most_s = patience_s / 2
        if self.since is None or now - self.since < most_s:
            return most_s
        if now - self.began > WATCHED * patience_s:
            self.began, self.before_s, self.longest_s = now, self.longest_s, 0.0
        least_s = max(patience_s / 10, PAUSE * beat_s(patience_s))
        return min(most_s, max(least_s, LATE * max(self.longest_s, self.before_s)))


@dataclass
class WorkerRecord:
    """One worker, as the coordinator knows it. Its id is never used again."""

    peer: int
    worker_id: int
    name: str
    kind: str
    plain: bool
    """Speaks the published eleven messages and no other."""
    heard_at: float
    came_at: float
    address: str = ""
    """The address of its machine."""
    uses: dict[str, float] = field(default_factory=dict)
    """Figures of its machine's use, as it told them last; for people alone."""
    phase: WorkerPhase = WorkerPhase.GREETED
    applied: int = 0
    """The last step that its optimizer has taken."""
    since: int = 1
    """The first step whose average it gets."""
    held: int = -1
    """The step whose weights it came with, where they are the run's."""
    speed: float | None = None
    """Slices per second, smoothed."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes of the step under way that it has been given, and has not wholly sent."""
    reported: set[int] = field(default_factory=set)
    """Slices of that whose samples and loss it has told."""
    working_since: float = 0.0
    evaluating: tuple[Look, int, int] | None = None
    """The evaluation that it works on, the first row, and the last + 1."""
    evaluating_since: float = 0.0
    looks: tuple[int, int] = (0, 0)
    """(step, how many sets it began to look at there)"""
    gathering: Call | None = None
    """The gathering for which it has given a value, and waits."""
    gathered: Call = (-1, -1)
    """The last one that it gave a value for."""
    passed_over: Call = (-1, -1)
    """The last one in which the others continued without its value. None waits for it before it has got there."""
    overflowed: set[int] = field(default_factory=set)
    """Steps in which a gradient of its had no room in fp16, as it told."""
    assigned: int = 0
    """For a plain peer, the last step in which it was given rows. It bears one assignment a step."""
    relieved: int = 0
    """The last step in which its slices were given to others. It gets no work before it has applied that step."""
    relieved_amount: float = 0.0
    """Amount of work that was taken from it, as its speed is measured."""
    relieved_of: str = ""
    """Phase that it was in when that happened."""
    leaving: bool = False
    goodbye: str = ""
    """Why it leaves, as it said itself."""
    let_go: bool = False
    """By a person, and not by itself."""
    shut_at: float | None = None
    """When it was told that the run is over for it."""
    warned_at: float = 0.0
    has_come: bool = False
    """It has taken part."""
    is_refused: bool = False
    """It goes since the host has turned it away."""
    stack: str = ""
    """Where its training thread was when it had done nothing for half of patience, as it told, until it does more."""
    lateness: Lateness = field(default_factory=Lateness)

    @property
    def is_ready(self) -> bool:
        return self.phase is WorkerPhase.READY

    @property
    def is_relieved(self) -> bool:
        """It hangs, or is far behind: where there is anybody else, nothing is given to it."""
        return self.applied < self.relieved

    @property
    def is_computing(self) -> bool:
        """Whether some of its work is not reported yet."""
        return not all(self.reported.issuperset(range(*node)) for node in self.nodes)

    def hear(self, at: float) -> None:
        """Something of it was heard, if only a heartbeat."""
        if self.is_ready:  # before that it builds its model, and may beat late
            self.lateness.note(at, at - self.heard_at)
        self.heard_at = max(at, self.heard_at)

    def hear_stack(self, words: str) -> list[Effect]:
        """Keep where it is stuck, if its heartbeat says so: behind its name and a line break, in any words."""
        _, *lines = words.splitlines()
        self.stack = "\n".join(clean(line, MOST_OF_LINE) for line in lines[:MOST_LINES]) or self.stack
        return []

    def hear_use(self, using: Using) -> list[Effect]:
        """Keep how much of its machine it uses, as numbers that people can be shown."""
        if all(0 <= figure <= MOST_CORES for figure in (using.cores, using.gpu)):  # else it is no number, or nonsense
            self.uses = {each.name: getattr(using, each.name) for each in fields(using)}
        return []

    def silent_s(self, now: float) -> float:
        """The published worker sends no heartbeats: its silence counts only while it owes something."""
        if self.plain:
            return now - max(self.heard_at, self.working_since) if self.nodes else 0.0
        return now - self.heard_at

    def measure(self, slices: float, busy_s: float) -> None:
        """`busy_s` is its own report: a worker that claims to need no time at all would be given everything, forever.
        Of no slices, nothing is learned."""
        if 0 < busy_s < math.inf and slices:
            speed = slices / max(busy_s, LEAST_S * slices)
            self.speed = speed if self.speed is None else 0.7 * self.speed + 0.3 * speed

    def doing(self, standing: Position) -> str:
        """Say what it is doing, for a person who waits for it."""
        if self.is_relieved:  # the others are further by now
            return self.relieved_of
        if self.phase is WorkerPhase.GREETED:
            return "building its model"
        if self.phase is WorkerPhase.CATCHING_UP:
            return "catching up"
        if self.evaluating:
            return "evaluating"
        if self.gathering:
            return "gathering values"
        if self.applied < standing.version and not self.plain:
            return f"applying step {standing.step:,}"
        if self.is_computing:
            return "computing its gradient"
        return "sending its gradient" if self.nodes else "waiting for the others"


class Membership:
    def __init__(self, next_id: int = 0) -> None:
        self.members: dict[int, WorkerRecord] = {}
        self.next_id = next_id
        self._found: tuple[list[WorkerRecord], list[WorkerRecord]] | None = None
        """Who is ready and who is inside; None: somebody has come, gone or changed since they were looked for."""
        self._silent: dict[tuple[str, str], float] = {}
        """When those were last heard who were parted from for a silence shorter than patience."""

    def add(self, now: float, peer: int, name: str, kind: str, *, plain: bool, address: str = "") -> WorkerRecord:
        member = WorkerRecord(peer, self.next_id, name, kind, plain, heard_at=now, came_at=now, address=address)
        if (heard_at := self._silent.pop((address, name), None)) is not None:
            member.lateness.note(now, now - heard_at)
        self.next_id += 1
        self._found = None
        self.members[peer] = member
        return member

    def remember_silence(self, member: WorkerRecord) -> None:
        """For when it comes back: it is not to be parted from again for a silence that it outlives."""
        self._silent[member.address, member.name] = member.heard_at
        while len(self._silent) > MOST_SILENT:
            del self._silent[next(iter(self._silent))]

    def remove(self, peer: int) -> WorkerRecord | None:
        self._found = None
        return self.members.pop(peer, None)

    def admit(self, member: WorkerRecord) -> None:
        member.phase = WorkerPhase.READY
        self._found = None

    def set_back(self, member: WorkerRecord) -> None:
        """It gets the run's weights, and does not take part before it has them."""
        member.phase = WorkerPhase.CATCHING_UP
        self._found = None
        member.relieved = 0  # the step may never be applied: the run may go back to before it

    @property
    def ready(self) -> list[WorkerRecord]:
        """In order of their ids."""
        return self._find()[0]

    @property
    def inside(self) -> list[WorkerRecord]:
        """Members that are ready, or about to be: all but the greeted."""
        return self._find()[1]

    def _find(self) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Once for all who ask: there may be a thousand who only wait."""
        if self._found is None:
            inside = sorted(
                (m for m in self.members.values() if m.phase is not WorkerPhase.GREETED), key=lambda m: m.worker_id
            )
            self._found = [m for m in inside if m.is_ready], inside
        return self._found

    @property
    def holders(self) -> list[WorkerRecord]:
        """Members that can give the run's weights to others."""
        return [member for member in self.ready if not member.plain]

    def late(self, now: float, patience_s: float) -> list[WorkerRecord]:
        return [member for member in self.members.values() if member.silent_s(now) > patience_s]


def unique_names(members: Sequence[WorkerRecord]) -> list[str]:
    """Their names, each with its id where there are two of one name."""
    counts = Counter(member.name for member in members)
    return [m.name if counts[m.name] == 1 else f"{m.name} ({m.worker_id})" for m in members]


def slices_of(nodes: Sequence[Node]) -> list[int]:
    return [number for node in nodes for number in range(*node)]

"""The ranks of a node as one worker of a host: the first rank talks to the host, and passes on what it hears.

Every rank of the node runs the same engine over this, in place of a client of its own, and calls the same methods in
the same order. So all of them hear the same, and do the same between two gathers of the model: work, commits, stops,
requests for state, a lost connection. Nothing that is told is pickled.
"""

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, auto

import torch

from potluck.coded_numbers import Floats, Octets
from potluck.engine.node_sums import NodeParts, ranges_in_part
from potluck.errors import ConfigError, PotluckError, WorkerLost
from potluck.fleet.client import AverageReady, Client, Means
from potluck.fleet.description import Description, Part
from potluck.fleet.host_connector import CONTROL_BYTES
from potluck.fleet.member import ConnectionLost
from potluck.link.link import GroupLink
from potluck.sharding.runs import FlatRun
from potluck.tensor_bytes import from_bytes, to_bytes
from potluck.wire.codec import decode, encode
from potluck.wire.messages import Admitted, Message, StateChunk, Welcome

BEAT_S = 1.0
"""The first rank says at least this often that it is still waiting: else a group would give it up."""
PREFIX_BYTES = 4


class NodeMessage(IntEnum):
    """Kinds of messages that the first rank passes on to the others."""

    WAIT = auto()  # it keeps waiting
    NOTHING = auto()  # nothing came in time
    MESSAGE = auto()
    CHUNK = auto()  # of a state that the first rank writes down: how long it is
    AVERAGE = auto()  # of which part of which step; the numbers follow
    LOST = auto()
    FAILED = auto()


class NodeClient:
    def __init__(self, client: Client | None, link: GroupLink, *, name: str) -> None:
        """`client`: the first rank's, which has joined already. All ranks of the node make this together."""
        self._client = client
        self._link = link
        self.name = name
        self.wants_stop = False
        """This rank's wish; on_stop is called on every rank once all have heard of it."""
        self.on_stop: Callable[[], None] = lambda: None
        self.parts: NodeParts | None = None
        self.is_closed = False
        self._description: Description | None = None
        self._means: dict[int, Means] = {}
        """This rank's own numbers of averages."""
        self._since = 0
        self._kept: deque[Message] = deque()
        """Heard while only averages were wanted."""
        self.welcome = self._begin(lambda: client.welcome if client is not None else None)

    @property
    def description(self) -> Description | None:
        return self._description

    @description.setter
    def description(self, described: Description) -> None:
        self._description = described
        if self._client is not None:
            self._client.description = described

    @property
    def worker_id(self) -> int:
        return self.welcome.worker_id

    @property
    def patience_s(self) -> float:
        return self.welcome.patience_ms / 1000

    def ask_to_stop(self) -> None:
        """All ranks hear of the wish with the next message."""
        self.wants_stop = True

    def say(self, sentence: str) -> None:
        """Says it once per node."""
        if self._client is not None:
            self._client.say(sentence)

    # Connecting

    def connect(self, *, again: bool = False) -> Welcome:
        client = self._client
        self.welcome = self._begin(lambda: client.connect(again=again) if client is not None else None)
        return self.welcome

    def _begin(self, join: Callable[[], Welcome | None]) -> Welcome:
        """A new connection has begun: what was heard over the last one is discarded."""
        self._kept.clear()
        self._means.clear()
        heard = self._on_first(join)
        assert isinstance(heard, Welcome)
        self.session: object = self._client.session if self._client is not None else object()
        """Changes with each connection."""
        return heard

    def _on_first(self, work: Callable[[], Message | None]) -> Message:
        """Do something on the first rank, however long it takes, and return its result on every rank."""
        results: list[Message | None] = []
        failed: list[PotluckError] = []

        def run() -> None:
            try:
                results.append(work())
            except PotluckError as error:
                failed.append(error)

        if self._link.rank == 0:
            # A thread, so that the other ranks hear meanwhile that they are to wait: a collective would time out.
            thread = threading.Thread(target=run, name="node's first rank", daemon=True)
            thread.start()
            while thread.is_alive():
                thread.join(BEAT_S)
                if thread.is_alive():
                    self._tell(NodeMessage.WAIT)
            if failed:
                self._tell(NodeMessage.FAILED, json.dumps([failed[0].exit_code, str(failed[0])]).encode())
                raise failed[0]
            assert results and results[0] is not None
            self._tell(NodeMessage.MESSAGE, encode(results[0])[PREFIX_BYTES:])
            return results[0]
        while True:
            kind, data = self._tell()
            if kind is NodeMessage.FAILED:
                code, sentence = json.loads(data)
                kinds = {kind.exit_code: kind for kind in (ConfigError, WorkerLost)}
                raise kinds.get(code, PotluckError)(sentence)
            if kind is NodeMessage.MESSAGE:
                return decode(data)

    def close(self) -> None:
        self.is_closed = True
        if self._client is not None:
            self._client.close()

    # Sending: the first rank's alone

    def collect_parts(
        self,
        parts: Sequence[Part],
        held: Sequence[Sequence[FlatRun]],
        wholes: Sequence[Part],
        norms_on: torch.device | None = None,
    ) -> NodeParts:
        """How parts are put together here, and their means handed out. `held`: what this rank holds of each of them;
        of `wholes` it has all."""
        own = [*map(ranges_in_part, held), *([(0, part.floats)] for part in wholes)]
        if self._client is not None:
            self._client.make_room(max(part.floats for part in parts))
            self._client.take_averages_one_by_one()
        self.parts = NodeParts(
            self._link, [*parts, *wholes], own, self._allocate, before_next=self.flush, norms_on=norms_on
        )
        return self.parts

    def _allocate(self, floats: int) -> torch.Tensor:
        assert self._client is not None
        return torch.from_numpy(self._client.allocate(floats))

    def send(self, message: Message) -> None:
        if self._client is not None:
            self._client.send(message)

    def send_part(self, step: int, part: int, gradients: Floats, before: Callable[[], None] | None = None) -> None:
        if self._client is not None:
            self._client.send_part(step, part, gradients, before)

    def send_coded(self, step: int, part: int, coded: Octets, before: Callable[[], None] | None = None) -> None:
        if self._client is not None:
            self._client.send_coded(step, part, coded, before)

    def send_parcel(
        self, session: object, begin: Message, transfer: int, chunks: Iterator[bytes], done: Callable[[], None]
    ) -> None:
        if self._client is not None:
            self._client.send_parcel(session, begin, transfer, chunks, done)

    def flush(self) -> None:
        if self._client is not None:
            self._client.flush()

    # Receiving: on every rank alike

    def receive(self, timeout_s: float | None = None) -> Message | ConnectionLost | None:
        if self._kept:
            return self._kept.popleft()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            kind, data, first = self._next(deadline)
            match kind:
                case NodeMessage.NOTHING:
                    return None
                case NodeMessage.LOST:
                    return ConnectionLost(data.decode())
                case NodeMessage.MESSAGE:
                    return self._heard(first or decode(data))
                case NodeMessage.CHUNK:
                    return first or StateChunk(*_blank_chunk(data))

    def take_means(self, step: int, without: frozenset[int] = frozenset()) -> Means | None:
        """This rank's own numbers of a step's averages, once all are here; none if the connection was lost before."""
        while True:
            found = self._means.get(step)
            if found is not None and found.missing <= without:
                self._forget_until(step)
                return found
            kind, data, first = self._next(None)
            if kind is NodeMessage.LOST:
                return None  # the next caller hears it again
            if kind is NodeMessage.MESSAGE:
                self._kept.append(self._heard(first or decode(data)))
            elif kind is NodeMessage.CHUNK:
                self._kept.append(first or StateChunk(*_blank_chunk(data)))

    def give_back(self, means: Means) -> None:
        """Nothing to do: they are small, and allocated each time."""

    def pass_over_until(self, step: int) -> None:
        self._since = step
        self._forget_until(step)
        if self._client is not None:
            self._client.pass_over_until(step)

    def _forget_until(self, step: int) -> None:
        for old in [number for number in self._means if number <= step]:
            del self._means[old]

    def _heard(self, message: Message) -> Message:
        if isinstance(message, Admitted) and message.wait:  # as a client does: other weights come, and other averages
            self._means.clear()
            self._since = message.step
        return message

    def _next(self, deadline: float | None) -> tuple[NodeMessage, bytes, Message | None]:
        """Return what the first rank hears next; there, the message itself comes with it. Averages are taken in
        here."""
        found: Message | ConnectionLost | AverageReady | None = None
        if self._client is not None:
            left = None if deadline is None else deadline - time.monotonic()
            found = self._client.receive_any(BEAT_S if left is None else max(0.0, min(BEAT_S, left)))
        match found:
            case None:
                is_over = deadline is not None and time.monotonic() >= deadline
                kind, data = self._tell(NodeMessage.NOTHING if is_over else NodeMessage.WAIT)
            case ConnectionLost():
                kind, data = self._tell(NodeMessage.LOST, found.why.encode())
            case AverageReady():
                kind, data = self._tell(NodeMessage.AVERAGE, struct.pack("<QQ", found.step, found.part))
            case StateChunk():
                kind, data = self._tell(NodeMessage.CHUNK, struct.pack("<QQ", found.transfer, len(found.data)))
            case _:
                kind, data = self._tell(NodeMessage.MESSAGE, encode(found)[PREFIX_BYTES:])
        if kind is NodeMessage.AVERAGE:
            step, part = struct.unpack("<QQ", data)
            self._take_in(step, part, found.floats if isinstance(found, AverageReady) else None)
        return kind, data, found if isinstance(found, Message) else None

    def _take_in(self, step: int, part: int, floats: Floats | None) -> None:
        assert self.parts is not None and self._description is not None
        own = self.parts.hand_out(part, torch.from_numpy(floats) if floats is not None else None)
        if self._client is not None:
            self._client.release_average()
        if step <= self._since:
            return
        count = len(self._description.parts)
        means = self._means.setdefault(step, Means(step, [_EMPTY] * count, set(range(count))))
        means.parts[part] = own.numpy()
        means.missing.discard(part)

    def _tell(self, kind: NodeMessage = NodeMessage.WAIT, data: bytes = b"") -> tuple[NodeMessage, bytes]:
        """The first rank's words, on every rank. Whether anybody wishes to stop is heard with them."""
        rows = self._link.gather_rows([float(kind), float(len(data)), float(self.wants_stop)])
        if any(row[2] for row in rows):
            self.on_stop()
        kind, size = NodeMessage(int(rows[0][0])), int(rows[0][1])
        if not size:
            return kind, b""
        if size > CONTROL_BYTES:
            raise PotluckError(f"The node's first rank tells {size:,} bytes at once, more than {CONTROL_BYTES:,}.")
        content = torch.empty(size, dtype=torch.uint8)
        if self._link.rank == 0:
            content = from_bytes(data)
        self._link.broadcast(content)
        return kind, to_bytes(content)


_EMPTY = torch.empty(0).numpy()


def _blank_chunk(data: bytes) -> tuple[int, bytes]:
    """Make a chunk of zeros: its content is the first rank's to write down, and the others only count."""
    transfer, size = struct.unpack("<QQ", data)
    return transfer, bytes(min(size, CONTROL_BYTES))

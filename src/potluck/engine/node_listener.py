"""NodeListener: the ranks of a node as one worker of a host: the first talks to it, and passes on what it hears.

Every rank of the node runs the same engine over this, and calls the same methods in the same order. So all of them hear
the same, and do the same between two gathers of the model: work, commits, stops, requests for state, a lost connection.
What they send is the first rank's to send: the clients of the others have no connection. Nothing that is told is
pickled.
"""

import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum, auto

import torch

from potluck.errors import ConfigError, PotluckError, WorkerLost
from potluck.fleet.client import Average, Client
from potluck.fleet.description import Part
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.host_connector import CONTROL_BYTES
from potluck.fleet.listener import Listener, Means
from potluck.link.link import GroupLink
from potluck.sharding.runs import FlatRun
from potluck.sums.node_sums import NodeParts, ranges_in_part
from potluck.tensor_bytes import from_bytes, to_bytes
from potluck.wire.codec import decode, encode
from potluck.wire.messages import Message, StateChunk, Welcome

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


class NodeListener(Listener):
    def __init__(self, client: Client, link: GroupLink) -> None:
        """`client`: the first rank's has joined already. All ranks of the node make this together."""
        super().__init__(client)
        self._link = link
        self._parts: NodeParts | None = None
        client.welcome = self._on_first(lambda: client.welcome)

    def ask_to_stop(self) -> None:
        """All ranks hear of the wish with the next message."""
        self.wants_stop = True

    # Connecting

    def _connect(self) -> Welcome:
        self.client.welcome = welcome = self._on_first(super()._connect)
        return welcome

    def _on_first(self, join: Callable[[], Welcome | None]) -> Welcome:
        """Join on the first rank, however long it takes, and return its welcome on every rank."""
        joined: list[Welcome | None] = []
        failed: list[PotluckError] = []

        def run() -> None:
            try:
                joined.append(join())
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
            assert joined and joined[0] is not None
            self._tell(NodeMessage.MESSAGE, encode(joined[0])[PREFIX_BYTES:])
            return joined[0]
        while True:
            kind, data = self._tell()
            if kind is NodeMessage.FAILED:
                code, sentence = json.loads(data)
                kinds = {kind.exit_code: kind for kind in (ConfigError, WorkerLost)}
                raise kinds.get(code, PotluckError)(sentence)
            if kind is NodeMessage.MESSAGE:
                welcome = decode(data)
                assert isinstance(welcome, Welcome)
                return welcome

    # Parts

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
        client, described = self.client, [*parts, *wholes]
        if self._link.rank == 0:
            client.make_room(max(part.floats for part in parts))
            client.take_averages_one_by_one(max(part.floats for part in described))

        def allocate(floats: int) -> torch.Tensor:
            return torch.from_numpy(client.allocate(floats))

        self._parts = NodeParts(self._link, described, own, allocate, before_next=client.flush, norms_on=norms_on)
        return self._parts

    def give_back(self, means: Means) -> None:
        """Nothing to do: they are small, and allocated each time."""

    # What the first rank hears, on every rank

    def _next(self, deadline: float | None) -> Message | Average | ConnectionLost | None:
        while True:
            heard: Message | Average | ConnectionLost | None = None
            if self._link.rank == 0:
                left = BEAT_S if deadline is None else deadline - time.monotonic()
                heard = self.client.receive(max(0.0, min(BEAT_S, left)))
            match heard:
                case None:
                    is_over = deadline is not None and time.monotonic() >= deadline
                    kind, data = self._tell(NodeMessage.NOTHING if is_over else NodeMessage.WAIT)
                case ConnectionLost():
                    kind, data = self._tell(NodeMessage.LOST, heard.why.encode())
                case Average():
                    kind, data = self._tell(NodeMessage.AVERAGE, struct.pack("<QQ", heard.step, heard.part))
                case StateChunk():
                    kind, data = self._tell(NodeMessage.CHUNK, struct.pack("<QQ", heard.transfer, len(heard.data)))
                case _:
                    kind, data = self._tell(NodeMessage.MESSAGE, encode(heard)[PREFIX_BYTES:])
            match kind:
                case NodeMessage.NOTHING:
                    return None
                case NodeMessage.LOST:
                    return ConnectionLost(data.decode())
                case NodeMessage.AVERAGE:
                    step, part = struct.unpack("<QQ", data)
                    return self._hand_out(step, part, heard)
                case NodeMessage.CHUNK:
                    return heard or _blank_chunk(*struct.unpack("<QQ", data))
                case NodeMessage.MESSAGE:
                    return heard or decode(data)

    def _hand_out(self, step: int, part: int, heard: Message | Average | ConnectionLost | None) -> Average:
        """This rank's own numbers of an average that the first rank has all of."""
        assert self._parts is not None
        if not isinstance(heard, Average):
            return Average(step, part, self._parts.hand_out(part, None).numpy())
        own = self._parts.hand_out(part, torch.from_numpy(heard.floats))
        self.client.release(heard)
        return Average(step, part, own.numpy())

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


def _blank_chunk(transfer: int, size: int) -> StateChunk:
    """Make a chunk of zeros: its content is the first rank's to write down, and the others only count."""
    return StateChunk(transfer, bytes(min(size, CONTROL_BYTES)))

"""How things stand in a host at this moment, for the page: what no event tells, such as how long a worker is silent."""

from collections.abc import Collection, Mapping
from typing import Any

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.exchange import PeerConnection
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.pipe import Pipe

MOST_TOLD = 2000
"""Workers that are told of."""


class Travelled:
    """Bytes of messages between a host and all who take part, also those who are gone."""

    def __init__(self) -> None:
        self._before = (0, 0, 0)
        self._pipes: dict[int, Pipe] = {}

    def add(self, peer: int, pipe: Pipe) -> None:
        self._pipes[peer] = pipe

    def count(self, here: Collection[int]) -> tuple[int, int, int]:
        """Sent, received, and spared by codings. `here`: who is still there. Numbers in shared memory do not travel."""
        for peer in [peer for peer in self._pipes if peer not in here]:
            self._before = _sum(self._before, self._pipes.pop(peer))
        found = self._before
        for pipe in self._pipes.values():
            found = _sum(found, pipe)
        return found


def _sum(before: tuple[int, int, int], pipe: Pipe) -> tuple[int, int, int]:
    sent, received, spared = before
    spared += pipe.spared_sent_bytes + pipe.spared_received_bytes
    return sent + pipe.sent_bytes, received + pipe.received_bytes, spared


def standing_now(
    core: Coordinator, connections: Mapping[int, PeerConnection], travelled: Travelled, clock: float, time: float
) -> dict[str, Any]:
    """Under the server's lock. `clock`: the coordinator's; `time`: everybody's."""
    members = list(core.membership.members.values())
    sent, received, spared = travelled.count(connections.keys())
    return {
        "time": round(time, 3),
        "step": core.steps_done,
        "paused": core.paused,
        "saving": core.saving.is_under_way,
        "waits_for": max(0, core.at_least - len(core.membership.ready)) if not core.standing.version else 0,
        "members": len(members),
        "bytes": {"sent": sent, "received": received, "saved": spared},
        "workers": [_row(core, member, connections, clock) for member in members[:MOST_TOLD]],
    }


def _row(
    core: Coordinator, member: WorkerRecord, connections: Mapping[int, PeerConnection], clock: float
) -> dict[str, Any]:
    connection = connections.get(member.peer)
    rtt_s = connection.pipe.rtt_s if connection is not None and member.address else None
    return {
        "id": member.worker_id,
        "name": member.name,
        "kind": member.kind,
        "phase": "leaving" if member.leaving else member.phase.name.lower(),
        "doing": member.doing(core.standing.version),
        "silent_s": round(max(0.0, member.silent_s(clock)), 2),
        "address": member.address,
        **({"rtt_s": rtt_s} if rtt_s is not None else {}),
    }

"""Peers that speak the eleven published messages and no other: who of them may take part, and when they must go. Pure.

step_dispatcher.py and planning.py give them their part of a step: there they are workers that are asked for less.
"""

from dataclasses import dataclass

from potluck.fleet import bounds
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.description import BUFFERS
from potluck.fleet.effects import Effect, Send, Subscribe
from potluck.fleet.rejoin_limiter import RejoinLimiter
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.wire.messages import JoinAccepted, JoinRequest, Shutdown


@dataclass
class PlainPeers:
    run: CoordinatorState
    rounds: StepDispatcher
    returns: RejoinLimiter
    are_welcome: bool
    """They show no secret, so that only a host that asks nobody for one lets them in."""

    def on_join_request(self, peer: int, request: JoinRequest, address: str) -> list[Effect]:
        run = self.run
        if not self.are_welcome:
            return run.refuse(peer, "plain peer", "")
        if self.returns.wait_s(run.clock, address, request.node_id):
            return run.refuse(peer, "too soon", "")
        if len(run.membership.members) >= bounds.MOST_WORKERS:
            return run.refuse(peer, "too many", "")
        if run.standing.version or run.finished:
            return self._turn_away(peer, "a plain peer cannot be given the weights, and the run is on")
        if (why := self._why_none) is not None:
            return self._turn_away(peer, why)
        kind = f"plain {request.backend}"
        member = run.membership.add(run.clock, peer, request.node_id, kind, plain=True, address=address)
        run.membership.admit(member)
        return [
            Send(peer, JoinAccepted(member.worker_id, max(run.at_least, len(run.membership.ready)))),
            Subscribe(peer, 1),
            run.came(member),
            *self.rounds.give_nothing(member),  # if the first step is under way: its average will come to it too
            *self.rounds.start(),
        ]

    @property
    def _why_none(self) -> str | None:
        """Say what keeps the published worker from taking part in this run; None if nothing does."""
        described = self.run.description
        if described is None:
            return None
        if described.windowed is not None:
            return f"a plain peer trains under sync alone, and this run's policy is {described.policy}"
        if described.turns > 1:
            return "a plain peer has one optimizer, and this run has several, which step in turns"
        if any(part.component == BUFFERS for part in described.parts):
            return "a plain peer cannot send buffers, such as running statistics, and this run's model has some"
        return None

    def skip(self, step: int) -> list[Effect]:
        """It is computed again: they were sent its average before, and would apply it twice."""
        plain = [m for m in self.run.membership.members.values() if m.plain]
        for member in plain:
            member.since = step + 1
        return [Subscribe(member.peer, step + 1) for member in plain]

    def on_described(self) -> list[Effect]:
        why = self._why_none
        return self.turn_away_all(why) if why is not None else []

    def turn_away_all(self, why: str) -> list[Effect]:
        plain = [m.peer for m in self.run.membership.members.values() if m.plain]
        return [effect for peer in plain for effect in self._turn_away(peer, why)]

    def _turn_away(self, peer: int, why: str) -> list[Effect]:
        """It knows no message to hear why; the host's log has it. It is not lost: it does as it is told."""
        self.run.refused["plain peer"] += 1
        if (member := self.run.membership.members.get(peer)) is not None:
            member.leaving = True
        return [Send(peer, Shutdown()), *self.run.close(peer, why)]

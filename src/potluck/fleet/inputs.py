"""Inputs: each call by which anything reaches the coordinator, by its name. Pure.

The server, the tests' fleet and `potluck replay` feed the same table, so that what is written down of a run is all that
its coordinator ever heard, and leads to the same decisions again.
"""

from collections.abc import Callable
from typing import Any

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.effects import Effect, Finish

Heard = dict[int, float]
"""Peer -> when a byte of it last came."""


def _heard(core: Coordinator, now: float, peer: int) -> list[Effect]:
    core.on_heard(now, peer)
    return []


def _tick(core: Coordinator, now: float, heard: Heard, waits_for: list[int]) -> list[Effect]:
    """`waits_for`: peers that have not taken the averages of the step before, which the next cannot replace."""
    for peer, at in heard.items():
        core.on_heard(at, peer)
    return core.on_tick(now) + core.stragglers.part_with_silent(set(waits_for))


INPUTS: dict[str, Callable[..., list[Effect]]] = {
    "message": lambda core, now, peer, message, address="": core.on_message(now, peer, message, address),
    "closed": lambda core, now, peer, why: core.on_closed(now, peer, why),
    "heard": _heard,
    "tick": _tick,
    "payload": lambda core, now, peer, step, node: core.at(now).rounds.on_payload(peer, step, tuple(node)),
    "bad": lambda core, now, peer, step, node, why: core.at(now).rounds.on_bad(peer, step, tuple(node), why),
    "loss": lambda core, now, peer, step, node, loss: core.at(now).rounds.on_plain_loss(peer, step, tuple(node), loss),
    "mean": lambda core, now, step: core.on_mean(now, step),
    "taken": lambda core, now, peer, transfer: core.at(now).transfers.on_taken(peer, transfer),
    "saved": lambda core, now, step, folder, error, size, theirs: core.on_saved(
        now, step, folder, error, size, theirs=theirs
    ),
    "restored": lambda core, now, standing: core.restored(now, standing),
    "order": lambda core, now, action, worker: core.at(now).orders.carry_out(action, worker),
    "stop": lambda core, now: core.at(now).ending.request_stop(),
    "fail": lambda core, now, sentence: [Finish(sentence, failed=True)],
}


def feed(core: Coordinator, now: float, name: str, *what: Any) -> list[Effect]:
    return INPUTS[name](core, now, *what)

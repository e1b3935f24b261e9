"""`potluck pause` and `potluck resume`: finds the joiners of this user on this machine, and tells them.

Imports no torch.
"""

import time

from potluck.errors import ConfigError
from potluck.launch.control import Found, State, Wish, find_joiners
from potluck.launch.hours import parse_length
from potluck.waiting import wait_until
from potluck.words import say

WAIT_S = 30.0
"""How long the command stays to see what becomes of it; the joiner does it in any case."""
ALL = "all"


def pause(name: str | None, length: str | None) -> int:
    seconds = parse_length(length) if length is not None else None
    joiners = [(joiner, joiner.state()) for joiner in choose(find_joiners(), name, "pause")]
    for joiner, _ in joiners:  # all of them hear it now, however long one takes to go
        joiner.wish(Wish(True, time.time() + seconds if seconds is not None else None, seconds))
    for joiner, before in joiners:
        if before.doing == "paused":  # then it has only another time to come back
            state = _next_state(joiner, before)
        else:
            state = _await(joiner, "paused")
        is_away = state.doing == "paused"
        sentence = state.sentence if is_away else "It finishes what it holds, and is away then."
        say(f"{joiner.name}: {sentence if joiner.is_alive else 'It has ended.'}")
    return 0


def resume(name: str | None) -> int:
    for joiner in choose(find_joiners(), name, "resume"):
        before = joiner.state()
        joiner.wish(Wish(False))
        say(f"{joiner.name}: {_next_state(joiner, before).sentence}")
    return 0


def _next_state(joiner: Found, before: State) -> State:
    """One that has another reason to be away says so again, and one that works says that."""
    wait_until(lambda: joiner.state() != before, 2.0)
    return joiner.state()


def choose(joiners: list[Found], name: str | None, command: str) -> list[Found]:
    """The one that is meant, or all of them; a ConfigError lists them where it is not clear."""
    if not joiners:
        raise ConfigError("No worker of yours has joined a run from this machine: start one with potluck join INVITE.")
    if name == ALL:
        return joiners
    chosen = [joiner for joiner in joiners if name is None or joiner.name == name]
    if len(chosen) == 1:
        return chosen
    listed = "".join(f"\n  {joiner.name}  {_tell(joiner)}" for joiner in joiners)
    if name is not None:
        raise ConfigError(f"No worker of yours on this machine is called {name!r}. There are:{listed}")
    raise ConfigError(f"Say which: potluck {command} NAME, or potluck {command} {ALL}. There are:{listed}")


def _tell(joiner: Found) -> str:
    state = joiner.state()
    return f"{state.run}: {state.sentence}"


def _await(joiner: Found, doing: str) -> State:
    wait_until(lambda: joiner.state().doing == doing or not joiner.is_alive, WAIT_S)
    return joiner.state()

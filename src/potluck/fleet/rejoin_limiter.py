"""Limits how often a worker that joins and leaves in a loop may come back. Pure: the time comes in as an argument.

Each coming costs those who train: they make room, and one of them sends the weights. A worker that crashes as often as
it is started must not cost more than one that trains.
"""

import ipaddress
import re
from dataclasses import dataclass

FREE, FREE_OF_ADDRESS, FREE_OF_NETWORK = 3, 30, 300
"""Times that a worker may have gone within `patience` of its coming, that all of one address may, and all of one
network: who has one address of a network often has many. Of IPv6 a whole /64 counts as one address."""
FIRST_WAIT_S = 0.5
"""After that, twice as long each time, up to `patience`."""
MOST_KNOWN = 4096
"""The most identities that are known: those who went first are forgotten first."""
_NUMBER = re.compile(r"-\d+$")

Who = tuple[str, str]


@dataclass
class _Visits:
    short: int = 0
    """Short visits in a row."""
    went_at: float = 0.0
    until: float = 0.0


class RejoinLimiter:
    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._known: dict[Who, _Visits] = {}

    def wait_s(self, now: float, address: str, name: str) -> float:
        """How many seconds it must still stay away."""
        known = [self._known[who] for who in _identities(address, name) if who in self._known]
        return max(0.0, *(visits.until - now for visits in known)) if known else 0.0

    def went(self, now: float, address: str, name: str, came_at: float) -> tuple[int, float]:
        """How often in a row it has gone soon after it came, and how long it is held off now."""
        visits = [
            self._count(now, who, free, is_short=now - came_at < self._patience_s)
            for who, free in zip(_identities(address, name), (FREE, FREE_OF_ADDRESS, FREE_OF_NETWORK), strict=True)
        ]
        return visits[0].short, self.wait_s(now, address, name)

    def _count(self, now: float, who: Who, free: int, *, is_short: bool) -> _Visits:
        visits = self._known.pop(who, _Visits())
        if not is_short or now - visits.went_at > 4 * self._patience_s:
            visits = _Visits()
        visits.short, visits.went_at = visits.short + is_short, now
        if visits.short > free:
            longer = min(64, visits.short - free - 1)
            visits.until = now + min(self._patience_s, FIRST_WAIT_S * 2**longer)
        self._known[who] = visits  # the last in order: see MOST_KNOWN
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return visits


def _identities(address: str, name: str) -> tuple[Who, Who, Who]:
    """The worker, whatever its process number is now; all of its address, for one that changes its name; and all of its
    network, for one that changes its address."""
    near, wide = _networks(address)
    return (address, f"named {_NUMBER.sub('', name)}"), (near, ""), (wide, "")


def _networks(address: str) -> tuple[str, str]:
    """Return the network that one customer of a provider has at least, and the one that it may well have: an address
    and its /24, or, of IPv6, a /64 and its /48. An address that is none, such as this machine's, is its own."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, f"all of {address}"
    if parsed.version == 6 and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    sizes = (32, 24) if parsed.version == 4 else (64, 48)
    near, wide = (str(ipaddress.ip_network((parsed, size), strict=False)) for size in sizes)
    return near, wide

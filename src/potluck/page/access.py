"""Who may look: a token in the link, or a process of the same user on this machine; and by which name.

A page at a loopback address is for the user who started it: the system tells whose process is at the other end of a
connection. Elsewhere, and where the system does not tell, the link has a token. The name by which a page is asked for
is checked too: otherwise a site elsewhere could have its own name lead here, and read along in the browser.
"""

import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from potluck.fleet.invite import is_loopback, is_right_secret, reachable

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is fetched from elsewhere, nobody shows it inside of their own page, nothing is
kept."""


End = tuple[str, int]
"""One end of a connection: an address and a port."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where a page is, or is to be, and who may look."""

    host: str = "127.0.0.1"
    """The address that is listened on."""
    port: int = 0
    """0: any that is free."""
    token: str = field(default="", repr=False)
    """Token in the link; empty: any process of the same user of this machine may look."""
    encrypted: bool = False

    @property
    def link(self) -> str:
        """The whole of it, token included."""
        scheme = "https" if self.encrypted else "http"
        host = reachable(self.host)
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers keep cookies of all ports of a machine together."""
        return f"potluck-{self.port}"

    def refusal(self, headers: Mapping[str, str], query: Mapping[str, str], ends: tuple[End, End] | None) -> str:
        """Why this is not answered, as a sentence; empty if it is. `ends`: of its connection, the peer's first."""
        if not self._is_our_name(headers.get("host", "")):
            return "This page does not have that name. Use the address that was printed."
        if self.token:
            if self._has_token(headers, query):
                return ""
            return "This page needs the token of its link. Use the whole link that was printed."
        if ends is None or owner_of(*ends) not in (0, os.getuid()):
            return "This page is for the user who started it."
        return ""

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a request comes from this very page, as one that changes or reveals something must."""
        scheme = "https" if self.encrypted else "http"
        return headers.get("origin") == f"{scheme}://{headers.get('host', '')}"

    def _has_token(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        tokens = [query.get("token", ""), headers.get("authorization", "").removeprefix("Bearer ")]
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        if self.cookie in cookies:
            tokens.append(cookies[self.cookie].value)
        return sum(is_right_secret(each, self.token) for each in tokens) > 0  # as long for one as for another

    def _is_our_name(self, asked: str) -> bool:
        name = asked.rsplit(":", 1)[0] if not asked.endswith("]") else asked
        name = name.strip("[]").lower()
        if is_loopback(self.host):
            return is_loopback(name)
        try:
            ipaddress.ip_address(name)
            return True  # no name that somebody else could have lead here
        except ValueError:
            return name in {"localhost", self.host.lower(), *_names_of_this_machine()}


@cache
def _names_of_this_machine() -> frozenset[str]:
    """Once: to look one up may take seconds, during which nobody is answered."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def new_token(host: str) -> str:
    """Empty where none is needed."""
    return "" if is_loopback(host) and can_tell_owners() else secrets.token_urlsafe(18)


def can_tell_owners() -> bool:
    return Path("/proc/net/tcp").exists()


def owner_of(peer: End, own: End) -> int | None:
    """The user whose process is at the other end of a connection within this machine; None: the system does not say.

    A connection that no process holds any more is listed as root's, and its port may be somebody else's by now.
    """
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        ends = [_as_listed(peer, family), _as_listed(own, family)]
        for line in lines:
            fields = line.split()
            if fields[1:3] == ends and fields[9] != "0":  # its inode
                return int(fields[7])
    return None


def _as_listed(end: End, family: socket.AddressFamily) -> str:
    """Write an end as /proc/net/tcp has it: words of the machine's own byte order, in hexadecimal."""
    try:
        packed = socket.inet_pton(family, end[0] if family == socket.AF_INET or ":" in end[0] else f"::ffff:{end[0]}")
    except OSError:
        return ""
    words = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"

"""Whether a node reaches the first one, and by which interface. Knows nothing of what is said there."""

import ipaddress
import os
import socket
import time

import psutil

from potluck.errors import ConfigError


def reach(node: str, address: str, port: int, patience_s: float) -> None:
    """Refuses with a sentence where a node cannot open a connection to the first one."""
    try:
        connect(address, port, patience_s)
    except OSError as error:
        raise ConfigError(
            f"{node} cannot reach the first node at {address} port {port}: {error.strerror or error}, for"
            f" {patience_s:.0f} s. Let nodes open that port among themselves (--port chooses it), or say with --address"
            " how they reach the first."
        ) from None


def connect(address: str, port: int, patience_s: float) -> None:
    """Tries again until patience is over; then the last trouble is the caller's."""
    deadline = time.monotonic() + patience_s
    while True:
        left = deadline - time.monotonic()
        try:
            # A part of the time for each try: where packets are dropped silently, the first would take all of it.
            socket.create_connection((address, port), timeout=max(0.1, min(left, patience_s / 3))).close()
            return
        except OSError:
            if time.monotonic() >= deadline - 0.1:
                raise
        time.sleep(min(0.1, max(0.0, left)))


def interface_to(address: str) -> str | None:
    """The interface that leads there, where Gloo would take the loopback: it asks for the address of this machine's own
    name, and many systems give every machine 127.0.1.1 for that. None: it needs no help, or there is none."""
    try:
        if not _is_loopback(socket.gethostname()) or _is_loopback(address):
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # nothing is sent: the system only chooses the interface
            own = probe.getsockname()[0]
    except OSError:  # a hint for Gloo, which chooses by itself without one
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, ends in interfaces if any(end.address == own for end in ends)), None)


def lead_gloo_to(address: str) -> None:
    """Name that interface to Gloo, in workers that this process starts, unless somebody has named one."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _is_loopback(name: str) -> bool:
    return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback

"""Whether a node reaches the first one, and a port that is free. Knows nothing of what is said there."""

import socket
import time

from potluck.errors import ConfigError


def reach(node: str, address: str, port: int, patience_s: float) -> None:
    """Refuses with a sentence where a node cannot open a connection to the first one."""
    deadline = time.monotonic() + patience_s
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(left, patience_s / 3))).close()
            return
        except OSError as error:
            why = str(error.strerror or error)
        if time.monotonic() >= deadline - 0.1:
            raise ConfigError(
                f"{node} cannot reach the first node at {address} port {port}: {why}, for {patience_s:.0f} s. Let nodes"
                " open that port among themselves (--port chooses it), or say with --address how they reach the first."
            )
        time.sleep(min(0.1, max(0.0, left)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

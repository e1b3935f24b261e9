"""The time of a step while others crowd the server: workers who are let in and idle, and connections that send garbage.

Two workers average a small gradient over and over; nothing else fills their steps, so that whatever the server loses to
the crowd shows. The crowd lives on this machine too, and its own share of the cores counts against us.
"""

import contextlib
import random
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from bench.report import Comparison, Result
from bench.stars import MB, PATIENCE_S, Actor, on_stage, receive_all, round_ms, start_star
from bench.turns import take_turns
from potluck.fleet.invite import Invite
from potluck.wire.codec import encode
from potluck.wire.messages import PROTOCOL, Heartbeat, Hello

IDLE = 1_000
STRANGERS = 10_000
PER_SECOND = 500
AT_ONCE = 500
GROUP = 10
"""Steps that are timed together."""


def measure(quick: bool) -> Result:
    rounds = 2 if quick else 10
    strangers = STRANGERS // 10
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
        host, helpers, invite = start_star(actors, folder, 2, MB)
        idle, crowd, elsewhere = Actor(Idle, invite), Actor(Strangers, Invite.parse(invite).port), Actor(Elsewhere)
        led_astray = Actor(Strangers, elsewhere.call("port"))
        actors += [idle, crowd, elsewhere, led_astray]

        def alone() -> float:
            return median(round_ms(helpers, GROUP) for _ in range(15))

        def with_idle() -> float:
            idle.call("come", IDLE)
            try:
                return alone()
            finally:
                idle.call("go")
                while host.call("counts")["members"] > len(helpers):  # the next side's turn is not to pay for it
                    time.sleep(0.1)

        def during_storm(crowd: Actor) -> float:
            crowd.ask("storm", strangers, strangers / PER_SECOND)
            times = []
            while not crowd.has_answered():
                times.append(round_ms(helpers, GROUP))
            crowd.answer()
            return median(times)

        sides: dict[str, Callable[[], float]] = {
            "alone": alone,
            "idle": with_idle,
            "strangers": lambda: during_storm(crowd),
            "strangers elsewhere": lambda: during_storm(led_astray),
        }
        found = take_turns("crowd", rounds, sides, "ms")
        counts = host.call("counts")
    what = "step time, 1 MB from each of 2 workers"
    storm = f"while {rounds * strangers:,} connections send garbage, {PER_SECOND} a second"
    told: list[tuple[str, str, str, float | None]] = [
        ("idle", "alone", f"with {IDLE:,} idle workers connected, against the same alone", 1.2),
        ("strangers", "alone", f"{storm}, against the same alone", 1.2),
        ("strangers", "strangers elsewhere", f"{storm}, against the same sent to another port of the machine", None),
    ]
    comparisons = [
        Comparison(what=f"{what} {text}", unit="ms", ours=found[ours], bare=found[bare], target=target)
        for ours, bare, text, target in told
    ]
    return Result(comparisons, counts)


class Idle:
    """Workers who said Hello, and whose heartbeats are all that is heard of them."""

    def __init__(self, invite: str) -> None:
        self._invite = Invite.parse(invite)
        self._sockets: list[socket.socket] = []
        self._beating = threading.Event()
        self._thread: threading.Thread | None = None

    def come(self, count: int) -> None:
        for number in range(count):
            connection = socket.create_connection((self._invite.host, self._invite.port))
            connection.sendall(encode(Hello(PROTOCOL, self._invite.secret, f"idle {number}", "idle")))
            self._sockets.append(connection)
        for connection in self._sockets:  # each gets its Welcome
            length = memoryview(bytearray(4))
            receive_all(connection, length)
            receive_all(connection, memoryview(bytearray(int.from_bytes(length, "big"))))
            connection.setblocking(False)
        self._beating.set()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def go(self) -> None:
        self._beating.clear()
        if self._thread is not None:
            self._thread.join()
        while self._sockets:
            self._sockets.pop().close()

    def _beat(self) -> None:
        """As often as a worker's client does, each at its own time."""
        beat = encode(Heartbeat("idle", 0))
        while True:
            for connection in self._sockets:
                if not self._beating.is_set():
                    return
                connection.send(beat)
                time.sleep(PATIENCE_S / 4 / len(self._sockets))
                with contextlib.suppress(BlockingIOError):
                    connection.recv(4096)


class Elsewhere:
    """A port where everybody is sent away at once: what a storm costs the machine, whoever it is for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            self._listener.accept()[0].close()


class Strangers:
    def __init__(self, port: int) -> None:
        self._port = port
        self._draw = random.Random(0)

    def storm(self, count: int, seconds: float) -> None:
        """So many connections, evenly over that time, and few at once."""
        open_now: deque[socket.socket] = deque()
        started = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, started + seconds * number / count - time.monotonic()))
            if len(open_now) == AT_ONCE:
                open_now.popleft().close()
            connection = socket.create_connection(("127.0.0.1", self._port))
            open_now.append(connection)
            with contextlib.suppress(OSError):  # it may be closed already
                connection.send(self._garbage(number))
        for connection in open_now:
            connection.close()

    def _garbage(self, number: int) -> bytes:
        match number % 5:
            case 0:
                return b""
            case 1:
                return self._draw.randbytes(self._draw.randrange(1, 5_000))
            case 2:
                return struct.pack(">I", 100) + bytes(50)  # half a frame
            case 3:
                return struct.pack(">I", 0xFFFFFFFF) + bytes(50)
        return encode(Hello(PROTOCOL, "wrong", "stranger", "stranger"))

"""A Member without a host: what it says is kept, and it hears what a test puts there."""

from collections import deque

from potluck.fleet.description import Description
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.member import Member
from potluck.wire.messages import Message, Welcome
from tests.fleet.virtual.process import Life
from tests.fleet.virtual.toy import described


class LoneHolder:
    """Its weights never change, and are of this many rows."""

    def __init__(self, rows_seen: int = 0) -> None:
        self.rows_seen = rows_seen
        self.description = described()
        self.worker_id = 0
        self.connects = 0
        self.sent: list[Message] = []
        self.heard: deque[Message | ConnectionLost] = deque()
        self.member = Member(self)  # type: ignore[arg-type]

    def go(self, story: Life) -> None:
        """Until it ends, or waits for a message."""
        next(story, None)

    def reconnect(self) -> None:
        """The connection is lost, and made again: the member says once more what it holds."""
        self.heard.append(ConnectionLost("cut"))
        self.go(self.member.pump())

    def now(self) -> float:
        return 0.0

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def say(self, sentence: str) -> None:
        pass

    def hear(self, timeout_s: float) -> Life:
        if not self.heard:
            yield
        return self.heard.popleft()

    def connect(self) -> Life:
        yield from ()
        self.connects += 1

    def reach(self, phase: str, step: int) -> Life:
        yield from ()

    def welcome(self) -> Welcome:
        return Welcome(self.worker_id, 1000, "")

    def describe(self) -> Description:
        return self.description

    def digest(self) -> str:
        return "a digest"

    def is_changed(self) -> bool:
        return False

    def pass_over_until(self, step: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def nonfinite_hint(self) -> str:
        return ""

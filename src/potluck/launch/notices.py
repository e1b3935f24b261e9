"""Notices that this machine is taken back: asked of a cloud's metadata service, where somebody switched that on.

Each provider is a function from its answer to a Notice, and one thread asks. Signals are not its affair, nor is what
follows from a notice. Imports no torch.
"""

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from potluck.files import table_in
from potluck.words import duration

MOST_BYTES = 1 << 20
"""The most bytes of an answer; one of Azure's lists the events of a whole set of machines."""
TIMEOUT_S = 5.0
"""Seconds for an answer: outside of that cloud, packets to this address may be dropped without a word."""
FIRST_TIMEOUT_S = 125.0
"""Azure switches its service on with the first question, which may take two minutes."""
WAIT_S = 20
"""How long Google may hold its answer back until it changes."""
TOKEN_S = 21_600
ADDRESS = "POTLUCK_METADATA"
"""Environment variable for tests: HOST:PORT in place of the provider's own address."""


@dataclass(frozen=True)
class Notice:
    source: str
    at: float | None
    """When this machine goes, in seconds since 1970; none: it was not said."""

    def seconds(self, now: float) -> float | None:
        return None if self.at is None else max(0.0, self.at - now)

    def sentence(self, now: float) -> str:
        seconds = self.seconds(now)
        when = "" if seconds is None else f" in about {duration(seconds)}"
        return f"This machine is taken back{when} ({self.source})"


# What each provider answers


def read_aws(answer: str) -> Notice | None:
    """spot/instance-action: {"action": "terminate", "time": "2026-01-01T08:22:00Z"}."""
    found = table_in(answer)
    if found.get("action") not in ("terminate", "stop", "hibernate"):
        return None
    return Notice("AWS spot", _iso(found.get("time")))


def read_gcp(answer: str, now: float) -> Notice | None:
    """instance/preempted: TRUE or FALSE. What follows is always 30 s."""
    return Notice("Google Cloud", now + 30) if answer.strip().upper() == "TRUE" else None


def read_azure(answer: str, name: str) -> Notice | None:
    """scheduledevents: of all machines of a set; `name` is this one's. A Freeze is over in seconds, and no notice."""
    events = table_in(answer).get("Events")
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate", "Redeploy", "Reboot"):
            continue
        resources = event.get("Resources")
        is_ours = isinstance(resources, list) and name.lower() in [str(each).lower() for each in resources]
        if is_ours and event.get("EventStatus") in ("Scheduled", "Started"):
            return Notice(f"Azure, {str(event['EventType']).lower()}", _http_date(event.get("NotBefore")))
    return None


def decide_provider(told: Mapping[str, str]) -> str | None:
    """Find the cloud of this machine, by what its firmware says; None: none that we know. Nobody is asked."""
    words = " ".join(told.values())
    if "Amazon EC2" in words:
        return "aws"
    if "Google" in words:
        return "gcp"
    return "azure" if AZURE_TAG in words else None


AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def firmware() -> dict[str, str]:
    texts = {}
    for name in ("sys_vendor", "product_name", "bios_vendor", "chassis_asset_tag"):
        try:
            texts[name] = Path("/sys/class/dmi/id", name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:  # not for every user to read, and not there on every system
            continue
    return texts


def _iso(text: object) -> float | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _http_date(text: object) -> float | None:
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except (ValueError, TypeError):
        return None


# Asking


def ask(
    path: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = TIMEOUT_S
) -> tuple[str, str] | None:
    """Ask the machine's metadata service, by plain HTTP on its own link: no proxy, and no redirect is followed.

    Returns the answer and its tag; none where there is nothing at this path, or nobody answers.
    """
    host, _, port = os.environ.get(ADDRESS, METADATA).partition(":")
    connection = http.client.HTTPConnection(host, int(port or 80), timeout=timeout_s)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read(MOST_BYTES).decode("utf-8", errors="replace")
        return (text, response.getheader("ETag") or "") if response.status == 200 else None
    except (OSError, http.client.HTTPException):  # it is asked again soon: one answer may be missed
        return None
    finally:
        connection.close()


def ask_aws(say: Callable[[str], None]) -> Iterator[Notice | None]:
    token, token_until, has_warned = "", 0.0, False
    while True:
        if time.monotonic() > token_until:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            if (answer := ask("/latest/api/token", ttl, method="PUT")) is None:
                yield None
                continue
            # Half of its time: with a token that has just ended, a notice would be missed.
            token, token_until = answer[0].strip(), time.monotonic() + TOKEN_S / 2
        headers = {"X-aws-ec2-metadata-token": token}
        answer = ask("/latest/meta-data/spot/instance-action", headers)
        if answer is not None and (notice := read_aws(answer[0])) is not None:
            yield notice
        risk = ask("/latest/meta-data/events/recommendations/rebalance", headers)  # {"noticeTime": ...}
        if risk is not None and _iso(table_in(risk[0]).get("noticeTime")) is not None and not has_warned:
            has_warned = True
            say("AWS says that this spot machine may soon be taken back. It works until the notice comes.")
        yield None


def ask_gcp(say: Callable[[str], None]) -> Iterator[Notice | None]:
    """The first answer comes at once; each later one when it changes, or after a while."""
    tag = ""
    while True:
        waiting = f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={tag}" if tag else ""
        path = f"/computeMetadata/v1/instance/preempted{waiting}"
        answer = ask(path, {"Metadata-Flavor": "Google"}, timeout_s=WAIT_S + TIMEOUT_S)
        tag = answer[1] if answer is not None and answer[1].isalnum() else ""
        yield read_gcp(answer[0], time.time()) if answer is not None else None


def ask_azure(say: Callable[[str], None]) -> Iterator[Notice | None]:
    headers, timeout_s = {"Metadata": "true"}, FIRST_TIMEOUT_S
    while (name := ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)) is None:
        yield None
    while True:
        answer = ask("/metadata/scheduledevents?api-version=2020-07-01", headers, timeout_s=timeout_s)
        timeout_s = TIMEOUT_S if answer is not None else timeout_s
        yield read_azure(answer[0], name[0].strip()) if answer is not None else None


AskProvider = Callable[[Callable[[str], None]], Iterator[Notice | None]]
PROVIDERS: dict[str, tuple[AskProvider, float]] = {
    "aws": (ask_aws, 5.0),
    "gcp": (ask_gcp, 1.0),
    "azure": (ask_azure, 2.0),
}
"""How each is asked, and how many seconds after an answer it is asked again."""
METADATA = "169.254.169.254"
"""Address of all three services; it leads no further than the machine's own link."""


class NoticeWatch:
    """The thread that asks, until there is a notice or the process ends. `watch`: a provider, off, or auto: the cloud
    that this machine's firmware names, if it names one."""

    def __init__(self, watch: str, say: Callable[[str], None]) -> None:
        self.notice: Notice | None = None
        self._over = threading.Event()
        provider = decide_provider(firmware()) if watch == "auto" else watch
        if provider is None:
            say("The firmware of this machine names no cloud that gives notices; SIGTERM and SIGUSR1 are heard.")
        elif provider != "off":
            # A thread: an answer may take seconds, and workers are looked after meanwhile.
            threading.Thread(target=self._run, args=(*PROVIDERS[provider], say), name="notices", daemon=True).start()

    def _run(self, ask: AskProvider, every_s: float, say: Callable[[str], None]) -> None:
        answers = ask(say)
        while not self._over.is_set() and self.notice is None:
            self.notice = next(answers)
            self._over.wait(every_s if self.notice is None else 0)

    def close(self) -> None:
        self._over.set()

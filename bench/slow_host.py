"""Unequal workers of a host, each behind a slow, long link: what they do together, and how many bytes that takes.

    python -m bench slow_host [--quick]
    python -m bench.slow_host --mbit 100 --ms 50 --wire int4 --policy cadence --turns 1

`potluck host` runs with TLS on this machine. Two workers join it, each through a relay of its own (bench/testbed): a
rate each way, a round trip, and at most 4 MB of a connection on their way. One has 0.9 cores, the other a third of
that. The model is the GPT of 19.7M parameters on rows of 32 tokens, 4 rows to a worker's batch, for which the
slow worker needs 1.3 s. Its gradient has 79 MB: 6.3 s on such a link, each way.

Speed is that of the steady state: rows per second after the first windows, against the sum of what both workers do
alone at the same time, for some seconds after each of these windows. Bytes are those that passed the relays in that
time, all that the protocol says included. Both are compared with Sync in fp32 at the same setting, in turns.

Where a window's time went is told for each worker: computing; sending, until the last of its payloads has left; waiting
for the first byte of the mean; receiving the rest of it; applying, until the next window begins. Means come while parts
still leave, so that the last to send waits for little. What the link alone needs for those bytes, with one round trip,
stands beside it. The host gets no checkpoints meanwhile, unless they are asked for: in a run of any length they take a
twentieth of one worker's link, and payloads go first.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.ranks import CPU_ONLY, ROOT
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.testbed.relay import SLOT_S, WINDOW_BYTES, Relay
from bench.turns import say
from bench.uneven import Uneven, cores_of
from potluck.fleet.invite import Invite

GAP = 3
ROWS = 4
"""A worker's batch."""
CONTEXT = 32
START_S = 30.0
SPEED, BYTES = 0.95, 1 / 50
PHASES = ("computing", "sending", "waiting", "receiving", "applying")


@dataclass(frozen=True, kw_only=True)
class Setting:
    policy: str
    wire: str = "fp32"
    mbit: float = 100
    ms: float = 50
    """The round trip."""
    anchor: int | None = None
    """Batches of the slow worker to a window; none: as many as the policy chooses."""
    warm: int = 3
    """Windows, or steps, that are not counted: the first window is short, and tells how fast workers are."""
    counted: int = 4
    alone_s: float = 4.0
    """Between two windows that count."""
    window_bytes: int = WINDOW_BYTES
    checkpoints: bool = False
    """Whether the host gets checkpoints meanwhile, as it does in a run of any length."""

    @property
    def name(self) -> str:
        anchor = "" if self.anchor is None else f" of {self.anchor} batches"
        return f"{self.policy}{anchor}, {self.wire}, {self.mbit:g} Mbit/s, {self.ms:g} ms"


OURS = Setting(policy="cadence", wire="int4", warm=3, counted=3)
THEIRS = Setting(policy="sync", warm=2, counted=3)


def measure(quick: bool) -> Result:
    if quick:
        short = {"warm": 1, "counted": 1, "alone_s": 2.0}
        return measure_settings(
            [replace(OURS, policy="published", anchor=2, **short), replace(THEIRS, **short)], turns=1
        )
    return measure_settings([OURS, THEIRS], turns=2)


def measure_settings(settings: Sequence[Setting], *, turns: int) -> Result:
    """The last one is what the others are compared with."""
    found: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
    with Uneven([Machine(cpu=cores) for cores in cores_of(2, 1)]) as fleet:
        for turn in range(turns):
            for setting in settings[:: -1 if turn % 2 else 1]:
                found[setting.name].append(told := take_turn(fleet, setting))
                say(f"slow_host: {setting.name}, turn {turn + 1} of {turns}: {describe(told)}")
        how = fleet.how
    return Result(compare(settings, found), {"unequal_by": how, "turns": found})


def compare(settings: Sequence[Setting], found: dict[str, list[dict[str, Any]]]) -> list[Comparison]:
    comparisons = []
    *ours, theirs = settings
    for setting in ours:
        own, bare = found[setting.name], found[theirs.name]
        together, alone = [turn["together"] for turn in own], [turn["alone"] for turn in own]
        what = f"rows/s of 2 workers of a host, gap 3: {setting.name}, against the sum of what each does alone"
        comparisons.append(Comparison(what=what, unit="rows/s", ours=together, bare=alone, target=SPEED, at_least=True))
        sent = [[turn["sent_per_row"] for turn in turns] for turns in (own, bare)]
        what = f"bytes that a worker sends per row: {setting.name}, against {theirs.name}"
        comparisons.append(Comparison(what=what, unit="B", ours=sent[0], bare=sent[1], target=BYTES))
    return comparisons


# One turn


def take_turn(fleet: Uneven, setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        invite = stack.enter_context(_host(Path(folder) / "run"))
        links: dict[str, Any] = {"mbit": setting.mbit, "delay_s": setting.ms / 2000}
        relays = [
            stack.enter_context(Relay("127.0.0.1", invite.port, **links, window_bytes=setting.window_bytes))
            for _ in fleet.machines
        ]
        lines = [Invite("127.0.0.1", relay.port, invite.secret, invite.pin).line() for relay in relays]
        answers = fleet.run(
            "bench.slow_host:work",
            cores=cores_of(2, GAP),
            limit_s=900.0,
            invites=lines,
            setting=asdict(setting),
        )
        return summarize(setting, answers, [relay.traffic() for relay in relays])


@contextmanager
def _host(folder: Path) -> Iterator[Invite]:
    """`potluck host`, until the workers have gone."""
    command = [sys.executable, "-m", "potluck.cli", "host", __file__, "--out", str(folder), "--at-least", "2"]
    environment = {**os.environ, **CPU_ONLY, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen([*command, "--workers", "0"], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "invite").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("slow_host: the host did not start; its words are above.")
            time.sleep(0.05)
        yield Invite.parse((folder / "invite").read_text().strip())
    finally:
        process.kill()
        process.wait()


def summarize(setting: Setting, answers: list[dict[str, Any]], traffic: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the windows that count."""
    spans = _spans(setting, answers[0])
    rows = answers[0]["rows"][-1] - answers[0]["rows"][setting.warm - 1]
    seconds = sum(until - since for since, until in spans)
    sent, received = (
        [sum(sum(_between(link[way], *span)) for span in spans) for link in traffic] for way in ("up", "down")
    )
    return {
        "together": rows / seconds,
        "alone": sum(mean(answer["alone"]) for answer in answers),
        "speeds": [mean(answer["alone"]) for answer in answers],
        "sent_per_row": mean(sent) / rows,
        "received_per_row": mean(received) / rows,
        "seconds": seconds / setting.counted,
        "rows": rows / setting.counted,
        "shares": answers[0]["shares"],
        "phases": [_phases(setting, answer, link) for answer, link in zip(answers, traffic, strict=True)],
    }


def _spans(setting: Setting, answer: dict[str, Any]) -> list[tuple[float, float]]:
    """From the begin of each window that counts to its agreement, as one worker saw it."""
    return list(zip(answer["resumed"][setting.warm - 1 : -1], answer["agreed"][setting.warm :], strict=True))


def _between(line: dict[str, Any], since: float, until: float) -> list[int]:
    return [count for slot, count in line["slots"].items() if since <= SLOT_S * (int(slot) + 1) < until]


def _phases(setting: Setting, answer: dict[str, Any], link: dict[str, Any]) -> dict[str, float]:
    """Medians over the windows that count, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in (*PHASES, "link")}
    bytes_per_s = setting.mbit * 1e6 / 8
    for (since, until), computed in zip(_spans(setting, answer), answer["computed"][setting.warm :], strict=False):
        busy = {way: _busy(line, computed, until, bytes_per_s) for way, line in link.items()}
        late_s = setting.ms / 2000
        sent = max(busy["up"], default=computed)
        begun, came = (at(busy["down"], default=sent) + late_s for at in (min, max))
        edges = [since, computed, sent, max(sent, begun), max(sent, came), max(sent, came, until)]
        for name, (first, last) in zip(PHASES, itertools.pairwise(edges), strict=True):
            found[name].append(last - first)
        most = max(sum(_between(line, computed, until)) for line in link.values())
        found["link"].append(most / bytes_per_s + setting.ms / 1000)
    return {name: round(median(values), 3) for name, values in found.items() if values}


def _busy(line: dict[str, Any], since: float, until: float, bytes_per_s: float) -> list[float]:
    """When payloads left, in this time: short messages do not fill a twentieth of what passes in a slot."""
    least = 0.05 * SLOT_S * bytes_per_s
    found = [SLOT_S * (int(slot) + 1) for slot, count in line["slots"].items() if count >= least]
    return [at for at in found if since <= at < until]


def describe(told: dict[str, Any]) -> str:
    lines = [
        f"{told['together'] / told['alone']:.3f} ({told['together']:.2f} of {told['alone']:.2f} rows/s),"
        f" {told['sent_per_row'] / 1e6:.3f} MB sent per row, {told['seconds']:.1f} s for {told['rows']:.0f} rows,"
        f" shared {_list(told['shares'])}; alone {_list(told['speeds'])}"
    ]
    for worker, phases in enumerate(told["phases"]):
        lines.append(f"  worker {worker}: " + ", ".join(f"{name} {value:.2f} s" for name, value in phases.items()))
    return "\n".join(lines)


def _list(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:.2f}" for number in numbers)


# A worker


def work(seat: Any, *, invites: list[str], setting: dict[str, Any]) -> dict[str, Any]:
    """One worker of one turn."""
    from bench.mixed import BareLoop, Task, rows_per_s
    from potluck.train.model import ModelConfig

    given = Setting(**setting)
    task = Task(model=ModelConfig(dim=384, layers=11, heads=6, context=CONTEXT), rows=ROWS)
    loop = BareLoop(seat, task, task.data())
    loop.step()
    return _train(seat, given, task, invites[seat.rank], lambda: rows_per_s(loop, given.alone_s))


def _train(seat: Any, setting: Setting, task: Any, invite: str, compute_alone: Callable[[], float]) -> dict[str, Any]:
    import potluck
    from bench.mixed import CLIP, Heard, train
    from potluck.environment import QUIET
    from potluck.fleet import member, phases
    from potluck.fleet.invite import INVITE
    from potluck.wire.messages import SliceReport

    if not setting.checkpoints:
        member.KEEP_FIRST_S = math.inf

    os.environ |= {INVITE: invite, QUIET: "1", "POTLUCK_NAME": f"worker {seat.rank}"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    fleet = potluck.init(_policy(setting), step=potluck.StepConfig(clip=CLIP), wire=setting.wire)
    model, optimizer = task.build()
    model, _, loader = fleet.prepare(model, optimizer, task.data(), batch_size=task.rows * seat.world)
    heard = Heard()
    found: dict[str, list[Any]] = {"agreed": [], "resumed": [], "rows": [], "alone": []}
    computed: dict[int, float] = {}
    """When this worker told the host that it had computed its part of each step."""

    def listen(phase: str, step: int, **what: Any) -> None:
        if phase == "sending" and isinstance(what["message"], SliceReport):
            computed[step] = time.monotonic()

    def agreed() -> None:
        found["agreed"].append(time.monotonic())
        found["rows"].append(fleet.rows_seen)
        count = len(found["agreed"])
        if count >= setting.warm:
            found["alone"].append(compute_alone())
        found["resumed"].append(time.monotonic())
        if count >= setting.warm + setting.counted:
            raise _Enough

    fleet.events.listeners.append(heard)
    phases.listeners.append(listen)
    fleet.after_agreement.append(agreed)
    with suppress(_Enough):
        train(fleet, model, loader, seat)
    phases.listeners.remove(listen)
    rows = [part.rows for part in heard.windows[-1].workers]
    return {**found, "computed": list(computed.values()), "shares": [part / sum(rows) for part in rows]}


class _Enough(Exception):
    pass


def _policy(setting: Setting) -> Any:
    import potluck

    if setting.policy == "sync":
        return potluck.Sync()
    kinds: dict[str, Callable[..., Any]] = {
        "cadence": potluck.Cadence,
        "published": potluck.Cadence.published,
        "async": potluck.Async,
        "auto": potluck.Auto,
    }
    fixed = {} if setting.anchor is None else {"anchor": setting.anchor, "max_anchor": setting.anchor}
    return kinds[setting.policy](**fixed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slow_host", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", default="cadence", choices=("sync", "cadence", "published", "async", "auto"))
    parser.add_argument("--wire", default="int4", choices=("fp32", "bf16", "int8", "int4"))
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--ms", type=float, default=50, help="of the round trip")
    parser.add_argument(
        "--anchor", type=int, default=OURS.anchor, help="batches of the slow worker to a window; 0: any"
    )
    parser.add_argument("--warm", type=int, default=OURS.warm)
    parser.add_argument("--counted", type=int, default=OURS.counted)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--window-mb", type=float, default=WINDOW_BYTES / (1 << 20), help="of a connection, on the way")
    parser.add_argument("--alone", action="store_true", help="without Sync in fp32 to compare it with")
    parser.add_argument("--checkpoints", action="store_true", help="the host gets them meanwhile")
    told = parser.parse_args()
    link: dict[str, Any] = {"mbit": told.mbit, "ms": told.ms, "window_bytes": round(told.window_mb * (1 << 20))}
    counts = {
        "warm": told.warm,
        "counted": told.counted,
        "anchor": told.anchor or None,
        "checkpoints": told.checkpoints,
    }
    ours = Setting(policy=told.policy, wire=told.wire, **link, **counts)
    settings = [ours] if told.alone else [ours, replace(THEIRS, **link)]
    if not told.alone:
        print(json.dumps(measure_settings(settings, turns=told.turns).details))
        return
    with Uneven([Machine(cpu=cores) for cores in cores_of(2, 1)]) as fleet:
        for _ in range(told.turns):
            say(f"slow_host: {ours.name}: {describe(take_turn(fleet, ours))}")


if __name__ == "__main__":
    main()

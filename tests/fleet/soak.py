"""Random schedules of real processes: a host and its workers, killed, stopped, joined, asked to leave, started again.
Some workers are nodes of two ranks.

    python -m tests.fleet.soak --policy cadence --seeds 100 --minutes 60

Judged by plain PyTorch: every row is used once; whoever finished has the same bits. Under Sync these are the bits of a
loop without Potluck; under Cadence, with an optimizer that has no state, they are what plain replicas and their mean
come to from the ranges that are on record. With BatchNorm, dropout and AdamW the bits of all are compared.
"""

import argparse
import copy
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from potluck.agree.policy import Async, Auto, Cadence, Sync
from potluck.data.rows import mix
from potluck.events import Decided, Event
from potluck.fleet.journal import Journal
from potluck.fleet.ledger import prove
from tests.fleet.fleet import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    Worker,
    assert_same,
    build,
    close_all,
    start_coordinator,
    start_node,
    wait_until,
)
from tests.fleet.judges import plain_run
from tests.fleet.seeds import POLICIES, seeds, soak

PATIENCE_S = 1.5
LONGEST_S = 240
"""Of a schedule: then it has hung."""
ALLOWED = ("The run has ended", "Nobody listens", "nobody listens", "begins anew")
"""What a worker may end with that comes too late, or whose weights nobody has any more."""


def soon_gives_up(place: Path) -> None:
    from potluck.fleet import host_connector

    host_connector.NOBODY_S, host_connector.GIVE_UP = 20.0, 20  # times patience


def tell_decision(place: str, event: Event) -> None:
    """How many took part in a window is nowhere else on record."""
    if isinstance(event, Decided):
        with (Path(place) / "decisions").open("a") as file:
            file.write(json.dumps([event.version, event.anchor, list(event.rows)]) + "\n")


class Schedule:
    """One run, and what happens to it, as a function of the seed and of how fast this machine is."""

    def __init__(self, seed: int, policy: str, folder: Path, *, is_long: bool = False) -> None:
        self.draw = draw = random.Random(seed)
        self.folder, self.policy = folder, policy
        self.first = draw.randint(1, 3)
        self.epochs, self.is_long = 60 if is_long else draw.randint(2, 5), is_long
        self.steps = self.epochs * STEPS // EPOCHS
        self.ends_badly = draw.random() < 0.5
        """The host is killed once somebody has ended."""
        self.is_bare = policy != "sync" and draw.random() < 0.5
        kinds = {
            "sync": Sync(),
            "cadence": Cadence.published(anchor=1, max_anchor=draw.choice([1, 2, 4])),
            "async": Async.published(
                anchor=1, max_anchor=2, together=draw.choice([0.0, 0.3]), moments=draw.random() < 0.3
            ),
            "auto": Auto(together=draw.choice([0.0, 0.2])),
        }
        self.options: dict[str, Any] = {
            "policy": kinds[policy],
            "epochs": self.epochs,
            "steps": self.steps,
            "save_every": draw.choice([None, None, 1, 3]),
            "slow_s": draw.choice([0.02, 0.1]),
            "may_lose": True,
            "shared": draw.random() < 0.3,
        }
        if self.is_bare:
            self.options |= {"bare": True, "sgd": True, "lr": 0.05}
        self.told: dict[str, Any] = {"patience_s": PATIENCE_S, "on_event": partial(tell_decision, str(folder))}
        self.workers: list[Worker] = []
        self.killed: set[str] = set()
        self.done: list[str] = []
        self.host, self.invite = start_coordinator(folder, **self.told, at_least=draw.randint(1, self.first))

    def join(self) -> None:
        name = f"w{len(self.workers)}"
        if self.policy != "sync" and self.draw.random() < 0.3:  # under Sync a worker is one process
            faults = dict.fromkeys(range(2), soon_gives_up)
            self.workers += start_node(self.invite, self.folder, name, 2, faults, self.options)
        else:
            self.workers.append(Worker(self.invite, self.folder, name, soon_gives_up, self.options))

    def end_halves(self) -> None:
        """As a launcher would, of which there is none here: a rank waits long for one that has gone before they met."""
        for first, later in itertools.pairwise(self.workers):
            both = [first, later]
            is_short = any(rank.process.exitcode is not None for rank in both)
            if later.name == f"{first.name}.1" and is_short and not all(self.is_in(rank) for rank in both):
                for rank in both:
                    rank.process.kill()

    def is_in(self, worker: Worker) -> bool:
        return (self.folder / f"{worker.name}.in").exists()

    def restart_host(self) -> None:
        self.host.kill()
        self.host.join(20)
        if self.draw.random() < 0.4:
            self.join()
        time.sleep(self.draw.choice([0.0, 0.0, 0.5, 2.0]))
        self.host, _ = start_coordinator(self.folder, port=self.invite.port, **self.told)

    def stop(self, pids: list[int]) -> None:
        """For less than patience, or for more."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(self.draw.choice([0.2, PATIENCE_S + 1.0]) if number == signal.SIGSTOP else 0.0)

    def disturb(self) -> None:
        alive = [worker for worker in self.workers if worker.process.is_alive()]
        what = self.draw.choice(["kill", "join", "join", "host", "host", "stop worker", "stop host", "leave"])
        if what == "join" and len(alive) < 4:
            self.join()
        elif what == "host" and self.host.is_alive():
            self.restart_host()
        elif what == "stop host" and self.host.is_alive():
            self.stop([self.host.pid])
        elif alive and what in ("kill", "stop worker", "leave"):
            victim = self.draw.choice(alive)
            assert victim.process.pid is not None
            if what == "stop worker":
                self.stop([victim.process.pid])
            else:
                self.killed.add(victim.name)
                with suppress(ProcessLookupError):
                    victim.send(signal.SIGKILL if what == "kill" else signal.SIGUSR1)
        else:
            return
        self.done.append(what)

    def live(self) -> None:
        for _ in range(self.first):
            self.join()
        wait_until(lambda: (self.folder / "step").exists() or not self.host.is_alive(), 120)
        for _ in range(40 if self.is_long else self.draw.randint(3, 9)):
            time.sleep(self.draw.uniform(0.0, 0.8))
            if not self.host.is_alive():
                break
            self.disturb()
        assert not self.is_long or {"kill", "join", "host", "stop worker"} <= set(self.done), self.done
        deadline = time.monotonic() + LONGEST_S / 2
        while self.host.is_alive():  # somebody does what is left
            assert time.monotonic() < deadline, f"the host has not ended: {self.describe()}"
            if self.ends_badly and any(self.folder.glob("*.pt")):
                self.ends_badly = False
                self.done.append("host at the end")
                self.restart_host()
            self.end_halves()
            if not any(worker.process.is_alive() for worker in self.workers):
                self.join()
            self.host.join(0.02 if self.ends_badly else 0.5)
        self.end_halves()
        for worker in self.workers:
            if "." in worker.name:  # a later rank, whose node has no launcher here that would end it with the first
                worker.process.kill()
            worker.process.join(60)
            assert worker.process.exitcode is not None, f"{worker.name} has not ended: {self.describe()}"

    def describe(self) -> str:
        alive = [worker.name for worker in self.workers if worker.process.is_alive()]
        return f"{self.done}, {alive} alive, {sorted(path.name for path in self.folder.iterdir())}"

    # What came of it

    def judge(self) -> str:
        for error in [*self.folder.glob("*.error")]:
            said = error.read_text()
            assert any(words in said for words in ALLOWED), f"{error.name}: {said}"
        ended = {w.name: self.weights_of(w) for w in self.workers if (self.folder / f"{w.name}.pt").exists()}
        found = {name: weights for name, weights in ended.items() if weights is not None}
        assert found, f"nobody saw the end: {self.describe()}"
        want = self.expected()
        for name, weights in found.items():
            first, other = next(iter(found.items()))
            try:
                assert_same(weights, other if self.policy != "sync" else want)
            except AssertionError as error:
                raise AssertionError(f"{name} and {first} differ: {error}") from None
            if self.is_bare:
                torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-5)
        return f"{len(found)} finished; {', '.join(self.done)}"

    def weights_of(self, worker: Worker) -> dict[str, torch.Tensor] | None:
        try:
            return worker.weights
        except Exception:
            assert worker.name in self.killed, f"{worker.name} wrote a file that cannot be read"
            return None  # it was killed as it wrote it

    def expected(self) -> dict[str, torch.Tensor]:
        journal = Journal(self.folder / "journal.sqlite")
        try:
            proofs = [prove(journal.ranges(epoch), ROWS) for epoch in range(self.epochs)]
            assert all(proof.holds for proof in proofs), proofs
            if self.policy == "sync":
                assert journal.steps() == list(range(1, self.steps + 1))
                return plain_run(self.epochs)
            return self.plain_windows(list(journal._rows())) if self.is_bare else {}
        finally:
            journal.close()

    def plain_windows(
        self, records: list[tuple[dict[str, Any], list[tuple[int, int, int]]]]
    ) -> dict[str, torch.Tensor]:
        """One process and no Potluck: each recorded range by a replica of its own, then their mean by rows."""
        torch.set_num_threads(1)
        model, _, (x, y) = build(bare=True)
        decisions = [json.loads(line) for line in (self.folder / "decisions").read_text().splitlines()]
        for record, ranges in records:
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, record["epoch"])))
            sizes = [end - start for start, end, _ in sorted(ranges)]
            tried = [told for version, *told in reversed(decisions) if version == record["step"] - 1]
            # Of a step that all took together the ranges are slices, and the rows that were planned are workers'.
            anchor, planned = next(
                (anchor, rows)
                for anchor, rows in tried
                if ([count for count in rows if count] == sizes if anchor else sum(rows) == record["rows"])
            )
            workers = len(planned)
            if not anchor:
                first = min(start for start, _, _ in ranges)
                workers, ranges = 1, [(first, first + record["rows"], 0)]
            mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for start, end, _ in ranges:
                replica = copy.deepcopy(model)
                own = torch.optim.SGD(replica.parameters(), lr=self.options["lr"])
                for rows in torch.tensor_split(order[start:end], -(-(end - start) // -(-BATCH // workers))):
                    own.zero_grad()
                    F.cross_entropy(replica(x[rows]), y[rows]).backward()
                    own.step()
                for name, parameter in replica.named_parameters():
                    mean[name] += parameter.detach() * ((end - start) / record["rows"])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(mean[name])
        return dict(model.state_dict())


def live(seed: int, policy: str, *, is_long: bool = False) -> None:
    """What it leaves behind stays where it ends wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{policy}-{seed}-"))
    started = time.monotonic()
    try:
        schedule = Schedule(seed, policy, folder, is_long=is_long)
        schedule.live()
        said = schedule.judge()
    finally:
        close_all()
    shutil.rmtree(folder)
    print(f"{policy} {seed}: right, {time.monotonic() - started:.0f} s, {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="cadence")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, help="the first seed; today's, if it is not given")
    parser.add_argument("--minutes", type=float, default=60.0, help="no schedule begins after that")
    asked = parser.parse_args()
    numbers = seeds(asked.seeds) if asked.first is None else list(range(asked.first, asked.first + asked.seeds))
    deadline, begun = time.monotonic() + 60 * asked.minutes, []

    def live_in_time(seed: int) -> None:
        if time.monotonic() < deadline:
            begun.append(seed)
            live(seed, asked.policy)

    wrong = soak(numbers, live_in_time, LONGEST_S)
    print(f"{asked.policy}: {len(begun)} schedules from seed {numbers[0]}, {len(wrong)} wrong {wrong}", flush=True)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":  # what its processes are started with is found in the module, which has no other name there
    from tests.fleet import soak as module

    module.main()

"""A link over a store: the same sums on every worker, also on one that was killed and started again."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.coded_numbers import CODINGS
from potluck.coded_tensors import round_
from potluck.errors import StoreError, TheirProtocolError, WorkerLost
from potluck.link.link import Link
from potluck.link.store_link import StoreLink
from potluck.store.sessions import StoreSession
from potluck.store.store import Store
from tests.bare import Tell, Worker
from tests.quick import first_of
from tests.servers import BUCKET, rclone
from tests.unit.test_datastore import files, wait_until

PATIENCE_S = 20.0


def link_at(url: str, rank: int, world: int, *, keeps: bool = False, patience_s: float = PATIENCE_S) -> StoreLink:
    return opened(StoreLink(rank, world, keeps=keeps), url, patience_s)


def opened(link: StoreLink, url: str, patience_s: float = PATIENCE_S) -> StoreLink:
    store = Store(url, run="run", generation=1, patience_s=patience_s)
    link.open(StoreSession(store, f"worker-{link.rank}", f"worker {link.rank}"))
    return link


def url_of(folder: Path) -> str:
    return f"file://{folder}"


def numbers(rank: int, dtype: torch.dtype = torch.float32, size: int = 1000) -> Tensor:
    """Such that the order in which they are added changes the sum."""
    generator = torch.Generator().manual_seed(rank)
    scale = torch.tensor([1e-4, 1.0, 1e4])[torch.randint(3, (size,), generator=generator)]
    return (torch.randn(size, generator=generator) * scale).to(dtype)


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


# What every link does


def do_everything(tell: Tell, url: str, rank: int, world: int) -> None:
    link: Link = link_at(url, rank, world)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        mine = numbers(rank, dtype)
        link.start_sum(mine).wait()
        assert torch.equal(mine, in_order([numbers(other, dtype) for other in range(world)])), dtype
    for coding in CODINGS.values() if world > 1 else ():
        mine = numbers(rank)
        link.start_coded_sum(mine, coding).wait()
        assert torch.equal(mine, in_order([round_(coding, numbers(other)) for other in range(world)])), coding
    many = [numbers(100 * number + rank, size=50) for number in range(20)]
    begun = [link.start_sum(each) for each in many]
    rows = link.start_gather([rank, 0.1 * rank])
    for pending in reversed(begun):
        pending.wait()
    for number, each in enumerate(many):
        assert torch.equal(each, in_order([numbers(100 * number + other, size=50) for other in range(world)]))
    assert rows.wait() == [[other, 0.1 * other] for other in range(world)] and rows.is_here()
    assert link.gather_rows([]) == [[]] * world
    assert link.gather_bytes(bytes([rank]) * rank) == [bytes([other]) * other for other in range(world)]
    shown = numbers(rank).reshape(10, 100).t()
    link.broadcast(shown)
    assert torch.equal(shown, numbers(0).reshape(10, 100).t())
    link.close()


@pytest.mark.parametrize("world", first_of([1, 2, 3]))
def test_every_operation_gives_what_any_link_gives_and_leaves_nothing(world: int, tmp_path: Path) -> None:
    workers = [Worker(do_everything, url_of(tmp_path), rank, world) for rank in range(world)]
    for worker in workers:
        worker.finish()
    assert list(tmp_path.iterdir()) == []


def talk_in_parts(tell: Tell, url: str, rank: int) -> None:
    link = StoreLink(rank, 4)
    pairs, columns = link.part([[0, 1], [2, 3]]), link.part([[0, 2], [1, 3]])
    opened(link, url)
    assert (pairs.rank, pairs.world, columns.rank) == (rank % 2, 2, rank // 2)
    assert columns.gather_rows([rank]) == [[rank % 2], [rank % 2 + 2]]
    for _ in range(1 + rank // 2):
        assert pairs.gather_rows([rank]) == [[rank // 2 * 2], [rank // 2 * 2 + 1]]
    everybody = link.gather_rows([rank])
    assert everybody == [[0], [1], [2], [3]]
    tell(link.position)
    pairs.close()
    link.close()


def test_parts_count_for_themselves(tmp_path: Path) -> None:
    workers = [Worker(talk_in_parts, url_of(tmp_path), rank) for rank in range(4)]
    found = [worker.hear() for worker in workers]
    assert found[0] == {"all": 1, "part-0-0": 1, "part-1-0": 1}
    assert found[3] == {"all": 1, "part-0-1": 2, "part-1-1": 1}
    for worker in workers:
        worker.finish()
    assert list(tmp_path.iterdir()) == []


def test_workers_talk_through_a_bucket(tmp_path: Path) -> None:
    with rclone(tmp_path) as server:
        workers = [Worker(do_everything, f"s3://{BUCKET}/x", rank, 2, env=server.env) for rank in range(2)]
        for worker in workers:
            worker.finish()
        assert files(tmp_path) == []


# When contributions go


def contributions(folder: Path) -> list[str]:
    return [name for name in files(folder) if "/link-" in name]


def two_links(folder: Path, **options: Any) -> tuple[StoreLink, StoreLink]:
    return link_at(url_of(folder), 0, 2, **options), link_at(url_of(folder), 1, 2, **options)


def sum_of_both(first: StoreLink, second: StoreLink) -> None:
    tensors = [numbers(0), numbers(1)]
    begun = [first.start_sum(tensors[0]), second.start_sum(tensors[1])]
    for pending in begun:
        pending.wait()
    assert torch.equal(*tensors)


def test_what_all_have_read_is_deleted_while_they_go_on(tmp_path: Path) -> None:
    first, second = two_links(tmp_path)
    sum_of_both(first, second)
    wait_until(lambda: contributions(tmp_path) == [])
    pending = first.start_sum(numbers(0))
    other = second.start_sum(numbers(1))
    other.wait()
    assert len(contributions(tmp_path)) == 2, "the first has not read it yet"
    pending.wait()
    wait_until(lambda: contributions(tmp_path) == [])
    first.broadcast(numbers(0))
    assert len(contributions(tmp_path)) == 1
    second.broadcast(numbers(1))
    wait_until(lambda: contributions(tmp_path) == [])
    first.close()
    second.close()


def test_what_is_kept_goes_once_all_are_durable_behind_it(tmp_path: Path) -> None:
    first, second = two_links(tmp_path, keeps=True)
    for _ in range(3):
        sum_of_both(first, second)
    after_three = first.position
    assert json.loads(json.dumps(after_three)) == {"all": 3}
    sum_of_both(first, second)
    assert len(contributions(tmp_path)) == 8
    first.durable()
    second.durable(after_three)
    wait_until(
        lambda: [name[-19:] for name in contributions(tmp_path)] == ["000000000003-from-0", "000000000003-from-1"]
    )
    second.durable()
    wait_until(lambda: contributions(tmp_path) == [])
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_may_still_need_survives_that_all_closed(tmp_path: Path) -> None:
    first, second = two_links(tmp_path, keeps=True)
    sum_of_both(first, second)
    first.durable()
    first.close()
    second.close()  # as on an error: nothing of it is saved
    assert len(contributions(tmp_path)) == 2
    again = link_at(url_of(tmp_path), 1, 2, keeps=True)
    mine = numbers(99)  # not what it gave before; but what it gave before counts
    again.start_sum(mine).wait()
    assert torch.equal(mine, in_order([numbers(0), numbers(1)]))
    again.durable()
    again.close()
    assert list(tmp_path.iterdir()) == []


# Killed


def train(tell: Tell, url: str, saved: str, rank: int, steps: int, driver: bool) -> None:
    """Each step mixes in what all computed from their state; every third step's state is saved."""
    link = StoreLink(rank, 2, keeps=True)
    part = link.part([[0, 1]])
    opened(link, url)
    path = Path(saved)
    state = json.loads(path.read_text()) if path.exists() else {"step": 0, "x": [1.0, 2.0 + rank], "position": {}}
    link.stand_at(state["position"])
    tell(state["step"])
    for step in range(state["step"], steps):
        if driver:
            tell.listen()
        # What is computed again differs in its last bits, as on a GPU.
        given = torch.tensor(state["x"], dtype=torch.float64) * (rank + 0.5) * (1 + 1e-12 * random.random())
        link.start_sum(given).wait()
        seen = part.gather_rows([float(given[0]), step])
        state["x"] = [float(given[0] * 0.3 + seen[1][0] * 0.1), float(given[1] * 0.2)]
        if step % 3 == 2:
            state |= {"step": step + 1, "position": link.position}
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").replace(path)
            link.durable()
        tell((step, state["x"]))
    link.durable()
    link.close()


class Two:
    """Two workers that train; what they came to, step by step, must never change, whoever is killed."""

    def __init__(self, folder: Path, steps: int, *, driver: bool) -> None:
        self._folder, self._steps, self._driver = folder, steps, driver
        self.done: list[dict[int, list[float]]] = [{}, {}]
        self.workers = [self._start(rank) for rank in range(2)]
        assert [worker.hear() for worker in self.workers] == [0, 0]

    def hear_step(self, rank: int) -> int:
        step, x = self.workers[rank].hear()
        assert self.done[rank].setdefault(step, x) == x, "a step that is done again comes to the same"
        return int(step)

    def kill(self, rank: int) -> int:
        """The step from which its successor goes on."""
        assert self.workers[rank].is_alive(), "it had ended already, so this would prove nothing"
        self.workers[rank].kill()
        self.workers[rank] = self._start(rank)
        return int(self.workers[rank].hear())

    def finish(self) -> None:
        for worker in self.workers:
            worker.finish()
        # What a worker told just before it was killed may have gone unheard.
        assert sorted(self.done[0].keys() | self.done[1].keys()) == list(range(self._steps))
        shared = sorted(self.done[0].keys() & self.done[1].keys())
        assert shared[-1] == self._steps - 1
        assert [self.done[0][step] for step in shared] == [self.done[1][step] for step in shared]
        assert list((self._folder / "store").iterdir()) == []

    def _start(self, rank: int) -> Worker:
        url, saved = url_of(self._folder / "store"), str(self._folder / f"saved-{rank}")
        return Worker(train, url, saved, rank, self._steps, self._driver)


@pytest.mark.parametrize(
    "kills",
    first_of(
        [
            {1: [(0, "between")], 2: [(1, "within")], 4: [(1, "between"), (0, "within")], 6: [(0, "between")]},
            {0: [(0, "within"), (1, "within"), (0, "within")], 5: [(1, "within"), (1, "between")]},
        ]
    ),
)
def test_a_worker_killed_between_and_within_operations_reads_the_very_same_values(
    kills: dict[int, list[tuple[int, str]]], tmp_path: Path
) -> None:
    two = Two(tmp_path, 8, driver=True)
    for step in range(8):
        for rank, when in kills.get(step, []):
            if when == "within":  # it has given its part, and waits for the other's
                two.workers[rank].say("go")
                given = tmp_path / f"store/run/g000001/link-all/n{step:012d}-from-{rank}"
                wait_until(given.exists)
            for again in range(two.kill(rank), step):
                two.workers[rank].say("go")
                assert two.hear_step(rank) == again
        for worker in two.workers:
            worker.say("go")
        assert [two.hear_step(rank) for rank in range(2)] == [step, step]
    two.finish()


def test_workers_killed_at_any_moment_read_the_very_same_values(tmp_path: Path) -> None:
    steps = 150
    two = Two(tmp_path, steps, driver=False)
    for rank, moment in ((0, 3), (1, 20), (0, 21), (1, 40), (1, 41), (0, 60)):
        while two.hear_step(rank) < moment:
            pass
        two.kill(rank)
    for rank in range(2):
        while two.hear_step(rank) < steps - 1:
            pass
    two.finish()


def test_a_state_from_before_what_was_told_is_refused(tmp_path: Path) -> None:
    first, second = two_links(tmp_path, keeps=True)
    sum_of_both(first, second)
    first.durable()
    second.durable()
    wait_until(lambda: contributions(tmp_path) == [])
    again = link_at(url_of(tmp_path), 1, 2, keeps=True)
    with pytest.raises(StoreError, match=r"Worker 1 starts at operation 0, but has told .* nothing before 1"):
        again.gather_rows([1])
    again.stand_at({"all": 1})
    again.start_gather([2])
    for link in (first, second, again):
        link.close()


# What goes wrong


def test_a_wait_in_vain_names_the_worker(tmp_path: Path) -> None:
    link = link_at(url_of(tmp_path), 0, 3, patience_s=0.2)
    with pytest.raises(WorkerLost, match=r"Waited 0.2 s in vain for worker 1, for operation 0 of run run, in file:"):
        link.gather_rows([1])
    link.close()


def test_a_wait_in_vain_in_a_part_names_the_worker_as_all_know_it(tmp_path: Path) -> None:
    link = StoreLink(3, 4)
    part = link.part([[0, 1], [2, 3]])
    opened(link, url_of(tmp_path), patience_s=0.2)
    with pytest.raises(WorkerLost, match=r"for worker 2, for operation 0 of run run \(part-0-1\)"):
        part.start_sum(torch.zeros(3)).wait()
    link.close()


def test_a_worker_that_left_is_not_waited_for(tmp_path: Path) -> None:
    first, second = two_links(tmp_path)
    second.close()
    with pytest.raises(WorkerLost, match="Worker 1 left before operation 0"):
        first.gather_rows([1])
    first.close()


def test_two_workers_of_one_rank_do_not_go_on_together(tmp_path: Path) -> None:
    first = link_at(url_of(tmp_path), 0, 2)
    second = link_at(url_of(tmp_path), 0, 2)
    with pytest.raises(StoreError, match="Another worker has become worker 0"):
        first.gather_rows([1])
    first.close()
    second.close()


def test_tensors_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    first, second = two_links(tmp_path)
    pending = first.start_sum(torch.zeros(3)), second.start_sum(torch.zeros(4))
    with pytest.raises(TheirProtocolError, match=r"Worker 1 gave 16 bytes to operation 0 .* worker 0 has 12"):
        pending[0].wait()
    first.close()
    second.close()


def test_a_link_that_is_closed_just_as_it_tells_where_it_stands_ends(tmp_path: Path) -> None:
    """close() sets two events. The thread that tells clears one of them, and must still see the other."""
    link = link_at(url_of(tmp_path), 0, 1)
    first = link._changed

    class ClosedMeanwhile(threading.Event):
        def is_set(self) -> bool:
            link._closing.set()
            self.set()
            return super().is_set()

    link._changed = ClosedMeanwhile()
    first.set()
    link._teller.join(PATIENCE_S)
    assert not link._teller.is_alive()
    link.close()


def test_a_failure_in_the_background_ends_a_wait(tmp_path: Path) -> None:
    link = link_at(url_of(tmp_path), 0, 2)
    (tmp_path / "run/g000001/link-all").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be used"):
        link.start_sum(torch.zeros(3)).wait()
    link.close()

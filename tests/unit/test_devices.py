"""Which device a rank computes on and over what ranks talk, for 1 to 8 ranks on every kind of machine that we know of.

Nothing here needs a GPU: how many there are is told to torch, and groups of several ranks are torch's fake ones, whose
collectives return at once. So this says what is chosen, and how a model is then split; that NCCL between several GPUs
gives the right numbers it does not say, and nobody has run that.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import potluck
from potluck import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from potluck.coded_numbers import coding_of
from potluck.devices import choose_device
from potluck.link import link
from tests.gathered import home
from tests.parity.test_shard import data, loss_of, make
from tests.quick import first_of
from tests.ranks import run_ranks

NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", link.RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpus: int, nccl: bool = True) -> list[torch.device]:
    """A machine with as many GPUs. Returns the devices that are made the current one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    return chosen


def place(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, here: int) -> None:
    """As torchrun does, on machines with `here` ranks each."""
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


LAYOUTS = [(world, here, gpus) for world in range(1, 9) for here in range(1, world + 1) if world % here == 0
           for gpus in (0, 1, 2, 3, 4, 8)]  # fmt: skip


@pytest.mark.parametrize(("world", "here", "gpus"), LAYOUTS)
def test_each_rank_has_a_device_and_all_of_them_one_backend(
    world: int, here: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = pretend(monkeypatch, gpus=gpus)
    devices, backends = [], []
    for rank in range(world):
        place(monkeypatch, rank, world, here)
        devices.append(str(choose_device()))
        backends.append(link._backend(torch.device(devices[-1])))
    assert devices == [f"cuda:{rank % here % gpus}" if gpus else "cpu" for rank in range(world)]
    assert [str(device) for device in chosen] == (devices if gpus else [])
    # NCCL refuses two ranks on one GPU; Gloo takes them, through host memory.
    has_own = gpus > 0 and all(len(set(devices[first : first + here])) == here for first in range(0, world, here))
    assert backends == [NCCL if has_own else GLOO] * world


def test_a_torch_without_nccl_and_a_mac_make_do_with_gloo_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=2, nccl=False)
    assert link._backend(choose_device()) == GLOO
    pretend(monkeypatch, gpus=0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (str(choose_device()), link._backend(choose_device())) == ("mps", GLOO)
    assert str(choose_device(is_whole=False)) == "cpu", "no process group takes the parts of a replica from there"


def sums(pretends: bool) -> list[list[float]]:
    """As on a device whose tensors no process group takes: they go by host memory."""
    if pretends:
        answers = itertools.cycle([False, True])  # of the tensor, and of its copy in host memory
        link.travels = lambda device: next(answers)
    joined = link.connect(torch.device("cpu"), patience_s=20)
    one, same = torch.full((600,), 0.1 + joined.rank), torch.full((5,), float(joined.rank))
    coded = torch.linspace(-1, 1 + joined.rank, 600)
    works = [joined.start_sum(one), joined.start_coded_sum(coded, coding_of("int8"))]
    for work in works:
        work.wait()
    joined.broadcast(same)
    joined.close()
    return [one.tolist(), coded.tolist(), same.tolist()]


def test_what_no_group_takes_goes_by_host_memory() -> None:
    assert run_ranks(2, sums, True) == run_ranks(2, sums, False)


@pytest.mark.parametrize(
    ("world", "here", "gpus", "backend"),
    [(1, 1, 1, NCCL), (2, 2, 2, NCCL), (8, 8, 8, NCCL), (8, 4, 4, NCCL),
     (2, 2, 1, GLOO), (8, 8, 4, GLOO), (4, 4, 0, GLOO)],
)  # fmt: skip
def test_a_run_joins_a_group_of_that_backend(
    world: int, here: int, gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpus=gpus)
    place(monkeypatch, world - 1, world, here)
    make_group, asked = dist.init_process_group, []

    def fake_group(backend: str, **told: object) -> None:
        asked.append(backend)
        make_group("fake", store=FakeStore(), rank=told["rank"], world_size=told["world_size"])

    monkeypatch.setattr(dist, "init_process_group", fake_group)
    monkeypatch.setattr(link, "rendezvous_at", lambda *_, **__: iter([(dist.HashStore(), 0, 0)]))
    monkeypatch.setattr(link, "_agree_on_backend", lambda store, rank, world, own: own)  # the others are not there
    monkeypatch.setattr(link, "_wait_for_connections", lambda store, rank, world: None)
    joined = link.connect(choose_device(), patience_s=5)
    assert asked == [backend] and (joined.rank, joined.world) == (world - 1, world)
    joined.close()
    assert not dist.is_initialized()


def told_backends(choices: list[str]) -> str:
    rank = int(os.environ["RANK"])
    link._backend = lambda device: choices[rank]
    joined = link.connect(torch.device("cpu"), patience_s=20)
    assert joined.gather_rows([float(rank)]) == [[0.0], [1.0]]
    return str(dist.get_backend())


def test_machines_that_would_choose_differently_agree() -> None:
    """One has a GPU for each of its ranks and the other does not: each by itself, they would wait in vain."""
    assert run_ranks(2, told_backends, [NCCL, GLOO]) == [GLOO, GLOO]


def connected_at(late: int) -> list[float]:
    """When this rank was connected, and when connect() returned; `late` takes longer."""
    connect, stamps = dist.init_process_group, []

    def slow_connect(*arguments: Any, **options: Any) -> None:
        connect(*arguments, **options)
        if int(os.environ["RANK"]) == late:
            time.sleep(0.3)
        stamps.append(time.monotonic())

    dist.init_process_group = slow_connect
    link.connect(torch.device("cpu"), patience_s=20)
    return [*stamps, time.monotonic()]


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_leaves_connect_before_all_are_connected(late: int) -> None:
    """One that was refused its settings and exited at once was told of as a lost worker by those still connecting."""
    stamps = run_ranks(2, connected_at, late)
    assert min(returned for _, returned in stamps) >= max(connected for connected, _ in stamps)


STRATEGIES: dict[str, Callable[[int], ShardingStrategy]] = {
    "full": lambda world: FullShard(),
    "zero2": lambda world: ShardGradOp(),
    "zero1": lambda world: ShardGradOp(keep_gradients=True),
    "uneven": lambda world: FullShard(weights=tuple(map(float, range(1, world + 1)))),
    "hybrid": lambda world: HybridShard(intra_node_size=min(2, world)),
}


@pytest.mark.parametrize("world", first_of([1, 2, 4, 8]))
@pytest.mark.parametrize("name", first_of(STRATEGIES))
def test_ranks_own_every_parameter_between_them_with_torchs_own_collectives(name: str, world: int) -> None:
    """A fake group is no Gloo: the branch is the one that NCCL takes."""
    strategy = STRATEGIES[name](world)
    owned = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        model, optimizer = make()
        trained = {id(parameter): parameter.numel() for parameter in model.parameters() if parameter.requires_grad}
        sharded = potluck.shard(model, optimizer, strategy)
        loss_of(model, data(home())[:4]).backward()
        sharded.step()
        sharded.share()
        owned.append(sum(run.parameter.numel() for run in sharded.runs))
        dist.destroy_process_group()
    nodes = strategy.nodes(world) if isinstance(strategy, HybridShard) else 1
    assert sum(owned) == nodes * sum(trained.values())

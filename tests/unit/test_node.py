"""A node's parts, put together and handed out; how its first rank asks for the others; what it tells them."""

import os
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck.agree.policy import Cadence
from potluck.composition import Wanted
from potluck.engine.node_listener import NodeListener
from potluck.engine.start import hosted_engine
from potluck.environment import RENDEZVOUS
from potluck.errors import ConfigError, PotluckError
from potluck.fleet.client import Average, Client
from potluck.fleet.description import BUFFERS, Part
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.invite import Invite
from potluck.link.link import connect
from potluck.link.ranks import NODE, RANKS, Request, asked_ranks, is_later_rank, meet, ranks_here
from potluck.replica.precision import StepConfig
from potluck.sharding.strategy import HybridShard
from potluck.sums.node_sums import NodeParts
from potluck.wire.codec import encode
from potluck.wire.messages import (
    Admitted,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Committed,
    Shutdown,
    StateChunk,
    Welcome,
)
from tests.fleet.fleet import wait_until
from tests.ranks import run_ranks
from tests.unit.test_description import DESCRIBED

PARTS = [Part(1, None, (4, 6)), Part(0, None, (3,)), Part(None, BUFFERS, (2,))]
HELD = [
    [[(0, 2), (4, 7)], [(0, 3)], [(0, 2)]],
    [[(2, 4), (7, 10)], [], [(0, 2)]],
]
"""Of two ranks; the second has nothing of the second part, and both have the buffers."""
NOBODY = Invite("127.0.0.1", 1, "", None)


def there_and_back() -> list[Any]:
    link = connect(torch.device("cpu"), 20.0)
    parts = NodeParts(link, PARTS, HELD[link.rank], before_next=lambda: None)
    found: list[Any] = []
    for index, part in enumerate(PARTS[:2]):
        mine = [torch.arange(100.0 * index, 100.0 * index + part.floats)[a:b] for a, b in HELD[link.rank][index]]
        whole = parts.collect(index, torch.cat([torch.empty(0), *mine]))
        found += [None if whole is None else whole.tolist(), parts.hand_out(index, whole).tolist()]
    buffers = torch.tensor([7.0, 8.0]) if link.rank == 0 else None
    return [*found, parts.hand_out(2, buffers).tolist()]


def test_a_part_is_whole_on_the_first_rank_and_each_gets_its_own_numbers_back() -> None:
    first, second = run_ranks(2, there_and_back)
    assert first == [list(range(10)), [0, 1, 4, 5, 6], [100, 101, 102], [100, 101, 102], [7, 8]]
    assert second == [None, [2, 3, 7, 8, 9], None, [], [7, 8]]


def as_parts_leave() -> list[Any]:
    link = connect(torch.device("cpu"), 20.0)
    left: list[int] = []
    parts = NodeParts(link, PARTS, HELD[link.rank], before_next=lambda: left.append(1))
    wholes = []
    for index in range(2):
        held = sum(end - start for start, end in HELD[link.rank][index])
        wholes.append(parts.collect(index, torch.full((held,), 1.0 + index)))
    return [len(left), *(whole.tolist() for whole in wholes if whole is not None)]


def test_a_part_is_there_until_the_next_one_takes_its_memory() -> None:
    """Which waits until it has left."""
    (left, first, second), _ = run_ranks(2, as_parts_leave)
    assert left == 2 and second == [2.0] * 3 and first == [2.0] * 3 + [1.0] * 7


def with_a_gap() -> str:
    link = connect(torch.device("cpu"), 20.0)
    with pytest.raises(PotluckError) as caught:
        NodeParts(link, PARTS[:1], [[(0, 2)]] if link.rank == 0 else [[(3, 10)]], before_next=lambda: None)
    return str(caught.value)


def test_numbers_that_nobody_holds_are_a_fault_on_every_rank() -> None:
    assert all("once: after 2 of 10 there is another" in sentence for sentence in run_ranks(2, with_a_gap))


# What is told


class Spoken(Client):
    """In place of the first rank's client: what a host would say."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__(NOBODY, name="n", kind="cpu", say=self.said.append)
        self.welcome = Welcome(3, 20_000, "a recipe")
        self.heard = [
            Admitted(5, 1, "{}"),
            StateChunk(2, b"12345"),
            Committed(6, 1, 1.0, 0.5, b"used", 3, 0, '{"workers": []}'),
            None,
            ConnectionLost("it hung up"),
        ]

    def receive(self, timeout_s: float | None = None) -> Any:
        return self.heard.pop(0) if self.heard else Shutdown()


def join_node(link: Any) -> NodeListener:
    silent = Client(NOBODY, name="n", kind="cpu", say=lambda sentence: None)
    return NodeListener(Spoken() if link.rank == 0 else silent, link)


def listen() -> list[Any]:
    link = connect(torch.device("cpu"), 20.0)
    listener = join_node(link)
    stops: list[int] = []
    listener.on_stop = lambda: stops.append(1)
    client = listener.client
    assert client.welcome is not None
    found: list[Any] = [client.worker_id, client.patience_s, client.welcome.recipe]
    for _ in range(5):
        heard = listener.receive(timeout_s=0.0)
        found.append([type(heard).__name__, getattr(heard, "step", 0), len(getattr(heard, "data", b""))])
    found.append(len(stops))
    listener.wants_stop = link.rank == 1
    return [*found, type(listener.receive()).__name__, len(stops)]


def test_every_rank_hears_what_the_first_hears_and_a_wish_to_stop_of_any() -> None:
    first, second = run_ranks(2, listen)
    assert first == second
    assert first[:3] == [3, 20.0, "a recipe"]
    heard = [
        ["Admitted", 5, 0],
        ["StateChunk", 0, 5],
        ["Committed", 6, 0],
        ["NoneType", 0, 0],
        ["ConnectionLost", 0, 0],
    ]
    assert first[3:] == [*heard, 0, "Shutdown", 1]


def prepare_a_batch_of_a_row_each() -> list[str]:
    link = connect(torch.device("cpu"), 20.0)
    listener, device = join_node(link), torch.device("cpu")
    wanted = Wanted(policy=Cadence.published(), strategy=HybridShard(intra_node_size=2), has_host=True)
    engine = hosted_engine(listener, device, link, wanted, StepConfig())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.prepare(model, optimizer, (torch.zeros(8, 3), torch.zeros(8, 4)), batch_size=2)
    listener.client.is_closed = True  # there is nobody to say goodbye to
    return listener.client.said if isinstance(listener.client, Spoken) else []


def test_rows_that_are_alone_on_a_rank_are_named_before_the_first_step() -> None:
    (said,), _ = run_ranks(2, prepare_a_batch_of_a_row_each)
    assert "(BatchNorm1d) takes means" in said and "some of 2 workers have 1 row of a batch of 2" in said


# Averages, one by one


def averages_of_a_host_that_hangs_up(listener: socket.socket, hung_up: threading.Event) -> None:
    """A step's averages and its commit, all before the first of them is taken."""
    connection, _ = listener.accept()
    connection.recv(1 << 16)
    for message in [
        Welcome(3, 100, ""),  # so that the client's writer has something to say soon
        AveragedBlockGradient(6, 1, np.full(10, 1.0, np.float32), np.array([4, 6], "<u4")),
        AveragedBlockGradient(6, 0, np.full(3, 2.0, np.float32), np.array([3], "<u4")),
        AveragedNonBlockGradient(6, BUFFERS, np.full(2, 3.0, np.float32)),
        Committed(6, 1, 1.0, 0.5, b"", 3, 0, '{"workers": []}'),
    ]:
        connection.sendall(encode(message))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    hung_up.set()


def test_averages_that_nobody_has_taken_yet_stay_what_they_were_when_the_host_hangs_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a node that was stopped for longer than the host waits: it applies what it was sent, then joins again."""
    monkeypatch.setattr("potluck.fleet.host_connector.connect_local", lambda port: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hung_up = threading.Event()
        host = threading.Thread(target=averages_of_a_host_that_hangs_up, args=(listener, hung_up), daemon=True)
        host.start()
        client = Client(Invite("127.0.0.1", listener.getsockname()[1], "", None), name="n", kind="cpu", say=print)
        client.description = replace(DESCRIBED, parts=tuple(PARTS))
        client.take_averages_one_by_one(10)
        client.connect()
        assert hung_up.wait(20)
    session: Any = client.session
    wait_until(lambda: session.lost is not None)
    heard = [client.receive() for _ in range(5)]
    client.close()
    found = [(a.step, a.part, a.floats.tolist()) for a in heard if isinstance(a, Average)]
    assert found == [(6, 0, [1.0] * 10), (6, 1, [2.0] * 3), (6, 2, [3.0] * 2)]
    assert [type(each) for each in heard[3:]] == [Committed, ConnectionLost]


# How ranks come together


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (NODE, RANKS, RENDEZVOUS, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back, also where it was not set
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_first_rank_asks_and_is_answered(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = Request(tmp_path / "ranks")
    bare.setenv(NODE, str(request.place))
    bare.setenv("RANK", "1")  # the second worker of this machine, and the first rank of it
    assert not is_later_rank() and request.look() is None
    thread = threading.Thread(target=meet, args=(3,))
    thread.start()
    while (asked := request.look()) is None:
        pass
    request.answer({"WORLD_SIZE": "3", RENDEZVOUS: "there", "RANK": "0"})
    thread.join(20)
    assert asked == 3 and request.look() is None
    assert {name: os.environ[name] for name in ("WORLD_SIZE", RENDEZVOUS, "RANK")} == {
        "WORLD_SIZE": "3", RENDEZVOUS: "there", "RANK": "0",
    }  # fmt: skip
    assert NODE not in os.environ and not is_later_rank()


def test_a_later_rank_knows_what_it_is(bare: pytest.MonkeyPatch) -> None:
    bare.setenv(RENDEZVOUS, "there")
    bare.setenv("RANK", "1")
    bare.setenv("WORLD_SIZE", "2")
    assert is_later_rank()
    meet(2)
    with pytest.raises(ConfigError, match="intra_node_size of 4, and 2 ranks were started"):
        meet(4)


def test_without_anybody_to_ask_a_sentence_says_how_to_start(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"intra_node_size of 2 needs as many processes.*potluck join"):
        meet(2)


def test_how_many_ranks_a_worker_has_is_its_machines_affair(bare: pytest.MonkeyPatch) -> None:
    assert ranks_here(gpus=4) == 1  # started by hand: nobody would start the others
    bare.setenv(NODE, "there")
    assert (ranks_here(gpus=0), ranks_here(gpus=4)) == (1, 4)
    bare.setenv("LOCAL_WORLD_SIZE", "2")  # another worker has the other two
    assert ranks_here(gpus=4) == 2
    bare.setenv(RANKS, "3")
    assert ranks_here(gpus=4) == asked_ranks() == 3
    bare.delenv(NODE)
    bare.setenv("WORLD_SIZE", "8")  # as torchrun says
    assert ranks_here(gpus=4) == 8


@pytest.mark.parametrize("asked", ["0", "1", "1025"])
def test_no_odd_number_of_ranks_is_started(asked: str, tmp_path: Path) -> None:
    request = Request(tmp_path / "ranks")
    request.place.write_text(asked)
    with pytest.raises(ConfigError, match="between 2 and 1,024 are started"):
        request.look()

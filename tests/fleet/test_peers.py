"""Peers of other kinds: plain ones of the published protocol, faulty ones, hostile ones, and strangers."""

import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.data.rows import mix
from potluck.events import EpochDone, Stalled, WorkerWent
from potluck.fleet.client import Client
from potluck.fleet.holder import ConnectionLost
from potluck.wire.codec import decode, encode
from potluck.wire.frames import FrameReader
from potluck.wire.messages import (
    AveragedGradient,
    BlockGradientPayload,
    GradientPayload,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    Message,
    Ready,
    ShardAssignment,
    Shutdown,
    SliceReport,
    Work,
)
from tests.fleet import faults
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, STEPS, Fleet, assert_same, build, wait_until
from tests.fleet.judges import plain_run
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


class PlainPeer(threading.Thread):
    """What another program of the published protocol would do, with a model and data of its own."""

    def __init__(self, port: int, codec: str) -> None:
        super().__init__(daemon=True)
        self.codec = codec
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(30)
        self.reader = FrameReader(1 << 24)
        self.model, self.optimizer, self.data = build(bare=True)
        self.heard: list[type[Message]] = []
        self.losses: list[float] = []
        self.epoch = 0

    def run(self) -> None:
        torch.set_num_threads(1)
        self.send(JoinRequest("plain", 0, "cpu"))
        while data := self.socket.recv(1 << 16):
            for payload in self.reader.feed(data):
                message = decode(payload, self.codec)
                self.heard.append(type(message))
                match message:
                    case JoinAccepted():
                        self.worker_id = message.worker_id
                    case ShardAssignment():
                        self.compute(message)
                    case AveragedGradient():
                        self.apply(message)
                    case Shutdown():
                        return

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message, self.codec))

    def compute(self, work: ShardAssignment) -> None:
        epoch = (work.step - 1) // -(-ROWS // BATCH)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        rows = order[work.shard_start : work.shard_end]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.data[0][rows]), self.data[1][rows])
        loss.backward()
        flat = np.concatenate([p.grad.numpy().ravel() for p in self.model.parameters()])
        self.send(Heartbeat("plain", int(time.time() * 1000)))
        self.send(GradientPayload(work.step, self.worker_id, flat, np.float32(loss.item()), 0, len(rows)))

    def apply(self, average: AveragedGradient) -> None:
        self.losses.append(float(average.global_loss))
        flat = torch.from_numpy(average.gradients.copy())
        pieces = torch.split(flat, [p.numel() for p in self.model.parameters()])
        for parameter, piece in zip(self.model.parameters(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        self.optimizer.step()


class LockstepPeer(PlainPeer):
    """As the published worker is: it waits for an assignment, sends its gradient, waits for the average; it sends no
    heartbeat, and whatever else comes is its end."""

    def __init__(self, port: int, codec: str = "entrenar", slow_s: float = 0.0) -> None:
        super().__init__(port, codec)
        self.slow_s = slow_s
        self.error: str | None = None
        self.assigned: list[tuple[int, int, int]] = []
        self._payloads: list[bytes] = []

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            super().send(JoinRequest("published", 1, "cpu"))
            self.worker_id = self.expect(JoinAccepted).worker_id
            while not isinstance(work := self.expect(ShardAssignment, Shutdown), Shutdown):
                self.assigned.append((work.step, work.shard_start, work.shard_end))
                time.sleep(self.slow_s)
                self.compute(work)
                self.apply(self.expect(AveragedGradient))
        except Exception as error:
            self.error = str(error)

    def send(self, message: Message) -> None:
        if not isinstance(message, Heartbeat):
            super().send(message)

    def expect(self, *kinds: type[Message]) -> Any:
        while not self._payloads:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError(f"the host is gone, and {kinds} was expected")
            self._payloads += [bytes(payload) for payload in self.reader.feed(data)]
        message = decode(memoryview(self._payloads.pop(0)), self.codec)
        if not isinstance(message, kinds):
            raise AssertionError(f"expected {kinds}, got {message}")
        return message


def whole_batches(losses: list[float] | None = None) -> dict[str, torch.Tensor]:
    """Plain PyTorch: one batch, one backward, one step."""
    losses = losses if losses is not None else []
    model, optimizer, (x, y) = build(bare=True)
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        for row in range(0, ROWS, BATCH):
            rows = order[row : row + BATCH]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict()


@pytest.mark.parametrize("codec", first_of(["bincode", "entrenar"]))
def test_a_plain_peer_takes_part_in_sync(codec: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, plain_peers=True, at_least=2)
    peer = PlainPeer(fleet.server.port, codec)
    peer.start()
    wait_until(lambda: len(fleet.server.core.membership.ready) == 1)
    fleet.add("ours", bare=True)
    weights = fleet.finish()
    peer.join(10)
    assert len(peer.losses) == STEPS and peer.heard.count(ShardAssignment) >= STEPS - 1
    assert {row["name"] for r in fleet.records for row in r.workers if row["rows"]} == {"ours", "plain"}
    assert_same(peer.model.state_dict(), weights)
    for epoch in (event for event in fleet.events if isinstance(event, EpochDone)):
        assert "same weights" not in epoch.sentence and epoch.not_compared == ("ours", "plain")
        assert epoch.sentence.endswith("plain is a plain peer and was not compared.")
    judge = whole_batches()
    for name, value in weights.items():
        torch.testing.assert_close(value, judge[name], rtol=2e-4, atol=2e-5)
    assert peer.losses == pytest.approx([record.loss for record in fleet.records], rel=1e-5)


@pytest.mark.parametrize(("codec", "slow_s"), first_of([("entrenar", 0.0), ("entrenar", 0.1), ("bincode", 0.0)]))
def test_the_published_worker_trains_to_the_end_and_the_losses_are_right(
    codec: str, slow_s: float, tmp_path: Path
) -> None:
    """Also where it is the last to arrive in every step."""
    fleet = Fleet(tmp_path, plain_peers=True, at_least=2)
    peer = LockstepPeer(fleet.server.port, codec, slow_s)
    peer.start()
    fleet.add("ours", bare=True)
    weights = fleet.finish()
    peer.join(10)
    assert peer.error is None and not peer.is_alive()
    assert [step for step, _, _ in peer.assigned] == list(range(1, STEPS + 1))
    assert_same(peer.model.state_dict(), weights)
    losses: list[float] = []
    judge = whole_batches(losses)
    for name, value in weights.items():
        torch.testing.assert_close(value, judge[name], rtol=2e-4, atol=2e-5)
    assert [record.loss for record in fleet.records] == pytest.approx(losses, rel=1e-5)
    assert peer.losses == pytest.approx(losses, rel=1e-5)
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS
    went = {event.name: event.polite for event in fleet.events if isinstance(event, WorkerWent)}
    assert went["published"]


def test_the_published_worker_may_wait_longer_than_patience(tmp_path: Path) -> None:
    """For others to come, and for their part of a step. It cannot send heartbeats."""
    fleet = Fleet(tmp_path, plain_peers=True, at_least=2, patience_s=0.8)
    peer = LockstepPeer(fleet.server.port)
    peer.start()
    wait_until(lambda: bool(fleet.server.core.membership.ready))
    time.sleep(1.2)  # the wait itself
    assert [m.name for m in fleet.server.core.membership.ready] == ["published"]
    fleet.add("ours", bare=True, slow_s=1.0)
    fleet.wait_for_step(3)
    assert peer.error is None and len(fleet.server.core.membership.ready) == 2


def test_a_plain_peer_on_a_host_that_is_not_insecure_gets_nothing_but_a_closed_connection(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for opening in (encode(JoinRequest("plain", 0, "cpu")), encode(JoinRequest("plain", 0, "cpu"), "entrenar")):
        with socket.create_connection(("127.0.0.1", fleet.server.port), timeout=10) as stranger:
            stranger.sendall(opening)
            assert stranger.recv(100) == b""
    assert fleet.server.core.refused["plain peer"] == 2


@pytest.mark.parametrize("fault", first_of([faults.sends_nan, faults.sends_huge]))
def test_a_spoiled_gradient_reaches_nobody_and_is_computed_again(
    fault: Any, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("faulty", fault)
    fleet.add("sound")
    assert_same(fleet.finish(), expected)
    assert (tmp_path / "fired-spoiled").exists()
    assert fleet.server.core.refused["bad payload"] >= 1
    assert any(isinstance(e, Stalled) and "computed again" in e.doing for e in fleet.events)


def test_samples_that_spoil_every_gradient_stop_the_run_and_are_named(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("a", "b"):
        fleet.add(name, spoiled=17)
    finish = fleet.server.wait(40)
    assert finish is not None and finish.failed, fleet.describe()
    assert "not finite" in finish.reason and " and again on " in finish.reason
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, 0))).tolist()
    _, _, told = finish.reason.partition("It is positions ")
    first, last = (int(word) for word in told.split(" of ")[0].split(" to "))
    assert first <= order.index(17) <= last


def test_a_worker_whose_weights_drift_gets_the_others_anew(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("steady", slow_s=0.05)
    wait_until(lambda: bool(fleet.server.core.membership.ready))
    fleet.add("drifter", faults.drifts, slow_s=0.08)
    weights = fleet.finish()
    assert (tmp_path / "fired-drifted").exists()
    assert fleet.server.core.refused["drifted"] == 1
    assert_same(weights, expected)


def test_garbage_from_strangers_disturbs_nobody(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("a", slow_s=0.03)
    fleet.add("b", slow_s=0.03)
    draw = random.Random(1)
    held = []
    for number in range(300):
        stranger = socket.create_connection(("127.0.0.1", fleet.server.port), timeout=30)
        match number % 5:
            case 0:
                stranger.sendall(draw.randbytes(200))
            case 1:
                stranger.sendall(struct.pack(">I", 1 << 31))
            case 2:
                stranger.sendall(encode(JoinRequest("x", 0, "y"))[:-3])
            case 3:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        held.append(stranger)
    weights = fleet.finish()
    for stranger in held:
        stranger.close()
    assert_same(weights, expected)


def test_payloads_that_nobody_asked_for_are_counted_and_change_nothing(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=1)
    fleet.add("honest", slow_s=0.05)
    fleet.wait_for_step(2)
    core = fleet.server.core
    assert core.description is not None
    liar = Client(fleet.invite, name="liar", kind="lies", say=lambda sentence: None)
    liar.connect()
    liar.description = core.description
    liar.send(Ready(core.description.to_json(), 0, "no such hash", 0))
    part = core.description.parts[0]
    zeros = np.zeros(part.floats, np.float32)
    sizes = np.array(part.sizes, "<u4")

    def payload(step: int) -> BlockGradientPayload:
        return BlockGradientPayload(step, liar.worker_id, part.block or 0, core.description.blocks, zeros, sizes)

    wait_until(lambda: any(seat for seat in fleet.server.connections.values() if len(fleet.server.connections) > 1))
    for step in (0, 1, core.standing.version, core.standing.version + 1, 10**9):
        liar.send(payload(step))
    wait_until(lambda: core.refused["stale payload"] + core.refused["foreign payload"] >= 5)
    liar.send(SliceReport(3, np.array([0], "<u4"), np.ones(1), np.ones(1), 0.0, b""))
    liar.send(Ready(core.description.to_json(), 0, "", 0))  # twice: that is illegal
    heard = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        message = liar.receive(timeout_s=0.2)
        heard.append(message)
        if isinstance(message, ConnectionLost):
            break
    assert isinstance(heard[-1], ConnectionLost)
    assert not any(isinstance(message, Work) for message in heard)
    assert_same(fleet.finish(), expected)

"""The testbed's relay: what it makes of time is a computed schedule; what it makes of bytes is nothing at all."""

import random
import socket
import threading
import time

import pytest

from bench.testbed.relay import QUEUE_S, Flow, Line, Relay

pytestmark = pytest.mark.timeout(60)

PIECE = memoryview(bytes(1000))


def test_bytes_arrive_at_the_rate_and_late() -> None:
    line = Line(bytes_per_s=1000.0, delay_s=0.5)
    assert [line.send(10.0, 100) for _ in range(3)] == pytest.approx([10.6, 10.7, 10.8])
    assert line.send(20.0, 100) == pytest.approx(20.6)  # what was not used is not saved up
    assert line.passed_bytes == 400


def test_connections_share_the_rate_of_a_direction() -> None:
    line = Line(bytes_per_s=1000.0, delay_s=0.5)
    one, two = Flow(line), Flow(line)
    one.put(0.0, PIECE)
    two.put(0.0, PIECE)
    assert (one.on_way[0][0], two.on_way[0][0]) == (1.5, 2.5)


def test_a_window_is_what_a_connection_has_on_its_way() -> None:
    """Until its sender hears that the first bytes were taken, which is a round trip after they left."""
    flow = Flow(Line(bytes_per_s=1e9, delay_s=0.5), window_bytes=2500)
    now = 0.0
    for _ in range(2):
        flow.put(now, PIECE)
    assert flow.room(now) == 500
    assert flow.due(0.499) is None
    assert flow.due(0.501) is not None
    flow.took(0.501, 1000)
    assert flow.room(1.0) == 500 and flow.room(1.002) == 1500
    flow.took(1.002, 400)
    assert len(flow.due(1.002) or b"") == 600  # the rest of a piece that was taken in part


def test_what_the_link_has_no_room_for_waits_at_its_sender() -> None:
    flow = Flow(Line(bytes_per_s=10_000.0, delay_s=0.5))
    assert flow.room(0.0)
    flow.put(0.0, PIECE)
    assert not flow.room(0.0) and flow.room(0.1 - QUEUE_S + 0.001)
    assert flow.next_at(0.0) == pytest.approx(0.1 - QUEUE_S)


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_sent_both_ways_at_once_arrives_whole(seed: int) -> None:
    """And not sooner than can be: how much later depends on the machine."""
    sent = random.Random(seed).randbytes(300_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        port = int(listener.getsockname()[1])
        with Relay("127.0.0.1", port, mbit=40, delay_s=0.01, window_bytes=100_000) as link:
            started = time.monotonic()
            with socket.create_connection(("127.0.0.1", link.port)) as connection:
                threading.Thread(target=_send, args=(connection, sent), daemon=True).start()
                assert b"".join(iter(lambda: connection.recv(1 << 16), b"")) == sent
            took_s = time.monotonic() - started
            traffic = link.traffic()
    assert took_s > 300_000 / 5e6 + 0.02
    assert {way: line["passed_bytes"] for way, line in traffic.items()} == {"up": len(sent), "down": len(sent)}
    assert sum(traffic["up"]["slots"].values()) == len(sent)


def test_a_connection_that_nobody_takes_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    with (
        Relay("127.0.0.1", port, mbit=100, delay_s=0.001) as link,
        socket.create_connection(("127.0.0.1", link.port)) as connection,
    ):
        assert connection.recv(1) == b""


def test_it_leads_to_this_machine_alone() -> None:
    with pytest.raises(ValueError, match="loopback"):
        Relay("192.0.2.1", 80, mbit=100, delay_s=0.1)


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)

"""Memory between processes of one machine: what is shown is what is seen, and a liar harms nobody."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from potluck.errors import TheirProtocolError
from potluck.fleet.pipe import Pipe, connect_local, listen_local, local_name
from potluck.fleet.shared_memory import PAGE, Receipts, SharedMemory, SharedView
from potluck.system import CAN_SHARE

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux only")


def test_what_one_process_writes_the_other_sees() -> None:
    memory = SharedMemory(10_000)
    first, second = memory.take(3), memory.take(5_000)
    assert first is not None and second is not None and not first.any()
    window = SharedView(os.dup(memory.descriptor))
    second[:] = np.arange(5_000)
    offset = memory.offset_of(second)
    assert offset == PAGE and memory.offset_of(first) == 0
    np.testing.assert_array_equal(window.floats(offset, 5_000), second)
    with pytest.raises(ValueError, match="read-only"):
        window.floats(offset, 1)[0] = 1.0


def test_memory_that_is_used_up_gives_none_and_strangers_have_no_place_in_it() -> None:
    memory = SharedMemory(PAGE // 4)
    assert memory.take(PAGE // 4) is not None and memory.take(1) is None
    assert memory.offset_of(np.zeros(4, np.float32)) is None


@pytest.mark.parametrize(("offset", "count"), [(2, 1), (0, 1 << 40), (1 << 62, 1), (PAGE, 1)])
def test_places_outside_of_it_are_refused(offset: int, count: int) -> None:
    memory = SharedMemory(PAGE // 4)
    with pytest.raises(TheirProtocolError, match="There are no"):
        SharedView(os.dup(memory.descriptor)).floats(offset, count)


def test_memory_that_could_become_shorter_is_refused_and_so_is_what_is_no_memory() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(TheirProtocolError, match="shorter"):
        SharedView(unsealed)
    one, other = socket.socketpair()
    other.close()
    with pytest.raises(TheirProtocolError, match="not memory"):
        SharedView(one.detach())


def test_receipts_are_counted_and_a_death_is_heard() -> None:
    ours, descriptor = Receipts.pair()
    theirs = Receipts(socket.socket(fileno=descriptor))
    for _ in range(3):
        theirs.give()
    assert ours.wait(2) == 2 and ours.wait(2) == 1
    theirs.close()
    with pytest.raises(ConnectionResetError):
        ours.wait(1)


def test_descriptors_travel_and_surplus_ones_are_closed() -> None:
    listener = listen_local(os.getpid())
    assert listener is not None and listen_local(os.getpid()) is None
    connection = connect_local(os.getpid())
    assert connection is not None
    here, there = Pipe(connection), Pipe(listener.accept()[0])
    memory = SharedMemory(10)
    before = len(list(Path("/proc/self/fd").iterdir()))
    there.send_descriptors([b"hello"], [memory.descriptor] * 6)
    space = bytearray(5)
    assert here.receive_all(memoryview(space)) and bytes(space) == b"hello"
    taken = here.take_descriptors()
    assert 0 < len(taken) <= 4 and len(list(Path("/proc/self/fd").iterdir())) == before + len(taken)
    for descriptor in taken:
        os.close(descriptor)
    listener.close()


def test_a_name_that_another_user_has_taken_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(local_name(7))
    listener.listen()
    monkeypatch.setattr(Pipe, "user", property(lambda self: 12345))
    assert connect_local(7) is None
    listener.close()

"""Sealed records: what was sent comes out, and anything else ends the connection. By the cipher's own words, too."""

import hashlib
import hmac
import random
import socket
import ssl
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from potluck.errors import TheirProtocolError
from potluck.fleet import sealing
from potluck.fleet.invite import Identity, client_context
from potluck.fleet.pipe import Pipe
from potluck.fleet.sealing import RECORD_BYTES, TAG_BYTES, Opener, Sealer, new_key

pytestmark = pytest.mark.timeout(60)


def sealed(key: bytes, *messages: list[bytes]) -> list[bytes]:
    """What is sent for each of them, as whole records."""
    sealer = Sealer(key)
    return [record for parts in messages for sent in sealer.seal(parts) for record in records_of(bytes(sent))]


def records_of(sent: bytes) -> list[bytes]:
    found = []
    while sent:
        length = 4 + int.from_bytes(sent[:4], "big") + TAG_BYTES
        found.append(sent[:length])
        sent = sent[length:]
    return found


def opened(key: bytes, records: list[bytes], most: int = 1 << 30) -> bytes:
    """`most`: the longest space that is asked to be filled."""
    opener, found = Opener(key), b""
    for record in records:
        opener.head[:] = record[:4]
        body = opener.body()
        body[:] = record[4:]
        space = bytearray(min(most, RECORD_BYTES))
        found += space[: opener.open(body, memoryview(space))]
        while opener.has_rest:
            found += space[: opener.take_rest(memoryview(space))]
    return found


LONG = np.random.default_rng(7).bytes(3 * RECORD_BYTES + 12_345)


@pytest.mark.parametrize("most", [1, 1000, RECORD_BYTES - 1, 1 << 30])
def test_what_was_sealed_comes_out_however_little_is_asked_for_at_once(most: int) -> None:
    key = new_key()
    parts = [b"head", b"", LONG if most >= 1000 else LONG[:5000], b"tail" * 2000, b"end"]
    assert opened(key, sealed(key, parts, [b"next"]), most) == b"".join(parts) + b"next"


def test_the_records_are_aes_gcm_with_their_number_as_nonce_and_their_length_as_the_rest() -> None:
    key, found = new_key(), b""
    for number, record in enumerate(sealed(key, [b"head", LONG])):
        found += AESGCM(key).decrypt(number.to_bytes(12, "big"), record[4:], record[:4])
    assert len(key) == 32 and found == b"head" + LONG


def test_a_key_makes_way_for_the_next_before_it_is_worn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_RECORDS_PER_KEY", 3)
    key, messages = new_key(), [bytes([number]) for number in range(8)]
    records = sealed(key, *([message] for message in messages))
    assert opened(key, records) == b"".join(messages)
    second = hmac.digest(key, b"potluck: the next key", hashlib.sha256)
    assert AESGCM(second).decrypt((3).to_bytes(12, "big"), records[3][4:], records[3][:4]) == messages[3]


def test_no_two_records_have_the_same_key_and_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    before = Sealer._next

    def watch(self: Sealer) -> tuple[AESGCM, bytes]:
        cipher, nonce = before(self)
        seen.append((self._key, nonce))
        return cipher, nonce

    monkeypatch.setattr(Sealer, "_next", watch)
    monkeypatch.setattr(sealing, "_RECORDS_PER_KEY", 5)
    for _ in range(2):
        sealed(new_key(), *([LONG[:size], b"x"] for size in range(0, 20_000, 999)))
    assert len(seen) > 40 and len(set(seen)) == len(seen)


@pytest.mark.parametrize("what", ["changed", "again", "left out", "swapped", "shorter", "another length", "of another"])
def test_whatever_is_done_to_a_record_on_its_way_ends_the_connection(what: str) -> None:
    key = new_key()
    records = sealed(key, [b"first"], [b"second"], [b"third"])
    if what == "changed":
        for bit in random.Random(3).sample(range(8 * len(records[1])), 40):
            spoilt = bytearray(records[1])
            spoilt[bit // 8] ^= 1 << bit % 8
            with pytest.raises((TheirProtocolError, ValueError)):  # a head that lies no longer fits what has come
                opened(key, [records[0], bytes(spoilt), records[2]])
        return
    wrong = {
        "again": [records[0], records[0]],
        "left out": [records[0], records[2]],
        "swapped": [records[1], records[0]],
        "shorter": [(1).to_bytes(4, "big") + records[0][4:5] + records[0][-TAG_BYTES:]],
        "another length": [(4).to_bytes(4, "big") + records[0][4:-1]],
        "of another": sealed(new_key(), [b"first"]),
    }
    with pytest.raises(TheirProtocolError, match="not the one that was sent"):
        opened(key, wrong[what])


@pytest.mark.parametrize("length", [0, RECORD_BYTES + 1, 2**32 - 1])
def test_a_record_longer_than_any_is_refused_before_it_is_read(length: int) -> None:
    opener = Opener(new_key())
    opener.head[:] = length.to_bytes(4, "big")
    with pytest.raises(TheirProtocolError, match="sealed record"):
        opener.body()


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(TheirProtocolError, match="A key has 32 bytes"):
        Opener(bytes(16))


# On a connection


@pytest.fixture(scope="module")
def server_context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return Identity.load_or_make(tmp_path_factory.mktemp("host") / "identity").server_context()


def pair(server: ssl.SSLContext, client: ssl.SSLContext | None = None) -> tuple[Pipe, Pipe]:
    ours, theirs = socket.socketpair()
    ends: list[Pipe] = []
    shaking = threading.Thread(target=lambda: ends.append(Pipe(server.wrap_socket(theirs, server_side=True))))
    shaking.start()
    pipe = Pipe((client or client_context()).wrap_socket(ours))
    shaking.join()
    return pipe, ends[0]


def exchange(sender: Pipe, receiver: Pipe, data: bytes) -> None:
    sending = threading.Thread(target=sender.send, args=([data[:40], data[40:]],))
    sending.start()
    space = bytearray(len(data))
    assert receiver.receive_all(memoryview(space)) and space == data
    sending.join()


def test_each_direction_leaves_tls_by_itself(server_context: ssl.SSLContext) -> None:
    host, worker = reversed(pair(server_context))
    assert host.can_seal and worker.can_seal
    for step in range(3):
        if step == 1:
            key = new_key()
            host.seal_sending(key)
            worker.seal_receiving(key)
        if step == 2:
            key = new_key()
            worker.seal_sending(key)
            host.seal_receiving(key)
        exchange(host, worker, LONG)
        exchange(worker, host, LONG)


def test_an_end_that_cannot_seal_stays_in_tls(server_context: ssl.SSLContext) -> None:
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    worker, host = pair(server_context, plain)
    assert not worker.can_seal and not host.can_seal
    with pytest.raises(TheirProtocolError, match="at a time when it should not"):
        host.seal_receiving(new_key())
    exchange(worker, host, LONG)


def test_a_connection_is_sealed_once_and_not_with_bytes_of_tls_left_over(server_context: ssl.SSLContext) -> None:
    worker, host = pair(server_context)
    worker.send([b"two"])
    assert host.receive(memoryview(bytearray(1))) == 1
    with pytest.raises(TheirProtocolError, match="at a time when it should not"):
        host.seal_receiving(new_key())
    assert host.receive(memoryview(bytearray(2))) == 2
    host.seal_receiving(new_key())
    with pytest.raises(TheirProtocolError, match="at a time when it should not"):
        host.seal_receiving(new_key())


def test_nothing_sealed_is_on_the_wire_in_the_clear(server_context: ssl.SSLContext) -> None:
    worker, host = pair(server_context)
    key, mark = new_key(), b"these are weights, and nobody's business. "
    worker.seal_sending(key)
    worker.send([mark, mark * 1000])
    worker.close()
    wire = b""
    while some := socket.socket.recv(host._socket, 1 << 20):
        wire += some
    assert opened(key, records_of(wire)) == mark * 1001
    assert mark[:12] not in wire


def test_what_an_end_sent_does_not_open_when_it_comes_back(server_context: ssl.SSLContext) -> None:
    worker, host = pair(server_context)
    ours, theirs = new_key(), new_key()
    worker.seal_sending(ours)
    worker.seal_receiving(theirs)
    worker.send([b"to the host"])
    wire = bytearray(1000)
    count = socket.socket.recv_into(host._socket, wire)
    host._send_plain([wire[:count]])
    with pytest.raises(TheirProtocolError, match="not the one that was sent"):
        worker.receive(memoryview(bytearray(100)))


def test_an_old_cryptography_is_offered_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("potluck.fleet.invite.can_seal", lambda: False)
    worker, host = pair(Identity.load_or_make(tmp_path / "identity").server_context())
    assert not worker.can_seal and not host.can_seal


def test_a_connection_that_ends_within_a_record_is_cut_and_between_two_has_ended(
    server_context: ssl.SSLContext,
) -> None:
    for cut in (False, True):
        worker, host = pair(server_context)
        key = new_key()
        worker.seal_sending(key)
        host.seal_receiving(key)
        worker.send([b"whole"])
        if cut:
            worker._send_plain([b"\0\0\0\5ab"])
        worker.close()
        assert host.receive_all(memoryview(bytearray(5)))
        if cut:
            with pytest.raises(ConnectionResetError):
                host.receive_all(memoryview(bytearray(5)))
        else:
            assert not host.receive_all(memoryview(bytearray(5)))

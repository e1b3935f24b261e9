"""Whoever takes a dead host's place learns nothing from the workers that come back, and cannot lead them."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from potluck.engine.start import connect
from potluck.environment import RETURNING
from potluck.errors import ConfigError, PotluckError, WorkerLost
from potluck.fleet import host_connector
from potluck.fleet.client import Client
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.invite import Identity, Invite
from potluck.wire.codec import encode
from potluck.wire.messages import Welcome
from tests.fleet.fleet import PATIENCE_S, start_coordinator, wait_until
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)


class Impostor:
    """Listens on a port that a host has left, in its own way, and keeps all that it hears."""

    def __init__(self, port: int, tls: ssl.SSLContext | None, answer: bytes = b"") -> None:
        self.heard = bytearray()
        self.visits = 0
        self.tls = tls
        self.answer = answer
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.visits += 1
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                if self.tls is not None:
                    connection = self.tls.wrap_socket(connection, server_side=True)
                if self.answer:
                    connection.sendall(self.answer)
                while data := connection.recv(1 << 16):
                    self.heard += data
                    if self.tls is None and not self.answer:
                        break
            connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@contextlib.contextmanager
def impostor(port: int, tls: ssl.SSLContext | None, answer: bytes = b"") -> Iterator[Impostor]:
    found = Impostor(port, tls, answer)
    try:
        yield found
    finally:
        found.close()


def helper(invite: Invite, said: list[str]) -> Client:
    return Client(invite, name="somebody special", kind="cpu", say=said.append)


@pytest.mark.parametrize("how", first_of(["with a certificate of its own", "plain", "plain and welcoming"]))
def test_a_worker_tells_nothing_to_whoever_took_the_port_and_finds_the_host_again(how: str, tmp_path: Path) -> None:
    process, invite = start_coordinator(tmp_path, encrypted=True)
    assert invite.pin is not None and invite.secret  # on loopback, too
    said: list[str] = []
    client = helper(invite, said)
    client.connect()
    process.kill()
    process.join()
    assert isinstance(client.receive(10), ConnectionLost)
    stranger = Identity.load_or_make(tmp_path / "stranger").server_context() if "certificate" in how else None
    answer = encode(Welcome(0, 1000, "")) if "welcoming" in how else b""
    again = threading.Thread(target=client.connect, kwargs={"again": True}, daemon=True)
    with impostor(invite.port, stranger, answer) as thief:
        again.start()
        wait_until(lambda: thief.visits >= 4 and bool(said), tell=lambda: f"{thief.visits} {said}")
    assert invite.secret.encode() not in thief.heard and b"somebody special" not in thief.heard
    if stranger is not None:
        assert not thief.heard  # not a byte within the encryption
    where = f"127.0.0.1:{invite.port}"
    assert said == [
        f"The host at {where} does not answer; trying again."
        if how == "plain"  # it hangs up: so does a host that ends
        else f"At {where} is not the host that invited this worker, so it is told nothing; trying again."
    ]
    assert again.is_alive()
    _, other = start_coordinator(tmp_path, port=invite.port, encrypted=True)
    assert other == invite
    again.join(20)
    assert not again.is_alive() and client.welcome is not None
    client.close()


@pytest.mark.parametrize("encrypted", first_of([True, False]))
def test_a_worker_that_joins_while_the_host_is_started_again_waits_for_it(encrypted: bool, tmp_path: Path) -> None:
    """The host is killed once it has the worker's first words; for a while nobody listens; then it is back."""
    process, invite = start_coordinator(tmp_path, encrypted=encrypted)
    process.kill()
    process.join()
    identity = Identity.load_or_make(tmp_path / "identity")
    listener = socket.create_server(("127.0.0.1", invite.port))
    said: list[str] = []
    client = helper(invite, said)
    joining = threading.Thread(target=client.connect, daemon=True)
    joining.start()
    connection, _ = listener.accept()
    listener.close()
    if encrypted:
        connection = identity.server_context().wrap_socket(connection, server_side=True)
    assert connection.recv(10)
    connection.close()
    wait_until(lambda: bool(said), tell=lambda: f"joining: {joining.is_alive()}")
    assert said == [f"The host at 127.0.0.1:{invite.port} is not there yet; trying again."]
    start_coordinator(tmp_path, port=invite.port, encrypted=encrypted)
    joining.join(20)
    assert not joining.is_alive() and client.welcome is not None
    if encrypted:
        with pytest.raises(ConfigError, match=r"secret is not \(or no longer\) the right one"):
            helper(replace(invite, secret="another"), said).connect()
        assert len(said) == 1  # at once: there is nothing to wait for
    client.close()


def test_a_worker_where_nobody_listens_hears_so_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connector, "NOBODY_S", -1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match="Nobody listens at"):
        helper(Invite("127.0.0.1", port, "", None), []).connect()


def test_a_worker_whose_first_words_end_another_server_hears_that_it_is_no_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the published GradientServer ends at a message that it does not know."""
    monkeypatch.setattr(host_connector, "NOBODY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                listener.close()
                connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConfigError, match=r"closed the connection at this worker's first words.* no potluck host"):
            helper(Invite("127.0.0.1", listener.getsockname()[1], "", None), []).connect()


@contextlib.contextmanager
def forwarder() -> Iterator[int]:
    """As `ssh -L` to a host that has ended: connections are taken, and closed. Gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("encrypted", first_of([True, False]))
def test_a_newcomer_behind_a_forwarder_hears_that_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(host_connector, "NOBODY_S", 0.3)
    identity = Identity.load_or_make(tmp_path / "ours")
    with forwarder() as port:
        invite = identity.invite("127.0.0.1", port, encrypted=encrypted)
        with pytest.raises(ConfigError, match=r"Nobody listens behind .* closed at once\. Is the host running"):
            helper(replace(invite, secret=invite.secret if encrypted else ""), []).connect()


def test_a_worker_that_was_away_waits_for_its_host_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connector, "NOBODY_S", -1)
    process, invite = start_coordinator(tmp_path, encrypted=True)
    process.kill()
    process.join()
    said: list[str] = []
    client = helper(invite, said)
    client.return_to(30.0)
    joining = threading.Thread(target=client.connect, daemon=True)
    joining.start()
    wait_until(lambda: bool(said), tell=lambda: f"joining: {joining.is_alive()}")
    assert said == [f"The host at 127.0.0.1:{invite.port} is not there yet; trying again."]
    start_coordinator(tmp_path, port=invite.port, encrypted=True)
    joining.join(20)
    assert not joining.is_alive() and client.welcome is not None
    client.close()
    monkeypatch.setattr(host_connector, "GIVE_UP", 0.01)
    with forwarder() as port, pytest.raises(WorkerLost, match=r"The host has not been back for"):
        gone = helper(replace(invite, port=port), said)
        gone.return_to(30.0)
        gone.connect()


@pytest.mark.parametrize("was_in", [True, False])
def test_a_worker_of_a_machine_that_was_away_is_told_so_by_its_joiner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_in: bool
) -> None:
    """Its host is away when it comes back. One whose machine was never in waits for nobody."""
    monkeypatch.setattr(host_connector, "NOBODY_S", -1)
    process, invite = start_coordinator(tmp_path, encrypted=True)
    process.kill()
    process.join()
    kept = tmp_path / "patience"
    if was_in:
        kept.write_text("12.0")
    monkeypatch.setenv(RETURNING, str(kept))
    found: list[Client | PotluckError] = []

    def begin() -> None:
        try:
            found.append(connect(invite, torch.device("cpu"), 1, is_first=True))
        except PotluckError as error:
            found.append(error)

    joining = threading.Thread(target=begin, daemon=True)
    joining.start()
    if not was_in:
        joining.join(20)
        assert isinstance(found[0], ConfigError) and "Nobody listens" in str(found[0])
        return
    start_coordinator(tmp_path, port=invite.port, encrypted=True)
    joining.join(20)
    assert isinstance(found[0], Client) and found[0].welcome is not None
    found[0].close()
    assert float(kept.read_text()) == PATIENCE_S, "what its host has now, for the next time"


def test_a_worker_gives_up_in_the_end_where_an_impostor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connector, "GIVE_UP", 0.05)  # times a patience of 10 s
    with impostor(0, Identity.load_or_make(tmp_path / "stranger").server_context()) as thief:
        ours = Identity.load_or_make(tmp_path / "ours").invite("127.0.0.1", thief.port, encrypted=True)
        with pytest.raises(WorkerLost, match=r"The host has not been back .* is not the host that invited you"):
            helper(ours, []).connect(again=True)
        with pytest.raises(ConfigError, match="Ask for a new invite"):  # the first time there is nothing to wait for
            helper(ours, []).connect()
    assert not thief.heard


def test_an_invite_of_an_early_potluck_never_sends_its_secret_over_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connector, "GIVE_UP", 0.02)
    _, invite = start_coordinator(tmp_path, encrypted=True)
    early = Invite.parse(replace(invite, pin=None).line())
    client = helper(early, [])
    assert client.connect().worker_id == 0  # by the socket of this machine, as ever
    client.close()
    with impostor(0, None) as thief, pytest.raises((ConfigError, WorkerLost)):
        helper(replace(early, port=thief.port), []).connect(again=True)
    assert not thief.visits


def test_a_cut_invite_is_refused_wherever_it_is_used() -> None:
    with pytest.raises(ConfigError, match="cut short"):
        helper(Invite("192.0.2.1", 1, "secret", None), [])


def test_an_open_way_to_another_machine_is_told_to_the_one_who_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connector, "GIVE_UP", -1)
    said: list[str] = []
    with pytest.raises((WorkerLost, ConfigError)):
        helper(Invite("no-such-host.invalid", 1, "", None), said).connect()
    assert said[0].startswith("INSECURE: the way to no-such-host.invalid is not encrypted.")
    here: list[str] = []
    with pytest.raises((WorkerLost, ConfigError)):
        helper(Invite("127.0.0.1", 1, "", None), here).connect()
    assert not here


def test_a_host_that_takes_a_connection_and_says_nothing_does_not_keep_a_worker_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_connector, "ANSWER_S", 0.1)
    monkeypatch.setattr(host_connector, "GIVE_UP", -1)
    monkeypatch.setattr(Client, "patience_s", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = helper(Invite("127.0.0.1", silent.getsockname()[1], "", None), [])
        with pytest.raises(WorkerLost, match="does not answer"):
            client.connect()

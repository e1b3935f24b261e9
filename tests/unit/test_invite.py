"""Invites, and the two sides that recognise each other by one: over real sockets, with real certificates."""

import io
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.commands.host import MakeInvite
from potluck.errors import ConfigError, TheirProtocolError
from potluck.fleet.invite import (
    INVITE,
    Identity,
    Invite,
    check_pin,
    client_context,
    is_loopback,
    is_right_secret,
    read_invite,
)

SECRET = "s3cr3t-of_the-host"
PIN = "p" * 43
LINE = f"potluck://192.0.2.7:4100/{SECRET}.{PIN}"
GREETING = b"only for the invited"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True)
ADDRESSES = st.ip_addresses().map(str) | st.ip_addresses(v=6).map(lambda address: f"{address}%eth0")
SECRETS = st.text(LETTERS, min_size=1, max_size=40)
PINS = st.text(LETTERS, min_size=43, max_size=43)


# The line


@given(NAMES | ADDRESSES, st.integers(1, 65535), SECRETS, st.none() | PINS)
def test_any_invite_survives_the_round_trip(host: str, port: int, secret: str, pin: str | None) -> None:
    invite = Invite(host, port, secret, pin)
    assert Invite.parse(invite.line()) == invite
    assert len(invite.line().splitlines()) == 1


@pytest.mark.parametrize(
    ("invite", "line"),
    [
        (Invite("box.local", 4100, SECRET, PIN), f"potluck://box.local:4100/{SECRET}.{PIN}"),
        (Invite("127.0.0.1", 1, SECRET, None), f"potluck://127.0.0.1:1/{SECRET}"),
        (Invite("2001:db8::1", 65535, SECRET, PIN), f"potluck://[2001:db8::1]:65535/{SECRET}.{PIN}"),
        (Invite("192.0.2.7", 4100, "", None), "potluck://192.0.2.7:4100/"),
    ],
)
def test_the_line_is_the_published_one(invite: Invite, line: str) -> None:
    assert invite.line() == line
    assert Invite.parse(line) == invite


MALFORMED = {
    "": "one looks like potluck://HOST:PORT/SECRET",
    SECRET: "one looks like potluck://HOST:PORT/SECRET",
    LINE.removeprefix("p"): "one looks like",
    LINE.replace("potluck", "http"): "one looks like",
    LINE + " ": "is not whole",
    LINE + "\n": "is not whole",
    LINE + "/more": "one looks like",
    LINE + ".more": "one looks like",
    LINE[:-1]: "is not whole",
    LINE[: -len(PIN)]: "is not whole",
    LINE + "p": "is not whole",
    LINE.replace(SECRET, SECRET + "é"): "characters that no secret has",
    LINE.replace(SECRET, ""): "secret is missing",
    LINE.replace("4100", "0"): "between 1 and 65535",
    LINE.replace("4100", "65536"): "between 1 and 65535",
    LINE.replace("4100", "٤١٠٠"): "one looks like",  # digits, but not ours
    LINE.replace(":4100", ""): "one looks like",
    LINE.replace("192.0.2.7", "::1"): "one looks like",  # an IPv6 address needs its brackets
    LINE.replace("192.0.2.7", "[box]"): "one looks like",
    LINE.replace("192.0.2.7", "[::1%a b]"): "one looks like",
    LINE.replace("192.0.2.7", "-box"): "names no host",
    LINE.replace("192.0.2.7", "a b"): "names no host",
    LINE.replace("192.0.2.7", "me@box"): "names no host",
    "potluck://192.0.2.7:4100": "one looks like",
}


@pytest.mark.parametrize(("line", "sentence"), MALFORMED.items())
def test_a_malformed_line_is_refused_with_what_to_do(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refusal:
        Invite.parse(line)
    assert "Copy the whole line that the host printed." in str(refusal.value)
    assert SECRET not in str(refusal.value)


@given(st.integers(0, len(LINE)), st.integers(0, len(LINE)), st.text(max_size=3))
def test_no_damage_to_a_line_makes_a_refusal_tell_the_secret(start: int, end: int, put: str) -> None:
    for read in (Invite.parse, read_invite):
        try:
            read(LINE[:start] + put + LINE[end:])
        except ConfigError as refusal:
            assert SECRET not in str(refusal)
            assert refusal.__cause__ is None
            assert refusal.__suppress_context__ or refusal.__context__ is None


def test_an_invite_shows_where_it_leads_and_not_its_secret() -> None:
    invite = Invite.parse(LINE)
    for shown in (str(invite), repr(invite), f"{invite}", repr([invite])):
        assert "potluck://192.0.2.7:4100/..." in shown
        assert SECRET not in shown
        assert PIN not in shown


# Where it is read from


@pytest.mark.parametrize("text", [LINE, f"  {LINE}\n", f"potluck join {LINE}", f"\n potluck  join\t{LINE} \r\n"])
def test_an_invite_is_read_from_wherever_it_is_kept(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Invite.parse(LINE)
    assert read_invite(text) == expected

    path = tmp_path / "invite"
    path.write_text(text)
    assert read_invite(str(path)) == expected

    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert read_invite("-") == expected

    monkeypatch.setenv(INVITE, text)
    assert read_invite(None) == expected


def test_standard_input_is_read_no_further_than_the_line() -> None:
    """Whoever pastes it into a terminal ends it with Enter and not with Ctrl-D."""
    script = "from potluck.fleet.invite import read_invite; print(read_invite('-'))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(f"\n{LINE}\n")
        reader.stdin.flush()  # and left open
        assert reader.stdout.readline() == "potluck://192.0.2.7:4100/...\n"


def test_a_missing_invite_is_refused_with_every_way_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "", " \n"):
        monkeypatch.delenv(INVITE, raising=False)
        if text is not None:
            monkeypatch.setenv(INVITE, text)
        with pytest.raises(ConfigError, match=r"the line that the host printed, or a file .* or set POTLUCK_INVITE"):
            read_invite(None)


def test_what_cannot_be_read_is_refused_without_being_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argument in (SECRET, f"{SECRET}.{PIN}", f"{SECRET}\0", "", str(tmp_path)):
        with pytest.raises(ConfigError) as refusal:
            read_invite(argument)
        assert SECRET not in str(refusal.value)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" + os.urandom(100))
    with pytest.raises(ConfigError, match="not text"):
        read_invite(str(binary))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="one looks like"):
        read_invite("-")


# The host's identity


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_make(tmp_path_factory.mktemp("host") / "identity")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_make(tmp_path_factory.mktemp("stranger"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_identity_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "identity"
    folder.mkdir(parents=True, mode=0o755)
    identity = Identity.load_or_make(folder)
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == {
        "secret": 0o600,
        "key.pem": 0o600,
        "cert.pem": 0o600,
    }
    assert identity.secret not in repr(identity)
    assert len(identity.secret) == 32


def test_a_restarted_host_is_recognised_by_its_old_invites(identity: Identity) -> None:
    again = Identity.load_or_make(identity.folder)
    assert again.invite("h", 1, encrypted=True) == identity.invite("h", 1, encrypted=True)
    assert identity.invite("h", 1, encrypted=True).pin == identity.pin
    assert identity.invite("h", 1, encrypted=False) == Invite("h", 1, "", None)


def test_two_hosts_are_told_apart(identity: Identity, stranger: Identity) -> None:
    assert identity.secret != stranger.secret
    assert identity.pin != stranger.pin


def test_hosts_that_start_at_once_become_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(Identity.load_or_make, [tmp_path] * 8))
    assert len({one.invite("h", 1, encrypted=True) for one in made}) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kept", [[], ["secret"], ["secret", "key.pem"]])
def test_a_host_that_died_while_making_its_identity_makes_the_rest(
    kept: list[str], identity: Identity, tmp_path: Path
) -> None:
    for name in kept:
        (tmp_path / name).write_bytes((identity.folder / name).read_bytes())
    made = Identity.load_or_make(tmp_path)
    assert (made.secret == identity.secret) == ("secret" in kept)


@pytest.mark.parametrize("name", ["secret", "key.pem", "cert.pem"])
@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"what is this?"])
def test_a_damaged_identity_is_refused(name: str, content: bytes, identity: Identity, tmp_path: Path) -> None:
    for path in identity.folder.iterdir():
        (tmp_path / path.name).write_bytes(content if path.name == name else path.read_bytes())
    with pytest.raises(ConfigError, match=r"is damaged\. Remove that folder"):
        Identity.load_or_make(tmp_path)


def test_a_key_of_another_certificate_is_refused(identity: Identity, stranger: Identity, tmp_path: Path) -> None:
    for name, owner in {"secret": identity, "cert.pem": identity, "key.pem": stranger}.items():
        (tmp_path / name).write_bytes((owner.folder / name).read_bytes())
    with pytest.raises(ConfigError, match="is damaged"):
        Identity.load_or_make(tmp_path)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be neither read nor made"):
        Identity.load_or_make(tmp_path / "file" / "identity")


def test_the_certificate_is_valid_now_and_for_years(identity: Identity) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((identity.folder / "cert.pem").read_bytes())
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now - timedelta(hours=23)
    assert certificate.not_valid_after_utc > now + timedelta(days=9 * 365)
    assert certificate.subject.rfc4514_string() == "CN=potluck"


def test_a_helper_needs_no_cryptography_of_its_own() -> None:
    look = "import sys, potluck.fleet.invite; sys.exit('cryptography' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


# Over loopback


class Host:
    """Greets whoever completes a handshake, and keeps what each then says."""

    def __init__(self, context: ssl.SSLContext, listener: socket.socket, greeting: bytes) -> None:
        self.context = context
        self.greeting = greeting
        self.port: int = listener.getsockname()[1]
        self.heard: list[bytes] = []
        self.refused: list[str] = []
        self._listener = listener

    def serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            plain.settimeout(30)
            try:
                with self.context.wrap_socket(plain, server_side=True) as peer:
                    peer.sendall(self.greeting)
                    self.heard.append(b"".join(iter(lambda: peer.recv(1 << 16), b"")))
            except OSError as error:
                self.refused.append(str(error))
                plain.close()


@contextmanager
def serving(context: ssl.SSLContext, greeting: bytes = GREETING) -> Iterator[Host]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = Host(context, listener, greeting)
        thread = threading.Thread(target=host.serve)
        thread.start()
        try:
            yield host
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def connect(host: Host) -> socket.socket:
    return socket.create_connection(("127.0.0.1", host.port), timeout=30)


def join(host: Host, invite: Invite) -> bytes:
    """What the host says to a helper that does as it should."""
    with client_context().wrap_socket(connect(host)) as peer:
        check_pin(peer, invite)
        assert peer.version() == "TLSv1.3"
        peer.sendall(invite.secret.encode())
        return peer.recv(100)


def test_the_invited_helper_is_let_in(identity: Identity) -> None:
    with serving(identity.server_context()) as host:
        assert join(host, identity.invite("127.0.0.1", host.port, encrypted=True)) == GREETING
    assert host.heard == [identity.secret.encode()]


def test_an_invite_works_after_a_restart(identity: Identity) -> None:
    invite = Invite.parse(identity.invite("127.0.0.1", 1, encrypted=True).line())
    with serving(Identity.load_or_make(identity.folder).server_context()) as host:
        assert join(host, invite) == GREETING


def test_another_hosts_certificate_is_refused_before_the_secret_is_said(identity: Identity, stranger: Identity) -> None:
    with serving(stranger.server_context()) as host:
        invite = identity.invite("127.0.0.1", host.port, encrypted=True)
        with pytest.raises(TheirProtocolError, match=r"is not the host that invited you.* Ask for a new invite") as no:
            join(host, invite)
    assert host.heard in ([], [b""])
    assert identity.secret not in str(no.value)
    assert identity.pin not in str(no.value)


def test_an_invite_without_a_pin_fits_no_certificate(identity: Identity) -> None:
    with serving(identity.server_context()) as host:
        with pytest.raises(TheirProtocolError, match="is not the host"):
            join(host, identity.invite("127.0.0.1", host.port, encrypted=False))
        with pytest.raises(TheirProtocolError, match="is not the host"):
            join(host, replace(identity.invite("127.0.0.1", host.port, encrypted=True), pin=PIN))


@pytest.mark.parametrize("said", [b"\0\0\0\4join", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200)])
def test_a_client_in_plain_text_gets_nothing(said: bytes, identity: Identity) -> None:
    with serving(identity.server_context()) as host, connect(host) as peer:
        peer.sendall(said)
        try:
            peer.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))
        except OSError:  # the host may have hung up already: reset, or not connected any more
            answer = b""
    assert answer == b"" or (answer[0] == 21 and len(answer) == 7)  # at most an alert of TLS: "I did not understand"
    assert host.heard == []
    assert len(host.refused) == 1


def test_older_versions_of_tls_are_refused(identity: Identity) -> None:
    old = client_context()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(identity.server_context()) as host, connect(host) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)
    assert host.heard == []
    server = identity.server_context()
    server.minimum_version = ssl.TLSVersion.TLSv1_2
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(server) as host, connect(host) as plain, pytest.raises(ssl.SSLError):
        client_context().wrap_socket(plain)


def test_what_a_helper_says_arrives_though_it_closes_without_reading(identity: Identity) -> None:
    """Had the host sent tickets, they would lie there unread, and closing would reset the connection."""
    with serving(identity.server_context(), greeting=b"") as host:
        for _ in range(20):
            with client_context().wrap_socket(connect(host)) as peer:
                peer.sendall(b"x" * 100_000)
    assert [len(heard) for heard in host.heard] == [100_000] * 20


# Comparing


@given(st.text(), st.text())
def test_only_the_same_secret_is_right(given_: str, expected: str) -> None:
    assert is_right_secret(given_, expected) == (given_ == expected)
    assert is_right_secret(given_, given_)


def test_loopback_is_told_from_the_network() -> None:
    here = ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "::1%lo"]
    elsewhere = [
        "",
        "0.0.0.0",
        "::",
        "192.168.1.2",
        "::ffff:8.8.8.8",
        "fe80::1",
        "box",
        "localhost.example.org",
        "127.1",
    ]
    assert [host for host in here if not is_loopback(host)] == []
    assert [host for host in elsewhere if is_loopback(host)] == []


# An invite that is older than its host


def test_an_invite_is_made_before_its_host_and_only_its_file_holds_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert MakeInvite(address="potluck-host", port=4100, out=str(folder))() == 0
    made = read_invite(str(folder / "invite"))
    said = capsys.readouterr().out
    assert (made.host, made.port) == ("potluck-host", 4100) and made.secret not in said
    assert Identity.load(folder).invite("potluck-host", 4100, encrypted=True) == made
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    MakeInvite(address="elsewhere", port=4101, out=str(folder))()
    assert read_invite(str(folder / "invite")).secret == made.secret, "the identity stays"


def test_an_identity_that_is_mounted_is_read_and_never_made(tmp_path: Path) -> None:
    """As a cluster mounts a secret: links into a folder beside them, and nothing may be written."""
    made = Identity.load_or_make(tmp_path / "made")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name in ("secret", "key.pem", "cert.pem"):
        (mounted / name).symlink_to(made.folder / name)
    mounted.chmod(0o555)
    assert Identity.load(mounted).pin == made.pin and stat.S_IMODE(mounted.stat().st_mode) == 0o555
    with pytest.raises(ConfigError, match="potluck invite --address NAME"):
        Identity.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("address", "port"), [("two words", 1), ("", 1), ("box", 0), ("box", 65536)])
def test_an_address_that_nobody_can_reach_makes_nothing(tmp_path: Path, address: str, port: int) -> None:
    with pytest.raises(ConfigError, match="--address is a plain name"):
        MakeInvite(address=address, port=port, out=str(tmp_path / "none"))()
    assert not (tmp_path / "none").exists()

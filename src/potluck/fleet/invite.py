"""How a helper finds a host and both know each other: one line to paste, and what the host keeps to be recognised.

    potluck://HOST:PORT/SECRET.PIN

The secret shows the helper to the host; the pin, the SHA-256 of the host's certificate, shows the host to the helper.
There is no authority to ask: the person who handed over the line vouches for both. A helper checks the pin before it
says the secret, so that someone in between learns nothing.

Knows of certificates and TLS settings, but opens no connection and speaks no message.
"""

import base64
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from potluck.errors import ConfigError, TheirProtocolError
from potluck.fleet.sealing import PROTOCOL, can_seal

INVITE = "POTLUCK_INVITE"
"""The environment variable that may hold the line, or the path of a file that does: other users of a machine can see
arguments, but not this."""

_LINE = re.compile(
    r"potluck://(?:\[(?P<address>[^\]/]+)\]|(?P<name>[^:/\[\]]+)):(?P<port>[0-9]{1,5})"
    r"/(?P<secret>[^./]*)(?:\.(?P<pin>[^./]*))?"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # or an IPv4 address
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")  # IPv6, perhaps with its interface
_SECRET = re.compile(r"[A-Za-z0-9_-]*")
_PIN = re.compile(r"[A-Za-z0-9_-]{43}")
_COPY = "Copy the whole line that the host printed."


@dataclass(frozen=True, slots=True)
class Invite:
    """Checked at birth, and a ConfigError says what is wrong. No sentence quotes any part: it may be the secret."""

    host: str
    """A name, an IPv4 address, or an IPv6 address without brackets."""
    port: int
    secret: str
    """Empty: the host lets anyone in."""
    pin: str | None
    """SHA-256 of the certificate's DER in urlsafe base64, unpadded. None: an unencrypted connection. That is for hosts
    that have no secret; with one, the line has lost its end, or was made by an early Potluck for one machine."""

    def __post_init__(self) -> None:
        if not (_NAME.fullmatch(self.host) or _is_ipv6(self.host)):
            raise ConfigError(f"The invite names no host: neither an address nor a name in plain letters. {_COPY}")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"The invite's port does not lie between 1 and 65535. {_COPY}")
        if not _SECRET.fullmatch(self.secret):
            raise ConfigError(f"The invite's secret has characters that no secret has. {_COPY}")
        if self.pin is not None and not _PIN.fullmatch(self.pin):
            raise ConfigError(f"The invite's end, which names the host's certificate, is not whole. {_COPY}")
        if self.pin is not None and not self.secret:
            raise ConfigError(f"The invite's secret is missing. {_COPY}")

    @classmethod
    def parse(cls, line: str) -> "Invite":
        """Parses what line() gives, and nothing else."""
        found = _LINE.fullmatch(line)
        if found is None or (found["address"] and not _is_ipv6(found["address"])):
            raise ConfigError(f"This is no invite: one looks like potluck://HOST:PORT/SECRET. {_COPY}")
        return cls(found["address"] or found["name"], int(found["port"]), found["secret"], found["pin"])

    @property
    def is_open(self) -> bool:
        """Whether others on the way can read and change all that is said."""
        return self.pin is None and not is_loopback(self.host)

    def check_has_pin(self) -> None:
        """Without it the secret would travel to another machine in plain text."""
        if self.secret and self.is_open:
            raise ConfigError("This invite is cut short: it lacks the part after the dot. Copy the whole line.")

    def line(self) -> str:
        """The whole invite, secret included, to be handed over in private."""
        return self._where() + self.secret + (f".{self.pin}" if self.pin else "")

    def __str__(self) -> str:
        return self._where() + "..."

    __repr__ = __str__  # logs and stacks of frames show an object by its repr, and must not show the secret

    def _where(self) -> str:
        return f"potluck://[{self.host}]:{self.port}/" if ":" in self.host else f"potluck://{self.host}:{self.port}/"


def read_invite(argument: str | None) -> Invite:
    """From the line itself, from standard input for "-", from the file of that path, or from the environment for None.

    Spaces around the line are no matter, nor is a `potluck join` before it.
    """
    if argument is None:
        text = os.environ.get(INVITE, "")
        if not text.strip():
            raise ConfigError(
                "There is no invite. Give the line that the host printed, or a file that holds it, "
                f"or - to paste it, or set {INVITE}."
            )
        if "://" not in text:
            text = _first_line(text.strip())
    elif "://" in argument:
        text = argument
    else:
        text = _first_line(argument.strip())
    return Invite.parse(re.sub(r"\Apotluck\s+join\s+", "", text.strip()))


@dataclass(frozen=True, slots=True)
class Identity:
    """Keeps what a host is recognised by: the secret that it expects, and the certificate that it shows."""

    folder: Path
    secret: str = field(repr=False)
    pin: str = field(repr=False)

    @classmethod
    def load_or_make(cls, folder: Path) -> "Identity":
        """Made once and loaded ever after, so that an invite stays valid when the host restarts.

        The folder is for its owner alone, and holds `secret`, `key.pem` and `cert.pem`.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            _keep(folder / "secret", lambda: secrets.token_urlsafe(24).encode())
            key = _keep(folder / "key.pem", _new_key)
            _keep(folder / "cert.pem", lambda: _new_certificate(key))
            return cls._read(folder)
        except (ssl.SSLError, ValueError):
            raise _damaged(folder) from None
        except OSError as error:
            raise ConfigError(
                f"The identity in {folder} can be neither read nor made ({error.strerror}). Choose another folder."
            ) from None

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """One that is there already, and that this process may only be able to read, as what a cluster mounts."""
        try:
            return cls._read(folder)
        except (ssl.SSLError, ValueError):
            raise _damaged(folder) from None
        except OSError as error:
            raise ConfigError(
                f"There is no identity in {folder} that can be read ({error.strerror}). Make one with:"
                f" potluck invite --address NAME --port N --out {folder}"
            ) from None

    @classmethod
    def _read(cls, folder: Path) -> "Identity":
        secret = (folder / "secret").read_bytes().decode().strip()
        certificate = (folder / "cert.pem").read_bytes().decode()
        if not secret or not _SECRET.fullmatch(secret):
            raise ValueError("the secret is not one")
        identity = cls(folder, secret, _pin_of(ssl.PEM_cert_to_DER_cert(certificate)))
        identity.server_context()  # refuses a key that is not the certificate's: now, and not when a helper comes
        return identity

    def invite(self, host: str, port: int, *, encrypted: bool) -> Invite:
        """Without encryption there is no secret either: it would not be one for long."""
        return Invite(host, port, self.secret, self.pin) if encrypted else Invite(host, port, "", None)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Tickets are sent unasked. A peer that closes before it has read them resets the connection, and its last
        # message is lost with it.
        context.num_tickets = 0
        _offer_sealing(context)
        context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        return context


def _damaged(folder: Path) -> ConfigError:
    return ConfigError(
        f"The identity in {folder} is damaged. Remove that folder to make a new one, and hand out new invites."
    )


def client_context() -> ssl.SSLContext:
    """Encrypts, and trusts anyone: call check_pin() before the first byte is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _offer_sealing(context)
    return context


def _offer_sealing(context: ssl.SSLContext) -> None:
    if can_seal():
        context.set_alpn_protocols([PROTOCOL])


def check_pin(socket: ssl.SSLSocket, invite: Invite) -> None:
    """Refuses a host whose certificate is not the pinned one; an invite without a pin fits none."""
    certificate = socket.getpeercert(binary_form=True)
    if certificate is None or not is_right_secret(_pin_of(certificate), invite.pin or ""):
        raise TheirProtocolError(
            f"{invite.host} port {invite.port} is not the host that invited you, or it has a new identity: "
            "its certificate is another. Ask for a new invite."
        )


def is_right_secret(given: str, expected: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def is_loopback(host: str) -> bool:
    """Whether nobody else can listen in. A name is not looked up: any but localhost may lead elsewhere."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_ipv6(text: str) -> bool:
    try:
        return bool(_ADDRESS.fullmatch(text) and ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _first_line(path: str) -> str:
    """That is not blank. Refusals do not name the path: it may be a secret that was pasted without the rest."""
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as lines:
            return next((line for line in lines if line.strip()), "")
    except OSError as error:
        raise ConfigError(
            f"This is neither an invite, which starts with potluck://, nor a file that can be read ({error.strerror}). "
            f"{_COPY}"
        ) from None
    except ValueError:  # not text, or a path with a zero byte
        raise ConfigError(f"No invite is in there, since it is not text. {_COPY}") from None


def _pin_of(certificate: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(certificate).digest()).decode().rstrip("=")


def _keep(path: Path, make: Callable[[], bytes]) -> bytes:
    """The file's content, made if there is none. It appears whole, and of several makers the first one stays."""
    if not path.exists():
        descriptor, aside = tempfile.mkstemp(prefix=".making-", dir=path.parent)  # mkstemp's mode is 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(make())
                file.flush()
                os.fsync(descriptor)
            os.link(aside, path)  # a rename would replace what another host, starting now, has already handed out
        except FileExistsError:
            pass
        finally:
            Path(aside).unlink()
    return path.read_bytes()


# Certificates are made only here, the first time that a machine is a host: helpers load none of it.


def _new_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_certificate(key_pem: bytes) -> bytes:
    """Self-signed. Its name and dates convince nobody, since only its hash is checked; TLS wants them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "potluck")])
    start = datetime.now(UTC) - timedelta(days=1)  # a helper's clock may be behind
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=3653))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def reachable(host: str) -> str:
    """The address that others can use: of every address, the one that leads out of this machine."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the system only chooses the interface
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()

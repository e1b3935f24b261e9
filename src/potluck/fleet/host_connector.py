"""HostConnector: how a worker reaches its host, proves who it is, and retries while nobody answers."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable

from potluck.errors import ConfigError, TheirProtocolError, WorkerLost
from potluck.fleet.connection import Connection
from potluck.fleet.invite import Invite, check_pin, client_context
from potluck.fleet.phases import enter_phase
from potluck.fleet.pipe import LOOPBACK, Pipe, connect_local
from potluck.system import CAN_SHARE
from potluck.wire.codec import encode_parts
from potluck.wire.messages import PROTOCOL, TOO_SOON, Hello, Message, Refusal, Welcome

CONTROL_BYTES = 64 << 20
"""The longest message without averages that a host sends."""
FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_HELD_OFF_S = 0.05, 0.5, 5.0
"""Waits between two attempts: with none, workers that have lost their host would keep its machine busy."""
ANSWER_S = 10.0
"""How long a host may take to answer, at least; then the next attempt begins."""
GIVE_UP = 20
"""A worker gives up after this many times `patience` without a host."""
NOBODY_S = 30.0
"""How long one that has never been in waits where nobody listens: a host that is started again takes a while."""
SILENT_CLOSES = 3
"""In a row, by a host that has shown who it is: the invite's secret is wrong. A host that is killed does it once."""


class HeldOff(OSError):
    """The host is there, and wants this worker to come later: it has come and gone too often."""


class _ClosedInSilence(ConnectionResetError):
    """After this worker's first words. The host does so where the secret is wrong, and where it ends."""


class _NotTheHost(ConnectionError):
    """The peer that answers is not the one that the invite names, or does not speak as a host does."""


def _is_nobody(error: OSError) -> bool:
    """Whether there is no host: nobody listens, or a forwarder does (ssh -L, a load balancer) and closes at once."""
    closed = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
    return isinstance(error, (*closed, ssl.SSLEOFError, ssl.SSLZeroReturnError))


class HostConnector:
    def __init__(self, invite: Invite, *, name: str, kind: str, say: Callable[[str], None]) -> None:
        invite.check_has_pin()
        self.invite = invite
        self.name = name
        self.kind = kind
        self.say = say
        self.returns = False
        """Whether this machine was away for a while. Nobody may sit there to join again, so it waits for its host."""
        self.is_here = CAN_SHARE and invite.host in (*LOOPBACK, "localhost")
        self._backoff_s = FIRST_WAIT_S
        self._draw = random.Random()

    def connect(self, patience_s: float, *, again: bool) -> tuple[Pipe, Welcome]:
        """Waits that grow, and differ from worker to worker. `again`: this worker has been in."""
        started, shown, closes, was_closed = time.monotonic(), "", 0, False
        if self.invite.is_open and not again:
            self.say(
                f"INSECURE: the way to {self.invite.host} is not encrypted. Anybody on it can read and change what is"
                " trained. Continue only if you fully trust that network."
            )
        while True:
            try:
                return self._connect_once(patience_s, again=again)
            except (OSError, ssl.SSLError) as error:
                waited = time.monotonic() - started
                closes = closes + 1 if isinstance(error, _ClosedInSilence) else 0
                was_closed |= closes > 0
                if not again:
                    self._check_invite(error, closes, waited, was_closed=was_closed)
                if waited > GIVE_UP * patience_s:
                    raise WorkerLost(f"The host has not been back for {waited:.0f} s: {error}.") from None
                is_held_off = isinstance(error, HeldOff)
                if (is_held_off or waited > 1.0) and (trouble := self._trouble(error)) != shown:
                    self.say(trouble)
                    shown = trouble
                time.sleep(self._backoff_s * self._draw.uniform(0.5, 1.0))
                self._backoff_s = min(LONGEST_HELD_OFF_S if is_held_off else LONGEST_WAIT_S, self._backoff_s * 2)

    def _check_invite(self, error: OSError, closes: int, waited: float, *, was_closed: bool) -> None:
        """Refuse an invite that seems wrong, for a worker that has never been in. `was_closed`: somebody was there
        before, and closed the connection after this worker's first words."""
        if closes >= SILENT_CLOSES and self.invite.secret:
            raise ConfigError(
                "The host closed the connection without a word, again and again: the invite's secret is not (or no"
                " longer) the right one. Ask for a new invite."
            ) from None
        if _is_nobody(error) and waited > NOBODY_S and not self.returns:
            where = f"{self.invite.host} port {self.invite.port}"
            begin = f"Nobody listens at {where}."
            if not isinstance(error, ConnectionRefusedError):
                begin = f"Nobody listens behind {where}: connections are taken there, and closed at once."
            elif was_closed:
                begin = (
                    f"Who listened at {where} closed the connection at this worker's first words, and nobody listens"
                    " there since. It has ended, or is no potluck host: a worker joins no other server."
                )
            raise ConfigError(f"{begin} Is the host running, and is the invite its newest?") from None

    def _trouble(self, error: OSError) -> str:
        if isinstance(error, HeldOff):
            return str(error)
        where = f"{self.invite.host}:{self.invite.port}"
        if isinstance(error, ConnectionRefusedError | _ClosedInSilence):
            return f"The host at {where} is not there yet; trying again."
        if isinstance(error, ssl.SSLError | _NotTheHost) and not isinstance(error, ssl.SSLEOFError):
            return f"At {where} is not the host that invited this worker, so it is told nothing; trying again."
        return f"The host at {where} does not answer; trying again."

    def _connect_once(self, patience_s: float, *, again: bool) -> tuple[Pipe, Welcome]:
        connection = self._reach_host()
        try:
            if isinstance(connection, ssl.SSLSocket):
                check_pin(connection, self.invite)
            pipe = Pipe(connection)
            enter_phase("connected", 0)
            pipe.give_up_link(patience_s)
            pipe.send(encode_parts(self.opening()))
            answer = self._first_answer(pipe, patience_s)
            if not isinstance(answer, Welcome):
                raise TheirProtocolError(f"The host answered with a {type(answer).__name__}.")
        except TheirProtocolError as error:
            connection.close()
            if again:  # the host was there: the process in its place will go
                raise _NotTheHost(str(error)) from None
            raise ConfigError(str(error)) from None
        except BaseException:
            connection.close()
            raise
        self._backoff_s = FIRST_WAIT_S
        return pipe, answer

    def opening(self) -> Message:
        """The first words: who this is, and the secret."""
        return Hello(PROTOCOL, self.invite.secret, self.name, self.kind)

    def _reach_host(self) -> socket.socket:
        """By a socket of this machine, where the system tells whose process is at its other end; else over TCP.

        Anybody may listen on a port that the host has left. So over TCP the secret is told to nobody but the owner of
        the pinned certificate.
        """
        local = connect_local(self.invite.port) if self.is_here else None
        if local is not None:
            return local
        if self.invite.secret and self.invite.pin is None:
            raise ConnectionRefusedError("an invite without a pin is for processes of the host's machine and user")
        connection = socket.create_connection((self.invite.host, self.invite.port), timeout=ANSWER_S)
        if connection.getsockname() == connection.getpeername():
            # Where nobody listens on a port of this machine, the system may choose that very port for this end.
            connection.close()
            raise ConnectionRefusedError("it reached itself")
        if self.invite.pin is None:
            return connection
        try:
            return client_context().wrap_socket(connection, server_hostname=self.invite.host)
        except BaseException:
            connection.close()
            raise

    def _first_answer(self, pipe: Pipe, patience_s: float) -> Message:
        # A peer that takes the connection and says nothing must not keep us forever.
        timer = threading.Timer(max(ANSWER_S, patience_s), pipe.close)
        timer.daemon = True
        timer.start()
        connection = Connection(pipe)
        try:
            begun = next(connection.frames(lambda: CONTROL_BYTES), None)
            answer = connection.read_message(*begun) if begun is not None else None
        except (ConnectionResetError, ConnectionAbortedError):
            answer = None
        finally:
            timer.cancel()
        if pipe.is_closed:
            raise TimeoutError("it takes connections, and does not answer")
        if answer is None:
            raise _ClosedInSilence("the host closed the connection")
        if isinstance(answer, Refusal):
            raise HeldOff(answer.sentence) if answer.code == TOO_SOON else ConfigError(answer.sentence)
        return answer

"""Sockets, TLS and threads around coordinator.py.

Newcomers knock in the lobby. A peer that takes part gets two threads: one reads its messages and lets its gradients
flow into the mean, the other writes to it. All decisions are the coordinator's, made one at a time under one lock; the
bytes of gradients pass outside of it.
"""

import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from potluck.account import Told, tell_with
from potluck.agree.records import Position
from potluck.errors import ConfigError, PotluckError
from potluck.events import Event, Noticed
from potluck.fleet import effects
from potluck.fleet.base_folder import BaseFolder, BaseSender
from potluck.fleet.coordinator import Coordinator, feed
from potluck.fleet.description import Description
from potluck.fleet.effects import Effect, StepRecord
from potluck.fleet.exchange import Exchange, PeerConnection
from potluck.fleet.file_stream import stream_chunks, stream_header
from potluck.fleet.flight import FlightRecorder
from potluck.fleet.flight_lines import input_in_words, summary
from potluck.fleet.journal import Journal
from potluck.fleet.lobby import Guest, Lobby
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.phases import enter_phase
from potluck.fleet.pipe import LOOPBACK, Pipe, listen_local
from potluck.fleet.reading import PeerReader
from potluck.fleet.sealing import new_key
from potluck.fleet.waits import tell_owed, tell_waits
from potluck.fleet.watchers import STUCK_S, WatcherFeed
from potluck.system import listen
from potluck.wire.codec import decode
from potluck.wire.messages import SAVE, Message, SealKey, StateBegin, StateChunk
from potluck.wire.words import heard

log = logging.getLogger("potluck.fleet")

TICK_S = 0.1
"""How often the coordinator looks at the time: nobody is given up later than this after a deadline."""
LAST_WORDS_S = 1.0
"""How long a peer that is parted with may take to read why; one that reads nothing would never be gone."""
UNREAD = 4
"""Times `patience` in which a peer reads not even a piece of what it is sent: the averages that wait for it keep all
others waiting."""
MOST_TOLD = 2000
"""Workers that a page is told of."""
MOST_QUEUED = 8
"""Messages to one peer, before a checkpoint for it is read on."""


OnSaved = Callable[[int, str, str, int, bool], None]
"""Hears of each checkpoint: its step, its folder or what is wrong, its bytes, and whether its sender is to blame."""


class Saver(Protocol):
    """Keeps checkpoints on the host's disk, and finds them again."""

    def begin(self, step: int, header: str, keep_last: int, on_saved: OnSaved) -> None: ...
    def feed(self, data: bytes | memoryview, taken: Callable[[], None]) -> None: ...
    def abort(self) -> None: ...
    def newest(self) -> tuple[Path, Position] | None:
        """The newest whole checkpoint, and where the run stood."""


class Server:
    def __init__(
        self,
        coordinator: Coordinator,
        *,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        journal: Journal,
        saver: Saver,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.core = coordinator
        self.journal = journal
        self.saver = saver
        self.on_event = on_event
        """Called with the lock held, as all that follow are: none may wait for a terminal, a disk or a process."""
        self.on_step: Callable[[StepRecord, float, float, str], None] = lambda record, lr, norm, fault: None
        self.on_described: Callable[[Description], None] = lambda description: None
        self.on_completed: Callable[[Description], None] = lambda description: None
        """Hears of a run that was known in part, as from a journal: what its workers bring now."""
        self.finished: effects.Finish | None = None
        self.recorder: FlightRecorder | None = None
        # One input at a time, else two would be decided on from the same state. Reentrant: effects bring about inputs.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._told_in: tuple[Path, Path] | None = None
        self._feeds: dict[int, WatcherFeed] = {}
        self._restored: tuple[Path, int] | None = None
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        local = listen_local(self.port) if listener.getsockname()[0] in LOOPBACK else None
        self.exchange = Exchange(coordinator, self._act, self._lock, is_local=local is not None)
        self.connections = self.exchange.connections
        self._lobby = Lobby(
            [listener] if local is None else [listener, local],
            tls,
            stranger_s=min(10.0, coordinator.patience_s),
            on_payload=self._on_lobby_payload,
            on_closed=lambda guest, why: self._act("closed", guest.peer, why),
        )
        self._base = BaseSender(None, self._lobby.send)
        if coordinator.standing.version and (newest := saver.newest()) is not None:
            coordinator.saving.found(newest[1], str(newest[0]))
        coordinator.weights.most_floats = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        if coordinator.description is not None:
            self.exchange.describe(coordinator.description)
        tell_with("host", self._account)

    def start(self) -> None:
        self._lobby.start()
        self._spawn(self._tick, "ticker")
        self._spawn(self._base.run, "base sender")

    def record(self, folder: Path) -> None:
        """Writes down there what the coordinator hears and decides. Before start()."""
        try:
            self.recorder = FlightRecorder(folder, self.core)
        except OSError as error:  # a run need not end for it
            log.warning("there is no flight recorder: %s", error)

    def serve_base(self, folder: Path) -> None:
        """To workers that lack the base model and ask for it. Before start()."""
        self._base = BaseSender(BaseFolder(folder), self._lobby.send)

    def show_watchers(self, events: Path, now: Path) -> None:
        """Set the files that those are told who only watch, as they grow. Call it before start()."""
        self._told_in = events, now

    def wait(self, timeout_s: float | None = None) -> effects.Finish | None:
        """Waits until the run is over. None if it is not over within the timeout."""
        self._ended.wait(timeout_s)
        return self.finished

    def stop(self) -> None:
        """Closes everything, once what is queued has been sent."""
        self._ended.set()
        self._base.end()
        for watcher in list(self._feeds.values()):
            watcher.end()
        deadline = time.monotonic() + 2.0  # else a peer that reads nothing would keep this host from ending
        for connection in list(self.connections.values()):
            connection.end()
        while (self.connections or self._feeds) and time.monotonic() < deadline:
            time.sleep(0.01)
        for connection in list(self.connections.values()):
            connection.close()
        for watcher in list(self._feeds.values()):
            watcher.close()
        self.exchange.do(effects.AbandonStep())
        self._lobby.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)
        if self.recorder is not None:
            self.recorder.close()

    def request_stop(self) -> None:
        self._act("stop")

    def fail(self, sentence: str) -> None:
        """Ends the run: what is told of it cannot be kept, as on a full disk."""
        self._act("fail", sentence)

    def order(self, action: str, worker: int | None) -> None:
        """Carry out an order of a person who may give it."""
        self._act("order", action, worker)

    def now(self) -> dict[str, Any]:
        """How things stand, for the page: what no event tells, such as how long a worker is silent."""
        core, exchange = self.core, self.exchange
        with self._lock:
            members = list(core.membership.members.values())
            sent, received, spared = exchange.travelled_bytes()
            return {
                "time": round(time.time(), 3),
                "step": core.steps_done,
                "paused": core.paused,
                "saving": core.saving.is_under_way,
                "waits_for": max(0, core.at_least - len(core.membership.ready)) if not core.standing.version else 0,
                "members": len(members),
                "bytes": {"sent": sent, "received": received, "saved": spared},
                "workers": [self._now_of(member) for member in members[:MOST_TOLD]],
            }

    def _now_of(self, member: WorkerRecord) -> dict[str, Any]:
        connection = self.connections.get(member.peer)
        rtt_s = connection.pipe.rtt_s if connection is not None and member.address else None
        return {
            "id": member.worker_id,
            "name": member.name,
            "kind": member.kind,
            "phase": "leaving" if member.leaving else member.phase.name.lower(),
            "doing": member.doing(self.core.standing),
            "silent_s": round(max(0.0, member.silent_s(self.core.own_time(time.monotonic()))), 2),
            "address": member.address,
            **({"rtt_s": rtt_s} if rtt_s is not None else {}),
            **({"uses": member.uses} if member.uses else {}),
        }

    def _account(self) -> Told:
        """Who waits for whom, what is owed, and what is queued. It waits for no lock: one may never be released."""
        is_held = not self._lock.acquire(timeout=0.5)
        try:
            now, mean = time.monotonic(), self.exchange.mean
            receivers = sorted(mean.waits_for) if mean is not None and not is_held else []
            held = [peer for peer, connection in list(self.connections.items()) if connection.held]
            lines = tell_owed(self.core, now)
            for peer, connection in list(self.connections.items()):
                member = self.core.membership.members.get(peer)
                lines.append(f"To {member.name if member is not None else peer}: {connection.tell_queues()}.")
            if is_held:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                owner = re.search(r"owner=(\d+)", repr(self._lock))
                holder = names.get(int(owner[1])) if owner is not None else None
                lines.append(f"The coordinator's lock is held by thread {holder}; what is said here may be half done.")
            return tell_waits(self.core, now, receivers, held), lines
        finally:
            if not is_held:
                self._lock.release()

    # Deciding and doing

    def _act(self, name: str, *what: Any) -> None:
        """Feeds the coordinator one of its INPUTS, and does what it decides."""
        with self._deciding():
            now = time.monotonic()
            decided = feed(self.core, now, name, *what)
            if self.recorder is not None:
                self.recorder.note(now, name, what, decided)
            if log.isEnabledFor(logging.DEBUG) and (decided or name != "tick"):
                log.debug("%s -> %s", input_in_words(name, what), summary(decided) or "nothing")
            for effect in decided:
                self._do(effect)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """One thread at a time; what goes wrong within it ends the run."""
        with self._lock:
            try:
                yield
            except PotluckError as error:  # a sentence: a disk that is full, say
                self._do(effects.Finish(str(error), failed=True))
            except Exception as error:  # of a thread of ours: nobody would hear of it, and everybody would wait
                self._do(effects.Finish(str(error) or type(error).__name__, failed=True))
                log.exception("the coordinator failed")

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.Send():
                self._send(effect)
            case effects.Close():
                log.info("peer %d is closed: %s", effect.peer, effect.why)
                self._close(effect.peer, is_silent=effect.is_silent)
            case effects.Describe():
                self._describe(effect)
            case effects.Subscribe():
                self._subscribe(effect)
            case effects.Record():
                self.journal.record(effect.step)
            case effects.Agreed():
                self.journal.agree(effect.step, effect.kind, effect.digest)
            case effects.Emit():
                _tell(lambda: self.on_event(effect.event))
            case effects.StepApplied():
                _tell(lambda: self.on_step(effect.record, effect.lr, effect.norm, effect.fault))
            case effects.SaveBegin():
                self.saver.begin(effect.step, effect.header, effect.keep_last, partial(self._act, "saved"))
            case effects.SaveChunk():
                self.saver.feed(effect.data, partial(self._act, "taken", effect.peer, SAVE))
            case effects.SaveAbort():
                self.saver.abort()
            case effects.Restore():
                self._restore()
            case effects.SendCheckpoint():
                self._spawn(lambda: self._send_checkpoint(effect.peer, effect.transfer), "checkpoint sender")
            case effects.SendBase():
                self._base.ask(effect.peer, effect.asked)
            case effects.ShowTo():
                self._show_to(effect.peer)
            case effects.Finish():
                self.finished = self.finished or effect
                self._ended.set()
            case _:
                self.exchange.do(effect)

    def _describe(self, effect: effects.Describe) -> None:
        self.journal.keep("description", effect.description.to_json())
        if effect.is_new:
            self.exchange.describe(effect.description)
            self.on_described(effect.description)
        else:
            self.on_completed(effect.description)

    def _restore(self) -> None:
        """Back to the newest checkpoint, which the ledger then ends with."""
        found = self.saver.newest()
        if found is not None:
            self._restored = found[0], found[1].version
        standing = self.journal.go_back(found[1] if found is not None else None)
        self._act("restored", standing)

    def _send_checkpoint(self, peer: int, transfer: int) -> None:
        assert self._restored is not None
        folder, step = self._restored
        try:
            header = stream_header(folder)
            self._send_now(peer, StateBegin(transfer, step, header))
            for data in stream_chunks(folder, header):
                connection = self.connections.get(peer)
                while connection is not None and connection.out.queued > MOST_QUEUED:
                    time.sleep(0.005)
                self._send_now(peer, StateChunk(transfer, data))
        except OSError as error:  # it was removed meanwhile: the newcomer comes again, and gets a newer one
            log.warning("the checkpoint in %s cannot be sent: %s", folder, error)
            with self._lock:
                self._close(peer)

    # Peers

    def _on_lobby_payload(self, guest: Guest, payload: memoryview) -> None:
        assert guest.codec is not None
        message = heard(decode(payload, guest.codec))
        self._act("message", guest.peer, message, guest.address)
        if guest.peer in self.core.membership.members:
            self._lobby.know(guest.peer)

    def _subscribe(self, effect: effects.Subscribe) -> None:
        connection = self.connections.get(effect.peer)
        if connection is not None:
            connection.since = effect.since
            return
        guest = self._lobby.take_out(effect.peer)
        if guest is None or guest.codec is None:
            return
        plain = self.core.membership.members[effect.peer].plain
        connection = PeerConnection(Pipe(guest.socket), guest.codec, peer=guest.peer, plain=plain, since=effect.since)
        connection.pipe.give_up_link(self.core.patience_s)
        self.connections[guest.peer] = connection
        if guest.out:  # first: it may be the half of a message
            connection.out.put(bytes(guest.out))
        if connection.pipe.is_local and not plain and self.exchange.memory is not None:
            connection.share(self.exchange.memory)
        if connection.pipe.can_seal and not plain:
            connection.out.put(SealKey(new_key()))
        if not plain:
            self.exchange.send_by_parts(connection)
        self._spawn(PeerReader(connection, self.exchange).run, f"reader {guest.peer}")
        self._spawn(connection.write, f"writer {guest.peer}")

    def _show_to(self, peer: int) -> None:
        """To one who only watches: a thread reads the files of the run folder as fast as that one takes them."""
        guest = self._lobby.take_out(peer)
        if guest is None:
            return
        pipe = Pipe(guest.socket)
        pipe.give_up_link(self.core.patience_s)
        if self._told_in is None:
            pipe.close()
            return

        def end(why: str) -> None:
            self._feeds.pop(peer, None)
            self._act("closed", peer, why)

        watcher = WatcherFeed(pipe, *self._told_in, bytes(guest.out), end)
        self._feeds[peer] = watcher
        self._spawn(watcher.run, f"watcher {peer}")

    def _send(self, effect: effects.Send) -> None:
        connection = self.connections.get(effect.peer)
        if connection is not None:
            taken = None if effect.credit is None else partial(self._act, "taken", *effect.credit)
            connection.out.put(effect.message, done=taken)
            enter_phase("queued", getattr(effect.message, "step", 0), message=effect.message, connection=connection)
        else:
            self._lobby.send(effect.peer, effect.message)

    def _send_now(self, peer: int, message: Message) -> None:
        with self._lock:
            self._send(effects.Send(peer, message))

    def _close(self, peer: int, *, is_silent: bool = False) -> None:
        connection = self.connections.get(peer)
        if connection is None:
            self._lobby.close(peer)
            return
        connection.revoke()
        connection.end()
        if is_silent:
            connection.close()

    # Time

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._deciding():
                heard = self._look_at_peers(time.monotonic())
                waits_for = self.exchange.mean.waits_for if self.exchange.mean is not None else set()
                self._act("tick", heard, sorted(waits_for))

    def _look_at_peers(self, now: float) -> dict[int, float]:
        """When each was last heard. Those who do not read what they are sent are parted from."""
        for watcher in list(self._feeds.values()):
            if watcher.part_if_stuck(now):
                dropped = Noticed(sentence=f"One who watched read nothing for {STUCK_S:g} s, and is told no more.")
                _tell(partial(self.on_event, dropped))
        for connection in self.connections.values():
            if connection.closing_at is not None and now - connection.closing_at > LAST_WORDS_S:
                connection.close()  # it does not read, and averages that wait for it keep the others waiting
            connection.expire_slow(TICK_S, UNREAD * self.core.patience_s)
        return {c.peer: now if c.held else c.pipe.heard_at for c in self.connections.values()}

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
        self._threads.append(thread)
        thread.start()


def _tell(call: Callable[[], None]) -> None:
    """Call what shows something to a person: it must not end the run, whatever text or figure a peer has sent; a full
    disk may."""
    try:
        call()
    except (ValueError, TypeError, ArithmeticError, LookupError):
        log.exception("an event could not be told")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --host or --port."
        ) from None

"""`potluck host`: a run that workers may join and leave at any time, led from here.

The run folder holds all that a host which is started again needs: the journal of committed steps, the checkpoints, and
the identity that its invites name. Imports no torch: whatever computes is a worker, also on this machine.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from potluck.agree.terms import differing_settings
from potluck.environment import QUIET
from potluck.errors import ConfigError, Interrupted, JournalError
from potluck.event_queue import Outlet
from potluck.events import (
    CheckpointPassedOver,
    Event,
    EventFile,
    EventLog,
    Noticed,
    RunEnded,
    RunStarted,
    StepDone,
    StepSkipped,
    Validated,
    WorkerCame,
    WorkerStep,
    WorkerWent,
)
from potluck.files import write_whole
from potluck.finetune.base_files import find_base
from potluck.finetune.settings import is_finetune
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import Description
from potluck.fleet.effects import Finish, StepRecord
from potluck.fleet.flight import FLIGHT
from potluck.fleet.invite import INVITE, Identity, Invite, is_loopback, reachable, read_invite
from potluck.fleet.journal import Journal, set_aside
from potluck.fleet.script import script_table
from potluck.fleet.server import Server
from potluck.launch.options import HostArgs, to_resume
from potluck.launch.processes import Printed, Worker, WorkerPool, tell_all_ended
from potluck.page.reader import EVENTS, NOW
from potluck.page.start import PageProcess, start_page
from potluck.page.where import PageSettings, page_address
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.save.run_folder import hold, make_run_folder
from potluck.show.output import OutputFile, OutputLine
from potluck.show.picture import draw_losses
from potluck.show.progress import Progress
from potluck.signals import Interrupts
from potluck.trackers.reporter import Tracking
from potluck.train.arguments import joining_command
from potluck.waiting import wait_until
from potluck.words import duration, plural, say, shown_arguments

LOCAL = "host-worker-"
"""Names of workers that end with the host."""
NOT_JOINED_S = 20.0
"""A script that has not called potluck.init() for so long is told of."""
DESERTED_S = 3.0
"""How long a host has no worker before it says what it waits for: one that lost its connection is back by then."""
NOW_S = 1.0
"""How often it is written down how things stand."""
MOST_SHOWN, MOST_WRITTEN = 4096, 65_536
"""Records that wait for a terminal which is stopped, or for a disk, before the oldest are left out."""
STILL_S = 20.0
"""How long a host that has ended waits for a terminal, or a disk, that takes nothing: one that was stopped by Ctrl-S
would keep it for ever."""
LEAVE_S = 5.0
"""How long a host's own workers have to exit: ended at once, they would lose what they print and write at their end."""


def host(args: HostArgs, hand_over: Callable[[Invite], object] | None = None) -> int:
    """`hand_over`: gets the invite as soon as the host listens, in place of the terminal."""
    with ExitStack() as stack:
        return _Host(_with_base(args), stack).run(hand_over)


def _with_base(args: HostArgs) -> HostArgs:
    """A host that fine-tunes has the model for those who lack it, if it has it itself."""
    if not is_finetune(args.table):
        return args
    name = str(args.table.get("model", {}).get("hf", ""))
    try:
        return replace(args, base=find_base(name, may_download=args.options.workers > 0, tells=True))
    except ConfigError as error:
        if args.options.workers:
            raise
        say(f"{str(error).removesuffix('.')}, so this host cannot give the model to those who join without it.")
        return args


class _Host:
    def __init__(self, args: HostArgs, stack: ExitStack) -> None:
        self.args, self.options = args, args.options
        self._page_address = page_address(args.options.page)
        self.folder = args.folder
        make_run_folder(self.folder)
        stack.enter_context(hold(self.folder))
        self.events = EventLog()
        # Whatever is emitted below comes from within the coordinator's lock: a terminal or a disk that stands still
        # there would stop every worker. So each has a thread of its own, and closes after the server has stopped.
        self._progress = Progress()
        self.terminal = Outlet("The terminal", lambda event, at: self._progress(event, at), most=MOST_SHOWN)
        self._file: Outlet | None = None
        stack.callback(self._close_outlets)
        self.receiver = CheckpointReceiver(
            self.folder / "checkpoints",
            lambda path, reason: self.events.emit(CheckpointPassedOver(folder=str(path), reason=reason)),
        )
        self.journal = self._open_journal()
        stack.callback(self.journal.close)
        self._output: OutputFile | None = None
        self._output_lock = threading.Lock()  # else lines of two workers could end up within each other
        stack.callback(lambda: self._output.close() if self._output is not None else None)
        self.loss: float | None = None
        self.validation: Validated | None = None
        self.skipped = 0
        self.interrupts = Interrupts(self._on_interrupt)
        self.started = time.monotonic()
        self._ended: RunEnded | None = None
        self._step_at = time.monotonic()
        self._bytes_before = self._read_bytes_before() if args.resume else {}
        self._has_started = False
        self._have_come: set[str] = set()
        """Names of all who have ever taken part."""
        self._deserted_at: float | None = None
        """Since when there is no worker; infinity: that was said."""
        self._was_named = False
        """Whether it was said that the script has not come to potluck.init()."""
        self._told_now_at = -NOW_S
        self._stack = stack
        self.server = self._serve()
        stack.callback(self.server.stop)
        if args.table:  # only now: a host that was refused must not change what the folder says
            self._write("run.toml", args.recipe, 0o666)
        self._event_file = EventFile(self.folder / EVENTS)
        self._file = Outlet(
            EVENTS, self._event_file, most=MOST_WRITTEN, on_failure=lambda error: self.server.fail(str(error))
        )
        self.events.listeners += [self._on_event, self._file, self.terminal]
        tracking = Tracking(args.track, self.folder, self.folder / EVENTS, self._notice)
        stack.callback(tracking.close)
        stack.callback(self._file.drain, STILL_S)  # before the trackers hear that this is all
        self.events.listeners.append(tracking)

    def run(self, hand_over: Callable[[Invite], object] | None) -> int:
        args = self.args
        invited = self._invited()
        address = self.options.address or (invited.host if invited else reachable(self.options.host))
        invite = self._invite(address)
        # The invite first: with a disk that cannot take it the host ends here, before anybody has joined.
        self._show(invite, to_terminal=hand_over is None)
        self.server.start()
        page = self._start_page()
        if hand_over is not None:
            hand_over(invite)
        here = self.options.host if self.options.host not in ("0.0.0.0", "::") else "127.0.0.1"
        own = {INVITE: self._invite(here).line(), QUIET: "1"} | _columns()
        pool = WorkerPool(joining_command(args.script, args.settings), args.workers, own, self._on_output)
        self._stack.callback(pool.close)
        pool.start([f"{LOCAL}{number}" for number in range(args.options.workers)])
        with self.interrupts.handled():
            finish = self._watch(pool)
        self._end(finish)
        if page is not None:
            page.end()
        self.server.stop()
        self._await_scripts(pool, finish)
        pool.drain(STILL_S)
        return self._summarize(finish)

    def _await_scripts(self, pool: WorkerPool, finish: Finish) -> None:
        """A script may do something after its loop, for as long as that takes. Those that came too late for the run
        would look for its host instead, and those that never came know nothing of its end."""
        pool.end_all_but(self._have_come)
        if wait_until(lambda: not pool.is_alive, LEAVE_S) or self.args.table or finish.reason != "finished":
            return
        self._say("The run is done, and scripts on this machine still do what follows their loops. Ctrl-C ends them.")
        with self.interrupts.handled():
            heard = self.interrupts.count
            wait_until(lambda: not pool.is_alive or self.interrupts.count > heard, math.inf)

    def _on_output(self, told: Printed) -> None:
        """Called on threads of the pool's: keep what scripts print, and show it among what else the terminal shows."""
        # A full disk, of which the checkpoints will tell: a script must not stand still for that.
        with suppress(OSError), self._output_lock:
            for line in told.lines:
                self._output = self._output or OutputFile(self.folder)
                self._output.write(OutputLine(time.time(), told.worker, line))
        show = partial(self._progress.say_of, told.worker, told.lines, told.drawn, is_error=told.is_error)
        self.terminal.call(show)

    def _watch(self, pool: WorkerPool) -> Finish:
        """Watch until the run is over, or nobody can take part in it."""
        ended: list[Worker] = []
        first_id = self.server.core.membership.next_id
        while True:
            self._tell_now()
            self._tell_if_deserted()
            finish = self.server.wait(0.1)
            if finish is not None:
                return finish
            if self.interrupts.count > 1:
                return Finish("interrupted")
            for worker, sentence in pool.news():
                ended.append(worker)
                if worker.code == ConfigError.exit_code and not self.server.core.membership.members:
                    return Finish(sentence, failed=True)  # the last words say it
                if sentence:
                    self.terminal.call(partial(self._progress.say, f"potluck: {sentence}", style="yellow"))
            has_joined = self.server.core.membership.next_id > first_id
            if len(ended) == self.options.workers:
                self._tell_if_none_began(ended, has_joined=has_joined)
            elif not has_joined:
                self._tell_if_none_comes()

    def _tell_if_none_began(self, ended: list[Worker], *, has_joined: bool) -> None:
        """Say once that all of this machine's workers have ended before the run began, and what it waits for."""
        if not ended or self._has_started or self._deserted_at is not None or self.server.core.membership.members:
            return
        self._deserted_at = math.inf
        self._notice(
            f"{tell_all_ended(ended, has_joined=has_joined)}, and nobody else is in. The run waits, for as long as it"
            f" takes, {self._until_one_joins()}"
        )

    def _tell_if_none_comes(self) -> None:
        """Say once of a script that has run for a while what it would have to call."""
        if self.args.table or self._was_named or time.monotonic() < self.started + NOT_JOINED_S:
            return
        self._was_named = True
        self._notice(
            f"{shown_arguments(self.args.script[:1])} has run for {NOT_JOINED_S:g} s and has not come to"
            " potluck.init(). If it loads or downloads something first, this is no fault. A script that never calls it"
            " trains by itself."
        )

    def _tell_if_deserted(self) -> None:
        """Say once what a host waits for that has had workers and has none."""
        if self.server.core.membership.members:
            self._deserted_at = None
        elif self._has_started and self._deserted_at is None:
            self._deserted_at = time.monotonic()
        if self._deserted_at is not None and time.monotonic() > self._deserted_at + DESERTED_S:
            self._deserted_at = math.inf
            self._notice(
                f"No worker is left after step {self.server.core.steps_done:,}. The run waits, for as long as it takes,"
                f" {self._until_one_joins()}"
            )

    def _until_one_joins(self) -> str:
        script = "" if self.args.table else f" {shown_arguments(self.args.script)}"
        ends = "ends it, with what is saved by now" if self._has_started else "ends it"
        return f"until one joins: potluck join {self.folder / 'invite'}{script}. Ctrl-C {ends}."

    def _start_page(self) -> PageProcess | None:
        """Start the page, which shows what is in the run folder, and passes on what a person orders, if that is
        allowed."""
        self._tell_now()
        identity = self.options.identity or self.folder / "identity"
        wanted = PageSettings(folder=self.folder, invite=self.folder / "invite", identity=identity, led=True)
        page = start_page(self._page_address, wanted, on_order=self._on_order if self.options.control else None)
        if page is not None:
            self._stack.callback(page.close)
        return page

    def _on_order(self, order: dict[str, Any]) -> None:
        self.server.order(str(order.get("action")), order.get("worker"))

    def _tell_now(self) -> None:
        """Write what no event tells, for those who look: at most once a second, and never in the way of a step."""
        if time.monotonic() < self._told_now_at + NOW_S:
            return
        self._told_now_at = time.monotonic()
        with suppress(OSError):  # a full disk: what must be written says so
            write_whole(self.folder / NOW, json.dumps(self._now()))

    def _now(self) -> dict[str, Any]:
        """Tell how things stand; bytes are those of the whole run, and not of this process alone."""
        now = self.server.now()
        return now | {"bytes": {name: count + self._bytes_before.get(name, 0) for name, count in now["bytes"].items()}}

    def _read_bytes_before(self) -> dict[str, int]:
        """The bytes that travelled before this host was started again, as they were written down last."""
        with suppress(OSError, ValueError, AttributeError):  # none, or cut short by a crash: then they count from here
            told = json.loads((self.folder / NOW).read_text(encoding="utf-8")).get("bytes", {})
            return {name: int(count) for name, count in told.items()}
        return {}

    def _serve(self) -> Server:
        args, journal = self.args, self.journal
        given = self.options.identity
        identity = Identity.load(given) if given is not None else Identity.load_or_make(self.folder / "identity")
        self.identity = identity
        standing = journal.standing()
        newest = self.receiver.newest() if args.resume and not (standing and standing.version) else None
        if newest is not None:  # the journal was removed, or the run was not led by a host so far
            standing = newest[1]
        steps = standing.step if standing is not None else 0
        if not args.resume and (steps or checkpoint_folder.holds_any(self.receiver.folder)):
            at = f", at step {steps}" if steps else ""
            raise ConfigError(
                f"{self.folder} already holds a run{at}. Continue it with --resume, or name another folder with --out."
            )
        resumed = journal.resumed(standing)
        described = resumed.description
        if described is not None:  # how workers train may change when a run resumes; those who come now say how
            resumed = replace(resumed, description=replace(described, training={}))
        coordinator = Coordinator(
            patience_s=self.options.patience_s,
            secret="" if self.options.insecure else identity.secret,
            recipe=args.recipe or script_table(args.script),
            at_least=self.options.at_least,
            plain_peers=self.options.insecure,
            resumed=resumed,
        )
        invited = self._invited()
        named = self.options.port or (invited.port if invited else 0)
        port = named or int(journal.fact("port") or 0) or self._port_before()
        server = Server(
            coordinator,
            host=self.options.host,
            port=port,
            tls=None if self.options.insecure else identity.server_context(),
            journal=journal,
            saver=self.receiver,
            on_event=self.events.emit,
        )
        if args.base is not None:
            server.serve_base(args.base)
        server.show_watchers(self.folder / EVENTS, self.folder / NOW)
        server.record(self.folder / FLIGHT)
        server.on_step = self._on_step
        server.on_described = self._on_described
        if described is not None:
            before = described.training
            server.on_completed = lambda completed: self._tell_of_changes(before, completed.training)
            self._on_described(described)
        # Once it is ours: workers of a host that failed to bind would look there.
        journal.keep("port", str(server.port))
        return server

    def _invite(self, address: str) -> Invite:
        return self.identity.invite(address, self.server.port, encrypted=not self.options.insecure)

    def _invited(self) -> Invite | None:
        """Read what `potluck invite` has put beside the identity: where those who have it will look for this host."""
        given = self.options.identity
        return read_invite(str(given / "invite")) if given is not None and (given / "invite").is_file() else None

    def _open_journal(self) -> Journal:
        """A damaged one is set aside where there is a checkpoint to resume from."""
        path = self.folder / "journal.sqlite"
        try:
            return Journal(path)
        except JournalError as error:
            newest = self.receiver.newest() if self.args.resume else None
            if newest is None:
                raise
            why = str(error).partition(". Remove it")[0]
            say(f"{why}. It is now {set_aside(path).name}, and the run continues from {newest[0].name}.")
            return Journal(path)

    def _port_before(self) -> int:
        """Return the port of the last invite, where no journal tells it: workers will come back there."""
        with suppress(OSError, ValueError, ConfigError):  # a new run, or an invite that cannot be read
            return Invite.parse((self.folder / "invite").read_text(encoding="utf-8").strip()).port
        return 0

    def _write(self, name: str, text: str, mode: int) -> None:
        try:
            write_whole(self.folder / name, text, mode)
        except OSError as error:
            raise ConfigError(
                f"Cannot write {self.folder / name}: {error.strerror}. Free some space, or choose another folder with"
                " --out."
            ) from None

    def _show(self, invite: Invite, *, to_terminal: bool) -> None:
        path = self.folder / "invite"
        self._write(path.name, invite.line() + "\n", 0o600)
        if self.options.insecure:
            say(
                f"INSECURE: anybody who reaches {self.options.host} port {self.server.port} can take part, read the"
                " weights and change them, and nothing is encrypted. Use this on a network that you fully trust."
            )
        if self.options.identity is not None:  # what is printed is kept in logs, which others may read
            print(f"Waiting for those who have the invite of {invite}", flush=True)
        if self.options.identity is not None or not to_terminal:
            return
        where = "another terminal here" if is_loopback(invite.host) else "another machine"
        print(f"To join from {where} (the line is a secret; it is also in the file below it):", flush=True)
        script = "" if self.args.table else f" {shown_arguments(self.args.script)}"
        print(f"  potluck join {invite.line()}{script}", flush=True)
        print(f"  {path}", flush=True)
        if is_loopback(invite.host):
            print("Other machines can join a host that is started with --host 0.0.0.0.", flush=True)

    # What happens

    def _on_described(self, description: Description) -> None:
        """Before the run: a plain peer that cannot take an average would end in the first step."""
        if self.options.insecure and (sentence := description.too_large_for_entrenar()) is not None:
            self._say(sentence)

    def _start(self, from_step: int) -> None:
        """Tell of the start with the first step: only then is it known where the run continues, and how long it is."""
        core = self.server.core
        if self._has_started or core.description is None:
            return
        self._has_started = True
        description, details = core.description, core.description.told
        # A script's arguments; of a recipe, run.toml says more.
        arguments = {} if self.args.table else {"arguments": shown_arguments(self.args.script)}
        self.events.emit(
            RunStarted(
                name=str(details.get("name") or self.folder.name),
                folder=str(self.folder),
                workers=max(1, len(core.membership.ready)),
                device="any device",
                parameters=description.parameters,
                unit=str(details.get("unit") or "rows"),
                batch_size=description.batch,
                steps_total=core.steps_total,
                from_step=from_step,
                strategy=str(details.get("strategy") or ""),
                policy=description.policy,
                wire=description.wire,
                flops_per_sample=_figure(details.get("flops_per_sample")),
                settings=description.training | arguments,
            )
        )

    def _tell_of_changes(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Say which settings are not as they were when the host was stopped: that is allowed."""
        for name, (was, is_now) in differing_settings(before, now).items():
            self._notice(f"{name} was {was} in this run so far, and is {is_now} from here on.")

    def _notice(self, sentence: str) -> None:
        self.events.emit(Noticed(sentence=sentence))

    def _print(self, text: str) -> None:
        self.terminal.call(partial(print, text, flush=True))

    def _say(self, sentence: str) -> None:
        """Say a sentence among what else the terminal shows, without waiting for it."""
        self.terminal.call(partial(say, sentence))

    def _on_event(self, event: Event) -> None:
        match event:
            case WorkerCame() | WorkerWent():
                if isinstance(event, WorkerCame):
                    self._have_come.add(event.name)
                members = self.server.core.membership
                far = [m for m in members.ready if not m.name.startswith(LOCAL)]
                self.journal.keep("workers", str(len(far)))
                self.journal.keep("next worker", str(members.next_id))
                described = self.server.core.description
                is_plain = isinstance(event, WorkerCame) and event.kind.startswith("plain ")
                if is_plain and described is not None and (sentence := described.too_large_for_entrenar()) is not None:
                    self._say(f"{event.name} is a plain peer. {sentence}")
            case Validated():
                self.validation = event
            case Noticed():
                self._say(event.sentence)

    def _on_step(self, record: StepRecord, lr: float, norm: float, fault: str) -> None:
        """The first worker has applied a committed step."""
        now = time.monotonic()
        seconds, self._step_at = now - self._step_at, now
        self.loss = record.loss
        before, step = record.step - 1, record.step
        described = self.server.core.description
        if described is not None and described.windowed is not None:  # then the record's counts agreements
            before = described.steps_at(record.epoch, record.row)
            step = described.steps_at(record.epoch, record.row + record.rows)
        self._start(before)
        if fault:
            self.skipped += 1
            self.events.emit(StepSkipped(step=step, loss=record.loss, in_a_row=0, reason=fault))
            return
        workers = tuple(WorkerStep(**row) for row in record.workers)
        self.events.emit(
            StepDone(
                step=step,
                epoch=record.epoch,
                rows_seen=record.rows_seen,
                samples=record.samples,
                loss=record.loss,
                lr=lr,
                grad_norm=norm,
                seconds=seconds,
                workers=workers,
            )
        )

    def _on_interrupt(self, number: int) -> None:
        self._say("Finishing this step and saving, for all. Ctrl-C again stops at once.")
        self.server.request_stop()

    # The end

    def _end(self, finish: Finish) -> None:
        self._ended = ended = RunEnded(
            reason=finish.reason,
            step=self.server.core.steps_done,
            rows_seen=self.server.core.standing.rows_seen,
            seconds=time.monotonic() - self.started,
            loss=self.loss,
            validation_loss=self.validation.loss if self.validation is not None else None,
            skipped=self.skipped,
        )
        # Before the end is told: a host that is started again after that must not wait for workers that have left.
        try:
            self.journal.keep("workers", "0")
        except ConfigError as error:  # a full disk, say: the last words must be heard all the same
            self._say_late(str(error), finish)
        self.events.emit(ended)
        assert self._file is not None
        self._file.drain(STILL_S)
        if self._file.error is not None:
            self._say_late(str(self._file.error), finish)

    def _say_late(self, sentence: str, finish: Finish) -> None:
        if sentence != finish.reason:
            self._say(sentence)

    def _close_outlets(self) -> None:
        """Last of all: whatever was told until now is written and shown, unless nobody takes it."""
        if self._file is not None and self._file.close(STILL_S):
            self._event_file.close()
        self.terminal.call(self._progress.close)
        self.terminal.close(STILL_S)

    def _summarize(self, finish: Finish) -> int:
        step = self.server.core.steps_done
        if finish.failed:
            self._say(finish.reason)
            return 1
        saved = self._saved()
        fault = self.server.core.saving.fault
        if fault:  # what is saved is older than what was trained
            self._say(f"{fault.removesuffix('.')}. What was trained after the newest checkpoint is lost.")
        if finish.reason == "interrupted":
            again = f" Continue with: {to_resume(self.args)}" if saved else ""
            self._say(f"Stopped after step {step}.{saved or ' Nothing was saved.'}{again}")
            return Interrupted.exit_code
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        validation = f", {self.validation.in_words}" if self.validation is not None else ""
        took = f" in {duration(self._ended.seconds)}" if self._ended is not None else ""
        self._print(f"\nFinished {plural(step, 'step')}{took}{loss}{validation}.{saved}")
        if fault:
            return 1
        with suppress(OSError):  # no room for a picture
            if step:
                curve = draw_losses(self.folder / EVENTS, self.folder / "loss.png")
                self._print(f"  loss curve   {curve}")
        table = self.args.table
        if is_finetune(table) or table.get("data", {}).get("tokenizer") == "bpe":
            # A process of its own, which may load torch and more, writes what the run has come to.
            out = None if self.terminal.drain(STILL_S) else subprocess.DEVNULL  # it would stand still as we do
            finish_it = [sys.executable, "-m", "potluck.launch.worker", "--finish", str(self.folder)]
            subprocess.run(finish_it, stdout=out, stderr=out, check=False)
        return 0

    def _saved(self) -> str:
        """Return where the run is, if it is; and whether all of it is there."""
        newest = self.receiver.newest()
        if newest is None:
            return ""
        path, standing = newest
        if standing.version < self.server.core.standing.version:
            return f" The newest checkpoint is older: {path}."
        return f" Saved in {path}."


def _columns() -> dict[str, str]:
    """How wide a progress bar of a worker's script may be: its lines are shown behind the worker's name."""
    if "COLUMNS" in os.environ or not sys.stdout.isatty():
        return {}
    return {"COLUMNS": str(max(40, shutil.get_terminal_size().columns - len(f"[{LOCAL}00] ")))}


def _figure(told: object) -> float:
    """Read a number that a worker has sent: it may send anything."""
    return float(told) if isinstance(told, int | float) and 0 <= told < 1e30 else 0.0

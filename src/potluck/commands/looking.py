"""`potluck watch`, `potluck why`, `potluck replay` and `potluck doctor`: they look at a run, or at this machine."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from potluck.errors import ConfigError
from potluck.launch.options import Page, option
from potluck.words import duration


@dataclass
class WatchRun:
    """Show the live page of a run: of its folder, finished or running, or of a host elsewhere by its invite.

    It only shows. Whoever watches takes no part in the run, and does not slow it.
    """

    what: Annotated[tyro.conf.Positional[str], option("RUN|INVITE")]
    """A run folder; or the line that `potluck host` printed, or its file."""
    beside: Annotated[tyro.conf.Positional[str | None], option("[RUN]", default="none")] = None
    """The folder of another run: its curves are drawn over those of the first."""
    page: Page = None

    def __call__(self) -> int:
        from potluck.launch.watch import watch

        return watch(self.what, self.page, self.beside)


@dataclass
class Why:
    """Say who waits for whom in a run that seems to hang, what is owed, and where each process is.

    Asks those of its processes that are yours and on this machine, and does not disturb them. Ctrl-\\ in the terminal
    of a run, or kill -QUIT to one of its processes, says the same there.
    """

    run: Annotated[tyro.conf.Positional[str | None], option("[RUN]", default="all of yours here")] = None
    """A run folder."""

    def __call__(self) -> int:
        from potluck.launch.why import why

        return why(self.run)


@dataclass
class ReplayRun:
    """Repeat what a host heard and decided, from the flight recorder of its run folder, and say where it waited.

    Nothing is trained and nobody is asked. It ends with code 1 where a decision differs from the recorded one.
    """

    run: Annotated[tyro.conf.Positional[str], option("RUN", "The run folder of a host.")]

    def __call__(self) -> int:
        from potluck.fleet.flight import FLIGHT, VERSION
        from potluck.fleet.replaying import replay
        from potluck.fleet.waits import tell_owed, tell_waits

        done = replay(Path(self.run) / FLIGHT)
        for note in done.notes:
            print(note)
        if done.core is None or not done.inputs:
            raise ConfigError(f"There is nothing to replay in {self.run}: only a host records, in its run folder.")
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.began))
        end = time.strftime("%H:%M:%S", time.localtime(done.ended))
        step = done.core.standing.version
        print(
            f"Replayed {done.inputs:,} inputs from {day} to {end} ({duration(done.ended - done.began)}), from step"
            f" {done.first_step:,} to {step:,}: {'not ' * bool(done.difference)}the same decisions as then."
        )
        if done.difference:
            print(done.difference)
            if done.version != VERSION:
                print(f"It was recorded by potluck {done.version}, and this is {VERSION}, which may decide otherwise.")
        print(f"\nAt its end: {tell_waits(done.core, done.clock)}\n")
        for line in tell_owed(done.core, done.clock):
            print(f"  {line}")
        return 1 if done.difference else 0


@dataclass
class Doctor:
    """Say what this machine brings, and what is wrong, with the fix."""

    def __call__(self) -> int:
        from potluck.doctor import examine

        return examine()

"""`potluck join`; and `potluck pause` and `potluck resume`, by which an owner has the machine back."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from potluck.launch.options import Count, Ranks, Repeated, Threads, option, tell_of_options, workers_config
from potluck.train.arguments import as_settings


@dataclass
class Join:
    """Join a run: paste the line that `potluck host` printed. Ctrl-C leaves it politely, and it continues.

    Without a script, what is trained comes from the host as a recipe, never as code. A script without arguments gets
    those of the host; -- after its name: none. Options come before the invite.
    """

    invite: Annotated[tyro.conf.Positional[str], option("INVITE [SCRIPT [ARGUMENTS ...]]")]
    """The line; or a file that holds it; or - to read it."""
    data: Annotated[Repeated, option("PATH", default="you are asked, if the host's recipe names files")] = field(
        default_factory=list
    )
    """Where this machine has the text. Nothing else of yours is read. May be repeated."""
    base: Annotated[str | None, option("FOLDER", default="the Hugging Face cache")] = None
    """Where this machine has the model that is fine-tuned."""
    fetch_base: bool = False
    """Ask the host for the model that is fine-tuned, once."""
    watch: Annotated[Literal["off", "auto", "aws", "gcp", "azure"], option("off|auto|aws|gcp|azure")] = "off"
    """Ask this machine's cloud whether it takes the machine back, and leave politely when it does."""
    hours: Annotated[str | None, option("22:00-07:00,Sat", default="always")] = None
    """Work only then: ranges of local time, and whole days."""
    yields: Annotated[bool, tyro.conf.arg(name="yield")] = False
    """Stay away while others use the card, or the processor if there is none."""
    workers: Count = 1
    threads: Threads = None
    ranks: Ranks = None

    def __call__(self, *arguments: str) -> int:
        from potluck.launch.absence import Hours
        from potluck.launch.join import JoinTerms, join

        if arguments:
            tell_of_options("join", self, arguments[0], arguments[1:], before="the invite")
        config = workers_config(self.workers, self.threads, self.ranks)
        settings = as_settings({"data.paths": self.data, "model.hf": self.base})
        terms = JoinTerms(self.watch, Hours.parse(self.hours) if self.hours is not None else None, self.yields)
        return join(self.invite, list(arguments), config, settings, terms, fetches_base=self.fetch_base)


Name = Annotated[
    tyro.conf.Positional[str | None], option("[NAME]", "Which worker, if several of yours are here; or all.")
]


@dataclass
class Pause:
    """Have your card back: the worker on this machine hands over what it holds, and goes until it is to come back.

    The process that joined stays, and holds no memory of the card. The run continues with the others.
    """

    name: Name = None
    length: Annotated[str | None, option("1h", default="when you say potluck resume", name="for")] = None
    """It comes back by itself after this long."""

    def __call__(self) -> int:
        from potluck.launch.control import pause

        return pause(self.name, self.length)


@dataclass
class Resume:
    """Let a worker on this machine that was paused come back now, if it is within its hours."""

    name: Name = None

    def __call__(self) -> int:
        from potluck.launch.control import resume

        return resume(self.name)

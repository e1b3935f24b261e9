"""`potluck join`; and `potluck pause` and `potluck resume`, by which an owner has the machine back."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from potluck.launch.options import Count, Ranks, Threads, workers_config
from potluck.train.arguments import base_setting, data_setting


@dataclass
class Join:
    """Join a run: paste the line that `potluck host` printed. Ctrl-C leaves it politely, and it continues.

    Without a script, what is trained comes from the host as a recipe, never as code. Options come before the invite.
    """

    invite: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            metavar="INVITE [SCRIPT [ARGUMENTS ...]]", help="The line; or a file that holds it; or - to read it."
        ),
    ]
    data: Annotated[
        tyro.conf.UseAppendAction[list[str]],
        tyro.conf.arg(
            metavar="PATH",
            help="Where this machine has the text. Nothing else of yours is read. May be repeated.",
            help_behavior_hint="(default: you are asked, if the host's recipe names files)",
        ),
    ] = field(default_factory=list)
    base: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FOLDER",
            help="Where this machine has the model that is fine-tuned.",
            help_behavior_hint="(default: the Hugging Face cache)",
        ),
    ] = None
    fetch_base: Annotated[bool, tyro.conf.arg(help="Ask the host for the model that is fine-tuned, once.")] = False
    watch: Annotated[
        str,
        tyro.conf.arg(
            metavar="off|auto|aws|gcp|azure",
            help="Ask this machine's cloud whether it takes the machine back, and leave politely when it does.",
        ),
    ] = "off"
    hours: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="22:00-07:00,Sat",
            help="Work only then: ranges of local time, and whole days.",
            help_behavior_hint="(default: always)",
        ),
    ] = None
    yields: Annotated[
        bool,
        tyro.conf.arg(name="yield", help="Stay away while others use the card, or the processor if there is none."),
    ] = False
    workers: Count = 1
    threads: Threads = None
    ranks: Ranks = None

    def __call__(self, *arguments: str) -> int:
        from potluck.launch.join import join
        from potluck.launch.join_session import JoinTerms

        config = workers_config(self.workers, self.threads, self.ranks)
        settings = (*data_setting(self.data), *base_setting(self.base))
        terms = JoinTerms.of(self.watch, self.hours, yields=self.yields)
        return join(self.invite, list(arguments), config, settings, terms, fetches_base=self.fetch_base)


Name = Annotated[
    tyro.conf.Positional[str | None],
    tyro.conf.arg(metavar="[NAME]", help="Which worker, if several of yours are here; or all."),
]


@dataclass
class Pause:
    """Have your card back: the worker on this machine hands over what it holds, and goes until it is to come back.

    The process that joined stays, and holds no memory of the card. The run continues with the others.
    """

    name: Name = None
    length: Annotated[
        str | None,
        tyro.conf.arg(
            name="for",
            metavar="1h",
            help="It comes back by itself after this long.",
            help_behavior_hint="(default: when you say potluck resume)",
        ),
    ] = None

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

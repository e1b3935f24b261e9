"""`potluck host`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from potluck.commands.options import Data, Out, Page, Ranks, Settings, Threads, Track
from potluck.train.arguments import data_setting, track_setting


@dataclass
class Host:
    """Lead a run that workers on any machine may join and leave at any time, and print the line to join it with.

    Any worker may be killed, and so may the host: start it again with --resume. What is trained is a recipe, or a
    script of yours, of which every joiner needs a copy.
    """

    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RECIPE|SCRIPT", help="A recipe, as for train; or a Python file, as for run."),
    ]
    data: Data = ()
    workers: Annotated[
        int, tyro.conf.arg(aliases=["-n"], metavar="N", help="Workers on this machine; 0: only those who join.")
    ] = 1
    threads: Threads = None
    ranks: Ranks = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue the run of the run folder.")] = False
    or_resume: Annotated[
        bool, tyro.conf.arg(help="Continue the run of the run folder if it holds one; else begin it.")
    ] = False
    host: Annotated[
        str, tyro.conf.arg(metavar="ADDRESS", help="Where to listen; 0.0.0.0 lets other machines join, encrypted.")
    ] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(metavar="N", help="0: any that is free, and the same again on --resume.")] = 0
    address: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="How others reach this machine, for the invite.")
    ] = None
    identity: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FOLDER",
            help="What `potluck invite` made: its invite is in others' hands, and is not printed here.",
            help_behavior_hint="(default: the run folder's own)",
        ),
    ] = None
    patience: Annotated[
        float, tyro.conf.arg(metavar="SECONDS", help="How long a worker may be silent before it is given up.")
    ] = 30.0
    at_least: Annotated[int, tyro.conf.arg(metavar="N", help="Workers to wait for before the first step.")] = 1
    insecure: Annotated[
        bool, tyro.conf.arg(help="No encryption and no secret; plain peers of the published protocol may join.")
    ] = False
    track: Track = field(default_factory=list)
    page: Page = None
    control: Annotated[
        bool, tyro.conf.arg(help="Let whoever sees the page pause the run, save it, and let workers go.")
    ] = False
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.launch.host import host, with_base
        from potluck.train.arguments import Listening, host_args

        args = host_args(
            what=self.what,
            settings=(*self.settings, *data_setting(self.data), *track_setting(self.track)),
            track=self.track,
            workers=self.workers,
            threads=self.threads,
            ranks=self.ranks,
            out=self.out,
            resume=self.resume,
            or_resume=self.or_resume,
            listening=Listening(
                host=self.host,
                port=self.port,
                address=self.address,
                patience_s=self.patience,
                at_least=self.at_least,
                insecure=self.insecure,
                identity=Path(self.identity) if self.identity is not None else None,
            ),
        )
        return host(with_base(replace(args, page=self.page, control=self.control)))

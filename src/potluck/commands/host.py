"""`potluck host`, and `potluck invite`, which makes its invite before it is started."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from potluck.commands.options import Data, Out, Page, Ranks, Settings, Threads, Track
from potluck.errors import ConfigError
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


@dataclass
class MakeInvite:
    """Make an invite before its host is started, where a scheduler hands out the one and starts the other.

    FOLDER gets the identity, for `potluck host --identity FOLDER`, and the file `invite`, for `potluck join`. Neither
    is printed. A folder that has an identity keeps it.
    """

    address: Annotated[str, tyro.conf.arg(metavar="NAME", help="How workers will reach the host.")]
    port: Annotated[int, tyro.conf.arg(metavar="N", help="Where the host will listen.")]
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help="For the identity and the invite.")]

    def __call__(self) -> int:
        from potluck.files import write_whole
        from potluck.fleet.invite import Identity, Invite

        folder = Path(self.out)
        try:
            Invite(self.address, self.port, "", None)
        except ConfigError:
            raise ConfigError("--address is a plain name or an IP address, and --port lies in 1 to 65535.") from None
        identity = Identity.load_or_make(folder)
        invite = identity.invite(self.address, self.port, encrypted=True)
        try:
            write_whole(folder / "invite", invite.line() + "\n", 0o600)
        except OSError as error:
            raise ConfigError(f"Cannot write {folder / 'invite'}: {error.strerror}.") from None
        print(
            f"{invite}\n"
            f"  for the host     potluck host RECIPE --host 0.0.0.0 --identity {folder}\n"
            f"  for each worker  potluck join {folder / 'invite'}\n"
            f"Workers need the file {folder / 'invite'} alone. Whoever has the rest can pose as the host."
        )
        return 0

"""`potluck host`, `potluck invite`, which makes its invite before it is started, and `potluck up`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from potluck.cluster.options import UpOptions
from potluck.config import checked
from potluck.environment import check_patience
from potluck.errors import ConfigError
from potluck.launch.options import HostOptions, host_args, tell_of_options
from potluck.train.arguments import as_settings


@dataclass(frozen=True, kw_only=True)
class Host(HostOptions):
    """Lead a run that workers on any machine may join and leave at any time, and print the line to join it with.

    Any worker may be killed, and so may the host: start it again with --resume. What is trained is a recipe, or a
    script of yours, of which every joiner needs a copy. Options come before a script: everything after its name is
    passed to it, here and on joiners that give it no arguments of their own.
    """

    def __call__(self, *arguments: str) -> int:
        from potluck.launch.host import host

        tell_of_options("host", self, self.what, arguments)
        return host(host_args(self, arguments))


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
        # The identity first: an invite names its certificate, and nothing else could answer to it.
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


@dataclass(frozen=True, kw_only=True)
class Up(UpOptions):
    """Train on all nodes that a scheduler has given: SLURM, Ray, MPI or torchrun, found by what they say of themselves.

    One command on every node, as in `srun potluck up RECIPE`. Nodes that are alike become a fixed group; otherwise the
    first is a host that the others join. A run that the run folder holds resumes. After a script's name, everything
    is passed to it.
    """

    def __call__(self, *arguments: str) -> int:
        from potluck.cluster.running import up

        checked(lambda: check_patience("--patience", self.patience_s))
        if (self.workers is not None and self.workers < 1) or not 0 <= self.port < 1 << 16:
            raise ConfigError("--workers is at least 1, and --port below 65,536.")
        tell_of_options("up", self, self.what, arguments)
        settings = [*self.settings, *as_settings({"data.paths": self.data})]
        return up(replace(self, arguments=arguments, settings=settings))

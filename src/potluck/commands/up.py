"""`potluck up`."""

from dataclasses import dataclass, replace

from potluck.cluster.options import UpOptions
from potluck.config import checked
from potluck.environment import check_patience
from potluck.errors import ConfigError
from potluck.train.arguments import data_setting


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
        return up(replace(self, arguments=arguments, settings=[*self.settings, *data_setting(self.data)]))

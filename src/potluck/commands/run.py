"""`potluck run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from potluck.commands.options import Count, Only, Threads, workers_config
from potluck.errors import ConfigError
from potluck.launch.processes import launch


@dataclass
class Run:
    """Run your own script on several workers. It calls potluck.init(), and runs under torchrun too.

    Options come before the script: everything after its name is passed to it.
    """

    script: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCRIPT [ARGUMENTS ...]", help="A Python file.")]
    workers: Count = 2
    threads: Threads = None
    only: Only = None

    def __call__(self, *arguments: str) -> int:
        if not Path(self.script).is_file():
            raise ConfigError(f"There is no script {self.script}.")
        return launch([self.script, *arguments], workers_config(self.workers, self.threads), self.only)

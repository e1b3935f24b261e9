"""Measures what the ranks of a group use of this machine, from outside, while somebody looks at the page.

Workers of a host tell their host themselves. Ranks are found as `potluck why` finds them: each process says which run
it is of. Those of other machines are not seen.
"""

import threading
from pathlib import Path
from typing import Any

from potluck.account import PROCESS, processes_folder
from potluck.files import read_table
from potluck.machine_use import MachineUse, UseMeter
from potluck.system import started_at

MOST_BYTES = 64 << 10


class RankUses:
    def __init__(self) -> None:
        self.newest: dict[int, MachineUse] = {}
        """By rank."""
        self._meters: dict[int, UseMeter] = {}
        self._looking: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Measure in a thread that nobody waits for: nvidia-smi may hang, and the page ends with the run."""
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self.look, args=(folder,), name="machine use", daemon=True)
            self._looking.start()

    def look(self, folder: Path) -> None:
        """Measure the ranks of the run in this folder; each is told from the second look at it on."""
        try:
            ranks = find_ranks(folder)
        except OSError:  # no folder of processes, or one that went while it was read
            return
        self._meters = {pid: self._meters.get(pid) or UseMeter(pid) for pid in ranks.values()}
        found = {rank: self._meters[pid].look() for rank, pid in ranks.items()}
        self.newest = {rank: use for rank, use in found.items() if use is not None}


def find_ranks(folder: Path) -> dict[int, int]:
    """Find the processes of this user that are the ranks of a run: rank -> number of the process."""
    root = processes_folder()
    tables = [read_table(each / PROCESS, MOST_BYTES) for each in (root.iterdir() if root.is_dir() else ())]
    workers = [table for table in tables if table.get("role") == "worker" and _is_here(table)]
    own = [table for table in workers if table.get("run") == str(folder.resolve())]
    parents = {table.get("parent") for table in own}
    ranks = [table for table in workers if table in own or (table.get("parent") in parents and "run" not in table)]
    return {_rank_of(table): int(table["pid"]) for table in ranks}


def _is_here(table: dict[str, Any]) -> bool:
    pid = table.get("pid")
    return isinstance(pid, int) and bool(table.get("started")) and started_at(pid) == table["started"]


def _rank_of(table: dict[str, Any]) -> int:
    name = str(table.get("name") or "0")
    return int(name) if name.isdecimal() else 0

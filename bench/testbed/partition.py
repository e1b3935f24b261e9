"""Parts of a GPU: a daemon of NVIDIA's Multi-Process Service (MPS), and how much of the GPU each process may use.

The daemon is our own, since its pipes lie in a folder that is named after the testbed: nobody else's is touched.
"""

import shutil
import tempfile
from pathlib import Path

from bench.testbed.programs import TestbedError, find, run

PROGRAM = "nvidia-cuda-mps-control"
PACKAGE = "the NVIDIA driver's programs (in a container: the capabilities compute and utility), or leave out `gpu`"


class Partition:
    def __init__(self, name: str) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"{name}-mps"
        self.mark = f"{name}-mps"
        """The daemon outlives the workers, so that it can be asked to quit."""

    def make(self) -> None:
        program = find(PROGRAM, PACKAGE)
        for folder in (self._folder, self._pipes, self._logs):
            folder.mkdir(mode=0o700)
        try:
            run([program, "-d"], self.mark, env=self.environment(None))
            run([program], self.mark, text="get_server_list\n", env=self.environment(None))  # does it answer?
        except TestbedError as error:
            raise TestbedError(f"{error} Parts of a GPU need MPS {self._last_log()}; or leave out `gpu`.") from None

    def environment(self, percent: float | None) -> dict[str, str]:
        """A process with this uses that much of the GPU; all of it if None, through the same daemon."""
        found = {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipes), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
        return found if percent is None else found | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percent:g}"}

    def quit(self) -> None:
        """Asks the daemon to end. One that does not is killed by the reaper, by its mark."""
        if self._pipes.is_dir():
            run([find(PROGRAM, PACKAGE)], self.mark, text="quit\n", env=self.environment(None))

    def remove(self) -> None:
        if self._folder.is_dir():
            shutil.rmtree(self._folder)

    def remains(self) -> list[str]:
        return [str(self._folder)] if self._folder.is_dir() else []

    @property
    def _pipes(self) -> Path:
        return self._folder / "pipe"

    @property
    def _logs(self) -> Path:
        return self._folder / "log"

    def _last_log(self) -> str:
        log = self._logs / "control.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return f"(its log ends: {lines[-1]})" if lines else "(it left no log)"

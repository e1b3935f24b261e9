"""A SLURM cluster of its own on this machine: munged, slurmctld, and one slurmd for each "node", on free ports.

Everything lies in one folder and ends by process id. Needs root, as slurmd does, and SLURM's daemons with support for
several slurmd on a machine, as Debian builds them. Nodes are names for 127.0.0.1; what they bring is what they are told
to say.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
CONFIG = """
ClusterName=potluck
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=300
SlurmdTimeout=300
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why there can be no cluster here, as a sentence; empty if there can be one."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"SLURM is not installed: {', '.join(absent)}. On Debian: apt-get install slurmctld slurmd munge"
    return "" if os.geteuid() == 0 else "slurmd has to be started by root."


class Cluster:
    def __init__(self, folder: Path, cores: dict[str, int]) -> None:
        """`cores`: of each node, by its name."""
        self.folder, self.cores = folder, cores
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "munge", *(f"spool-{node}" for node in cores)):
            (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        ports = free_ports(1 + len(cores))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={count} State=UNKNOWN"
            for (node, count), port in zip(cores.items(), ports[1:], strict=True)
        )
        self.config = folder / "slurm.conf"
        self.config.write_text(
            CONFIG.format(port=ports[0], folder=folder, socket=folder / "munge" / "socket", nodes=nodes)
        )
        self.environment = os.environ | {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={munge / file}" for name, file in files.items()]
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *options)
        wait_for(lambda: (munge / "socket").exists(), "munged opens no socket")
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.config))
        for node in self.cores:
            self.start_node(node)
        wait_for(lambda: self.idle() == set(self.cores), lambda: f"not idle: {self.run('sinfo', '-N').stdout}")

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.config))

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def idle(self) -> set[str]:
        done = self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return set(done.stdout.split())

    def run(self, *command: str, timeout: float = 120.0, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]

    def popen(self, *command: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )  # type: ignore[call-overload]

    def kill_node(self, node: str) -> None:
        """As if it had lost its power: its slurmd, the steps on it and all that they started; and SLURM is told."""
        for pid in [self.processes[node].pid, *self.steps_on(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(node).wait()
        done = self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")
        assert done.returncode == 0, done.stderr

    def steps_on(self, node: str) -> list[int]:
        """The processes of jobs there, as their environment says, and the slurmstepd that is the parent of each."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in words and f"SLURM_CONF={self.config}".encode() in words:
                    found.add(int(path.name))
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    if (Path("/proc") / str(parent) / "comm").read_text().startswith("slurmstepd"):
                        found.add(parent)
        return sorted(found)

    def stop(self) -> None:
        for job in self.run("squeue", "-h", "-o", "%i").stdout.split():
            self.run("scancel", "--full", "-s", "KILL", job)
        for node in list(self.cores):
            for pid in self.steps_on(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name, process in reversed(self.processes.items()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            del name


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def wait_for(holds: Callable[[], bool], what: str | Callable[[], str], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.05)


@contextmanager
def slurm(cores: dict[str, int]) -> Iterator[Cluster]:
    """In a folder with a short name: sockets have no room for more."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        cluster = Cluster(Path(name), cores)
        Path(name).chmod(0o755)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()

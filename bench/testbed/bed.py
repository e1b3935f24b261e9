"""The testbed: starts processes inside its machines, and changes the machines while they run."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from types import TracebackType
from typing import Any, ClassVar, Self

from bench.testbed.network import INTERFACE, Network
from bench.testbed.partition import Partition
from bench.testbed.programs import MARK, TestbedError
from bench.testbed.quota import Quotas
from bench.testbed.reaper import Reaper

ENTER = 'echo $$ > "$1" || exit 125; shift; exec "$@"'
"""For sh: joins a control group, then becomes the command, which is limited from its first instruction on."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    cpu: float | None = None
    """Cores: 0.5 computes during half of the time. None: no quota."""
    mbit: float | None = None
    """Mbit per second of its link, each way. None: no limit."""
    gpu: float | None = None
    """Percent of the GPU's processors. 0: it has no GPU. None: no limit."""

    def __post_init__(self) -> None:
        if self.cpu is not None and self.cpu < 0.001:
            raise ValueError(f"cpu is a number of cores, at least 0.001, not {self.cpu}")
        if self.mbit is not None and self.mbit < 0.01:
            raise ValueError(f"mbit is a rate in Mbit/s, at least 0.01, not {self.mbit}")
        if self.gpu is not None and not 0 <= self.gpu <= 100:
            raise ValueError(f"gpu is a percentage, 0 to 100, not {self.gpu}")


class Testbed:
    """Machines from `with` to its end, or to the end of this process, whichever comes first.

    Namespaces are made if any machine has a limited link, or with `network=True`; otherwise all share 127.0.0.1.
    """

    _letters: ClassVar[set[str]] = set()
    """Of the testbeds that this process has open."""

    def __init__(self, machines: Sequence[Machine], *, network: bool = False) -> None:
        if not machines:
            raise ValueError("a testbed has at least one machine")
        self.machines = list(machines)
        self._has_network = network or any(machine.mbit is not None for machine in machines)
        self._has_partition = any(machine.gpu for machine in machines)
        self._processes: list[subprocess.Popen[Any]] = []

    @staticmethod
    def lacks(machines: Sequence[Machine], *, network: bool = False) -> str | None:
        """What is missing here for such a testbed, and what to do; None if nothing. The sure way to know is to try."""
        try:
            with Testbed(machines, network=network):
                return None
        except TestbedError as error:
            return str(error)

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise TestbedError("A testbed needs Linux: its control groups and network namespaces.")
        self._letter = next(letter for letter in ascii_lowercase if letter not in self._letters)
        self.name = f"tb{os.getpid()}{self._letter}"  # a link has a name of at most 15 letters: this, and "-199"
        count = len(self.machines)
        self._quotas = Quotas(self.name, count)
        self._network = Network(self.name, count)
        self._partition = Partition(self.name)
        self._reaper = Reaper(self.name, count)
        self._letters.add(self._letter)
        try:
            self._make()
        except BaseException:
            self._clear()
            raise
        return self

    def _make(self) -> None:
        try:
            # Even without a quota: a group tells exactly which processes are ours.
            self._quotas.make([machine.cpu for machine in self.machines])
        except TestbedError:
            if any(machine.cpu is not None for machine in self.machines):
                raise
        if self._has_network:
            self._network.make([machine.mbit for machine in self.machines])
        if self._has_partition:
            self._partition.make()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._clear()
        if left and error is None:
            raise TestbedError(f"Not everything could be cleared away. Still there: {', '.join(left)}.")

    def _clear(self) -> list[str]:
        left = self._reaper.clear()
        for process in self._processes if not left else []:
            process.wait()
        self._letters.remove(self._letter)
        return left

    def start(
        self, index: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command inside a machine; `options` are Popen's. It ends with the testbed, its children too."""
        inside = [*(self._network.enter(index) if self._has_network else []), *command]
        if self._quotas.are_made:
            inside = ["/bin/sh", "-c", ENTER, "testbed", str(self._quotas.entrance(index)), *inside]
        process = subprocess.Popen(inside, env=self._environment(index, os.environ if env is None else env), **options)
        self._processes.append(process)
        return process

    def _environment(self, index: int, given: Mapping[str, str]) -> dict[str, str]:
        machine = self.machines[index]
        ours = {MARK: self.name, "TESTBED_MACHINE": str(index), "TESTBED_ADDRESS": self.address(index)}
        if machine.gpu == 0:
            ours["CUDA_VISIBLE_DEVICES"] = ""
        elif self._has_partition:
            ours |= self._partition.environment(machine.gpu)
        # A quota is not seen by those who count cores: more threads than cores would only get in each other's way.
        threads = {} if machine.cpu is None else {"OMP_NUM_THREADS": str(math.ceil(machine.cpu))}
        return {**threads, **given, **ours}

    def set_cpu(self, index: int, cores: float | None) -> None:
        """Holds at once for all that runs inside."""
        Machine(cpu=cores)
        if not self._quotas.are_made:
            raise TestbedError("This testbed has no quotas: give at least one machine a `cpu` from the start.")
        self._quotas.set(index, cores)

    def throttled(self, index: int) -> int:
        """In how many periods so far the machine used up its quota and had to wait: the proof that it holds."""
        return self._quotas.throttled(index) if self._quotas.are_made else 0

    def address(self, index: int) -> str:
        """Of a machine, as the other machines and this process see it."""
        return self._network.address(index) if self._has_network else "127.0.0.1"

    def unplug(self, index: int) -> None:
        """Pulls the plug of a machine's link: nothing passes any more, and nobody is told. There is no way back."""
        self._check_network()
        self._network.unplug(index)

    def namespace(self, index: int) -> str:
        """Of a machine, for `enter_namespace()` in a process that was started elsewhere."""
        self._check_network()
        return self._network.namespace(index)

    def _check_network(self) -> None:
        if not self._has_network:
            raise TestbedError("This testbed has no network of its own: make it with network=True.")

    @property
    def parent_address(self) -> str:
        """Of this process, as the machines see it."""
        return self._network.parent_address if self._has_network else "127.0.0.1"

    @property
    def interface(self) -> str:
        """What GLOO_SOCKET_IFNAME is to be, inside every machine."""
        return INTERFACE if self._has_network else "lo"

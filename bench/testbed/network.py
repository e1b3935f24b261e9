"""A network link per machine: a namespace with one end of a veth pair, a bridge that joins the other ends.

The rate holds each way, since a token bucket (tbf) stands at both ends. The bridge has an address as well, by which the
machines reach the testbed's own process. All names follow from the testbed's, so that the reaper can remove what a
killed testbed had made. Where the machine filters bridged packets (Docker's FORWARD DROP, with br_netfilter loaded),
that filter holds here too.
"""

import ctypes
import os
from pathlib import Path

from bench.testbed.programs import TestbedError, find, run

IPROUTE, UTIL_LINUX = "iproute2, or leave out `mbit`", "util-linux, or leave out `mbit`"
INTERFACE = "eth0"
"""Inside every machine."""
NAMESPACES = Path("/run/netns")
LINKS = Path("/sys/class/net")
SUBNETS = 512
"""198.18.0.0/15 is set aside for benchmarks: no network that a person uses lies there."""
MOST_MACHINES = 200
LEAST_BURST_BYTES = 32_000
BURST_S = 0.001
"""At any rate, a bucket holds what passes in so long: the kernel's timers are finer than that."""
QUEUE_S = 0.05
"""What waits longer is dropped, and TCP slows down."""
CLONE_NEWNET = 0x40000000


class Network:
    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._namespaces = [f"{name}-{index}" for index in range(count)]  # and the bridge's end of each pair
        self._subnet = ""

    def make(self, rates: list[float | None]) -> None:
        """Rates are in Mbit/s; None: as fast as this machine can."""
        if len(rates) > MOST_MACHINES:
            raise TestbedError(f"A testbed has room for {MOST_MACHINES} machines with a network, not for {len(rates)}.")
        if os.geteuid() != 0:
            raise TestbedError("Network namespaces need root: run it as root, or leave out `mbit`.")
        ip, tc = find("ip", IPROUTE), find("tc", IPROUTE)
        find("nsenter", UTIL_LINUX)
        try:
            self._build(ip, tc, rates)
        except TestbedError as error:
            raise TestbedError(
                f"{error} Network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN (in a container: "
                "--privileged) and a kernel with veth, bridge and tbf; or leave out `mbit`."
            ) from None

    def _build(self, ip: str, tc: str, rates: list[float | None]) -> None:
        self._subnet = self._free_subnet(ip)
        bridge = self._name
        lines = [f"link add {bridge} type bridge", f"address add {self.parent_address}/24 dev {bridge}"]
        for namespace in self._namespaces:
            run([ip, "netns", "add", namespace], self._name)
            lines += [
                f"link add {namespace} type veth peer name {INTERFACE} netns {namespace}",
                f"link set {namespace} master {bridge} addrgenmode none",
                f"link set {namespace} up",
            ]
        run([ip, "-batch", "-"], self._name, text="\n".join([*lines, f"link set {bridge} up"]))
        for index, (namespace, rate) in enumerate(zip(self._namespaces, rates, strict=True)):
            inside = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none",  # Gloo might choose the address that IPv6 makes up
                f"address add {self.address(index)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            run([ip, "-n", namespace, "-batch", "-"], self._name, text="\n".join(inside))
            if rate is not None:
                run([tc, "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", *_bucket(rate)], self._name)
                run([tc, "qdisc", "add", "dev", namespace, "root", *_bucket(rate)], self._name)

    def _free_subnet(self, ip: str) -> str:
        """One that no route leads to. Two testbeds that start at once look from different ones on."""
        routes = run([ip, "-4", "route", "show", "table", "all"], self._name)
        for step in range(SUBNETS):
            number = (os.getpid() + step) % SUBNETS
            subnet = f"198.{18 + number // 256}.{number % 256}."
            if f" {subnet}" not in f" {routes}".replace("\n", " "):
                return subnet
        raise TestbedError("All subnets of 198.18.0.0/15 are in use here: end the other testbeds.")

    @property
    def parent_address(self) -> str:
        return f"{self._subnet}1"

    def address(self, index: int) -> str:
        return f"{self._subnet}{index + 2}"

    def enter(self, index: int) -> list[str]:
        """What a command is preceded by so that it runs inside. It becomes the command, under the same process id."""
        return [find("nsenter", UTIL_LINUX), f"--net={self.namespace(index)}", "--"]

    def namespace(self, index: int) -> str:
        return str(NAMESPACES / self._namespaces[index])

    def unplug(self, index: int) -> None:
        """From now on nothing passes either way, and neither end is told: no packet is acknowledged or refused."""
        run([find("ip", IPROUTE), "link", "set", self._namespaces[index], "down"], self._name)

    def remove(self) -> None:
        for link in (*self._namespaces, self._name):
            if (LINKS / link).exists():
                run([find("ip", IPROUTE), "link", "delete", link], self._name)
        for namespace in self._namespaces:
            if (NAMESPACES / namespace).exists():
                run([find("ip", IPROUTE), "netns", "delete", namespace], self._name)

    def remains(self) -> list[str]:
        links = [LINKS / link for link in (*self._namespaces, self._name)]
        return [str(path) for path in (*links, *(NAMESPACES / name for name in self._namespaces)) if path.exists()]


def enter_namespace(path: str) -> None:
    """This thread is inside from now on, and so are those that it starts: what they connect leaves by its link."""
    with Path(path).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _bucket(mbit: float) -> list[str]:
    bytes_per_s = mbit * 1e6 / 8
    burst = max(LEAST_BURST_BYTES, round(bytes_per_s * BURST_S))
    limit = burst * 2 + round(bytes_per_s * QUEUE_S)
    return ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst}b", "limit", f"{limit}b"]

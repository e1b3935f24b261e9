"""The command: `python -m bench.testbed --cpu 0.6 0.2 --mbit 1000 100 -- COMMAND ...`, from the repository root.

Runs COMMAND once on each machine. Every line it prints is marked with the machine's number. The first that fails ends
the others, and its exit code is ours. A script that calls torch.distributed's init_process_group just runs.
"""

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from os import environ
from typing import IO, Any

from bench.testbed import Machine, Testbed, TestbedError

POLL_S = 0.02


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.testbed",
        usage="%(prog)s [--cpu N ...] [--mbit N ...] [--gpu N ...] [--network] -- COMMAND ...",
        description="Runs COMMAND once on each of several unequal machines, which are all this machine.",
        epilog="One value per machine, or one for all; `none` is no limit.",
    )
    parser.add_argument("--cpu", nargs="+", type=_limit, default=[None], metavar="N", help="cores")
    parser.add_argument("--mbit", nargs="+", type=_limit, default=[None], metavar="N", help="Mbit/s of the link")
    parser.add_argument("--gpu", nargs="+", type=_limit, default=[None], metavar="N", help="percent of the GPU")
    parser.add_argument("--network", action="store_true", help="network namespaces also where no link is limited")
    own, command = _split(arguments)
    chosen = parser.parse_args(own)
    if not command:
        parser.error("say what to run, behind `--`")
    try:
        machines = _machines(chosen.cpu, chosen.mbit, chosen.gpu)
    except ValueError as error:
        parser.error(str(error))
    # So that all is cleared away before we end, and not only soon after.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    printers: list[threading.Thread] = []
    try:
        with Testbed(machines, network=chosen.network) as bed:
            code = _run(bed, command, printers)
    except TestbedError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for printer in printers:  # only now has every process ended that could still print
        printer.join()
    return code


def _run(bed: Testbed, command: list[str], printers: list[threading.Thread]) -> int:
    port = "29500" if bed.interface != "lo" else str(_free_port())  # in a new namespace, every port is free
    shared = {
        "MASTER_ADDR": bed.address(0),
        "MASTER_PORT": port,
        "WORLD_SIZE": str(len(bed.machines)),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": bed.interface,
        "NCCL_SOCKET_IFNAME": bed.interface,
        "PYTHONUNBUFFERED": "1",
    }
    processes = []
    for index in range(len(bed.machines)):
        process = bed.start(
            index,
            command,
            env={**environ, **shared, "RANK": str(index)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
        printers.append(threading.Thread(target=_print, args=(process.stdout, index), daemon=True))
        printers[-1].start()
    while not any(codes := [process.poll() for process in processes]) and None in codes:
        time.sleep(POLL_S)
    for index, code in enumerate(codes):
        if code:
            _say(f"machine {index} {_end(code)}, so the others are ended")
            return code if code > 0 else 128 - code
    return 0


def _print(stream: IO[Any], index: int) -> None:
    for line in stream:
        sys.stdout.write(f"[{index}] {line.decode('utf-8', errors='replace').rstrip()}\n")
        sys.stdout.flush()


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _machines(*limits: list[float | None]) -> list[Machine]:
    count = max(map(len, limits))
    if any(len(values) not in (1, count) for values in limits):
        raise ValueError("give --cpu, --mbit and --gpu one value each, or one per machine")
    cpu, mbit, gpu = (values * count if len(values) == 1 else values for values in limits)
    return [Machine(cpu=c, mbit=m, gpu=g) for c, m, g in zip(cpu, mbit, gpu, strict=True)]


def _limit(text: str) -> float | None:
    return None if text == "none" else float(text)


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(sentence: str) -> None:
    print(f"testbed: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

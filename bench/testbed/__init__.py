"""Real unequal machines on one machine: each with its own CPU quota, network link and part of the GPU.

    machines = [Machine(cpu=0.6, mbit=1000), Machine(cpu=0.2, mbit=100)]
    with Testbed(machines) as bed:
        process = bed.start(0, [sys.executable, "worker.py", "--host", bed.address(0)])
        bed.set_cpu(1, 0.1)  # a worker slows down
        bed.unplug(1)  # and is gone, of which nothing tells

`python -m bench.testbed --cpu 0.6 0.2 --mbit 1000 100 -- COMMAND ...` runs a command once on each machine.

`relay.py` is a slow, long link, for any process of this machine and without any rights.

A testbed takes root: a control group per machine (`quota.py`), a network namespace per machine (`network.py`), and
for parts of a GPU a daemon of our own (`partition.py`). Whatever ends the testbed, kill -9 included, `reaper.py` clears
away every process and everything that was made.

Without these rights, `Testbed.lacks(machines)` says what is missing, and a benchmark can still make its workers
unequal by itself: a worker that is to have the share `s` of a core measures the time `t` that it computed for
(`time.thread_time()`, say), and then sleeps `t * (1 / s - 1)`. Such a worker is slow on average, but not where a real
one would be slow: what it sends, receives and waits for costs it nothing. Results must say which of the two was used.
"""

from bench.testbed.bed import Machine, Testbed
from bench.testbed.network import enter_namespace
from bench.testbed.programs import TestbedError

__all__ = ["Machine", "Testbed", "TestbedError", "enter_namespace"]

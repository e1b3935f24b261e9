"""The time of a window under a host, with overlap and without: two workers on links of 40 Mbit/s.

Computing is a wait of a set length, so that a busy machine changes nothing; what travels is a real model of 1M numbers.
`python -m bench overlap` needs to be root, for network namespaces.
"""

import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.report import Comparison, Result
from bench.testbed import Machine, Testbed

WORKERS, MBIT, NUMBERS = 2, 40.0, 1_000_000
BATCH_S, ANCHOR = 0.1, 20
PROBES = 3
"""Windows at the beginning, in which speeds are measured, or nothing is ahead yet."""


def measure(quick: bool) -> Result:
    windows = 6 if quick else 20
    found = {overlap: _run(overlap, windows) for overlap in (True, False)}
    for overlap, seconds in found.items():
        print(f"overlap: {'with' if overlap else 'without'}, {median(seconds):.2f} s a window", flush=True)
    count = min(map(len, found.values()))
    compared = Comparison(
        what=f"a window of {ANCHOR * BATCH_S:g} s of computing under a host, links of {MBIT:g} Mbit/s, with overlap",
        unit="s",
        ours=found[True][:count],
        bare=found[False][:count],
        target=None,
    )
    return Result([compared], {"computing_s": ANCHOR * BATCH_S, "model_bytes": 4 * NUMBERS, "mbit": MBIT})


def _run(overlap: bool, windows: int) -> list[float]:
    """Seconds from one commit to the next."""
    from potluck.fleet.coordinator import Coordinator
    from potluck.fleet.invite import Identity
    from potluck.fleet.journal import Journal
    from potluck.fleet.server import Server
    from potluck.save.checkpoint_receiver import CheckpointReceiver

    commits: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Testbed([Machine(mbit=MBIT)] * WORKERS) as bed:
        core = Coordinator(patience_s=20.0, secret="", at_least=WORKERS)
        kept = {
            "journal": Journal(Path(folder) / "journal.sqlite"),
            "saver": CheckpointReceiver(Path(folder) / "checkpoints", lambda path, reason: None),
        }
        server = Server(core, host=bed.parent_address, port=0, tls=None, **kept)
        server.on_step = lambda record, lr, norm, fault: commits.append(time.monotonic())
        server.start()
        invite = Identity.load_or_make(Path(folder)).invite(bed.parent_address, server.port, encrypted=False)
        command = [sys.executable, "-m", "bench.overlap", invite.line(), str(int(overlap)), str(windows + PROBES)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        started = [
            bed.start(index, command, env=environment | {"POTLUCK_NAME": f"w{index}"}) for index in range(WORKERS)
        ]
        try:
            while len(commits) < windows + PROBES:
                time.sleep(0.05)
                assert all(worker.poll() is None for worker in started), "a worker has ended"
        finally:
            server.stop()
    return [after - before for before, after in pairwise(commits[PROBES:])]


def _work(invite: str, overlap: bool, windows: int) -> None:
    import torch

    import potluck
    from potluck.environment import QUIET
    from potluck.fleet.invite import INVITE

    os.environ |= {INVITE: invite, QUIET: "1"}
    rows = WORKERS * ANCHOR * (windows + 2)  # one epoch, beyond the end of which nothing is ahead
    model = torch.nn.Linear(1000, NUMBERS // 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with potluck.init(potluck.Cadence(anchor=ANCHOR, max_anchor=ANCHOR, overlap=overlap)) as fleet:
        data = torch.arange(rows, dtype=torch.float32)[:, None]
        model, optimizer, loader = fleet.prepare(model, optimizer, data, batch_size=WORKERS)
        for row in loader:
            time.sleep(BATCH_S)
            loss = model(row.expand(-1, 1000) / rows).square().mean()
            fleet.backward(loss, samples=len(row))
            fleet.step()


if __name__ == "__main__":
    _work(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))

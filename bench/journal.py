"""How long a host takes to open its journal, by the steps of the run: `python -m bench.journal [STEPS ...]`."""

import sys
import tempfile
import time
from pathlib import Path

from potluck.fleet.description import Description, Part
from potluck.fleet.effects import StepRecord
from potluck.fleet.journal import Journal

ROWS, BATCH = 80_000, 8
WORKERS = tuple(
    {"rank": rank, "rows": 4, "samples": 4.0, "busy_s": 0.1, "wait_s": 0.0, "name": f"w{rank}"} for rank in (0, 1)
)


def write(path: Path, steps: int) -> None:
    """As a run of two workers does, but without waiting for the disk."""
    journal = Journal(path)
    journal._base.execute("PRAGMA synchronous=OFF")
    described = Description(
        parts=(Part(0, None, (4,)),),
        model="m",
        rows=ROWS,
        batch=BATCH,
        slices=2,
        seed=1,
        unit=1.0,
        samples_per_row=1.0,
        policy="sync",
        told={},
    )
    journal.keep("description", described.to_json())
    for step in range(1, steps + 1):
        epoch, index = divmod(step - 1, ROWS // BATCH)
        row = index * BATCH
        ranges = ((row, row + 4, 0), (row + 4, row + 8, 1))
        journal.record(StepRecord(step, epoch, row, BATCH, step * BATCH, 8.0, 1.0, WORKERS, ranges))
        journal.agree(step, "cpu", f"{step:032x}")
        journal._base.execute("PRAGMA synchronous=OFF")
    journal.close()


def main(counts: list[int]) -> None:
    print(f"{'steps':>10} {'write, us/step':>15} {'open, s':>9} {'MB':>8}")
    for steps in counts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.sqlite"
            began = time.perf_counter()
            write(path, steps)
            wrote_s = time.perf_counter() - began
            began = time.perf_counter()
            journal = Journal(path)
            standing = journal.resumed().standing
            opened_s = time.perf_counter() - began
            assert standing is not None and standing.version == steps
            journal.close()
            print(f"{steps:>10,} {wrote_s / steps * 1e6:>15.0f} {opened_s:>9.3f} {path.stat().st_size / 1e6:>8.2f}")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [1_000, 10_000, 100_000, 1_000_000])

"""The command: measures what is named, then writes the table and the picture of all that was ever measured here."""

import argparse
from importlib import import_module

from bench import report

FLEET = ("star", "crowd", "coordinator_memory", "pause", "elastic_step", "preempt")
BY_DEFAULT = ("step_time", "memory", "startup", "checkpoint_time", *FLEET)
MIXED = ("mixed_speeds", "time_to_loss", "following", "convergence", "slow_host")
"""Workers of different speeds: these want the machine for themselves, for minutes each."""
SHARDED = ("shard_memory", "shard_step", "uneven_memory")
STAGED = ("pipeline", "uneven_stages", "direct", "datastore")
"""One model over several workers."""
GPU = ("h200", "h200_mixed", "h200_shard", "h200_stages", "h200_learning", "h200_lora")
DATA = ("fetching",)
BESIDE = ("trackers", "page")
"""What listens to a run, and must not slow it down."""
TUNING = ("lora", "trainers")
"""Fine-tuning, and other people's trainers with ours inside."""
CLUSTERS = ("up",)
"""Under schedulers, where they are installed."""
NAMES = (*BY_DEFAULT, *DATA, *BESIDE, *TUNING, *CLUSTERS, *MIXED, *SHARDED, *STAGED, *GPU)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Potluck side by side with bare PyTorch.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: {', '.join(BY_DEFAULT)}"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it works; results go to bench/results/raw")
    parser.add_argument("--summary", action="store_true", help="measure nothing; write table and picture again")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    folder = report.RESULTS / "raw" if chosen.quick else report.RESULTS
    for name in () if chosen.summary else chosen.names or BY_DEFAULT:
        result = import_module(f"bench.{name}").measure(chosen.quick)
        if result is not None:
            report.write(folder, name, result, quick=chosen.quick)
    for name in NAMES if chosen.summary else chosen.names:
        draw = getattr(import_module(f"bench.{name}"), "draw", None)
        if draw is not None and (record := report.read(folder, name)):
            draw(record["details"], folder)
    report.summarize(folder)


if __name__ == "__main__":
    main()

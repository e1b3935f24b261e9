"""python -m tests.differential --minutes 60: random runs, judged. Prints what is wrong, and how to repeat it."""

import argparse
import sys
import time
from collections import Counter

import torch

from tests.differential.cases import draw_case, read_case
from tests.differential.verdict import Verdict, verdict_of


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    if options.case:
        return _report([verdict_of(read_case(options.case))])
    if options.seeds:
        return _report([verdict_of(draw_case(seed, options.only)) for seed in options.seeds])
    found, deadline = [], time.monotonic() + options.minutes * 60
    seed = options.seed
    while time.monotonic() < deadline:
        verdict = verdict_of(draw_case(seed, options.only))
        found.append(verdict)
        if verdict.is_fault:
            _show(verdict)
        elif options.verbose:
            print(seed, verdict.kind, verdict.detail[:100], f"{verdict.seconds:.1f} s", flush=True)
        seed += 1
    return _report(found, quiet=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seeds", type=int, nargs="*", help="these and no others")
    parser.add_argument("--only", choices=["", "sync", "stages", "windows", "legs"], default="")
    parser.add_argument("--case", help="a line that was printed: Case(...)")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def _show(verdict: Verdict) -> None:
    print(
        f'\n{verdict.kind} {verdict.case.seed} {verdict.detail.strip()}\n  --case "{verdict.case.line()}"', flush=True
    )


def _report(found: list[Verdict], *, quiet: bool = False) -> int:
    for verdict in [] if quiet else found:
        _show(verdict)
    kinds = Counter(verdict.kind for verdict in found)
    print(f"\n{len(found)} cases in {sum(v.seconds for v in found):.0f} s: {dict(kinds)}")
    refusals = Counter(verdict.detail for verdict in found if verdict.kind == "refused")
    for sentence, times in refusals.most_common():
        print(f"  {times:4} refused: {sentence}")
    return int(any(verdict.is_fault for verdict in found))


if __name__ == "__main__":
    sys.exit(main())

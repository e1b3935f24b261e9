"""python -m tests.differential --minutes 60: random runs, judged. Prints what is wrong, and how to repeat it."""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tests.differential.cases import Case, read_case
from tests.differential.drawn import TITLE, drawn_tables
from tests.differential.matrix import PAGE, UNTRIED, Cell, cells, drawn_part, mark, page, read_page
from tests.differential.odd_cases import draw_any
from tests.differential.runner import begin
from tests.differential.verdict import Verdict, verdict_of


def main() -> int:
    options = _options()
    if options.matrix:
        return print_matrix(options.jobs, options.matrix)
    if options.case or options.cell or options.seeds:
        return _report(list(judged(_named(options), 1)), quiet=False)
    deadline, found = time.monotonic() + options.minutes * 60, []
    seeds = itertools.takewhile(lambda seed: time.monotonic() < deadline, itertools.count(options.seed))
    for verdict in judged((draw_any(seed, options.only) for seed in seeds), options.jobs):
        found.append(verdict)
        if verdict.is_fault:
            _show(verdict)
        elif options.verbose:
            print(verdict.case.seed, verdict.kind, verdict.detail[:100], f"{verdict.seconds:.1f} s", flush=True)
    if options.record:
        told = PAGE.read_text(encoding="utf-8").partition(TITLE)[0].rstrip("\n")
        PAGE.write_text(f"{told}\n\n{drawn_tables(found)}", encoding="utf-8")
    return _report(found, quiet=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seeds", type=int, nargs="*", help="these and no others")
    parser.add_argument("--only", choices=["", "sync", "stages", "windows", "legs", "hosts", "usual"], default="")
    parser.add_argument("--case", help="a line that was printed: Case(...)")
    parser.add_argument("--cell", help="a cell of the matrix: 'experts x FullShard'")
    parser.add_argument(
        "--matrix",
        nargs="?",
        const="all",
        choices=["all", "faults"],
        help="runs every cell, or those that docs/matrix.md has as faults or untried, and writes that page",
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time: most of one is waiting")
    parser.add_argument("--record", action="store_true", help="writes into docs/matrix.md how many were drawn of what")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def _named(options: argparse.Namespace) -> list[Case]:
    if options.case:
        return [read_case(options.case)]
    if options.cell:
        return [cell.case for cell in cells() if cell.name == options.cell and cell.case is not None]
    return [draw_any(seed, options.only) for seed in options.seeds]


def judged(cases: Iterable[Case], jobs: int) -> Iterator[Verdict]:
    """Each case's verdict, as soon as it is there. A case is drawn when there is room for it."""
    if jobs == 1:
        begin()
        yield from map(verdict_of, cases)
        return
    context, waiting = multiprocessing.get_context("spawn"), iter(cases)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=begin) as pool:
        running: set[Future[Verdict]] = set()
        while True:
            running |= {pool.submit(verdict_of, case) for case in itertools.islice(waiting, jobs - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def print_matrix(jobs: int, which: str) -> int:
    table = list(cells())
    drawn = drawn_part(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else ""
    known = read_page(PAGE.read_text(encoding="utf-8")) if which == "faults" and PAGE.exists() else {}
    marks = {cell: known.get(cell.key, UNTRIED) for cell in table}
    by_case: dict[Case, list[Cell]] = {}
    for cell, told in marks.items():
        if cell.case is not None and (told == UNTRIED or told.startswith("**")):
            by_case.setdefault(cell.case, []).append(cell)
    found = []
    for verdict in judged(by_case, jobs):
        found.append(verdict)
        for cell in by_case[verdict.case]:
            marks[cell] = mark(verdict)
            print(f"{len(found)} of {len(by_case)}: {cell.name}: {verdict.kind}", flush=True)
        if verdict.is_fault:
            _show(verdict)
        PAGE.write_text(page(marks, drawn), encoding="utf-8")  # so that one that is stopped can go on
    return _report(found, quiet=True)


def _show(verdict: Verdict) -> None:
    told = verdict.detail.strip()
    print(f'\n{verdict.kind} {verdict.case.seed} {told}\n  --case "{verdict.case.line()}"', flush=True)


def _report(found: list[Verdict], *, quiet: bool) -> int:
    for verdict in [] if quiet else found:
        _show(verdict)
    kinds = Counter(verdict.kind for verdict in found)
    print(f"\n{len(found)} cases in {sum(v.seconds for v in found):.0f} s: {dict(kinds)}")
    for sentence, times in Counter(v.detail for v in found if v.kind == "refused").most_common():
        print(f"  {times:4} refused: {sentence}")
    return int(any(verdict.is_fault for verdict in found))


if __name__ == "__main__":
    sys.exit(main())

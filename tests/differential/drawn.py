"""How many random cases were drawn in each cell, and what came of them: the last part of docs/matrix.md."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tests.differential.cases import Case, Leg
from tests.differential.data import KINDS
from tests.differential.habits import HABITS
from tests.differential.models import ADAPTED, BLOCKS
from tests.differential.nets import TRAITS
from tests.differential.odd_blocks import ANY, IMAGES
from tests.differential.odd_cases import PLACES
from tests.differential.odd_nets import ODD_TRAITS
from tests.differential.optimizers import ODD_OPTIMIZERS, ODD_SCHEDULERS, OPTIMIZERS, SCHEDULERS
from tests.differential.verdict import Verdict

TITLE = "## Drawn at random"
WAYS = (
    "NoShard",
    "ShardGradOp",
    "ShardGradOp(keep_gradients)",
    "ShardGradOp(weights)",
    "FullShard",
    "FullShard(weights)",
    "HybridShard",
    "windows",
    "stages",
    "stages, split",
    "host",
    "host, windows",
)
TABLES: dict[str, tuple[str, ...]] = {
    "Blocks": (*dict.fromkeys(kind for kinds in BLOCKS.values() for kind in kinds), *(k.__name__.lower() for k in ANY)),
    "Blocks of images": tuple(kind.__name__.lower() for kind in IMAGES),
    "Models": (*TRAITS, *ODD_TRAITS, *ADAPTED),
    "Loops": HABITS,
    "Data": ("tensors", *KINDS),
    "A slow rank": PLACES,
    "Switches": ("clip", "checkpoint_activations", "offload_optimizer", "bf16", "fp16", "compile", "wire", "fetchers"),
    "Optimizers": tuple(dict.fromkeys(word.partition("(")[0] for word in (*OPTIMIZERS, *ODD_OPTIMIZERS))),
    "Schedulers": tuple(word.partition("(")[0] for word in (*SCHEDULERS, *ODD_SCHEDULERS)),
}


def way_of(case: Case, leg: Leg) -> str:
    if case.host:
        return "host" if leg.policy.startswith("Sync") else "host, windows"
    if leg.stages:
        return "stages" if leg.strategy == "NoShard()" else "stages, split"
    if not leg.policy.startswith("Sync"):
        return "windows"
    name, _, options = leg.strategy.removesuffix(")").partition("(")
    option = options.partition("=")[0]
    return f"{name}({option})" if option in ("weights", "keep_gradients") else name


def words_of(case: Case, leg: Leg) -> Iterator[tuple[str, str]]:
    """(table, row) of everything that a leg of a case has."""
    _, _, blocks, traits = case.model.split("/")
    known = {
        "Blocks": set(blocks.split(",")),
        "Blocks of images": set(blocks.split(",")),
        "Models": set(traits.split(",")),
        "Loops": {habit.partition("@")[0] for habit in case.habits},
        "Data": {case.data or "tensors"},
        "A slow rank": {leg.slow.split("/")[1]} if leg.slow else set(),
        "Optimizers": {case.optimizer.partition("(")[0]},
        "Schedulers": {case.scheduler.partition("(")[0]},
        "Switches": set(re.findall(r"\w+", leg.switches)),
    }
    if leg.wire != "fp32":
        known["Switches"].add("wire")
    if leg.fetchers:
        known["Switches"].add("fetchers")
    for table, rows in TABLES.items():
        yield from ((table, row) for row in rows if row in known[table])


def drawn_tables(verdicts: Iterable[Verdict]) -> str:
    """The section of docs/matrix.md. A case counts in each row that says something of it, for each of its legs."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    kinds: Counter[str] = Counter()
    for verdict in verdicts:
        kind = "fault" if verdict.is_fault else verdict.kind
        kinds[kind] += 1
        cells = {
            (*word, way_of(verdict.case, leg)) for leg in verdict.case.legs for word in words_of(verdict.case, leg)
        }
        for cell in cells:
            counts[cell][kind] += 1
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    parts = [
        f"{TITLE}\n\nPrinted by `python -m tests.differential --minutes 60 --record`: {kinds.total()} cases ({told})."
        " A cell has how many of them were right and, after a +, how many were refused with a sentence before the first"
        " step. A case counts in each row and column that says something of it.\n"
    ]
    for table, rows in TABLES.items():
        parts.append(f"### {table}\n\n| | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}")
        for row in rows:
            parts[-1] += f"\n| {row} | {' | '.join(_cell(counts[table, row, way]) for way in WAYS)} |"
        parts[-1] += "\n"
    return "\n".join(parts)


def _cell(count: Counter[str]) -> str:
    found = str(count["right"]) + (f" + {count['refused']}" if count["refused"] else "")
    return found + (f" **{count['fault']} wrong**" if count["fault"] else "")

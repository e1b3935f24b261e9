"""The matrix: what goes with what, each cell a fixed run against the judge, printed into docs/matrix.md.

A cell is right, refused with a sentence, not tried for a reason, or a fault, which is what the page must not show.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.differential.cases import Case, Leg
from tests.differential.drawn import TITLE
from tests.differential.optimizers import OPTIMIZERS
from tests.differential.verdict import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
RIGHT, UNTRIED = "✓", "·"


@dataclass(frozen=True)
class Cell:
    table: str
    row: str
    column: str
    case: Case | None
    reason: str = ""
    """Why it was not tried."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.table, self.row, self.column

    @property
    def name(self) -> str:
        return f"{self.row} x {self.column}"


BASE = Case(seed=7, model="vectors/6/mlp,mlp,mlp/", optimizer="AdamW(lr=0.01, weight_decay=0.1)", rows=13, batch=5)
PAIR = "intra_node_size=2"
STRATEGIES = {
    "NoShard": ("NoShard()", 2),
    "ShardGradOp(keep_gradients)": ("ShardGradOp(keep_gradients=True)", 2),
    "ShardGradOp": ("ShardGradOp()", 2),
    "ShardGradOp(weights)": ("ShardGradOp(weights=(1.0, 2.0))", 2),
    "FullShard": ("FullShard()", 2),
    "FullShard(weights)": ("FullShard(weights=(1.0, 2.0))", 2),
    "HybridShard": (f"HybridShard({PAIR})", 4),
}
POLICIES = {
    "Sync": "Sync()",
    "Sync(shares)": "Sync(shares=(2.0, 1.0))",
    "Cadence": "Cadence(anchor=2)",
    "Async": "Async(anchor=2)",
}
PROTOCOLS = {
    "1f1b": "Pipeline(micro_batch_size=2)",
    "gpipe": "Pipeline(micro_batch_size=2, schedule='gpipe')",
    "interleaved": "Pipeline(micro_batch_size=2, schedule='interleaved')",
    "zero-bubble": "Pipeline(micro_batch_size=2, schedule='zero-bubble')",
    "Direct": "Direct()",
    "DataStore": "DataStore(url=STORE, micro_batch_size=2)",
}
SPARED = ("ShardGradOp(weights)",)
"""Seen in the first tables only: there, it differs from ShardGradOp in who has how much, and in nothing else."""
CUT = f"Stages(protocol={PROTOCOLS['1f1b']}, count=2)"
WAYS = {
    **{name: Leg(world=world, strategy=word) for name, (word, world) in STRATEGIES.items() if name not in SPARED},
    "Cadence": Leg(world=2, policy=POLICIES["Cadence"]),
    "HybridShard, Cadence": Leg(world=4, strategy=f"HybridShard({PAIR})", policy=POLICIES["Cadence"]),
    "stages": Leg(world=2, stages=CUT),
    "stages, FullShard": Leg(world=4, stages=CUT, strategy="FullShard()"),
    "stages, Cadence": Leg(world=4, stages=CUT, policy=POLICIES["Cadence"]),
}
IMAGES = "images/4/conv,conv,conv/"
MODELS = {
    "transformer": "tokens/6/attention,attention/",
    "BatchNorm": IMAGES,
    "experts": "vectors/6/experts,experts,mlp/",
    "branches by data": "vectors/6/branch,mlp,branch/",
    "a parameter used sometimes": "vectors/6/sometimes,mlp,sometimes/",
    "a parameter never used": "vectors/6/mlp,mlp,mlp/never",
    "tied embeddings": "tokens/6/attention,attention/tied",
    "tied blocks": "vectors/6/mlp,mlp,mlp/twins",
    "frozen parts, parameter groups": "vectors/6/mlp,mlp,mlp/frozen,groups",
    "a parameter without a dimension": "vectors/6/gain,mlp,gain/scalar",
    "a parameter of no numbers": "vectors/6/empty,mlp,empty/",
    "a parameter larger than the rest": "vectors/6/mlp,large,mlp/",
    "a parameter of the model itself": "vectors/6/mlp,mlp,mlp/position",
    "x = x + block(x) in the model": "vectors/6/mlp,mlp,mlp/residual",
    "buffers: -inf, bool, int": "vectors/6/odd,mlp,odd/",
    "buffers of the model itself": "vectors/6/mlp,mlp,mlp/center,counter",
}
DATA = {
    "samples of any weight": {"samples": "any"},
    "empty micro-batches": {"samples": "sparse"},
    "a worker without rows": {"rows": 11},
    "a loss of NaN": {"faults": ("loss@3",)},
    "inf in a row": {"faults": ("inf@3",)},
    "a gradient of NaN, the loss finite": {"faults": ("enter@3",)},
    "gradients of 1e20": {"scale": 1e20, "optimizer": "SGD(lr=1e-21)", "dtype": "float32"},
}
SWITCHES = {
    "clip": "clip=0.05",
    "activation checkpointing": "checkpoint_activations=True",
    "offload_optimizer": "offload_optimizer=True",
    "bf16": "precision='bf16'",
    "compile": "compile=True",
}
DROPOUT = "Each worker draws its own random numbers, so no loop of one process can say which are right."


def cells() -> Iterator[Cell]:
    yield from _policies()
    yield from _protocols()
    yield from _features()
    yield from _optimizers()
    yield from _handovers()


def _policies() -> Iterator[Cell]:
    for strategy, (word, world) in STRATEGIES.items():
        for name, policy in POLICIES.items():
            shares = policy.replace("(2.0, 1.0)", str((2.0, 1.0, 1.0, 2.0)[:world]))
            yield Cell("Strategies and policies", strategy, name, _of(Leg(world=world, strategy=word, policy=shares)))


def _protocols() -> Iterator[Cell]:
    for lanes in (1, 2):
        table = f"Strategies and stages, {'one replica' if lanes == 1 else 'two replicas'} of two stages"
        for strategy, (word, _) in STRATEGIES.items():
            word = word.replace("(1.0, 2.0)", str((1.0, 2.0) * lanes))
            word = word.replace(PAIR, "intra_node_size=1") if lanes == 1 else word
            for name, protocol in PROTOCOLS.items():
                stages = f"Stages(protocol={protocol}, count=2)"
                model = replace(BASE, model="vectors/6/mlp,mlp,mlp,mlp/")
                yield Cell(table, strategy, name, _of(Leg(world=2 * lanes, strategy=word, stages=stages), model))


def _features() -> Iterator[Cell]:
    table = "Models, data and switches"
    for way, leg in WAYS.items():
        for row, model in MODELS.items():
            yield Cell(table, row, way, _of(leg, replace(BASE, model=model)))
        for row, options in DATA.items():
            yield Cell(table, row, way, _of(replace(leg, micro=None if leg.stages else 2), replace(BASE, **options)))
        for row, switch in SWITCHES.items():
            dtype = "float32" if "bf16" in switch else "float64"
            yield Cell(table, row, way, _of(replace(leg, switches=switch), replace(BASE, dtype=dtype)))
        if not leg.stages:
            yield Cell(table, "micro-batches", way, _of(replace(leg, micro=1)))
        yield Cell(table, "fetchers", way, _of(replace(leg, fetchers=1)))
        yield Cell(table, "dropout", way, None, DROPOUT)


def _optimizers() -> Iterator[Cell]:
    for optimizer in OPTIMIZERS:
        for way in ("NoShard", "ShardGradOp", "FullShard", "FullShard(weights)", "stages"):
            yield Cell("Optimizers", optimizer, way, _of(WAYS[way], replace(BASE, optimizer=optimizer)))


def _handovers() -> Iterator[Cell]:
    """A checkpoint of each, loaded by each other, in the middle of an epoch."""
    spared = ("ShardGradOp(keep_gradients)", "HybridShard, Cadence", "stages, Cadence")
    ways = {name: leg for name, leg in WAYS.items() if name not in spared}
    for saved, first in ways.items():
        for loaded, second in ways.items():
            case = replace(BASE, legs=(replace(first, until=2), second), epochs=2)
            yield Cell("Checkpoints: saved by (row), loaded by (column)", saved, loaded, case)


def _of(leg: Leg, case: Case = BASE) -> Case:
    return replace(case, legs=(leg,), epochs=case.epochs if leg.policy.startswith("Sync") else 2)


def mark(verdict: Verdict) -> str:
    """What a cell shows: of a refusal its sentence, which the page makes a letter of."""
    return {"right": RIGHT, "refused": verdict.detail}.get(verdict.kind, f"**{verdict.kind}**")


HEAD = """# What goes with what

Printed by `python -m tests.differential --matrix`: do not edit. Each cell is a short run on real workers of one machine
(two or four processes, Gloo, CPU), judged by a loop of plain PyTorch in float64 that shares no code with potluck: every
step's loss and norm, each row once per epoch, and the weights of the checkpoint at the end. A cell is repeated by
`python -m tests.differential --cell 'experts x FullShard'`; `make differential` draws random combinations for an hour.

✓ the numbers of one process. A letter: refused before the first step, with the sentence below. · not tried.
The last part counts random cases.
"""


def page(marks: dict[Cell, str], drawn: str = "") -> str:
    """The whole of docs/matrix.md. `drawn`: its last part, of drawn.py."""
    letters: dict[str, str] = {}
    parts = [HEAD]
    for table in dict.fromkeys(cell.table for cell in marks):
        own = {(cell.row, cell.column): told for cell, told in marks.items() if cell.table == table}
        columns = list(dict.fromkeys(column for _, column in own))
        parts.append(f"## {table}\n\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for row in dict.fromkeys(row for row, _ in own):
            shown = [_shown(own.get((row, column), UNTRIED), letters) for column in columns]
            parts[-1] += f"\n| {row} | {' | '.join(shown)} |"
        parts[-1] += "\n"
    notes = "\n".join(f"- **{letter}**: {sentence}" for sentence, letter in letters.items())
    reasons = {cell.reason: cell.row for cell in marks if cell.reason}
    untried = "\n".join(f"- · {row}: {reason}" for reason, row in reasons.items())
    return "\n".join([*parts, f"## Sentences\n\n{notes}\n{untried}\n", *([drawn] if drawn else [])])


def drawn_part(text: str) -> str:
    """Of a page, what drawn.py printed."""
    _, title, body = text.partition(TITLE)
    return title + body


def _shown(told: str, letters: dict[str, str]) -> str:
    if told in (RIGHT, UNTRIED) or told.startswith("**"):
        return told
    return letters.setdefault(" ".join(told.split()), _letter(len(letters)))


def _letter(number: int) -> str:
    """a to z, then aa, ab and so on."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def read_page(text: str) -> dict[tuple[str, str, str], str]:
    """Of each (table, row, column) what the page says: ✓, · or a sentence."""
    text = text.partition(TITLE)[0]
    sentences = dict(re.findall(r"^- \*\*(\w+)\*\*: (.*)$", text, re.M))
    found = {}
    for section in text.split("\n## ")[1:-1]:
        table, _, body = section.partition("\n")
        lines = [[part.strip() for part in line.strip("|").split("|")] for line in body.split("\n") if line[:1] == "|"]
        for row, *told in lines[2:]:
            found |= {(table, row, c): sentences.get(t, t) for c, t in zip(lines[0][1:], told, strict=True)}
    return found

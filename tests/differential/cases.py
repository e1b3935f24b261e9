"""Cases: a run as plain words, drawn from a seed, printed as one line that repeats it. Knows nothing of potluck.

A case is a model, its data and its optimizer, and one or more legs: each trains for a while in its own way, saves,
and the next one loads what it finds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.differential.models import BLOCKS, COUNTED
from tests.differential.nets import TRAITS
from tests.differential.optimizers import OPTIMIZERS, SCHEDULERS, STEADY


@dataclass(frozen=True, kw_only=True)
class Leg:
    """How a part of the run is trained. Words are what one would write in Python."""

    world: int = 1
    strategy: str = "NoShard()"
    policy: str = "Sync()"
    stages: str = ""
    """Empty: the model is not cut."""
    micro: int | None = None
    switches: str = ""
    """Of StepConfig."""
    wire: str = "fp32"
    """In which form replicas send each other their numbers."""
    fetchers: int = 0
    slow: str = ""
    """A rank that is slowed: `1/before-forward/0.15` sleeps that long at most, at random steps."""
    until: int | None = None
    """The step after which the next leg takes over; none: the end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int = 0
    model: str = "vectors/6/mlp,mlp/"
    optimizer: str = "SGD(lr=0.1)"
    scheduler: str = ""
    dtype: str = "float64"
    rows: int = 21
    batch: int = 8
    epochs: int = 1
    samples: str = "rows"
    scale: float = 1.0
    """That the loss is multiplied by."""
    faults: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()
    data: str = ""
    """In which form it has its rows, of data.py; empty: tensors."""
    host: str = ""
    """What happens to its workers, where a host leads them: `2,join@1,leave@2,kill@3` begins with two."""
    legs: tuple[Leg, ...] = field(default_factory=lambda: (Leg(),))

    def line(self) -> str:
        """That repeats it, given to --case."""
        return repr(self)


def read_case(line: str) -> Case:
    """The reverse of Case.line()."""
    return eval(line, {"Case": Case, "Leg": Leg})  # type: ignore[no-any-return]


def draw_case(seed: int, only: str = "") -> Case:
    """`only`: sync, stages, windows or legs."""
    draw = random.Random(seed)
    kind = only or draw.choices(("sync", "stages", "windows", "legs"), (4, 3, 2, 2))[0]
    legs = tuple(_draw_leg(draw, kind) for _ in range(draw.choice((2, 2, 3)) if kind == "legs" else 1))
    model = draw_model(draw)
    if any(kind in model for kind in COUNTED):  # computed again, they change their buffers twice, as in plain PyTorch
        legs = tuple(without(leg, "checkpoint_activations=True") for leg in legs)
    dtype = "float32" if any("bf16" in leg.switches for leg in legs) or draw.random() < 0.15 else "float64"
    largest = max(leg.world for leg in legs)
    rows, batch = draw.randint(9, 34), draw.randint(largest, 13)
    epochs = draw.choice((1, 1, 2))
    steps = epochs * -(-rows // batch)
    cuts = sorted(draw.randint(1, max(1, steps - 1)) for _ in legs[1:])
    legs = tuple(replace(leg, until=cut) for leg, cut in zip(legs, [*cuts, None], strict=True))
    scale, optimizer = 1.0, draw.choice(OPTIMIZERS if dtype == "float64" else STEADY)
    if draw.random() < 0.05:
        scale, optimizer = draw.choice(((1e20, "SGD(lr=1e-21)"), (1e-20, "SGD(lr=1e19)")))
    if "empty" in model and "Adafactor" in optimizer:  # torch's own divides by how many numbers there are
        optimizer = STEADY[0]
    legs = tuple(replace(leg, wire=_draw_wire(1000 * seed + number, leg, dtype)) for number, leg in enumerate(legs))
    is_sync = all(leg.policy.startswith("Sync") for leg in legs)
    return Case(
        seed=seed,
        model=model,
        optimizer=optimizer,
        scheduler=draw.choice(SCHEDULERS) if is_sync and draw.random() < 0.15 else "",
        dtype=dtype,
        rows=rows,
        batch=batch,
        epochs=epochs,
        samples=draw.choices(("rows", "tokens", "any", "sparse"), (5, 3, 2, 1))[0],
        scale=scale,
        faults=_draw_faults(draw, rows, model),
        legs=legs,
    )


def draw_model(draw: random.Random) -> str:
    inputs = draw.choices(("vectors", "tokens", "images"), (5, 3, 2))[0]
    usual = {"vectors": "mlp", "tokens": "attention", "images": "conv"}[inputs]
    odd = [draw.choice(BLOCKS[inputs]) for _ in range(draw.choice((0, 1, 1, 2)))]
    blocks = [usual] * draw.randint(2, 3) + odd
    if draw.random() < 0.5:
        draw.shuffle(blocks)
    traits = [name for name in TRAITS if draw.random() < 0.1 and _fits(name, inputs)]
    return f"{inputs}/{draw.choice((4, 6, 8))}/{','.join(blocks)}/{','.join(traits)}"


def _fits(trait: str, inputs: str) -> bool:
    return not (trait == "tied" and inputs != "tokens")


def _draw_faults(draw: random.Random, rows: int, model: str) -> tuple[str, ...]:
    if draw.random() < 0.8:
        return ()
    kinds: Sequence[str] = ("enter", "gradient", "loss")
    if not model.startswith("tokens"):
        kinds = (*kinds, "nan", "inf", "-inf")
    return tuple(f"{draw.choice(kinds)}@{draw.randrange(rows)}" for _ in range(draw.choice((1, 1, 2))))


def without(leg: Leg, switch: str) -> Leg:
    return replace(leg, switches=", ".join(word for word in leg.switches.split(", ") if word != switch))


def _draw_leg(draw: random.Random, kind: str) -> Leg:
    if kind == "legs":
        kind = draw.choices(("sync", "stages", "windows"), (3, 2, 1))[0]
    if kind == "stages":
        return _draw_staged(draw)
    world = draw.choice((2, 3, 4)) if kind == "windows" else draw.choice((1, 2, 2, 3, 4))
    return Leg(
        world=world,
        strategy=_draw_strategy(draw, world, windows=kind == "windows"),
        policy=_draw_windows(draw) if kind == "windows" else _draw_sync(draw, world),
        micro=draw.choice((None, None, 1, 2, 3)),
        switches=_draw_switches(draw),
        fetchers=int(draw.random() < 0.03),
    )


def _draw_staged(draw: random.Random) -> Leg:
    world = draw.choice((1, 2, 2, 3, 4, 4, 4))
    lanes = draw.choice([lanes for lanes in (1, 2) if world % lanes == 0 and world // lanes > 1] or [1])
    count = world // lanes
    rows = draw.choice((1, 2, 3, 5))
    protocol = draw.choice(
        (
            f"Pipeline(micro_batch_size={rows})",
            f"Pipeline(micro_batch_size={rows}, schedule='gpipe')",
            f"Pipeline(micro_batch_size={rows}, schedule='interleaved')",
            f"Pipeline(micro_batch_size={rows}, schedule='zero-bubble')",
            "Direct()",
            f"DataStore(url=STORE, micro_batch_size={draw.choice((rows, None))})",
        )
    )
    words = [f"protocol={protocol}"] + ([f"count={count}"] if lanes > 1 else [])
    if draw.random() < 0.4 and count > 1 and "interleaved" not in protocol:
        words.append(f"cuts={tuple(sorted(draw.sample(range(1, 4), count - 1)))}")
    windows = lanes > 1 and draw.random() < 0.3
    strategy = "NoShard()"
    if draw.random() < 0.4 and "DataStore" not in protocol and "zero" not in protocol:
        strategy = _draw_strategy(draw, lanes, windows=windows, weighed=world)
    return Leg(
        world=world,
        strategy=strategy,
        policy=_draw_windows(draw) if windows else _draw_sync(draw, lanes),
        stages=f"Stages({', '.join(words)})",
        switches=_draw_switches(draw, stages=True),
    )


def _draw_strategy(draw: random.Random, world: int, *, windows: bool, weighed: int | None = None) -> str:
    """`world`: the ranks that may split a model, or a stage of it. `weighed`: all, each of which has its weight."""
    nodes = draw.choice([size for size in range(1, world + 1) if world % size == 0])
    if windows:
        return draw.choice(("NoShard()", f"HybridShard(intra_node_size={min(nodes, max(1, world // 2))})"))
    weights = tuple(float(draw.randint(0, 3)) for _ in range(weighed or world))
    weights = weights if sum(weights) else (1.0,) * len(weights)
    return draw.choice(
        (
            "NoShard()",
            "ShardGradOp()",
            "ShardGradOp(keep_gradients=True)",
            f"ShardGradOp(weights={weights})",
            "FullShard()",
            "FullShard()",
            f"FullShard(weights={weights})",
            f"HybridShard(intra_node_size={nodes})",
        )
    )


def _draw_sync(draw: random.Random, lanes: int) -> str:
    shares = tuple(float(draw.randint(1, 3)) for _ in range(lanes))
    return draw.choice(("Sync()", "Sync(balance=False)", "Sync(balance=False)", f"Sync(shares={shares})"))


def _draw_windows(draw: random.Random) -> str:
    anchor = draw.choice((1, 2, 3))
    extra = draw.choice(("", ", moments=True", "", ""))  # two were settings that are gone
    extra += draw.choice(("", "", f", together={draw.choice((0.3, 0.5, 1.0))}"))
    extra += draw.choice(("", ", overhead_target=None"))
    return f"{draw.choice(('Cadence', 'Async'))}(anchor={anchor}, max_anchor={anchor + draw.randint(0, 3)}{extra})"


def _draw_wire(seed: int, leg: Leg, dtype: str) -> str:
    """Where the judge knows the last digit of what is rounded, since another one may round the other way."""
    is_known = leg.policy.startswith("Sync") and leg.strategy == "NoShard()" and not leg.stages and dtype == "float64"
    return random.Random(seed).choice(("fp32", "bf16", "int8", "int4", "int4")) if is_known else "fp32"


def _draw_switches(draw: random.Random, *, stages: bool = False) -> str:
    words = []
    if draw.random() < 0.3:
        words.append(f"clip={draw.choice((0.05, 0.5))}")
    if draw.random() < 0.12:
        words.append("checkpoint_activations=True")
    if draw.random() < 0.1 and not stages:
        words.append("offload_optimizer=True")
    if draw.random() < 0.04:
        words.append("precision='bf16'")
    elif draw.random() < 0.003:
        words.append("compile=True")
    return ", ".join(words)

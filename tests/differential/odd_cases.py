"""Odd cases: a usual one, made odd: its model, its loop, its optimizer, and a slow rank. Knows nothing of potluck.

What is drawn here is drawn beside the usual case of the same seed, so a usual case does not change when this does.
"""

import random
from dataclasses import replace

from tests.differential.cases import Case, Leg, draw_case, draw_model, without
from tests.differential.data import KINDS
from tests.differential.habits import HOOKS, LOOPS, NONLINEAR, STARTS, TIMED
from tests.differential.models import ADAPTED, BY_BATCH, COUNTED, HAS_PEFT, LOSSES
from tests.differential.nets import TRAITS
from tests.differential.odd_blocks import ANY, IMAGES
from tests.differential.odd_nets import HEADS, PATHS, WHOLES, WORDS
from tests.differential.optimizers import ODD_OPTIMIZERS, ODD_SCHEDULERS, SHARP, STEADY

PLACES = ("before-forward", "before-step", "after-step", "hook")
MOST_S = 0.2
ADAPTABLE = ("mlp", "plain", "norm", "attention", "experts", "gain", "empty", "dropless", "conv", "bare")
"""Blocks whose layers peft has adapters for."""
GIVEN = ("given-dict", "given-tuple", "given-struct")
ANY_MODEL = (
    "l2",
    "twice",
    "penalty",
    "halves",
    "uneven",
    "eval",
    "zero-grad",
    "clip-between",
    "average",
    "ema",
    "lr",
    "decay",
)
"""Habits that do not ask for a weight by its name."""


def draw_any(seed: int, only: str = "") -> Case:
    """A usual case, or more often an odd one. `only`: sync, stages, windows, legs, hosts or usual."""
    if only == "hosts" or (not only and random.Random(f"host {seed}").random() < 0.08):
        return _maybe_adapted(_maybe_in_windows(draw_hosted(seed)))
    is_usual = only == "usual" or random.Random(f"usual {seed}").random() < 0.3
    case = draw_case(seed, "" if only == "usual" else only)
    return _maybe_compiled(_maybe_adapted(_quick(case if is_usual else make_odd(case))))


def _maybe_adapted(case: Case) -> Case:
    """Some have adapters of peft, where there is one. Drawn by itself: the other cases are as they were without."""
    draw = random.Random(f"lora {case.seed}")
    if draw.random() > 0.07 or not HAS_PEFT or "turns" in case.habits:
        return case
    inputs, width, blocks, traits = case.model.split("/")
    usual = {"vectors": "mlp", "tokens": "attention", "images": "bare"}[inputs]
    known = [kind if kind in ADAPTABLE else usual for kind in blocks.split(",")]
    kept = [word for word in traits.split(",") if word in (*TRAITS, *GIVEN) and word not in ("tied", "twins")]
    return replace(
        case,
        model=f"{inputs}/{width}/{','.join(known)}/{','.join([*kept, draw.choice(ADAPTED)])}",
        habits=tuple(habit for habit in case.habits if habit.partition("@")[0] in ANY_MODEL),
        legs=tuple(without(leg, "compile=True") for leg in case.legs),
    )


def _maybe_in_windows(case: Case) -> Case:
    """Some hosts have bf16, or replicas that step by themselves: of rows in order, as the judge knows them, and by an
    optimizer that keeps nothing, since a newcomer begins with what another one's has kept."""
    draw = random.Random(f"windows of a host {case.seed}")
    kind = draw.choices(("", "bf16", "windows"), (2, 1, 1))[0]
    (leg,) = case.legs
    if kind == "bf16":
        return _as_torch_can(replace(case, legs=(replace(leg, switches=_joined(leg.switches, "precision='bf16'")),)))
    if kind == "windows":
        anchor = draw.choice((1, 2))
        together = draw.choice(("", ", together=0.3"))
        policy = draw.choice((f"Cadence(anchor={anchor}, max_anchor={anchor + 1}{together})", "Auto()"))
        leg = replace(leg, policy=policy)
        habits = tuple(habit for habit in case.habits if habit != "clamp-after")
        optimizer = "SGD(lr=0.1)" if case.scale == 1.0 else case.optimizer
        return replace(case, legs=(leg,), optimizer=optimizer, data="in-order", scheduler="", habits=habits)
    return case


def _joined(*switches: str) -> str:
    return ", ".join(filter(None, switches))


def _quick(case: Case) -> Case:
    """Compiled only if it is small: each process compiles each of its blocks for some ten seconds."""
    if not any("compile" in leg.switches for leg in case.legs):
        return case
    if len(case.legs) > 1 or case.legs[0].world > 2 or "cuts" in case.legs[0].stages:
        return replace(case, legs=tuple(without(leg, "compile=True") for leg in case.legs))
    inputs, width, blocks, traits = case.model.split("/")
    return replace(case, model=f"{inputs}/{width}/{','.join(blocks.split(',')[:2])}/{traits}", epochs=1)


def _maybe_compiled(case: Case) -> Case:
    """One of a hundred is compiled: few of the usual ones are small enough. Drawn by itself, as adapters are."""
    (leg, *others) = case.legs
    is_large = others or leg.world > 2 or "cuts" in leg.stages
    words = case.model.replace("/", ",").split(",")
    # Numbers of few bits are rounded elsewhere, and the old spectral_norm has another gradient where torch compiles it.
    is_other = "precision" in leg.switches or {"oldspectralnorm", *ADAPTED} & set(words)
    if random.Random(f"compiled {case.seed}").random() > 0.03 or is_large or is_other:
        return case
    return _as_torch_can(_quick(replace(case, legs=(replace(leg, switches=_joined(leg.switches, "compile=True")),))))


def make_odd(case: Case) -> Case:
    draw = random.Random(f"odd {case.seed}")
    case = replace(case, legs=tuple(replace(leg, slow=_draw_slow(draw, leg)) for leg in case.legs))
    if draw.random() < 0.75:
        case = replace(case, model=_draw_model(draw, case))
    if draw.random() < 0.6:
        case = _with_habits(draw, case)
    is_sync = all(leg.policy.startswith("Sync") for leg in case.legs)
    if draw.random() < 0.25 and is_sync:
        case = replace(case, data=draw.choice(KINDS), batch=max(case.batch, 4 + max(leg.world for leg in case.legs)))
    if case.data == "lengths":  # its steps are counted in places, of which some are empty, and rounded so
        case = replace(case, legs=tuple(replace(leg, wire="fp32") for leg in case.legs))
    if draw.random() < 0.06 and is_sync:
        case = _turned(case)
    if draw.random() < 0.06 and is_sync and not case.faults and len(case.legs) == 1:
        case = replace(case, habits=(*case.habits, "ema"))
    if draw.random() < 0.05 and is_sync and case.scale == 1.0 and not case.faults:
        legs = [without(leg, "precision='bf16'") for leg in case.legs]
        fp16 = tuple(replace(leg, switches=f"precision='fp16', {leg.switches}".rstrip(", ")) for leg in legs)
        case = replace(case, legs=fp16, dtype="float32", optimizer=draw.choice(STEADY), habits=(), scheduler="")
    if draw.random() < 0.2 and not is_sync:
        auto = {leg: replace(leg, policy="Auto()") for leg in case.legs if not leg.policy.startswith("Sync")}
        case = replace(case, legs=tuple(auto.get(leg, leg) for leg in case.legs))
    if draw.random() < 0.25 and case.dtype == "float64" and case.scale == 1.0:
        case = replace(case, optimizer=draw.choice(ODD_OPTIMIZERS))
    if draw.random() < 0.2 and is_sync and case.scale == 1.0 and "turns" not in case.habits:
        case = replace(case, scheduler=draw.choice(ODD_SCHEDULERS))
    return _as_torch_can(case)


def _turned(case: Case) -> Case:
    """With two optimizers, in turns."""
    traits = [word for word in case.model.rpartition("/")[2].split(",") if word not in ("twins", "tied", "groups")]
    model = f"{case.model.rpartition('/')[0]}/{','.join(traits)}"
    habits = tuple(habit for habit in case.habits if habit in LOSSES)
    legs = tuple(replace(leg, wire="fp32", until=leg.until and 2 * leg.until) for leg in case.legs)
    return replace(case, model=model, habits=("turns", *habits), scheduler="", data="", faults=(), legs=legs)


def draw_hosted(seed: int) -> Case:
    """Under a host whose workers come and go. How it cuts a batch is its own affair, so no row may depend on others."""
    case = make_odd(draw_case(seed, "sync"))
    draw = random.Random(f"hosted {seed}")
    while any(word in case.model for word in (*COUNTED, *BY_BATCH, "center", "counter", "maxnorm")):
        case = replace(case, model=_draw_model(draw, replace(case, model=draw_model(draw))))
    happenings = [f"{draw.choice(('join', 'join', 'leave', 'kill'))}@{draw.randint(1, 6)}" for _ in range(4)]
    happenings.sort(key=lambda word: int(word.partition("@")[2]))
    switches = ", ".join(word for word in case.legs[0].switches.split(", ") if word.startswith("clip"))
    return _as_torch_can(
        replace(
            case,
            epochs=2,
            dtype="float32",  # in which all that is trained travels to a host
            optimizer=draw.choice(STEADY) if case.scale == 1.0 else case.optimizer,
            data=draw.choice(("loader", "in-order", "weighted", "lengths", "drop-last", "stream")),
            faults=(),
            samples=draw.choice(("rows", "tokens")),
            habits=tuple(habit for habit in case.habits if habit in (*LOSSES, *HOOKS)),
            host=f"{draw.choice((1, 2, 3))},{','.join(happenings)}",
            legs=(Leg(switches=switches),),
        )
    )


def _draw_slow(draw: random.Random, leg: Leg) -> str:
    if leg.world == 1 or draw.random() < 0.3:
        return ""
    return f"{draw.randrange(leg.world)}/{draw.choice(PLACES)}/{draw.choice((0.05, 0.1, MOST_S))}"


def _draw_model(draw: random.Random, case: Case) -> str:
    inputs, width, blocks, traits = case.model.split("/")
    kinds = [kind.__name__.lower() for kind in (IMAGES if inputs == "images" else ANY)]
    chosen = blocks.split(",")
    for _ in range(draw.choice((0, 1, 1, 2))):
        chosen[draw.randrange(len(chosen))] = draw.choice(kinds)
    odd = set()
    if draw.random() < 0.4:
        odd.add(draw.choice(PATHS))
    if draw.random() < 0.3:
        odd.add(draw.choice(HEADS))
    if draw.random() < 0.3:
        odd.add(draw.choice((*WHOLES, *(WORDS if inputs == "tokens" else ()), *_only_images(inputs))))
    known = set(filter(None, traits.split(",")))
    if odd & set(PATHS) or "types" in odd:
        known.discard("residual")
    if "types" in odd:
        odd -= set(PATHS)
        known.discard("twins")
    return f"{inputs}/{width}/{','.join(chosen)}/{','.join(sorted(known | odd))}"


def _only_images(inputs: str) -> tuple[str, ...]:
    return ("channels", "channels") if inputs == "images" else ()


def _with_habits(draw: random.Random, case: Case) -> Case:
    """Where replicas step by themselves a loop's writes happen between two agreements, which is not judged."""
    is_sync = all(leg.policy.startswith("Sync") for leg in case.legs)
    has_stages = any(leg.stages for leg in case.legs)
    known = [*LOSSES, *(habit for habit in HOOKS if is_sync or habit != "clamp-after")]
    if has_stages:  # what prepare() gives there has no layers to name
        known.remove("hook-late")
    if is_sync:
        known += STARTS if not has_stages else ()  # a worker has the weights of some layers alone
        known += [habit for habit in LOOPS if not has_stages or habit not in ("eval", "halves", "uneven", "average")]
        known += (habit for habit in TIMED if len(case.legs) == 1 and not (has_stages and habit == "freeze"))
    habits = set(draw.sample(known, draw.choice((1, 1, 2))))
    if draw.random() < 0.15:
        habits = {draw.choice(NONLINEAR)}
        case = replace(case, legs=(Leg(strategy=draw.choice(("NoShard()", "ShardGradOp()", "FullShard()"))),))
    timed = {habit: f"{habit}@{draw.randint(1, 3)}" for habit in TIMED}
    case = replace(case, habits=tuple(sorted(timed.get(habit, habit) for habit in habits)))
    if habits & {*TIMED, *STARTS, "average", "clamp", "clamp-data"}:  # a step that is skipped is counted in two ways
        case = replace(case, faults=(), samples=case.samples if case.samples in ("rows", "tokens") else "rows")
    if "halves" in habits or "uneven" in habits:
        case = replace(case, legs=tuple(replace(leg, wire="fp32") for leg in case.legs))
    if len(case.legs) > 1 and "average" in habits:
        case = replace(case, legs=(replace(case.legs[0], until=None),))
    return case


def _as_torch_can(case: Case) -> Case:
    """Without what plain PyTorch refuses, or computes in another way than a judge of float64 may."""
    words = case.model.replace("/", ",").split(",")
    if any(kind in case.model for kind in (*COUNTED, "recompute", "reentrant")):
        case = replace(case, legs=tuple(without(leg, "checkpoint_activations=True") for leg in case.legs))
    # Rows that count nothing have a backward of zeros or none: what is computed again there changes its buffers or not.
    if {"recompute", "reentrant"} & set(words) and any(kind in case.model for kind in COUNTED):
        case = replace(case, samples=case.samples if case.samples in ("rows", "tokens") else "rows")
    if "types" in words and case.dtype != "float64":
        blocks, _, traits = case.model.rpartition("/")
        kept = ",".join(word for word in traits.split(",") if word != "types")
        case = replace(case, model=f"{blocks}/{kept}")
    if {"complex", "types"} & set(words) or "penalty" in case.habits:
        case = replace(case, optimizer=STEADY[1] if case.scale == 1.0 else case.optimizer)
    # A row without tokens attends to itself alone, whatever its query and key: their gradient is 0, or a last digit of
    # it, which differs from machine to machine and which these optimizers make a step of.
    if {"encoder", "mha"} & set(words) and case.model.startswith("vectors") and case.optimizer.startswith(SHARP):
        case = replace(case, optimizer=STEADY[1])
    if "sparse" in words:
        case = replace(case, optimizer="SGD(lr=0.1)")
    if "bilinear" in words:  # autocast casts none of its four tensors
        for precision in ("precision='bf16'", "precision='fp16'"):
            case = replace(case, legs=tuple(without(leg, precision) for leg in case.legs))
    is_compiled = any("compile" in leg.switches for leg in case.legs)
    if is_compiled or {"tokens", "reentrant", "lstm", "gru", "encoder"} & set(words):  # no derivative, or no second one
        case = replace(case, habits=tuple(habit for habit in case.habits if habit != "penalty"))
    if case.optimizer.startswith(("Centred", "Lookahead")):  # torch calls hooks twice there, or once: as it has hooked
        case = replace(case, habits=tuple(habit for habit in case.habits if habit not in ("clamp-after", "pre-clip")))
    if "tensor" in case.optimizer:
        case = replace(case, scheduler="", habits=tuple(habit for habit in case.habits if "lr" not in habit))
    return case

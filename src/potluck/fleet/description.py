"""Describes what a run trains: the parts in which its gradient travels, and numbers that all workers share. Pure.

The first worker that is ready describes the run; every other must describe the same.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, get_args, get_type_hints

from potluck.agree.policy import OUTER, OVERLAP, POLICIES, ApplyPolicy, Windowed
from potluck.agree.records import Position, RunTerms
from potluck.agree.terms import BUILD, SAME_DATA, Fingerprint, check_fingerprint, differing_data, differing_settings
from potluck.coded_numbers import CODINGS, WIRES, Coding, coding_of
from potluck.errors import TheirProtocolError
from potluck.wire.words import clean_all

BUFFERS = 255
"""The component that carries what a step changed in the model's buffers, such as running statistics."""
COUNTS = 254
"""The component that carries what an optimizer counts for each parameter, with a window alone."""
MOMENTS = 1 << 24
"""Blocks from this number on carry what an optimizer keeps of some parameters' numbers, with a window alone: means of
gradients, from DIVISORS on what it divides steps by, and from OTHER_MOMENTS on what is neither."""
DIVISORS = 2 << 24
OTHER_MOMENTS = 3 << 24
BAD_BUFFERS = "comes with a change of the model's buffers that is not finite"
"""Why a payload of buffers is refused: a gradient is not to blame for it, and may be fine."""
MAX_FLOATS = (1 << 30) - 1024
"""The most floats of one part: with its head it must fit one frame, whose length is a u32."""
MAX_PARTS = 100_000
MAX_TOTAL = 1 << 40
"""Numbers of all parts. A coordinator takes no more than it has memory for."""
MAX_ROWS = 1 << 48
MAX_TURNS = 64
ENTRENAR_BYTES = 100_000_000
"""The longest message that entrenar's own client takes."""
MAX_SLICES = 1 << 16
MAX_TOLD = 1 << 16
"""The most characters of `told`, as JSON."""
MAX_WHOLE = (1 << 63) - 1
OTHER_BASE = (
    "The numbers of your frozen parameters are not those of this run's, and nobody sends them: load the same base, in"
    " the same form (type, quantisation), or take it from the host with potluck join --fetch-base"
)
LEAST_UNIT, LEAST_SAMPLES = 2.0**-64, 1e-12
_REMOVED = {"overlap": OVERLAP, "outer": OUTER}
"""Settings that a policy of an older version may still tell, each with why a run under it cannot continue."""
_SWITCHES: dict[str, Any] = {"together": 0.0, "moments": False}
"""Settings of the same policies that are told only where they are not this: an older version neither tells nor expects
them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some parameters' gradients, end to end: a block, or a component outside the blocks."""

    block: int | None
    component: int | None
    sizes: tuple[int, ...]

    @property
    def floats(self) -> int:
        return sum(self.sizes)

    @property
    def is_moments(self) -> bool:
        """Whether it is of an optimizer's, and travels with windows alone."""
        return self.component == COUNTS or (self.block or 0) >= MOMENTS

    def coding_in(self, run: Coding | None) -> Coding | None:
        """How it travels in a run of this coding; none: as it is, as buffers and what is counted always do."""
        if run is None or not self.is_of_parameters:
            return None
        return coding_of_block(self.block or 0, run)

    @property
    def is_of_parameters(self) -> bool:
        """Whether it has as many numbers as some parameters, and each rank of a worker those that it holds of them."""
        return self.component not in (BUFFERS, COUNTS)

    @property
    def key(self) -> tuple[str, int]:
        """How a message names it."""
        return ("block", self.block) if self.block is not None else ("component", self.component or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    parts: tuple[Part, ...]
    """In the order in which the backward completes them, which is the order in which they travel."""
    model: str
    """A hash of every parameter's name, shape and type."""
    rows: int
    batch: int
    slices: int
    seed: int
    unit: float
    """Power of two by which each gradient is multiplied before it travels, beside its number of samples."""
    samples_per_row: float
    """How many samples a row counts as, for peers that cannot say."""
    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of a policy under which workers step by themselves: all that windows are planned by."""
    data: Fingerprint = field(default_factory=dict)
    """Fingerprint of what is in the rows. Empty where they cannot be compared: none is the same twice."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings that every worker's step has alike beside all this: the optimizer and its own, clipping, the
    schedule."""
    rows_limit: int = 0
    """The run is over after N rows of all its epochs; 0: when the workers say so. It may differ between workers."""
    state_bytes: int = 0
    """Bytes of the model's weights and buffers, those included that are not trained; 0: not told."""
    wire: str = "fp32"
    """Form in which parts travel, each as coding_in() has it."""
    places: str = ""
    """Words for an epoch's places in its proof, if each is not one sample of the data."""
    in_pairs: bool = False
    """No slice has a single row, wherever that can be had: the model has BatchNorm, which can take no mean of one."""
    turns: int = 1
    """Each batch is trained so many times in a row, by one of so many optimizers each time."""
    base: str = ""
    """A hash of what is frozen from the start, which each worker has from elsewhere and nobody sends; empty: none."""
    told: dict[str, Any]
    """Details that a person is shown: name, parameters, unit of samples, steps. They may differ between workers."""

    @property
    def windowed(self) -> Windowed | None:
        """The policy, if workers step by themselves under it; none under Sync."""
        return _made(self.policy, self.settings)

    @property
    def subtracts_only(self) -> bool:
        """Whether all workers come to the same bits: averages are only subtracted, which every device does alike.
        An optimizer's step along a mean gradient has other bits on devices of another kind."""
        policy = self.windowed
        return policy is not None and not policy.may_step_together

    @property
    def terms(self) -> RunTerms:
        return RunTerms(
            rows=self.rows, batch=self.batch, turns=self.turns, is_sync=POLICIES[self.policy].steps_together
        )

    def steps_at(self, epoch: int, row: int) -> int:
        """How many batches of the run are done at this place, the last maybe in part."""
        return self.turns * (epoch * -(-self.rows // self.batch) + -(-row // self.batch))

    def steps_of(self, position: Position) -> int:
        """How many there are at a position whose own step is not known."""
        return position.version if self.terms.is_sync else self.steps_at(position.epoch, position.row)

    @property
    def moments(self) -> frozenset[int]:
        """Indices of parts that travel with windows alone, and not in a step that all take together."""
        return frozenset(index for index, part in enumerate(self.parts) if part.is_moments)

    @property
    def floats(self) -> int:
        """Numbers that travel with a window: parameters, buffers, and what optimizers keep."""
        return sum(part.floats for part in self.parts)

    @property
    def parameters(self) -> int:
        """Numbers of the model that are trained."""
        return sum(part.floats for part in self.parts if part.component != BUFFERS and not part.is_moments)

    @property
    def blocks(self) -> int:
        return sum(part.block is not None for part in self.parts)

    def too_large_for_entrenar(self) -> str | None:
        """Say which averages entrenar's own client refuses, as a sentence; None: it takes them all."""
        parts = [part for part in self.parts if part.component != BUFFERS]
        whole = 4 * sum(part.floats for part in parts) + 21  # its encoding: a tag, the step, a count, the loss
        if self.windowed is not None or whole <= ENTRENAR_BYTES:
            return None
        begin = (
            f"The average of this model's whole gradient is a message of {whole:,} bytes, and entrenar's own client"
            f" refuses messages above {ENTRENAR_BYTES:,}."
        )
        heads = {part.key: 25 + 4 * len(part.sizes) if part.block is not None else 18 for part in parts}
        largest = max(parts, key=lambda part: 4 * part.floats + heads[part.key])
        size = 4 * largest.floats + heads[largest.key]
        if size <= ENTRENAR_BYTES:
            return f"{begin} It can take part if it sends block gradients, not whole ones."
        name, number = largest.key
        return (
            f"{begin} That of {name} {number} alone is {size:,}, so that it cannot take part at all. Start workers with"
            " potluck join instead."
        )

    @property
    def coding(self) -> Coding | None:
        return coding_of(self.wire)

    @property
    def codings(self) -> list[Coding | None]:
        """List the coding of each part."""
        return [part.coding_in(self.coding) for part in self.parts]

    def to_json(self) -> str:
        """Convert to JSON. A field that an older version does not know is told only where it matters."""
        return json.dumps({name: value for name, value in asdict(self).items() if (name, value) not in _UNTOLD})

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """Strict: every number is checked before anything is made of it."""
        try:
            table = json.loads(text)
            parts = tuple(
                Part(_whole(part["block"], none=True), _whole(part["component"], none=True), tuple(part["sizes"]))
                for part in table.pop("parts")
            )
            described = cls(parts=parts, **table)
            for part in parts:
                if (part.block is None) == (part.component is None) or not 0 <= (part.component or 0) <= 255:
                    raise ValueError("a part is either a block or a component below 256")
                if not all(_whole(size) is not None for size in part.sizes) or not 0 < part.floats <= MAX_FLOATS:
                    raise ValueError(f"a part has between 1 and {MAX_FLOATS:,} numbers")
            if described.floats > MAX_TOTAL:
                raise ValueError(f"all parts together have at most {MAX_TOTAL:,} numbers")
            if not 0 < len(parts) <= MAX_PARTS or len({part.key for part in parts}) != len(parts):
                raise ValueError(f"there are between 1 and {MAX_PARTS:,} parts, no two alike")
            for name, most in {"rows": MAX_ROWS, "batch": MAX_ROWS, "slices": MAX_ROWS, "turns": MAX_TURNS}.items():
                if not 0 < (_whole(getattr(described, name)) or 0) <= most:
                    raise ValueError(f"{name} is at least 1, and at most {most:,}")
            for name in ("seed", "rows_limit", "state_bytes"):
                _whole(getattr(described, name))
            if not isinstance(described.model, str) or not isinstance(described.policy, str):
                raise ValueError("model and policy are words")
            _check_settings(described.policy, described.settings)
            check_fingerprint(described.data)
            told = described.training.items()
            if not all(str(word).isprintable() for pair in told for word in pair):  # it is shown to people
                raise ValueError("training is a table of words and numbers")
            if described.wire not in WIRES:
                raise ValueError(f"wire is one of {', '.join(WIRES)}")
            for name in ("places", "base"):
                _few_words(name, getattr(described, name))
            if not isinstance(described.in_pairs, bool):
                raise ValueError("in_pairs is true or false")
            if not (LEAST_UNIT <= described.unit <= 1 and LEAST_SAMPLES <= described.samples_per_row < 1e12):
                raise ValueError("unit lies in (0, 1], and samples_per_row above 0")
            is_long = len(json.dumps(described.told)) > MAX_TOLD
            if not isinstance(described.told, dict) or is_long or described.slices > MAX_SLICES:
                raise ValueError("told is a table, and slices at most 65,536")
            described = replace(described, told=clean_all(described.told))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TheirProtocolError(f"Ready.description is not one: {error}.") from None
        return described

    def difference(self, other: "Description") -> str | None:
        """The first thing that keeps two workers from training one model, as a sentence; none if nothing does."""
        words = {
            "model": f"Your parameter names, shapes or types are not those that this run trains{self._counts(other)}",
            "parts": f"Your gradient travels in other parts than this run's.{self._first_other_part(other)}",
            "policy": f"This run's policy is {self.policy}, and yours is {other.policy}",
            "base": OTHER_BASE if self.base and other.base else "Yours or the host's version of Potluck is too old",
        }
        for name in (*_FIRST, *(entry.name for entry in fields(self) if entry.name not in _FIRST)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if name not in _MAY_DIFFER and mine != theirs and (name, mine) != ("base", ""):
                otherwise = f"This run has {name} = {mine}, and you have {theirs}"
                return f"{words.get(name, otherwise).removesuffix('.')}. {BUILD}"
        ours, others = _SWITCHES | self.settings, _SWITCHES | other.settings
        changed = {f"policy.{name}": pair for name, pair in differing_settings(ours, others).items()}
        for name, (mine, theirs) in (changed | differing_settings(self.training, other.training)).items():
            return f"This run has {name} = {mine}, and you have {theirs}. {BUILD}"
        if (where := differing_data(self.data, other.data)) is not None:
            return f"Your data have as many rows as this run's, but {where}. {SAME_DATA}"
        return None

    def _counts(self, other: "Description") -> str:
        mine, theirs = self.parameters, other.parameters
        return f": it trains {mine:,} numbers, and your model {theirs:,}" if mine != theirs else ""

    def _first_other_part(self, other: "Description") -> str:
        """The models are alike, so something else has what travels with their gradients: often the optimizer."""
        for mine, theirs in zip_longest(self.parts, other.parts):
            if mine != theirs:
                name, number = (mine or theirs).key
                has = [f"{part.floats:,} numbers" if part is not None else "no such part" for part in (mine, theirs)]
                return f" The first is {name} {number}: {has[0]} here, and {has[1]} of yours."
        return ""

    def completed(self, other: "Description") -> "Description":
        """With what was not known before, such as in a journal of an older version, from one that does not differ."""
        data, training = self.data or other.data, self.training or other.training
        return replace(self, data=data, training=training, base=self.base or other.base)


_UNTOLD = (("wire", "fp32"), ("turns", 1), ("places", ""), ("base", ""))
_FIRST = ("policy", "wire", "turns", "model")
"""Compared before all else: what the parts are follows from these."""
_MAY_DIFFER = ("data", "training", "settings", "told", "rows_limit", "state_bytes", "in_pairs")
"""Or is compared in its own way; what an older version does not tell is among it."""


def coding_of_block(block: int, run: Coding) -> Coding:
    """`run`: how gradients travel, and what workers changed."""
    if block < DIVISORS:
        return run
    return run.of_divisors if block < OTHER_MOMENTS else CODINGS["bf16"]


def settings_of(policy: ApplyPolicy) -> dict[str, Any]:
    """Return the settings of a policy that a description tells."""
    settings = {name: getattr(policy, name) for name in _setting_names(policy.kind)}
    switched = {name: getattr(policy, name) for name in _SWITCHES if settings}
    if "moments" in switched:
        switched["moments"] = policy.averages_moments  # type: ignore[union-attr]
    return settings | {name: value for name, value in switched.items() if value != _SWITCHES[name]}


def _setting_names(policy: str) -> list[str]:
    """All that windows are planned by, and that is always told: a policy's own fields. Of Sync a host needs none."""
    kind = POLICIES.get(policy)
    if kind is None or kind.steps_together:
        return []
    return [each.name for each in fields(kind) if each.name not in _SWITCHES]


def _made(policy: str, settings: dict[str, Any]) -> Windowed | None:
    kind: Any = POLICIES[policy]
    return None if kind.steps_together else kind(**(_SWITCHES | settings))


def _check_settings(policy: str, settings: Any) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy is one of {', '.join(POLICIES)}")
    names, hints = _setting_names(policy), get_type_hints(POLICIES[policy])
    for name, sentence in _REMOVED.items() if isinstance(settings, dict) else ():
        if settings.get(name):
            raise ValueError(sentence.removesuffix("."))
    switches = {*_SWITCHES} if names else set()
    if not isinstance(settings, dict) or {*settings} - switches != {*names}:
        raise ValueError("settings are all of its policy's and no others")
    for name, value in settings.items():
        kinds = get_args(hints[name]) or (hints[name],)
        if value is None and type(None) in kinds and name not in _SWITCHES:
            continue
        if float in kinds:
            _number(value)
        elif int in kinds:
            _whole(value)
        elif not isinstance(value, bool):
            raise ValueError(f"{repr(value)[:40]} is neither true nor false")
    _made(policy, settings)


def _number(value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > MAX_WHOLE:
        raise ValueError(f"{repr(value)[:40]} is no number")


def _few_words(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 80:
        raise ValueError(f"{name} is a few words")


def _whole(value: Any, *, none: bool = False) -> int | None:
    if none and value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WHOLE:
        raise ValueError(f"{repr(value)[:40]} is no whole number of at least 0")
    return value

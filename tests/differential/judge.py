"""The judge: the same run in one process, in plain PyTorch and float64. It imports nothing of potluck.

From the ranks it takes only their decisions: which rows each did in which micro-batch, and when all agreed. That each
row is used once in an epoch, and each step has as many rows as it should, is checked before anything is computed.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.differential.cases import Case, Leg
from tests.differential.data import plain_batches
from tests.differential.habits import Loop, other_model
from tests.differential.models import BY_BATCH, build, loss_of, make_data
from tests.differential.optimizers import STEPPED_WHOLE, make_optimizer, make_scheduler, make_two

Micros = list[list[int]]
"""The rows of each micro-batch that one worker did in one step."""


SHAKES = {"float64": 1e-15, "float32": 5e-7, "bf16": 4e-3}
"""Of each weight: a few roundings of float64 and float32; one of bf16."""


@dataclass
class Expected:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    steps: list[list[list[float]]] = field(default_factory=list)
    """Of each leg, of each of its steps or windows: the mean loss, the gradient's norm, the samples; NaN if skipped."""
    evaluated: float | None = None
    """The mean loss over all rows at the end; none where it depends on how they are cut into batches."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """Of the weights, where the loop takes one of its own."""
    complaints: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each step of each replica."""

    @property
    def has_diverged(self) -> bool:
        """Then the last digit may decide where it ends."""
        losses = [abs(loss) for loss in self.losses if not math.isnan(loss)]
        return bool(losses) and (math.isinf(max(losses)) or max(losses) > 100 * max(losses[:2]))


class Replica:
    """A model and its optimizer, that take one step at a time."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.model = build(case.model, dtype, case.seed)
        self.turns = make_two(self.model, case.optimizer) if "turns" in case.habits else []
        self.optimizer = self.turns[0] if self.turns else make_optimizer(self.model, case.optimizer)
        self.scheduler = make_scheduler(self.optimizer, case.scheduler)
        self.data = _data(case, dtype)
        self.scale = case.scale
        self.loop = Loop(case.habits, self.model, self.optimizer)
        self.loop.before_prepare()
        self.loop.after_prepare(self.model, lambda: other_model(case.model, dtype, case.seed))
        self.done = 0
        self.losses: list[float] = []

    def skip(self) -> list[float]:
        """A step that overflowed, of which only the run knows. The loop's schedule goes on, as with any step."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.done += 1
        return [math.nan, math.nan, 0.0]

    def twin(self) -> "Replica":
        """Another one in the same state: a copy would have neither hooks nor weights that are computed."""
        other = Replica(self.case, self.dtype)
        other.losses = self.losses
        other.model.load_state_dict(self.model.state_dict())
        assert not self.turns
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        if self.scheduler is not None and other.scheduler is not None:
            other.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
        return other

    def step(self, lanes: list[Micros], switches: SimpleNamespace) -> list[float]:
        """What all lanes did, as one step: (mean loss, norm, samples); skipped if something is not finite."""
        if self.turns:
            self.optimizer = self.turns[self.done % 2]
        before, ends, weights, total = buffers(self.model), [], [], 0.0
        is_whole = sum(bool(rows) for micros in lanes for rows in micros) == 1 and not switches.buckets
        # Samples for each row of the step, where gradients are rounded on their way: as hooks see them, too.
        per = sum(len(rows) for micros in lanes for rows in micros) if switches.buckets else 1
        sent: list[dict[str, Tensor]] = []
        for micros in lanes:
            put_buffers(self.model, before)
            found = [self._micro(rows, switches, None if is_whole else per) for rows in micros if rows]
            if switches.buckets:
                sent.append({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
                self.optimizer.zero_grad()
            weights.append(sum(samples for _, samples in found))
            total += sum(loss for loss, _ in found)
            ends.append(buffers(self.model))
        for name, gradient in sum_rounded(dict(self.model.named_parameters()), sent, switches).items():
            self.model.get_parameter(name).grad = gradient
        samples = sum(weights)
        self.losses += [total / samples] if samples else []
        for other in self.turns:
            if other is not self.optimizer:
                other.zero_grad()
        trained = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in trained if not is_whole else ():
            parameter.grad /= samples / per  # type: ignore[operator]
        norm = math.sqrt(sum(float(_wide(p.grad).square().sum()) for p in trained))  # type: ignore[union-attr]
        is_good = samples > 0 and math.isfinite(total) and math.isfinite(norm)
        if is_good:
            if switches.clip is not None:
                for parameter in trained:
                    parameter.grad *= min(1.0, switches.clip / (norm + 1e-6))  # type: ignore[operator]
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        shares = [weight / samples for weight in weights] if is_good else []
        put_buffers(self.model, mean_buffers(before, ends, shares) if is_good else before)
        self.done += 1
        self.loop.after_step(self.done, self.data[0][:3])
        return [total / samples, norm, samples] if is_good else [math.nan, math.nan, 0.0]

    @torch.no_grad()
    def evaluate(self, switches: SimpleNamespace) -> float:
        with _autocast(switches):
            loss, _ = loss_of(self.model.eval(), self.data, self.scale, self.case.habits)
        return float(loss)

    def _micro(self, rows: list[int], switches: SimpleNamespace, per: float | None) -> tuple[float, float]:
        """(the sum of the losses, the samples): what has no samples has no gradient. `per`: none if this is all."""
        batch = tuple(tensor[rows] for tensor in self.data)
        with _autocast(switches):
            loss, samples = loss_of(self.model, batch, self.scale, self.case.habits)
        if not samples:
            return 0.0, 0.0
        (loss if per is None else loss * (samples / per)).backward()
        return float(loss.detach()) * float(samples), float(samples)


def _data(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return make_data(case.model, case.rows, case.seed, dtype, case.samples, case.faults)


def _wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def sum_rounded(parameters: dict[str, Any], sent: list[dict[str, Tensor]], switches: SimpleNamespace) -> Any:
    """The sum of what each lane sends, bucket by bucket: rounded, and once more if there are more than two lanes."""
    found = {}
    for names in switches.buckets or ():
        total = torch.zeros(())
        for own in sent:
            flat = torch.cat([own.get(name, torch.zeros_like(parameters[name])).reshape(-1) for name in names])
            total = total + arrives(flat.float(), switches.wire)
        if len(sent) > 2:
            total = arrives(total, switches.wire)
        pieces = total.split([parameters[name].numel() for name in names])
        used = [(name, piece) for name, piece in zip(names, pieces, strict=True) if any(name in own for own in sent)]
        found |= {name: piece.view_as(parameters[name]).to(parameters[name].dtype) for name, piece in used}
    return found


def arrives(numbers: Tensor, wire: str) -> Tensor:
    """By the definition: blocks of 64 or 256 multiples of a scale that has the digits of bf16."""
    if wire == "bf16":
        return numbers.bfloat16().float()
    size, top = (64, 7) if wire == "int4" else (256, 127)
    found = []
    for block in numbers.split(size):
        scale = (block.abs().max() * torch.tensor(1 / top)).bfloat16().float()
        if not scale.isfinite():
            found.append(torch.full_like(block, torch.nan))
        else:
            found.append((block * (1 / scale)).round() * scale if scale > 2.0**-101 else torch.zeros_like(block))
    return torch.cat(found)


def _autocast(switches: SimpleNamespace) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if switches.precision == "bf16" else nullcontext()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def put_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def mean_buffers(
    before: dict[str, Tensor], ends: Sequence[dict[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """Changes by samples where numbers have a mean; of integers, truth values and the infinite, the first one's."""
    first = next(end for end, share in zip(ends, shares, strict=True) if share)
    found = {}
    for name, was in before.items():
        if not was.is_floating_point():
            found[name] = first[name]
            continue
        changes = [end[name] - was for end in ends]
        mean = was + sum(share * change.nan_to_num(0, 0, 0) for share, change in zip(shares, changes, strict=True))
        has_mean = (first[name] - was).isfinite() | (first[name] == was)
        found[name] = torch.where(has_mean, mean, first[name])
    return found


def judge(
    case: Case, told: list[list[dict[str, Any]]], *, is_shaken: bool = False, shake: int = 0, is_whole: bool = True
) -> Expected:
    """Of what the ranks of each leg told. `is_shaken`: begun from weights as rounded as the run's numbers are, in one
    of many ways, which has the number `shake`. `is_whole`: the run went to its end."""
    expected = Expected()
    batches = plain_batches(case, _data(case)) if case.data else None
    expected.complaints += _rows_used_wrongly(case, told, batches) if is_whole else []
    dtype = torch.float32 if any("bf16" in leg.switches for leg in case.legs) else torch.float64
    replica = Replica(case, dtype)
    expected.start, expected.losses = _state(replica.model), replica.losses
    if is_shaken:
        _shake(replica.model, SHAKES[precision_of(case)], case.seed + shake)
    done = 0
    for leg, ranks in zip(case.legs, told, strict=True):
        lanes, complaints = _lanes(ranks)
        expected.complaints += complaints
        if expected.complaints:
            return expected
        if leg.policy.startswith("Sync"):
            expected.complaints += _steps_of_wrong_size(case, lanes[0], done, batches)
            buckets = ranks[0]["buckets"] if leg.wire != "fp32" else None
            expected.steps.append(_judge_steps(replica, lanes[0], _switches(leg, buckets), ranks[0]["events"]))
        else:
            replica, steps = _judge_windows(replica, list(lanes.values()), ranks[0], leg)
            expected.steps.append(steps)
        done += sum(size for own in lanes.values() for size in _sizes(own)) // (2 if "turns" in case.habits else 1)
    may_overflow = any("fp16" in leg.switches for leg in case.legs)
    if not case.faults and case.samples in ("rows", "tokens") and not expected.has_diverged and not may_overflow:
        assert not any(math.isnan(loss) for steps in expected.steps for loss, _, samples in steps), (
            "skipped for nothing"
        )
    expected.tensors, expected.average = _state(replica.model), replica.loop.average
    if "ema" in case.habits:
        replica.model.load_state_dict(replica.loop.ema, strict=False)
    if not case.faults and not case.host and not any(kind in case.model for kind in BY_BATCH):
        expected.evaluated = replica.evaluate(_switches(case.legs[-1]))
    return expected


def precision_of(case: Case) -> str:
    """The least of what the run's numbers are rounded to."""
    if any("precision" in leg.switches for leg in case.legs):
        return "bf16"
    if "types" in case.model.rpartition("/")[2].split(","):
        return "float32" if case.dtype == "float64" else "bf16"
    # Its rates are of float32 whatever it steps, and in windows a mean of them is rounded once more.
    has_means = any(not leg.policy.startswith("Sync") for leg in case.legs)
    return "float32" if has_means and case.optimizer.startswith("ASGD") else case.dtype


def _shake(model: nn.Module, by: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=draw).double() * 2 - 1
            parameter.mul_((1 + by * signs).to(parameter.dtype))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _switches(leg: Leg, buckets: list[list[str]] | None = None) -> SimpleNamespace:
    """`buckets`: where gradients are rounded, the parameters that travel together, end to end."""
    defaults = {"clip": None, "precision": "fp32", "wire": leg.wire, "buckets": buckets}
    return SimpleNamespace(**(defaults | eval(f"dict({leg.switches})")))


def _lanes(ranks: list[dict[str, Any]]) -> tuple[dict[int, list[list[Any]]], list[str]]:
    """Of each replica its lanes, of each lane its windows; all workers of a lane have done the same."""
    found: dict[int, dict[int, list[Any]]] = defaultdict(dict)
    complaints = []
    for number, rank in enumerate(ranks):
        windows = found[rank["replica"]].setdefault(rank["lane"], rank["windows"])
        if windows != rank["windows"]:
            complaints.append(f"rank {number} did other rows than the others of its lane")
    if len({len(rank["windows"]) for rank in ranks}) > 1:
        complaints.append(f"ranks agreed {[len(rank['windows']) for rank in ranks]} times")
    return {replica: [lanes[lane] for lane in sorted(lanes)] for replica, lanes in sorted(found.items())}, complaints


def _rows_used_wrongly(
    case: Case, told: list[list[dict[str, Any]]], batches: list[list[list[int]]] | None
) -> list[str]:
    """`batches`: of each epoch, where the data say which rows each has."""
    used: Counter[tuple[int, int]] = Counter()
    for ranks in told:
        lanes = {(rank["replica"], rank["lane"]): rank["epochs"] for rank in ranks}
        used.update((epoch, row) for rows in lanes.values() for epoch, row in rows)
    wanted = Counter((epoch, row) for epoch in range(case.epochs) for row in range(case.rows))
    if batches is not None:
        wanted = Counter((epoch, row) for epoch, rows in enumerate(batches) for batch in rows for row in batch)
    wrong = sorted(key for key in wanted | used if used[key] != wanted[key])
    return [f"(epoch, row) {key} was used {used[key]} times" for key in wrong[:3]]


def _sizes(lanes: list[list[Any]]) -> list[int]:
    """The rows of each step, over all lanes."""
    return [
        sum(len(rows) for step in steps for micros in step for rows in micros) for steps in zip(*lanes, strict=True)
    ]


def _steps_of_wrong_size(
    case: Case, lanes: list[list[Any]], done: int, batches: list[list[list[int]]] | None
) -> list[str]:
    """What was left of the epoch, batch after batch, and then whole epochs: the last step of each is short."""
    if batches is not None:
        return _steps_of_wrong_rows(lanes, done, [rows for epoch in batches for rows in epoch])
    if "turns" in case.habits:  # a leg may end between the two turns of a batch
        return []
    complaints = []
    for size in _sizes(lanes):
        wanted = min(case.batch, case.rows - done % case.rows)
        if size != wanted:
            complaints.append(f"a step had {size} rows of {wanted}")
        done += size
    return complaints


def _steps_of_wrong_rows(lanes: list[list[Any]], done: int, batches: list[list[int]]) -> list[str]:
    """Each step has the rows of one batch. `done`: rows of the batches before."""
    left = iter(batches)
    while done > 0:
        done -= len(next(left))
    complaints = []
    for steps in zip(*lanes, strict=True):
        rows = sorted(row for step in steps for micros in step for micro in micros for row in micro)
        wanted = sorted(next(left))
        if rows != wanted:
            complaints.append(f"a step had the rows {rows}, and its batch {wanted}")
    return complaints


def _judge_steps(
    replica: Replica, lanes: list[list[Any]], switches: SimpleNamespace, events: list[list[float]]
) -> list[list[float]]:
    """All workers step together: a window of each lane is its part of one step."""
    found = []
    for number, step in enumerate(zip(*lanes, strict=True)):
        has_overflowed = switches.precision == "fp16" and number < len(events) and math.isnan(events[number][0])
        micros = [window[0] if window else [] for window in step]
        found.append(replica.skip() if has_overflowed else replica.step(micros, switches))
    return found


def _judge_windows(
    first: Replica,
    replicas: list[list[list[Any]]],
    told: dict[str, Any],
    leg: Leg,
) -> tuple[Replica, list[list[float]]]:
    """Replicas step by themselves, and become one at the end of each window; or, of some, all take one step."""
    names: dict[str, Callable[..., SimpleNamespace]] = dict.fromkeys(("Cadence", "Async"), _settings)
    names["Auto"] = lambda **options: _settings(moments=True, **options)
    policy = eval(leg.policy, names)  # type: ignore[arg-type]
    policy.moments = policy.moments and _have_mean(first.optimizer, leg)
    group = Group([first.twin() for _ in replicas], policy)
    switches, found = _switches(leg), []
    for number in range(len(replicas[0][0])):
        if told["anchors"][number] == 0:
            every = [lane[number][0] if lane[number] else [] for lanes in replicas for lane in lanes]
            found.append(group.step_together(every, switches))
            continue
        group.begin()
        counts, losses = [], []
        for replica, lanes in zip(group.replicas, replicas, strict=True):
            steps = [replica.step(list(step), switches) for step in zip(*(lane[number] for lane in lanes), strict=True)]
            counts.append(sum(samples for _, _, samples in steps))
            losses.append(sum(loss * samples for loss, _, samples in steps if samples))
        group.agree(counts)
        samples = sum(counts)
        found.append([sum(losses) / samples if samples else math.nan, math.nan, samples])
    return group.replicas[0], found


def _have_mean(optimizer: torch.optim.Optimizer, leg: Leg) -> bool:
    """Adafactor's rows and columns have none. Where a replica is split, one of its ranks has all of what is kept of a
    parameter that is stepped whole, which the run tells to be each replica's own."""
    is_split = leg.strategy.startswith("HybridShard") and "intra_node_size=1)" not in leg.strategy
    return not isinstance(optimizer, (torch.optim.Adafactor, *(STEPPED_WHOLE if is_split else ())))


def _settings(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"moments": False} | options))


class Group:
    """Replicas that average."""

    def __init__(self, replicas: list[Replica], policy: SimpleNamespace) -> None:
        self.replicas, self.policy = replicas, policy
        self.shares = [1 / len(replicas)] * len(replicas)
        self.before = buffers(replicas[0].model)

    def begin(self) -> None:
        self.before = buffers(self.replicas[0].model)

    @torch.no_grad()
    def agree(self, counts: list[float]) -> None:
        count = len(counts)
        self.shares = [each / sum(counts) if sum(counts) else 1 / count for each in counts]
        merged = mean_buffers(self.before, [buffers(replica.model) for replica in self.replicas], self.shares)
        for replica in self.replicas:
            put_buffers(replica.model, merged)
        own = [[parameter.detach().clone() for parameter in trained(replica)] for replica in self.replicas]
        weighted = [[share * value for value in values] for share, values in zip(self.shares, own, strict=True)]
        mean = [torch.stack(each).sum(0) for each in zip(*weighted, strict=True)]
        for replica in self.replicas:
            for parameter, value in zip(trained(replica), mean, strict=True):
                parameter.copy_(value)
        if self.policy.moments:
            for same in zip(*(replica.model.parameters() for replica in self.replicas), strict=True):
                self._average_moments(same)

    def step_together(self, lanes: list[Micros], switches: SimpleNamespace) -> list[float]:
        """All are equal, and take one step."""
        found = self.replicas[0].step(lanes, switches)
        for replica in self.replicas[1:]:
            replica.model.load_state_dict(self.replicas[0].model.state_dict())
            replica.optimizer.load_state_dict(copy.deepcopy(self.replicas[0].optimizer.state_dict()))
        return found

    def _average_moments(self, same: tuple[Tensor, ...]) -> None:
        """By samples; what a replica has nothing of counts as zeros, but for what is counted."""
        states = [replica.optimizer.state[each] for replica, each in zip(self.replicas, same, strict=True)]
        having = sum(share for share, state in zip(self.shares, states, strict=True) if state)
        for key, like in next((state for state in states if state), {}).items():
            values = [state.get(key, torch.zeros_like(like)) for state in states]
            mean = sum(share * value for share, value in zip(self.shares, values, strict=True))
            if key in ("step", "eta", "mu", "mu_product"):
                mean = mean / having if having else like
            for state in states:
                if having:
                    # Where a half goes must not depend on the order of a sum.
                    state[key] = mean.round(decimals=4).round() if key == "step" else mean.clone()


def trained(replica: Replica) -> list[Tensor]:
    return [parameter for parameter in replica.model.parameters() if parameter.requires_grad]

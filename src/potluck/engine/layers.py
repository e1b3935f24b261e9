"""WholeLayers: each worker has all layers of its replica, though perhaps only parts of their numbers."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from potluck.agree.pulse import Pulse, worker_steps
from potluck.engine.loader import Loader
from potluck.engine.losses import LossFunction, loss_and_samples
from potluck.engine.replica import Replica
from potluck.engine.rounds import Rounds
from potluck.events import WorkerStep
from potluck.link.link import Alone, Link
from potluck.save.saves import Standing

if TYPE_CHECKING:
    from potluck.engine.engine import Engine


class WholeLayers:
    is_whole = True
    place = 0
    shards: Link = Alone()

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    @property
    def lanes(self) -> int:
        return self._engine.world

    @property
    def lane(self) -> int:
        return self._engine.rank

    @property
    def peers(self) -> Link:
        return self._engine.link

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._engine._prepared().model.parameters())

    def check(self, dataset: Any, loss: LossFunction | None, micro_size: int | None) -> int | None:
        return micro_size

    def introduce(self, model: nn.Module, optimizer: Optimizer, dataset: Any, about: dict[str, Any]) -> None:
        pass

    def make_replica(self, model: nn.Module, optimizer: Optimizer, rounds: Rounds, options: dict[str, Any]) -> Replica:
        return rounds.make_replica(model, optimizer)

    def settle_in(self) -> None:
        pass

    def train(self, loss_of: LossFunction, batch: Any) -> None:
        loss, samples = loss_and_samples(self._engine._prepared().loss(loss_of, batch), batch)
        self._engine.backward(loss, samples=samples)

    def insist_on_backward(self) -> None:
        pass

    def reduce(self, replica: Replica) -> tuple[float, float, float]:
        engine = self._engine
        wait_s = replica.finish()
        started = time.perf_counter()
        norm, loss_sum = torch.stack([replica.norm().to(engine.device), engine.tally.loss_sum]).tolist()
        if engine.device.type == "cuda" and engine.world > 1:  # there, finish() only put the sums in line
            wait_s += time.perf_counter() - started
        return wait_s, norm, loss_sum

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        return busy_s, 0.0

    def lane_pulses(self, pulses: list[Pulse]) -> list[Pulse]:
        return pulses

    def worker_steps(self, pulses: list[Pulse], took_s: float) -> tuple[WorkerStep, ...]:
        return worker_steps(pulses, took_s)

    def samples_of_lane(self, pulses: list[Pulse]) -> float:
        return self._engine.tally.samples

    def samples_in_node(self, samples: Sequence[float]) -> float:
        return self._engine.tally.samples

    def fingerprint(self, replica: Replica) -> str:
        return replica.fingerprint()

    def look(self, loss_of: LossFunction, loader: Loader) -> tuple[float, float]:
        total = count = 0.0
        for batch in loader.once():
            loss, samples = loss_and_samples(self._engine._prepared().loss(loss_of, batch), batch)
            if samples and loader.current is not None and loader.current.counts:
                total += loss.item() * samples
                count += samples
        return total, count

    def standing(self) -> Standing:
        return {}

    def on_saved(self) -> None:
        pass

    def end_of_step(self) -> None:
        pass

    def end_of_window(self) -> None:
        pass

    def close(self, *, has_failed: bool) -> None:
        pass

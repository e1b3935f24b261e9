"""StagePlanner: how a model is cut into stages for the workers at hand, by agreement of all; and how that is shown."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig
from potluck.errors import ConfigError
from potluck.link.grid import Grid
from potluck.link.link import ask_first
from potluck.sharding.splitting import free_bytes
from potluck.stages.plan import Device, Layer, Plan, balance
from potluck.stages.profile import measure
from potluck.stages.protocol import Stages
from potluck.stages.schedule import draw, expected_idle_share, per_worker, plan_orders
from potluck.words import plural

WIDTH = 118
"""The width of what is shown: a longer schedule is not drawn."""
MEASURE_S = 0.6
"""How long to look at what layers cost a worker: several periods of a CPU quota, which are 0.1 s as a rule."""


@dataclass(frozen=True, slots=True)
class StagePlanner:
    stages: Stages
    places: Grid
    device: torch.device
    batch_size: int
    """Rows of a step, of all replicas."""

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.stages.micro_batch_size or max(1, self.batch_size // self.places.pipelines)

    @property
    def micros(self) -> int:
        """Micro-batches of a step."""
        return -(-self.batch_size // (self.places.pipelines * self.rows))

    def agree(self, model: nn.Module, loss: Callable[[nn.Module, Any], Any], dataset: Any, collate: Any) -> Plan:
        """The plan that rank 0 makes from what all workers have measured. Called on every worker."""
        link = self.places.link
        for_s = 0.0 if self.stages.cuts or self.places.workers == 1 else MEASURE_S
        layers = measure(model, loss, self._sample(dataset, collate), self.device, at_least_s=for_s)
        seconds = sum(layer.seconds for layer in layers)
        reports = link.gather_rows([seconds, self._free_bytes()])
        plan = ask_first(link, lambda: self._plan(layers, reports).to_json(), ConfigError)
        return Plan.from_json(plan)

    def describe(self, plan: Plan) -> str:
        """The plan as a table, and the order of a step, if it fits a screen."""
        workers, schedule, micros = self.places.workers, self.stages.schedule, self.micros
        order = draw(plan_orders(schedule, workers, micros), len(plan.stages))
        if max(map(len, order.splitlines())) > WIDTH:
            order = ""
        summary = f"{schedule}, {plural(micros, 'micro-batch')}"
        if schedule in ("1f1b", "gpipe"):
            idle = expected_idle_share(workers, micros)
            summary += f": stages wait at least {idle:.0%} of the time, if they are equal"
        return "\n".join(filter(None, (str(plan), summary, order)))

    def _plan(self, layers: Sequence[Layer], told: list[list[float]]) -> Plan:
        """`told`: of each rank, the seconds that the whole model takes it, and its free memory."""
        workers, each = self.places.workers, per_worker(self.stages.schedule)
        if self.stages.cuts:
            if len(self.stages.cuts) + 1 != workers * each:
                raise ConfigError(
                    f"stages.cuts makes {len(self.stages.cuts) + 1} stages, and there are {workers * each}: {workers}"
                    f" workers to a replica, with {each} each. Give {workers * each - 1} cuts."
                )
            return Plan.at(layers, self.stages.cuts)
        mates = [[row for rank, row in enumerate(told) if self.places.place_of(rank) == n] for n in range(workers)]
        # As fast as the slowest of those who have the place, and with the memory of the smallest.
        devices = [
            Device(
                speed=1 / max(row[0] for row in mates[stage % workers]),
                memory_bytes=max(1, int(min(row[1] for row in mates[stage % workers])) // each),
            )
            for stage in range(workers * each)
        ]
        return balance(layers, devices, micro_batches=self.micros, rows=self.rows)

    def _free_bytes(self) -> float:
        """Return the memory that this worker may fill: on a CPU, its part of what the workers of this machine share."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.device.type == "cpu" else 1
        return free_bytes(self.device) / max(1, here)

    def _sample(self, dataset: Any, collate: Any) -> Any:
        """Some rows of the data, to measure what layers cost."""
        batch = BatchConfig(size=min(len(dataset), self.rows))
        host = torch.device("cpu")
        return next(Loader(dataset, batch, device=host, collate=collate).once())

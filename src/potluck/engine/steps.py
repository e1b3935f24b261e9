"""Steps: all workers take each step together, as if one process had the whole batch.

Gradients are summed over a link while the backward still runs; meanwhile each worker tells the others what it did, and
from the same words all reach the same decision: to apply the step, or to skip it.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from potluck.agree.balance import Balance
from potluck.agree.pulse import Pulse, Verdict, decide_step
from potluck.engine.loader import BatchConfig, Loader
from potluck.engine.losses import STEP_TOO_EARLY
from potluck.engine.replica import Replica
from potluck.engine.rounds import Collate
from potluck.errors import ConfigError
from potluck.events import Decided, StepDone, StepSkipped
from potluck.link.link import Rows
from potluck.link.nodes import make_nodes
from potluck.save.saves import Standing

if TYPE_CHECKING:
    from potluck.engine.engine import Engine


class Steps:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._balance: Balance | None = None
        self._optimizer_s = 0.0

    # Preparing

    def insist_on_data(self, dataset: Any) -> None:
        """Batches may be the caller's own."""

    def make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        engine, composed = self._engine, self._engine.composition
        arguments = (model, optimizer, engine.layers.peers, engine.device, engine.config)
        split = composed.split_of(engine.layers.place)
        if split is None:
            return Replica(*arguments)
        from potluck.engine.sharded import ShardedReplica

        if engine.layers.is_whole or composed.splits_all:
            return ShardedReplica(*arguments, strategy=split)
        many = composed.replicas > 1
        nodes = make_nodes(engine.link, composed.stages * composed.node_size).across if many else None
        return ShardedReplica(*arguments, strategy=split, within=engine.layers.shards, nodes=nodes)

    def begin(self, replica: Replica) -> None:
        pass

    def make_loader(self, dataset: Any, batch: BatchConfig, seed: int, collate: Collate) -> Loader:
        engine, lanes = self._engine, self._engine.lanes
        replica = engine._prepared()
        loader = Loader(
            dataset,
            batch,
            shares=engine._shares(batch.size),
            rank=engine.lane,
            device=engine.device,
            seed=seed,
            collate=collate,
            in_step=replica.in_step,
            in_pairs=engine._batch_norm is not None,
        )
        engine._insist_on_same_data(loader)
        # Where ranks gather parameters they wait for each other in every layer, and nobody's own speed can be seen.
        if engine.composition.is_measured and lanes > 1 and not replica.gathers:
            self._balance = Balance(batch.size, lanes)
        return loader

    @property
    def has_fixed_shares(self) -> bool:
        return self._balance is None

    def keep_shares(self) -> None:
        self._balance = None

    # A step

    def step(self) -> StepDone | StepSkipped | None:
        engine = self._engine
        replica = engine._prepared()
        if not engine.tally.is_last:
            micro = engine.loader.current if engine.loader is not None else None
            if (micro.last and micro is not engine._trained) if micro is not None else engine.tally.is_untouched:
                raise ConfigError(STEP_TOO_EARLY)
            return None
        replica.unseal()
        if engine.device.type == "cuda" and engine.world > 1 and not replica.gathers:
            torch.cuda.current_stream().synchronize()  # else busy would be the time to launch kernels
        busy_s = time.perf_counter() - engine.tally.started + self._optimizer_s
        if replica.runs_ahead and engine.tally.samples and not replica.has_unused and engine.layers.is_whole:
            return self._step_ahead(replica, busy_s)
        replica.start_sums()
        told = self._tell(busy_s) if engine.world > 1 else None
        wait_s, norm, loss_sum = engine.layers.reduce(replica)
        told = told or self._tell(busy_s, loss_sum)
        pulses = [Pulse(*row) for row in told.wait()]
        if any(pulse.has_unused for pulse in pulses):
            replica.drop_unused()
        verdict = decide_step(pulses, norm, engine._unit, engine.config.clip)
        engine._advance(sum(int(pulse.rows) for pulse in pulses))
        engine.stopping = any(pulse.wants_stop for pulse in pulses)
        exchanged = time.perf_counter()
        event = self._apply(pulses, verdict, busy_s + wait_s)
        self._optimizer_s = time.perf_counter() - exchanged
        return self._end(event, pulses)

    def _step_ahead(self, replica: Replica, busy_s: float) -> StepDone | StepSkipped:
        """As step(), with the verdict reached on the GPU, which has its next work before we know of it."""
        engine, tally = self._engine, self._engine.tally
        replica.finish()
        engine._advance(tally.rows)
        engine._set_lr(replica)
        said = replica.apply_unless_bad(tally.loss_sum, 1 / (tally.samples * engine._unit), engine.config.clip)
        if engine.loader is not None:
            engine.loader.fetch_ahead()
        norm, was_bad, loss_sum = torch.stack([*said, tally.loss_sum]).tolist()
        if was_bad:  # perhaps only to float32
            norm = replica.norm().item()
        else:
            replica.drop()
        pulses = [Pulse(*row) for row in self._tell(busy_s, loss_sum).wait()]
        engine.stopping = bool(pulses[0].wants_stop)
        verdict = decide_step(pulses, norm, engine._unit, engine.config.clip)
        return self._end(self._apply(pulses, verdict, busy_s, is_done=not was_bad), pulses)

    def _tell(self, busy_s: float, loss_sum: float | None = None) -> Rows:
        """What this worker says of the step, and hears from all, while the sums are under way."""
        engine = self._engine
        busy_s, send_s = engine.layers.times(busy_s, self._optimizer_s)
        mine = Pulse(
            samples=engine.tally.samples,
            loss_sum=engine.tally.loss_sum.item() if loss_sum is None else loss_sum,
            rows=engine.tally.rows,
            busy_s=busy_s,
            has_unused=engine._prepared().has_unused,
            wants_stop=engine._wants_stop,
            send_s=send_s,
        )
        return engine.link.start_gather(mine)

    def _apply(
        self, pulses: list[Pulse], verdict: Verdict, took_s: float, *, is_done: bool = False
    ) -> StepDone | StepSkipped:
        """`is_done`: the optimizer has stepped already, or has left it out."""
        engine = self._engine
        replica = engine._prepared()
        if verdict.fault is not None:
            replica.drop()
            replica.restore_buffers()
            engine.skipped += 1
            engine._skipped_in_a_row += 1
            engine._skipped_rows += sum(int(pulse.rows) for pulse in pulses)
            return StepSkipped(
                step=engine.step_number, loss=verdict.loss, in_a_row=engine._skipped_in_a_row, reason=verdict.fault
            )
        engine._skipped_in_a_row = 0
        if not is_done:
            engine._set_lr(replica)
            replica.apply(verdict.scale)
        replica.average_buffers(engine.layers.samples_of_lane(pulses) / verdict.samples)
        return StepDone(
            step=engine.step_number,
            epoch=engine.loader.position.epoch if engine.loader is not None else 0,
            rows_seen=engine.rows_seen,
            samples=verdict.samples,
            loss=verdict.loss,
            lr=float(replica.optimizer.param_groups[0]["lr"]),
            grad_norm=verdict.norm,
            seconds=time.perf_counter() - engine.tally.started,
            workers=engine.layers.worker_steps(pulses, took_s),
        )

    def _end(self, event: StepDone | StepSkipped, pulses: list[Pulse]) -> StepDone | StepSkipped:
        engine = self._engine
        engine.copies.tell()
        engine.events.emit(event)
        engine._insist_on_progress(event)
        engine._version += 1
        self._share_anew(engine.layers.lane_pulses(pulses))
        engine._tell_agreed(engine.step_number - 1)
        engine.copies.refresh_if_due()
        engine._start_of_step()
        engine.layers.end_of_step()
        return event

    def _share_anew(self, pulses: list[Pulse]) -> None:
        """Workers of different speeds get parts of different sizes."""
        engine = self._engine
        if self._balance is None or engine.loader is None:
            return
        changed = self._balance.report([int(pulse.rows) for pulse in pulses], [pulse.busy_s for pulse in pulses])
        if changed is not None:
            parts, reason = changed
            engine.loader.shares = tuple(float(part) for part in parts)
            engine.events.emit(Decided(step=engine.step_number, rows=tuple(parts), reason=reason))

    # Where the run stands

    def rows_of_schedule(self) -> int:
        return self._engine.rows_seen

    def settle(self) -> None:
        """All replicas are equal after every step."""

    def on_loaded(self) -> None:
        pass

    def standing(self) -> Standing:
        return {}

    def stand(self) -> None:
        pass

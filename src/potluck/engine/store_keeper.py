"""StoreKeeper: a worker that meets the others in a store keeps itself there, and resumes from that if it is killed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from potluck.engine.checkpointing import check_position, position_as_json, restore_position
from potluck.engine.prepare import training_settings
from potluck.replica.model_checks import describe_model
from potluck.save.parts import leave_out
from potluck.save.store_run import StoreRun
from potluck.store.sessions import Tenant

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts
    from potluck.replica.staged import StagedReplica


class StoreKeeper:
    def __init__(self, run: "RunParts", store_run: StoreRun) -> None:
        self._run = run
        self.store_run = store_run
        self._replica: StagedReplica | None = None
        self._has_saved = self._has_met = False
        self.is_restored = False
        """Whether this worker was killed, and continues from where it was in a run that has continued meanwhile."""

    def introduce(self, model: nn.Module, optimizer: Optimizer, dataset: Any, about: dict[str, Any]) -> None:
        """Says what this worker brings before anything else: the store may be another run's."""
        if self._has_met:
            return
        run = self._run
        settings = training_settings(optimizer, run.config.clip) | {
            "model": describe_model(model) if isinstance(model, nn.Module) else "",
            "rows": len(dataset),
            "batch": about["batch_size"],
            "seed": about["seed"],
            "policy": run.wanted.policy.kind,
            "step.precision": run.config.precision,
            "workers": run.link.world,
        }
        name = about.get("name") or Path(sys.argv[0]).name or "a script"
        data = run.look_at_data(dataset)
        self.store_run.meet(Tenant(name=name, settings=settings, data=data, out=about.get("out")))
        self._has_met = True
        self.is_restored = self.store_run.kept is not None

    def begin(self, replica: "StagedReplica") -> None:
        """Resumes from what this worker had kept before it was killed; or keeps it for the first time."""
        self._replica, store_run, run = replica, self.store_run, self._run
        if store_run.kept is None:
            if store_run.every is not None:
                self._keep(replica)
            return
        notes = store_run.kept.notes
        store_run.kept.load_into(replica.own_part, run.base)
        replica.remember_buffers()
        check_position(run, Path(f"What worker {run.link.rank} kept of itself"), notes["standing"])
        restore_position(run, notes["standing"])
        run.progress.begin_ledger([(start, end) for start, end in notes["ledger"]])
        replica.passes, run.loop.memo = notes["passes"], notes["memo"]
        store_run.link.log.is_open = False
        store_run.kept = None
        run.step.begin()

    def on_saved(self) -> None:
        self._has_saved = True  # after a restart this must not run again: it would find the step done

    def after_agreement(self) -> None:
        """Keeps this worker if it is time, after all that a loop does between two steps."""
        store_run, run, replica = self.store_run, self._run, self._replica
        assert replica is not None
        if store_run.every is None:
            store_run.forget(replica.passes)
        elif self._has_saved or run.progress.step_number % store_run.every == 0:
            self._keep(replica)
        self._has_saved = False

    def _keep(self, replica: "StagedReplica") -> None:
        run = self._run
        notes = {
            "standing": position_as_json(run),
            "ledger": run.progress.ledger.ranges,
            "memo": run.loop.memo,
            "passes": replica.passes,
        }
        without, told = leave_out(replica)
        self.store_run.keep(replica.own_part, notes | told, replica.passes, without)

    def close(self, *, has_failed: bool) -> None:
        (self.store_run.close if has_failed else self.store_run.end)()

"""Lifecycle: how a run begins, is saved, evaluated and ends. GroupLifecycle: its workers do so among themselves.

HostLifecycle (host_lifecycle.py) answers the same calls where a host does; what each is for is said here.
"""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

import torch

from potluck.agree.terms import UNCOMPARED, Fingerprint, differing_data
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare
from potluck.data.source import HeldOut
from potluck.engine.look_sums import Figures, add_up, means_of
from potluck.engine.looking_weights import LookingWeights
from potluck.engine.losses import LossFunction, looking
from potluck.engine.rounds import Rounds
from potluck.engine.run_state import RunState
from potluck.engine.saved_position import check_position, restore_position, take_position
from potluck.environment import ONLY
from potluck.errors import Interrupted, WorkerLost
from potluck.events import EpochDone
from potluck.fleet.ledger import Ledger, prove
from potluck.link.link import loss_of_peer
from potluck.save.whole_state import is_in_parts, whole_state
from potluck.words import say

if TYPE_CHECKING:
    from potluck.engine.host_lifecycle import HostLifecycle

Lifecycle = Union["GroupLifecycle", "HostLifecycle"]


class GroupLifecycle:
    is_led = False
    """Whether a host leads this worker: it keeps the run's folder, and hands out the work."""
    is_replaying = False
    """Whether the step being applied was taken by others before this worker joined."""

    def __init__(self, run: RunState, rounds: Rounds) -> None:
        self._run = run
        self._rounds = rounds
        self._folder: Path | None = None
        """The folder that load() was given."""
        self._saved_last: tuple[Path, int] | None = None
        self.looking: LookingWeights | None = None
        """Once there is a replica."""
        self.rank, self.world = run.link.rank, run.link.world
        self.keeps_folder = self.rank == 0
        """Whether this worker writes the run folder."""
        run.speaks = self.rank == 0 or ONLY in os.environ
        run.say = say if run.speaks else lambda sentence: None

    @property
    def version(self) -> int:
        """Agreements so far."""
        return self._run.at.version

    def _within(self, call: str) -> AbstractContextManager[None]:
        """A call that every worker must make: where some have not, the others say so."""
        return self._run.link.within(call, self._run.step_number)

    def begin(self) -> None:
        """The replica is there, and the loader if the data are ours."""

    def begin_run(self, epochs: int) -> None:
        """Called before the first epoch."""
        if (done := self._run.position.epoch) >= epochs:
            self._run.notice(
                f"This run has done {done} of its epochs, and {epochs} {'was' if epochs == 1 else 'were'} asked for:"
                " nothing is left to train. Ask for more epochs to continue it."
            )

    def end_of_epoch(self) -> None:
        """Ends the epoch: all of its rows are done."""
        run = self._run
        assert run.loader is not None
        comes_next = run.loader.digest_of_next()
        weights_now = run.prepared().fingerprint()
        mine = json.dumps([weights_now, run.ledger.ranges, comes_next, run.loader.seen()]).encode()
        with self._within("the end of an epoch"):
            told = [json.loads(data) for data in run.link.gather_bytes(mine)]
        ranges = ((a, b) for _, ranges, _, _ in told for a, b in ranges)
        proof = prove(ranges, run.loader.rows, run.loader.order.counted)
        same = len({row[0] for row in told}) == 1
        self._compare_orders(run.loader, [row[2] for row in told])
        compared = self._compare_streams(run.loader, [row[3] for row in told])
        weights = "all workers hold the same weights"
        if not same:
            run.prepared().align()
            weights = "THE WORKERS' WEIGHTS HAD DRIFTED APART, and are worker 0's again"
        skipped = f", {run.at.skipped_rows:,} of them in steps that were skipped" if run.at.skipped_rows else ""
        seen = compared or ("" if run.data else UNCOMPARED)
        run.ledger = Ledger()
        epoch = run.loader.position.epoch
        run.last_epoch = EpochDone(
            epoch=epoch,
            used=proof.used,
            total=proof.total,
            same_weights=same,
            sentence=f"Epoch {epoch + 1}: {proof}{skipped}" + (f"{seen}; {weights}." if self.world > 1 else "."),
        )
        run.events.emit(run.last_epoch)

    def _compare_orders(self, loader: Loader, digests: list[str]) -> None:
        """Compare the orders of the next epoch: none may be begun in different orders."""
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            loader.fault = (
                f"Epoch {loader.position.epoch + 2} comes in another order on worker {other} than on worker 0. Seed the"
                " sampler alike on every worker, and let it draw from its own generator, or from none."
            )

    def _compare_streams(self, loader: Loader, seen: list[Fingerprint]) -> str:
        """Compare what every worker has read of a stream. Returns the end of the proof's sentence; empty for other
        data."""
        if not seen[0]:
            return ""
        for rank, theirs in enumerate(seen):
            where = differing_data(seen[0], theirs, ("worker 0's", f"worker {rank}'s"))
            if where is not None:
                loader.fault = (
                    f"The stream gave worker {rank} other rows than worker 0 in epoch {loader.position.epoch + 1}:"
                    f" {where}. It must give every worker the same rows: seed what it shuffles by."
                )
                return ", but NOT THE SAME ROWS STOOD THERE FOR ALL WORKERS"
        common = set.intersection(*({*each.get("marks", {})} for each in seen))
        return f", and the rows at {len(common)} of them were the same for all workers" if common else ""

    def end_early(self, folder: Path | None) -> NoReturn:
        """The run was stopped: what is done is saved, and a sentence says where."""
        folder = folder or self._folder
        where = " Nothing was saved: name a folder for that, as in fleet.epochs(3, 'runs/mine')."
        if folder is not None:
            self._save_once(folder)
            where = f" Saved in {folder}, from where fleet.load() continues."
        raise self._run.interrupted(self.last_words() + where)

    def end_well(self, folder: Path | None) -> None:
        if (folder := folder or self._folder) is not None:
            self._save_once(folder)

    def end_with_script(self) -> None:
        """A script that closes nothing has ended: close() waits for what is still being written."""

    def _save_once(self, folder: Path) -> None:
        if self._saved_last != (folder, self._run.step_number):
            self.save(folder, keep_last=2)
        self.wait_for_saves()

    def end_for_all(self) -> None:
        """The run ends here, though rows are left: all workers have found so."""

    def as_agreed(self) -> AbstractContextManager[None]:
        """The model as all agreed on it last."""
        return nullcontext()

    def last_words(self) -> str:
        """Where the run stands when it is stopped."""
        return f"Stopped after step {self._run.step_number}."

    def request_stop(self) -> None:
        self._run.wants_stop = True

    def seed_random(self, seed: int) -> None:
        self._run.seed_random(seed)

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        with self._within("fleet.evaluate()"):
            return self._evaluate(loss_of, looked_at)

    def _evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        self._rounds.settle()
        run, pipelines = self._run, self._run.grid.pipelines
        replica, rows = run.prepared(), looked_at.rows
        shares = run.composition.shares or (1.0,) * pipelines
        if run.loader is not None and not self._rounds.has_fixed_shares:
            shares = run.loader.shares
        batch = BatchConfig(size=max(1, len(rows)), micro_size=max(1, looked_at.batch_size // pipelines))
        share = BatchShare(shares, run.grid.pipeline, in_step=replica.in_step)
        loader = Loader(rows, batch, share, device=run.device, collate=looked_at.collate)
        with looking(replica.model), run.looks_with(), torch.no_grad():
            mine = replica.evaluate(loss_of, loader)
        total = add_up(run.link.gather_bytes(mine.to_bytes()))
        return means_of(total.names, total.figures, total.samples)

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all workers who are here, in order of rank."""
        return self._run.link.gather_bytes(data)

    def save(self, folder: Path, keep_last: int) -> None:
        run = self._run
        with self._within("fleet.save()"):
            self._rounds.settle()
            standing, kept = take_position(run)
            run.saves.save(folder, run.prepared(), standing, keep_last, kept)
        self._saved_last = folder, standing["step"]
        if run.keeper is not None:
            run.keeper.on_saved()

    def state_dict(self) -> dict[str, Any]:
        run, looking = self._run, self.looking
        assert looking is not None
        with self._within("fleet.state_dict()"):
            if is_in_parts(run.prepared()) or run.composition.window is not None or looking:
                run.link.meet("fleet.state_dict()", run.notice)
            self._rounds.settle()
            with looking.in_place():
                return whole_state(run.link, run.prepared(), run.names)

    def load(self, folder: Path) -> bool:
        self._folder = folder
        run = self._run
        with self._within("fleet.load()"):
            standing = run.saves.load(folder, run.prepared(), partial(check_position, run))
        if standing is None:
            return False
        restore_position(run, standing)
        run.loaded_from = Path(standing["path"])
        self._saved_last = folder, run.step_number
        if run.loader is not None and run.loader.position.row >= run.loader.rows:
            run.loader.end_epoch()
        if standing["workers"] != self.world:
            run.seed_random(standing["seed"])
        return True

    def wait_for_saves(self) -> None:
        with self._within("fleet.wait_for_saves()"):
            self._run.saves.wait_together()

    def close(self, error: BaseException | None) -> None:
        """Finishes what is still being written, and leaves. `error`: what ended the loop."""
        run = self._run
        if isinstance(error, WorkerLost) or (error is not None and loss_of_peer(error) is not None):
            run.saves.one_is_gone()
        if run.keeper is not None:
            run.keeper.close(has_failed=error is not None and not isinstance(error, Interrupted))
        if run.replica is not None:
            run.replica.close()
        try:
            run.saves.wait()
            if error is None:
                run.link.end_well()
        finally:
            run.link.close()

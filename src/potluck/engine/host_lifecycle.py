"""HostLifecycle: a host keeps the run. It has the folder, hands out work, and takes checkpoints.

What is said to it and heard from it passes through MemberDriver, which calls here for what a run's state is.
"""

import atexit
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from potluck.data.plan import BatchConfig, plan_step
from potluck.data.rows import arrived, read_batch
from potluck.data.source import HeldOut
from potluck.engine.look_sums import Figures, LookSums, add_up, means_of
from potluck.engine.looking_weights import LookingWeights
from potluck.engine.losses import LossFunction, looking
from potluck.engine.member_driver import MemberDriver
from potluck.engine.node_client import NodeClient
from potluck.engine.run_state import RunState
from potluck.engine.saved_position import check_position, restore_position, take_position
from potluck.environment import QUIET, TAKEN_BACK, why_leaving
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.events import Sampled
from potluck.fleet.client import Client
from potluck.fleet.description import Description
from potluck.fleet.gathering import MOST_BYTES
from potluck.fleet.ledger import Ledger
from potluck.save.saves import Saves
from potluck.save.whole_state import whole_state
from potluck.signals import is_taken_back
from potluck.tensor_bytes import join_bytes, split_bytes

if TYPE_CHECKING:
    from potluck.engine.host_rounds import HostWork
    from potluck.engine.joined_view import JoinedView
from potluck.wire.messages import Wrote


class HostLifecycle:
    is_led = True
    keeps_folder = False
    work: "HostWork"
    """Computes this worker's part, once there is a replica."""
    description: Description
    """Once there is a loader."""
    looking: LookingWeights
    """Once there is a replica."""

    def __init__(self, run: RunState, client: Client | NodeClient) -> None:
        self.run = run
        self.client = client
        self.driver = MemberDriver(client, run.link, self)
        self._place, self._places = 0, 1
        """Which of the workers this is, and how many there are, as of the last agreement."""
        self.was_moved = False
        """Whether the run was moved to another epoch than the loop was in."""
        self._view: JoinedView | None = None
        run.speaks = QUIET not in os.environ and run.link.rank == 0
        run.say = client.say
        run.saves = Saves(run.link, run.events, is_gone=lambda: self.driver.member.is_over)
        run.events.on(Sampled, self._send_sample)
        client.on_stop = self._on_stop
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """0 on the worker that speaks for all, for instance to print. It may change with each agreement."""
        return self._place + self.run.link.rank * self._places

    @property
    def world(self) -> int:
        """How many processes there are, where all workers are of as many as this one is."""
        return self._places * self.run.link.world

    def take_place(self, ids: list[int]) -> None:
        """All that take part in an agreement hear the same list of ids, in order of rank, the leader's first."""
        if self.client.worker_id in ids:
            self._place, self._places = ids.index(self.client.worker_id), len(ids)

    @property
    def version(self) -> int:
        """Agreements so far, which is what the host calls a step; under Sync all take each of them together."""
        return self.driver.member.version

    @property
    def is_replaying(self) -> bool:
        return self.driver.member.is_replaying

    @property
    def _is_over(self) -> bool:
        return self.driver.member.is_over

    @property
    def _has_left(self) -> bool:
        """This worker has left the run, which continues."""
        return self.driver.member.left

    # The run

    def join(self) -> None:
        run = self.run
        if not self.driver.has_joined:
            self.driver.join()
            if not run.caller.has_trainer and run.speaks and not self._is_over:
                from potluck.engine.joined_view import JoinedView  # only a person who looks waits for rich

                self._view = JoinedView(run, run.prepared().parameter_count, self._places)

    def begin(self) -> None:
        pass

    def begin_run(self, epochs: int) -> None:
        """The host says where the run stands."""
        self.join()
        if not self.work.is_repeatable:
            self.keep_the_end()

    def keep_the_end(self) -> None:
        """The last agreement is on the host's disk before any loop is over with it: nobody can be made to compute that
        window again then, which would have other bits. Until it is kept, the run may go back, and this worker with it.
        """
        run = self.run
        if not run.is_at_the_end:
            return
        self.save(Path(), keep_last=1)
        self.wait_for_saves()
        if self._has_left or not self.driver.member.is_in:  # the run may yet end elsewhere, or has
            ended = "The run has ended without this worker; the host has its weights."
            words = self.last_words() if self._has_left else ended
            self.close(None)
            raise run.interrupted(words)
        if not run.is_at_the_end and not self._is_over:
            run.stopping = False  # the stop came after the end

    def end_of_epoch(self) -> None:
        """The host has proved the epoch, and reported that with its last step."""
        run = self.run
        assert run.loader is not None
        run.ledger = Ledger()
        if run.last_epoch is not None and run.last_epoch.epoch == run.loader.position.epoch:
            run.events.emit(run.last_epoch)

    def end_early(self, folder: Path | None) -> NoReturn:
        """Saves what is done if needed, tells the host that this worker leaves, and says so."""
        if not self._has_left:
            self.end_well(folder)
        words = self.last_words()
        self.close(None)
        raise self.run.interrupted(words)

    def end_well(self, folder: Path | None) -> None:
        self.save(Path(), keep_last=2)
        self.wait_for_saves()

    def end_with_script(self) -> None:
        """The last weights are on the host's disk before this worker says that it has finished."""
        if self.driver.has_joined and not self.client.is_closed:
            self.end_well(None)

    def end_for_all(self) -> None:
        self.driver.member.ends_for_all = True

    def as_agreed(self) -> AbstractContextManager[None]:
        return self.work.as_agreed()

    def last_words(self) -> str:
        member, step = self.driver.member, self.run.step_number
        fault = member.unsaved.error if member.unsaved.step > member.saved.step else ""
        if self._has_left:
            lost = f" {fault.removesuffix('.')}, and this worker may have had the only weights." if fault else ""
            return f"Left the run after step {step}; it continues without this worker.{lost}"
        return f"The host stopped the run after step {step}, {fault or 'and has saved it.'}"

    def _send_sample(self, sample: Sampled) -> None:
        self.client.send(Wrote(sample.step, sample.prompt, sample.text))

    def request_stop(self) -> None:
        self.client.ask_to_stop()

    def _on_stop(self) -> None:
        self.run.wants_stop = True
        self.driver.member.wants_stop = why_leaving(TAKEN_BACK if is_taken_back() else "asked to stop")

    def seed_random(self, seed: int) -> None:
        """Work that is handed out draws its own numbers: nothing to do."""

    # Looking, saving

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        """The means over a dataset, in ranges that the host hands out; they do not depend on who computes which.

        Where this worker has no part in it they are no numbers: then it looks at one row, to know which there are.
        """
        self.join()
        run, rows = self.run, looked_at.rows
        if not len(rows):
            return math.nan
        replica, link, collate = run.prepared(), run.link, looked_at.collate
        whole, shares = BatchConfig(size=len(rows)), (1.0,) * link.world

        def sum_of(start: int, end: int) -> LookSums:
            """Sum up these rows; each rank evaluates its own part."""
            total = LookSums()
            # Only here: between two ranges this worker may be asked for its state.
            with run.looks_with(), torch.no_grad():
                for micro in plan_step(start, end, whole, shares, link.rank, in_step=replica.in_step):
                    batch = arrived(read_batch(rows, list(range(micro.start, micro.end)), collate), run.device)
                    total.add(replica.loss(loss_of, batch), batch, counts=micro.counts)
            return add_up(link.gather_bytes(total.to_bytes()))

        has_part = not (self.is_replaying or self._has_left or (run.stopping and self._is_over))
        with self.work.as_agreed(), looking(replica.model):
            found = None
            if has_part:
                found = self.driver.evaluate(len(rows), min(len(rows), max(1, looked_at.batch_size)), sum_of)
            if found is None:
                one = sum_of(0, 1)
                found = means_of(one.names, [math.nan] * len(one.figures), 1.0)
        return found

    def exchange(self, data: bytes) -> list[bytes]:
        """Through the host. Of a worker that is not where the others are: its own alone."""
        self.join()
        own = join_bytes(self.run.link.gather_bytes(data))
        if len(own) > MOST_BYTES:
            raise ConfigError(
                f"Under a host, a worker may give {MOST_BYTES:,} bytes to fleet.mean() or fleet.gather(), and these are"
                f" {len(own):,}. Give fewer at a time."
            )
        try:
            return [each for worker in self.driver.gather(own) for each in split_bytes(worker)]
        except ValueError as error:
            raise PotluckError(f"What a worker gave to all cannot be read: {error}.") from None

    def save(self, folder: Path, keep_last: int) -> None:
        """The host keeps checkpoints in its own run folder: one worker sends its state while training continues."""
        if not self.work.is_repeatable and self.version and self.driver.member.save_due >= self.version:
            return  # a window has many steps, and one agreement
        self.join()
        # A worker that has just caught up with the end would leave before it is saved, and end the run for all.
        is_past = self.is_replaying and not self.run.is_at_the_end
        if not (is_past or self._has_left or self._is_over):
            self.driver.save(keep_last)

    def state_dict(self) -> dict[str, Any]:
        """On the worker that speaks for all; where several ranks are one worker, on the first of its."""
        self.join()
        with self.work.as_agreed(), self.looking.in_place():
            found = whole_state(self.run.link, self.run.prepared(), self.run.names)
        return found if self.rank == 0 else {}

    def keep(self) -> None:
        """A user's own loop need not think of saving: the host gets a checkpoint as often as that costs little."""
        run = self.run
        if run.caller.has_trainer or self.is_replaying or self._has_left or self._is_over or run.stopping:
            return
        if run.link.gather_rows([float(self.driver.member.is_keep_due(time.monotonic()))])[0][0]:
            self.save(Path(), keep_last=2)

    def load(self, folder: Path) -> bool:
        """Whether the run that was joined is past its beginning; its weights are here then."""
        self.join()
        return self.version > 0

    def wait_for_saves(self) -> None:
        """Waits until the host has the last checkpoint on its disk, however often it has to try."""
        self.driver.await_saves(until_kept=True, speaks=self.run.speaks)

    # What MemberDriver asks for

    def describe(self) -> Description:
        caller = self.run.caller
        limit = caller.rows_limit or 0
        return replace(self.description, training=caller.training, rows_limit=limit, told=caller.about)

    def load_state(self, folder: Path) -> tuple[int, int]:
        """From a folder that all ranks see: the version and the step that it is of."""
        run = self.run
        standing = run.saves.load(folder, run.prepared(), partial(check_position, run))
        assert standing is not None and run.loader is not None
        run.link.gather_rows([0.0])  # until all ranks have read it
        self.work.start_anew()
        self.was_moved |= standing["epoch"] != run.loader.position.epoch
        restore_position(run, standing)
        return run.at.version, run.at.step

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """A copy in host memory now. What is returned writes it below the folder, and says where, if that is ours."""
        run = self.run
        with self.looking.aside(), self.work.as_agreed():
            standing, kept = take_position(run)
            write = run.saves.take(folder, run.prepared(), standing, kept, with_randoms=False)
            self.driver.check_weights()
        assert write is not None
        return write

    # The end

    def close(self, error: BaseException | None) -> None:
        """Tells the host that this worker has finished; the run ends when all who hold its weights have."""
        self._close(finished=error is None or isinstance(error, Interrupted))
        if self.run.replica is not None:
            self.run.replica.close()

    def _close_at_exit(self) -> None:
        """A script that ended by an exception has finished nothing: its connection breaks, as if it had been killed."""
        self._close(finished=getattr(sys, "last_value", None) is None)

    def _close(self, *, finished: bool) -> None:
        atexit.unregister(self._close_at_exit)
        if self.client.is_closed:
            return
        self.driver.close(finished=finished)
        if self._view is not None:
            self._view.close()
        if finished:
            self.run.link.close()

"""Carries out a person's orders on the live page: pause, resume, save now, let a worker go. Pure.

An order is carried out as if the run itself had come to it: a pause waits for the step under way, a save is a due
checkpoint, and a worker that is let go leaves as it does by Ctrl-C. Each is told as an event, also where it is refused.
"""

from dataclasses import dataclass

from potluck.events import Ordered
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.effects import Effect, Emit
from potluck.fleet.ending import Ending
from potluck.fleet.saving import Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.wire.messages import Leave


@dataclass
class Orders:
    run: CoordinatorState
    rounds: StepDispatcher
    saving: Saving
    ending: Ending

    def carry_out(self, action: str, worker: int | None) -> list[Effect]:
        if self.run.finished or self.run.stopping:
            return [self._tell(action, "The run is ending, and takes no orders any more.", worker, done=False)]
        match action:
            case "pause":
                return self._pause()
            case "resume":
                return self._resume()
            case "save":
                return self._save()
            case "let_go":
                return self._let_go(worker)
        return []

    def _tell(self, action: str, sentence: str, worker: int | None = None, *, done: bool = True) -> Emit:
        step = self.run.steps_done
        return Emit(Ordered(action=action, step=step, done=done, sentence=sentence, worker=worker))

    def _pause(self) -> list[Effect]:
        if self.run.paused:
            return [self._tell("pause", "The run is paused already.", done=False)]
        self.run.paused = True
        after = "once the step under way is done" if self.rounds.now is not None else "at once"
        return [self._tell("pause", f"Paused by a person: nothing is handed out from now on, {after}.")]

    def _resume(self) -> list[Effect]:
        if not self.run.paused:
            return [self._tell("resume", "The run is not paused.", done=False)]
        self.run.paused = False
        return [self._tell("resume", "Resumed by a person."), *self.rounds.start()]

    def _save(self) -> list[Effect]:
        step = self.run.steps_done
        if not self.run.standing.version or not self.run.membership.holders:
            return [self._tell("save", "There is nothing to save yet.", done=False)]
        if self.saving.is_last_kept:
            return [self._tell("save", f"Step {step:,} is saved already.", done=False)]
        if self.saving.is_under_way:
            return [self._tell("save", "A checkpoint is on its way to the disk already.", done=False)]
        return [self._tell("save", f"A person asked for a checkpoint after step {step:,}."), *self.saving.save_now()]

    def _let_go(self, worker: int | None) -> list[Effect]:
        found = [m for m in self.run.membership.members.values() if m.worker_id == worker]
        if not found or found[0].leaving:
            return [self._tell("let_go", "That worker is not here any more.", worker, done=False)]
        (member,) = found
        told = self._tell("let_go", f"{member.name} was let go by a person.", worker)
        member.let_go = True
        return [told, *self.ending.on_leave(member, Leave(0, "it was let go by a person"))]

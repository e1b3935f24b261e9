"""TensorBoard: curves in the run folder, written by its own writer of event files. Imports no torch."""

from tensorboard.compat.proto.event_pb2 import Event as Entry
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as Curves
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from potluck.trackers.known import Ended, TrackedRun


class _TensorBoard:
    def start(self, run: TrackedRun) -> str:
        folder = run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if run.from_step:  # what an earlier part of the run wrote of later steps is done again
            again = SessionLog(status=SessionLog.START)
            self._writer.add_event(Entry(step=run.from_step + 1, session_log=again))
        return f"see the curves with tensorboard --logdir {folder}"

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None:
        values = [Curves.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Entry(step=step, wall_time=time_s, summary=Curves(value=values)))

    def finish(self, how: Ended) -> None:
        self._writer.close()


make = _TensorBoard

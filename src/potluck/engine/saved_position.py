"""Where a run stands, as a checkpoint saves and restores it. The model's own state is up to save/."""

from dataclasses import replace
from pathlib import Path

from potluck.agree.records import Position
from potluck.agree.terms import differing_data
from potluck.data.loader import Loader
from potluck.engine.run_state import RunState
from potluck.errors import CheckpointError
from potluck.save.saves import TENSORS, KeptTensors, Standing
from potluck.save.state import tensors_json
from potluck.words import plural


def take_position(run: RunState) -> tuple[Standing, KeptTensors]:
    """Where the run stands and what is kept beside the model, and the tensors among that."""
    tensors: KeptTensors = {}
    loader = run.loader
    position = run.at
    saved = position.to_dict() | {
        "rows_in_epoch": loader.rows if loader is not None else 0,
        "seed": loader.seed if loader is not None else 0,
        "batch": loader.batch.size if loader is not None else 0,
        "data": run.data or {},
        "stream": loader.saved_stream() if loader is not None else [],
        "order": loader.order.digest(position.epoch, loader.seed) if loader is not None and position.row else "",
        "scheduler": None,
    }
    return saved | run.kept.save(tensors), tensors


def position_as_json(run: RunState) -> Standing:
    standing, tensors = take_position(run)
    return standing | {TENSORS: tensors_json(tensors)}


def check_position(run: RunState, path: Path, standing: Standing) -> None:
    """Checks a saved position before anything is loaded."""
    if run.scheduled is not None:
        run.scheduled.check(standing.get("scheduler"), str(path))
    if run.loader is not None and standing["rows_in_epoch"] not in (0, run.loader.rows):
        raise CheckpointError(
            f"{path} stands in an epoch of {plural(standing['rows_in_epoch'], 'row')}, and the data now has"
            f" {run.loader.rows:,}. Continue with the same data, or start anew in another folder."
        )
    if run.loader is not None and standing["row"] and standing.get("order"):
        own = run.loader.order.digest(standing["epoch"], standing["seed"])
        if own not in ("", standing["order"]):
            raise CheckpointError(
                f"{path} stands in the middle of epoch {standing['epoch'] + 1}, and the sampler now gives that epoch in"
                " another order: some rows would be used twice. Give the sampler the generator it had; one that counts"
                " its epochs itself needs set_epoch()."
            )


def restore_position(run: RunState, standing: Standing) -> None:
    """Moves the run to a saved position."""
    position = Position.from_dict(standing)
    run.seek(position if run.loader is not None else replace(position, epoch=0, row=0, left=()))
    if run.loader is not None:
        _tell_of_changes(run, standing, run.loader)
        run.loader.restore(standing["seed"], standing.get("stream", []))
    run.kept.load(standing)
    run.state.tell_loaded()
    # What was trained before the checkpoint is rank 0's to tell, since those workers may be gone.
    run.begin_ledger([(0, standing["row"])] if run.link.rank == 0 else [])


def _tell_of_changes(run: RunState, standing: Standing, loader: Loader) -> None:
    """Say what is not as it was when this was saved: that is allowed. Older checkpoints do not know all of it."""
    step, changes = standing["step"], []
    where = differing_data(standing.get("data", {}), run.data or {}, ("the checkpoint's", "yours"))
    if where is not None:
        changes.append(
            f"The data are OTHER DATA than those this run was trained on up to step {step}: as many rows, but"
            f" {where}. It continues with them. If that is not what you want, stop it, and give it the data it had."
        )
    if standing["seed"] != loader.seed:
        changes.append(
            f"This run was begun with seed {standing['seed']}, and keeps it: the order of its rows depends on it."
            f" Seed {loader.seed}, which was given now, is not used."
        )
    if standing.get("batch") not in (None, 0, loader.batch.size):
        changes.append(
            f"Batches had {standing['batch']:,} rows up to step {step}, and from here on {loader.batch.size:,}."
        )
    for sentence in changes:
        run.notice(sentence)

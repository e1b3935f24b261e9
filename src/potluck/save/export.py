"""potluck export: the model of a checkpoint as one plain safetensors file, under the names that it has in Python.

Streams block by block, so a model of any size needs no more memory than one block. Imports no torch.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from potluck.errors import CheckpointError, ConfigError
from potluck.files import written_aside
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_folder import AVERAGE, BASE, MODEL, OPTIMIZER
from potluck.sharding.stored import SIZES, SafetensorsHeader, TensorFiles, make_header, write_all
from potluck.words import plural, say, size

BLOCK_BYTES = 16 << 20

Sources = dict[str, tuple[TensorFiles, str]]
"""Where each tensor is, by its name in Python: the files, and its name there."""
Rename = Callable[[str], str]
"""Maps the name that a tensor has in Python to the one that it has in the file."""
Begin = Callable[[str, int], Callable[[int], None]]
"""Takes a word and a number of bytes, shows a bar, and returns what advances it by a number of bytes."""


def export(source: Path, out: Path, *, ema: bool = False, rename: Rename = str, shown: Path | None = None) -> int:
    """Write the model of one checkpoint, or of the newest one of a run. `ema`: the average of its weights, where one
    was kept. `shown`: the path that a person is told, if `out` is on its way there."""
    console = Console(stderr=True, highlight=False)
    _check_place(out)
    with _progress(console) as begin:
        path, body = _find(source, console, begin)
        tensors, numbers = _write_model(path, body, out, begin, ema=ema, rename=rename)
    what = "the average of their values by" if ema else "as they were after"
    told = f"{plural(tensors, 'tensor')} of {plural(numbers, 'number')}, {what} step {body['step']:,}"
    console.print(f"Wrote {shown or out}: {told}.", soft_wrap=True)
    if (base := body.get(BASE)) is not None:
        left_out = f"{plural(base['tensors'], 'tensor')} of {size(base['bytes'])}, by their hash {base['hash']}"
        console.print(
            f"It is what was trained. The frozen base below it ({left_out}) is in no checkpoint: load it as the run"
            " did, and this over it, with load_state_dict(..., strict=False).",
            soft_wrap=True,
        )
    return 0


def write_plain(checkpoint: Path, out: Path) -> None:
    """Write the model of a checkpoint without a word."""
    _write_model(checkpoint, checkpoint_folder.check(checkpoint), out, lambda what, total: lambda done: None)


def write_best(checkpoint: Path) -> None:
    """Write the model of a checkpoint that is the best so far as best.safetensors in the run folder, for programs that
    know nothing of checkpoints. Says why that failed, if it did: the checkpoint is whole all the same."""
    above = checkpoint.parent
    out = (above.parent if above.name == "checkpoints" else above) / checkpoint_folder.BEST_FILE
    try:
        body = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["body"]
        _write_model(checkpoint, body, out, lambda what, total: lambda done: None, ema=None)
    except (OSError, CheckpointError) as error:
        say(f"{out} is not the best model: {error} The checkpoint {checkpoint} has it.")


def _write_model(
    path: Path, body: dict[str, Any], out: Path, begin: Begin, *, ema: bool | None = False, rename: Rename = str
) -> tuple[int, int]:
    """How many tensors and numbers it has. `ema`: None takes the average of the weights where one was kept."""
    with (
        TensorFiles(checkpoint_folder.files_of(path, body, MODEL)) as store,
        TensorFiles(checkpoint_folder.files_of(path, body, OPTIMIZER) if ema is not False else []) as beside,
    ):
        store.check_whole(str(path))
        sources = {name: (store, name) for name in store.tensors}
        averaged = {name: f"{name}/{AVERAGE}" for name in sources if f"{name}/{AVERAGE}" in beside.tensors}
        if ema and not averaged:
            raise ConfigError(f"{path} has no average of its weights: train with fit.ema, or export without --ema.")
        sources |= {name: (beside, kept) for name, kept in averaged.items()}
        sources = {rename(name): source for name, source in sources.items()}
        header = make_header({name: _readable_form(*source) for name, source in sources.items()})
        _write(sources, header, out, begin("Writing", header.total_bytes))
        return len(header.order), sum(stored.size for stored in store.tensors.values())


def _readable_form(store: TensorFiles, name: str) -> tuple[str, tuple[int, ...]]:
    """Return its dtype and shape, if the safetensors library can read them."""
    dtype, shape = store.tensors[name].dtype, store.tensors[name].shape
    if dtype == "C128":
        raise CheckpointError(
            f"{name} is complex128, which safetensors files for other programs cannot hold. Checkpoints can: load one"
            " with fleet.load() and take what fleet.state_dict() gives. To export it, train it in complex64, or as the"
            " real tensor that torch.view_as_real() gives."
        )
    return dtype, shape


def _check_place(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten. Remove it, or name another file.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {out.absolute().parent}. Make it, or name another file.")


def _find(source: Path, console: Console, begin: Begin) -> tuple[Path, dict[str, Any]]:
    """The checkpoint, or the newest whole one of a run, and its manifest's body."""

    def check(path: Path) -> dict[str, Any]:
        total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return checkpoint_folder.check(path, tell=begin("Checking", total))

    def pass_over(path: Path, error: CheckpointError) -> None:
        console.print(f"{error} Looking for the one before it.", soft_wrap=True)

    if (source / "manifest.json").exists():
        return source, check(source)
    standing = checkpoint_folder.found(source / "checkpoints") or checkpoint_folder.found(source)
    if (newest := checkpoint_folder.newest(standing, check, pass_over)) is not None:
        return newest
    if standing:
        raise CheckpointError(f"Every checkpoint in {source} is damaged.")
    raise ConfigError(f"There is no checkpoint in {source}. Name a run's folder, or one of its checkpoints.")


def _write(sources: Sources, header: SafetensorsHeader, out: Path, tell: Callable[[int], None]) -> None:
    """Whole or not at all."""
    try:
        checkpoint_folder.check_space(out.absolute().parent, header.total_bytes)
        with written_aside(out, durable=True) as file:
            write_all(file, header.data)
            for name in header.order:
                for block in _blocks(*sources[name]):
                    write_all(file, block)
                    tell(len(block))
    except OSError as error:
        raise CheckpointError(f"Cannot write {out}: {error.strerror}.") from None


def _blocks(store: TensorFiles, name: str) -> Iterator[memoryview]:
    stored = store.tensors[name]
    width = SIZES[stored.dtype]
    step = BLOCK_BYTES // width
    buffer = memoryview(bytearray(min(stored.size, step) * width))
    for start in range(0, stored.size, step):
        block = buffer[: min(step, stored.size - start) * width]
        store.read_bytes(block, name, start)
        yield block


@contextmanager
def _progress(console: Console) -> Iterator[Begin]:
    """Bars, where somebody looks."""
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def begin(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda count: progress.advance(task, count)

        yield begin

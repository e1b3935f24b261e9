"""Accelerator: a loop that was written for Hugging Face's Accelerate, on a fleet.

    from potluck.integrations.accelerate import Accelerator

A batch is that of all workers together, so the numbers are those of one process; `num_processes` is 1 for those who
divide by it, or multiply. Knows nothing of the library itself, which need not be installed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, default_collate

from potluck import Engine, Loader, StepConfig
from potluck.batch_shapes import rows_of
from potluck.data.rows import arrived
from potluck.data.source import held_out
from potluck.data.stream import is_stream
from potluck.errors import ConfigError
from potluck.integrations.loops import by_epochs, check_no_stages, fleet_until_exit, heard, step_loader
from potluck.words import plural

WITHOUT_EFFECT = ("split_batches", "even_batches", "device_placement", "cpu")
"""Options that change nothing, since a fleet does this by itself."""


class Accelerator:
    """Accelerate's methods over a fleet. `max_grad_norm` is what clip_grad_norm_() will be called with: a host has to
    know it. `step_scheduler_with_optimizer`: the scheduler moves with each step; else with each epoch. `fleet_options`
    are init()'s: policy, strategy, wire."""

    def __init__(
        self,
        *,
        gradient_accumulation_steps: int = 1,
        mixed_precision: str = "no",
        step_scheduler_with_optimizer: bool = True,
        max_grad_norm: float | None = None,
        fleet_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if unknown := [name for name in others if name not in WITHOUT_EFFECT]:
            raise ConfigError(f"This Accelerator has no {', '.join(unknown)}: it is a fleet's. Leave that out.")
        check_no_stages(fleet_options or {}, "Accelerate")
        precision: Any = {"no": "fp32"}.get(mixed_precision, mixed_precision)
        step = StepConfig(clip=max_grad_norm, precision=precision)
        self.fleet: Engine = fleet_until_exit(**{"step": step} | (fleet_options or {}))
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._by_epochs = not step_scheduler_with_optimizer
        self._trained: TrainedLoader | None = None
        self._looked: LookedLoader | None = None
        """Which is being iterated over."""

    # The methods

    def prepare(self, *objects: Any) -> Any:
        """Model, optimizer, the DataLoader that is trained on, its scheduler, and DataLoaders to look at, in any order;
        of several DataLoaders the first is trained on."""
        loaders = [each for each in objects if isinstance(each, DataLoader)]
        replaced: dict[int, Any] = {}
        if self._trained is None:
            model = _one(objects, nn.Module, "model")
            optimizer = _one(objects, Optimizer, "optimizer")
            if not loaders:
                raise ConfigError("prepare() takes model, optimizer and the DataLoader to train on in one call.")
            schedulers = [each for each in objects if isinstance(each, LRScheduler)]
            together, data = self.gradient_accumulation_steps, loaders.pop(0)
            steps = step_loader(data, together)
            if self._by_epochs:
                schedulers = [by_epochs(each, _length(steps)) for each in schedulers]
            prepared, _, loader = self.fleet.prepare(
                model,
                optimizer,
                steps,
                micro_batch_size=data.batch_size if together > 1 else None,
                scheduler=schedulers[0] if schedulers else None,
            )
            self.fleet.loop.counts_epochs = True  # as TrainedLoader does
            self._trained = TrainedLoader(self.fleet, loader, data)
            if schedulers and not self._by_epochs:
                self._trained.expect_steps_of(schedulers[0])
            replaced = {id(model): prepared, id(data): self._trained}
        replaced |= {id(each): LookedLoader(self, each) for each in loaders}
        back = tuple(replaced.get(id(each), each) for each in objects)
        return back if len(back) != 1 else back[0]

    def backward(self, loss: Tensor, *, samples: float | None = None) -> None:
        """`samples`: what the loss is a mean over, if that is not the batch's rows: tokens, for instance."""
        assert self._trained is not None
        self.fleet.backward(loss, samples=self._trained.rows if samples is None else samples)

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """A step has `gradient_accumulation_steps` of the DataLoader's batches, and knows when it is done."""
        return nullcontext()

    no_sync = accumulate

    @property
    def sync_gradients(self) -> bool:
        """Whether a step ends with the batch that was given last."""
        current = self._trained.loader.current if self._trained is not None else None
        return current is None or current.last

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> None:
        """The whole gradient is there once optimizer.step() is called, and is clipped then."""
        if norm_type != 2:
            raise ConfigError(f"A fleet clips by the norm of type 2, not {norm_type}.")
        if self.fleet.clip == max_norm:
            return
        if self.fleet.is_led:
            raise ConfigError(
                "Under a host every worker has to know before the first step how gradients are clipped. Write"
                f" Accelerator(max_grad_norm={max_norm})."
            )
        self.fleet.clip = max_norm

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Gather a batch that prepare()'s loader gave from all workers, in the order of the DataLoader's own."""
        if self._looked is None or not self._looked.is_shared:
            return data
        leaves, form = tree_flatten(data)
        counted = self._looked.counts
        own = {str(number): each if counted else each[:0] for number, each in enumerate(leaves)}
        return tree_unflatten(list(self.fleet.gather(own).values()), form)

    def gather(self, data: Any) -> Any:
        """All workers' values, once a step has ended."""
        leaves, form = tree_flatten(data)
        found = self.fleet.gather({str(number): each for number, each in enumerate(leaves)})
        return tree_unflatten(list(found.values()), form)

    def save_state(self, output_dir: str | Path) -> str:
        """Call it on every worker. Under a host it is the host that saves, in its own folder."""
        self.fleet.save(output_dir)
        return str(output_dir)

    def load_state(self, input_dir: str | Path) -> None:
        """The loader continues within the epoch that was saved: begin your loop with that one."""
        if not self.fleet.load(input_dir) and not self.fleet.is_led:
            raise ConfigError(f"{input_dir} holds no state that save_state() has saved.")
        if self._trained is not None:
            self._trained.passes = self.fleet.position.epoch

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """load_state() has done so."""
        return dataloader

    # The model itself

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        return model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state_dict on the main process, on the others nothing; call it on every worker."""
        return self.fleet.state_dict()

    def save_model(self, model: nn.Module, save_directory: str | Path, **options: Any) -> None:
        """Call it on every worker."""
        state = self.fleet.state_dict()
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_file(state, Path(save_directory) / "model.safetensors")
        self.wait_for_everyone()  # nobody loads it before it is there

    def save(self, obj: Any, f: Any, **options: Any) -> None:
        if self.is_main_process:
            torch.save(obj, f)

    def autocast(self) -> AbstractContextManager[Any]:
        return self.fleet.autocast()

    # The processes

    def wait_for_everyone(self) -> None:
        self.fleet.barrier()

    def print(self, *words: Any, **options: Any) -> None:
        self.fleet.print(*words, **options)

    def end_training(self) -> None:
        self.fleet.wait_for_saves()

    num_processes = 1

    @property
    def device(self) -> torch.device:
        return self.fleet.device

    @property
    def process_index(self) -> int:
        return self.fleet.rank

    local_process_index = process_index

    @property
    def is_main_process(self) -> bool:
        return self.fleet.rank == 0

    is_local_main_process = is_main_process


def _one(objects: tuple[Any, ...], kind: type, name: str) -> Any:
    matching = [each for each in objects if isinstance(each, kind)]
    if len(matching) != 1:
        raise ConfigError(
            f"prepare() was given {plural(len(matching), name)}. Give it one, together with the DataLoader to train on."
        )
    return matching[0]


def _length(steps: "DataLoader[Any]") -> int:
    """Steps of an epoch."""
    if is_stream(steps.dataset):
        raise ConfigError("A stream's epochs have no length that is known: let the scheduler move with each step.")
    return len(steps)


class _OfLoader:
    """The attributes that a script may ask a DataLoader for: it is as long as in one process."""

    def __init__(self, plain: "DataLoader[Any]") -> None:
        self._plain = plain

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class TrainedLoader(_OfLoader):
    def __init__(self, fleet: Engine, loader: Loader, plain: "DataLoader[Any]") -> None:
        super().__init__(plain)
        self.fleet, self.loader = fleet, loader
        self.passes = 0
        """Epochs that the script's own loop has begun."""
        self.rows = 0
        """Of the batch that was given last."""
        self._is_scheduled = True
        """Whether the script steps the scheduler as often as the fleet does, as far as is known."""

    def expect_steps_of(self, scheduler: LRScheduler) -> None:
        if self.loader.steps_of_epoch > 1:  # else a step is an epoch
            self._is_scheduled = False
            heard(scheduler, self._hear)

    def _hear(self) -> None:
        self._is_scheduled = True

    def _check_scheduled(self) -> None:
        """Check, after the first step, that the loop has stepped the scheduler: if it does so once per epoch or never,
        the fleet would step it too often."""
        if not self._is_scheduled:
            raise ConfigError(
                "The scheduler was not stepped after the first step. If your loop steps it once per epoch, write"
                " Accelerator(step_scheduler_with_optimizer=False); if never, do not give it to prepare()."
            )

    def __iter__(self) -> Iterator[Any]:
        """Nothing in an epoch that the run has behind it: this worker came later."""
        if self.fleet.is_led:
            self.fleet.load(Path())  # joins
        self.passes += 1
        if self.passes <= self.fleet.position.epoch:
            return
        for batch in self.loader:
            self.rows = rows_of(batch)
            ends = self.loader.current is None or self.loader.current.last
            yield batch
            if ends:
                self._check_scheduled()


class LookedLoader(_OfLoader):
    """Each worker has its part of every batch; under a host, where workers come and go, each has all of it."""

    def __init__(self, accelerator: Accelerator, plain: "DataLoader[Any]") -> None:
        super().__init__(plain)
        self._accelerator = accelerator
        self.fleet = fleet = accelerator.fleet
        self.is_shared = not fleet.is_led and fleet.world > 1 and not is_stream(plain.dataset)
        self.counts = True
        """Whether this worker has rows of the batch that was given last."""

    def __iter__(self) -> Iterator[Any]:
        self._accelerator._looked = self
        if not self.is_shared:
            yield from (arrived(batch, self.fleet.device) for batch in self._plain)
            return
        looked, rank, world = held_out(self._plain, None), self.fleet.rank, self.fleet.world
        starts = range(0, len(looked.rows), looked.batch_size)
        sizes = [min(looked.batch_size, len(looked.rows) - start) for start in starts]
        parts = [
            list(range(start + size * rank // world, start + size * (rank + 1) // world))
            for start, size in zip(starts, sizes, strict=True)
        ]
        mine = [part or [start] for part, start in zip(parts, starts, strict=True)]  # all forward in step
        collate = looked.collate or default_collate
        own = DataLoader(looked.rows, batch_sampler=mine, collate_fn=collate, num_workers=self._plain.num_workers)
        for part, batch in zip(parts, own, strict=True):
            self.counts = bool(part)
            yield arrived(batch, self.fleet.device)

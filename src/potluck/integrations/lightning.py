"""Lightning on a fleet: `Trainer(strategy="potluck")`, once this module is imported.

Lightning's loop sees one batch for each step of the run: this worker's last part of it. Parts before go through the
model within the loader; a step in which this worker had no part is shown to the loop, and computes nothing. So its
counters, hooks and checkpoints are those of one process. Validation is whole on every worker.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from potluck import Engine, Loader, StepConfig
from potluck.batch_shapes import rows_of
from potluck.data.rows import arrived, read_batch
from potluck.devices import choose_device
from potluck.errors import ConfigError
from potluck.integrations.loops import by_epochs, check_no_stages, fleet_until_exit, step_loader

try:
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero
except ImportError:
    raise ConfigError("potluck.integrations.lightning needs Lightning: pip install lightning.") from None


class PotluckStrategy(SingleDeviceStrategy):
    """Lightning's strategy for a fleet: one device to Lightning. `fleet_options` are init()'s: policy, strategy,
    wire."""

    strategy_name = "potluck"

    def __init__(
        self, accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Any = None, **fleet_options: Any
    ) -> None:
        check_no_stages(fleet_options, "Lightning")
        super().__init__(choose_device(), accelerator, checkpoint_io, precision_plugin)
        self._options = fleet_options
        self.fleet: Engine | None = None
        self.steps: StepsOfLoader | None = None
        self._clip_value: float | None = None
        """What each number of a gradient is limited to; a limit of its norm is the fleet's to keep."""
        self._samples: float | None = None
        self._last_loss = torch.zeros(())

    @property
    def is_global_zero(self) -> bool:
        return self.fleet is None or self.fleet.rank == 0

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # Before the first step

    def setup_environment(self) -> None:
        trainer = self._trainer
        if self.fleet is None and trainer.state.fn == TrainerFn.FITTING:
            is_fp16 = str(trainer.precision).startswith("16")
            clip = trainer.gradient_clip_val or None
            trainer.gradient_clip_val = None  # done where the whole gradient is
            if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
                self._clip_value, clip = clip, None
            step = StepConfig(clip=clip, precision="fp16" if is_fp16 else "fp32")
            self.fleet = fleet_until_exit(**{"step": step} | self._options)
            self._root_device = self.fleet.device
            self._take_rank()
        super().setup_environment()

    def _take_rank(self) -> None:
        assert self.fleet is not None
        only: Any = rank_zero.rank_zero_only  # type: ignore[attr-defined]
        self.global_rank = only.rank = self.fleet.rank

    def process_dataloader(self, dataloader: Any) -> Any:
        """The first that is trained on is the fleet's; others are whole on every worker."""
        if not self._trainer.training or self.fleet is None:
            return dataloader
        if self.steps is None:
            self.steps = self._prepare(dataloader)
        return self.steps

    def _prepare(self, dataloader: Any) -> "StepsOfLoader":
        trainer, fleet, module = self._trainer, self.fleet, self.lightning_module
        assert fleet is not None and module is not None
        if not isinstance(dataloader, DataLoader) or len(self.optimizers) != 1 or not module.automatic_optimization:
            raise ConfigError("A fleet trains a LightningModule with one DataLoader and one optimizer, by itself.")
        together, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
        most_batches = self._batches_of_epoch(dataloader)
        trainer.limit_train_batches = 1.0  # the epoch of the fleet is cut already
        data = step_loader(dataloader, together, most=most_batches)
        if self._clip_value is not None:
            self.optimizers[0].register_step_pre_hook(self._clip_by_value)
        _, _, loader = fleet.prepare(
            module,
            self.optimizers[0],
            data,
            micro_batch_size=dataloader.batch_size if together > 1 else None,
            scheduler=self._scheduler(len(data)),
        )
        steps = StepsOfLoader(self, fleet, loader, len(data))
        most = trainer.max_steps if trainer.max_steps >= 0 else 1 << 62
        most = min(most, trainer.max_epochs * steps.per_epoch if (trainer.max_epochs or -1) >= 0 else most)
        if most < 1 << 62:
            fleet.loop.end_after(most, rows_of_epoch=loader.rows, batch_size=loader.batch.size)
        fleet.loop.counts_epochs = True
        fleet.after_agreement.append(lambda: self._after_agreement(most))
        if trainer.ckpt_path is not None and not fleet.is_led:
            if not fleet.load(_state_of(trainer.ckpt_path)):
                raise ConfigError(
                    f"{trainer.ckpt_path} was saved without a fleet, and has no place from which to resume."
                )
        elif fleet.is_led:
            fleet.load(Path())  # joins
        steps.shown = fleet.step_number
        return steps

    def _batches_of_epoch(self, dataloader: "DataLoader[Any]") -> int:
        """Count the batches of an epoch, by Lightning's own rule: it ends after them, and the next one begins."""
        limit, count = self._trainer.limit_train_batches, len(dataloader)
        most = min(limit, count) if isinstance(limit, int) else int(count * limit)
        if most < count and isinstance(dataloader.dataset, IterableDataset):
            raise ConfigError(
                "limit_train_batches and overfit_batches cut no stream of a fleet's. Let the dataset itself end after"
                " as many rows as an epoch should have, for instance with itertools.islice in its __iter__."
            )
        if not most:
            raise ConfigError(
                f"limit_train_batches is {limit}, which is less than one of the {count} batches of an epoch."
            )
        return most

    def _clip_by_value(self, optimizer: Optimizer, *told: Any) -> None:
        """Limit each number by itself, which is the same whichever rank holds it."""
        assert self._clip_value is not None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, self._clip_value)

    def _scheduler(self, per_epoch: int) -> LRScheduler | None:
        configs = [each for each in self.lr_scheduler_configs if not each.reduce_on_plateau]
        if not configs:
            return None
        config = configs[0]
        if len(configs) > 1 or config.frequency != 1:
            raise ConfigError("A fleet has one scheduler, which is stepped in every step or epoch.")
        return config.scheduler if config.interval == "step" else by_epochs(config.scheduler, per_epoch)

    def on_train_start(self) -> None:
        """A worker that came later begins where the others are."""
        fleet, steps, loop = self.fleet, self.steps, self._trainer.fit_loop
        if fleet is None or steps is None or not fleet.is_led or not fleet.step_number:
            return
        epoch = fleet.step_number // steps.per_epoch
        steps.shown = epoch * steps.per_epoch
        for each in (loop.epoch_progress.current, loop.epoch_progress.total):
            each.ready = each.started = each.processed = each.completed = epoch
        done = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        done.ready = done.completed = steps.shown

    # A step

    def training_step(self, batch: Any, *more: Any, **options: Any) -> Any:
        assert self.steps is not None
        if not self.steps.counts:
            return self._last_loss
        self.steps.is_forward = True
        with self._unheard():
            output: Any = self._called("training_step", super().training_step)(batch, *more, **options)
        self.steps.is_forward = False
        self._samples = output.get("samples") if isinstance(output, Mapping) else None
        if self._samples is None:
            self._samples = rows_of(batch)
        self._last_loss = (output["loss"] if isinstance(output, Mapping) else output).detach()
        return output

    def validation_step(self, *told: Any, **options: Any) -> Any:
        return self._called("validation_step", super().validation_step)(*told, **options)

    def _called(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the module. Where its numbers are split they are gathered when the module is called, so it is
        called, and its forward is that method."""
        fleet, module, plugin = self.fleet, self.lightning_module, self.precision_plugin
        if fleet is None or module is None or not fleet.is_split:
            return plain

        def call(*told: Any, **options: Any) -> Any:
            with plugin.train_step_context() if name == "training_step" else plugin.val_step_context():
                return self._forward_redirection(module, module, name, *told, **options)

        return call

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        """Log nothing of rows that are somebody else's, with which this worker only keeps step."""
        module, steps = self.lightning_module, self.steps
        assert module is not None and steps is not None
        if steps.are_own or steps.per_epoch == 1:  # at an epoch's end each worker has logged something
            yield
            return
        module.log = lambda *told, **more: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.log

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *more: Any, **options: Any) -> Tensor:
        """A mean over the batch's rows, or over the "samples" that training_step() returned beside its "loss"."""
        assert self.fleet is not None and self.steps is not None and self.lightning_module is not None
        plugin = self.precision_plugin
        Precision.pre_backward(plugin, closure_loss, self.lightning_module)  # its hooks alone: the fleet scales
        if self.steps.counts:
            self.fleet.backward(closure_loss, samples=float(self._samples or 0))
        return Precision.post_backward(plugin, closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        output = closure()
        if self.fleet is not None and self.steps is not None and self.steps.counts:
            self.fleet.step()
            self.steps.end_step()
        return output

    def run_part(self, batch: Any) -> None:
        """A part of a step, within the loader; what it logs is weighted by its own rows."""
        assert self.fleet is not None and self.lightning_module is not None
        loop = self._trainer.fit_loop.epoch_loop
        loop._results.batch = batch
        self.lightning_module._current_fx_name = "training_step"
        found = self.training_step(batch, loop.batch_idx)
        loss = found["loss"] if isinstance(found, Mapping) else found
        self.fleet.backward(loss, samples=float(self._samples or 0))
        self.fleet.step()

    def _after_agreement(self, most: int) -> None:
        assert self.fleet is not None
        self._take_rank()
        if self.fleet.step_number >= most:
            self.fleet.end()

    def on_train_end(self) -> None:
        fleet = self.fleet
        if fleet is not None and fleet.is_led:
            fleet.end()

    # Between workers

    @property
    def is_distributed(self) -> bool:
        """Asked by log(), before it heeds sync_dist; and where DataLoaders are made, which must stay as they are."""
        steps, fleet = self.steps, self.fleet
        return steps is not None and steps.is_forward and fleet is not None and fleet.world > 1 and not fleet.is_led

    def reduce(self, tensor: Any, *more: Any, reduce_op: Any = "mean", **options: Any) -> Any:
        """At the end of an epoch, what Lightning has summed up of this worker's rows and what it counts them by, where
        training_step() has logged with sync_dist. Within a step other workers may have nothing to log."""
        fleet, steps, how = self.fleet, self.steps, str(reduce_op)
        if fleet is None or fleet.is_led or fleet.world == 1 or steps is None or steps.is_forward:
            return tensor
        if fleet.is_under_way or not self._trainer.training or how not in ("mean", "sum", "max", "min"):
            return tensor
        found: Tensor = getattr(torch, how)(fleet.gather(tensor.reshape(1)).to(tensor.device, torch.float64))
        return found.to(tensor.dtype) if tensor.is_floating_point() else found

    def barrier(self, *more: Any, **options: Any) -> None:
        if self.fleet is not None:
            self.fleet.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of one worker on all, if JSON can hold it: a folder's name, for instance. The rest is alike
        on all workers."""
        if self.fleet is None or not isinstance(obj, str | int | float | None):
            return obj
        return self.fleet.broadcast(obj, src)

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return (
            self.fleet.state_dict()
            if self.steps is not None and self.fleet is not None
            else super().lightning_module_state_dict()
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self.fleet is None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # The fleet's own state first: a kill between the two leaves no checkpoint that cannot be resumed from.
        if self.fleet is not None and self.steps is not None and "loops" in checkpoint:
            self.fleet.save(_state_of(filepath), keep_last=1)
            self.fleet.wait_for_saves()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)  # before our state: without that it could not be resumed from
        if self.is_global_zero:
            shutil.rmtree(_state_of(filepath), ignore_errors=True)


def _state_of(checkpoint: Any) -> Path:
    """Return where the fleet's own state lies beside a checkpoint of Lightning's."""
    return Path(checkpoint).with_suffix(".potluck")


class StepsOfLoader:
    """One batch for each step of the run."""

    def __init__(self, strategy: PotluckStrategy, fleet: Engine, loader: Loader, per_epoch: int) -> None:
        self._strategy, self._fleet, self._loader = strategy, fleet, loader
        self.per_epoch = per_epoch
        self.shown = 0
        """Steps of the run that Lightning's loop has seen."""
        self.counts = True
        """Whether the batch that was given last is this worker's to compute."""
        self.is_forward = False
        self._is_alone = not fleet.setup.policy.steps_together
        """Where workers step by themselves there are other steps than the run's: all of them run within the loader."""
        self.rows = 0
        self._last: Any = None
        self._left: Iterator[Any] = iter(())
        """What is left of this pass."""

    @property
    def are_own(self) -> bool:
        """Whether the rows that were given last count as this worker's."""
        current = self._loader.current
        return current is None or (current.counts and not current.is_empty)

    def __len__(self) -> int:
        return self.per_epoch

    def __iter__(self) -> Iterator[Any]:
        self._left = iter(self._loader)
        for batch in self._left:
            yield from self._missed()
            if self._is_alone or not self._loader.current.last:  # type: ignore[union-attr]
                self._run(batch)
                continue
            self._take(batch)
            self.shown += 1
            yield batch
        yield from self._missed()

    def end_step(self) -> None:
        """Under a host the step may not be done yet: another worker was lost, and its part is ours."""
        while self._fleet.is_led and self._fleet.step_number < self.shown and not self._fleet.stopping:
            batch = next(self._left, None)
            if batch is None:
                return
            self._run(batch)

    def _run(self, batch: Any) -> None:
        self._take(batch)
        self._strategy.run_part(batch)

    def _take(self, batch: Any) -> None:
        self.counts, self._last, self.rows = True, batch, rows_of(batch)

    def _missed(self) -> Iterator[Any]:
        """Steps that the others took: the loop counts them."""
        while self.shown < self._fleet.step_number:
            self.counts = False
            if self._last is None:
                first = read_batch(self._loader.dataset, [0], self._loader.collate)
                self._last = arrived(first, self._fleet.device)
            self.shown += 1
            yield self._last


StrategyRegistry.register(
    PotluckStrategy.strategy_name, PotluckStrategy, description="a fleet of workers, of any speeds"
)

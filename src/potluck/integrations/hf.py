"""Hugging Face's Trainer, and those made of it such as TRL's, on a fleet.

    class MyTrainer(potluck.hf.Elastic, SFTTrainer): ...

Data, backward, step and saving go through the fleet; loss, logging, evaluation and callbacks are the trainer's own. A
step has `per_device_train_batch_size * gradient_accumulation_steps` rows over all workers together, so that the numbers
are those of one process. Each worker's part counts by its items, as `num_items_in_batch` does.
"""

import inspect
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from potluck import Engine, StepConfig
from potluck.batch_shapes import rows_of
from potluck.errors import ConfigError
from potluck.integrations.loops import WholeBatches, fleet_until_exit, one_by_one, step_loader
from potluck.signals import on_interrupt

try:
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import EvalLoopOutput
    from transformers.training_args import TrainingArguments
except ImportError:
    raise ConfigError("potluck.hf needs Hugging Face's libraries: pip install transformers accelerate.") from None

STATE = "potluck"
"""Folder in which a checkpoint-N of Trainer keeps what the fleet saves."""
KEPT = "hf.trainer"
"""Key under which fleet.state has what callbacks and the log know: saved, sent to newcomers, and found again."""
STEPS_AT_ONCE = 8
"""Parts in which a host hands out a batch, unless it is told."""
GENERATING = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "AsyncGRPOTrainer", "A2POTrainer", "SDPOTrainer")
ADDS_TWO_MEANS = "adds a mean over tokens to one over rows"


def _let_arguments_be_alone() -> None:
    """Accelerate makes a process group of its own from the variables by which workers find each other, as soon as there
    are TrainingArguments. There is one group here, the fleet's: for these arguments, each worker is alone. Whoever else
    uses Accelerate in this process finds it as it was."""
    plain = PartialState.__init__
    if getattr(plain, "is_ours", False):
        return

    def alone(state: Any, *arguments: Any, **more: Any) -> None:
        if not _is_for_arguments():
            plain(state, *arguments, **more)
            return
        kept = {name: os.environ.pop(name) for name in ("LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
        try:
            plain(state, *arguments, **{name: value for name, value in more.items() if name != "backend"})
        finally:
            os.environ.update(kept)

    alone.is_ours = True  # type: ignore[attr-defined]
    PartialState.__init__ = alone


def _is_for_arguments() -> bool:
    """Whether TrainingArguments ask, as in `_setup_devices` they do."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_setup_devices" and isinstance(frame.f_locals.get("self"), TrainingArguments):
            return True
        frame = frame.f_back
    return False


_Trainer: Any = object


class Elastic(_Trainer):  # type: ignore[misc]
    """Put it before a Trainer's class: `class MyTrainer(potluck.hf.Elastic, Trainer)`."""

    fleet_options: dict[str, Any] = {}  # noqa: RUF012  (a subclass says it: policy, strategy, wire, as init() has them)
    fleet: Engine
    control: Any
    optimizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _let_arguments_be_alone()

    # What Trainer's constructor asks for

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        if args.world_size > 1:  # its arguments were made before its class
            AcceleratorState._reset_state(reset_partial_state=True)
            args.__dict__.pop("_setup_devices", None)
        assert args.device is not None  # it is set up by asking for it
        if args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size begins anew on one worker. Set per_device_train_batch_size.")
        precision: Any = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        step = StepConfig(clip=args.max_grad_norm or None, precision=precision, compile=args.torch_compile)
        self.fleet = fleet_until_exit(**{"step": step} | self.fleet_options)
        args.__dict__["_setup_devices"] = PartialState().device = self.fleet.device
        args._n_gpu = min(1, args._n_gpu)  # else it would wrap the model for all of them
        self._take_rank()
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = self._backward

    def _take_rank(self) -> None:
        """Take over the rank, which decides who writes and who speaks; under a host it may change."""
        state = PartialState()
        state.process_index = state.local_process_index = self.fleet.rank
        if hasattr(self, "state"):
            self.state.is_local_process_zero = self.state.is_world_process_zero = self.fleet.rank == 0

    def is_world_process_zero(self) -> bool:
        return self.fleet.rank == 0

    is_local_process_zero = is_world_process_zero

    # The loop

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        if self.fleet.is_led:  # the host knows where the run stands
            resume_from_checkpoint = None
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        check_trainer(self)
        fleet, plain = self.fleet, self.get_train_dataloader()
        if fleet.world > 1 or fleet.is_led:
            check_loss_in_parts(self)
        epochs, per_epoch, _, samples, _, in_epoch, max_steps = self.set_initial_training_values(args, plain)
        self._per_epoch, self._in_epoch, self._at_looks = per_epoch, in_epoch, (trial, ignore_keys_for_eval)
        epochs = min(epochs, -(-max_steps // per_epoch))
        loader = self._prepare(plain, max_steps)
        self._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        self._looks = 0
        fleet.kept(KEPT, lambda: json.dumps(self._known() | {"log": self.state.log_history}), self._stand)
        self._find_standing(resume_from_checkpoint)
        self._begin_figures()
        fleet.after_step.append(self._after_step)
        fleet.after_agreement.append(self._after_agreement)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and not fleet.step_number:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        with on_interrupt(fleet.interrupt):
            for _ in fleet.passes(epochs, lambda: None):
                if self.state.global_step >= max_steps:
                    break
                self._run_pass(loader)
        if fleet.step_number < max_steps and not self.control.should_training_stop:
            self._leave(trial)
        if fleet.is_led:
            self._end_under_host()
        return self._finalize_training(trial, samples, self._started)

    def _prepare(self, plain: Any, max_steps: int) -> Any:
        """Model, optimizer and scheduler are the trainer's own; prepared, they are the same objects."""
        args, fleet, together = self.args, self.fleet, self.args.gradient_accumulation_steps
        if self._created_lr_scheduler:
            self.lr_scheduler = None
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        counts_steps = isinstance(self.lr_scheduler, LRScheduler) and not isinstance(
            self.lr_scheduler, ReduceLROnPlateau
        )  # others are stepped by what evaluate() finds
        data, is_stream = step_loader(plain, together), isinstance(plain.dataset, IterableDataset)
        has_length = not is_stream or hasattr(plain.dataset, "__len__")
        is_cut = fleet.setup.stages is not None
        if is_cut and "forward" in vars(self.model):
            raise ConfigError(
                f"The forward of {type(self.model).__name__} has been replaced, as TRL's trainers do to fuse its head"
                " with the loss, so the model cannot be cut into stages. Use transformers' own Trainer, or potluck"
                " finetune with a [stages] table; or split the model with strategy=potluck.FullShard()."
            )
        can_slice = fleet.is_led and fleet.setup.policy.steps_together
        self.model_wrapped, self.optimizer, loader = fleet.prepare(
            self.model,
            self.optimizer,
            data,
            micro_batch_size=self._train_batch_size if together > 1 and not is_cut else None,
            slices=together if together > STEPS_AT_ONCE and can_slice else None,
            rows=None if has_length else max_steps * together * self._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            scheduler=self.lr_scheduler if counts_steps else None,
            loss=self._loss_of if is_cut else None,
        )
        self.accelerator._models.append(self.model_wrapped)  # evaluation would prepare it
        fleet.before_step.append(lambda: self._say("on_pre_optimizer_step"))
        self.optimizer.register_step_post_hook(lambda *told: self._say("on_optimizer_step"))
        fleet.loop.end_after(max_steps, rows_of_epoch=loader.rows, batch_size=loader.batch.size)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = plain
        return loader

    def _say(self, moment: str) -> None:
        self.control = getattr(self.callback_handler, moment)(self.args, self.state, self.control)

    def _find_standing(self, checkpoint: str | None) -> None:
        fleet = self.fleet
        if fleet.is_restored:
            pass  # it has survived a loss, and stands where it was
        elif checkpoint is not None:
            if not fleet.load(Path(checkpoint) / STATE):
                raise ConfigError(
                    f"{checkpoint} holds a model, and nothing from which the run could be resumed: save_only_model was"
                    " on, or a plain Trainer saved it. Load the model from there, and train without"
                    " resume_from_checkpoint."
                )
        elif fleet.is_led:
            fleet.load(Path())  # joins
        elif fleet.world > 1:
            fleet.seed_random(self.args.seed)
        self._stand(fleet.state.get(KEPT))
        self._take_rank()

    def _begin_figures(self) -> None:
        self._started = time.time()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.zeros((), dtype=torch.float64)
        self._total_loss_scalar = 0.0
        self._begins_step = True
        self.current_gradient_accumulation_steps = 1  # each micro-batch counts by its items

    def _run_pass(self, loader: Any) -> None:
        self._say("on_epoch_begin")
        for inputs in loader:
            if self._begins_step:
                self._begins_step = False
                self._say("on_step_begin")
            if self.fleet.setup.stages is not None:  # each computes its layers, some other one the loss
                self.fleet.train(self._loss_of, inputs)
            else:
                self._samples, items = self._count(inputs)
                self.training_step(self.model_wrapped, inputs, items)
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if self.fleet.step() is None:
                self._say("on_substep_end")
        if self.fleet.stopping and not self.control.should_training_stop:
            return
        self._say("on_epoch_end")
        self._look()

    def _count(self, inputs: Any) -> tuple[float, Any]:
        """Count what the loss of this micro-batch is a mean over; and return the trainer's own count, if it has one."""
        items = self._get_num_items_in_batch([inputs], self.args.device)
        if items is not None:
            return float(items), items
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        return float(labels.ne(-100).sum() if isinstance(labels, Tensor) else rows_of(inputs)), None

    def _loss_of(self, model: nn.Module, inputs: Any) -> tuple[Tensor, float]:
        """Compute the loss of which training_step() takes the gradient, where the model is cut into stages."""
        samples, items = self._count(inputs)
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=items)
        return loss, samples

    def _backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward that training_step() calls: the loss is a mean over the items of this micro-batch."""
        self.fleet.backward(loss, samples=self._samples)

    # After steps, on every worker alike

    def _after_step(self) -> None:
        state, control, done = self.state, self.control, self.fleet.last_step
        state.global_step = self.fleet.step_number
        epoch, step = divmod(state.global_step - 1, self._per_epoch)
        passed = min((step + 1) * self.args.gradient_accumulation_steps, self._in_epoch)
        state.epoch = epoch + passed / self._in_epoch
        if done is not None and done.step >= state.global_step:
            self._tr_loss += done.loss
        else:  # it was skipped: as for a loss that is not finite
            self._tr_loss += self._tr_loss / max(1, state.global_step - self._globalstep_last_logged)
        self._begins_step = True
        wanted = {name: getattr(control, name) for name in ("should_log", "should_evaluate", "should_save")}
        self._say("on_step_end")
        for name, was in wanted.items():  # there may be several steps between two agreements
            setattr(self.control, name, getattr(self.control, name) or was)

    def _after_agreement(self) -> None:
        self._take_rank()
        self._look()
        if self.control.should_epoch_stop:
            raise ConfigError("A callback set should_epoch_stop. A fleet's epochs are whole: set should_training_stop.")
        if self.control.should_training_stop and not self.fleet.stopping:
            self.fleet.end()

    def _look(self) -> None:
        """Logs, evaluates and saves where that is due."""
        fleet, control, done = self.fleet, self.control, self.fleet.last_step
        if fleet.is_replaying:  # the others have done so
            control.should_evaluate = control.should_save = False
        looks = control.should_evaluate
        rate = {"learning_rate": done.lr} if done is not None else {}
        norm = done.grad_norm if done is not None else None
        trial, ignored = self._at_looks
        self._maybe_log_save_evaluate(
            self._tr_loss, norm, self.model_wrapped, trial, self.state.epoch, ignored, self._started, **rate
        )
        if looks:
            self._looks += 1
            self._follow()
        control.should_log = control.should_evaluate = control.should_save = False

    def _leave(self, trial: Any) -> None:
        """Ctrl-C: what is done is saved."""
        fleet = self.fleet
        if not fleet.is_led:
            self._save_checkpoint(self.model_wrapped, trial)
            raise fleet.interrupted(f"Saved in {self.args.output_dir}.")
        self._end_under_host()
        error = fleet.interrupted()
        fleet.close()
        raise error

    def _end_under_host(self) -> None:
        """The host has the last weights before this worker says that it has finished."""
        self.fleet.save(self.args.output_dir)
        self.fleet.wait_for_saves()

    # What callbacks and the log know

    def _known(self) -> dict[str, Any]:
        state = self.state
        return {
            "looks": self._looks,
            "best": [state.best_metric, state.best_global_step, state.best_model_checkpoint],
            "callbacks": {type(each).__name__: each.state()["attributes"] for each in self._exportable()},
        }

    def _exportable(self) -> list[Any]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _stand(self, saved: str | None) -> None:
        """The run was put somewhere: so are the state and the callbacks."""
        self.state.global_step = self._globalstep_last_logged = self.fleet.step_number
        known = json.loads(saved or "{}")
        self.state.log_history = known.get("log", self.state.log_history)
        self._take(known)

    def _take(self, known: dict[str, Any]) -> None:
        if not known:
            return
        self._looks = known["looks"]
        self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint = known["best"]
        for each in self._exportable():
            for name, value in known["callbacks"].get(type(each).__name__, {}).items():
                setattr(each, name, value)

    def _follow(self) -> None:
        """Under a host, a newcomer has missed what the others found while it caught up."""
        if not self.fleet.is_led:
            return
        mine = torch.frombuffer(bytearray(json.dumps(self._known()).encode() + b"\n"), dtype=torch.uint8)
        told = [json.loads(line) for line in bytes(self.fleet.gather(mine).tolist()).splitlines()]
        self._take(max(told, key=lambda known: known["looks"]))

    # Looking

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Each worker looks at its part, if losses are all that is wanted; else at all of it."""
        fleet, args = self.fleet, self.args
        only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        loss, batches = math.nan, None
        if only and fleet.is_prepared and not isinstance(dataloader.dataset, IterableDataset):
            batches = WholeBatches(dataloader) if len(dataloader) else None  # drop_last may leave out the only one
            loss = self._shared_loss(batches, ignore_keys) if batches is not None else math.nan
        if batches is None and fleet.is_prepared and fleet.setup.stages is not None:
            raise ConfigError(
                "The model is cut into stages, so no worker has all of its outputs: only losses are evaluated, over a"
                " dataset with a length. Leave out compute_metrics, or predict with the model that was saved."
            )
        if batches is None or (fleet.is_led and math.isnan(loss)):  # this worker had no part in it
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        nothing: Any = None
        found = {f"{metric_key_prefix}_loss": loss}
        return EvalLoopOutput(predictions=nothing, label_ids=nothing, metrics=found, num_samples=batches.rows)

    def _shared_loss(self, batches: WholeBatches, ignore_keys: list[str] | None) -> float:
        """The mean of the batches' losses, by rows; no number where this worker alone knows of it."""
        fleet = self.fleet

        def loss_of(model: nn.Module, inputs: Any) -> tuple[Tensor, int]:
            loss, _, _ = self.prediction_step(model, inputs, True, ignore_keys=ignore_keys)
            return loss, rows_of(inputs)

        loss: float = fleet.evaluate(loss_of, one_by_one(batches, 1 if fleet.is_led else fleet.pipelines))
        if not fleet.is_led:
            return loss
        return next((each for each in fleet.gather(loss) if not math.isnan(each)), math.nan)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Call it on every worker; one of them writes."""
        fleet = self.fleet
        if not fleet.is_prepared:
            super().save_model(output_dir, _internal_call)
            return
        state = fleet.state_dict()
        self._take_rank()
        if fleet.rank == 0:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        fleet.barrier()  # until it is there
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save all from which a run is resumed; under a host it is the host that keeps it."""
        self.fleet.save(Path(output_dir) / STATE, keep_last=1)
        self.fleet.wait_for_saves()

    def _save_scaler(self, output_dir: str) -> None:
        """The fleet has saved it."""

    _save_rng_state = _load_rng_state = _load_optimizer_and_scheduler = _load_scaler = _save_scaler


# TRL's losses. A fleet weighs each part's loss by what it is a mean over, rows or tokens. A loss that adds a mean over
# tokens to one over rows has no such weight, and one that compares a row with all others of its batch needs all.


def check_trainer(trainer: Any) -> None:
    """Refuse trainers that make their own batches, on any number of workers."""
    kinds = {each.__name__ for each in type(trainer).__mro__}
    for name in GENERATING:
        if name in kinds:
            raise ConfigError(
                f"{name} is not supported: it makes its batches as it generates, and a fleet cannot share those out."
                " Use SFTTrainer, DPOTrainer or RewardTrainer with potluck.hf.Elastic, or train without it."
            )


def check_loss_in_parts(trainer: Any) -> None:
    """Refuse losses that several workers, each with a part of the batch, cannot compute."""
    kinds = {each.__name__ for each in type(trainer).__mro__}
    if "ORPOTrainer" in kinds:
        why, instead = f"ORPOTrainer's loss {ADDS_TWO_MEANS}", "use DPOTrainer"
    elif "CPOTrainer" in kinds and getattr(trainer, "cpo_alpha", 1) != 0:
        why, instead = f"CPOTrainer's loss {ADDS_TWO_MEANS}", "set cpo_alpha=0, or use DPOTrainer"
    elif "DPOTrainer" in kinds and "sft" in getattr(trainer, "loss_types", ()):
        why, instead = f'DPOTrainer with the loss type "sft" {ADDS_TWO_MEANS}', 'leave "sft" out of loss_type'
    elif "KTOTrainer" in kinds and getattr(trainer, "calculate_KL", True):
        why, instead = "KTOTrainer compares each row with all others of its batch", 'set loss_type="apo_zero_unpaired"'
    else:
        return
    raise ConfigError(
        f"{why}, and workers that each compute a part of the batch would not have the numbers of one process. Train on"
        f" one worker, or {instead}."
    )

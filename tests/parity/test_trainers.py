"""Other people's trainers on a fleet, against themselves in one process: the same losses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import potluck
from tests.quick import first_of
from tests.ranks import RankFailed, run_ranks

BELOW = 1e-6


def assert_close(found: list[float], expected: list[float], below: float = BELOW) -> None:
    assert len(found) == len(expected) and expected
    assert max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, expected, strict=True)) < below, (found, expected)


# Accelerate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def with_accelerator(accelerator: Any, folder: str | None = None, *, loaded: bool = False) -> dict[str, Any]:
    """A loop as people write it. 53 rows are no whole batches; where gradients are accumulated, 48, since Accelerate
    itself divides the loss of a short last step by as much as that of the others."""
    torch.manual_seed(1)
    count = 53 if accelerator.gradient_accumulation_steps == 1 else 48
    x, y = torch.randn(count, 5), torch.randint(0, 3, (count,))
    draw = torch.Generator().manual_seed(4)
    train = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=draw)
    test = DataLoader(TensorDataset(x, y), batch_size=20)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    first = 0
    if loaded:
        accelerator.load_state(folder)
        first = 1
    losses, guesses = [], []
    for _epoch in range(first, 3):
        model.train()
        for a, b in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(a), b)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        seen, right = [], 0
        with torch.no_grad():
            for a, b in test:
                output, b = accelerator.gather_for_metrics((model(a), b))
                seen.append(F.cross_entropy(output, b, reduction="sum").item())
                right += int((output.argmax(1) == b).sum())
        losses.append(sum(seen) / count)
        guesses.append(right)
        if folder is not None and not loaded and _epoch == 0:
            accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "right": guesses, "weights": {k: v.clone() for k, v in state.items()}}


def ours(folder: str, together: int, loaded: bool = False, is_split: bool = False) -> dict[str, Any]:
    from potluck.integrations.accelerate import Accelerator

    options = {"strategy": potluck.FullShard()} if is_split else {}
    accelerator = Accelerator(gradient_accumulation_steps=together, fleet_options=options)
    assert accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    found = with_accelerator(accelerator, folder, loaded=loaded)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return found | {"main": accelerator.is_main_process}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_accelerates_loop_has_its_own_losses_on_two_workers(tmp_path: Path, together: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = with_accelerator(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=together))
    main, other = run_ranks(2, ours, str(tmp_path), together)
    for found in (main, other):
        assert_close(found["losses"], expected["losses"], 2e-6)
        assert found["right"] == expected["right"]
    assert main["main"] and not other["main"] and not other["weights"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(main["weights"][name], value, rtol=0, atol=2e-5)
    if together == 1:
        resumed = run_ranks(2, ours, str(tmp_path), together, True)[0]
        assert_close(resumed["losses"], main["losses"][1:], 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_accelerates_model_may_be_split_over_workers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = with_accelerator(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1))
    main, other = run_ranks(2, ours, str(tmp_path), 1, False, True)
    for found in (main, other):
        assert_close(found["losses"], expected["losses"], 2e-6)
        assert found["right"] == expected["right"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(main["weights"][name], value, rtol=0, atol=2e-5)


def of_epochs(accelerator: Any) -> list[float]:
    """A scheduler that is stepped with each epoch: the losses of a model on all rows."""
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(29, 5, generator=draw), torch.randint(0, 3, (29,), generator=draw)
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train = DataLoader(TensorDataset(x, y), batch_size=8)
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
    losses = []
    for _epoch in range(3):
        for a, b in train:
            accelerator.backward(F.cross_entropy(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            losses += [F.cross_entropy(model(x), y).item(), optimizer.param_groups[0]["lr"]]
    return losses


def test_accelerates_scheduler_moves_with_epochs_or_says_so() -> None:
    accelerate = pytest.importorskip("accelerate")
    from potluck.errors import ConfigError
    from potluck.integrations.accelerate import Accelerator

    expected = of_epochs(accelerate.Accelerator(cpu=True))
    assert_close(of_epochs(Accelerator(step_scheduler_with_optimizer=False)), expected, 2e-6)
    with pytest.raises(ConfigError, match="step_scheduler_with_optimizer=False"):
        of_epochs(Accelerator())


# Hugging Face


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1} | more
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **still, num_attention_heads=2, num_labels=3))


def rows(count: int, seed: int, *, of_classes: bool = False) -> list[dict[str, Any]]:
    """Masked unevenly, so that what a token counts matters."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, 64, (12,), generator=draw)
        masked = int(torch.randint(0, 10, (1,), generator=draw))
        labels = tokens.masked_fill(torch.arange(12) < masked, -100)
        found.append({"input_ids": tokens, "labels": tokens[0] % 3 if of_classes else labels})
    return found


def hf(kind: type, folder: str, model: Any, resume: bool | None = None, **options: Any) -> dict[str, Any]:
    from transformers import EarlyStoppingCallback, TrainingArguments

    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 6,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    patience, accuracy, of_classes = (
        options.pop("patience", None),
        options.pop("accuracy", False),
        not hasattr(model, "lm_head"),
    )
    args = TrainingArguments(folder, **settings | options)
    more: dict[str, Any] = {"callbacks": [EarlyStoppingCallback(patience)]} if patience else {}
    if accuracy:
        more["compute_metrics"] = lambda seen: {"accuracy": float((seen[0].argmax(-1) == seen[1]).mean())}
    data = {"train_dataset": rows(50, 1, of_classes=of_classes), "eval_dataset": rows(20, 2, of_classes=of_classes)}
    trainer = kind(model, args, **data, **more)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/model")
    return {"log": trainer.state.log_history, "steps": trainer.state.global_step, "best": trainer.state.best_metric}


def figures(found: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in found["log"] if name in row]


def assert_same_log(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["steps"] == expected["steps"]
    for name in ("loss", "eval_loss", "learning_rate", "epoch"):
        assert_close(figures(found, name), figures(expected, name))
    assert_close(figures(found, "grad_norm"), figures(expected, "grad_norm"), 1e-5)


def elastic_hf(
    folder: str, model: str, resume: bool | None = None, options: Any = None, *, is_split: bool = False
) -> dict[str, Any]:
    from transformers import Trainer

    import potluck

    class MyTrainer(potluck.hf.Elastic, Trainer):  # type: ignore[misc]
        fleet_options = {"strategy": potluck.FullShard()} if is_split else {}

    made = {"llama": llama, "bert": bert, "lora": lora}[model]()
    return hf(MyTrainer, folder, made, resume, **options or {})


def split_hf(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return elastic_hf(folder, "llama", None, options, is_split=True)


STAGES = potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=2))


def staged_hf(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from transformers import Trainer

    from potluck.stages import stage_planner

    stage_planner.MEASURE_S = 0.0

    class MyTrainer(potluck.hf.Elastic, Trainer):  # type: ignore[misc]
        fleet_options = {"stages": STAGES}  # noqa: RUF012

    return hf(MyTrainer, folder, llama(num_hidden_layers=3), **options)


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.timeout(120)
def test_hugging_faces_trainer_has_its_own_log(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {"gradient_accumulation_steps": 3}
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), llama(), **options)
    found = elastic_hf(str(tmp_path / "ours"), "llama", None, options)
    assert_same_log(found, expected)
    read = transformers.LlamaForCausalLM.from_pretrained
    ours, plain = read(tmp_path / "ours" / "model"), read(tmp_path / "plain" / "model")
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def reported_hf(folder: str, logs: str) -> dict[str, Any]:
    import os

    os.environ["TENSORBOARD_LOGGING_DIR"] = logs
    return elastic_hf(folder, "llama", None, {"report_to": "tensorboard", "max_steps": 6})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_hugging_faces_trainer_reports_to_is_told_by_one_worker(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = run_ranks(2, reported_hf, str(tmp_path / "run"), str(tmp_path / "logs"), timeout_s=200)
    (written,) = (tmp_path / "logs").glob("events.*")
    read = EventAccumulator(str(written))
    read.Reload()
    told = [(entry.step, entry.value) for entry in read.Scalars("train/loss")]
    assert [step for step, _ in told] == list(range(1, 7))
    assert_close([loss for _, loss in told], figures(found[0], "loss"), 1e-6)


@pytest.mark.timeout(120)
def test_a_trainer_may_have_nothing_to_look_at(tmp_path: Path) -> None:
    """drop_last leaves out the only batch."""
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {"dataloader_drop_last": True, "per_device_eval_batch_size": 32, "max_steps": 5}
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), llama(), **options)
    found = elastic_hf(str(tmp_path / "ours"), "llama", None, options)
    assert_close(figures(found, "loss"), figures(expected, "loss"))
    assert not figures(found, "eval_loss") and not figures(expected, "eval_loss")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"gradient_accumulation_steps": 3}),
        ("llama", {"max_steps": 17, "lr_scheduler_type": "cosine", "train_sampling_strategy": "sequential"}),
        ("bert", {"accuracy": True}),
        ("lora", {}),
    ],
)
def test_two_workers_have_the_log_of_one_process(tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    made = {"llama": llama, "bert": bert, "lora": lora}[model]()
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), made, **options)
    found = run_ranks(2, elastic_hf, str(tmp_path / "ours"), model, None, options, timeout_s=150)
    for each in found:
        assert_same_log(each, expected)
        if "accuracy" in options:
            assert figures(each, "eval_accuracy") == figures(expected, "eval_accuracy")
    written = "adapter_model.safetensors" if model == "lora" else "model.safetensors"
    assert (tmp_path / "ours" / "model" / written).stat().st_size == (
        tmp_path / "plain" / "model" / written
    ).stat().st_size


def test_importing_what_makes_a_trainer_elastic_changes_nothing_of_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import importlib
    import os

    from accelerate.state import AcceleratorState, PartialState
    from transformers import TrainingArguments

    import potluck.integrations.hf

    def held() -> list[dict[str, Any]]:
        return [dict(vars(kind)) for kind in (PartialState, AcceleratorState, TrainingArguments)]

    with monkeypatch.context() as patched:
        patched.setattr(PartialState, "__init__", PartialState.__init__)  # as it is, also after this test
        before, environment = held(), dict(os.environ)
        anew = importlib.reload(potluck.integrations.hf)
        assert held() == before and dict(os.environ) == environment

        seen: list[str | None] = []
        patched.setattr(PartialState, "__init__", lambda state, **told: seen.append(os.environ.get("WORLD_SIZE")))
        patched.setenv("WORLD_SIZE", "2")

        class MyTrainer(anew.Elastic): ...  # type: ignore[misc, name-defined]

        PartialState()  # somebody else's
        assert seen == ["2"] and os.environ["WORLD_SIZE"] == "2"

        class Arguments(TrainingArguments):
            def __init__(self) -> None:
                pass

            def _setup_devices(self) -> None:
                PartialState(backend="gloo")

        Arguments()._setup_devices()
        assert seen == ["2", None] and os.environ["WORLD_SIZE"] == "2"


def test_losses_of_trl_that_parts_of_a_batch_cannot_compute_are_refused_by_name() -> None:
    from potluck.errors import ConfigError
    from potluck.integrations.hf import check_loss_in_parts, check_trainer

    def made(name: str, **settings: Any) -> Any:
        return type("MyTrainer", (type(name, (), {}),), settings)()

    for trainer, said in (
        (made("ORPOTrainer"), r"ORPOTrainer's loss adds a mean over tokens to one over rows, .*one worker, or use DPO"),
        (made("CPOTrainer", cpo_alpha=1.0), "set cpo_alpha=0"),
        (made("DPOTrainer", loss_types=["sigmoid", "sft"]), 'leave "sft" out'),
        (made("KTOTrainer", calculate_KL=True), 'loss_type="apo_zero_unpaired"'),
    ):
        with pytest.raises(ConfigError, match=said):
            check_loss_in_parts(trainer)
    check_loss_in_parts(made("DPOTrainer", loss_types=["sigmoid"]))
    check_loss_in_parts(made("KTOTrainer", calculate_KL=False))
    with pytest.raises(ConfigError, match="GRPOTrainer is not supported"):
        check_trainer(made("GRPOTrainer"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainers_model_may_be_split_over_workers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), llama(), save_strategy="epoch")
    for each in run_ranks(2, split_hf, str(tmp_path / "ours"), {"save_strategy": "epoch"}, timeout_s=150):
        assert_same_log(each, expected)
    read = transformers.LlamaForCausalLM.from_pretrained
    ours, plain = read(tmp_path / "ours" / "checkpoint-26"), read(tmp_path / "plain" / "checkpoint-26")
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainers_model_may_be_cut_into_stages(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {"save_strategy": "epoch", "gradient_accumulation_steps": 2}
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), llama(num_hidden_layers=3), **options)
    for each in run_ranks(2, staged_hf, str(tmp_path / "ours"), options, timeout_s=150):
        assert_same_log(each, expected)
    read = transformers.LlamaForCausalLM.from_pretrained
    ours, plain = read(tmp_path / "ours" / "model"), read(tmp_path / "plain" / "model")
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    with pytest.raises(RankFailed, match="only losses are evaluated, over a dataset with a length"):
        run_ranks(2, staged_hf, str(tmp_path / "guesses"), {"accuracy": True}, timeout_s=100)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trainers_run_stops_early_and_is_resumed(tmp_path: Path) -> None:
    """On other numbers of workers, too."""
    transformers = pytest.importorskip("transformers")
    early: dict[str, Any] = {
        "patience": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 5,
        "num_train_epochs": 6,
        "save_total_limit": 2,
    }
    expected = hf(transformers.Trainer, str(tmp_path / "plain"), llama(), **early)
    assert expected["steps"] < 78
    for each in run_ranks(2, elastic_hf, str(tmp_path / "early"), "llama", None, early, timeout_s=150):
        assert_same_log(each, expected)
        assert_close([each["best"]], [expected["best"]])
    whole = hf(transformers.Trainer, str(tmp_path / "whole"), llama(), save_strategy="steps", save_steps=9)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 9}
    place = tmp_path / "resumed"
    run_ranks(2, elastic_hf, str(place), "llama", None, options, timeout_s=150)
    for each in place.glob("checkpoint-*"):
        if each.name != "checkpoint-9":
            shutil.rmtree(each)
    told = json.loads((place / "checkpoint-9" / "trainer_state.json").read_text())
    assert told["global_step"] == 9
    found = elastic_hf(str(place), "llama", True, options)
    assert_same_log(found, whole)


# Lightning


def lightning(
    folder: str,
    strategy: str,
    resume: str | None = None,
    together: int = 1,
    is_split: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen: list[float] = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.log("of_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.seen.append(float(self.trainer.callback_metrics["val"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    if strategy == "potluck":
        import potluck.integrations.lightning

        assert potluck.integrations.lightning.PotluckStrategy.strategy_name == strategy
    torch.manual_seed(1)
    count = 53 if together == 1 else 48  # Lightning itself divides the loss of a short last step as that of the others
    x, y = torch.randn(count, 5), torch.randint(0, 3, (count,))
    draw = torch.Generator().manual_seed(4)
    train = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=draw)
    test = DataLoader(TensorDataset(x, y), batch_size=20)
    module = Module()
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=4,
        strategy=potluck.integrations.lightning.PotluckStrategy(strategy=potluck.FullShard()) if is_split else strategy,
        accelerator="cpu",
        devices=1,
        **{"gradient_clip_val": 0.5} | (options or {}),
        accumulate_grad_batches=together,
        callbacks=[saving, EarlyStopping("val", patience=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, train, test, ckpt_path=resume)
    return {
        "losses": module.seen,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weights": {} if is_split else {name: value.clone() for name, value in module.state_dict().items()},
        "files": sorted(path.name for path in Path(folder).glob("*.ckpt")),
        "of_epoch": float(trainer.callback_metrics["of_epoch"]),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def assert_same_fit(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(found["losses"], expected["losses"], 2e-6)
    assert_close([found["of_epoch"]], [expected["of_epoch"]], 2e-6)
    for name in ("steps", "epoch", "files"):
        assert found[name] == expected[name], name
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=2e-5)


@pytest.mark.timeout(120)
def test_lightnings_trainer_has_its_own_losses(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = lightning(str(tmp_path / "plain"), "auto", None, 3)
    assert_same_fit(lightning(str(tmp_path / "ours"), "potluck", None, 3), expected)


HABITS: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "limit_train_batches": 0.5},
    {"limit_train_batches": 5},
    {"overfit_batches": 2},
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", first_of(HABITS), ids=lambda options: list(options)[-1] + str(len(options)))
def test_lightnings_trainer_clips_and_cuts_epochs_as_it_was_told(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("lightning")
    expected = lightning(str(tmp_path / "plain"), "auto", None, 1, False, options)
    assert_same_fit(lightning(str(tmp_path / "ours"), "potluck", None, 1, False, options), expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("options", HABITS, ids=lambda options: list(options)[-1] + str(len(options)))
def test_two_workers_clip_and_cut_epochs_as_lightning_does(
    tmp_path: Path, options: dict[str, Any], is_split: bool
) -> None:
    pytest.importorskip("lightning")
    expected = lightning(str(tmp_path / "plain"), "auto", None, 1, False, options)
    arguments = (str(tmp_path / "ours"), "potluck", None, 1, is_split, options)
    for each in run_ranks(2, lightning, *arguments, timeout_s=120):
        assert_same_fit(each, expected | ({"weights": {}} if is_split else {}))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightnings_module_may_be_split_over_workers(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = lightning(str(tmp_path / "plain"), "auto")
    for each in run_ranks(2, lightning, str(tmp_path / "ours"), "potluck", None, 1, True, timeout_s=120):
        assert_same_fit(each, expected | {"weights": {}})
    saved = torch.load(tmp_path / "ours" / "epoch=3.ckpt", weights_only=True)["state_dict"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightning_on_two_workers_is_resumed_on_one(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = lightning(str(tmp_path / "plain"), "auto")
    for each in run_ranks(2, lightning, str(tmp_path / "ours"), "potluck", timeout_s=120):
        assert_same_fit(each, expected)
    middle = tmp_path / "ours" / "epoch=1.ckpt"
    resumed = lightning(str(tmp_path / "more"), "potluck", str(middle))
    assert_close(resumed["losses"], expected["losses"][2:], 2e-6)
    assert (resumed["steps"], resumed["epoch"]) == (expected["steps"], expected["epoch"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], value, rtol=0, atol=2e-5)


def test_loops_that_compute_their_own_loss_say_that_stages_are_not_for_them() -> None:
    pytest.importorskip("lightning")
    from potluck.errors import ConfigError
    from potluck.integrations.accelerate import Accelerator
    from potluck.integrations.lightning import PotluckStrategy

    with pytest.raises(ConfigError, match="Accelerate computes the loss by itself"):
        Accelerator(fleet_options={"stages": STAGES})
    with pytest.raises(ConfigError, match="Lightning computes the loss by itself"):
        PotluckStrategy(stages=STAGES)

"""Models of Hugging Face from their configs, one frozen but for its LoRA by PEFT, with padding, labels that do not
count, and tokens for samples: on two ranks, split and whole, in stages, and under a host from which one worker is
killed, against one plain process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import FullShard, NoShard, Pipeline, ShardGradOp, ShardingStrategy
from potluck.data.rows import mix
from potluck.stages import stage_planner
from tests.fleet import faults
from tests.fleet.fleet import Fleet
from tests.gathered import gathered, home
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ROWS, BATCH, EPOCHS, WORDS, PAD = 22, 6, 2, 13, 0
KINDS = ("llama", "gpt2", "bert", "mixtral", "lora")

Row = dict[str, list[int]]


def make_model(kind: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    match kind:
        case "llama":
            return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_key_value_heads=2))
        case "lora":
            import peft

            config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            return peft.get_peft_model(make_model("llama"), config)
        case "gpt2":
            config = t.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2)
            return t.GPT2LMHeadModel(_without_dropout(config))
        case "bert":
            return t.BertForMaskedLM(_without_dropout(t.BertConfig(**sizes)))
        case _:
            return t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3))


def _without_dropout(config: Any) -> Any:
    for name in vars(config):
        if name.endswith(("_pdrop", "_dropout_prob")):
            setattr(config, name, 0.0)
    return config


def make_rows(kind: str) -> list[Row]:
    """Of different lengths. Of a prompt's words, or of those that are not masked, nothing is to be learned."""
    draw = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(ROWS):
        length = int(torch.randint(3, 10, (1,), generator=draw))
        words = torch.randint(1, WORDS, (length,), generator=draw).tolist()
        is_said = torch.rand(length, generator=draw) < 0.4
        labels = [-100 if quiet else word for word, quiet in zip(words, is_said.tolist(), strict=True)]
        rows.append({"input_ids": words, "labels": labels})
    rows[5]["labels"] = [-100] * len(rows[5]["labels"])  # a row from which nothing is learned
    return rows


def collate(rows: list[Row]) -> Any:
    """As collators of Transformers do: padded to the longest, and no dict."""
    from transformers import BatchEncoding

    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, with_: int) -> Tensor:
        return torch.tensor([row[name] + [with_] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
    return BatchEncoding(
        {"input_ids": padded("input_ids", PAD), "attention_mask": mask, "labels": padded("labels", -100)}
    )


def loss_and_tokens(kind: str, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    labels = batch["labels"] if kind == "bert" else batch["labels"][:, 1:]
    return model(**batch).loss, int((labels != -100).sum())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, rows = make_model(kind).to(home()), make_rows(kind)
    optimizer, losses = optimizer_of(model), []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        for chosen in order.split(BATCH):
            loss, _ = loss_and_tokens(kind, model, collate([rows[i] for i in chosen.tolist()]).to(home()))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, dict(model.named_parameters())


def train(fleet: Any, kind: str) -> tuple[list[float], nn.Module]:
    model, losses = make_model(kind), []
    optimizer = optimizer_of(model)
    model, _, loader = fleet.prepare(model, optimizer, make_rows(kind), batch_size=BATCH, collate=collate)
    fleet.events.listeners.append(lambda event: losses.append(event.loss) if hasattr(event, "grad_norm") else None)
    for _ in fleet.epochs(EPOCHS):
        for batch in loader:
            loss, tokens = loss_and_tokens(kind, model, batch)
            fleet.backward(loss, samples=tokens)
            fleet.step()
    return losses, model


def on_a_rank(kinds: tuple[str, ...], strategy: ShardingStrategy) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        fleet = potluck.init(strategy=strategy, step=potluck.StepConfig(clip=0.5))
        losses, model = train(fleet, kind)
        found[kind] = losses, {name: gathered(p) for name, p in model.named_parameters()}
    return found


def assert_learned_the_same(found: dict[str, Tensor], kind: str, losses: list[float] | None = None) -> None:
    expected_losses, expected = plain(kind)
    if losses is not None:
        assert losses == pytest.approx(expected_losses, rel=2e-5), kind
    for name, value in expected.items():
        if name not in found:  # another stage has it
            continue
        torch.testing.assert_close(found[name], value.detach().cpu(), rtol=1e-3, atol=2e-5, msg=f"{kind} {name}")


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        (FullShard(), KINDS[::3]),
        pytest.param(FullShard(), ("gpt2", "bert", "lora"), marks=pytest.mark.slow),
        pytest.param(NoShard(), KINDS, marks=pytest.mark.slow),
        pytest.param(ShardGradOp(), KINDS, marks=pytest.mark.slow),
    ],
)
def test_they_learn_on_two_ranks_what_one_process_does(strategy: ShardingStrategy, kinds: tuple[str, ...]) -> None:
    for found in run_ranks(2, on_a_rank, kinds, strategy, timeout_s=90):
        for kind, (losses, weights) in found.items():
            assert_learned_the_same(weights, kind, losses)


def in_stages(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    loss_of = partial(loss_and_tokens, kind)
    losses = []
    with potluck.init(stages=Pipeline(micro_batch_size=2), step=potluck.StepConfig(clip=0.5), patience_s=30) as fleet:
        model = make_model(kind)
        optimizer = optimizer_of(model)
        told: dict[str, Any] = {"batch_size": BATCH, "collate": collate, "loss": loss_of}
        model, _, loader = fleet.prepare(model, optimizer, make_rows(kind), **told)
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.train(loss_of, batch)
                if (event := fleet.step()) is not None:
                    losses.append(event.loss)
        return losses, {name: gathered(p) for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_they_learn_it_in_stages(kind: str) -> None:
    ranks = run_ranks(2, in_stages, kind, timeout_s=90)
    assert set().union(*(weights for _, weights in ranks)) >= set(plain(kind)[1]), "between them they have all of it"
    for losses, weights in ranks:
        assert_learned_the_same(weights, kind, losses)


def job(fleet: Any, *, kind: str) -> nn.Module:
    """What a worker of a host runs."""
    return train(fleet, kind)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_they_learn_it_under_a_host_from_which_one_is_killed(tmp_path: Path, kind: str) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    steps = EPOCHS * -(-ROWS // BATCH)
    for name, fault in (("stays", None), ("dies", faults.in_backward)):
        fleet.add(name, fault, job=partial(job, kind=kind), step=potluck.StepConfig(clip=0.5), steps=steps)
    weights = fleet.finish(epochs=0)
    assert (tmp_path / "fired-backward").exists()
    assert_learned_the_same(weights, kind)

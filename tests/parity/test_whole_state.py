"""fleet.state_dict() and a model's own save_pretrained: the whole model from every strategy, to the bit, elsewhere."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import potluck
from potluck import Cadence, DataStore, Direct, FullShard, HybridShard, NoShard, ShardGradOp, Stages, Sync
from potluck.environment import RENDEZVOUS
from potluck.errors import ConfigError
from potluck.events import Noticed
from potluck.link import link, whereabouts
from potluck.save import checkpoint_folder, parts
from potluck.save.export import write_plain
from potluck.stages import stage_planner
from tests.fleet.fleet import Fleet, assert_same
from tests.quick import first_of
from tests.ranks import run_ranks

GROUPS: dict[str, dict[str, Any]] = {
    "whole": {},
    "windows": {"policy": Cadence.published(anchor=2, max_anchor=2)},
    "zero": {"strategy": ShardGradOp()},
    "full": {"strategy": FullShard()},
    "uneven": {"strategy": FullShard(weights=(3.0, 1.0))},
    "stages": {"stages": Stages(protocol=Direct())},
}


class Own(nn.Module):
    """What a library's model has: a tied head, a buffer, and a way to save itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        folder.mkdir(parents=True)
        state = self.state_dict() if state_dict is None else state_dict
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Own":
        model = cls()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


class OfItsOwnMind(Own):
    """One that is not to be told what its state is."""

    def save_pretrained(self, folder: Path) -> None:  # type: ignore[override]
        super().save_pretrained(folder)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("own", "mind"):
        return Own() if kind == "own" else OfItsOwnMind()
    import transformers

    if kind == "gpt2":  # its head is its embedding
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    if isinstance(model, Own):
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    return model(batch, labels=batch).loss  # type: ignore[no-any-return]


def rows() -> Tensor:
    return torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(1))


def train_and_save(folder: Path, kind: str, options: dict[str, Any]) -> list[str]:
    """What was said."""
    model = build(kind)
    names = list(model.state_dict())
    with potluck.init(**options, patience_s=30) as fleet:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given = {"batch_size": 8, "loss": loss_of, "scheduler": None}
        model, _, loader = fleet.prepare(model, optimizer, rows(), **given)
        heard: list[str] = []
        fleet.events.listeners.append(lambda each: heard.append(each.sentence) if isinstance(each, Noticed) else None)
        for batch in loader:
            fleet.train(loss_of, batch)
            fleet.step()
        model.save_pretrained(folder / "pretrained")  # type: ignore[operator]
        state = fleet.state_dict()
        assert bool(state) == (fleet.rank == 0)
        if state:
            assert list(state) == names
            torch.save(state, folder / "state.pt")
        fleet.save(folder / "checkpoints")
        fleet.wait_for_saves()
        for _ in range(2):
            try:
                model.state_dict()
            except ConfigError as refusal:  # by weights, where there is nothing of a parameter between forwards
                assert "fleet.state_dict()" in str(refusal)
    return heard


def save_everywhere(folder: str, groups: dict[str, dict[str, Any]], kinds: list[str]) -> dict[str, list[str]]:
    """One process group for all of them."""
    stage_planner.MEASURE_S = 0.0
    parts.BLOCK_BYTES = 256
    place, rank, world = f"file://{os.environ[RENDEZVOUS]}", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    told = {}
    for name, options in groups.items():
        for kind in kinds:
            told[f"{name}-{kind}"] = train_and_save(Path(folder) / f"{name}-{kind}", kind, options)
    dist.destroy_process_group()
    return told


def exported(folder: Path) -> dict[str, Tensor]:
    write_plain(checkpoint_folder.found(folder / "checkpoints")[0], folder / "plain.safetensors")
    return load_file(folder / "plain.safetensors")


def check(folder: Path, kind: str) -> dict[str, Tensor]:
    judge = exported(folder)
    state = torch.load(folder / "state.pt", weights_only=True)
    assert_same(state, judge)
    elsewhere = build(kind)
    elsewhere.load_state_dict(state)
    again = type(elsewhere).from_pretrained(folder / "pretrained")  # type: ignore[attr-defined]
    assert_same(again.state_dict(), judge)
    return judge


def check_all(place: Path, world: int, groups: dict[str, dict[str, Any]], kinds: list[str]) -> None:
    told = run_ranks(world, save_everywhere, str(place), groups, kinds, timeout_s=150)
    for run, heard in told[0].items():
        name, kind = run.split("-")
        judge, before = check(place / run, kind), build(kind).state_dict()
        assert all(torch.isfinite(tensor).all() for tensor in judge.values())
        assert not any(torch.equal(judge[name], before[name]) for name in judge), "each was trained"
        is_split = name not in ("whole", "windows", "zero")
        assert sum("a part of the model" in each for each in heard) == is_split, f"{run} says it once: {heard}"


def test_a_state_dict_is_the_whole_models_from_every_strategy(tmp_path: Path) -> None:
    check_all(tmp_path, 2, GROUPS, ["own"])


@pytest.mark.slow
def test_nodes_and_split_stages_too_and_models_that_are_not_told_their_state(tmp_path: Path) -> None:
    hybrid = HybridShard(intra_node_size=2)
    groups = {
        "hybrid": {"strategy": hybrid},
        "hybrid windows": {"strategy": hybrid, "policy": Cadence.published(anchor=2, max_anchor=2)},
        "split stages": {"strategy": hybrid, "stages": Stages(count=2, protocol=Direct())},
    }
    check_all(tmp_path, 4, groups, ["own", "mind"])


@pytest.mark.slow
def test_save_pretrained_of_transformers_loads_elsewhere_from_every_strategy(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_all(tmp_path, 2, GROUPS, ["gpt2", "llama"])


def only_rank_0(strategy: Any) -> list[str]:
    link.MEETING_S, whereabouts.QUIET_S = 0.1, 60.0
    heard: list[str] = []
    with potluck.init(strategy=strategy, patience_s=1.0) as fleet:
        model = Own()
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[assignment]
        fleet.events.listeners.append(lambda each: heard.append(each.sentence) if isinstance(each, Noticed) else None)
        if fleet.rank == 0:
            try:
                heard += list(fleet.state_dict())
            except ConfigError as error:
                heard.append(f"refused: {error}")
    return heard


def test_a_call_on_rank_0_alone_ends_in_a_sentence_or_needs_nobody() -> None:
    assert run_ranks(2, only_rank_0, NoShard())[0] == list(Own().state_dict())
    waits, refused = run_ranks(2, only_rank_0, FullShard())[0]
    assert waits.startswith("fleet.state_dict() waits for worker 1.") and "on every worker" in waits
    assert refused.startswith("refused: fleet.state_dict() was called on worker 0, and not on worker 1.")


def test_a_copy_of_a_prepared_model_saves_itself(tmp_path: Path) -> None:
    """Such as an average of weights."""
    with potluck.init() as fleet:
        own = Own()
        model, _ = fleet.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        average = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        with torch.no_grad():
            model.embed.weight.add_(1.0)  # type: ignore[union-attr, operator]
        average.save_pretrained(tmp_path / "average")  # type: ignore[operator]
        model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    pickled = torch.load(tmp_path / "model.pt", weights_only=False)
    pickled.save_pretrained(tmp_path / "pickled")
    weights = {each: Own.from_pretrained(tmp_path / each).embed.weight for each in ("model", "average", "pickled")}
    assert torch.equal(weights["model"], weights["average"] + 1.0)
    assert torch.equal(weights["pickled"], weights["average"])


def over_a_store(folder: str, url: str) -> None:
    stage_planner.MEASURE_S = 0.0
    parts.BLOCK_BYTES = 256
    train_and_save(Path(folder), "own", {"stages": Stages(protocol=DataStore(url=url))})


def test_stages_that_meet_in_a_store_give_the_whole_too(tmp_path: Path) -> None:
    run_ranks(2, over_a_store, str(tmp_path), f"file://{tmp_path}/store")
    check(tmp_path, "own")


def tell_whole(place: Path) -> None:
    """Each worker writes what fleet.state_dict() gives it at the end."""
    from potluck.engine.engine import Engine

    close = Engine.close

    def told(engine: Engine) -> None:
        state = engine.state_dict()
        if state:
            torch.save(state, place / f"state-{os.environ['POTLUCK_NAME']}-{engine.link.rank}.pt")
        close(engine)

    Engine.close = told  # type: ignore[method-assign]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("policy", first_of([Sync(), Cadence.published(anchor=1, max_anchor=2)]))
def test_under_a_host_the_first_worker_has_it(tmp_path: Path, policy: Any) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("one", tell_whole, policy=policy)
    fleet.add_node("two", 2, {0: tell_whole, 1: tell_whole}, policy=policy)
    weights = fleet.finish()
    found = [torch.load(path, weights_only=True) for path in tmp_path.glob("state-*.pt")]
    assert found, "whoever speaks for all got it"
    for state in found:
        assert_same(state, weights)

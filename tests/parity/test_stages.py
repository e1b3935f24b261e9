"""A model cut into stages, on real workers, against plain PyTorch in one process: every protocol, schedule and cut."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import DataStore, Direct, Pipeline, Stages
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import Decided, StepDone
from potluck.save import checkpoint_folder
from potluck.stages import stage_planner
from potluck.stages.plan import Plan
from potluck.stages.seats import seed_of
from tests.gathered import gathered, home
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, STEPS, MICRO = 22, 8, 6, 3  # batches of 8, 8 and 6 rows, in micro-batches of 3, 3, 2 and 3, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 20)
        self.outer = nn.Linear(20, 12, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.tanh(self.inner(x))))


class Net(nn.Module):
    """Embeddings that the head uses too, dropout, and a frozen parameter."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(12)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(12, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), batch[:, 1:].numel()


def make(tied: bool = True, drop: bool = True) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(tied)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not drop:
            module.p = 0.0
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data() -> Tensor:
    return torch.randint(0, 11, (ROWS, 5), generator=torch.Generator().manual_seed(1))


def one_process(
    steps: int = STEPS,
    clip: float | None = None,
    tied: bool = True,
    micro: int = MICRO,
    pipelines: int = 1,
    drop: bool = True,
    batch: int = BATCH,
    bf16: bool = False,
) -> dict[str, Any]:
    """Plain PyTorch, with each layer's random numbers from the micro-batch and the layer's place."""
    model, optimizer = make(tied, drop)
    model.to(home())
    rows, seed, losses = data().to(home()), 0, []

    def sow(place: int) -> None:
        torch.manual_seed(seed_of(seed, place))

    for place, block in enumerate(model.blocks, start=1):
        block.register_forward_pre_hook(lambda module, args, place=place: sow(place))
    epoch, at = 0, 0
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
    for _ in range(steps):
        if at == ROWS:
            epoch, at = epoch + 1, 0
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        end = min(at + batch, ROWS)
        total = count = 0.0
        parts = torch.arange(at, end).tensor_split(pipelines)
        for part in (one for pipeline in parts if len(pipeline) for one in pipeline.split(micro)):
            seed = mix(0, epoch, int(part[0]))
            with torch.autocast(home().type, torch.bfloat16, enabled=bf16):
                loss, samples = loss_of(model, rows[order[part]])
            (loss * samples).backward()
            total, count = total + loss.item() * samples, count + samples
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
        at = end
    return {"losses": losses, "weights": {name: gathered(p) for name, p in model.named_parameters()}}


def train(stages: Any, options: dict[str, Any]) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    clip, tied = options.get("clip"), options.get("tied", True)
    losses, step = [], options.get("step", potluck.StepConfig(clip=clip))
    policy, strategy = options.get("policy", potluck.Sync(balance=False)), options.get("strategy", potluck.NoShard())
    batch_size, steps = options.get("batch", BATCH), options.get("steps", STEPS)
    rows: list[list[int]] = []
    with potluck.init(policy, strategy, stages=stages, step=step, patience_s=30) as fleet:
        model, optimizer = make(tied, options.get("drop", True))
        model.to(options.get("device", "cpu"))
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=batch_size, loss=loss_of)
        fleet.events.listeners.append(lambda e: rows.append(list(e.rows)) if isinstance(e, Decided) else None)
        if fleet.run.grid.pipeline in options.get("slow", ()):
            model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        fleet.events.listeners.append(lambda e: losses.append(e.loss) if isinstance(e, StepDone) else None)
        while fleet.step_number < steps:
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
                if fleet.step_number == steps:
                    break
        model.state_dict()  # waits for what ShardGradOp is still sending
        whole = {name: gathered(p) for name, p in model.named_parameters()}
        return {"losses": losses, "weights": whole, "rows": rows}


def assert_same(found: list[dict[str, Any]], judge: dict[str, Any]) -> None:
    weights: dict[str, Tensor] = {}
    for each in found:
        assert each["losses"] == pytest.approx(judge["losses"], rel=1e-5)
        for name, tensor in each["weights"].items():
            # A weight that two stages have is the same on both, to the last bit.
            assert name not in weights or torch.equal(tensor, weights[name]), name
            weights[name] = tensor
    assert weights.keys() == judge["weights"].keys()
    for name, tensor in weights.items():
        # Gradients of micro-batches are added in another order where a weight is tied, and AdamW divides by their root.
        torch.testing.assert_close(tensor, judge["weights"][name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("workers", first_of([1, 2, 3, 4]))
@pytest.mark.parametrize(
    "schedule", first_of(["1f1b", pytest.param("gpipe", marks=pytest.mark.slow), "zero-bubble", "interleaved"])
)
def test_a_pipeline_learns_what_one_process_learns(schedule: Any, workers: int) -> None:
    stages = Pipeline(micro_batch_size=MICRO, schedule=schedule)
    assert_same(run_ranks(workers, train, stages, {"clip": 0.5}), one_process(clip=0.5))


@pytest.mark.parametrize("workers", first_of([2, 3]))
def test_direct_sends_whole_batches_to_the_same_end(workers: int) -> None:
    assert_same(run_ranks(workers, train, Direct(), {}), one_process(micro=BATCH))


@pytest.mark.parametrize("cuts", first_of([(1,), (4,), (7,), (1, 7), (2, 3, 6)], are_single=True))
def test_it_does_not_matter_where_it_is_cut(cuts: tuple[int, ...]) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=MICRO), cuts=cuts)
    assert_same(run_ranks(len(cuts) + 1, train, stages, {"tied": False}), one_process(tied=False))


@pytest.mark.parametrize("schedule", first_of(["1f1b", "zero-bubble"]))
def test_replicas_side_by_side_step_as_one(schedule: Any) -> None:
    """Two replicas of two stages: each batch is shared out among them, micro-batches as they fall."""
    stages = Stages(protocol=Pipeline(micro_batch_size=2, schedule=schedule), count=2)
    found = run_ranks(4, train, stages, {})
    for one, other in ((0, 2), (1, 3)):
        for name, tensor in found[one]["weights"].items():
            assert torch.equal(tensor, found[other]["weights"][name]), name
    assert_same(found, one_process(micro=2, pipelines=2))


@pytest.mark.parametrize("kind", first_of(["pipeline", "datastore"]))
def test_a_replica_without_rows_takes_no_part_in_a_step(kind: str, tmp_path: Any) -> None:
    """22 rows in batches of 7: the fourth has one row, which the first of two replicas gets."""
    protocol: Any = PIPELINE if kind == "pipeline" else DataStore(url=f"file://{tmp_path}/run", micro_batch_size=MICRO)
    found = run_ranks(4, train, Stages(protocol=protocol, count=2), {"batch": 7})
    assert_same(found, one_process(pipelines=2, batch=7))


@pytest.mark.slow
def test_a_replica_of_slow_stages_gets_fewer_rows() -> None:
    options = {"slow": (1,), "policy": potluck.Sync(), "drop": False, "batch": 11, "steps": 12}
    found = run_ranks(4, train, Stages(protocol=Pipeline(micro_batch_size=2), count=2), options)
    shared = found[0]["rows"]
    assert all(each["rows"] == shared for each in found)
    assert shared and shared[-1][0] > shared[-1][1], shared
    assert_same(found, one_process(steps=12, pipelines=2, batch=11, micro=2, drop=False))


@pytest.mark.parametrize("tied", first_of([True, False]))
@pytest.mark.parametrize(
    ("strategy", "workers", "count", "pipelines"),
    first_of(
        [
            (potluck.HybridShard(intra_node_size=2), 4, 2, 2),
            pytest.param(potluck.HybridShard(intra_node_size=2), 8, 2, 4, marks=pytest.mark.slow),
            (potluck.FullShard(), 4, 2, 2),
            (potluck.ShardGradOp(), 4, 2, 2),
        ]
    ),
)
def test_each_stage_may_itself_be_split(strategy: Any, workers: int, count: int, pipelines: int, tied: bool) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=2), count=count)
    # Their micro-batches are cut otherwise, so that all have equally many: no dropout, which would be another.
    found = run_ranks(workers, train, stages, {"strategy": strategy, "tied": tied, "drop": False})
    assert_same(found, one_process(micro=2, pipelines=pipelines, tied=tied, drop=False))


def go_on(folder: str, stages: Any, strategy: Any, upto: int) -> dict[str, Any]:
    """Trains to a step from wherever the folder stands, and saves."""
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    with potluck.init(potluck.Sync(balance=False), strategy, stages=stages, patience_s=30) as fleet:
        model, optimizer = make(drop=False)
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
        fleet.load(folder)
        while fleet.step_number < upto:
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
                if fleet.step_number == upto:
                    break
        fleet.save(folder)
        fleet.wait_for_saves()
        return {"weights": {name: gathered(p) for name, p in model.named_parameters()}, "losses": []}


PIPELINE = Pipeline(micro_batch_size=MICRO)
SETUPS: list[tuple[int, Any, Any]] = [
    (2, PIPELINE, potluck.NoShard()),
    (1, None, potluck.NoShard()),
    (3, Direct(), potluck.NoShard()),
    (2, None, potluck.FullShard()),
    (2, Pipeline(micro_batch_size=MICRO, schedule="interleaved"), potluck.NoShard()),
    (4, Stages(protocol=PIPELINE, count=2), potluck.HybridShard(intra_node_size=2)),
    (4, Stages(protocol=PIPELINE, count=2), potluck.NoShard()),
]


@pytest.mark.slow
def test_a_checkpoint_is_the_whole_models_and_loads_with_another_cut_or_none(tmp_path: Any) -> None:
    """One run that changes its workers, its cut and its strategy at every step."""
    in_a_store = DataStore(url=f"file://{tmp_path}/store", micro_batch_size=MICRO)
    setups = [*SETUPS, (3, in_a_store, potluck.NoShard()), SETUPS[0]]
    for step, (workers, stages, strategy) in enumerate(setups, start=1):
        found = run_ranks(workers, go_on, str(tmp_path), stages, strategy, step)
    judge = one_process(steps=len(setups), drop=False)
    for each in found:
        each["losses"] = judge["losses"]
    assert_same(found, judge)
    plan = Plan.from_json(checkpoint_folder.check(checkpoint_folder.found(tmp_path)[0])["plan"])
    assert len(plan.stages) == 2


@pytest.mark.parametrize("workers", first_of([1, 2, 3]))
def test_stages_that_meet_in_a_folder_learn_what_one_process_learns(workers: int, tmp_path: Any) -> None:
    stages = DataStore(url=f"file://{tmp_path}/run", micro_batch_size=MICRO, keep_every=2)
    assert_same(run_ranks(workers, train, stages, {"clip": 0.5}), one_process(clip=0.5))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing is left behind


@pytest.mark.parametrize("schedule", first_of(["1f1b", "zero-bubble"]))
def test_recomputing_and_bf16_go_with_stages(schedule: Any) -> None:
    stages = Pipeline(micro_batch_size=MICRO, schedule=schedule)
    found = run_ranks(2, train, stages, {"step": potluck.StepConfig(checkpoint_activations=True)})
    assert_same(found, one_process())
    # Against bf16 itself: on a GPU, dropout of bf16 numbers drops others than that of float32 numbers.
    judge = one_process(bf16=True)
    for each in run_ranks(2, train, stages, {"step": potluck.StepConfig(precision="bf16")}):
        assert each["losses"] == pytest.approx(judge["losses"], rel=2e-3)  # sums over micro-batches in another order


def of_hugging_face(kind: str, stages: Any) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=4, n_head=2)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch, labels=batch).loss  # type: ignore[no-any-return]

    losses = []
    if stages is None:
        model.to(home())
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
        for rows in order.split(BATCH):
            loss = own_loss(model, data()[rows].to(home()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    else:
        with potluck.init(stages=stages, patience_s=30) as fleet:
            model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=own_loss)
            for batch in loader:
                fleet.train(own_loss, batch)
                if (event := fleet.step()) is not None:
                    losses.append(event.loss)
    return {"losses": losses, "weights": {name: gathered(p) for name, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_hugging_face_are_cut_as_they_are(kind: str) -> None:
    """Made from a config, with the loss inside the model; GPT-2's head is its embedding."""
    judge = of_hugging_face(kind, None)
    assert_same(run_ranks(2, of_hugging_face, kind, Pipeline(micro_batch_size=2)), judge)


def spoiled(stages: Any) -> dict[str, Any]:
    """A loss that is not a number in the second step; weights before and after it."""
    stage_planner.MEASURE_S = 0.0
    events: list[Any] = []
    seen = 0

    def bad_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        loss, samples = loss_of(model, batch)
        return (loss * float("nan") if seen == 1 else loss), samples

    with potluck.init(potluck.Sync(balance=False), stages=stages, patience_s=30) as fleet:
        model, optimizer = make()
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
        kept: list[dict[str, Tensor]] = []
        for batch in loader:
            fleet.train(bad_loss, batch)
            if (event := fleet.step()) is not None:
                events.append(type(event).__name__)
                kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
                seen += 1
        same = all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
        moved = any(not torch.equal(kept[1][name], kept[2][name]) for name in kept[0])
    return {"events": events, "same": same, "moved": moved}


@pytest.mark.parametrize("schedule", first_of(["1f1b", "zero-bubble"]))
def test_a_step_that_is_not_finite_is_skipped_by_every_stage(schedule: Any) -> None:
    for told in run_ranks(3, spoiled, Pipeline(micro_batch_size=MICRO, schedule=schedule)):
        assert told == {"events": ["StepDone", "StepSkipped", "StepDone"], "same": True, "moved": True}


def refused(stages: Any, options: dict[str, Any]) -> str:
    try:
        with potluck.init(stages=stages, **options) as fleet:
            model, optimizer = make()
            fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
    except ConfigError as error:
        return str(error)
    return "nothing"


class Together(torch.optim.SGD):
    """Looks at all parameters at once."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step(closure)


def stepped_together(kind: str) -> str:
    try:
        with potluck.init(stages=PIPELINE) as fleet:
            model, optimizer = make()
            if kind == "class":
                optimizer = Together(model.parameters(), lr=0.1)
            elif kind == "hook":
                optimizer.register_step_pre_hook(lambda *_: None)
            model, _, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
            if kind == "late hook":
                optimizer.register_step_pre_hook(lambda *_: None)
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", first_of(["hook", "late hook", "class"]))
def test_what_looks_at_all_parameters_in_a_step_is_refused_where_each_stage_has_some(kind: str) -> None:
    sentence = {"class": "what it does to a parameter depends on the other parameters"}.get(kind, "has a step_pre_hook")
    for said in run_ranks(2, stepped_together, kind):
        assert sentence in said


@pytest.mark.parametrize(
    ("stages", "options", "sentence"),
    first_of(
        [
            (
                PIPELINE,
                {"step": potluck.StepConfig(offload_optimizer=True)},
                "offload_optimizer does not go with stages",
            ),
            (
                Pipeline(micro_batch_size=2, schedule="zero-bubble"),
                {"strategy": potluck.FullShard()},
                "of which a split stage would not hear",
            ),
            (DataStore(url="file:///tmp/nowhere"), {"strategy": potluck.FullShard()}, "have no process group"),
            (Stages(protocol=PIPELINE, cuts=(2, 3)), {}, "stages.cuts makes 3 stages, and there are 1"),
            (Stages(protocol=PIPELINE, cuts=(90,), count=1), {}, "stages.cuts makes 2 stages, and there are 1"),
        ]
    ),
)
def test_what_does_not_go_with_stages_is_refused_in_a_sentence(stages: Any, options: Any, sentence: str) -> None:
    assert sentence in refused(stages, options)

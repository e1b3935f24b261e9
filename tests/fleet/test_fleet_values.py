"""fleet.mean(), fleet.gather() and metrics of one's own under a host, with real workers that come and are killed."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import potluck
from potluck.agree.loss_scale import most_falls
from potluck.events import Validated, WorkerWent
from potluck.replica.precision import StepConfig
from potluck.save.checkpoint import CheckpointConfig
from potluck.save.checkpoint_folder import best_of, found
from tests.fleet.fleet import BATCH, EPOCHS, STEPS, Fleet, assert_same, build, die
from tests.fleet.judges import plain_run

pytestmark = pytest.mark.timeout(90)


def values_after_each_step(place: Path, *, dies_at: int = 0) -> None:
    """A loop that wants everybody's values after each step, and keeps what it was given."""
    from potluck.engine.engine import Engine

    prepare, found = Engine.prepare, {}

    def prepared(engine: Any, *given: Any, **options: Any) -> Any:
        def look() -> None:
            step = engine.step_number
            if step == dies_at:
                die(place, "values")
            rows = torch.full((1 + engine.link.rank, 2), float(step))
            gathered, mean = engine.gather(rows), engine.mean({"step": step, "loss": engine.last_step.loss}, weight=2)
            assert gathered.shape[1] == 2 and bool((gathered == step).all()) and mean["step"] == step
            assert mean["loss"] == engine.last_step.loss
            found[step] = len(gathered)
            if step % 5 == 0:
                figures = engine.evaluate(figures_of, (given[2][0][:20], given[2][1][:20]), 4)
                found[f"at {step}"] = list(figures.items())
            (place / f"{os.environ['POTLUCK_NAME']}.{engine.link.rank}.values").write_text(json.dumps(found))

        engine.after_agreement.append(look)
        return prepare(engine, *given, **options)

    Engine.prepare = prepared  # type: ignore[method-assign]


def figures_of(model: Any, batch: Any) -> Any:
    output = model(batch[0])
    right = (output.argmax(1) == batch[1]).float().mean()
    return {"right": right, "loss": F.cross_entropy(output, batch[1]), "two": 2.0}, len(batch[1])


def values(place: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((place / f"{name}.{rank}.values").read_text()))


def counts(found: dict[str, Any]) -> dict[int, int]:
    return {int(step): count for step, count in found.items() if step.isdigit()}


def test_values_are_of_all_who_are_there_also_when_one_is_killed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=3)
    fleet.add("one", values_after_each_step)
    fleet.add("other", values_after_each_step)
    fleet.add("dies", partial(values_after_each_step, dies_at=6))
    weights = fleet.finish()
    assert (tmp_path / "fired-values").exists()
    one, other = values(tmp_path, "one"), values(tmp_path, "other")
    assert counts(one) == {step: 3 if step < 6 else 2 for step in range(1, STEPS + 1)}
    assert one == other, "figures are the same bits on both"
    figures = dict(one["at 10"])
    assert list(figures) == ["loss", "right", "two"] and 0 <= figures["right"] <= 1 and figures["two"] == 2.0
    told = [event for event in fleet.events if isinstance(event, Validated)]
    assert [event.step for event in told] == [5, 10] and told[1].metrics == figures
    assert told[1].loss == figures["loss"]
    assert_same(weights, plain_run())


@pytest.mark.slow
def test_each_rank_of_a_worker_gives_its_own(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", faults=dict.fromkeys(range(2), values_after_each_step))
    fleet.add("one", values_after_each_step)
    fleet.finish()
    found = values(tmp_path, "one")
    assert found[str(STEPS)] == 1 + 2 + 1 and found == values(tmp_path, "node.1", 1)


# Trainer: the average of the weights, the early end, the best checkpoint

FIT: dict[str, Any] = {"epochs": EPOCHS, "ema": 0.8, "validate_every": 2}


def validated(fleet: Fleet) -> dict[int, float]:
    return {event.step: event.loss for event in fleet.events if isinstance(event, Validated)}


def slowly(place: Path, *, dies_at: int = 0) -> None:
    from potluck.train.trainer import Trainer

    look = Trainer._after_agreement

    def looked(trainer: Any) -> None:
        if trainer.engine.step_number == dies_at:
            die(place, "average")
        time.sleep(0.05)
        look(trainer)

    Trainer._after_agreement = looked  # type: ignore[method-assign]


def test_the_average_is_the_same_whoever_comes_and_goes(tmp_path: Path) -> None:
    """The late one gets the others' average with the weights, and is the only one left at the end."""
    alone = Fleet(make_folder(tmp_path / "alone"))
    alone.add("one", fit=FIT)
    alone.finish()
    fleet = Fleet(make_folder(tmp_path / "several"))
    fleet.add("first", partial(slowly, dies_at=10), fit=FIT)
    fleet.wait_for_step(4)
    fleet.add("late", slowly, fit=FIT)
    fleet.finish()
    assert (tmp_path / "several" / "fired-average").exists()
    expected, told = validated(alone), validated(fleet)
    assert len(expected) == STEPS // 2 and {step: expected[step] for step in told} == told and max(told) == STEPS


def rising(place: Path) -> None:
    """The loss after step 4 is never better."""
    from potluck.validations import Validations

    slowly(place)
    take = Validations.take
    Validations.take = lambda seen, step, loss: take(seen, step, loss if step <= 4 else 1e9)  # type: ignore[method-assign]


def test_a_run_ends_early_for_all_and_the_host_keeps_the_best(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fit = {"epochs": EPOCHS, "validate_every": 2, "patience": 3, "checkpoint": CheckpointConfig(keep_last=1, best=True)}
    fleet.add("first", rising, fit=fit, steps=10, hold_at=5)
    fleet.wait_for_step(4)
    fleet.add("late", rising, fit=fit, steps=10)
    fleet.let_in("late")
    finish = fleet.server.wait(60)
    assert finish is not None and (finish.reason, finish.failed) == ("finished", False), fleet.describe()
    for worker in fleet.workers:
        worker.wait(20)
    assert fleet.server.core.standing.version == 10, "three validations after step 4"
    assert_same(fleet.workers[0].weights, fleet.workers[1].weights)
    names = [path.name for path in found(tmp_path / "checkpoints")]
    assert names == ["step-00000010", "step-00000004"]
    fleet.close()


def falling(place: Path) -> None:
    """Each validation is the best so far."""
    from potluck.validations import Validations

    take = Validations.take
    Validations.take = lambda seen, step, loss: take(seen, step, -step)  # type: ignore[method-assign]


def test_the_last_validation_of_a_trainer_is_kept_as_its_best(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fit = {"epochs": EPOCHS, "checkpoint": CheckpointConfig(keep_last=1, best=True)}
    for name in ("first", "second"):
        fleet.add(name, falling, fit=fit)
    fleet.finish()
    best = best_of(found(tmp_path / "checkpoints"))
    assert best is not None and best.name.startswith(f"step-{STEPS:08d}")
    kept = load_file(tmp_path / "best.safetensors")
    assert_same(kept, load_file(best / "model.safetensors"))


def best_at_its_end(fleet: Any) -> torch.nn.Module:
    """A loop of one's own, each of whose epochs is its best."""
    model, optimizer, data = build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    for epoch in fleet.epochs(EPOCHS):
        for x, y in loader:
            fleet.backward(F.cross_entropy(model(x), y), samples=len(x))
            fleet.step()
        assert fleet.keep_best(-float(epoch))
    return model  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_ranks_of_a_worker_keep_its_last_step_as_the_best_together(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add_node("node", 2, job=best_at_its_end)
    weights = fleet.finish()
    best = best_of(found(tmp_path / "checkpoints"))
    assert best is not None and best.name.startswith(f"step-{STEPS:08d}")
    kept = load_file(tmp_path / "best.safetensors")
    assert_same(kept, {name: weights[name] for name in kept})


VALUES = [3.0, 2.0, 2.5, 2.6, 2.7, 1.0]


def stops_early(folder: Path, fleet: Any) -> torch.nn.Module:
    """A loop of one's own, whose second epoch is its best."""
    model, optimizer, data = build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    for epoch in fleet.epochs(6):
        place = folder / f"{os.environ['POTLUCK_NAME']}.rank"
        if not place.exists():
            place.write_text(f"{fleet.rank} of {fleet.world}")
        for x, y in loader:
            fleet.backward(F.cross_entropy(model(x), y), samples=len(x))
            fleet.step()
        fleet.keep_best(VALUES[epoch])
        if fleet.early_stop(VALUES[epoch], patience=3):
            break
    return model  # type: ignore[no-any-return]


def test_a_newcomer_in_mid_patience_counts_on_from_what_the_others_have_counted(tmp_path: Path) -> None:
    fleet, each = Fleet(tmp_path), STEPS // EPOCHS
    fleet.add("first", job=partial(stops_early, tmp_path), hold_at=3 * each + 1, steps=5 * each)
    fleet.wait_for_step(3 * each + 1)  # one value was no better by now
    fleet.add("late", job=partial(stops_early, tmp_path), steps=5 * each)
    fleet.let_in("late")
    finish = fleet.server.wait(60)
    assert finish is not None and (finish.reason, finish.failed) == ("finished", False), fleet.describe()
    for worker in fleet.workers:
        worker.wait(20)
    assert fleet.server.core.standing.version == 5 * each, "three values after the best, of which the newcomer saw two"
    assert_same(fleet.workers[0].weights, fleet.workers[1].weights)
    best = best_of(found(tmp_path / "checkpoints"))
    assert best is not None and best.name == f"step-{2 * each:08d}"
    assert (tmp_path / "best.safetensors").is_file()
    ranks = [(tmp_path / f"{name}.rank").read_text() for name in ("first", "late")]
    assert ranks == ["0 of 1", "1 of 2"], "a newcomer does not print as if it were alone"
    fleet.close()


def averages_after_load(folder: Path, fleet: Any) -> torch.nn.Module:
    model, optimizer, data = build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    fleet.load(folder)
    average = fleet.ema(0.8)
    for _ in fleet.epochs(EPOCHS):
        for x, y in loader:
            fleet.backward(F.cross_entropy(model(x), y), samples=len(x))
            fleet.step()
    torch.save(average._averages, folder / f"{os.environ['POTLUCK_NAME']}.average")
    return model  # type: ignore[no-any-return]


def test_a_newcomer_whose_loop_loads_before_it_asks_for_the_average_has_the_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", job=partial(averages_after_load, tmp_path), hold_at=5)
    fleet.wait_for_step(4)
    fleet.add("late", job=partial(averages_after_load, tmp_path))
    fleet.let_in("late")
    fleet.finish()
    one, late = (torch.load(tmp_path / f"{name}.average") for name in ("first", "late"))
    assert len(one) == len(late) > 0 and all(map(torch.equal, one, late))


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def keeps_its_average(place: Path) -> None:
    from potluck.train.trainer import Trainer

    run = Trainer._run

    def ran(trainer: Any) -> None:
        run(trainer)
        torch.save(trainer.average._averages, place / f"{os.environ['POTLUCK_NAME']}.average")

    Trainer._run = ran  # type: ignore[method-assign]


@pytest.mark.slow
def test_under_windows_the_average_is_of_what_all_agree_on(tmp_path: Path) -> None:
    policy = potluck.Cadence.published(anchor=2, max_anchor=2)
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("one", "other"):
        fleet.add(name, keeps_its_average, policy=policy, fit=FIT)
    fleet.finish()
    one, other = (torch.load(tmp_path / f"{name}.average", weights_only=True) for name in ("one", "other"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# fp16


def steep(place: Path, *, dies_at: int = 0) -> None:
    """The loss scale is far too high at first, and falls step by step."""
    from potluck.engine.engine import Engine

    prepare = Engine.prepare

    def prepared(engine: Any, *given: Any, **options: Any) -> Any:
        def look() -> None:
            if engine.step_number == dies_at:
                die(place, "fp16")
            time.sleep(0.03)
            scales = (place / f"{os.environ['POTLUCK_NAME']}.scales").open("a")
            print(engine.step_number, engine.run.step.scale.value, file=scales)

        engine.run.step.scale.value = 2.0**22
        engine.after_agreement.append(look)
        return prepare(engine, *given, **options)

    Engine.prepare = prepared  # type: ignore[method-assign]


def scales_of(place: Path, name: str) -> dict[str, str]:
    return dict(line.split() for line in (place / f"{name}.scales").read_text().splitlines())


@pytest.mark.slow
def test_the_loss_scale_of_fp16_is_everybodys_also_a_newcomers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"step": StepConfig(precision="fp16"), "sgd": True}
    alone = Fleet(make_folder(tmp_path / "alone"))
    alone.add("one", steep, **options)
    weights = alone.finish()
    fleet = Fleet(make_folder(tmp_path / "several"))
    fleet.add("first", partial(steep, dies_at=11), **options)
    fleet.wait_for_step(3)
    fleet.add("late", steep, **options)
    assert_same(fleet.finish(), weights)
    expected, late = scales_of(tmp_path / "alone", "one"), scales_of(tmp_path / "several", "late")
    assert (tmp_path / "several" / "fired-fp16").exists()
    assert late == {step: expected[step] for step in late} and float(expected[str(STEPS)]) < 2.0**22
    assert not fleet.server.core.refused["drifted"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [potluck.Sync(), potluck.Cadence.published(anchor=1, max_anchor=2)])
def test_fp16_on_ranks_of_one_worker_and_under_windows(tmp_path: Path, policy: Any) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    options: dict[str, Any] = {"step": StepConfig(precision="fp16"), "sgd": True, "policy": policy, "bare": True}
    fleet.add_node("node", faults=dict.fromkeys(range(2), steep), **options)
    fleet.add("one", steep, **options)
    fleet.finish()
    one, node = scales_of(tmp_path, "one"), scales_of(tmp_path, "node")
    assert float(one[str(STEPS)]) < 2.0**22 and node == scales_of(tmp_path, "node.1")
    assert policy != potluck.Sync() or one == node


def says_that_it_overflows(place: Path) -> None:
    """Whatever it has computed, in each of its steps."""
    from potluck.engine.slice_steps import SliceSteps

    SliceSteps._has_overflowed = lambda steps: True  # type: ignore[method-assign]


def test_one_that_always_says_that_it_overflows_is_named_and_turned_out_when_the_scale_has_fallen_to_its_least(
    tmp_path: Path,
) -> None:
    """The other one trains on: the scale has its floor, and the run does not end or skip for it."""
    steps = STEPS // EPOCHS * 5
    options: dict[str, Any] = {"step": StepConfig(precision="fp16"), "sgd": True, "epochs": 5, "steps": steps}
    fleet = Fleet(tmp_path, at_least=2)
    fleet.server.on_step = lambda record, lr, norm, fault: faults.append(fault)
    faults: list[str] = []
    fleet.add("honest", **options)
    fleet.add("insider", says_that_it_overflows, **options)
    finish = fleet.server.wait(60)
    assert finish is not None and not finish.failed
    fleet.workers[0].wait()
    falls = most_falls(0)
    assert len(faults) == steps and (tmp_path / "honest.pt").exists()
    assert [fault for fault in faults if fault] == ["a gradient overflows in fp16 on insider"] * falls
    assert fleet.server.core.refused["overflows"] == 1
    told = f"insider reported {falls + 1} times that its gradient overflows in fp16"
    assert told in (tmp_path / "insider.error").read_text()
    assert any(isinstance(e, WorkerWent) and told in e.reason for e in fleet.events)

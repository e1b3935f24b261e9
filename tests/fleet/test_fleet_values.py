"""fleet.mean(), fleet.gather() and metrics of one's own under a host, with real workers that come and are killed."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from potluck.events import Validated
from tests.fleet.fleet import STEPS, Fleet, assert_same, die
from tests.fleet.test_undisturbed import plain_run

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

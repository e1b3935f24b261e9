"""What torch compiles, by its own counters. The backend is the plain one: how a graph is compiled is torch's affair."""

import functools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck.replica import compiling
from potluck.replica.compiling import Compiling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("rows", [8, 11])
def test_a_short_last_batch_compiles_nothing_again(rows: int, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(Block(), Block())
    with potluck.Engine(step=potluck.StepConfig(compile=True)) as fleet:
        model, _, loader = fleet.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(rows, 4), batch_size=4
        )
        sizes = []
        for batch in loader:
            fleet.backward(model(batch).square().mean(), samples=len(batch))
            fleet.step()
            sizes.append(len(batch))
    assert len(set(sizes)) == (1 if rows == 8 else 2)
    # One for the first block, whose input needs no gradient, and one for all others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert capsys.readouterr().err.count("Compiling the model; the steps that wait for it take longer") == 1
    torch._dynamo.reset()


def test_a_long_compilation_is_told_of_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SAY_EVERY_S", 0.01)
    said: list[str] = []
    heard = Compiling(said.append)

    def slow(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        deadline = time.monotonic() + 10
        while not any("Still compiling" in sentence for sentence in said) and time.monotonic() < deadline:
            time.sleep(0.001)
        return graph.forward

    try:
        torch.compile(lambda x: x + 1, backend=slow)(torch.ones(2))
        deadline = time.monotonic() + 10
        while not said[-1].startswith("Compiled in") and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        heard.close()
    assert said[0].startswith("Compiling the model") and said[1].startswith("Still compiling, for ")
    assert said[-1].startswith("Compiled in ")
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len([sentence for sentence in said if sentence.startswith("Compiling")]) == 1


def test_a_whole_model_in_bf16_is_one_graph_and_gives_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Block()
    with potluck.Engine(step=potluck.StepConfig(compile=True, precision="bf16")) as fleet:
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(2, 4))
    assert output.dtype == torch.float32 and torch.equal(output, output.bfloat16().float())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()

"""Masters: a bf16 model whose weights are stepped in float32. The judge is a bare loop with a list of masters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from potluck.replica.precision import Masters


class Net(nn.Module):
    """A tied head, a layer whose weight its parent uses (attention's), a recurrent one, and one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.recur = nn.GRU(16, 16, batch_first=True)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.head.weight.dtype == next(self.parameters()).dtype == torch.bfloat16
        x = self.embed(tokens)
        x = x + self.attend(x, x, x)[0]
        x = x + self.recur(x)[0]
        x = x + checkpoint(self.block, x, use_reentrant=False)  # type: ignore[operator]
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def rows() -> Any:
    return torch.randint(0, 20, (6, 4, 7), generator=torch.Generator().manual_seed(1))


def judged() -> tuple[list[float], list[Tensor]]:
    model = Net().bfloat16()
    halves = list(model.parameters())
    masters = [half.detach().float().requires_grad_() for half in halves]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    found = []
    for batch in rows():
        loss = losses(model, batch)
        loss.backward()
        for half, master in zip(halves, masters, strict=True):
            assert half.grad is not None
            master.grad, half.grad = half.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for half, master in zip(halves, masters, strict=True):
                half.copy_(master)
        found.append(loss.item())
    return found, masters


def with_masters() -> tuple[nn.Module, list[nn.Parameter]]:
    model = Net().bfloat16()
    own = list(model.parameters())
    for parameter in own:
        parameter.data = parameter.data.float()
    Masters(model, own)
    return model, own


def test_weights_are_stepped_as_by_a_bare_loop_with_masters() -> None:
    model, own = with_masters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in rows():
        loss = losses(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        assert all(mine is now for mine, now in zip(own, model.parameters(), strict=True))
    expected, masters = judged()
    assert found == expected
    for mine, theirs in zip(own, masters, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert any(not torch.equal(mine, mine.bfloat16().float()) for mine in own), "more digits than bf16 has"


def test_a_part_of_the_model_a_copy_and_a_failed_forward_see_bf16_and_leave_masters() -> None:
    model, own = with_masters()
    assert model.get_submodule("norm")(torch.ones(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert all(mine is now for mine, now in zip(own, model.parameters(), strict=True))
    other = copy.deepcopy(model)
    batch = rows()[0]
    losses(other, batch).backward()
    assert all(mine.grad is None and twin.grad is not None for mine, twin in zip(own, other.parameters(), strict=True))
    with torch.no_grad():
        assert losses(other, batch).item() == losses(model, batch).item()


def test_a_forward_that_was_interrupted_leaves_no_old_copies_for_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Identity())
    Masters(model, list(model.parameters()))
    ones = torch.ones(1, 2, dtype=torch.bfloat16)

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    hook = model[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ones)
    hook.remove()
    assert model[0].weight.dtype == torch.bfloat16  # torch has called no hook
    model(ones)
    assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.dtype == torch.float32
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert float(model(ones)) == 6.0

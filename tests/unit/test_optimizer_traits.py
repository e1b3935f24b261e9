"""The table of optimizers is true of those that are installed: what they keep has the names that it says."""

from typing import Any

import pytest
import torch
from torch import nn

from potluck.replica.moments import look_at_state
from potluck.sharding.optimizer_traits import COUNTERS, FIRST, SECOND, TRAITS, is_elementwise, traits_of

VARIANTS: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
}
ELEMENTWISE = [kind for kind, row in TRAITS.items() if isinstance(kind, type) and row.steps == "numbers"]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_row_names_what_an_optimizer_keeps(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1, **VARIANTS.get(kind, {}))
    assert is_elementwise(optimizer)
    kept, row = look_at_state(optimizer), traits_of(kind)
    assert row is not None and row.first | row.second | row.counters <= kept.keys()
    assert row.counters == kept.keys() & COUNTERS, "no name of another's counter is a number of its own"
    assert row.first == kept.keys() & FIRST and row.second == kept.keys() & SECOND
    for name, value in kept.items():
        assert (torch.as_tensor(value).numel() == 1) == (name in row.counters), name


def test_a_class_is_known_by_its_own_name_and_not_by_its_parents() -> None:
    class Own(torch.optim.Muon):
        pass

    assert traits_of(Own) is None and traits_of(torch.optim.Muon) is TRAITS[torch.optim.Muon]
    assert traits_of(type("AdamW8bit", (), {"__module__": "torchao.optim.adam"})) is TRAITS["torchao"]

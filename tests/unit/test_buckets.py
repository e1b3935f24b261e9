import torch
from torch import nn

from potluck.replica import buckets
from potluck.replica.buckets import find_units, group_units
from potluck.replica.replica import find_blocks
from potluck.train.model import GPT, ModelConfig


def names(model: nn.Module, groups: list[list[nn.Parameter]]) -> list[list[str]]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[known[id(parameter)] for parameter in group] for group in groups]


def test_buckets_end_where_blocks_end_so_that_none_waits_for_another(monkeypatch: object) -> None:
    model = GPT(ModelConfig(dim=64, layers=3, heads=2))
    units = list(reversed(find_units(model, find_blocks(model))))
    block_bytes = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    monkeypatch.setattr(buckets, "BUCKET_BYTES", int(2.5 * block_bytes))  # type: ignore[attr-defined]
    monkeypatch.setattr(buckets, "FIRST_BYTES", block_bytes // 2)  # type: ignore[attr-defined]
    found = names(model, group_units(units))
    assert found[0] == ["lm_head.weight", "final_norm.weight"] or found[0] == ["final_norm.weight", "lm_head.weight"]
    homes = [sorted({".".join(name.split(".")[:2]) for name in group}) for group in found[1:]]
    assert homes == [["blocks.1", "blocks.2"], ["blocks.0", "embedding.weight"]]
    assert sorted(name for group in found for name in group) == sorted(name for name, _ in model.named_parameters())


def test_a_unit_larger_than_a_bucket_is_cut_and_types_are_kept_apart(monkeypatch: object) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)  # type: ignore[attr-defined]
    monkeypatch.setattr(buckets, "FIRST_BYTES", 100)  # type: ignore[attr-defined]
    a, b = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(20))
    c, d = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(5, dtype=torch.float64))
    found = [[id(p) for p in group] for group in group_units([[a, b], [c, d]])]
    assert found == [[id(b)], [id(a)], [id(d), id(c)]]


def test_blocks_are_the_longest_list_of_one_class() -> None:
    model = GPT(ModelConfig(dim=16, layers=3, heads=2))
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []

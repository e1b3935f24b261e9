"""Fine-tuning gives the losses of peft and transformers in a plain loop, however it is cut and whoever computes it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.made import chats, judge, judged_rows, labelled, make_place, tuned
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _kept_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # a run changes into its folder


def assert_judged(found: dict[str, Any], judged: dict[str, Any], tolerance: float = 2e-6) -> None:
    assert len(found["losses"]) == len(judged["losses"])
    assert found["losses"] == pytest.approx(judged["losses"], rel=tolerance)


def logits_of(place: Path, folder: str, *, lora: bool = True) -> torch.Tensor:
    """Of the first row, by what the run has written, loaded as anybody would."""
    import peft
    import transformers as t

    from potluck.finetune.result import config_of, write_result

    os.chdir(place)
    result = write_result(Path(folder), config_of(Path(folder)))
    tokenizer = t.AutoTokenizer.from_pretrained(result)
    rows, _ = judged_rows(place, tokenizer)
    kind = t.AutoModelForSequenceClassification if len(rows[0][1]) == 1 else t.AutoModelForCausalLM
    if lora:
        options = {"num_labels": 2} if len(rows[0][1]) == 1 else {}
        base = kind.from_pretrained(place / "base", dtype=torch.float32, **options)
        model = peft.PeftModel.from_pretrained(base, result)
    else:
        model = kind.from_pretrained(result)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([rows[0][0]])).logits


def test_an_adapter_on_chats_learns_as_in_a_plain_loop(tmp_path: Path) -> None:
    """All answers of a chat, and nothing else, in micro-batches of any size; what is written has the same logits."""
    place = make_place(tmp_path)
    judged = judge(place)
    found = tuned(str(place), ("batch.micro_size=3",))
    assert_judged(found, judged)
    torch.testing.assert_close(logits_of(place, found["folder"]), judged["logits"], rtol=1e-4, atol=1e-5)


CASES = {
    "gpt2": ("gpt2", True, ()),
    "bert": ("bert", True, ()),
    "packed": ("llama", True, ("data.packing=true", "batch.size=1000", "data.validation=0.0")),
    "full shard": ("llama", False, ("strategy.kind=full_shard",)),
    "adapter in shards": ("llama", True, ("strategy.kind=full_shard",)),
    "stages": ("gpt2", False, ("stages.protocol.micro_batch_size=2",)),
    "adapter in stages": ("llama", True, ("stages.protocol.micro_batch_size=2",)),
    "whole bert": ("bert", False, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_workers_have_the_losses_of_one_process(case: str, tmp_path: Path) -> None:
    kind, lora, settings = CASES[case]
    place = make_place(tmp_path, kind, lora=lora)
    if case == "packed":
        first = tuned(str(place), (*settings, "data.packing=false", 'name="apart"'))
        for found in run_ranks(2, tuned, str(place), settings, timeout_s=120):
            assert found["losses"] == pytest.approx(first["losses"], rel=2e-6)
        return
    judged = judge(place, lora=lora)
    for found in run_ranks(2, tuned, str(place), settings, timeout_s=120):
        assert_judged(found, judged)
    shown = logits_of(place, str(place / found["folder"]), lora=lora)
    torch.testing.assert_close(shown, judged["logits"], rtol=1e-4, atol=1e-4)


def assert_as(found: dict[str, Any], expected: list[float], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["bf16", "4bit", "int8"])
def test_a_frozen_base_in_fewer_bits_is_that_of_a_plain_loop(load: str, tmp_path: Path) -> None:
    import transformers as t

    if load == "bf16":
        place = make_place(tmp_path, dtype=torch.bfloat16)
        judged = judge(place, load={"dtype": torch.bfloat16})
        tolerance, settings = 2e-2, ()  # sums of bf16 numbers in batches of another shape
    else:
        pytest.importorskip("bitsandbytes" if load == "4bit" else "torchao")
        place = make_place(tmp_path)
        if load == "4bit":
            how: Any = t.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            )
        else:
            from torchao.quantization import Int8WeightOnlyConfig

            how = t.TorchAoConfig(Int8WeightOnlyConfig())
        more = {"quantization_config": how, "device_map": {"": "cpu"}, "dtype": torch.float32}
        judged = judge(place, load=more)
        tolerance, settings = 2e-5, (f"model.load={load}",)
    assert_as(tuned(str(place), (*settings, 'name="alone"')), judged["losses"], tolerance)
    for found in run_ranks(2, tuned, str(place), settings, timeout_s=120):
        assert_as(found, judged["losses"], tolerance)


@pytest.mark.slow
def test_under_cadence_two_workers_learn(tmp_path: Path) -> None:
    place = make_place(tmp_path, rows=chats(60))
    text = (place / "tuned.toml").read_text().replace('kind = "sync"\nbalance = false', 'kind = "cadence"')
    (place / "tuned.toml").write_text(text)
    found = run_ranks(2, tuned, str(place), ("fit.epochs=4",), timeout_s=120)
    assert found[0]["validation"] < 5.5


def test_rows_of_labels_are_made_here() -> None:
    assert {row["label"] for row in labelled()} == {"odd", "even"} and json.dumps(chats())

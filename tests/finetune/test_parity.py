"""Fine-tuning gives the losses of peft and transformers in a plain loop, however it is cut and whoever computes it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.made import assert_judged, chats, judge, logits_of, make_place, tuned
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _kept_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # a run changes into its folder


CASES = {
    "gpt2": ("gpt2", True, ()),
    "bert": ("bert", True, ()),
    "packed": ("llama", True, ("data.packing=true", "batch.size=1000", "data.validation=0.0")),
    "full shard": ("llama", False, ("strategy.kind=full_shard",)),
    "adapter in shards": ("llama", True, ("strategy.kind=full_shard",)),
    "stages": ("gpt2", False, ("stages.protocol.kind=pipeline", "stages.protocol.micro_batch_size=2")),
    "adapter in stages": ("llama", True, ("stages.protocol.kind=pipeline", "stages.protocol.micro_batch_size=2")),
    "a stage that trains nothing": (
        "llama",
        True,
        ("stages.protocol.kind=pipeline", "stages.protocol.micro_batch_size=2", "stages.cuts=[3]"),
    ),
    "a first stage that trains nothing": (
        "llama",
        True,
        ("stages.protocol.kind=pipeline", "stages.protocol.micro_batch_size=2", "stages.cuts=[1]"),
    ),
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
        library = pytest.importorskip("bitsandbytes.functional" if load == "4bit" else "torchao")
        if load == "4bit" and library.has_avx512bf16():
            pytest.skip("with AVX512-BF16, bitsandbytes changes what it has quantised when a model is first looked at")
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

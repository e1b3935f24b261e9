"""The built-in model in other programs' forms, against itself: the same logits, the same bytes."""

from pathlib import Path

import pytest
import torch

import potluck
from potluck.commands.results import Export
from potluck.config import to_toml
from potluck.errors import ConfigError
from potluck.train.model import GPT, ModelConfig
from potluck.train.recipe import RunConfig
from potluck.train.text import TOKENIZER, learn_pieces

TEXT = "Grüße, 世界!  <0x41> Ā\n\ttwo"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, whose model is not as it began. Heads are shared, and sizes are not the defaults."""
    folder = tmp_path / "run"
    sizes = ModelConfig(vocab=260, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=64)
    config = RunConfig(name="mine", model=sizes)
    torch.manual_seed(0)
    model = GPT(config.model)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    fleet = potluck.init()
    fleet.prepare(model, torch.optim.SGD(model.parameters()))
    fleet.save(folder / "checkpoints")
    fleet.wait_for_saves()
    fleet.close()
    (folder / "run.toml").write_text(to_toml(config))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return folder


def model_of(run: Path) -> GPT:
    model = GPT(ModelConfig(vocab=260, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=64))
    model.load_state_dict(torch.load(run.parent / "model.pt", weights_only=True))
    return model


@pytest.mark.timeout(120)
def test_a_folder_for_hugging_face_has_the_same_logits_and_the_same_bytes(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hf"
    assert Export(source=str(run), out=str(out), hf=True)() == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, model_of(run)(tokens), rtol=0, atol=1e-5)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.replace("<0x00>", "\0").encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    with pytest.raises(ConfigError, match="is there already, and is not overwritten"):
        Export(source=str(run), out=str(out), hf=True)()


def test_a_tokenizer_that_was_learnt_is_exported_with_the_model(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    learnt = learn_pieces(b"the cat and the hat and the bat\n" * 20, 260)
    (run / TOKENIZER).write_text(learnt.json)
    assert Export(source=str(run), out=str(tmp_path / "hf"), hf=True)() == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("the cat sat")["input_ids"]
    assert ids == learnt.encode(b"the cat sat").tolist() and tokenizer.decode(ids) == "the cat sat"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)


def test_what_is_no_run_of_the_built_in_model_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"There is no run\.toml"):
        Export(source=str(run), out=str(tmp_path / "hf"), hf=True)()
    assert not (tmp_path / "hf").exists()
    with pytest.raises(ConfigError, match=r"Write a folder with --hf, and convert it with llama\.cpp's own script"):
        Export(source=str(run), out=str(tmp_path / "x"), gguf=True)()


def test_a_person_is_told_of_what_they_asked_for_and_nothing_else_stays(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert Export(source=str(run), out=str(place / "mine"), hf=True)() == 0
    assert f"Wrote {place / 'mine'}: " in capfd.readouterr().err
    assert [path.name for path in place.iterdir()] == ["mine"]

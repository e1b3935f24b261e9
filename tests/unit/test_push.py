"""potluck push: what a run has come to, through the hub's real client, to a small hub on loopback."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, load_file

from potluck.commands.results import Push, write_for_hub
from potluck.config import from_toml, parse_toml
from potluck.engine.engine import Engine
from potluck.errors import ConfigError
from potluck.events import EventFile, WorkerCame, WorkerWent
from potluck.hub.card import Pushed, model_card, without_paths
from potluck.train.arguments import TrainArgs
from potluck.train.recipe import RunConfig, train_recipe
from tests.hub import TOKEN, Hub, serve

pytestmark = pytest.mark.timeout(120)
RECIPE = """
name = "tiny"
[model]
dim = 16
layers = 1
heads = 2
context = 16
[data]
paths = ["{text}"]
validation = 0.2
[batch]
size = 8
[fit]
progress = false
"""
SECRET = "potluck://10.1.2.3:4567/notforanybody"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the built-in model, two workers of a host among its events, with names that are nobody's business."""
    place = tmp_path_factory.mktemp("private-place")
    (place / "text").write_text("some words to learn from, again and again. " * 60)
    config = from_toml(RunConfig, RECIPE.format(text=place / "text"), source="here")
    train_recipe(config, TrainArgs(recipe="", out=str(place / "run")), Engine())
    (place / "run" / "invite").write_text(SECRET)
    file = EventFile(place / "run" / "events.jsonl")
    file(WorkerCame(worker=1, name="annas-laptop", kind="a CPU, 4 threads [x](http://y)", step=3, workers=2))
    file(WorkerWent(worker=1, name="annas-laptop", reason="was lost at /home/anna", polite=False, workers=1))
    file.close()
    return place / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HF_HUB_DISABLE_XET", True
        )  # large files as git-lfs has them, which we can serve
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def test_a_run_is_pushed_whole_to_a_private_repository(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert Push(run=str(run), repo="me/tiny")() == 0
    assert hub.visibility == {"me/tiny": "private"}
    assert f"to {hub.url}/me/tiny" in capsys.readouterr().out
    files = hub.repos["me/tiny"]
    assert {"README.md", "config.json", "model.safetensors", "potluck.json", "tokenizer.json"} <= files.keys()
    newest = max((run / "checkpoints").glob("step-*")) / "model.safetensors"
    arrived, trained = load(files["model.safetensors"]), load_file(newest)
    assert torch.equal(arrived["model.embed_tokens.weight"], trained["embedding.weight"]) and len(arrived) == len(
        trained
    )
    assert any("/large/" in asked for asked in hub.asked), "weights go where large files go"


def test_the_card_tells_figures_proof_and_recipe_and_nothing_that_is_nobodys_business(run: Path, hub: Hub) -> None:
    Push(run=str(run), repo="me/tiny", public=True)()
    assert hub.visibility == {"me/tiny": "public"}
    card = hub.repos["me/tiny"]["README.md"].decode()
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    epoch = next(record for record in told if record["event"] == "epoch_done")
    last = [record for record in told if record["event"] == "step_done"][-1]
    assert f"{epoch['used']:,} of {epoch['total']:,} samples were used, each exactly once" in card
    assert f"| training loss of the last step | {last['loss']:.4f} |" in card
    assert "| validation loss | " in card and 'paths = [\n    "text",\n]' in card and "[optimizer]" in card
    assert 'from_pretrained("me/tiny")' in card and card.startswith("---\nlibrary_name: transformers\ntags:\n- potluck")
    assert "1 × a CPU, 4 threads x(http:y)" in card and "1 time one was lost" in card
    everything = b"".join(data for name, data in hub.repos["me/tiny"].items() if name != "model.safetensors")
    for private in (str(run.parent), "private-place", "annas-laptop", "/home", "potluck://", "notforanybody", TOKEN):
        assert private.encode() not in everything, private


HOSTILE = [
    "[free tokens](https://evil.example/claim)",
    "![x](https://evil.example/x.png)",
    '<a href="//evil.example">x</a><img src=//evil.example>',
    "x | 9 |\n\n# Title\n\n| y",
    "<https://evil.example> https://evil.example www.evil.example WWW.evil.example me@evil.example",
    "`x` **y** &lt;script&gt; \\| \u2028 ![x][y]",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_no_word_of_a_worker_becomes_a_link_an_image_or_html_in_the_card(run: Path, tmp_path: Path, words: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "events.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record |= {name: words for name in ("unit", "kind", "device", "name", "reason") if name in record}
        if record["event"] == "validated":
            record["metrics"] = {words: 0.01} | {f"m{number}": 1.0 for number in range(1000)}
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    plain = model_card(run, {}, Pushed("me/x", is_adapter=False, classifies=False))
    card = model_card(tmp_path / "run", {}, Pushed("me/x", is_adapter=False, classifies=False))
    table = card.split("## Figures\n\n")[1].split("\n\n")[0].splitlines()
    assert all(line.count("|") == 3 for line in table) and len(table) < 70 and "| validation " in card
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings == [line for line in plain.splitlines() if line.startswith("#")]
    prose = re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    assert not re.search(r"[\[\]<>@&\\!*]|://|www\.", prose, re.IGNORECASE), prose


def test_a_second_push_replaces_the_first_and_other_content_is_left_alone(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    Push(run=str(run), repo="me/tiny")()
    hub.repos["me/tiny"] |= {"model-00001.safetensors": b"old", "notes.md": b"mine"}
    Push(run=str(run), repo="me/tiny", public=True)()
    assert "me/tiny stays private" in capsys.readouterr().err
    assert "model-00001.safetensors" not in hub.repos["me/tiny"] and "notes.md" in hub.repos["me/tiny"]
    hub.repos["me/other"], hub.visibility["me/other"] = {"thesis.json": b"{}", ".gitattributes": b""}, "private"
    with pytest.raises(ConfigError, match=r"me/other holds something else than a push of potluck \(thesis.json\)"):
        Push(run=str(run), repo="me/other")()
    assert hub.repos["me/other"].keys() == {"thesis.json", ".gitattributes"}
    Push(run=str(run), repo="me/other", force=True)()
    assert {"thesis.json", "README.md"} <= hub.repos["me/other"].keys()


def test_refusals_are_sentences_that_say_what_to_do(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(what: str, **options: str) -> None:
        with pytest.raises(ConfigError, match=what):
            Push(**({"run": str(run), "repo": "me/x"} | options))()

    refused(r"takes a run and a repository", to="somewhere")
    refused(r"There is no run.toml in .*potluck export", run=str(tmp_path))
    (tmp_path / "run.toml").write_text('name = "x"')
    refused(r"There is no checkpoint in .*, so there is nothing to push yet", run=str(tmp_path))
    refused(r"'me/ x' is no name for a repository: .* Such as: you/name", repo="me/ x")
    refused(r"The hub did not take others/x: this token may not write there", repo="others/x")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(r"The hub did not take me/x: the token is not valid; log in again")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    refused(r"There is no token for the hub here. Log in with: hf auth login; or set HF_TOKEN")
    assert hub.repos == {}


def test_what_would_be_uploaded_can_be_looked_at_first(run: Path, tmp_path: Path) -> None:
    assert Push(run=str(run), to=str(tmp_path / "seen"))() == 0
    assert (tmp_path / "seen" / "README.md").is_file()
    with pytest.raises(ConfigError, match="is there already"):
        Push(run=str(run), to=str(tmp_path / "seen"))()


def test_places_become_names_and_ids_of_the_hub_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "base").mkdir()
    told = {"hf": "org/name", "n": 3, "paths": ["/home/me/rows.jsonl", "~/x", "C:\\data\\y.csv", "../z", "plain"]}
    assert without_paths(told) == told | {"paths": ["rows.jsonl", "x", "y.csv", "z", "plain"]}
    assert without_paths("local/base") == "base" and without_paths("s3://key:secret@bucket/x") == "s3://..."
    assert without_paths("..") == ".." and without_paths("/") == "..."


@pytest.mark.slow
def test_an_adapter_is_pushed_without_the_place_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.finetune.made import make_place, tuned

    place = make_place(tmp_path / "my-place")
    monkeypatch.chdir(place)
    found = Path(tuned(str(place), ())["folder"])
    recipe = parse_toml((found / "run.toml").read_text(), source="here")
    write_for_hub(found, recipe, tmp_path / "out", "me/tuned")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "An adapter (LoRA) for `base`" in card
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    written = b"".join(file.read_bytes() for file in (tmp_path / "out").iterdir())
    assert b"my-place" not in written


@pytest.mark.slow
def test_the_command_pushes_and_what_arrives_loads(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with serve() as hub:
        done = subprocess.run(
            [sys.executable, "-m", "potluck.cli", "push", str(run), "me/tiny"],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        for name, data in hub.repos["me/tiny"].items():
            (tmp_path / name).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert torch.isfinite(model(torch.arange(16)[None]).logits).all()

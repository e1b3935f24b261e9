"""`potluck export` and `potluck push`: what a run has come to, for other programs."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from potluck.errors import ConfigError
from potluck.finetune.settings import is_finetune
from potluck.hub.card import Pushed, model_card, without_paths
from potluck.hub.upload import client, mark, upload
from potluck.launch.options import option
from potluck.save.checkpoint_folder import found
from potluck.train.arguments import recipe_of


@dataclass
class Export:
    """Write a checkpoint's model as one plain safetensors file, whichever way the run had split it.

    Streams: it needs no more memory for a large model than for a small one. The built-in model is also written as a
    folder for Hugging Face's libraries (--hf), which llama.cpp's own script converts for it.
    """

    source: Annotated[tyro.conf.Positional[str], option("RUN|CHECKPOINT")]
    """A run folder, for its newest checkpoint; or one checkpoint."""
    out: Annotated[tyro.conf.Positional[str], option("OUT.safetensors")]
    """The file to write; one that is there is not overwritten."""
    ema: bool = False
    """The average of the weights that fit.ema kept, in place of them."""
    hf: bool = False
    """A folder that from_pretrained() loads, as a llama. OUT is its name."""
    gguf: bool = False
    """Say how llama.cpp's own script makes its file of a --hf folder."""

    def __call__(self) -> int:
        source, out = Path(self.source), Path(self.out)
        if self.gguf:
            raise ConfigError(
                "potluck export writes no GGUF file. Write a folder with --hf, and convert it with llama.cpp's own"
                " script: python convert_hf_to_gguf.py FOLDER --outfile FILE.gguf. The model/ folder of a run of"
                " potluck finetune is one already."
            )
        if self.hf:
            from potluck.train.other_formats import export_hf

            return export_hf(source, out, ema=self.ema)
        from potluck.save.export import export

        return export(source, out, ema=self.ema)


@dataclass
class Push:
    """Upload what a run has come to, with a model card made from the run, to the Hugging Face hub.

    A fine-tuned model or adapter, or the built-in model in Hugging Face's form. The repository is private, unless it is
    asked to be public. The card has figures, recipe and proof, and no path, name or address of yours.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="A run folder.")]
    repo: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="REPO", help="Such as you/name.", help_behavior_hint="(required, but with --to)"),
    ] = None
    public: Annotated[bool, tyro.conf.arg(help="Anybody may see it.")] = False
    force: Annotated[bool, tyro.conf.arg(help="Write into a repository that holds something else.")] = False
    to: Annotated[
        str | None, tyro.conf.arg(metavar="FOLDER", help="Upload nothing: write what would be, to be looked at.")
    ] = None

    def __call__(self) -> int:
        if (self.repo is None) == (self.to is None):
            raise ConfigError("potluck push takes a run and a repository: potluck push RUN you/name; or --to FOLDER.")
        run = Path(self.run)
        recipe = _recipe_of(run)
        if self.to is not None:
            if Path(self.to).exists():
                raise ConfigError(f"{self.to} is there already, and is not overwritten. Name another folder.")
            write_for_hub(run, recipe, Path(self.to), "you/name")
            print(f"Wrote {self.to}. Nothing was uploaded.", flush=True)
            return 0
        client()  # before a model is written for nothing
        with tempfile.TemporaryDirectory(prefix="potluck-push-") as place:
            write_for_hub(run, recipe, Path(place) / "model", str(self.repo))
            upload(Path(place) / "model", str(self.repo), public=self.public, force=self.force)
        return 0


def _recipe_of(run: Path) -> dict[str, Any]:
    if not (run / "run.toml").is_file():
        raise ConfigError(
            f"There is no run.toml in {run}, so it is not the run of a recipe. To upload a script's model, write it"
            f" with potluck export {run} model.safetensors first."
        )
    if not found(run / "checkpoints"):
        raise ConfigError(f"There is no checkpoint in {run}, so there is nothing to push yet.")
    return recipe_of(run)


def write_for_hub(run: Path, recipe: dict[str, Any], out: Path, repo: str) -> None:
    """The folder that is uploaded: the newest checkpoint in Hugging Face's form, and its card."""
    from potluck.finetune.result import classifies, config_of, write_result

    is_adapter = False
    if is_finetune(recipe):
        config = config_of(run)
        is_adapter = config.lora is not None
        shutil.copytree(write_result(run, config), out, ignore=shutil.ignore_patterns("checkpoint", "README.md"))
    else:
        from potluck.train.other_formats import export_hf

        export_hf(run, out)
    for file in out.glob("*.json"):
        _forget_places(file)
    pushed = Pushed(repo, is_adapter, classifies=classifies(out))
    (out / "README.md").write_text(model_card(run, recipe, pushed), encoding="utf-8")
    mark(out, run=without_paths(str(recipe.get("name", ""))), checkpoint=found(run / "checkpoints")[0].name)


PLACES = ("base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys in files of Hugging Face's that say where something was on this machine."""


def _forget_places(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    places = [name for name in PLACES if isinstance(config, dict) and isinstance(config.get(name), str)]
    if any(config[name] != without_paths(config[name]) for name in places):
        config |= {name: without_paths(config[name]) for name in places}
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""One worker of a recipe's run, whichever kind of recipe it is: of the built-in model, or of one from Hugging Face."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from potluck import init
from potluck.composition import ranks_per_worker
from potluck.config import from_dict, parse_toml
from potluck.engine.start import Joined
from potluck.environment import usable_cores
from potluck.errors import ConfigError
from potluck.files import write_whole
from potluck.finetune.base_files import cached
from potluck.finetune.ending import show_hosted, show_result
from potluck.finetune.recipe import FinetuneConfig, train_finetune
from potluck.finetune.settings import is_finetune
from potluck.fleet.script import read_script
from potluck.train.arguments import TrainArgs, ask_for_files, recipe_of, recipe_table
from potluck.train.recipe import RecipeConfig, RunConfig, train_recipe
from potluck.train.summary import show_summary
from potluck.train.text import TOKENIZER, read_rows
from potluck.wire.words import clean


def main(arguments: list[str]) -> None:
    """The launcher passes its arguments as JSON; every worker of the run gets the same."""
    args = from_dict(TrainArgs, json.loads(arguments[0]), "the arguments")
    config = config_of_kind(recipe_table(args.recipe, args.settings))
    with init(config.policy, config.strategy, **_options(config), patience_s=config.workers.patience_s) as engine:
        keeps_folder = engine.keeps_folder and args.summary != "none"
        if isinstance(config, RunConfig):
            told, model = train_recipe(config, args, engine)
            if keeps_folder:
                show_summary(told, model, args, epochs=config.fit.epochs, is_split=engine.is_split)
            return
        summary = train_finetune(config, args, engine)
    if keeps_folder:  # the model of the run is gone by now, and its memory is free
        show_result(summary, config)


def _options(config: RecipeConfig) -> dict[str, Any]:
    return {"stages": config.stages, "step": config.step, "wire": config.wire}


def finish(arguments: list[str]) -> None:
    """Finish a run that a host has led, in its folder: make what needs libraries that only workers load."""
    run = Path(arguments[0])
    config = config_of_kind(recipe_of(run))
    if isinstance(config, FinetuneConfig):
        show_hosted(run)
    elif config.data.tokenizer == "bpe":
        _, _, pieces = read_rows(config.data, config.model.context, config.model.vocab)
        assert pieces is not None
        write_whole(run / TOKENIZER, pieces.json)
        print(f"  tokenizer    {run / TOKENIZER}", flush=True)


def config_of_kind(table: dict[str, Any]) -> RunConfig | FinetuneConfig:
    """Check a recipe of either kind."""
    return from_dict(FinetuneConfig, table) if is_finetune(table) else from_dict(RunConfig, table)


def join(arguments: list[str]) -> None:
    """One worker of the run that the invite names: the recipe comes from the host, as TOML and never as code."""
    settings = tuple(json.loads(arguments[0]))  # what was given by --data, and nothing else
    joined = Joined()
    try:
        script = read_script(joined.recipe)
        if not joined.recipe or script is not None:
            shown = script.shown if script is not None else "SCRIPT"
            raise ConfigError(
                f"This host trains a script, not a recipe. Join with your copy of it: potluck join INVITE {shown}"
            )
        try:
            config = config_of_kind(parse_toml(joined.recipe, source="the host's recipe", overrides=settings))
        except ConfigError as error:  # it may quote the recipe, which the host wrote
            raise ConfigError(clean(str(error))) from None
        if config.data.paths and not any(setting.startswith("data.paths=") for setting in settings):
            raise ask_for_files(config.data.paths)
        if isinstance(config, FinetuneConfig) and not any(setting.startswith("model.hf=") for setting in settings):
            config = _with_own_base(config)
        _check_little(config)
        made = joined.engine(config.policy, config.strategy, **_options(config))
    except BaseException:
        joined.close()
        raise
    with made as engine:
        args = TrainArgs(recipe="the host's")
        if isinstance(config, RunConfig):
            train_recipe(config, args, engine)
        else:
            train_finetune(config, args, engine)


def _with_own_base(config: FinetuneConfig) -> FinetuneConfig:
    """A host names a model, and not a folder of ours: what is in the cache of this machine is that model."""
    name = config.model.hf
    copy = cached(name)
    if copy is None:
        shown = clean(name[:200])
        is_id = not name.startswith((".", "/", "~")) and name.count("/") <= 1 and "\\" not in name
        get = f" Get it with hf download {shown}; or name" if is_id else " Name"
        raise ConfigError(
            f"This run fine-tunes {shown}, and the cache of this machine has no copy.{get} a folder that holds it,"
            " with potluck join --base FOLDER INVITE; or ask the host for it, with potluck join --fetch-base INVITE."
        )
    return replace(config, model=replace(config.model, hf=str(copy)))


def _check_little(config: RecipeConfig) -> None:
    """Refuse what a host's recipe may not make this machine do."""
    ranks, most = ranks_per_worker(config.strategy, 1), max(4, usable_cores(), torch.cuda.device_count())
    if ranks > most:
        raise ConfigError(
            f"The host's recipe wants {ranks} processes on this machine for one worker (strategy.intra_node_size), and"
            f" at most {most} are started here. Ask for a recipe with fewer, or join from a machine with more cores."
        )

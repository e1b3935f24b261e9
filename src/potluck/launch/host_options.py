"""HostOptions: the options of `potluck host`; and HostArgs: what they come to, checked before anything is started.

Imports no torch.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import tyro

from potluck.config import checked, from_dict, parse_toml
from potluck.environment import check_patience
from potluck.errors import ConfigError
from potluck.files import first_free
from potluck.launch.options import Data, Out, Page, Ranks, Settings, Threads, Track, workers_config
from potluck.save.run_folder import holds_run, name_fault
from potluck.trackers.known import check_trackers
from potluck.train.arguments import WorkersConfig, base_setting, data_setting, find_recipe, track_setting


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RECIPE|SCRIPT", help="A recipe, as for train; or a Python file, as for run."),
    ]
    data: Data = ()
    workers: Annotated[
        int, tyro.conf.arg(aliases=["-n"], metavar="N", help="Workers on this machine; 0: only those who join.")
    ] = 1
    threads: Threads = None
    ranks: Ranks = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue the run of the run folder.")] = False
    or_resume: Annotated[
        bool, tyro.conf.arg(help="Continue the run of the run folder if it holds one; else begin it.")
    ] = False
    host: Annotated[
        str, tyro.conf.arg(metavar="ADDRESS", help="Where to listen; 0.0.0.0 lets other machines join, encrypted.")
    ] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(metavar="N", help="0: any that is free, and the same again on --resume.")] = 0
    address: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="How others reach this machine, for the invite.")
    ] = None
    identity: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FOLDER",
            help="What `potluck invite` made: its invite is in others' hands, and is not printed here.",
            help_behavior_hint="(default: the run folder's own)",
        ),
    ] = None
    patience_s: Annotated[
        float,
        tyro.conf.arg(
            name="patience", metavar="SECONDS", help="How long a worker may be silent before it is given up."
        ),
    ] = 30.0
    at_least: Annotated[int, tyro.conf.arg(metavar="N", help="Workers to wait for before the first step.")] = 1
    insecure: Annotated[
        bool, tyro.conf.arg(help="No encryption and no secret; plain peers of the published protocol may join.")
    ] = False
    track: Track = field(default_factory=list)
    page: Page = None
    control: Annotated[
        bool, tyro.conf.arg(help="Let whoever sees the page pause the run, save it, and let workers go.")
    ] = False
    settings: Settings = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostArgs:
    options: HostOptions
    folder: Path
    recipe: str
    """TOML; empty where a script is trained."""
    command: tuple[str, ...]
    """Command that a worker on this machine runs."""
    workers: WorkersConfig
    resume: bool
    track: tuple[str, ...]
    """The trackers that the host reports the run to; its workers report to none."""
    base: Path | None = None
    """The folder of the base model, for workers that lack it."""


def host_args(options: HostOptions) -> HostArgs:
    if options.workers < 0 or options.at_least < 1 or not 0 <= options.port < 1 << 16:
        raise ConfigError("--workers is at least 0, --at-least 1, and --port below 65,536.")
    if options.insecure and options.identity is not None:
        raise ConfigError("--identity holds a secret, and a host with --insecure has none. Leave out one of them.")
    what, threads, ranks, track = options.what, options.threads, options.ranks, options.track
    if what.endswith(".py"):
        if not Path(what).is_file():
            raise ConfigError(f"There is no script {what}.")
        recipe, name = "", Path(what).stem
        command: tuple[str, ...] = (what,)
    else:
        text, source = find_recipe(what)
        settings = (*options.settings, *data_setting(options.data), *track_setting(track))
        table = parse_toml(text, source=source, overrides=settings)
        name = table.get("name", "run")
        if fault := name_fault(name):
            raise ConfigError(f"{source}: name {fault}.")
        if isinstance(table.get("workers"), dict):
            given = from_dict(WorkersConfig, table["workers"], "workers")
            threads, ranks = threads or given.threads, ranks or given.ranks
        # Workers on this machine read what this command line says, not what comes over the connection.
        track = track or _tracked(table)
        data = table.get("data")
        own = data_setting(data.get("paths", ())) if isinstance(data, dict) else ()
        own += base_setting(model.get("hf")) if isinstance(model := table.get("model"), dict) else ()
        recipe, command = tomli_w.dumps(table), ("--join", json.dumps(own))
    folder = Path(options.out) if options.out else Path("runs") / name
    resume = options.resume or (options.or_resume and holds_run(folder))
    if options.out is None and not resume and not options.or_resume:
        folder = first_free(folder, holds_run)  # a new run never takes over a folder that holds one
    if resume and not holds_run(folder):
        raise ConfigError(f"There is no run to resume in {folder}. Leave out --resume, or name its folder with --out.")
    config = workers_config(max(1, options.workers), threads, ranks)
    checked(lambda: check_patience("--patience", options.patience_s))
    return HostArgs(
        options=options,
        folder=folder,
        recipe=recipe,
        command=command,
        workers=config,
        resume=resume,
        track=check_trackers(track),
    )


def _tracked(recipe: dict[str, Any]) -> list[str]:
    """By a recipe, of which the workers check the rest."""
    fit = recipe.get("fit")
    if not isinstance(fit, dict):
        return []
    names = fit.get("track", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'fit.track is a list of trackers, such as ["wandb"], not {names!r}.')
    return names + ["tensorboard"] * (fit.get("tensorboard") is True)

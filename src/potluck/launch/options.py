"""Options that several commands have; HostOptions, those of `potluck host`; and HostArgs: what they come to, checked.

Imports no torch.
"""

import shlex
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import tyro

from potluck.config import checked, parse_toml
from potluck.environment import check_patience
from potluck.errors import ConfigError
from potluck.files import first_free
from potluck.save.run_folder import holds_run, name_fault
from potluck.trackers.known import LIBRARIES, check_trackers
from potluck.train.arguments import WorkersConfig, as_settings, find_recipe, workers_in
from potluck.words import say, shown_arguments


def option(metavar: str, help: str | None = None, *, default: str | None = None, **more: Any) -> Any:
    """How an option is shown: the word for its value, its help, if that is not the note below it, and its default in
    words."""
    hint = None if default is None else f"(default: {default})"
    return tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint=hint, **more)


Repeated = tyro.conf.UseAppendAction[list[str]]
Settings = Annotated[
    Repeated,
    option("A.B=VALUE", "Change a setting of the recipe, such as fit.epochs=3. May be repeated.", name="set"),
]
WORKERS = "Worker processes on this machine."
Workers = Annotated[int | None, option("N", WORKERS, default="the recipe's", aliases=["-n"])]
Count = Annotated[int, option("N", WORKERS, aliases=["-n"])]
Threads = Annotated[int | None, option("N", "Threads of each worker, instead of an even share of the cores.")]
Data = Annotated[
    tuple[str, ...],
    option("PATH ...", "Text files, or folders of them.", default="the recipe's, or the standard library"),
]
Track = Annotated[
    Repeated,
    option("TRACKER", f"Report the run there too: {', '.join(LIBRARIES)}. May be repeated.", default="fit.track"),
]
Out = Annotated[str | None, option("FOLDER", "The run folder.", default="runs/NAME, numbered")]
Ranks = Annotated[
    int | None,
    option(
        "N",
        "Processes that hold each worker's model together, where the strategy splits it.",
        default="one for each GPU",
    ),
]
Only = Annotated[
    int | None,
    option(
        "WORKER",
        "Start this one of the workers, counted from 0; the others run elsewhere, and all meet in a store.",
        default="all, here",
    ),
]
Page = Annotated[
    str | None,
    option(
        "WHERE",
        "Where the live page is: off, a port, or ADDRESS:PORT such as 0.0.0.0:8080.",
        default="this machine, any free port; or what POTLUCK_PAGE says",
    ),
]


def workers_config(count: int, threads: int | None, ranks: int | None = None) -> WorkersConfig:
    return checked(lambda: WorkersConfig(count=count, threads=threads, ranks=ranks), "Workers: ")


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    what: Annotated[tyro.conf.Positional[str], option("RECIPE|SCRIPT [ARGUMENTS ...]")]
    """A recipe, as for train; or a Python file, as for run."""
    data: Data = ()
    workers: Annotated[int, option("N", aliases=["-n"])] = 1
    """Workers on this machine; 0: only those who join."""
    threads: Threads = None
    ranks: Ranks = None
    out: Out = None
    resume: bool = False
    """Continue the run of the run folder."""
    or_resume: bool = False
    """Continue the run of the run folder if it holds one; else begin it."""
    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """Where to listen; 0.0.0.0 lets other machines join, encrypted."""
    port: Annotated[int, option("N")] = 0
    """0: any that is free, and the same again on --resume."""
    address: Annotated[str | None, option("NAME")] = None
    """How others reach this machine, for the invite."""
    identity: Annotated[Path | None, option("FOLDER", default="the run folder's own")] = None
    """Folder that `potluck invite` made: its invite is in others' hands, and is not printed here."""
    patience_s: Annotated[float, option("SECONDS", name="patience")] = 30.0
    """How long a worker may be silent before it is given up."""
    at_least: Annotated[int, option("N")] = 1
    """Workers to wait for before the first step."""
    insecure: bool = False
    """No encryption and no secret; plain peers of the published protocol may join."""
    track: Track = field(default_factory=list)
    page: Page = None
    control: bool = False
    """Let whoever sees the page pause the run, save it, and let workers go."""
    settings: Settings = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostArgs:
    options: HostOptions
    folder: Path
    table: dict[str, Any]
    """The recipe; empty where a script is trained."""
    script: tuple[str, ...]
    """The script and its arguments; empty where a recipe is trained."""
    settings: tuple[str, ...]
    """Settings that workers on this machine take from this command line, and not from the connection."""
    workers: WorkersConfig
    resume: bool
    track: tuple[str, ...]
    """The trackers that the host reports the run to; its workers report to none."""
    base: Path | None = None
    """The folder of the base model, for workers that lack it."""

    @property
    def recipe(self) -> str:
        """The recipe as TOML, as joiners get it; empty where a script is trained."""
        return tomli_w.dumps(self.table)


def host_args(options: HostOptions, arguments: Sequence[str] = ()) -> HostArgs:
    """`arguments`: the script's own."""
    if options.workers < 0 or options.at_least < 1 or not 0 <= options.port < 1 << 16:
        raise ConfigError("--workers is at least 0, --at-least 1, and --port below 65,536.")
    if options.insecure and options.identity is not None:
        raise ConfigError("--identity holds a secret, and a host with --insecure has none. Leave out one of them.")
    what, threads, ranks, track = options.what, options.threads, options.ranks, options.track
    table: dict[str, Any] = {}
    script: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    if what.endswith(".py"):
        if not Path(what).is_file():
            raise ConfigError(f"There is no script {what}.")
        script, name = (what, *arguments), Path(what).stem
    else:
        text, source = find_recipe(what)
        asked = as_settings({"data.paths": options.data, "fit.track": check_trackers(track)})
        table = parse_toml(text, source=source, overrides=(*options.settings, *asked))
        name = table.get("name", "run")
        if fault := name_fault(name):
            raise ConfigError(f"{source}: name {fault}.")
        given = workers_in(table)
        threads, ranks = threads or given.threads, ranks or given.ranks
        track = track or _tracked(table)
        tables = (("data", "paths"), ("model", "hf"))
        settings = as_settings({f"{a}.{b}": table[a].get(b) for a, b in tables if isinstance(table.get(a), dict)})
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
        table=table,
        script=script,
        settings=settings,
        workers=config,
        resume=resume,
        track=check_trackers(track),
    )


_NAMES = {"patience_s": "patience", "settings": "set", "yields": "yield", "led": "as"}
"""Names of options on the command line, where they differ from those of their fields."""


def tell_of_options(command: str, options: Any, script: str, arguments: Sequence[str], *, before: str = "") -> None:
    """Say that an option behind a script is the script's, where the command has one of that name, too. `options`: the
    command as it was given, or its class; one that it was given itself is no mistake."""
    left_out = [each for each in fields(options) if isinstance(options, type) or not _is_given(options, each)]
    names = [_NAMES.get(each.name, each.name).replace("_", "-") for each in left_out]
    own = {f"--{name}" for name in names if name not in ("what", "script", "invite", "arguments")}
    own |= {"-n"} if "workers" in names else set()
    taken = [word for word in arguments if word.partition("=")[0] in own]
    if taken:
        place = before or "the script"
        say(f"{taken[0]} goes to {script}. To give it to potluck {command}, write it before {place}.")


def _is_given(options: Any, named: Field[Any]) -> bool:
    default = named.default_factory() if callable(named.default_factory) else named.default
    return bool(getattr(options, named.name) != default)


def to_resume(args: HostArgs) -> str:
    """Write the command that continues a host's run, with the options that it had: the bits of its weights may depend
    on them, such as --threads. Not --at-least: the run has begun, and would wait for those who have left."""
    options, words = args.options, ["potluck", "host"]
    kept = ("data", "settings", "track") if args.table else ()  # run.toml has them
    for each in fields(HostOptions):
        value, name = getattr(options, each.name), _NAMES.get(each.name, each.name).replace("_", "-")
        if not _is_given(options, each) or each.name in ("what", "out", "resume", "or_resume", "at_least", *kept):
            continue
        if value is True:
            words.append(f"--{name}")
        elif each.name == "data":
            words += [f"--{name}", *map(shlex.quote, value)]
        else:
            every = value if isinstance(value, list) else [value]
            words += [word for item in every for word in (f"--{name}", shlex.quote(f"{item}"))]
    what = shlex.quote(f"{args.folder}/run.toml") if args.table else shown_arguments(args.script)
    return " ".join([*words, "--out", shlex.quote(str(args.folder)), "--resume", what])


def _tracked(recipe: dict[str, Any]) -> list[str]:
    """By a recipe, of which the workers check the rest."""
    fit = recipe.get("fit")
    if not isinstance(fit, dict):
        return []
    names = fit.get("track", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'fit.track is a list of trackers, such as ["wandb"], not {names!r}.')
    return names + ["tensorboard"] * (fit.get("tensorboard") is True)

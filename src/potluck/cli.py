"""The command line. Each command is a dataclass whose fields are its options; imports no torch by itself."""

import difflib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from potluck import __version__
from potluck.config import checked, to_dict
from potluck.errors import ConfigError, PotluckError
from potluck.launch.processes import launch
from potluck.train.arguments import TrainArgs, WorkersConfig, base_setting, built_in_recipes, data_setting, workers_of
from potluck.words import say

Settings = Annotated[
    tyro.conf.UseAppendAction[list[str]],
    tyro.conf.arg(
        name="set", metavar="A.B=VALUE", help="Change a setting of the recipe, such as fit.epochs=3. May be repeated."
    ),
]
Workers = Annotated[
    int | None,
    tyro.conf.arg(
        aliases=["-n"],
        metavar="N",
        help="Worker processes on this machine.",
        help_behavior_hint="(default: the recipe's)",
    ),
]
Count = Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N", help="Worker processes on this machine.")]
Threads = Annotated[
    int | None, tyro.conf.arg(metavar="N", help="Threads of each worker, instead of an even share of the cores.")
]
Data = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="PATH ...",
        help="Text files, or folders of them.",
        help_behavior_hint="(default: the recipe's, or the standard library)",
    ),
]
Out = Annotated[
    str | None,
    tyro.conf.arg(metavar="FOLDER", help="The run folder.", help_behavior_hint="(default: runs/NAME, numbered)"),
]
Ranks = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N",
        help="Processes that hold each worker's model together, where the strategy splits it.",
        help_behavior_hint="(default: one for each GPU)",
    ),
]
Only = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="WORKER",
        help="Start this one of the workers, counted from 0; the others run elsewhere, and all meet in a store.",
        help_behavior_hint="(default: all, here)",
    ),
]


@dataclass
class Demo:
    """Three workers on this machine, one of them three times slower: Sync against Cadence, in under three minutes.

    Both train the same small language model on the same text, the source of Python's standard library, so that
    nothing is downloaded; a picture shows who computed when, and who waited.
    """

    data: Data = ()
    workers: Workers = None
    out: Out = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.launch.demo import demo

        return demo((*self.settings, *data_setting(self.data)), self.workers, self.out)


@dataclass
class Train:
    """Train a recipe: a file, or a built-in one by its name."""

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RECIPE", help=f"A TOML file, or one of: {', '.join(built_in_recipes())}."),
    ]
    data: Data = ()
    workers: Workers = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue from the newest checkpoint of the run folder.")] = False
    only: Only = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        workers = () if self.workers is None else (f"workers.count={self.workers}",)
        settings = (*self.settings, *data_setting(self.data), *workers)
        args = TrainArgs(recipe=self.recipe, settings=settings, out=self.out, resume=self.resume)
        return _launch_recipe(args, self.only)


@dataclass
class Finetune:
    """Fine-tune a model of Hugging Face on your rows: an adapter (LoRA), or with --full all of it.

    It ends with a sample before and after, the validation loss, and a folder that from_pretrained loads. What it does
    is a recipe: with --write it is only written, for potluck train and potluck host.
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="MODEL", help="A folder that save_pretrained wrote, or an id on the hub."),
    ]
    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            metavar="DATA [DATA ...]",
            help="JSONL (messages; prompt and completion; text; text and label), CSV, Parquet, text, a folder of"
            " them or of datasets, or an id on the hub.",
            help_behavior_hint="(required)",
        ),
    ]
    task: Annotated[
        Literal["auto", "write", "classify"],
        tyro.conf.arg(metavar="TASK", help="write or classify; auto: classify if the rows have a label."),
    ] = "auto"
    full: Annotated[bool, tyro.conf.arg(help="Train all of the model, not an adapter.")] = False
    load: Annotated[
        Literal["plain", "4bit", "int8"],
        tyro.conf.arg(metavar="HOW", help="Keep the frozen weights in fewer bits: 4bit or int8."),
    ] = "plain"
    workers: Workers = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue from the newest checkpoint of the run folder.")] = False
    write: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE.toml", help="Only write the recipe, for potluck train and potluck host."),
    ] = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.train.arguments import finetune_args, write_recipe

        args = finetune_args(
            self.model,
            self.rows,
            task=self.task,
            load=self.load,
            full=self.full,
            settings=tuple(self.settings),
            workers=self.workers,
        )
        if self.write is not None:
            return write_recipe(args, Path(self.write))
        say(f"Fine-tuning {self.model} on {', '.join(self.rows)}. First PyTorch and transformers are loaded.")
        return _launch_recipe(replace(args, out=self.out, resume=self.resume), None)


@dataclass
class Chat:
    """Talk to what a run of potluck finetune has trained. Reads lines, and answers as it writes; /quit ends."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="A run's folder.")]
    temperature: Annotated[
        float, tyro.conf.arg(metavar="T", help="0: always what is likeliest; 1: as the model has it.")
    ] = 0.7
    length: Annotated[int, tyro.conf.arg(metavar="N", help="The most tokens of an answer.")] = 512

    def __call__(self) -> int:
        from potluck.finetune.chat import chat

        return chat(Path(self.run), temperature=self.temperature, length=self.length)


@dataclass
class Run:
    """Run your own script on several workers. It calls potluck.init(), and runs under torchrun too.

    Options come before the script: everything after its name is passed to it.
    """

    script: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCRIPT [ARGUMENTS ...]", help="A Python file.")]
    workers: Count = 2
    threads: Threads = None
    only: Only = None

    def __call__(self, *arguments: str) -> int:
        if not Path(self.script).is_file():
            raise ConfigError(f"There is no script {self.script}.")
        return launch([self.script, *arguments], _workers_config(self.workers, self.threads), self.only)


@dataclass
class Host:
    """Lead a run that workers on any machine may join and leave at any time, and print the line to join it with.

    Any worker may be killed, and so may the host: start it again with --resume. What is trained is a recipe, or a
    script of yours, of which every joiner needs a copy.
    """

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
    host: Annotated[
        str, tyro.conf.arg(metavar="ADDRESS", help="Where to listen; 0.0.0.0 lets other machines join, encrypted.")
    ] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(metavar="N", help="0: any that is free, and the same again on --resume.")] = 0
    address: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="How others reach this machine, for the invite.")
    ] = None
    patience: Annotated[
        float, tyro.conf.arg(metavar="SECONDS", help="How long a worker may be silent before it is given up.")
    ] = 30.0
    at_least: Annotated[int, tyro.conf.arg(metavar="N", help="Workers to wait for before the first step.")] = 1
    insecure: Annotated[
        bool, tyro.conf.arg(help="No encryption and no secret; plain peers of the published protocol may join.")
    ] = False
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.launch.host import host, with_base
        from potluck.train.arguments import Listening, host_args

        args = host_args(
            what=self.what,
            settings=(*self.settings, *data_setting(self.data)),
            workers=self.workers,
            threads=self.threads,
            ranks=self.ranks,
            out=self.out,
            resume=self.resume,
            listening=Listening(
                host=self.host,
                port=self.port,
                address=self.address,
                patience_s=self.patience,
                at_least=self.at_least,
                insecure=self.insecure,
            ),
        )
        return host(with_base(args))


@dataclass
class Join:
    """Join a run: paste the line that `potluck host` printed. Ctrl-C leaves it politely, and it continues.

    Without a script, what is trained comes from the host as a recipe, never as code. Options come before the invite.
    """

    invite: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            metavar="INVITE [SCRIPT [ARGUMENTS ...]]", help="The line; or a file that holds it; or - to read it."
        ),
    ]
    data: Annotated[
        tyro.conf.UseAppendAction[list[str]],
        tyro.conf.arg(
            metavar="PATH",
            help="Where this machine has the text. Nothing else of yours is read. May be repeated.",
            help_behavior_hint="(default: you are asked, if the host's recipe names files)",
        ),
    ] = field(default_factory=list)
    base: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FOLDER",
            help="Where this machine has the model that is fine-tuned.",
            help_behavior_hint="(default: the Hugging Face cache)",
        ),
    ] = None
    fetch_base: Annotated[bool, tyro.conf.arg(help="Ask the host for the model that is fine-tuned, once.")] = False
    workers: Count = 1
    threads: Threads = None
    ranks: Ranks = None

    def __call__(self, *arguments: str) -> int:
        from potluck.launch.join import join

        config = _workers_config(self.workers, self.threads, self.ranks)
        settings = (*data_setting(self.data), *base_setting(self.base))
        return join(self.invite, list(arguments), config, settings, fetches_base=self.fetch_base)


@dataclass
class Export:
    """Write a checkpoint's model as one plain safetensors file, whichever way the run had split it.

    Streams: it needs no more memory for a large model than for a small one. The built-in model is also written as a
    folder for Hugging Face's libraries (--hf) or as a file for llama.cpp (--gguf).
    """

    source: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|CHECKPOINT", help="A run folder, for its newest checkpoint; or one checkpoint."),
    ]
    out: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="OUT.safetensors", help="The file to write; one that is there is not overwritten."),
    ]
    ema: Annotated[bool, tyro.conf.arg(help="The average of the weights that fit.ema kept, in place of them.")] = False
    hf: Annotated[bool, tyro.conf.arg(help="A folder that from_pretrained() loads, as a llama. OUT is its name.")] = (
        False
    )
    gguf: Annotated[bool, tyro.conf.arg(help="A file for llama.cpp. OUT is its name.")] = False

    def __call__(self) -> int:
        from potluck.save.export import export

        source, out = Path(self.source), Path(self.out)
        if self.hf or self.gguf:
            from potluck.train.other_formats import export_gguf, export_hf

            if self.hf and self.gguf:
                raise ConfigError("--hf writes a folder and --gguf a file. Ask for one of them at a time.")
            return (export_hf if self.hf else export_gguf)(source, out, ema=self.ema)
        return export(source, out, ema=self.ema)


@dataclass
class Doctor:
    """Say what this machine brings, and what is wrong, with the fix."""

    def __call__(self) -> int:
        from potluck.doctor import examine

        return examine()


COMMANDS = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Finetune, tyro.conf.subcommand("finetune")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Host, tyro.conf.subcommand("host")]
    | Annotated[Join, tyro.conf.subcommand("join")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)
DESCRIPTION = """Train one PyTorch model on whatever machines people bring.

Start with `potluck demo`. Then `potluck finetune MODEL DATA` for a model of Hugging Face on your rows,
`potluck train RECIPE` for the built-in model on your text, or `potluck run -n 2 your_script.py` for your
own model. `potluck host RECIPE` prints a line with which any other machine joins in, now or later."""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        print(f"potluck {__version__}")
        return
    ours, scripts = _split(arguments)
    if ours and not ours[0].startswith("-") and ours[0] not in (names := _names()):
        near = difflib.get_close_matches(ours[0], names, n=1)
        hint = f" Did you mean potluck {near[0]}?" if near else ""
        say(f"There is no command {ours[0]!r}.{hint} There are: {', '.join(names)}.")
        sys.exit(ConfigError.exit_code)
    command = tyro.cli(
        COMMANDS,
        args=ours or ["--help"],
        prog="potluck",
        description=DESCRIPTION,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        code = command(*scripts) if isinstance(command, Run | Join) else command()
    except PotluckError as error:
        say(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _launch_recipe(args: TrainArgs, only: int | None) -> int:
    return launch(["--recipe", json.dumps(to_dict(args))], workers_of(args), only)


def _names() -> list[str]:
    return [next(info.name for info in each.__metadata__ if hasattr(info, "name")) for each in get_args(COMMANDS)]


def _workers_config(count: int, threads: int | None, ranks: int | None = None) -> WorkersConfig:
    return checked(lambda: WorkersConfig(count=count, threads=threads, ranks=ranks), "Workers: ")


TAKES_VALUE = ("-n", "--workers", "--threads", "--ranks", "--data", "--base", "--only")
"""Options of `run` and `join`, whose value may be mistaken for the script or the invite."""


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and what follows the script of `run`, or the invite of `join`: those are the script's own."""
    if not arguments or arguments[0] not in ("run", "join"):
        return arguments, []
    index = 1
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "-":
        index += 2 if arguments[index] in TAKES_VALUE else 1
    return arguments[: index + 1], arguments[index + 1 :]


if __name__ == "__main__":
    main()

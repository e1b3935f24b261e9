"""The command line: which commands there are, and what follows a script or an invite. Imports no torch by itself."""

import difflib
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tyro

from potluck import __version__
from potluck.account import begin as begin_account
from potluck.account import on_quit
from potluck.commands.demo import Demo
from potluck.commands.finetune import Chat, Finetune
from potluck.commands.host import Host, MakeInvite, Up
from potluck.commands.join import Join, Pause, Resume
from potluck.commands.looking import Doctor, ReplayRun, WatchRun, Why
from potluck.commands.results import Export, Push
from potluck.commands.train import Run, Train
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.event_queue import end_process
from potluck.logs import configure_logs
from potluck.signals import end_on_sigterm, let_through
from potluck.words import say

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": Demo,
    "train": Train,
    "finetune": Finetune,
    "chat": Chat,
    "run": Run,
    "host": Host,
    "invite": MakeInvite,
    "join": Join,
    "pause": Pause,
    "resume": Resume,
    "watch": WatchRun,
    "why": Why,
    "replay": ReplayRun,
    "up": Up,
    "export": Export,
    "push": Push,
    "doctor": Doctor,
}
TRAIN = ("train", "finetune", "run", "host", "join", "up")
"""Commands that a scheduler ends with SIGTERM, and whose last words somebody reads."""
HELP = """potluck: train one PyTorch model on whatever machines people bring.
Try it
  • demo      train on three unequal workers here, twice, and compare
  • doctor    what this machine brings, and what is missing
Train
  • finetune  a model of Hugging Face, on your rows:  potluck finetune ID DATA
  • run       your own script, on several workers:    potluck run -n 2 train.py
  • train     a recipe of the built-in model:         potluck train small
Bring machines together
  • host      lead a run that others may join and leave:  potluck host train.py
  • join      take part in one: paste the line that its host printed
  • invite    make that line before there is a host, for a scheduler
  • pause     have your card back for a while;  • resume  let it work again
  • up        all nodes of a SLURM, Ray, MPI or torchrun job
Look
  • watch     the live page of a run, here or elsewhere, or of two
  • why       who waits for whom in a run that stands still
  • replay    repeat what a host decided, to find a fault
Results
  • chat      talk to a model that was fine-tuned
  • export    a checkpoint's model as one file;  • push  upload it to the hub
potluck COMMAND --help says more of each, and potluck --version which this is."""
"""One screen, of 24 rows: what a person wants, and the command for it."""


def main() -> None:
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"potluck {__version__}")
        return
    trains = bool(sys.argv[1:2]) and sys.argv[1] in TRAIN
    with end_on_sigterm() if trains else nullcontext():
        try:
            let_through()
            configure_logs()
            if trains:
                begin_account(f"potluck {sys.argv[1]}")
                on_quit.append(_tell_own)
            code = _main()
        except PotluckError as error:
            say(str(error))
            code = error.exit_code
        except KeyboardInterrupt:
            code = Interrupted.exit_code
    end_process(code)


def _tell_own() -> None:
    from potluck.launch.why import tell_own

    tell_own()


def _main() -> int:
    ours, scripts = _split(sys.argv[1:])
    if ours and not ours[0].startswith("-") and ours[0] not in COMMANDS:
        near = difflib.get_close_matches(ours[0], COMMANDS, n=1)
        hint = f" Did you mean potluck {near[0]}?" if near else ""
        say(f"There is no command {ours[0]!r}.{hint} There are: {', '.join(COMMANDS)}.")
        return ConfigError.exit_code
    if ours in ([], ["--help"], ["-h"]):
        print(HELP)
        return 0
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        args=ours,
        prog="potluck",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command(*scripts) if isinstance(command, Run | Host | Join | Up) else command()


TAKES_VALUE = {"-n", "--workers", "--threads", "--ranks", "--data", "--base", "--only", "--out", "--set"}
TAKES_VALUE |= {"--as", "--on", "--port", "--address", "--patience", "--at-least", "--watch", "--hours"}
TAKES_VALUE |= {"--host", "--identity", "--track", "--page"}
"""Options of `run`, `host`, `join` and `up`, whose value may be mistaken for the script or the invite."""
TAKES_NONE = {"-h", "--help", "--resume", "--or-resume", "--insecure", "--control", "--fetch-base", "--yield"}
"""Their other options. Anything else before a script is the script's own, in the wrong place."""


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and what follows the script of `run`, `host` or `up`, or the invite of `join`: the script's own."""
    if not arguments or arguments[0] not in ("run", "host", "join", "up"):
        return arguments, []
    index = 1
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "-":
        _check_option(arguments, index)
        index += 2 if arguments[index] in TAKES_VALUE else 1
    if arguments[0] in ("host", "up") and not "".join(arguments[index : index + 1]).endswith(".py"):
        return arguments, []  # a recipe has no arguments of its own, and options may follow it
    return arguments[: index + 1], arguments[index + 1 :]


def _check_option(arguments: list[str], index: int) -> None:
    """Refuse an option of the script's before it: its value would be taken for the script."""
    command, word = arguments[0], arguments[index]
    name = word.partition("=")[0].replace("_", "-")
    if name in TAKES_VALUE | TAKES_NONE or re.fullmatch(r"-n\d+", name):
        return
    near = difflib.get_close_matches(name, sorted(TAKES_VALUE | TAKES_NONE), n=1, cutoff=0.75)
    hint = f" Did you mean {near[0]}?" if near else ""
    script = next((each for each in arguments[index:] if each.endswith(".py")), None)
    own = script or ("SCRIPT" if command in ("run", "join") else "a script")
    invite = "INVITE " if command == "join" else ""
    raise ConfigError(
        f"potluck {command} has no option {name}.{hint} If it is your script's, write it behind its name: potluck"
        f" {command} {invite}{own} {name} ... ; potluck {command} --help lists those of potluck {command}."
    )


if __name__ == "__main__":
    main()

"""The script that a host trains, as those who join hear of it: its name and arguments, as TOML in a recipe's place.

Never its code: a joiner runs its own copy, and may give that arguments of its own.
"""

import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tomli_w

from potluck.fleet.host_connector import HostConnector
from potluck.fleet.invite import Invite
from potluck.fleet.membership import FETCHER
from potluck.wire.words import clean
from potluck.words import shown_arguments

MOST_ARGUMENTS, MOST_LETTERS = 256, 4096
"""The most arguments that are taken from a host, and letters of one."""
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class HostedScript:
    name: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Show it as one would type it."""
        return clean(shlex.join([self.name, *self.arguments]))


def script_table(command: Sequence[str]) -> str:
    """Write what joiners may know of a script. Arguments that hold a secret stay here, and all the others with them."""
    name, *arguments = command
    hides = shown_arguments(arguments) != shlex.join(arguments)
    return tomli_w.dumps({"script": {"name": name, "arguments": [] if hides else arguments}})


def read_script(recipe: str) -> HostedScript | None:
    """Read what script_table() wrote; None if the host trains a recipe, or says something that no host says."""
    try:
        table = tomllib.loads(recipe).get("script", {})
    except tomllib.TOMLDecodeError:
        return None
    name, arguments = table.get("name"), table.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, list) or len(arguments) > MOST_ARGUMENTS:
        return None
    if not all(isinstance(each, str) and len(each) <= MOST_LETTERS and "\0" not in each for each in arguments):
        return None
    return HostedScript(name, tuple(arguments))


def ask_for_script(invite: Invite, name: str, say: Callable[[str], None]) -> HostedScript | None:
    """Ask a host for the script that it trains, over a connection that ends with the answer."""
    pipe, welcome = HostConnector(invite, name=name, kind=FETCHER, say=say).connect(PATIENCE_S, again=False)
    pipe.close()
    return read_script(welcome.recipe)

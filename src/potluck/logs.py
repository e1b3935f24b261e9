"""Logs: what the parts of potluck note, for whoever looks for a fault. One variable turns them on. Imports no torch."""

import logging
import os
import sys

from potluck.errors import ConfigError

VARIABLE = "POTLUCK_LOG"
"""Such as `debug`, `info` or `warning`; and `info:FILE`, in which processes append to a file."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


def configure_logs() -> None:
    """Once in each process: what `potluck` logs, as the variable says. Without it, the script's own settings hold."""
    logger = logging.getLogger("potluck")
    setting = os.environ.get(VARIABLE, "")
    if not setting or any(each.get_name() == VARIABLE for each in logger.handlers):
        return
    level, _, file = setting.partition(":")
    if level.lower() not in LEVELS:
        raise ConfigError(f"{VARIABLE} is {', '.join(LEVELS)}, or one of them and a file (info:FILE), not {setting!r}.")
    try:
        handler = logging.FileHandler(file, encoding="utf-8") if file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise ConfigError(f"{VARIABLE} names {file}, which cannot be written: {error.strerror}.") from None
    who = (os.environ.get("POTLUCK_NAME") or os.environ.get("RANK", "")).replace("%", "%%")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(process)d {who} %(levelname)s %(name)s: %(message)s"))
    handler.set_name(VARIABLE)  # a script may have others
    logger.addHandler(handler)
    logger.setLevel(LEVELS[level.lower()])
    logger.propagate = False

"""One exception tree. The type says whose fault it was, and carries the exit code of a command that ends with it.

PotluckError            anything we say on purpose: a sentence, never a stack of frames
  ConfigError           you asked for something we cannot do; the sentence says what to do instead
    CheckpointError     a checkpoint cannot be used here, or cannot be written
  Diverged              the loss or the gradient stayed non-finite
  WorkerLost            a peer stopped; whoever started it knows why
  Interrupted           you pressed Ctrl-C; the run is saved
"""

from typing import ClassVar


class PotluckError(Exception):
    exit_code: ClassVar[int] = 1


class ConfigError(PotluckError):
    exit_code = 2


class CheckpointError(ConfigError):
    pass


class Diverged(PotluckError):
    pass


class WorkerLost(PotluckError):
    exit_code = 75


class Interrupted(PotluckError):
    exit_code = 130

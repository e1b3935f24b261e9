"""One exception tree. The type says whose fault it was, and carries the exit code of a command that ends with it.

PotluckError            anything we say on purpose: a sentence, never a stack of frames
  ConfigError           you asked for something we cannot do; the sentence says what to do instead
    CheckpointError     a checkpoint cannot be used here, or cannot be written
    StoreError          the store between workers cannot be read or written, or has moved on without us
    JournalError        a host's journal is damaged
  WireError             bytes that are no message
    OurProtocolError    we were about to send something illegal: a bug here
    TheirProtocolError  the peer sent something illegal: close it, keep training
  Diverged              the loss or the gradient stayed non-finite
  WorkerLost            a peer stopped; the process that started it knows why
  Interrupted           you pressed Ctrl-C, or the system asked for an end; the run is saved
"""

from typing import ClassVar


class PotluckError(Exception):
    exit_code: ClassVar[int] = 1


class ConfigError(PotluckError):
    exit_code = 2


class CheckpointError(ConfigError):
    pass


class StoreError(ConfigError):
    pass


class JournalError(ConfigError):
    pass


class WireError(PotluckError):
    pass


class OurProtocolError(WireError):
    pass


class TheirProtocolError(WireError):
    pass


class Diverged(PotluckError):
    pass


class WorkerLost(PotluckError):
    exit_code = 75


class Interrupted(PotluckError, SystemExit):
    """The run was interrupted. It is also a SystemExit: uncaught, it ends a script with this exit code and without a
    stack of frames."""

    exit_code = 130

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = self.exit_code

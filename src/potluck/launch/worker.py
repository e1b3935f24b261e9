"""Runs a worker process: a script of yours, or a recipe. Our errors leave as sentences, not as stacks of frames.

python -m potluck.launch.worker script.py [arguments]
python -m potluck.launch.worker --recipe ARGUMENTS
python -m potluck.launch.worker --join SETTINGS
python -m potluck.launch.worker --finish RUN
"""

import atexit
import gc
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from potluck.account import begin as begin_account
from potluck.environment import IGNORED, LAST_WORDS, PARENT_PIPE
from potluck.errors import Interrupted, PotluckError, WorkerLost
from potluck.fleet.invite import INVITE
from potluck.logs import configure_logs
from potluck.signals import let_through


def main() -> None:
    try:
        code = _main()
    except KeyboardInterrupt:  # another one, while the first was being answered
        code = Interrupted.exit_code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit(code)


def _main() -> int:
    _end_with_parent()
    _hear_early()
    begin_account("worker", os.environ.get("POTLUCK_NAME") or os.environ.get("RANK", ""))
    configure_logs()
    try:
        let_through()  # what came while Python was starting comes now
        _run(sys.argv[1:])
    except PotluckError as error:
        _leave_words(f"potluck: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except SystemExit as error:
        return _exit_code(error)
    except Exception as error:
        return _tell_of(error)
    return 0


def _run(arguments: list[str]) -> None:
    if arguments[0] in ("--recipe", "--join", "--finish"):
        gc.disable()  # it would look at all of torch again and again while that loads, for a quarter of a second
        from potluck.launch import recipes

        gc.freeze()
        gc.enable()
        calls = {"--recipe": recipes.main, "--join": recipes.join, "--finish": recipes.finish}
        calls[arguments[0]](arguments[1:])
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _tell_of(error: Exception) -> int:
    """A script's own error is shown to its author. Where a layer gathers its parameters, it may be a peer's loss."""
    if "torch.distributed" in sys.modules:
        from potluck.link.link import loss_of_peer

        if (loss := loss_of_peer(error)) is not None:
            _leave_words(f"potluck: {loss}")
            return WorkerLost.exit_code
    traceback.print_exception(type(error), error, _own_trace(error))
    words = f"SyntaxError: {error}" if isinstance(error, SyntaxError) else None  # else the lines above once more
    _leave_words(words or "".join(traceback.format_exception_only(error)).strip())
    return 1


def _own_trace(error: Exception) -> TracebackType | None:
    """The frames of an error from the script's own on: those before are ours and runpy's, and tell nobody anything."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_frame.f_code.co_filename not in (__file__, runpy.__file__, "<frozen runpy>"):
            break
        trace = trace.tb_next
    return trace


def _end_with_parent() -> None:
    """The launcher holds the other end of a pipe. When that closes it is gone, however it went, and so are we."""
    number = os.environ.pop(PARENT_PIPE, None)
    if number is None:
        return

    def wait_for_end() -> None:
        os.read(int(number), 1)
        os._exit(1)

    # A thread: the main one may be within a collective that never ends.
    threading.Thread(target=wait_for_end, name="parent watch", daemon=True).start()


def _hear_early() -> None:
    """A worker that comes and goes may be told to go before it has anything to hand over: by Ctrl-C from its parent, or
    by SIGTERM from the one that takes the machine back, which would otherwise look like a crash."""
    if INVITE in os.environ:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in os.environ.get(IGNORED, "").split():
        # Not SIG_IGN: whatever a script starts would have that too, and could not be ended.
        signal.signal(signal.Signals[name], lambda number, frame: None)


def _leave_words(words: str) -> None:
    path = os.environ.get(LAST_WORDS)
    if path is not None:
        Path(path).write_text(words, encoding="utf-8")
    else:
        print(words, file=sys.stderr)


def _exit_code(error: SystemExit) -> int:
    """Return a script's exit code as Python has it: a number is the code, nothing is 0, and anything else is
    printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _exit(code: int) -> None:
    """Everything that Python does at its end, but not the end of native threads.

    Those of a process group can hold it up when a peer is gone, and now and then abort it when all is well.
    """
    if not code:
        threading._shutdown()  # type: ignore[attr-defined] # waits for the script's own threads
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""`potluck watch`: the page of a run folder, finished or running, or of a host elsewhere by its invite.

Nothing is written to the run folder, and the run does not notice.
"""

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from potluck.errors import ConfigError
from potluck.launch.join import HIDDEN, take_invite
from potluck.page.reader import EVENTS
from potluck.page.remote import RemoteRun
from potluck.page.start import prepare_page, tell_of
from potluck.page.where import PageSettings, page_address


def watch(what: str, page: str | None, beside: str | None = None) -> int:
    """`what`: a run folder, an invite, a file that holds one, or - to read it. `beside`: the folder of another run."""
    address = page_address(page if page is not None else "on")
    if address is None:
        raise ConfigError("potluck watch is nothing but a page: leave out --page off, or name a port.")
    folder = Path(what)
    is_folder = folder.is_dir()
    with ExitStack() as stack:
        aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-watch-")))
        for shown in (folder if is_folder else None, Path(beside) if beside else None):
            if shown is not None and not (shown / EVENTS).exists():
                raise ConfigError(f"There is no run in {shown}: it has no {EVENTS}.")
        if not is_folder:
            folder = aside / "run"
            folder.mkdir(mode=0o700)
            remote = _remote(what, folder)
            stack.callback(remote.close)
        identity = folder / "identity" if (folder / "identity").is_dir() else aside / "identity"
        invite = folder / "invite" if is_folder else None
        other = Path(beside) if beside else None
        wanted = PageSettings(folder=folder, beside=other, invite=invite, identity=identity, keeps_place=False)
        try:
            listener, settings = prepare_page(address, wanted)
        except OSError as error:
            raise ConfigError(
                f"Cannot serve the page at {address.host} port {address.port}: {error.strerror}. Name another with"
                " --page."
            ) from None
        tell_of(settings)
        print("Ctrl-C ends the page, and not the run.", flush=True)
        from potluck.page.serve import serve  # Starlette and uvicorn: only where they serve

        with suppress(KeyboardInterrupt):  # that is how a person ends the page: no error
            serve(settings, listener, until_input_ends=False)
    return 0


def _remote(what: str, folder: Path) -> RemoteRun:
    if what not in (HIDDEN, "-") and "://" not in what and not Path(what).is_file():
        raise ConfigError(f"There is neither a run folder {what}, nor is that an invite, which starts with potluck://.")
    remote = RemoteRun(take_invite(what), folder)
    remote.start()
    return remote

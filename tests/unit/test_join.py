"""What a host's recipe can make a joiner do: read nothing that the joiner did not name, and little else."""

import contextlib
import json
import os
import pty
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli import _split
from potluck.config import from_toml
from potluck.engine.host_table import HostTable
from potluck.errors import ConfigError
from potluck.fleet.invite import INVITE
from potluck.fleet.member_asks import MemberSaves
from potluck.launch import recipes
from potluck.launch.control import Joiner
from potluck.launch.join import JoinSession, JoinTerms, _says_yes
from potluck.launch.join import join as join_command
from potluck.launch.options import HostOptions, host_args
from potluck.train import recipe, text
from potluck.train.arguments import FILES_ASKED, WorkersConfig, as_settings, ask_for_files, joining_command
from potluck.train.model import GPT, ModelConfig
from tests.bare import Tell, Worker
from tests.fleet.fleet import close_all, serve
from tests.quick import first_of

RECIPE = """
name = "theirs"
[model]
dim = 16
layers = 1
heads = 2
context = 1
[batch]
size = 1
"""


def follow(tell: Tell, settings: tuple[str, ...]) -> None:
    """Joins as a worker of `potluck join` does, and tells which files it opened, and what became of it."""
    opened: list[str] = []

    def look(event: str, arguments: Any) -> None:
        if event == "open":
            opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else "")

    sys.addaudithook(look)
    said = ""
    try:
        recipes.join([json.dumps(settings)])
    except ConfigError as error:
        said = str(error)
    tell([said, opened])


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    place = tmp_path / "secret"
    place.write_text("a password" * 100)
    return place


def joined(folder: Path, text: str, settings: tuple[str, ...] = ()) -> tuple[str, list[str], Any]:
    """What a worker said that was sent this recipe, the files it opened, and what the host knows of it."""
    server, invite, journal = serve(folder, recipe=text)
    server.start()
    try:
        with Worker(follow, settings, env={INVITE: invite.line(), FILES_ASKED: str(folder / "asked")}) as worker:
            said, opened = worker.hear()
            worker.finish()
        return said, opened, server.core.description
    finally:
        server.stop()
        journal.close()
        close_all()


def test_a_file_that_a_host_names_is_not_opened(tmp_path: Path, secret: Path) -> None:
    said, opened, described = joined(tmp_path, f"{RECIPE}[data]\npaths = [{str(secret)!r}]\n")
    assert f"names files for this machine to read: {str(secret)!r}. Nothing was read" in said
    assert "potluck join --data PATH INVITE" in said
    assert opened and str(secret) not in opened  # it does see what is opened
    assert described is None  # not even how long it is
    assert json.loads((tmp_path / "asked").read_text()) == [str(secret)]  # for the person to be asked


def test_what_the_joiner_names_is_read_in_its_place(tmp_path: Path, secret: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("x")  # too short to be trained on, so that it ends there
    paths = f"{RECIPE}[data]\npaths = [{str(secret)!r}]\n"
    said, opened, _ = joined(tmp_path, paths, as_settings({"data.paths": [str(mine)]}))
    assert said.startswith("The text has 1 bytes")
    assert str(mine) in opened and str(secret) not in opened


@pytest.mark.parametrize(
    ("more", "said"),
    first_of(
        [
            (
                '[policy]\nkind = "cadence"\n[strategy]\nkind = "hybrid_shard"\nintra_node_size = 31\n',
                "wants 31 processes",
            ),
            ('[stages.protocol]\nkind = "datastore"\nurl = "file:///somewhere"\n', "a host cannot lead"),
            ("[data]\nlimit_bytes = 9000\n[optimizer]\nlr = -1.0\n", "lr must be above 0"),
        ]
    ),
)
def test_a_recipe_that_wants_too_much_is_refused(more: str, said: str, tmp_path: Path) -> None:
    told, _, described = joined(tmp_path, RECIPE + more)
    assert said in told and described is None


def test_a_joiner_gives_what_is_free_and_not_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from potluck.engine.engine import Engine

    config = from_toml(recipe.RunConfig, RECIPE, source="here")
    monkeypatch.setattr(recipe, "free_memory_bytes", lambda: 1000)
    recipe._check_memory(config, Engine(), rows=100)
    with pytest.raises(ConfigError, match=r"needs .* of memory to be trained here, and this machine has 1 kB"):
        engine = Engine()
        engine.run.wanted = replace(engine.run.wanted, has_host=True)
        recipe._check_memory(config, engine, rows=100)


@pytest.mark.parametrize(
    "config",
    [ModelConfig(), ModelConfig(dim=64, heads=8, kv_heads=2, layers=3, hidden=96, vocab=300), ModelConfig(layers=1)],
)
def test_parameters_are_counted_without_making_the_model(config: ModelConfig) -> None:
    assert config.parameters == sum(parameter.numel() for parameter in GPT(config).parameters())


def test_a_bottomless_recipe_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="the host's recipe is not valid TOML"):
        from_toml(recipe.RunConfig, "a = " + "[" * 100_000, source="the host's recipe")


# Asking


def answer(text: str, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    """What a person types at a terminal; whether it was a yes, and what the terminal showed."""
    ours, theirs = pty.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        os.write(ours, text.encode())
        monkeypatch.setattr(sys, "stdin", stack.enter_context(os.fdopen(os.dup(theirs), "r")))
        monkeypatch.setattr(sys, "stderr", stack.enter_context(os.fdopen(theirs, "w")))
        said, shown = _says_yes(paths), b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 1 << 16)
        return said, shown.decode()


@pytest.mark.parametrize(
    ("typed", "is_yes"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("x\n", False)]
)
def test_a_person_is_shown_the_files_and_no_is_the_default(
    typed: str, is_yes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    said, shown = answer(typed, [str(tmp_path / "link"), "a\x1b[2Jb"], monkeypatch)
    assert said is is_yes
    assert "'/etc/passwd'" in shown  # where a link leads
    assert "\x1b" not in shown and "[y/N]" in shown


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", nothing)
        assert not _says_yes(["/etc/passwd"])


def test_too_many_names_are_not_asked_about_and_none_can_write_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILES_ASKED, str(tmp_path / "asked"))
    said = str(ask_for_files(["\x1b[2J" + "a" * 100_000] * 1000))
    assert len(said) < 3000 and "\x1b" not in said and not (tmp_path / "asked").exists()


def test_workers_of_the_host_itself_read_what_its_own_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f"{RECIPE}[data]\npaths = ['my text']\n")
    what = str(tmp_path / "own.toml")
    args = host_args(HostOptions(what=what, patience_s=1.0))
    assert not args.script and args.settings == ('data.paths=["my text"]',)
    args = host_args(HostOptions(what=what, data=("\U0001f35c",), patience_s=1.0))
    kind, settings = joining_command(args.script, args.settings)
    assert kind == "--join"
    found = from_toml(recipe.RunConfig, RECIPE, source="here", overrides=tuple(json.loads(settings)))
    assert found.data.paths == ("\U0001f35c",)


def test_several_paths_may_be_named_and_options_come_first() -> None:
    ours, rest = _split(["join", "--data", "a", "--data", "b", "LINE", "script.py", "--x"])
    assert ours[-1] == "LINE" and rest == ["script.py", "--x"]
    with pytest.raises(ConfigError, match="Options come before the invite: potluck join --data"):
        join_command("potluck://127.0.0.1:1/", ["--data", "a"], WorkersConfig(count=1), ())


# What is no text


def test_what_the_system_makes_up_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is no plain file"):
            text.read_text(text.DataConfig(paths=(str(path),)))
    with pytest.raises(ConfigError, match="There is no text in /proc/self/environ"):
        text.read_text(text.DataConfig(paths=("/proc/self/environ",)))


def test_more_text_than_memory_holds_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"some text" * 1000)
    monkeypatch.setattr(text, "free_memory_bytes", lambda: 9000)
    with pytest.raises(ConfigError, match=r"The text has 9,000 bytes; .* Set data.limit_bytes to read less"):
        text.read_text(text.DataConfig(paths=(str(large),)))
    assert text.read_text(text.DataConfig(paths=(str(large),), limit_bytes=4)) == b"some"
    monkeypatch.undo()
    assert 1 << 20 < text.free_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_joiner_that_has_not_joined_says_so_when_it_goes(tmp_path: Path) -> None:
    def sentence(number: int) -> str:
        session = JoinSession(WorkersConfig(count=1), JoinTerms(), Joiner, ["a"])  # type: ignore[arg-type]
        session._patience_place = tmp_path / "patience"
        session._interrupts._hear(number)
        end = session._end()
        assert end is not None
        return end[0]

    assert sentence(signal.SIGTERM).endswith("(SIGTERM): leaving before it has joined.")
    assert sentence(signal.SIGINT) == "Leaving before it has joined. Ctrl-C again leaves at once."
    (tmp_path / "patience").write_text("30")  # which a worker writes that its host has welcomed
    assert sentence(signal.SIGTERM).endswith("(SIGTERM): leaving after this step.")
    assert sentence(signal.SIGINT).startswith("Leaving after this step.")


def test_the_last_words_of_a_joiner_that_was_still_starting_name_no_step() -> None:
    def words(version: int, *, left: bool) -> str:
        member = SimpleNamespace(saves=MemberSaves(), version=version, left=left)
        run = SimpleNamespace(progress=SimpleNamespace(step_number=version))
        return HostTable.last_words(SimpleNamespace(member=member, run=run))  # type: ignore[arg-type]

    assert words(0, left=False) == "The run ended before this worker had a part in it."
    assert words(81, left=False) == "The host stopped the run after step 81, and has saved it."
    assert words(0, left=True) == "Left the run before it had a part in it; it continues without this worker."
    assert words(81, left=True) == "Left the run after step 81; it continues without this worker."

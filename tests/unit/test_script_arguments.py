"""A script's arguments under a host: what is the script's, the line to paste, and what a joiner runs."""

from pathlib import Path
from typing import Any

import pytest
import tyro

from potluck.cli import TAKES_NONE, TAKES_VALUE, _split
from potluck.commands.host import Host, Up
from potluck.commands.join import Join
from potluck.commands.train import Run, Train
from potluck.errors import ConfigError
from potluck.fleet.invite import Identity
from potluck.fleet.script import HostedScript, read_script, script_table
from potluck.launch import join as joining
from potluck.launch.host import host
from potluck.launch.options import HostOptions, host_args, tell_of_options, to_resume


def test_whatever_follows_a_hosts_script_is_the_scripts_and_a_recipe_has_options_behind_it() -> None:
    words = ["host", "-n", "2", "--host", "0.0.0.0", "train.py", "--epochs", "12", "-n", "3"]
    assert _split(words) == (words[:6], ["--epochs", "12", "-n", "3"])
    assert _split(["host", "small", "-n", "2"]) == (["host", "small", "-n", "2"], [])
    assert _split(["host", "--page=off", "train.py", "--resume"]) == (["host", "--page=off", "train.py"], ["--resume"])


def test_an_option_of_the_host_behind_a_script_is_told_to_be_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    tell_of_options("host", HostOptions, "train.py", ["--epochs", "12"])
    assert capsys.readouterr().err == ""
    tell_of_options("host", HostOptions, "train.py", ["--lr", "1", "--or-resume"])
    assert "--or-resume goes to train.py. To give it to potluck host, write it before" in capsys.readouterr().err
    tell_of_options("host", HostOptions, "train.py", ["--patience=9"])
    assert "--patience=9 goes to train.py" in capsys.readouterr().err
    given = HostOptions(what="train.py", out="here", workers=2)
    tell_of_options("host", given, "train.py", ["--out", "there", "-n", "3"])
    assert capsys.readouterr().err == ""  # the host has its own
    tell_of_options("host", given, "train.py", ["--out", "there", "--patience", "3"])
    assert "--patience goes to train.py" in capsys.readouterr().err


def test_the_line_to_paste_has_the_script_and_its_arguments_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("potluck.launch.host._Host._watch", lambda self, pool: joining_finish())
    for arguments, shown in [
        (["--epochs", "12", "--name", "a b"], "train.py --epochs 12 --name 'a b'"),
        (["--api-key", "hunter2"], "train.py --api-key ..."),
    ]:
        options = HostOptions(what="train.py", workers=0, out=shown[:5] + str(len(arguments)), page="off")
        host(host_args(options, arguments))
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if "potluck join potluck://" in line]
        assert line.endswith(f" {shown}") and "SCRIPT" not in out and "hunter2" not in out


def joining_finish() -> Any:
    from potluck.fleet.effects import Finish

    return Finish("interrupted")


def test_what_a_host_tells_of_its_script_is_read_back_and_nonsense_is_not() -> None:
    told = script_table(["train.py", "--epochs", "12"])
    assert read_script(told) == HostedScript("train.py", ("--epochs", "12"))
    assert read_script(script_table(["t.py", "--token", "s3cret"])) == HostedScript("t.py", ())
    for nonsense in ("", "x = [", "[script]\nname = 3\narguments = []", 'script = {name = "a", arguments = [1]}'):
        assert read_script(nonsense) is None
    assert read_script(f'script = {{name = "a", arguments = {["x"] * 300}}}') is None
    assert "\x1b" not in HostedScript("t.py", ("\x1b[2J",)).shown


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (["own.py"], ["own.py", "--epochs", "12"]),
        (["own.py", "--epochs", "3"], ["own.py", "--epochs", "3"]),
        (["own.py", "--"], ["own.py"]),
    ],
)
def test_a_joiner_runs_with_the_hosts_arguments_unless_it_gives_its_own(
    given: list[str], runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    Path("invite").write_text(Identity.load_or_make(tmp_path / "id").invite("127.0.0.1", 1, encrypted=True).line())
    ran: list[list[str]] = []
    hosted = HostedScript("train.py", ("--epochs", "12"))
    monkeypatch.setattr(joining, "ask_for_script", lambda *asked: hosted)
    monkeypatch.setattr(joining, "_take_part", lambda session, command, line, is_quiet: ran.append(command) or (0, []))
    assert joining.join("invite", given, joining.WorkersConfig(count=1), ()) == 0
    assert ran == [runs]


def test_an_option_before_a_script_that_is_none_of_ours_is_refused_with_where_it_belongs() -> None:
    for words, line in [
        (["run", "--epochs", "3", "toy.py"], "potluck run toy.py --epochs ..."),
        (["host", "-n", "2", "--lr=1", "toy.py"], "potluck host toy.py --lr ..."),
        (["join", "--epochs", "3", "LINE", "toy.py"], "potluck join INVITE toy.py --epochs ..."),
    ]:
        with pytest.raises(ConfigError) as refused:
            _split(words)
        assert f"potluck {words[0]} has no option" in str(refused.value) and line in str(refused.value)


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"has no option --thredas. Did you mean --threads\? If it is your script's"):
        _split(["run", "--thredas", "1", "toy.py"])


@pytest.mark.filterwarnings("ignore:get_parser")
@pytest.mark.parametrize("command", [Run, Host, Join, Up])
def test_each_option_of_a_command_that_takes_a_script_is_known_before_it(command: type) -> None:
    parser = tyro.extras.get_parser(command, config=(tyro.conf.FlagCreatePairsOff,))
    for action in parser._actions:
        for name in (each for each in action.option_strings if "_" not in each):
            takes = action.nargs != 0
            assert name in (TAKES_VALUE if takes else TAKES_NONE), (command, name)


def test_options_of_run_and_join_behind_a_script_are_told_to_be_the_scripts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell_of_options("run", Run, "toy.py", ["-n", "2"])
    assert "-n goes to toy.py. To give it to potluck run, write it before the script." in capsys.readouterr().err
    tell_of_options("join", Join, "toy.py", ["--yield"], before="the invite")
    assert "To give it to potluck join, write it before the invite." in capsys.readouterr().err
    tell_of_options("run", Run, "toy.py", ["--epochs", "2"])
    assert not capsys.readouterr().err


def test_a_script_given_to_train_is_told_the_commands_for_scripts() -> None:
    with pytest.raises(ConfigError, match=r"toy.py is a script: potluck run toy.py runs it .* potluck host toy.py"):
        Train("toy.py")()


def test_the_line_to_continue_with_has_the_options_that_a_host_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    options = HostOptions(what="train.py", workers=2, threads=1, patience_s=9.0, insecure=True, at_least=2)
    line = "--workers 2 --threads 1 --patience 9.0 --insecure --out runs/train --resume train.py --lr 1"
    assert to_resume(host_args(options, ["--lr", "1"])) == f"potluck host {line}"
    options = HostOptions(what="small", out="r", settings=["fit.epochs=2"], data=("a b",), threads=3)
    assert to_resume(host_args(options)) == "potluck host --threads 3 --out r --resume r/run.toml"

"""What README.md and docs/ say can be refuted: commands parse, code runs, names exist. For links, see test_docs.py."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import tyro

import potluck
from bench.__main__ import NAMES
from potluck import cli
from potluck.engine.engine import Engine
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *GUIDE, ROOT / "CONTRIBUTING.md"]
API = ROOT / "docs" / "api.md"
FIRST_RUN = ROOT / "docs" / "guide" / "first-run.md"
WITH_CODE = [page for page in PAGES if "\n```python\n" in page.read_text(encoding="utf-8")]


def blocks(page: Path, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Every line of an unmarked block, and all code within sentences, that starts with a program of ours."""
    lines = [line.split("  #")[0].strip() for block in blocks(page) for line in block.splitlines()]
    inline = [" ".join(found.split()) for found in code_in_sentences(page)]
    return [line for line in [*lines, *inline] if re.match(r"potluck |make |python -m bench", line)]


def code_in_sentences(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`([^`]+)`", prose)


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_parses(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for command in commands(page):
        program, *words = shlex.split(re.sub(r"\$\([^)]*\)", "VALUE", command))
        if program == "make":
            assert words[0] in targets or "=" in words[0], command
        elif program == "python":
            module, names = words[1], [word for word in words[2:] if not word.startswith("-")]
            assert module == "bench" or (ROOT / f"{module.replace('.', '/')}.py").is_file(), command
            assert module != "bench" or set(names) - {"NAME"} <= set(NAMES), command
        elif words != ["--version"]:
            parse(words, command)


def parse(words: list[str], command: str) -> None:
    if len(words) == 1:  # a command by its name alone, or one that needs nothing else
        assert words[0] in cli.COMMANDS, command
        return
    ours, _ = cli._split(words)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            tyro.extras.subcommand_cli_from_dict(
                cli.COMMANDS, args=ours, prog="potluck", config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit:
        pytest.fail(f"{command} does not parse: {said.getvalue()}")


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def first_run(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code, "first-run.md", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def test_the_readmes_ten_lines_are_those_of_the_first_run() -> None:
    shown, *_ = blocks(README, "python")
    assert len(shown.splitlines()) == 10 and shown in blocks(FIRST_RUN, "python")[0]


def test_the_first_run_gives_the_same_losses_on_one_worker_and_on_two() -> None:
    code = blocks(FIRST_RUN, "python")[0]
    alone, first, second = run_ranks(1, first_run, code)[0], *run_ranks(2, first_run, code)
    assert second == "", "only rank 0 speaks"
    assert first.count("each of its 512 samples was used exactly once") == 3
    mine, theirs = ([float(loss) for loss in re.findall(r"loss ([\d.]+)\.", said)] for said in (alone, first))
    assert len(mine) == 3 and mine == pytest.approx(theirs, abs=2e-3)
    assert mine[-1] < 0.5 * mine[0]


def last_samples(code: str, folder: str) -> float:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "guide", "exec"), names)
    return float(names["fleet"].last_step.samples)


def test_the_guides_trainer_and_loop_run_and_count_rows(tmp_path: Path) -> None:
    whole, trainer, config = blocks(FIRST_RUN, "python")
    begin = whole.split("fleet = ")[0]
    scheduler = "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
    loop, *others = blocks(FIRST_RUN.with_name("your-own-loop.md"), "python")
    values, figures = (next(code for code in others if word in code) for word in ("right = rows", "def figures_of"))
    configured = begin + config + trainer.replace("engine=fleet", "engine=fleet, config=config, validation=dataset")
    prepared = "fleet = potluck.init()\nmodel, _, loader = fleet.prepare(model, optimizer, dataset, batch_size=32)\n"
    measured = (
        f"{begin}{prepared}for epoch in fleet.epochs(1):\n{indent(values, '    ')}\nheld_out = dataset\n{figures}"
    )
    measured += "\nassert 0 <= found['accuracy'] <= 1 and 0 <= accuracy <= 1\n"
    for code in (begin + trainer, begin + scheduler + loop, configured.replace("runs/mine", "runs/other"), measured):
        assert run_ranks(1, last_samples, code, str(tmp_path)) == [32.0]


def test_the_api_page_names_every_public_thing_of_a_loop() -> None:
    on_page = set(re.findall(r"\w+", " ".join(code_in_sentences(API))))
    handle = {name for name in dir(Engine) if not name.startswith("_")}
    asked = {*inspect.signature(potluck.init).parameters, *inspect.signature(Engine.prepare).parameters} - {"self"}
    assert sorted((handle | asked | set(potluck.__all__)) - on_page) == []


def test_the_api_page_asks_for_docstrings_of_things_that_have_them() -> None:
    asked = re.findall(r"^::: potluck\.(\S+)$", API.read_text(encoding="utf-8"), re.M)
    for path in asked:
        home, _, name = f"potluck.{path}".rpartition(".")
        found = getattr(import_module(home), name, None) or import_module(f"potluck.{path}")
        own = inspect.getdoc(found) or inspect.getdoc(getattr(found, "prepare", None))  # the handle: its methods'
        assert own and not (dataclasses.is_dataclass(found) and own.startswith(f"{path}(")), path
    types = {"ApplyPolicy", "CommunicationProtocol", "ShardingStrategy"}
    assert set(potluck.__all__) <= {path.split(".")[-1] for path in asked} | types


def test_the_api_page_names_nothing_that_is_not_there() -> None:
    there = {*dir(Engine), *vars(Engine())}
    code = code_in_sentences(API)
    named = {found[1] for each in code if (found := re.match(r"fleet\.(\w+)", each))}
    assert sorted(named - there) == []
    options = {each.removesuffix("=") for each in code if each.endswith("=")}
    assert sorted(options - {*inspect.signature(Engine.prepare).parameters, "scheduler"}) == []


def test_what_was_never_run_is_said() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    for said in ("NCCL between several GPUs", "cards of other vendors", "macOS; Windows", "more than one real machine"):
        assert said in text
    platforms = (ROOT / "docs" / "guide" / "installing.md").read_text(encoding="utf-8")
    for said in ("used as such; untested", "macOS | untested", "untested there. Hosts need Unix"):
        assert said in platforms
    pages = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert "nobody else ships" not in pages and "no released FSDP takes weights per rank" in " ".join(pages.split())


def test_the_lines_that_a_port_takes_are_counted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "from-ddp.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| \[.*?\]\(\S+/port/(\w+)\.py\) \| (\d+) \| (\d+) \|$", page, re.M)
    assert [name for name, *_ in told] == ["with_potluck", "with_accelerate", "accelerate_with_potluck"]
    for name in ("plain", *(name for name, *_ in told)):
        source = (ROOT / "examples" / "port" / f"{name}.py").read_text(encoding="utf-8")
        (tmp_path / name).write_text(re.sub(r'\A""".*?"""\n', "", source, flags=re.S))
    for name, *counts in told:
        compare = ["git", "diff", "--no-index", "--numstat", str(tmp_path / "plain"), str(tmp_path / name)]
        found = subprocess.run(compare, capture_output=True, text=True, check=False).stdout
        assert found.split()[:2] == counts, f"{name}: {found}"


def test_what_is_promised_is_said_with_its_limit() -> None:
    """A number with the most that is possible, the same bits with what was tested, a kill with a pulled plug."""
    beginning, *_ = README.read_text(encoding="utf-8").split("\n## ")
    assert "**under Sync** you get the numbers a single machine" in beginning and "[Auto](#what-it-costs)" in beginning
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "1.97 times larger, of 2.0 possible" in text and "[three lines at most]" in text
    assert "in fp32, and in bf16 with attention under `torch.use_deterministic_algorithms`" in text
    rows = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8").splitlines()
    (killed,) = [number for number, row in enumerate(rows) if "kill -9 of a worker" in row]
    assert rows[killed + 1].startswith("| the same after a pulled plug")

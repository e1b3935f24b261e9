"""What workers print: whole lines of what a program draws, kept in a bounded file."""

import io
from pathlib import Path

from rich.console import Console
from rich.live import Live
from tqdm import tqdm

from potluck.show.output import OLDER, OUTPUT, OutputFile, OutputLine, read_output
from potluck.show.small_terminal import MOST_LETTERS, MOST_ROWS, SmallTerminal


class Screen(io.StringIO):
    """A stream that a program believes to be a terminal. Each write is seen by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.terminal = SmallTerminal()
        self.lines: list[str] = []
        self.seen: list[list[str]] = []

    def write(self, text: str) -> int:
        for letter in text:  # however the bytes are cut
            self.lines += self.terminal.feed(letter)
        self.seen.append(self.terminal.drawn)
        return len(text)

    def isatty(self) -> bool:
        return True

    def end(self) -> list[str]:
        return self.lines + self.terminal.close()


def lines_of(text: str) -> list[str]:
    terminal = SmallTerminal()
    return terminal.feed(text) + terminal.close()


def test_lines_stay_lines_and_what_is_drawn_over_is_none() -> None:
    assert lines_of("one\ntwo\n\nthree") == ["one", "two", "", "three"]
    assert lines_of("one\r\ntwo\r\n") == ["one", "two"]
    assert lines_of(" 10%\r 20%\r100%\nend\n") == ["100%", "end"]
    assert lines_of("\x1b[31mred\x1b[0m\n") == ["\x1b[31mred\x1b[0m"]
    assert lines_of("a\x1b]0;title\x07b\x1b[5;5xc\x00\n") == ["abc"]
    assert lines_of("long\x1b[2K\rnew\n\b\x1b[A\x1b[A\x1b[B\n") == ["new"]


def test_what_is_printed_for_ever_costs_bounded_memory() -> None:
    terminal = SmallTerminal()
    lines = terminal.feed("." * (10 * MOST_LETTERS)) + terminal.feed("\n" * 1000)
    assert len("".join(lines)) >= 9 * MOST_LETTERS and len(terminal._rows) < MOST_ROWS
    terminal.feed("\x1b[?25l" + "row\n" * 1000)
    assert len(terminal.drawn) <= MOST_ROWS and len(terminal._rows) <= MOST_ROWS
    terminal.feed("\x1b[" + "1" * 1_000_000)
    assert len(terminal._rest) < 1000


def test_bars_of_tqdm_are_drawn_and_only_their_ends_are_lines() -> None:
    screen = Screen()
    for epoch in tqdm(range(2), file=screen, desc="epochs", mininterval=0, ncols=60, position=0):
        for _ in tqdm(range(3), file=screen, desc="rows", mininterval=0, ncols=60, position=1, leave=False):
            tqdm.write(f"in epoch {epoch}", file=screen)
    lines = screen.end()
    assert [line for line in lines if "epochs" in line] == lines[-1:] and "2/2" in lines[-1]
    assert [line for line in lines if line.strip() and "epochs" not in line] == ["in epoch 0"] * 3 + ["in epoch 1"] * 3
    assert any(len(rows) == 2 and "1/2" in rows[0] and "2/3" in rows[1] for rows in screen.seen), screen.seen


def test_a_table_that_is_drawn_again_and_again_is_one_table() -> None:
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    with Live("top 0\nbottom 0", console=console, auto_refresh=False) as live:
        for number in range(1, 5):
            console.print(f"line {number}")
            live.update(f"top {number}\nbottom {number}\nmore", refresh=True)
    console.print("after")
    lines = [line.rstrip() for line in screen.end()]
    assert lines == ["line 1", "line 2", "line 3", "line 4", "top 4", "bottom 4", "more", "after"]
    assert ["top 2", "bottom 2", "more"] in screen.seen


def test_the_file_keeps_the_newest_lines_and_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    assert read_output(tmp_path) == []
    file = OutputFile(tmp_path, most_bytes=2000)
    for number in range(200):
        file.write(OutputLine(1000.5 + number, "host-worker-0", f"line {number}\x1b[0m \x07ü"))
    file.close()
    kept = read_output(tmp_path)
    assert [line.text for line in kept][-2:] == ["line 198 ü", "line 199 ü"] and len(kept) > 30
    assert kept[-1].time == 1199.5 and kept[-1].worker == "host-worker-0"
    assert sum((tmp_path / name).stat().st_size for name in (OUTPUT, OLDER)) < 5000
    with (tmp_path / OUTPUT).open("a") as torn:
        torn.write("2026-11-18T2")
    again = OutputFile(tmp_path)
    again.write(OutputLine(2000.0, "a b", "after a crash"))
    again.close()
    assert read_output(tmp_path, last=1)[0].text == "after a crash"

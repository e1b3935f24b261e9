"""SmallTerminal: makes whole lines of what a program prints, and shows what it still draws over, such as a tqdm bar.

It knows carriage returns, and the few sequences by which tqdm, rich and others go up to draw again. What is drawn over
is never a line. Knows nothing of files, threads or the clock.
"""

import re

MOST_ROWS = 60
"""Rows that a program may draw over. Those above are lines."""
MOST_HELD = 8
"""Rows above the cursor that wait for a moment, since nested bars of tqdm are drawn by going down and up again."""
MOST_LETTERS = 4000
"""The longest row: what follows begins another one."""
_PARTS = re.compile(
    r"\x1b\[(?P<numbers>[0-9;?]*)(?P<verb>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-Za-z]|\x1b[^\[\]()]"
    r"|(?P<text>[^\x00-\x08\x0a-\x1f\x7f]+)|(?P<control>[\x00-\x1f\x7f])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]{0,40}|\][^\x07\x1b]{0,400}\x1b?|[()])?$")


class SmallTerminal:
    def __init__(self) -> None:
        self._rows = [""]
        self._at = 0
        self._is_fresh = False
        """The next letter begins the row anew: a carriage return came."""
        self._style = ""
        """Colours for the next letters."""
        self._is_drawing = False
        """The cursor is hidden, as whoever draws several rows again and again has it."""
        self._went_up = False
        self._rest = ""
        self._lines: list[str] = []

    @property
    def drawn(self) -> list[str]:
        """The rows that may still change."""
        rows = list(self._rows if self._is_drawing else self._rows[self._at :])
        while rows and not rows[-1].strip():
            rows.pop()
        return rows

    @property
    def holds(self) -> bool:
        """Whether settle() would give a line."""
        return not self._is_drawing and self._at > 0

    def feed(self, text: str) -> list[str]:
        """Return the lines that are whole now. Some wait for settle()."""
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished else ""
        for part in _PARTS.finditer(text, 0, len(text) - len(self._rest)):
            if part["text"] is not None:
                self._write(part["text"])
            elif part["control"] is not None:
                self._obey(part["control"])
            elif part["verb"] is not None:
                self._move(part["verb"], part["numbers"])
        self._finish(self._at - MOST_HELD if not self._is_drawing else len(self._rows) - MOST_ROWS)
        return self._taken()

    def settle(self) -> list[str]:
        """Return the lines above the cursor: nothing was printed for a moment."""
        if not self._is_drawing:
            self._finish(self._at)
        return self._taken()

    def close(self) -> list[str]:
        """Return what is left: the program has ended."""
        while len(self._rows) > 1 and not self._rows[-1].strip():
            self._rows.pop()
        if self._rows != [""]:
            self._finish(len(self._rows))
        return self._taken()

    def _write(self, text: str) -> None:
        if self._went_up and self._is_drawing:  # to the first row that is drawn again: what is above it stays
            self._finish(self._at)
        self._went_up = False
        if self._is_fresh:
            self._rows[self._at], self._is_fresh = "", False
        self._rows[self._at] += self._style + text
        self._style = ""
        while len(self._rows[self._at]) > MOST_LETTERS:
            row = self._rows[self._at]
            self._rows[self._at : self._at + 1] = [row[:MOST_LETTERS], row[MOST_LETTERS:]]
            self._at += 1
            self._finish(self._at - MOST_HELD)

    def _obey(self, letter: str) -> None:
        if letter == "\n":
            self._go_down()
        elif letter == "\r":
            self._is_fresh = True
        elif letter == "\b":
            self._rows[self._at] = self._rows[self._at][:-1]

    def _go_down(self) -> None:
        if not self._is_fresh:
            self._rows[self._at] += self._style
        self._style = ""
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append("")
        self._is_fresh = True
        if not self._is_drawing:
            self._finish(self._at - MOST_HELD)

    def _move(self, verb: str, numbers: str) -> None:
        count = int(numbers) if numbers.isdecimal() else 1
        if verb == "m":
            self._style = (self._style + f"\x1b[{numbers}m")[-200:]
        elif verb == "A":
            self._at, self._went_up = max(0, self._at - count), True
        elif verb == "B":
            for _ in range(min(count, MOST_ROWS)):
                self._go_down()
        elif verb == "G" and count <= 1:
            self._is_fresh = True
        elif verb == "K" and (numbers == "2" or self._is_fresh):
            self._rows[self._at] = ""
        elif verb == "J" and numbers in ("", "0"):
            del self._rows[self._at + 1 :]
            if self._is_fresh:
                self._rows[self._at] = ""
        elif verb == "H" or (verb == "J" and numbers in ("2", "3")):  # the screen begins anew
            self._lines += self._closed_rows()
        elif numbers == "?25" and verb in "lh":
            self._is_drawing = verb == "l"

    def _closed_rows(self) -> list[str]:
        rows, self._rows, self._at = self._rows, [""], 0
        return [row for row in rows if row.strip()]

    def _finish(self, count: int) -> None:
        """The first rows are lines."""
        if count > 0:
            self._lines += self._rows[:count]
            self._rows = self._rows[count:] or [""]
            self._at = max(0, self._at - count)

    def _taken(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

"""Sentences for a person, and numbers in them: counts, bytes, durations; and numbers that are refused."""

import re
import shlex
import sys
from collections.abc import Sequence

_SECRET = re.compile(r"(?:^|[-_.])(?:token|secret|password|passwd|credentials?|key)$", re.IGNORECASE)
"""The end of an option's name, if what follows is a secret."""
_SECRET_VALUE = re.compile(r"potluck://|://[^/]*@")


def say(sentence: str) -> None:
    """Print a sentence on the terminal, beside whatever a program prints. A progress bar there gives way."""
    own = sys.__stderr__
    is_terminal = own is not None and sys.stderr is own and own.isatty()  # another stream draws bars by itself
    begin = "\r\x1b[K" if is_terminal else ""
    print(f"{begin}potluck: {sentence}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return what a library said, without its stack of advice; to end a sentence of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def printable(text: str) -> str:
    """Leave out what a terminal would obey."""
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")


def shown_arguments(arguments: Sequence[str]) -> str:
    """Write a script's arguments as one types them. What looks like a secret becomes three dots."""
    shown: list[str] = []
    hides_next = False
    for word in arguments:
        name, is_joined, _ = word.partition("=")
        is_option, names_secret = word.startswith("-"), _SECRET.search(name) is not None
        if is_joined and names_secret:
            shown.append(f"{name}=...")
        elif _SECRET_VALUE.search(word) or (hides_next and not is_option):
            shown.append("...")
        else:
            shown.append(shlex.quote(word))
        hides_next = is_option and names_secret and not is_joined
    return " ".join(shown)


def plural(number: int, noun: str) -> str:
    """plural(1, "worker") is "1 worker", plural(2000, "batch") "2,000 batches"."""
    hisses = noun.endswith(("ch", "sh", "s", "x")) and not noun.endswith("epoch")
    ending = "" if number == 1 else "es" if hisses else "s"
    return f"{number:,} {noun}{ending}"


def count(number: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def size(number: float) -> str:
    for limit, suffix in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.3g} {suffix}"
    return f"{number:.0f} bytes"


def percent(share: float) -> str:
    """percent(0.174) is "17 %"."""
    return f"{100 * share + 1e-9:.0f} %"  # 62.5 becomes 63, as on the page


def in_list(words: Sequence[str]) -> str:
    """in_list(["a", "b", "c"]) is "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def check_at_least(least: float, **values: float | None) -> None:
    """ValueError that names the first that is smaller. None is no number, and fits."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least:,}, not {value}")


def check_at_most(name: str, value: float | None, most: float, advice: str) -> None:
    """ValueError for a number beyond anything that can be meant, before it allocates or overflows something."""
    if value is not None and not value <= most:
        raise ValueError(f"{name} must be at most {most:,}, not {value:,}: {advice}")

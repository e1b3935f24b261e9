"""Words of a peer, made fit to be shown. Pure.

Names, reasons and sentences reach terminals, logs and pictures. There an escape sequence would move the cursor or hide
a line, a line break would forge one, and a direction mark would turn one around. So they are cleaned once, where a
message comes in; codecs stay exact.
"""

import unicodedata
from dataclasses import replace
from typing import Any

from potluck.wire.messages import MESSAGES, SENTENCE, TEXTS, Message

_SHOWN = {
    message: {name: letters.shown for name, letters in TEXTS[message].items() if letters.shown} for message in MESSAGES
}


def heard(message: Message) -> Message:
    """A message as it came, but for the words that people will see."""
    limits = _SHOWN[type(message)]
    if not limits:
        return message
    return replace(message, **{name: clean(getattr(message, name), most) for name, most in limits.items()})


def clean(text: str, most: int = SENTENCE) -> str:
    """Each character that is none to be seen becomes a question mark, and what is too long is cut."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return cut if cut.isascii() and cut.isprintable() else "".join(map(_visible, cut))


def clean_all(value: Any) -> Any:
    """Clean each text in a value from JSON or TOML."""
    match value:
        case str():
            return clean(value)
        case list() | tuple():
            return [clean_all(item) for item in value]
        case dict():
            return {clean_all(key): clean_all(item) for key, item in value.items()}
    return value


def _visible(letter: str) -> str:
    return "?" if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else letter

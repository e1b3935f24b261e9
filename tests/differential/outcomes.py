"""How a run ends that did not do what was asked: refused with a sentence, or failed."""

from typing import Any


class Refused(Exception):
    """A rank ended with a sentence of potluck's. Before the first step it is a refusal; later it is a fault, unless it
    is of what nobody can know before: how a loop cuts its last batch, or what it does to the model after a step."""

    def __init__(self, sentence: str, told: list[Any] | None = None) -> None:
        """`told`: what the ranks of each leg did until then, if they had begun."""
        super().__init__(sentence)
        self.told = told


class Failed(Exception):
    """Something that is neither right nor refused: kind is CRASH, HANG or LATE (refused after the first step)."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

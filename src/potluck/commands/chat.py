"""`potluck chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Chat:
    """Talk to what a run of potluck finetune has trained. Reads lines, and answers as it writes; /quit ends."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="A run's folder.")]
    temperature: Annotated[
        float, tyro.conf.arg(metavar="T", help="0: always what is likeliest; 1: as the model has it.")
    ] = 0.7
    length: Annotated[int, tyro.conf.arg(metavar="N", help="The most tokens of an answer.")] = 512

    def __call__(self) -> int:
        from potluck.finetune.chat import chat

        return chat(Path(self.run), temperature=self.temperature, length=self.length)

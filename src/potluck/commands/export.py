"""`potluck export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from potluck.errors import ConfigError


@dataclass
class Export:
    """Write a checkpoint's model as one plain safetensors file, whichever way the run had split it.

    Streams: it needs no more memory for a large model than for a small one. The built-in model is also written as a
    folder for Hugging Face's libraries (--hf) or as a file for llama.cpp (--gguf).
    """

    source: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|CHECKPOINT", help="A run folder, for its newest checkpoint; or one checkpoint."),
    ]
    out: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="OUT.safetensors", help="The file to write; one that is there is not overwritten."),
    ]
    ema: Annotated[bool, tyro.conf.arg(help="The average of the weights that fit.ema kept, in place of them.")] = False
    hf: Annotated[bool, tyro.conf.arg(help="A folder that from_pretrained() loads, as a llama. OUT is its name.")] = (
        False
    )
    gguf: Annotated[bool, tyro.conf.arg(help="A file for llama.cpp. OUT is its name.")] = False

    def __call__(self) -> int:
        from potluck.save.export import export

        source, out = Path(self.source), Path(self.out)
        if self.hf or self.gguf:
            from potluck.train.other_formats import export_gguf, export_hf

            if self.hf and self.gguf:
                raise ConfigError("--hf writes a folder and --gguf a file. Ask for one of them at a time.")
            return (export_hf if self.hf else export_gguf)(source, out, ema=self.ema)
        return export(source, out, ema=self.ema)

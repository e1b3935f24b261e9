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
    folder for Hugging Face's libraries (--hf), which llama.cpp's own script converts for it.
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
    gguf: Annotated[bool, tyro.conf.arg(help="Say how llama.cpp's own script makes its file of a --hf folder.")] = False

    def __call__(self) -> int:
        source, out = Path(self.source), Path(self.out)
        if self.gguf:
            raise ConfigError(
                "potluck export writes no GGUF file. Write a folder with --hf, and convert it with llama.cpp's own"
                " script: python convert_hf_to_gguf.py FOLDER --outfile FILE.gguf. The model/ folder of a run of"
                " potluck finetune is one already."
            )
        if self.hf:
            from potluck.train.other_formats import export_hf

            return export_hf(source, out, ema=self.ema)
        from potluck.save.export import export

        return export(source, out, ema=self.ema)

"""BatchNorm takes means over rows, of which a single one has none: which layer it is, and what a person hears of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from potluck.data.loader import Loader
from potluck.errors import ConfigError
from potluck.words import plural


def find_batch_norm(model: nn.Module) -> str | None:
    """The name and kind of a layer that cannot be trained by a single value of each channel; none: there is no such."""
    found = (each for each in model.named_modules() if isinstance(each[1], nn.modules.batchnorm._BatchNorm))
    return next((f"{name} ({type(module).__name__})" for name, module in found), None)


@contextmanager
def explain_single_rows() -> Iterator[None]:
    """Turns torch's error about a batch of one row into a sentence that says what to do."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise ConfigError(
            f"BatchNorm was to be trained by a single row, of which it can take no mean ({error}). Choose batches and"
            " micro-batches of at least two rows for each worker, and one size that does not leave a single row at the"
            " end of the data; or use LayerNorm or GroupNorm."
        ) from None


def warn_of_single_rows(layer: str, loader: Loader, pipelines: int, notice: Callable[[str], None]) -> None:
    """Warns, before the first step, of single rows that no plan can avoid."""
    size, micro = loader.batch.size, loader.batch.micro_size
    if micro == 1:
        where, advice = "micro-batches have 1 row", "make them larger"
    elif size < 2 * pipelines:
        where, advice = f"some of {plural(pipelines, 'worker')} have 1 row of a batch of {size}", "use more rows"
    elif loader.order.has_gaps:
        where, advice = "the sampler's batches have many sizes, so that a worker may have 1 row", "use larger ones"
    elif loader.rows % size == 1:
        where, advice = f"the last of {loader.rows:,} rows is a batch by itself", "leave it out, or change the size"
    else:
        return
    notice(
        f"{layer} takes means over the values of a channel, and {where}. Unless rows have several values of each"
        f" channel, as images have, the run stops there: {advice}."
    )

"""Makes the rows that a run is trained on and evaluated with: records, encoded and held."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from potluck.errors import ConfigError
from potluck.finetune.encoding import Encoder, give_template
from potluck.finetune.records import TextRecord, read_records
from potluck.finetune.settings import RowsConfig, Task
from potluck.finetune.token_rows import DocumentStore, TokenCollate, TokenRows
from potluck.words import plural

AT_ONCE = 1000
"""Records that the tokenizer gets in one call."""


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    training: TokenRows
    validation: TokenRows
    collate: TokenCollate
    answers_per_row: float
    labels: list[str] | None
    """Labels of rows that are classified."""
    sentences: list[str] = field(default_factory=list)
    """Notes about the rows for people."""


def prepare_rows(
    config: RowsConfig,
    tokenizer: Any,
    context: int,
    task: Task,
    known_labels: list[str] | None = None,
    tell: Callable[[int], None] = lambda rows: None,
) -> PreparedRows:
    """`known_labels`: of a base that classifies already. `tell`: how many rows were read so far."""
    records = read_records(config)
    first = next(records)
    form = first.form
    if task == "classify" and form != "label":
        raise ConfigError(f'{first.where} has no label, and the task is to classify. Expected is {{"text", "label"}}.')
    if task == "write" and form == "label":
        form = "text"
    sentences = [sentence] if (sentence := give_template(tokenizer, form)) else []
    encoder = Encoder(tokenizer, form)
    stores = _Stores(config, context, splits=encoder.form == "text")
    records = chain([first], records)
    while chunk := list(islice(records, AT_ONCE)):
        encoded = encoder.encode([replace(record, form=form) for record in chunk])
        for record, row in zip(chunk, encoded, strict=True):
            stores.take(record, row)
        tell(stores.count)
    stores.flush()
    labels = stores.label_names(known_labels) if form == "label" else None
    sentences += _told(stores, context, encoder, config.validation)
    if not len(stores.training):
        raise ConfigError(
            f"Nothing is left to train on: of {plural(stores.count, 'row')}, none has an answer within {context:,}"
            f" tokens. Set a larger model.context, or give other rows."
        )
    packing = config.packing and form != "label"
    training = stores.training.rows(packing=packing)
    return PreparedRows(
        training=training,
        validation=stores.validation.rows(packing=packing),
        collate=TokenCollate(tokenizer.pad_token_id, packing=packing, classifies=form == "label"),
        answers_per_row=stores.training.answers_count / len(training) if labels is None else 1.0,
        labels=labels,
        sentences=sentences,
    )


def is_held_out(number: int, share: float) -> bool:
    """Whether a row is looked at, and not trained on: they are spread over all rows, which may be in an order."""
    return int((number + 1) * share) > int(number * share)


class _Stores:
    """Rows for training and rows to look at."""

    def __init__(self, config: RowsConfig, context: int, *, splits: bool) -> None:
        self.training, self.validation = (DocumentStore(context, splits=splits) for _ in range(2))
        self.count = 0
        self._share = config.validation
        self._labels: dict[str | int, int] = {}
        self._waiting: list[tuple[Any, int]] = []
        """Rows to look at by our own choice, unless the data turn out to have a split for it."""

    def take(self, record: TextRecord, row: Any) -> None:
        label = -1 if row.label is None else self._labels.setdefault(row.label, len(self._labels))
        if record.is_held_out:
            for waiting in self._waiting:
                self.training.take(*waiting)
            self._waiting, self._share = [], 0.0
            self.validation.take(row, label)
            return
        before, self.count = self.count, self.count + 1
        if is_held_out(before, self._share):
            self._waiting.append((row, label))
        else:
            self.training.take(row, label)

    def flush(self) -> None:
        for waiting in self._waiting:
            self.validation.take(*waiting)
        self._waiting = []

    def label_names(self, known: list[str] | None) -> list[str]:
        order = names_of(self._labels, known)
        places = {number: order.index(str(name)) for name, number in self._labels.items()}
        for store in (self.training, self.validation):
            store.relabel(places)
        return order


def names_of(labels: Iterable[str | int], known: list[str] | None) -> list[str]:
    """Name the labels in an order that does not depend on that of the rows; in that of the base, if it knows them
    all."""
    unique = set(labels)
    numbers = [label for label in unique if isinstance(label, int)]
    if known is not None and set(map(str, unique)) <= set(known):
        return known
    order = sorted(set(map(str, unique)))  # 1 and "1" are one
    if len(numbers) == len(unique) and min(numbers) >= 0:
        if max(numbers) >= 1 << 16:
            raise ConfigError(f"A label of {max(numbers):,} is no class: number them from 0.")
        order = [str(number) for number in range(max(numbers) + 1)]
    if len(order) < 2:
        raise ConfigError(f"All rows have the label {order[0]}. To classify takes two at least.")
    return order


def _told(stores: _Stores, context: int, encoder: Encoder, share: float) -> list[str]:
    """Say what happened to rows, if anything did."""
    sentences = []
    cut = stores.training.cut + stores.validation.cut
    dropped = stores.training.dropped + stores.validation.dropped
    if cut:
        sentences.append(
            f"Cut off at {context:,} tokens: {plural(cut, 'row')} of {stores.count:,}. A larger model.context keeps"
            " more of them."
        )
    if dropped:
        sentences.append(
            f"Left out: {plural(dropped, 'row')} of {stores.count:,}, where no token of the answer lies within"
            f" {context:,} tokens. A larger model.context keeps them."
        )
    if share and not len(stores.validation):
        sentences.append(
            f"{plural(stores.count, 'row')} are too few to keep {share:.0%} of them, so no validation loss is taken."
            " Set a larger data.validation, such as 0.2, to have one."
        )
    if encoder.unseen:
        sentences.append(
            f"{plural(encoder.unseen, 'answer')} within chats are not learnt: the model's chat template writes them"
            " otherwise once more follows. The last one of each chat is."
        )
    return sentences

"""Records to tokens, by the model's own tokenizer and chat template, with what of them is the answer."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.finetune.base_files import shown
from potluck.finetune.libraries import SAFELY, refusing, transformers
from potluck.finetune.messages import is_answer, messages_of, name_of, tools_of
from potluck.finetune.records import Form, TextRecord
from potluck.finetune.rendering import template_process

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template for a tokenizer that has no chat template; it is saved with the result."""

Tools = list[dict[str, Any]] | None

DAY = datetime.datetime(2025, 1, 1)
"""Date for templates that write today's: rows must be the same on every worker, and when a run resumes."""
DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('%{code}', '{DAY.strftime(f'%{code}')}')" for code in "dmYyBbAaHMSIpj")
    + " }}{%- endmacro %}"
)
"""Text before a template, in place of the function of that name."""


MOST_OF_PROMPT = 200
"""Letters of a text from which a sample's prompt is taken."""


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: list[int]
    answers: list[bool]
    """Whether each of them is learnt."""
    label: str | int | None = None


def load_tokenizer(folder: Path) -> Any:
    """The model's own; one that has no token for padding pads with the one that ends a text."""
    with refusing(f"{folder} has no tokenizer that can be read"), shown(folder) as place:
        tokenizer = transformers().AutoTokenizer.from_pretrained(str(place), **SAFELY)
    tokenizer.name_or_path = str(folder)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The tokenizer in {folder} is a slow one, which cannot say where its tokens lie in the text. Save a fast"
            " one there: its file is tokenizer.json."
        )
    if tokenizer.pad_token is None:
        # Padding is never looked at, and never learnt: any token serves.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    return tokenizer


def give_template(tokenizer: Any, form: Form) -> str:
    """Chats need a template: a sentence, where the tokenizer has none and gets a plain one."""
    if form != "chat" or tokenizer.chat_template:
        return ""
    tokenizer.chat_template = PLAIN_TEMPLATE
    return (
        "This model's tokenizer has no chat template, so a plain one is used, and saved with the result:"
        " User: ..., Assistant: ..."
    )


class Encoder:
    """Encodes records of one form."""

    def __init__(self, tokenizer: Any, form: Form) -> None:
        self.tokenizer = tokenizer
        # Who has a template is spoken to in it, also with prompts: that is how the model was taught to answer.
        self.form: Form = "chat" if form == "prompt" and tokenizer.chat_template else form
        self.unseen = 0
        """Answers that are not learnt: the template writes them otherwise once more follows."""
        self._takes_null: bool | None = None
        """Whether the template may be given a message without content; None: none was seen yet."""
        self._special = tuple(token for token in tokenizer.all_special_tokens if token)

    def encode(self, records: Sequence[TextRecord]) -> Iterator[Encoded]:
        """Encode in one call of the tokenizer, which works on all cores."""
        planned = [self._plan(record) for record in records]
        encoded = self.tokenizer(
            [text for text, _ in planned],
            add_special_tokens=self.form != "chat",  # a template has its own
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        rows = zip(records, planned, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for record, (_, spans), tokens, offsets in rows:
            if self.form == "label":
                yield Encoded(tokens, [False] * len(tokens), record.fields["label"])
                continue
            answers = _within(offsets, spans) if spans is not None else [True] * len(tokens)
            end = self.tokenizer.eos_token_id
            if self.form != "chat" and end is not None and tokens[-1:] != [end]:
                tokens, answers = [*tokens, end], [*answers, True]
            yield Encoded(tokens, answers)

    def _plan(self, record: TextRecord) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and where in it the answers are; None: all of it is learnt."""
        fields = record.fields
        if self.form in ("text", "label"):
            return fields["text"], None
        if self.form == "prompt":
            text = fields["prompt"] + fields["completion"]
            return text, [(len(fields["prompt"]), len(text))]
        with refusing(f"{record.where}: the model's chat template refuses it"):
            return self._plan_chat(record)

    def _plan_chat(self, record: TextRecord) -> tuple[str, list[tuple[int, int]]]:
        messages, tools = self._messages(record)
        text = self.written(messages, tools)
        _check_calls(messages, text, record.where)
        spans = []
        for index, message in enumerate(messages):
            if not is_answer(message):
                continue
            before = self.written(messages[:index], tools, asks=True)
            upto = self.written(messages[: index + 1], tools)
            if not text.startswith(before) or (bare := self._without_end(upto)) != text[: len(bare)]:
                self.unseen += 1
            elif len(before) < len(bare):
                spans.append((len(before), len(bare)))
        return text, spans

    def _messages(self, record: TextRecord) -> tuple[list[dict[str, Any]], Tools]:
        """And the tools that can be called in them. An answer that is a call alone has no content: null for templates
        that look for it, as most do, and an empty text for those that would write None in its place."""
        fields = record.fields
        if record.form != "chat":
            asked, answer = fields["prompt"], fields["completion"]
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], None
        messages, tools = messages_of(fields), tools_of(fields)
        if all(message["content"] is not None for message in messages):
            return messages, tools
        plain = [message | {"content": message["content"] or ""} for message in messages]
        if self._takes_null is None:
            self._takes_null = self._does_take_null(messages, plain, tools)
        return messages if self._takes_null else plain, tools

    def _does_take_null(self, messages: list[dict[str, Any]], plain: list[dict[str, Any]], tools: Tools) -> bool:
        try:
            return self.written(messages, tools).count("None") <= self.written(plain, tools).count("None")
        except Exception:  # it adds texts to it
            return False

    def written(self, messages: list[dict[str, Any]], tools: Tools = None, *, asks: bool = False) -> str:
        """Write messages as the model reads them. `asks`: up to where it is to answer."""
        if not messages and not asks:
            return ""
        template = self.tokenizer.get_chat_template(tools=tools)
        if "strftime_now" in template:
            template = DATE + template
        return template_process().render(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=asks,
            **{**self.tokenizer.special_tokens_map, "date_string": DAY.strftime("%d %b %Y")},
        )

    def _without_end(self, text: str) -> str:
        """A template's line break after the token that ends an answer is not a part of it."""
        bare = text.rstrip()
        return bare if bare.endswith(self._special) else text

    def prompt_of(self, record: TextRecord) -> tuple[str, str]:
        """Return the prompt of a sample: in words for people, and as the model reads it."""
        fields = record.fields
        if self.form == "chat":
            messages, tools = self._messages(record)
            at = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            asked = messages[:at]
            return (asked[-1]["content"] or "") if asked else "", self.written(asked, tools, asks=True)
        if self.form == "prompt":
            return fields["prompt"], fields["prompt"]
        words = fields["text"][:MOST_OF_PROMPT].split(" ")
        start = " ".join(words[: max(1, min(8, len(words) // 2))])
        return start, start


def _check_calls(messages: list[dict[str, Any]], text: str, where: str) -> None:
    """Many templates leave calls out without a word, and what is left of the answer would be learnt."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if name_of(call) not in text:
                raise ConfigError(
                    f"{where} has a call of the tool {name_of(call)}, and the model's chat template does not write"
                    " calls. Take a model whose template does, or write the call into the content of its message."
                )


def _within(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Tell which tokens have letters of one of the spans, in their order: also one that begins before it."""
    is_within, at = [], 0
    for start, end in offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        is_within.append(end > start and at < len(spans) and end > spans[at][0])
    return is_within

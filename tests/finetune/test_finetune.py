"""potluck finetune on one worker: judged by a plain loop, what it writes loads elsewhere, and it can be talked to."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from potluck.errors import ConfigError
from tests.finetune.made import (
    PLAIN_ROWS,
    assert_judged,
    chats,
    judge,
    logits_of,
    make_base,
    make_place,
    make_tokenizer,
    tuned,
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of an adapter on chats."""
    place = make_place(tmp_path_factory.mktemp("tuned"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return place, tuned(str(place), ("batch.micro_size=3",))


def test_an_adapter_on_chats_learns_as_in_a_plain_loop(done: tuple[Path, dict[str, Any]]) -> None:
    """All answers of a chat, and nothing else, in micro-batches of any size; what is written has the same logits."""
    place, found = done
    judged = judge(place)
    assert_judged(found, judged)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        shown = logits_of(place, found["folder"])
    torch.testing.assert_close(shown, judged["logits"], rtol=1e-4, atol=1e-5)


def test_it_ends_with_a_sample_and_answers_over_a_pipe(
    done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from potluck.finetune.chat import chat
    from potluck.finetune.ending import show_hosted

    place, found = done
    monkeypatch.chdir(place)
    show_hosted(Path(found["folder"]))
    said = capsys.readouterr().out
    assert "asked:  what is" in said and "before:" in said and "after:" in said
    assert f"potluck chat {found['folder']}" in said and "adapter" in said
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("what is one and two?\n\nsure?\n/new\nwhat is one and two?\n/quit\nx\n")
    )
    assert chat(Path(found["folder"]), temperature=0.0, length=8) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0] == lines[2]  # the same question, asked anew


@pytest.mark.parametrize("lora", [True, False])
def test_a_result_that_classifies_says_so_and_names_labels_in_a_chat(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from potluck.finetune.chat import chat
    from potluck.finetune.result import classifies, config_of, write_result

    place = make_place(tmp_path, kind="bert", lora=lora)
    monkeypatch.chdir(place)
    run = Path(tuned(str(place))["folder"])
    assert classifies(write_result(run, config_of(run)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("it is one two\n"))
    assert chat(run, temperature=0.0, length=8) == 0
    assert re.fullmatch(r"(odd|even) \(\d+%\)\n", capsys.readouterr().out)


def test_a_sample_before_is_of_the_base_also_where_rows_with_labels_are_learnt_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from potluck.finetune import ending
    from potluck.finetune.records import TextRecord

    record = TextRecord("here", "label", {"text": "one and two", "label": 1})
    monkeypatch.setattr(ending, "_asked", lambda config: (record, "A row"))
    monkeypatch.setattr(ending, "_before", lambda config, record, device: "of the base")
    monkeypatch.setattr(ending, "load_result", lambda run, config, device: (None, None))
    monkeypatch.setattr(ending, "_sample", lambda model, tokenizer, record: ("one", "of the run"))
    out = io.StringIO()
    config: Any = SimpleNamespace(lora=None)
    ending._show_sample(Console(file=out), tmp_path, config, classifies=False)
    assert "before: of the base" in out.getvalue() and "after:  of the run" in out.getvalue()


def test_a_base_is_found_in_a_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: tuple[Path, dict[str, Any]]
) -> None:
    from huggingface_hub import constants

    from potluck.finetune.base_files import cached, find_base

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"some/base is no folder here, is not in the cache.*hf download some/base"):
        find_base("some/base")
    repository, commit = tmp_path / "models--some--base", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(done[0] / "base")
    assert find_base("some/base") == repository / "snapshots" / commit == cached("some/base")
    with pytest.raises(ConfigError, match="There is no folder"):
        find_base("/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_base(str(tmp_path / "empty"))


def prepared(
    rows: list[dict[str, Any]], folder: Path, *, context: int = 128, tokenizer: Any = None, **options: Any
) -> Any:
    from potluck.finetune.rows import prepare_rows
    from potluck.finetune.settings import RowsConfig

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = options.pop("task", "auto")
    config = RowsConfig(paths=(str(folder / "rows.jsonl"),), **{"validation": 0.0} | options)
    return prepare_rows(config, tokenizer or padded_tokenizer(), context, task)


def padded_tokenizer(**options: Any) -> Any:
    tokenizer = make_tokenizer(**options)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def test_a_tokenizer_without_a_pad_token_gets_one_that_is_never_learnt(tmp_path: Path) -> None:
    from potluck.finetune.encoding import load_tokenizer
    from potluck.finetune.recipe import answer_loss

    for number, (options, expected) in enumerate([({}, "</s>"), ({"pad": "<pad>"}, "<pad>"), ({"ends": False}, "<s>")]):
        ends = options.pop("ends", True)
        own = make_tokenizer(**options)
        own.eos_token = own.eos_token if ends else None
        own.save_pretrained(tmp_path / str(number))
        assert load_tokenizer(tmp_path / str(number)).pad_token == expected
    make_base(tmp_path / "base")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    found = prepared(chats(4), tmp_path, tokenizer=load_tokenizer(tmp_path / "0"))
    together = found.collate([found.training[0], found.training[1]])
    assert len(found.training[0].tokens) != len(found.training[1].tokens), "one is padded"
    each = [answer_loss(model, found.collate([found.training[row]])) for row in (0, 1)]
    mean = sum(loss * count for loss, count in each) / sum(count for _, count in each)
    torch.testing.assert_close(answer_loss(model, together)[0], mean)


def learnt(rows: Any, tokenizer: Any, row: int = 0) -> str:
    batch = rows.collate([rows.training[row]])
    return tokenizer.decode(batch["targets"])


def test_answers_alone_are_learnt(tmp_path: Path) -> None:
    tokenizer = padded_tokenizer()
    assert learnt(prepared(chats(1), tmp_path), tokenizer) == "zero</s>yes, zero</s>"
    prompt = [{"prompt": "one and two is", "completion": " three"}]
    assert learnt(prepared(prompt, tmp_path), tokenizer) == " three</s>"  # by the template, as a chat
    bare = padded_tokenizer(template=None)
    assert learnt(prepared(prompt, tmp_path, tokenizer=bare), bare) == " three</s>"
    found = prepared([{"text": "one and two"}], tmp_path, tokenizer=bare)
    assert learnt(found, bare) == "one and two</s>"[len(bare.decode(found.training[0].tokens[:1])) :]
    found = prepared(chats(1), tmp_path, tokenizer=bare)
    assert "no chat template, so a plain one is used" in found.sentences[0]
    assert learnt(found, bare) == " zero</s> yes, zero</s>"


CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
TOOL_TEMPLATES = {
    "as most": "{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}" + CALLS + "{% endif %}",
    "asks for null": "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "writes None": "{{ m.content }}{% if m.tool_calls %}" + CALLS + "{% endif %}",
    "adds to it": "{{ m.content + '' }}{% if m.tool_calls %}" + CALLS + "{% endif %}",
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_of_tools_are_learnt_through_the_template(name: str, tmp_path: Path) -> None:
    """Their messages have no content; the template decides how they and the tools are written."""
    start = "{% if tools %}tools: {{ tools[0].function.name }}\n{% endif %}"
    around = ("{% for m in messages %}<|{{ m.role }}|>", "{{ eos_token }}\n{% endfor %}")
    asks = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer = padded_tokenizer(template=start + around[0] + TOOL_TEMPLATES[name] + around[1] + asks)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    written = call | {"function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    for calls in (call, written):
        messages = [
            {"role": "user", "content": "one and two?"},
            {"role": "assistant", "content": None, "tool_calls": [calls]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": "three", "tool_calls": None},
        ]
        for tools in ([tool], json.dumps([tool])):
            found = prepared([{"messages": messages, "tools": tools}], tmp_path, tokenizer=tokenizer)
            assert learnt(found, tokenizer) == '<call>add {"a": 1}</s>three</s>'
            text = tokenizer.decode(found.training[0].tokens)
            assert text.startswith("tools: add\n<|user|>one and two?</s>") and "None" not in text
    with pytest.raises(ConfigError, match="a call of the tool add, and the model's chat template does not write"):
        prepared([{"messages": messages}], tmp_path)


def test_a_template_that_writes_the_date_gives_the_same_rows_every_day() -> None:
    from potluck.finetune.encoding import Encoder

    dated = (
        "{{ strftime_now('%Y') }} {% if date_string is defined %}{{ date_string }}{% endif %}{{ messages[0].content }}"
    )
    written = Encoder(padded_tokenizer(template=dated), "chat").written([{"role": "user", "content": "!"}])
    assert written == "2025 01 Jan 2025!"


def test_long_rows_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "one " * n, "completion": " two" * 20} for n in (1, 5, 60)]
    found = prepared(rows, tmp_path, context=24)
    assert len(found.training) == 2 and max(len(row.tokens) for row in found.training) == 24
    assert "Cut off at 24 tokens: 2 rows of 3." in found.sentences[0]
    assert "Left out: 1 row of 3, where no token of the answer lies within 24 tokens" in found.sentences[1]
    with pytest.raises(ConfigError, match="Nothing is left to train on: of 1 row, none"):
        prepared(rows[2:], tmp_path, context=24)
    text = prepared([{"text": "one two " * 50}], tmp_path, context=24, tokenizer=padded_tokenizer(template=None))
    assert not text.sentences and sum(len(row.tokens) for row in text.training) > 90  # all of it, in several rows


def test_rows_are_held_out_evenly_and_packed_rows_hold_them_all(tmp_path: Path) -> None:
    found = prepared(chats(40), tmp_path, validation=0.1)
    assert len(found.training) == 36 and len(found.validation) == 4
    packed = prepared(chats(40), tmp_path, context=100, packing=True)
    assert len(packed.training) < 20
    apart, together = prepared(chats(40), tmp_path), packed.collate([packed.training[i] for i in range(3)])
    total = sum(int(row.answers.sum()) for row in apart.training)
    assert total == sum(int(row.answers.sum()) for row in packed.training)
    assert (together["position_ids"] == 0).sum() >= 3 * 2
    assert packed.training.potluck_fingerprint() != apart.training.potluck_fingerprint()


def test_labels_are_numbered_and_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}, {"text": "c", "label": "yes"}]
    found = prepared(rows, tmp_path)
    assert found.labels == ["no", "yes"] and [found.training[i].label for i in range(3)] == [1, 0, 1]
    assert set(found.collate([found.training[0]])) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(ConfigError, match="All rows have the label yes"):
        prepared(rows[:1], tmp_path)
    with pytest.raises(ConfigError, match="has no label, and the task is to classify"):
        prepared(chats(1), tmp_path, task="classify")
    assert prepared(rows, tmp_path, task="write").labels is None


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """For llama and for GPT-2; it is tried at the start of every such run."""
    import transformers

    from potluck.finetune.recipe import answer_loss, packed_pair, packs_apart
    from potluck.finetune.token_rows import TokenCollate, TokenRow

    for kind in ("llama", "gpt2"):
        make_base(tmp_path / kind, kind)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        found = prepared(chats(6), tmp_path, packing=True)
        row = found.training[0]
        assert len(row.lengths) > 1
        documents = zip(row.tokens.split(row.lengths), row.answers.split(row.lengths), row.lengths, strict=True)
        plain = TokenCollate(found.collate.pad)
        each = [answer_loss(model, plain([TokenRow(tokens, ours, (n,))])) for tokens, ours, n in documents]
        mean = sum(float(loss) * count for loss, count in each) / sum(count for _, count in each)
        packed = found.collate([row])
        assert float(answer_loss(model, packed)[0]) == pytest.approx(mean, rel=1e-6)
        del packed["position_ids"]
        assert float(answer_loss(model, packed)[0]) != pytest.approx(mean, rel=1e-6)
        pair, first = packed_pair(row)
        assert pair["input_ids"].numel() <= 32 and packs_apart(model, pair, first, tolerance=1e-6)
        del pair["position_ids"]
        assert not packs_apart(model, pair, first, tolerance=1e-6)


def test_a_mistake_in_a_recipe_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_place(tmp_path)
    monkeypatch.chdir(place)
    for setting, said in {
        'lora.targets=["nothing"]': r"\[lora\].*nothing.*Layers here are: .*q_proj",
        "model.context=1000": "takes 128 tokens at the most",
        "model.load=5bit": "model.load must be one of 'plain', '4bit', 'int8'",
        "lora.rank=0": "rank must be at least 1",
        'model.hf=""': "hf names the model to fine-tune",
    }.items():
        with pytest.raises(ConfigError, match=said):
            tuned(str(place), (setting,))
    (place / "rows.jsonl").write_text(PLAIN_ROWS)
    with pytest.raises(ConfigError, match=r"Line 2 of rows\.jsonl is not valid JSON"):
        tuned(str(place))


def test_no_room_is_said_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: tuple[Path, dict[str, Any]]
) -> None:
    from potluck.finetune import recipe, result

    place, found = done
    monkeypatch.chdir(place)
    run = Path(found["folder"])
    (run / "adapter" / "checkpoint").unlink(missing_ok=True)
    monkeypatch.setattr(result, "_save", lambda *told: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"Cannot write .*adapter: No space left on device\. The run is in .*step-"):
        result.write_result(run, result.config_of(run))
    monkeypatch.setattr(recipe, "memory_here", lambda *told: (2, 1000, "this machine"))
    with pytest.raises(
        ConfigError, match=r"base needs .* kB of memory to be fine-tuned here, and this machine has 1 kB"
    ):
        tuned(str(place), ('name="other"',))


def test_rows_that_are_too_few_to_hold_some_out_are_said(tmp_path: Path) -> None:
    rows = [{"text": "one and two"}] * 9
    found = prepared(rows, tmp_path, validation=0.05)
    assert not len(found.validation) and "no validation loss" in " ".join(found.sentences)
    assert not prepared(rows, tmp_path, validation=0.0).sentences

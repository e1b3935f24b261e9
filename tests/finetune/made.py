"""Models from configs, tokenizers and rows, all made here: nothing is downloaded. And a judge in plain PyTorch."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.data.rows import mix

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RECIPE = """
name = "tuned"
[model]
hf = "base"
[data]
paths = ["rows.jsonl"]
validation = 0.2
[batch]
size = 8
[optimizer]
lr = 1e-2
weight_decay = 0.0
[policy]
kind = "sync"
balance = false
[fit]
progress = false
epochs = 2
[workers]
count = 1
threads = 1
"""
PLAIN_ROWS = '{"text": "a"}\n{"text": \n'
LORA = "[lora]\nrank = 4\nalpha = 8\n"


def make_tokenizer(*, template: str | None = TEMPLATE, pad: str | None = None, encoder: bool = False) -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", *([pad] if pad else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "what is one and two? three"] * 4, trainer)
    if encoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    found.chat_template = template
    return found


def make_base(folder: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Saved as a folder. Returns its tokenizer."""
    import transformers as t

    t.logging.disable_progress_bar()
    is_encoder = kind == "bert"
    tokenizer = make_tokenizer(encoder=is_encoder, **options)
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    match kind:
        case "llama":
            config = t.LlamaConfig(
                **sizes,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
            )
            model: Any = t.LlamaForCausalLM(config)
        case "gpt2":
            none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = t.GPT2LMHeadModel(t.GPT2Config(**sizes, n_positions=128, n_embd=32, n_layer=2, n_head=2, **none))
        case _:
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            model = t.BertForMaskedLM(
                t.BertConfig(
                    **sizes,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    max_position_embeddings=128,
                    **none,
                )
            )
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def chats(count: int = 30) -> list[dict[str, Any]]:
    """Of one turn or two, of many lengths."""
    rows = []
    for number in range(count):
        a, b = number % 7, number // 7 % 6
        messages = [
            {"role": "user", "content": f"what is {WORDS[a]} and {WORDS[b]}?"},
            {"role": "assistant", "content": WORDS[a + b]},
        ]
        if number % 3 == 0:
            messages += [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": f"yes, {WORDS[a + b]}"}]
        rows.append({"messages": messages})
    return rows


def labelled(count: int = 30) -> list[dict[str, Any]]:
    return [
        {"text": f"it is {WORDS[n % 11]} {WORDS[n % 5]}" + " so" * (n % 4), "label": "odd" if n % 2 else "even"}
        for n in range(count)
    ]


def make_place(
    folder: Path, kind: str = "llama", *, rows: list[dict[str, Any]] | None = None, lora: bool = True, **options: Any
) -> Path:
    """A folder with a base, rows and a recipe."""
    make_base(folder / "base", kind, **options)
    rows = rows if rows is not None else labelled() if kind == "bert" else chats()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tuned.toml").write_text(RECIPE + (LORA if lora else ""))
    return folder


# The judge: peft and transformers in a loop of one process, which shares no code with what it judges.


def judged_rows(place: Path, tokenizer: Any) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """Tokens and labels of every row; and which are trained on."""
    found = []
    lines = (place / "rows.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        if "label" in row:
            found.append((tokenizer(row["text"])["input_ids"], [int(row["label"] == "odd")]))
            continue
        tokens: list[int] = []
        labels: list[int] = []
        for message in row["messages"]:  # each part of the template is whole tokens
            head = tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")
            body = [*tokenizer(message["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            end = tokenizer("\n", add_special_tokens=False)["input_ids"]
            tokens += [head, *body, *end]
            is_answer = message["role"] == "assistant"
            labels += [-100, *(body if is_answer else [-100] * len(body)), *[-100] * len(end)]
        found.append((tokens, labels))
    held_out = {number for number in range(len(lines)) if int((number + 1) * 0.2) > int(number * 0.2)}
    return found, [number for number in range(len(lines)) if number not in held_out]


def judge(place: Path, *, lora: bool = True, epochs: int = 2, load: Any = None) -> dict[str, Any]:
    """The losses of each step, and the logits of the first row at the end."""
    import peft
    import transformers as t

    tokenizer = t.AutoTokenizer.from_pretrained(place / "base")
    rows, trained = judged_rows(place, tokenizer)
    is_labelled = len(rows[0][1]) == 1
    torch.manual_seed(0)
    kind = t.AutoModelForSequenceClassification if is_labelled else t.AutoModelForCausalLM
    options: dict[str, Any] = {"num_labels": 2} if is_labelled else {}
    model = kind.from_pretrained(place / "base", **options, **(load or {"dtype": torch.float32}))
    if lora:
        told: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
        if is_labelled:  # what the base has no weights for is trained whole
            told["modules_to_save"] = ["bert.pooler.dense", "classifier"]
        task = "SEQ_CLS" if is_labelled else "CAUSAL_LM"
        model = peft.get_peft_model(model, peft.LoraConfig(**told, task_type=task))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95)
    )
    model.train()
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(mix(0, epoch)))
        for part in order.split(8):
            loss = model(**padded([rows[trained[i]] for i in part.tolist()], is_labelled)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([rows[0][0]])).logits
    return {"losses": losses, "logits": logits}


def padded(rows: list[tuple[list[int], list[int]]], is_labelled: bool) -> dict[str, Tensor]:
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([each + [1] * (width - len(each)) for each, _ in rows])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each, _ in rows])
    if is_labelled:
        labels = torch.tensor([label[0] for _, label in rows])
    else:
        labels = torch.tensor([each + [-100] * (width - len(each)) for _, each in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


# Ours


def tuned(place: str, settings: tuple[str, ...] = (), *, recipe: str = "tuned.toml") -> dict[str, Any]:
    """One worker's run of the recipe, as `potluck train` has it: the losses of its steps."""
    import potluck
    from potluck.finetune.recipe import FinetuneConfig, train_finetune
    from potluck.launch.recipes import config_of_kind
    from potluck.train.arguments import TrainArgs, recipe_table

    os.chdir(place)
    config = config_of_kind(recipe_table(recipe, settings))
    assert isinstance(config, FinetuneConfig)
    losses: list[float] = []

    def hear(event: Any) -> None:
        if type(event).__name__ == "StepDone":
            losses.append(event.loss)

    options: dict[str, Any] = {"stages": config.stages, "step": config.step, "wire": config.wire}
    with potluck.init(config.policy, config.strategy, **options, patience_s=60) as engine:
        engine.events.listeners.append(hear)
        summary = train_finetune(config, TrainArgs(recipe=recipe), engine)
    return {"losses": losses, "validation": summary.validation_loss, "folder": str(summary.folder)}


def assert_judged(found: dict[str, Any], judged: dict[str, Any], tolerance: float = 2e-6) -> None:
    assert len(found["losses"]) == len(judged["losses"])
    assert found["losses"] == pytest.approx(judged["losses"], rel=tolerance)


def logits_of(place: Path, folder: str, *, lora: bool = True) -> torch.Tensor:
    """Of the first row, by what the run has written, loaded as anybody would."""
    import peft
    import transformers as t

    from potluck.finetune.result import config_of, write_result

    os.chdir(place)
    result = write_result(Path(folder), config_of(Path(folder)))
    tokenizer = t.AutoTokenizer.from_pretrained(result)
    rows, _ = judged_rows(place, tokenizer)
    kind = t.AutoModelForSequenceClassification if len(rows[0][1]) == 1 else t.AutoModelForCausalLM
    if lora:
        options = {"num_labels": 2} if len(rows[0][1]) == 1 else {}
        base = kind.from_pretrained(place / "base", dtype=torch.float32, **options)
        model = peft.PeftModel.from_pretrained(base, result)
    else:
        model = kind.from_pretrained(result)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([rows[0][0]])).logits

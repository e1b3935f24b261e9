"""hf_plain.py on many devices, of any speeds, that come and go.

python examples/port/hf_with_potluck.py
potluck run -n 2 examples/port/hf_with_potluck.py
potluck host -n 2 examples/port/hf_with_potluck.py
"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import potluck


class MyTrainer(potluck.hf.Elastic, Trainer): ...


class Counting(Dataset):
    """Rows that count upwards, each from another number and with another step; some labels are masked."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.first = torch.randint(0, 64, (rows,), generator=draw)
        self.masked = torch.randint(0, 12, (rows,), generator=draw)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (self.first[row] + (1 + row % 3) * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(16) < self.masked[row], -100)}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        "hf-run",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MyTrainer(
        LlamaForCausalLM(config), args, train_dataset=Counting(200, seed=1), eval_dataset=Counting(50, seed=2)
    )
    trainer.train()
    trainer.save_model("hf-model")


if __name__ == "__main__":
    main()

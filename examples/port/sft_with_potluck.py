"""sft_plain.py on many devices, of any speeds, that come and go.

python examples/port/sft_with_potluck.py
potluck run -n 2 examples/port/sft_with_potluck.py
potluck host -n 2 examples/port/sft_with_potluck.py
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import potluck


class MyTrainer(potluck.hf.Elastic, SFTTrainer): ...


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "?", "+", "=", *map(str, range(20))]
    own = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    own.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="?")


def main() -> None:
    torch.manual_seed(0)
    sums = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(10) for b in range(10)]
    config = LlamaConfig(
        vocab_size=25, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    args = SFTConfig(
        "sft-run",
        per_device_train_batch_size=10,
        num_train_epochs=4,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MyTrainer(
        LlamaForCausalLM(config), args, train_dataset=Dataset.from_list(sums), processing_class=make_tokenizer()
    )
    trainer.train()
    trainer.save_model("sft-model")


if __name__ == "__main__":
    main()

"""An adapter over a frozen base in any form, trained by plain PyTorch and by a fleet. The same for a peft model."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, BATCH, EPOCHS, WIDTH = 24, 8, 2, 32
BASES = ("fp32", "bf16", "4bit", "int8")


class Adapted(nn.Module):
    """As peft has it: a frozen layer, and a low-rank one beside it that is trained."""

    def __init__(self, layer: nn.Module, width: int, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        kind = getattr(self.layer.weight, "dtype", x.dtype)
        own = self.layer(x.to(kind) if kind == torch.bfloat16 else x).to(x.dtype)
        return own + self.up(self.down(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, form: str, *, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        plain = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        torch.manual_seed(11)
        self.layers = nn.ModuleList(Adapted(in_form(layer, form), WIDTH) for layer in plain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def in_form(layer: nn.Linear, form: str) -> nn.Module:
    if form == "bf16":
        return layer.bfloat16()
    if form == "4bit":
        import bitsandbytes as bnb

        coded = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        coded.load_state_dict(layer.state_dict())
        return coded.to("cpu")  # type: ignore[no-any-return]
    if form == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(layer, Int8WeightOnlyConfig())
    return layer


def peft_llama(form: str) -> nn.Module:
    import peft
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    base = transformers.LlamaForCausalLM(config)
    if form == "bf16":
        base = base.bfloat16()
    elif form in ("4bit", "int8"):
        for name, module in list(base.model.layers.named_modules()):
            if isinstance(module, nn.Linear):
                above, _, key = name.rpartition(".")
                setattr(base.model.layers.get_submodule(above), key, _quantised(module, form))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model  # type: ignore[no-any-return]


def _quantised(layer: nn.Linear, form: str) -> nn.Module:
    if form == "int8":
        return in_form(layer, form)
    import bitsandbytes as bnb

    coded = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    coded.load_state_dict(layer.state_dict())
    return coded.to("cpu")  # type: ignore[no-any-return]


def rows(is_peft: bool) -> Any:
    draw = torch.Generator().manual_seed(5)
    if is_peft:
        return torch.randint(0, 40, (ROWS, 12), generator=draw)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]
    return F.mse_loss(model(batch[0]), batch[1])


def build(form: str, *, is_peft: bool = False, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`form`: with the word `given`, the optimizer is given the frozen parameters too, as many scripts do."""
    form, _, is_given = form.partition(" ")
    model = peft_llama(form) if is_peft else Net(form, seed=seed)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad or is_given], lr=0.01)


def trained_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in state.items() if any(word in name for word in (".lora_", ".down.", ".up."))
    }


def plain_losses(form: str, *, is_peft: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Without a line of ours but the order of rows."""
    from potluck.data.order import Shuffled

    model, optimizer = build(form, is_peft=is_peft)
    data, losses = rows(is_peft), []
    for epoch in range(EPOCHS):
        order = Shuffled(ROWS).of(epoch, 1)
        for start in range(0, ROWS, BATCH):
            chosen = order[start : start + BATCH]
            loss = loss_of(model, data[chosen] if is_peft else tuple(part[chosen] for part in data))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, trained_of(model.state_dict())


def train(
    fleet: Any,
    form: str,
    *,
    is_peft: bool = False,
    seed: int = 3,
    epochs: int = EPOCHS,
    folder: Path | None = None,
    then: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = build(form, is_peft=is_peft, seed=seed)
    losses: list[float] = []
    model, optimizer, loader = fleet.prepare(
        model, optimizer, rows(is_peft), batch_size=BATCH, seed=1, loss=loss_of if fleet.run.wanted.stages else None
    )
    fleet.after_step.append(lambda: losses.append(fleet.last_step.loss))
    if folder is not None:
        fleet.load(folder)
    for _ in fleet.epochs(epochs, folder):
        for batch in loader:
            fleet.train(loss_of, batch)
            fleet.step()
    then(model)
    return losses, trained_of(fleet.state_dict())


def nearness(form: str, *, is_peft: bool) -> dict[str, float]:
    """How near losses are: activations of a whole llama in bf16 round otherwise where fewer rows go through at once."""
    return {"rtol": 1e-3, "atol": 1e-3} if form == "bf16" and is_peft else {"rtol": 1e-5, "atol": 1e-6}

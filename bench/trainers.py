"""A step of Hugging Face's Trainer on a fleet of one worker, against the Trainer itself.

Both train the same llama in this process, each in a thread of its own; their callbacks hand each other the turn after
every step, so only one of them computes at a time.
"""

import tempfile
import threading
import time
from typing import Any

from bench.report import Comparison, Result
from bench.turns import take_turns

WARM_UP_STEPS, ROWS, TOKENS = 3, 4, 128


def measure(quick: bool) -> Result:
    import torch
    from transformers import Trainer

    import potluck

    class Ours(potluck.hf.Elastic, Trainer):  # type: ignore[misc]
        pass

    rounds = 4 if quick else 60
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        made = {"ours": _trainer(Ours, folder, rounds), "bare": _trainer(Trainer, folder, rounds)}
        sides = {name: Side(trainer) for name, trainer in made.items()}
        for _ in range(WARM_UP_STEPS):
            for side in sides.values():
                side.step()
        found = take_turns("trainers", rounds, {name: side.step for name, side in sides.items()}, "ms")
        for side in sides.values():
            side.end()
    weights = [[each.detach() for each in trainer.model.parameters()] for trainer in made.values()]
    apart = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
    assert apart < 1e-4, f"the two sides do different work: their weights are apart by {apart:.1e}"
    step = Comparison(
        what="step of Hugging Face's Trainer on a fleet of one worker, 14M llama, against the Trainer itself",
        unit="ms",
        ours=found["ours"],
        bare=found["bare"],
        target=1.05,
    )
    return Result([step], {"parameters": sum(each.numel() for each in weights[0]), "distance_of_weights": apart})


def _trainer(kind: Any, folder: str, rounds: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    steps = WARM_UP_STEPS + rounds + 1
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 4096, (ROWS * steps, TOKENS))]
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6)), args, train_dataset=rows)


class Side:
    """A trainer that takes a step when it is told to."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self._go, self._done, self._began = threading.Semaphore(0), threading.Semaphore(0), 0.0
        side = self

        class Turns(TrainerCallback):
            def on_train_begin(self, *told: Any, **more: Any) -> None:
                side._wait()

            def on_step_end(self, *told: Any, **more: Any) -> None:
                side._took_s = time.perf_counter() - side._began
                side._done.release()
                side._wait()

        trainer.add_callback(Turns())
        self._took_s = 0.0
        self._thread = threading.Thread(target=trainer.train, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._go.acquire()
        self._began = time.perf_counter()

    def step(self) -> float:
        """Milliseconds."""
        self._go.release()
        self._done.acquire()
        return 1000 * self._took_s

    def end(self) -> None:
        """The last step, which nobody times."""
        self.step()
        self._go.release()
        self._thread.join()

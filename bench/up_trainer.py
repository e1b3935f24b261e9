"""The bare loop of up_loop.py under Ray Train's TorchTrainer.

python up_trainer.py FILE STEPS WORKERS
"""

import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def loop(config: dict[str, object]) -> None:
    from bench.up_loop import bare

    bare(str(config["file"]), int(str(config["steps"])), prepare_model)


if __name__ == "__main__":
    ray.init(address="auto", logging_level="warning")
    trainer = TorchTrainer(
        loop,
        train_loop_config={"file": sys.argv[1], "steps": int(sys.argv[2])},
        scaling_config=ScalingConfig(num_workers=int(sys.argv[3])),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()

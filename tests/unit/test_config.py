from typing import Any

import pytest

import potluck
from potluck import FitConfig, RunConfig, ScheduleConfig, Sync
from potluck.config import from_toml, parse_toml, to_toml
from potluck.errors import ConfigError
from potluck.launch import processes
from potluck.launch.options import HostOptions, host_args
from potluck.launch.processes import WorkerPool
from potluck.launch.recipes import config_of_kind
from potluck.train.arguments import (
    TrainArgs,
    WorkersConfig,
    built_in_recipes,
    find_recipe,
    workers_of,
)
from potluck.train.model import ModelConfig


def read(text: str, *overrides: str) -> RunConfig:
    return from_toml(RunConfig, f'name = "x"\n{text}', source="here", overrides=overrides)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model]\nlayer = 3", "There is no setting model.layer. Did you mean model.layers?"),
        ("[fit.checkpoint]\nevry = 3", "There is no setting fit.checkpoint.evry. Did you mean fit.checkpoint.every?"),
        ("[modle]\ndim = 3", "There is no setting modle. Did you mean model?"),
        ("zebra = 1", "There is no setting zebra. Valid here: batch, data"),
        ('[model]\ndim = "wide"', "model.dim must be a whole number, not 'wide'."),
        ("[model]\ndim = 1.5", "model.dim must be a whole number, not 1.5."),
        ("[model]\ndim = true", "model.dim must be a whole number, not True."),
        ("[step]\ncompile = 1", "step.compile must be true or false, not 1."),
        ('[step]\nprecision = "fp8"', "step.precision must be one of 'fp32', 'bf16', 'fp16', not 'fp8'."),
        ("model = 3", "model is a table of settings, not a single value: 3."),
        ("[data]\npaths = 'a.txt'", "data.paths must be a list, not 'a.txt'."),
        ("[data]\npaths = [1]", "data.paths[0] must be a string, not 1."),
        ("[model]\ndim = 7\nheads = 2", "model: dim 7 must be a multiple of heads 2"),
        ("[model]\ndim = 6\nheads = 2", "model: dim / heads is 3, and rotary positions need an even number"),
        ("[model]\nlayers = 0", "model: layers must be at least 1, not 0"),
        ("[model]\nvocab = 100", "model.vocab must be at least 256"),
        ("[batch]\nsize = 0", "batch: size must be at least 1"),
        ("[optimizer]\nlr = 0", "optimizer: lr must be above 0"),
        ("[optimizer]\nlr = inf", "optimizer: lr must be above 0"),
        ("[optimizer]\nweight_decay = nan", "optimizer: weight_decay must be at least 0"),
        ("[fit]\nseed = 9223372036854775808", "fit: seed must be at least 0 and below 2**63"),
        ("[step]\nclip = -1", "step: clip must be above 0"),
        ('policy = "sink"', "There is no setting policy of kind sink. Did you mean policy of kind sync?"),
        ("[policy]\nshares = [1, 0]\nkind = 'sync'", "policy: shares must be positive numbers"),
        ("[policy]\nshares = [1, 1]", "policy needs a kind, one of sync, cadence, async, auto."),
        ("a = ", "here is not valid TOML"),
    ],
)
def test_a_mistake_is_named_by_its_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert said in str(error.value)


BEYOND = {
    "batch.size=1000000000000": "batch: size must be at most 2,147,483,648, not 1,000,000,000,000: it is the rows of",
    "batch.fetchers=100000": "batch: fetchers must be at most 1,024, not 100,000: each is a process",
    "model.layers=1000000": "model: layers must be at most 16,384, not 1,000,000",
    "model.dim=100000000": "model: dim must be at most 1,048,576, not 100,000,000",
    "model.context=1000000000": "model: context must be at most 16,777,216, not 1,000,000,000",
    "model.hidden=100000000000": "model: hidden must be at most 16,777,216, not 100,000,000,000",
    "model.vocab=1000000000": "model: vocab must be at most 16,777,216, not 1,000,000,000",
    "fit.epochs=1000000000000": "fit: epochs must be at most 1,000,000, not 1,000,000,000,000: to end a run after some",
    "fit.max_steps=10000000000000": "fit: max_steps must be at most 1,000,000,000,000",
    "optimizer.lr=1e30": "optimizer: lr must be at most 1,000, not 1e+30: 3e-4 is usual",
    "optimizer.weight_decay=1e30": "optimizer: weight_decay must be at most 1,000, not 1e+30",
    "workers.count=100000": "workers: count must be at most 4,096, not 100,000: each is a process",
    "workers.threads=100000": "workers: threads must be at most 4,096, not 100,000",
    "workers.patience_s=inf": "workers: patience_s must be at most 604,800, not inf: that is a week",
    "workers.patience_s=nan": "workers: patience_s must be above 0, not nan",
    "data.limit_bytes=9223372036854775807": "data: limit_bytes must be at most",
    f"fit.checkpoint.every=1{'0' * 30}": "fit.checkpoint.every is a number of 31 digits",
    f"optimizer.lr=1{'0' * 400}": "optimizer.lr is a number of 401 digits",
    r'name="a\u0000b"': r"not 'a\x00b'",
    r'name="a\u001b[2Jb"': r"not 'a\x1b[2Jb'",
    f'name="{"x" * 300}"': "name must be",
}


@pytest.mark.parametrize("override", BEYOND)
def test_a_setting_beyond_sense_is_refused_by_name_and_number(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        read("", override)
    assert BEYOND[override] in str(error.value)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"settings": (r'name="a\u0000b"',)}, r"name must .* not 'a\\x00b'"),
        ({"settings": ('name="../x"',)}, r"name must be a plain word .* not '\.\./x'"),
        ({"patience_s": float("inf")}, "--patience must be at most 604,800, not inf"),
        ({"workers": 100_000}, "count must be at most 4,096, not 100,000"),
    ],
)
def test_a_host_refuses_the_same_before_it_makes_a_folder(order: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        host_args(HostOptions(what="demo", **order))


def test_more_workers_than_a_machine_has_room_for_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "machine_bytes", lambda: 4_000_000_000)
    processes.check_room(40)
    with pytest.raises(ConfigError, match=r"41 workers .* at least 4\.1 GB .* has 4 GB\. Start 40 at most"):
        processes.launch(["never started"], WorkersConfig(count=41))
    with pytest.raises(ConfigError, match="Start 40 at most"):
        WorkerPool(["never started"], WorkersConfig(count=41), {})


def test_an_endless_patience_of_ones_own_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match="patience_s must be at most 604,800, not inf"):
        potluck.init(patience_s=float("inf"))


def test_a_name_is_required_and_cannot_leave_its_folder() -> None:
    with pytest.raises(ConfigError, match="name is missing"):
        from_toml(RunConfig, "", source="here")
    with pytest.raises(ConfigError, match="plain word for a folder"):
        from_toml(RunConfig, 'name = "../x"', source="here")


def test_overrides_come_last_and_are_written_as_in_toml() -> None:
    config = read(
        "[model]\nlayers = 2", "model.layers=5", "data.paths=['a', 'b']", "step.precision=bf16", "step.clip=2"
    )
    assert (config.model.layers, config.data.paths) == (5, ("a", "b"))
    assert (config.step.precision, config.step.clip) == ("bf16", 2.0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layers", "--set takes NAME=VALUE"),
        ("=3", "--set takes NAME=VALUE"),
        ("name.x=3", "name is a value, not a table"),
        ("model.layrs=3", "Did you mean model.layers?"),
    ],
)
def test_a_bad_override_is_a_sentence(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read("", override)
    assert said in str(error.value)


def test_what_is_written_is_read_again() -> None:
    config = RunConfig(
        name="x",
        model=ModelConfig(dim=8, heads=2, kv_heads=1),
        fit=FitConfig(schedule=ScheduleConfig(warmup=0.5)),
        policy=Sync(shares=(3.0, 1.0)),
    )
    assert from_toml(RunConfig, to_toml(config), source="here") == config


@pytest.mark.parametrize("name", built_in_recipes())
def test_every_built_in_recipe_is_valid(name: str) -> None:
    text, source = find_recipe(f"recipes/{name}.toml")
    missing = ('model.hf="a model"', 'data.paths=["rows"]') if name.startswith("finetune") else ()
    config = config_of_kind(parse_toml(text, source=source, overrides=missing))
    assert config.name == name
    assert find_recipe(name)[0] == text


def test_a_missing_recipe_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"There is no recipe nothing\. Built in are: .*demo"):
        find_recipe("nothing")


def test_the_launcher_reads_the_number_of_workers_by_itself() -> None:
    assert workers_of(TrainArgs(recipe="demo", settings=("workers.count=5",))).count == 5
    with pytest.raises(ConfigError, match=r"workers: count must be at least 1"):
        workers_of(TrainArgs(recipe="demo", settings=("workers.count=0",)))
    with pytest.raises(ConfigError, match=r"Did you mean workers\.count\?"):
        workers_of(TrainArgs(recipe="demo", settings=("workers.coutn=1",)))


def test_what_was_removed_is_refused_with_what_to_do_instead_and_passed_over_where_it_is_off() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.buddy was removed: .* save more often"):
        potluck.FullShard(buddy=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"strategy\.buddy was removed"):
        read('strategy = {kind = "shard_grad_op", buddy = true}')
    old = read('strategy = {kind = "full_shard", weights = [], buddy = false, buddy_every = 10}')
    assert old.strategy == potluck.FullShard()
    for settings, said in (
        ({"overlap": True}, "policy.overlap was removed"),
        ({"outer": {"lr": 0.7}}, "policy.outer was"),
    ):
        with pytest.raises(ConfigError, match=said):
            potluck.Cadence(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy\.overlap was removed: .* use longer windows"):
        read('policy = {kind = "async", overlap = true}')
    with pytest.raises(ConfigError, match=r"policy\.outer was removed"):
        _ = potluck.Outer  # type: ignore[attr-defined]
    assert read('policy = {kind = "cadence", overlap = false}').policy == potluck.Cadence()
    with pytest.raises(ConfigError, match=r"no setting strategy\.budy"):
        read('strategy = {kind = "full_shard", budy = true}')

import pytest

from potluck import FitConfig, RunConfig, ScheduleConfig, Sync
from potluck.config import from_toml, to_toml
from potluck.errors import ConfigError
from potluck.train.model import ModelConfig
from potluck.train.order import Order, built_in_recipes, find_recipe, workers_of


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
        ('[step]\nprecision = "fp8"', "step.precision must be one of 'fp32', 'bf16', not 'fp8'."),
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
        ("[policy]\nshares = [1, 1]", "policy needs a kind, one of sync, cadence, async."),
        ("a = ", "here is not valid TOML"),
    ],
)
def test_a_mistake_is_named_by_its_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert said in str(error.value)


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
    config = from_toml(RunConfig, text, source=source)
    assert config.name == name
    assert find_recipe(name)[0] == text


def test_a_missing_recipe_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"There is no recipe nothing\. Built in are: .*demo"):
        find_recipe("nothing")


def test_the_launcher_reads_the_number_of_workers_by_itself() -> None:
    assert workers_of(Order(recipe="demo", settings=("workers.count=5",))).count == 5
    with pytest.raises(ConfigError, match=r"workers: count must be at least 1"):
        workers_of(Order(recipe="demo", settings=("workers.count=0",)))
    with pytest.raises(ConfigError, match=r"Did you mean workers\.count\?"):
        workers_of(Order(recipe="demo", settings=("workers.coutn=1",)))

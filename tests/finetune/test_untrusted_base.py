"""A base may come from a host: no other file is read for it, nothing is unpickled, and its template has limits."""

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from potluck.errors import ConfigError
from potluck.finetune.settings import PretrainedConfig
from tests.finetune.made import make_base, make_tokenizer
from tests.quick import first_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "base"
    make_base(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    from potluck.finetune.base import load_base
    from potluck.finetune.base_files import find_base

    config = PretrainedConfig(hf=str(folder), **options)
    return load_base(find_base(str(folder)), config, CPU, labels=None, is_frozen=True)[0]


def evil(honest: Path, folder: Path, part: str) -> Path:
    """The base of a host that wants to read `part`: its index names it for every weight."""
    shutil.copytree(honest, folder)
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, folder / "dummy.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that Python opens meanwhile."""
    paths: list[str] = []
    listens = True

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if listens and event == "open":
            paths.append(str(arguments[0]))

    sys.addaudithook(hear)  # for the rest of this process
    yield paths
    listens = False


@pytest.mark.parametrize("way", ["absolute", "relative", "backslash"])
def test_an_index_that_names_a_file_elsewhere_is_refused(honest: Path, tmp_path: Path, way: str) -> None:
    secret = tmp_path / "runs" / "secret" / "model.safetensors"
    secret.parent.mkdir(parents=True)
    shutil.copy(honest / "model.safetensors", secret)
    part = {
        "absolute": str(secret),
        "relative": "../../runs/secret/model.safetensors",
        "backslash": "..\\..\\runs\\secret\\model.safetensors",
    }[way]
    (tmp_path / "cache").mkdir()
    folder = evil(honest, tmp_path / "cache" / "base", part)
    with pytest.raises(ConfigError, match=r"Only \*\.safetensors files of that folder itself are read"):
        load(folder)


def test_an_index_that_names_a_pickle_is_refused(honest: Path, tmp_path: Path) -> None:
    folder = evil(honest, tmp_path / "base", "weights.txt")
    torch.save(load_file(honest / "model.safetensors"), folder / "weights.txt")
    with pytest.raises(ConfigError, match=r"says that weights are in 'weights\.txt'"):
        load(folder)
    (folder / "weights.txt").rename(folder / "weights.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("weights.txt", "weights.safetensors"))
    with pytest.raises(ConfigError, match="header too large"):
        load(folder)


@pytest.mark.parametrize("part", ["../../secret/model.safetensors", "weights.txt"])
def test_a_base_that_a_host_has_sent_reads_nothing_of_the_joiners(honest: Path, tmp_path: Path, part: str) -> None:
    """Over a real connection, into the joiner's cache, from which the path leads to a file that is there."""
    from potluck.fleet.base_folder import fetch_base
    from tests.fleet.fleet import serve

    (tmp_path / "secret").mkdir()
    shutil.copy(honest / "model.safetensors", tmp_path / "secret" / "model.safetensors")
    hostile = evil(honest, tmp_path / "hostile", part)
    torch.save(load_file(honest / "model.safetensors"), hostile / "weights.txt")
    server, invite, journal = serve(tmp_path / "run", encrypted=True)
    server.serve_base(hostile)
    server.start()
    try:
        place = fetch_base(invite, tmp_path / "cache")
        assert place is not None and (place / "weights.txt").is_file()
        if part.startswith(".."):
            assert (place / part).is_file(), "the path leads there"
        with pytest.raises(ConfigError, match=r"Only \*\.safetensors files of that folder itself are read"):
            load(place)
    finally:
        server.stop()
        journal.close()


def test_settings_that_name_weights_or_another_base_lead_nowhere(honest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(honest, folder)
    other = tmp_path / "private"
    shutil.copytree(honest, other)
    private = {name: torch.ones_like(each) for name, each in load_file(other / "model.safetensors").items()}
    save_file(private, other / "model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(other), "peft_type": "LORA"})
    )
    with pytest.raises(ConfigError, match=r"holds an adapter \(adapter_config\.json\) beside the model"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(settings | {"configuration_files": [f"{other}/config.4.0.0.json"], "attn_implementation": "evil/x"})
    )
    (other / "config.4.0.0.json").write_text(json.dumps(settings | {"hidden_size": 16}))
    assert load(folder).config.hidden_size == 32
    for name in ("../private/model.safetensors", str(other / "model.safetensors"), 3):
        (folder / "config.json").write_text(json.dumps(settings | {"transformers_weights": name}))
        with pytest.raises(ConfigError, match=r"config\.json says that weights are in"):
            load(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers = 1,000,000,000, and its files hold 21 tensors"),
        ({"vocab_size": 10**9}, "describes a model of 64B parameters"),
        ({"hidden_size": 10**12}, "Cannot load|describes a model of"),
    ],
)
def test_a_config_that_describes_more_than_its_files_hold_is_refused_before_it_is_made(
    honest: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    from potluck.finetune.base import check_described

    check_described(honest, None)
    check_described(honest, ["odd", "even"])
    folder = tmp_path / "base"
    shutil.copytree(honest, folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | settings))
    with pytest.raises(ConfigError, match=said):
        check_described(folder, None)


def test_a_tokenizer_that_names_other_files_reads_none_of_them(honest: Path, tmp_path: Path, opened: list[str]) -> None:
    from potluck.finetune.encoding import load_tokenizer

    folder, secret = tmp_path / "base", tmp_path / "secret"
    shutil.copytree(honest, folder)
    secret.mkdir()
    for name in ("vocab.txt", "merges.txt", "tokenizer.json", "tokenizer.4.0.0.json", "map.json"):
        shutil.copy(honest / "tokenizer.json", secret / name)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text()) | {
        "vocab_file": str(secret / "vocab.txt"),
        "merges_file": str(secret / "merges.txt"),
        "tokenizer_file": str(secret / "tokenizer.json"),
        "special_tokens_map_file": str(secret / "map.json"),
        "fast_tokenizer_files": ["../secret/tokenizer.4.0.0.json"],
        "init_inputs": [str(secret / "vocab.txt")],
    }
    path.write_text(json.dumps(told))
    opened.clear()
    ours = load_tokenizer(folder)
    assert ours.get_vocab() == load_tokenizer(honest).get_vocab() and ours.name_or_path == str(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError):
        load_tokenizer(folder).get_vocab()["three"]
    assert opened and not [each for each in opened if "secret" in each]


def test_templates_that_have_names_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from potluck.finetune.encoding import load_tokenizer

    tokenizer = make_base(tmp_path / "base")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "base")
    assert load_tokenizer(tmp_path / "base").chat_template == tokenizer.chat_template


def test_a_base_in_several_files_is_read_as_transformers_reads_it(honest: Path, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "base"
    shutil.copytree(honest, folder)
    (folder / "model.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(honest)
    model.save_pretrained(folder, max_shard_size="20KB")
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    found = load(folder)
    assert found.name_or_path == str(folder) and found.generation_config.eos_token_id == 1
    assert all(torch.equal(each, found.state_dict()[name]) for name, each in model.state_dict().items())


BOMBS = {
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "s of processor time",
    "{{ 'a' * 6000000000 }}": "MiB of memory",
    "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}": "MiB of memory",
    "{{ 'a' * 9000000 }}": "letters, and at most",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    """Little time for a template, and enough for those that take memory."""
    from potluck.finetune import rendering

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "MOST_CPU_S", 2)
        rendering.template_process.cache_clear()
        yield
        rendering.template_process.cache_clear()


@pytest.mark.parametrize("template", first_of(BOMBS, 2))
def test_a_template_that_takes_too_much_is_stopped_with_a_sentence(template: str, impatient: None) -> None:
    from potluck.finetune.encoding import Encoder
    from potluck.finetune.records import TextRecord

    tokenizer = make_tokenizer(template=template)
    tokenizer.pad_token = tokenizer.eos_token
    fields = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    with pytest.raises(ConfigError, match="chat template") as caught:
        list(Encoder(tokenizer, "chat").encode([TextRecord("row 1", "chat", fields)]))
    assert BOMBS[template] in str(caught.value)
    tokenizer.chat_template = "{{ messages[0].content }}"  # the next one is rendered
    assert Encoder(tokenizer, "chat").written([{"role": "user", "content": "\u00e4\n"}]) == "\u00e4\n"

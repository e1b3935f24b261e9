"""Files that other systems read, against the schemas that those systems publish.

Core objects of Kubernetes: its own schemas, in kubernetes-validate. JobSet, TrainJob and TrainingRuntime: the classes
that Kubeflow publishes, made from its OpenAPI text, in kubeflow-trainer-api; rules that only a cluster checks are not
in them. SkyPilot and dstack read their files themselves, where POTLUCK_SKYPILOT_PYTHON and POTLUCK_DSTACK_PYTHON name
an interpreter that has them: they are too large for this environment.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "examples" / "kubernetes"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="`make test-dist` installs the schemas"),
]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


def check_core(document: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_published(document: dict[str, Any]) -> None:
    """The class takes it, and leaves nothing out: what it does not know it drops."""
    from kubeflow_trainer_api import models

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    read = kinds[document["kind"]].from_dict(document)
    assert read is not None and list(lost(document, read.to_dict())) == []


def lost(given: Any, read: Any, path: str = "") -> Iterator[str]:
    match given, read:
        case dict(), dict():
            for key, value in given.items():
                yield from lost(value, read.get(key), f"{path}.{key}")
        case list(), list() if len(given) == len(read):
            for index, (one, other) in enumerate(zip(given, read, strict=True)):
                yield from lost(one, other, f"{path}[{index}]")
        case _ if given != read:
            yield path


@pytest.mark.parametrize("name", ["service.yaml", "host.yaml", "workers.yaml"])
def test_core_objects_are_what_kubernetes_takes(name: str) -> None:
    for document in documents(name):
        check_core(document)


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_jobsets_and_trainjobs_are_what_kubeflow_publishes(name: str) -> None:
    for document in documents(name):
        check_published(document)
        template = document["spec"].get("template", document)["spec"]
        for job in template.get("replicatedJobs", ()):  # their jobs are core objects
            check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **spec_of(job)})


def spec_of(job: dict[str, Any]) -> dict[str, Any]:
    return {"spec": job["template"]["spec"]}


def test_a_misspelt_field_is_found() -> None:
    import kubernetes_validate

    (job,) = documents("workers.yaml")
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        check_core(job)
    (jobset,) = documents("jobset.yaml")
    for change in ({"successpolicy": {}}, {"network": {"subdomains": "x"}}):
        wrong = deepcopy(jobset)
        wrong["spec"].update(change)
        with pytest.raises((AssertionError, ValueError)):
            check_published(wrong)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it")
def test_kustomize_puts_a_made_invite_into_secrets_and_nowhere_else(tmp_path: Path) -> None:
    place = shutil.copytree(MANIFESTS, tmp_path / "kubernetes", ignore=shutil.ignore_patterns("identity"))
    make = [sys.executable, "-m", "potluck.cli", "invite", "--address", "potluck-host", "--port", "40159"]
    subprocess.run([*make, "--out", str(place / "identity")], check=True, capture_output=True)
    made = subprocess.run(["kubectl", "kustomize", str(place)], check=True, capture_output=True, text=True).stdout
    secret = (place / "identity" / "secret").read_text().strip()
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made)}
    assert set(found["Secret", "potluck-invite"]["data"]) == {"invite"}
    assert set(found["Secret", "potluck-host"]["data"]) == {"invite", "secret", "key.pem", "cert.pem"}
    assert secret not in made and len(found) == 6
    for document in found.values():
        check_core(document)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", ROOT / ".github" / "workflows" / "ci.yml"),
        ("github-issue-forms", FORMS / "bug.yml"),
        ("github-issue-forms", FORMS / "idea.yml"),
        ("github-issue-config", FORMS / "config.yml"),
        ("citation-file-format", ROOT / "CITATION.cff"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_a_forge_reads_is_what_it_publishes(schema: str, path: Path) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*check, "--default-filetype", "yaml", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SKYPILOT = """
import sys, sky
for path in sys.argv[1:]:
    print(sky.Task.from_yaml(path).name)
"""
DSTACK = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
for path in sys.argv[1:]:
    print(parse_run_configuration(yaml.safe_load(open(path))).name)
"""


@pytest.mark.parametrize(
    ("name", "program", "files"),
    [
        ("POTLUCK_SKYPILOT_PYTHON", SKYPILOT, ("skypilot/host.yaml", "skypilot/potluck.yaml")),
        ("POTLUCK_DSTACK_PYTHON", DSTACK, ("dstack/.dstack.yml",)),
    ],
)
def test_skypilot_and_dstack_read_their_files(name: str, program: str, files: tuple[str, ...]) -> None:
    if name not in os.environ:
        pytest.skip(f"{name} names no interpreter")
    paths = [str(ROOT / "examples" / file) for file in files]
    done = subprocess.run([os.environ[name], "-c", program, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("potluck-") for line in done.stdout.split()), done.stdout

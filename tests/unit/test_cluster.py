"""What schedulers say of themselves, what is made of it, and how nodes meet. No scheduler is started."""

import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from potluck.cli import _split
from potluck.cluster.meeting import Meeting, Reply
from potluck.cluster.options import UpOptions
from potluck.cluster.place import LOOKS, JobPlace, find
from potluck.cluster.plan import NodeResources, own_resources, plan, plan_early
from potluck.cluster.ray import slots_of
from potluck.cluster.reaching import interface_to, reach
from potluck.cluster.running import requeue, up
from potluck.errors import ConfigError
from potluck.fleet.invite import Invite
from potluck.waiting import wait_until
from tests.clusters.slurm import free_ports

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "n3",
    "SLURM_CPUS_ON_NODE": "8",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SPREAD = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
ENVIRONMENTS = [
    (STEP, {"scheduler": "SLURM", "task": 2, "tasks": 3, "node": "n3", "cores": 8, "attempt": "17.0.0", "job": "17"}),
    (STEP | {"SLURM_RESTART_COUNT": "1"}, {"attempt": "17.0.1", "job": "17"}),
    (
        STEP | {"SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_LOCALID": "1"},
        {"local": 1, "local_tasks": 2},
    ),
    (STEP | {"SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2,1,2"}, {"tasks": 5, "local_tasks": 2}),
    (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}, {"scheduler": "SLURM", "task": 2}),
    (
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"},
        {"spread": ("srun", *SPREAD)},
    ),
    (
        {"SLURM_JOB_ID": "18", "SLURM_JOB_ID_HET_GROUP_0": "17", "SLURM_HET_SIZE": "2"},
        {
            "job": "17",
            "spread": ("srun", "--het-group=0-1", *SPREAD),
        },
    ),
    (
        STEP | TORCHRUN,
        {"scheduler": "torchrun", "task": 3, "tasks": 4, "local": 1, "local_tasks": 2, "group": ("a", 29400)},
    ),
    (STEP | OPEN_MPI, {"scheduler": "MPI", "task": 1, "tasks": 2, "local": 1, "local_tasks": 2}),
    (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"scheduler": "MPI", "task": 1, "tasks": 4},
    ),
    ({"RAY_ADDRESS": "10.0.0.1:6379"}, {"scheduler": "Ray", "leader": "10.0.0.1:6379"}),
    (
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        {"scheduler": "SkyPilot", "task": 1, "tasks": 2, "leader": "10.0.0.1"},
    ),
    (
        {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
        {"scheduler": "dstack", "task": 1, "tasks": 2, "leader": "10.0.0.1"},
    ),
    (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
        {"scheduler": "Kubernetes", "task": 3, "tasks": None},
    ),
]


@pytest.mark.parametrize(("environment", "expected"), ENVIRONMENTS)
def test_a_scheduler_is_known_by_what_it_says(environment: dict[str, str], expected: dict[str, object]) -> None:
    found = find(environment)
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_was_found_is_a_sentence() -> None:
    assert find(STEP).sentence() == "Found SLURM: this is task 2 of 3, on n3."


def test_a_ray_cluster_may_be_named() -> None:
    assert find(STEP, "ray").leader == "auto"
    assert find({}, "10.0.0.1:6379").leader == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="Submit it as a job"):
        find({}, "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="--on takes ray"):
        find({}, "slurm")


def test_without_a_scheduler_a_sentence_names_those_it_looked_for() -> None:
    with pytest.raises(ConfigError) as refused:
        find({"HOME": "/", "RANK": "0"})  # RANK alone is nobody's
    assert all(name in str(refused.value) for name in LOOKS)


PLACE = JobPlace(scheduler="SLURM", node="n1", tasks=3)
TWO, FOUR = NodeResources(cores=2, processor="Epyc"), NodeResources(cores=4, processor="Epyc", gpus=("L4", "L4"))


def test_nodes_that_are_alike_become_a_group_and_others_join_a_host() -> None:
    nodes = [("n1", TWO), ("n2", TWO), ("n3", TWO)]
    assert plan_early(PLACE, None, may_be_requeued=False) is None
    alike = plan(PLACE, nodes)
    assert alike.led == "group" and alike.sentence == "A fixed group, since all 3 nodes are alike: 2 cores of Epyc."
    other = plan(PLACE, [*nodes[:2], ("n3", FOUR)])
    assert other.led == "host" and "n3 has 4 cores of Epyc and 2 × L4, and n1 2 cores of Epyc" in other.sentence
    late = plan(PLACE, nodes[:2])
    assert late.led == "host" and "1 node is not there yet" in late.sentence


def test_a_job_that_may_be_started_again_has_a_host_unless_a_group_is_asked_for() -> None:
    early = plan_early(PLACE, None, may_be_requeued=True)
    assert early is not None and early.led == "host" and "SLURM may take the nodes away" in early.sentence
    asked = plan_early(PLACE, "group", may_be_requeued=True)
    assert asked is not None and asked.led == "group" and asked.sentence == "A fixed group, as asked."


def test_a_scheduler_gives_fewer_cores_than_there_are() -> None:
    assert own_resources(1, None).cores == 1
    assert own_resources(None, "").gpus == ()


def test_nodes_meet_in_files_for_their_owner_alone_and_take_no_answer_from_before(tmp_path: Path) -> None:
    first, other = (Meeting(tmp_path / "run", "17.0.0", 3) for _ in range(2))
    (first.folder / "answer-1.json").write_text('{"word": "old", "led": "group"}')
    greeting = other.greet(1, "n2", 1, TWO)
    said: list[str] = []
    found: list[Reply] = []
    waiting = threading.Thread(target=lambda: found.append(other.wait_for_answer(1, greeting, 30.0, said.append)))
    waiting.start()
    assert wait_until(lambda: 1 in first.greetings(), 20.0)
    assert first.greetings()[1].word == greeting.word
    alone = Meeting(tmp_path / "run", "17.0.0", 1)
    alone._call = first._call
    assert alone.greetings() == {}
    first.hand_over(Invite("n1", 4000, "s3cret", "A" * 43))
    waiting.join(20)
    assert [reply.led for reply in found] == ["host"] and not said
    assert "s3cret" in first.invite.read_text()
    for path in first.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for folder in (first.folder, first.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first.close()
    assert not list(first.folder.iterdir())


def test_a_first_node_takes_no_greeting_from_before(tmp_path: Path) -> None:
    before, first, other = (Meeting(tmp_path, "none.0", 2) for _ in range(3))  # torchrun's starts have no name
    before.greetings()
    stale = other.greet(1, "n2", 1, TWO)
    with pytest.raises(ConfigError, match="Gave up"):  # it heard the call, and was ended then
        other.wait_for_answer(1, stale, 0.01, lambda sentence: None)
    assert before.greetings() and first.greetings() == {}
    greeting = other.greet(1, "n2", 1, TWO)
    found: list[Reply] = []
    waiting = threading.Thread(target=lambda: found.append(other.wait_for_answer(1, greeting, 30.0, lambda said: None)))
    waiting.start()
    assert wait_until(lambda: 1 in first.greetings(), 20.0)
    first.answer(1, Reply(word=first.greetings()[1].word, led="group", resume=True))
    waiting.join(20)
    assert [reply.resume for reply in found] == [True]


def test_a_second_job_in_a_folder_is_refused_and_leaves_the_first_ones_meeting_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two jobs of an MPI that tells no attempt. The first one's late node still finds its answer."""
    first = Meeting(tmp_path / "run", "", 2)
    with first.hold():
        first.greetings()
        first.hand_over(Invite("n1", 4000, "s3cret", "A" * 43))
        there = {path.name: path.read_text() for path in first.folder.iterdir()}
        environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "HOME": str(tmp_path)}
        monkeypatch.setattr("os.environ", environment | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
        with pytest.raises(ConfigError, match=r"Another run is using .*/run right now"):
            up(UpOptions(what="small", out=str(tmp_path / "run"), led="host"))
        assert {path.name: path.read_text() for path in first.folder.iterdir()} == there
        late = Meeting(tmp_path / "run", "")
        greeting = late.greet(1, "n2", 1, TWO)
        assert late.wait_for_answer(1, greeting, 30.0, lambda said: None).led == "host"
        first.close()
    assert not list(first.folder.iterdir())


def test_a_meeting_removes_nothing_of_anothers(tmp_path: Path) -> None:
    """Where locks do nothing, as on some file systems: another job has called since."""
    first, second = Meeting(tmp_path, "", 2), Meeting(tmp_path, "", 2)
    for each in (first, second):
        each.greetings()
    first.hand_over(Invite("n1", 4000, "first", "A" * 43))
    second.hand_over(Invite("n1", 4001, "second", "A" * 43))
    first.close()
    assert "second" in second.invite.read_text() and (second.folder / "call").exists()
    second.close()
    assert not list(second.folder.iterdir())


def test_what_named_starts_have_left_in_a_meeting_is_not_in_the_way(tmp_path: Path) -> None:
    Meeting(tmp_path, "17.0.0", 2).greetings()
    unnamed = Meeting(tmp_path, "", 2)
    unnamed.greetings()
    unnamed.close()
    assert [path.name for path in unnamed.folder.iterdir()] == ["17.0.0"]


def test_a_job_without_srun_and_scontrol_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": str(tmp_path), "SLURM_JOB_ID": "17"})
    with pytest.raises(ConfigError, match="Cannot run srun: No such file"):
        up(UpOptions(what="small"))
    assert not requeue(PLACE)


def test_a_node_that_hears_nothing_of_the_first_says_where_it_looked(tmp_path: Path) -> None:
    meeting, said = Meeting(tmp_path, ""), list[str]()
    greeting = meeting.greet(1, "n2", 1, TWO)
    with pytest.raises(ConfigError, match="Gave up"):
        meeting.wait_for_answer(1, greeting, 0.05, said.append)
    assert "n2 has waited" in said[0] and str(meeting.folder) in said[0]


def test_a_node_that_cannot_reach_the_first_says_so_within_patience_by_name_and_port() -> None:
    (port,) = free_ports(1)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"n2 cannot reach the first node at localhost port {port}"):
        reach("n2", "localhost", port, 0.5)
    assert time.monotonic() - started < 10  # it gives up after half a second; the rest is a busy machine's
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach("n2", "127.0.0.1", server.getsockname()[1], 0.5)


def test_gloo_is_helped_only_where_it_would_take_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_to("127.0.0.1") is None  # all is on this machine
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    found = interface_to("192.0.2.9")  # nothing is sent there
    assert found is None or found in [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize(
    ("given", "ours", "scripts"),
    [
        ("up small --set a.b=1", "up small --set a.b=1", ""),
        ("up -n 2 train.py --lr 3", "up -n 2 train.py", "--lr 3"),
        ("up --as host --out x.py train.py y.py", "up --as host --out x.py train.py", "y.py"),
    ],
)
def test_what_follows_a_script_is_its_own(given: str, ours: str, scripts: str) -> None:
    assert _split(given.split()) == (ours.split(), scripts.split())


def test_a_run_folder_is_the_same_on_every_node_and_when_the_job_is_started_again() -> None:
    assert UpOptions(what="demo").folder("17") == Path("runs/demo-17")
    assert UpOptions(what="some/own.py").folder("") == Path("runs/own")
    assert UpOptions(what="demo", out="here").folder("17") == Path("here")


def test_a_node_of_ray_has_a_seat_for_each_gpu_or_one_for_all_its_cores() -> None:
    node = {
        "NodeID": "a",
        "NodeManagerHostname": "n1",
        "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0},
    }
    slots = slots_of(UpOptions(what="own.py"), node)
    assert [(slot.cpus, slot.gpus, slot.config.count, slot.config.threads) for slot in slots] == [(4, 1, 1, 4)] * 2
    (slot,) = slots_of(UpOptions(what="own.py", workers=2), node)
    assert (slot.cpus, slot.gpus, slot.config.count, slot.config.threads) == (8, 2, 2, 4)
    (slot,) = slots_of(UpOptions(what="own.py", threads=1), node | {"Resources": {"CPU": 3.0}})
    assert (slot.cpus, slot.gpus, slot.config.count) == (1, 0, 1)
    assert slots_of(UpOptions(what="own.py"), node | {"Resources": {"memory": 1.0}}) == []

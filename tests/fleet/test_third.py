"""docs/protocol.md suffices: a worker of another make, written from it alone, trains beside ours."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck.replica.model_checks import describe_model
from potluck.replica.weight_hash import digest
from potluck.save import checkpoint_folder
from tests.fleet import third
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, SLICES, STEPS, Fleet, build, wait_until
from tests.fleet.test_peers import whole_batches
from tests.fleet.third import AdamW, Run, ThirdPeer, ThirdWorker, Weights, plan_parts
from tests.quick import first_of
from tests.unit.test_protocol_doc import table

pytestmark = pytest.mark.timeout(60)


def agreed(save_every: int = 0) -> tuple[Run, Weights, AdamW]:
    """What the fleet's workers have, as arrays."""
    model, _, (x, y) = build(bare=True)
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    run = Run(
        x=x.numpy(), y=y.numpy(), batch=BATCH, slices=SLICES, seed=1, epochs=EPOCHS, small_bytes=1024,
        save_every=save_every,
    )  # fmt: skip
    return run, weights, AdamW(lr=0.01, weight_decay=0.1)


def third_worker(fleet: Fleet, save_every: int = 0, **options: Any) -> ThirdWorker:
    return ThirdWorker(fleet.invite.line(), *agreed(save_every), **options)


def check(fleet: Fleet, worker: ThirdWorker | ThirdPeer) -> None:
    """Ours and the other one end with the weights of plain PyTorch, up to rounding."""
    ours = fleet.finish()
    worker.join(20)
    if worker.error is not None:
        raise worker.error
    assert not worker.is_alive() and worker.version == STEPS
    for name, judge in whole_batches().items():
        torch.testing.assert_close(torch.from_numpy(worker.weights[name]), judge, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(ours[name], judge, rtol=2e-4, atol=2e-5)
    if isinstance(worker, ThirdWorker):
        check_committed(worker.committed)


def check_committed(told: list[dict[str, Any]]) -> None:
    """Of each step, as docs/protocol.md says."""
    of_worker, of_epoch = ([row[0] for row in table(key, "meaning")] for key in ("key", "key of an epoch"))
    assert all([*step] == ["workers", "epoch", "seconds", "ranks"] for step in told)
    assert all([*row] == of_worker for step in told for row in step["workers"])
    assert all(step["epoch"] is None or [*step["epoch"]] == of_epoch for step in told)
    assert told[-1]["epoch"]["epoch"] == EPOCHS - 1 and told[-1]["epoch"]["used"] == ROWS


def test_it_begins_with_our_weights_by_a_digest_of_its_own_and_trains_beside_us(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, encrypted=True, at_least=2)
    fleet.add("ours", bare=True)
    wait_until(lambda: len(fleet.server.core.membership.ready) == 1)
    worker = third_worker(fleet)
    worker.start()
    check(fleet, worker)
    assert worker.admitted == [0], "the same weights have the same hash, so that no parcel was needed"
    assert sum(worker.computed.values()) > BATCH
    shared = [{row["name"] for row in record.workers if row["rows"]} for record in fleet.records]
    assert {"ours", "third"} in shared


def test_it_gives_its_weights_to_one_of_ours_that_comes_later(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, encrypted=True)
    ready = fleet.server.core.membership

    def may_compute(step: int) -> bool:
        """Step 4 once one of ours has come and asks for the weights; step 8 once it has them."""
        return step < 4 or (len(ready.inside) == 2 and (step < 8 or len(ready.ready) == 2))

    worker = third_worker(fleet, save_every=5, may_compute=may_compute)
    worker.start()
    fleet.wait_for_step(3)
    fleet.add("ours", bare=True, save_every=5)
    check(fleet, worker)
    kept = {path.name: path for path in checkpoint_folder.found(tmp_path / "checkpoints")}
    # It leads, and so its states are the host's checkpoints; at the end one of ours, whose loop wants that saved.
    assert {*kept} == {"step-00000010", "step-00000014"}
    assert all(checkpoint_folder.check(path)["optimizer"]["class"] == "AdamW" for path in kept.values())
    assert worker.admitted == [0] and worker.sponsored == [4]
    assert sum(row["rows"] for record in fleet.records for row in record.workers if row["name"] == "ours") > 0


def test_a_newcomer_gets_its_weights_from_its_own_kind_where_it_can(tmp_path: Path) -> None:
    """Another kind's differ in their last bits: it would be found to have drifted, and be given them again for ever."""
    fleet = Fleet(tmp_path, encrypted=True)
    found = fleet.server.core.membership
    gates = [(4, lambda: len(found.inside) >= 2), (6, lambda: len(found.ready) >= 2)]
    gates += [(8, lambda: len(found.inside) >= 3), (11, lambda: len(found.ready) >= 3)]
    worker = third_worker(fleet, may_compute=lambda step: all(gate() for at, gate in gates if step >= at))
    worker.start()
    fleet.wait_for_step(3)
    fleet.add("first", bare=True)
    wait_until(lambda: len(found.ready) == 2)
    fleet.add("second", bare=True)
    check(fleet, worker)
    assert worker.sponsored == [4]
    assert not fleet.server.core.refused["drifted"]


def test_it_takes_our_weights_when_it_comes_later(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, encrypted=True)
    fleet.add("ours", bare=True, slow_s=0.05)
    fleet.wait_for_step(2)
    worker = third_worker(fleet)
    worker.start()
    check(fleet, worker)
    assert worker.admitted[0] == 1 and worker.computed and min(worker.computed) > 3
    assert not worker.sponsored
    assert {*worker.received} == {row[0] for row in table("key of the body", "meaning")}
    told = {row[0] for row in table("file", "what it holds")}
    assert {*worker.received["files"], "manifest.json", "kept.safetensors"} == told  # nothing is kept here


@pytest.mark.parametrize("codec", first_of(["bincode", "entrenar"]))
def test_a_plain_peer_sends_its_parts_in_any_order(codec: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, plain_peers=True, at_least=2)
    run, weights, optimizer = agreed()
    parts = dict(enumerate(reversed(list(plan_parts(weights, run.small_bytes)))))
    peer = ThirdPeer(fleet.server.port, codec, run, weights, optimizer, parts)
    peer.start()
    wait_until(lambda: len(fleet.server.core.membership.ready) == 1)
    fleet.add("ours", bare=True)
    check(fleet, peer)
    shared = [{row["name"] for row in record.workers if row["rows"]} for record in fleet.records]
    assert {"ours", "third peer"} in shared


def test_it_knows_nothing_of_us_but_the_bytes() -> None:
    tree = ast.parse(Path(third.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    known = {module for module in modules if (module or "").startswith(("potluck", "torch", "tests"))}
    assert known and all(module.startswith("potluck.wire.") for module in known if module)


@pytest.mark.parametrize(("rows", "seed", "epoch"), [(1, 0, 0), (2, 1, 0), (212, 1, 1), (1000, 2**63 - 1, 7)])
def test_the_order_of_rows_needs_no_torch(rows: int, seed: int, epoch: int) -> None:
    generator = torch.Generator().manual_seed(third.mix(seed, epoch))
    assert third.order_of(rows, seed, epoch) == torch.randperm(rows, generator=generator).tolist()


def test_its_hashes_are_ours() -> None:
    parameters = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 1023, 1024, 5000)]
    assert third.digest_of([parameter.numpy() for parameter in parameters]) == digest(parameters)
    model = build(bare=True)[0]
    assert third.model_hash({n: t.numpy() for n, t in model.state_dict().items()}) == describe_model(model)
    assert third.model_hash({"x": np.zeros(())}) == describe_model(_Scalar())


class _Scalar(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(()))

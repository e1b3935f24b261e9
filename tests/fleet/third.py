"""A worker of another make, written from docs/protocol.md alone: numpy, a socket, and potluck.wire for the bytes.

It knows nothing else of Potluck, and no torch. What the page does not say, or says wrongly, fails in test_third.py.
"""

import base64
import hashlib
import json
import math
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.wire.codec import decode, encode
from potluck.wire.frames import FrameReader
from potluck.wire.messages import (
    Admitted,
    Applied,
    AveragedBlockGradient,
    BlockGradientPayload,
    Committed,
    Heartbeat,
    Hello,
    JoinRequest,
    Leave,
    Message,
    Ready,
    Refusal,
    Saved,
    SaveDue,
    ShardAssignment,
    Shutdown,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    StateRequest,
    Welcome,
    Work,
)

Array = npt.NDArray[Any]
Weights = dict[str, Array]
Node = tuple[int, int]
CHUNK_BYTES = 1000
"""So small that a parcel of this small model, too, has to wait for more to be allowed."""


# What the page says of numbers


def mix(*numbers: int) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1000003 + number) % 2**63
    return mixed


def order_of(rows: int, seed: int, epoch: int) -> list[int]:
    """The epoch's shuffled order: the words of a Mersenne twister, each modulo what is left to choose from."""
    generator = np.random.RandomState(mix(seed, epoch) % 2**32)._bit_generator
    words = generator.random_raw(rows)
    order = list(range(rows))
    for place in range(rows - 1):
        other = place + int(words[place]) % (rows - place)
        order[place], order[other] = order[other], order[place]
    return order


def digest_of(parameters: list[Array]) -> str:
    sums: list[int] = []
    for parameter in parameters:
        data = parameter.tobytes()
        data += bytes(-len(data) % 4096)
        rows = [struct.unpack("<512Q", data[start : start + 4096]) for start in range(0, len(data), 4096)]
        sums += [sum(row) % 2**64 for row in rows]
        sums += [sum(column) % 2**64 for column in zip(*rows, strict=True)]
    return hashlib.blake2b(struct.pack(f"<{len(sums)}Q", *sums), digest_size=16).hexdigest()


def model_hash(weights: Weights) -> str:
    lines = [
        f"{name} ({', '.join(map(str, w.shape))}{',' * (w.ndim == 1)}) torch.float32" for name, w in weights.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def children(node: Node) -> tuple[Node, Node]:
    size = 1
    while 2 * size < node[1] - node[0]:
        size *= 2
    return (node[0], node[0] + size), (node[0] + size, node[1])


def slice_bounds(row: int, rows: int, slices: int) -> list[Node]:
    bounds = []
    for number in range(slices):
        end = row + rows // slices + (number < rows % slices)
        bounds.append((row, end))
        row = end
    return bounds


def plan_parts(weights: Weights, small_bytes: int) -> Iterator[list[str]]:
    """The names in each part: blocks and layers from the last to the first, joined while they are small."""
    units: dict[str, list[str]] = {}
    for name in weights:
        units.setdefault(re.sub(r"^(layers\.\d+)\..*|\.[^.]*$", r"\1", name), []).append(name)
    joined: list[str] = []
    for unit in reversed(list(units.values())):
        if joined and sum(weights[name].nbytes for name in unit + joined) > small_bytes:
            yield joined
            joined = []
        joined = unit + joined
    yield joined


# A parcel's files


def write_safetensors(tensors: Weights) -> bytes:
    head, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        head[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(data: bytes) -> Weights:
    (size,) = struct.unpack("<Q", data[:8])
    head, data = json.loads(data[8 : 8 + size]), data[8 + size :]
    head.pop("__metadata__", None)
    found = {}
    for name, told in head.items():
        assert told["dtype"] == "F32"
        start, end = told["data_offsets"]
        found[name] = np.frombuffer(data[start:end], "<f4").reshape(told["shape"]).copy()
    return found


def body_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# The model: a residual net over named arrays, and AdamW


def gradients_of(weights: Weights, x: Array, y: Array) -> tuple[float, Weights]:
    """The summed cross entropy of some rows, and its gradient."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    layers = sorted({name.removesuffix(".weight") for name in w if re.fullmatch(r"layers\.\d+\.0\.weight", name)})
    inputs, before = [x @ w["enter.weight"].T + w["enter.bias"]], []
    for layer in layers:
        before.append(inputs[-1] @ w[f"{layer}.weight"].T + w[f"{layer}.bias"])
        inputs.append(inputs[-1] + np.maximum(before[-1], 0))
    logits = inputs[-1] @ w["leave.weight"].T + w["leave.bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -logs[np.arange(len(y)), y].sum()
    flow = np.exp(logs)
    flow[np.arange(len(y)), y] -= 1
    found = {"leave.weight": flow.T @ inputs[-1], "leave.bias": flow.sum(axis=0)}
    flow = flow @ w["leave.weight"]
    for number, layer in reversed(list(enumerate(layers))):
        inner = flow * (before[number] > 0)
        found |= {f"{layer}.weight": inner.T @ inputs[number], f"{layer}.bias": inner.sum(axis=0)}
        flow = flow + inner @ w[f"{layer}.weight"]
    found |= {"enter.weight": flow.T @ x, "enter.bias": flow.sum(axis=0)}
    return float(loss), found


def pieces_of(weights: Weights, parts: dict[int, list[str]], averages: dict[int, Array]) -> Weights:
    """The gradient of each parameter, of averages that each hold those of a part end to end."""
    found: Weights = {}
    for part, names in parts.items():
        ends = np.cumsum([weights[name].size for name in names])[:-1]
        for name, piece in zip(names, np.split(averages[part], ends), strict=True):
            found[name] = piece.reshape(weights[name].shape).astype(np.float64)
    return found


@dataclass
class AdamW:
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    state: dict[str, Weights] = field(default_factory=dict)

    def step(self, weights: Weights, gradients: Weights) -> None:
        for name, gradient in gradients.items():
            like = weights[name].astype(np.float64)
            zero = {key: np.zeros_like(like) for key in ("exp_avg", "exp_avg_sq")} | {"step": np.zeros(())}
            own = self.state.setdefault(name, zero)
            own["step"] = own["step"] + 1
            a, b = self.betas
            own["exp_avg"] = (a * own["exp_avg"] + (1 - a) * gradient).astype(np.float32)
            own["exp_avg_sq"] = (b * own["exp_avg_sq"] + (1 - b) * gradient**2).astype(np.float32)
            count = float(own["step"])
            root = np.sqrt(own["exp_avg_sq"].astype(np.float64) / (1 - b**count)) + self.eps
            moved = like * (1 - self.lr * self.weight_decay) - self.lr / (1 - a**count) * own["exp_avg"] / root
            weights[name] = moved.astype(np.float32)

    def tensors(self) -> Weights:
        return {f"{name}/{key}": value for name, own in self.state.items() for key, value in own.items()}

    def skeleton(self, names: list[str]) -> dict[str, Any]:
        """Every setting of torch's one group, and which tensor is what of each parameter's state."""
        group = {
            "params": {"list": names}, "lr": self.lr, "betas": {"tuple": list(self.betas)}, "eps": self.eps,
            "weight_decay": self.weight_decay, "amsgrad": False, "maximize": False, "foreach": None,
            "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
        }  # fmt: skip
        state = {name: {"dict": {key: {"tensor": f"{name}/{key}"} for key in own}} for name, own in self.state.items()}
        return {"class": "AdamW", "groups": {"list": [{"dict": group}]}, "state": state}

    def load(self, skeleton: dict[str, Any], tensors: Weights) -> None:
        assert skeleton["class"] == "AdamW"
        self.state = {
            name: {key: tensors[told["tensor"]] for key, told in own["dict"].items()}
            for name, own in skeleton["state"].items()
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is agreed on out of band: nobody tells it over the wire."""

    x: Array
    y: Array
    batch: int
    slices: int
    seed: int
    epochs: int
    small_bytes: int = 1 << 20
    save_every: int = 0
    """Steps after which the host is to keep a checkpoint; 0: none is due."""

    @property
    def rows(self) -> int:
        return len(self.y)


class ThirdWorker(threading.Thread):
    def __init__(
        self,
        invite: str,
        run: Run,
        weights: Weights,
        optimizer: AdamW,
        *,
        may_compute: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """`weights`: fresh ones, in the model's order. `may_compute`: asked before a step's work until it says yes."""
        super().__init__(daemon=True)
        found = re.fullmatch(r"potluck://([^:/]+):(\d+)/([^.]*)(?:\.(.+))?", invite)
        assert found is not None
        self._address, self._secret, self._pin = (found[1], int(found[2])), found[3], found[4]
        self._agreed, self.weights, self._optimizer, self._may_compute = run, dict(weights), optimizer, may_compute
        self._parts = list(plan_parts(self.weights, run.small_bytes))
        self.version = self._epoch = self._row = self._seen = 0
        self.admitted: list[int] = []
        """How each Admitted was: 0 with its own weights, 1 with the run's."""
        self.computed: dict[int, int] = {}
        """By step: rows."""
        self.sponsored: list[int] = []
        """The steps of the states that it sent."""
        self.committed: list[dict[str, Any]] = []
        """What Committed.workers told of each step."""
        self.received: dict[str, Any] = {}
        """The body of the last parcel that it was given."""
        self.error: BaseException | None = None
        self._work: list[Work] = []
        self._commits: dict[int, Committed] = {}
        self._averages: dict[int, dict[int, Array]] = {}
        self._asked: list[StateRequest] = []
        self._sending: dict[int, Iterator[bytes]] = {}
        self._awaits_parcel = self._has_left = self._over = False
        self._due = self._saved = 0
        self._coming: tuple[int, list[tuple[str, int]], bytes] | None = None

    def run(self) -> None:
        try:
            self._connect()
            while not self._over:
                for message in self._receive():
                    self._on(message)
                while self._act():
                    pass
        except BaseException as error:
            self.error = error
        finally:
            self._socket.close()

    # The line

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, timeout=20)
        if self._pin:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._socket = encrypted = context.wrap_socket(self._socket)
            shown = hashlib.sha256(encrypted.getpeercert(binary_form=True) or b"").digest()
            assert base64.urlsafe_b64encode(shown).rstrip(b"=").decode() == self._pin
        self._reader, self._said_at = FrameReader(1 << 26), time.monotonic()
        self._send(Hello(5, self._secret, "third", "numpy"))
        (welcome,) = self._receive()
        assert isinstance(welcome, Welcome), welcome
        self.worker_id, self._beat_s = welcome.worker_id, welcome.patience_ms / 4000
        self._socket.settimeout(min(0.02, self._beat_s))
        self._send(Ready(json.dumps(self.description()), 0, self.digest(), 0))

    def _send(self, message: Message) -> None:
        self._said_at = time.monotonic()
        self._socket.sendall(encode(message))

    def _receive(self) -> list[Message]:
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            if time.monotonic() - self._said_at > self._beat_s:
                self._send(Heartbeat("third", int(time.time() * 1000)))
            return []
        if not data:
            raise ConnectionResetError("the host closed the connection")
        return [decode(bytes(payload)) for payload in self._reader.feed(data)]

    # What it is

    def description(self) -> dict[str, Any]:
        run, last = self._agreed, len(self._parts) - 1
        sizes = [[int(self.weights[name].size) for name in part] for part in self._parts]
        return {
            "parts": [{"block": last - i, "component": None, "sizes": own} for i, own in enumerate(sizes)],
            "model": model_hash(self.weights),
            "rows": run.rows,
            "batch": run.batch,
            "slices": min(run.batch, run.slices),
            "seed": run.seed,
            "unit": self.unit,
            "samples_per_row": 1.0,
            "policy": "sync",
            "settings": {},
            "rows_limit": run.epochs * run.rows,
            "told": {"name": "third"},
        }

    @property
    def unit(self) -> float:
        return 2.0 ** -round(math.log2(self._agreed.batch))

    def digest(self) -> str:
        return digest_of(list(self.weights.values()))

    @property
    def _steps(self) -> int:
        return self._agreed.epochs * math.ceil(self._agreed.rows / self._agreed.batch)

    # Messages

    def _on(self, message: Message) -> None:
        match message:
            case Admitted():
                self.admitted.append(message.wait)
                self._awaits_parcel = bool(message.wait)
                if message.wait:
                    self._work, self._commits, self._coming = [], {}, None
            case Work():
                self._work.append(message)
            case AveragedBlockGradient():
                part = len(self._parts) - 1 - message.block_idx
                self._averages.setdefault(message.step, {})[part] = np.array(message.gradients)
            case Committed():
                self._commits[message.step] = message
            case StateRequest():
                self._asked.append(message)
            case StateMore():
                self._send_chunks(message.transfer, message.chunks)
            case StateBegin():
                self._coming = message.transfer, [(name, size) for name, size in json.loads(message.header)], b""
            case StateChunk() if self._coming is not None and self._coming[0] == message.transfer:
                self._coming = *self._coming[:2], self._coming[2] + bytes(message.data)
            case Saved():
                assert not message.error, message.error
                self._saved = message.step
            case Refusal():
                raise AssertionError(message.sentence)
            case Shutdown():
                self._over = True

    def _act(self) -> bool:
        """The next thing that can be done; whether there was one."""
        step = self.version + 1
        if self._awaits_parcel:
            return self._load_parcel()
        if step in self._commits and len(self._averages.get(step, {})) == len(self._parts):
            self._apply(self._commits.pop(step), self._averages.pop(step))
            return True
        for asked in [request for request in self._asked if request.step <= self.version]:
            self._asked.remove(asked)
            self._send_state(asked.transfer)
        self._work = [work for work in self._work if step <= work.step <= self._steps]
        if self._work and self._work[0].step == step and self._may_compute(step):
            self._compute(self._work.pop(0))
            return True
        if self.version == self._steps and self._saved >= self._due and not self._has_left:
            self._has_left = True
            self._send(Leave(1, "finished"))
        return False

    # A step

    def _compute(self, work: Work) -> None:
        started, run = time.perf_counter(), self._agreed
        order = order_of(run.rows, run.seed, work.epoch)
        bounds = slice_bounds(work.row, work.rows, work.slices)
        nodes = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        sums: dict[int, Weights] = {}
        slices, samples, losses = [], [], []
        for number in (number for node in nodes for number in range(*node)):
            rows = order[slice(*bounds[number])]
            loss, found = gradients_of(self.weights, run.x[rows], run.y[rows])
            sums[number] = {name: (value * self.unit).astype(np.float32) for name, value in found.items()}
            slices.append(number)
            samples.append(float(len(rows)))
            losses.append(loss)
            self.computed[work.step] = self.computed.get(work.step, 0) + len(rows)
        told = np.array(slices, "<u4"), np.array(samples, "<f8"), np.array(losses, "<f8")
        self._send(SliceReport(work.step, *told, 0.0, b"", 0))
        for part, names in enumerate(self._parts):
            if part == len(self._parts) - 1:
                used = np.packbits(np.ones(len(self.weights), np.uint8), bitorder="little").tobytes()
                empty = np.zeros(0, "<u4"), np.zeros(0, "<f8"), np.zeros(0, "<f8")
                self._send(SliceReport(work.step, *empty, time.perf_counter() - started, used, 0))
            sizes = np.array([self.weights[name].size for name in names], "<u4")
            for node in nodes:
                flat = np.concatenate([self._sum_of(node, sums, name).ravel() for name in names])
                block = len(self._parts) - 1 - part
                self._send(BlockGradientPayload(work.step, self.worker_id, block, len(self._parts), flat, sizes))

    def _sum_of(self, node: Node, sums: dict[int, Weights], name: str) -> Array:
        if node[1] - node[0] == 1:
            return sums[node[0]][name]
        left, right = children(node)
        return self._sum_of(left, sums, name) + self._sum_of(right, sums, name)

    def _apply(self, committed: Committed, averages: dict[int, Array]) -> None:
        gradients = pieces_of(self.weights, dict(enumerate(self._parts)), averages)
        names = list(self.weights)
        used = [name for i, name in enumerate(names) if committed.used[i // 8] >> (i % 8) & 1]
        norm = math.sqrt(sum(float((gradients[name] ** 2).sum()) for name in used))
        fault = "" if math.isfinite(norm) else f"the gradient's norm ({norm}) is not finite"
        if not fault:
            self._optimizer.step(self.weights, {name: gradients[name] for name in used})
        self.version = committed.step
        self._seen += committed.rows
        self._row += committed.rows
        if self._row >= self._agreed.rows:
            self._epoch, self._row = self._epoch + 1, 0
        self.committed.append(json.loads(committed.workers))
        self._send(Applied(self.version, self.digest(), self._optimizer.lr, norm, fault, 0.0))
        if self._agreed.save_every and self.version % self._agreed.save_every == 0:
            self._due = self.version
            self._send(SaveDue(self.version, 2))
            if committed.leader == self.worker_id:
                self._send_state(0)

    # Weights for others, and from them

    def _send_state(self, transfer: int) -> None:
        files = {
            "model.safetensors": write_safetensors(self.weights),
            "optimizer.safetensors": write_safetensors(self._optimizer.tensors()),
        }
        sums = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
        body = {
            "format": 1, "files": sums, "step": self.version, "version": self.version, "rows_seen": self._seen,
            "epoch": self._epoch, "row": self._row, "left": [], "rows_in_epoch": self._agreed.rows,
            "seed": self._agreed.seed, "skipped": 0, "skipped_rows": 0, "workers": 0,
            "optimizer": self._optimizer.skeleton(list(self.weights)),
        }  # fmt: skip
        files["manifest.json"] = json.dumps({"sha256": body_hash(body), "body": body}).encode()
        whole = b"".join(files.values())
        self._sending[transfer] = (whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES))
        self._send(StateBegin(transfer, self.version, json.dumps([[n, len(data)] for n, data in files.items()])))
        if transfer:
            self.sponsored.append(self.version)

    def _send_chunks(self, transfer: int, count: int) -> None:
        chunks = self._sending.get(transfer)
        if not count:
            self._sending.pop(transfer, None)
        for _ in range(count if chunks is not None else 0):
            if (data := next(chunks, None)) is None:
                return
            self._send(StateChunk(transfer, data))

    def _load_parcel(self) -> bool:
        if self._coming is None or len(self._coming[2]) < sum(size for _, size in self._coming[1]):
            return False
        files, at = {}, 0
        for name, size in self._coming[1]:
            files[name], at = self._coming[2][at : at + size], at + size
        manifest = json.loads(files["manifest.json"])
        self.received = body = manifest["body"]
        assert manifest["sha256"] == body_hash(body)
        for name, told in body["files"].items():
            assert len(files[name]) == told["bytes"] and hashlib.sha256(files[name]).hexdigest() == told["sha256"]
        model = read_safetensors(files["model.safetensors"])
        self.weights = {name: model[name] for name in self.weights}
        self._optimizer.load(body["optimizer"], read_safetensors(files["optimizer.safetensors"]))
        self.version, self._seen, self._epoch, self._row = (
            body[name] for name in ("version", "rows_seen", "epoch", "row")
        )
        if self._row == body["rows_in_epoch"]:
            self._epoch, self._row = self._epoch + 1, 0
        self._averages = {step: found for step, found in self._averages.items() if step > self.version}
        self._commits = {step: found for step, found in self._commits.items() if step > self.version}
        self._awaits_parcel, self._coming = False, None
        self._send(Applied(self.version, self.digest(), self._optimizer.lr, 0.0, "", 0.0))
        return True


class ThirdPeer(threading.Thread):
    """A plain peer that sends its gradient part by part, in an order of its own."""

    def __init__(
        self, port: int, codec: str, run: Run, weights: Weights, optimizer: AdamW, parts: dict[int, list[str]]
    ) -> None:
        """`parts`: the names in each block, which a plain peer has to know."""
        super().__init__(daemon=True)
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._codec, self._agreed, self.weights, self._optimizer = codec, run, dict(weights), optimizer
        self._parts = parts
        self.version = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        reader, averages = FrameReader(1 << 26), dict[int, Array]()
        try:
            self._send(JoinRequest("third peer", 0, "cpu"))
            while data := self._socket.recv(1 << 16):
                for payload in reader.feed(data):
                    match decode(bytes(payload), self._codec):
                        case ShardAssignment() as work:
                            self._compute(work)
                        case AveragedBlockGradient() as average:
                            averages[average.block_idx] = np.array(average.gradients)
                            if len(averages) == len(self._parts):
                                self._apply(average.step, averages)
                                averages = {}
                        case Shutdown():
                            return
        except BaseException as error:
            self.error = error
        finally:
            self._socket.close()

    def _send(self, message: Message) -> None:
        self._socket.sendall(encode(message, self._codec))

    def _compute(self, work: ShardAssignment) -> None:
        run = self._agreed
        epoch = (work.step - 1) // math.ceil(run.rows / run.batch)
        rows = order_of(run.rows, run.seed, epoch)[work.shard_start : work.shard_end]
        _, found = gradients_of(self.weights, run.x[rows], run.y[rows])
        for block in sorted(self._parts, key=lambda block: (block + work.step) % 3):
            flat = np.concatenate([found[name].ravel() for name in self._parts[block]]) / len(rows)
            sizes = np.array([found[name].size for name in self._parts[block]], "<u4")
            self._send(BlockGradientPayload(work.step, 0, block, len(self._parts), flat.astype(np.float32), sizes))

    def _apply(self, step: int, averages: dict[int, Array]) -> None:
        self._optimizer.step(self.weights, pieces_of(self.weights, self._parts, averages))
        self.version = step

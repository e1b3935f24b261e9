"""Fine-tuning that others join, as a person would: the commands, real processes, a joiner that is killed."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from potluck.data.rows import mix
from potluck.save.checkpoint_folder import found as newest
from tests.cli.test_cli import POTLUCK, children, start, steps, wait_until
from tests.cli.test_host import invite_of
from tests.finetune.made import judge, judged_rows, make_place, padded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(place: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=200, **options)


def losses_of(run: Path) -> list[float]:
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "step_done"]


def test_two_joiners_of_which_one_is_killed_learn_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    judged = judge(place, epochs=4)
    host = start(
        place, "host", "tuned.toml", "-n", "0", "--at-least", "2", "--patience", "10", "--set", "fit.epochs=4",
    )  # fmt: skip
    folder = place / "runs" / "tuned"
    line = invite_of(folder)
    own = ("join", "--threads", "1", "--data", "rows.jsonl")
    lacking = run(place, "join", "--data", "rows.jsonl", line)
    assert lacking.returncode == 2 and "--base FOLDER" in lacking.stderr and "--fetch-base" in lacking.stderr
    first = start(place, *own, "--base", "base", line)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    second = start(place, *own, "--fetch-base", line)
    wait_until(lambda: len(steps(folder)) >= 2, timeout_s=120)
    for pid in (*children(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    out, error = host.communicate(timeout=120)
    _, said = second.communicate(timeout=60)
    assert host.returncode == 0 and second.returncode == 0, (out, error, said)
    assert "The model is in" in said and list((tmp_path / "cache" / "potluck" / "bases").glob("*/config.json"))
    assert losses_of(folder) == pytest.approx(judged["losses"], rel=1e-5)
    assert "after:" in out and f"potluck chat {Path('runs') / 'tuned'}" in out, out + error
    alone = run(place, "train", "tuned.toml", "--out", "alone", "--set", "fit.epochs=4")
    assert alone.returncode == 0, alone.stderr
    theirs, ours = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (folder, place / "alone"))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_base_of_bf16_is_trained_whole_with_masters(tmp_path: Path) -> None:
    """Two joiners, one of which is killed. The judge is a bare loop that steps masters, by the gradient of each row."""
    place = make_place(tmp_path, lora=False, dtype=torch.bfloat16)
    expected, masters = judge_masters(place, epochs=4)
    told = ("--set", "fit.epochs=4", "--set", "model.dtype=bf16", "--set", "optimizer.lr=1e-3")
    host = start(place, "host", "tuned.toml", "-n", "0", "--at-least", "2", "--patience", "10", *told)
    folder = place / "runs" / "tuned"
    line = invite_of(folder)
    own = ("join", "--threads", "1", "--data", "rows.jsonl", "--base", "base", line)
    first, second = start(place, *own), start(place, *own)
    wait_until(lambda: len(steps(folder)) >= 2, timeout_s=120)
    for pid in (*children(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    out, error = host.communicate(timeout=120)
    _, said = second.communicate(timeout=60)
    assert host.returncode == 0 and second.returncode == 0, (out, error, said)
    assert "stepped and sent as float32" in said, said
    assert losses_of(folder) == pytest.approx(expected, rel=1e-3)
    saved = load_file(newest(folder / "checkpoints")[0] / "model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.float32}
    started = load_file(place / "base" / "model.safetensors")
    moved = sum(float((master - started[name].float()).square().sum()) for name, master in masters.items()) ** 0.5
    apart = sum(float((master - saved[name]).square().sum()) for name, master in masters.items()) ** 0.5
    assert apart < 0.03 * moved, (apart, moved)  # bf16 gradients of rows that were weighted before or after
    written = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(written[name], saved[name].bfloat16()) for name in written)


def judge_masters(place: Path, epochs: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of each step, and the masters at the end."""
    import transformers as t

    tokenizer = t.AutoTokenizer.from_pretrained(place / "base")
    rows, trained = judged_rows(place, tokenizer)
    model = t.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.bfloat16).train()
    masters = {name: each.detach().float().requires_grad_() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(mix(0, epoch)))
        for part in order.split(8):
            found, total = 0.0, 0
            for row in part.tolist():
                batch = padded([rows[trained[row]]], False)
                count = int((batch["labels"][:, 1:] != -100).sum())
                loss = model(**batch).loss.float() * count
                loss.backward()
                found, total = found + loss.item(), total + count
                for name, half in model.named_parameters():
                    own, half.grad = half.grad.float(), None
                    masters[name].grad = own if masters[name].grad is None else masters[name].grad + own
            for master in masters.values():
                master.grad /= total
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, half in model.named_parameters():
                    half.copy_(masters[name])
            losses.append(found / total)
    return losses, {name: master.detach() for name, master in masters.items()}


def test_the_command_writes_a_recipe_trains_resumes_and_chats(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    told = ("finetune", "base", "rows.jsonl", "--set", "optimizer.lr=1e-2", "--set", "batch.size=4")
    written = run(place, *told, "--write", "mine.toml")
    assert written.returncode == 0 and "potluck host mine.toml" in written.stdout
    again = run(place, *told, "--write", "mine.toml")
    assert again.returncode == 2 and "is not overwritten" in again.stderr
    done = run(place, *told, "-n", "2", "--out", "here", "--set", "fit.epochs=1", "--set", "workers.threads=1")
    assert done.returncode == 0, done.stderr
    for words in ("Finished", "validation loss", "before:", "after:", "here/adapter", "potluck chat here"):
        assert words in done.stdout, done.stdout
    more = run(place, "train", "here/run.toml", "--out", "here", "--resume", "--set", "fit.epochs=2")
    assert more.returncode == 0 and "here/adapter" in more.stdout, more.stderr
    talked = run(place, "chat", "here", "--temperature", "0", "--length", "5", input="what is one and two?\n/quit\n")
    assert talked.returncode == 0 and len(talked.stdout.splitlines()) == 1, talked.stderr
    assert "Traceback" not in done.stderr + more.stderr + talked.stderr
    assert run(place, "chat", "base").returncode == 2

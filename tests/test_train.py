"""train.py: against the plainest loop, over resumes and meshes, and what it refuses."""

import argparse
import errno
import gc
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import TINY, losses_of, make_job, metrics_of, run_program, run_ranks, train_on

import checkpoint
import data
import model
import parallel
import train
import watch

ROOT = Path(__file__).parents[1]
SHARD_BATCH = "--global-batch-size 8"
CPU = train.Hardware("cpu", None, None)


# ---- 1. The program is the plainest loop -------------------------------------------------------


def plain_losses(folder, steps, seed):
    """A dozen lines without any of this project but the model and its data."""
    tokens = data.open_tokens(
        str(folder / "text"), "bytes", data_cache=folder / ".cache", is_builder=True
    )
    config = model.ModelConfig(32, 2, 4, 2, 48, **model.LLAMA_3 | {"vocab_size": 300})
    transformer = model.Transformer(config, seq_len=32)
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            p.copy_(model.draw_weight(name, p.shape, config=config, seed=seed, device="cpu"))
    optimizer = torch.optim.AdamW(
        transformer.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) / 4 if step < 4 else 0.01
        rows = range(8 * step, 8 * step + 8)
        inputs, labels = data.batch_at(tokens, rows, seq_len=32, seed=seed)
        logits = transformer(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "world_size, flags, seed", [(1, "", 0), (2, "--seed 3", 3), (4, "--dp-replicate 2", 0)]
)
def test_the_program_trains_as_the_plainest_loop(folder, world_size, flags, seed):
    schedule = "--lr 0.01 --warmup-steps 4 --decay-ratio 0"
    out = f"plain-{world_size}"
    train_on(world_size, f"{SHARD_BATCH} --steps 8 {schedule} --out {out} {flags}", folder)
    # float32 sums in another order; Adam divides by small second moments, which enlarges it
    assert losses_of(folder, out) == pytest.approx(plain_losses(folder, 8, seed), rel=1e-4)


def test_the_learning_rate_is_warmup_stable_decay():
    """Vectors worked out by hand for 10 steps."""

    def factors(flags, steps=10):
        args = train.parse_args(f"--lr 1 --steps {steps} {flags}".split())
        return [round(train.lr_at(step, args), 6) for step in range(1, steps + 1)]

    assert factors("--warmup-steps 2") == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert factors("--warmup-steps 2 --decay-ratio 0.5") == [
        0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2,
    ]  # fmt: skip
    assert factors("--warmup-steps 0") == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert factors("--warmup-steps 10", steps=5) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factors("--warmup-steps 2 --min-lr-ratio 0.2")[-1] == 0.3  # 0.2 + 0.8 / 8
    sqrt = factors("--warmup-steps 6 --decay sqrt")
    assert sqrt[7] == pytest.approx(1 - math.sqrt(1 / 4), abs=1e-6)
    cosine = factors("--warmup-steps 6 --decay cosine")
    assert cosine[7] == pytest.approx((1 + math.cos(math.pi / 4)) / 2, abs=1e-6)


def peak_of_a_step(n_chunks):
    """GiB of resident memory that one step adds, with Llama's vocabulary on a tiny model."""
    flags = "--set dim=32 n_layers=1 n_heads=2 n_kv_heads=2 ffn_dim=32 vocab_size=128256"
    _, job = make_job(f"{flags} --seq-len 1024 --loss-chunks {n_chunks}")
    inputs, labels = torch.randint(128256, (2, 1, 1024))
    before = watch.peak_memory_gib(job.device)
    train.train_step(job, inputs, labels, local_batch_size=1, max_norm=1.0)
    return watch.peak_memory_gib(job.device) - before


def test_chunks_of_the_loss_save_the_memory_of_the_logits():
    whole, chunked = (run_ranks(1, peak_of_a_step, n)[0] for n in (1, 8))
    logits = 1024 * 128256 * 4 / 2**30  # float32, 0.49 GiB
    # whole: the logits, their log-softmax, saved for the backward pass, and a gradient of them; the
    # process had some pages to spare before, so its peak grows by a little less than three copies
    assert whole > 2.8 * logits
    # an eighth of each at a time: 7/8 of three copies are gone, again but for those pages
    assert whole - chunked > 0.8 * 7 / 8 * 3 * logits, (whole, chunked)


# ---- 2. Resume ---------------------------------------------------------------------------------


def final_weights(folder, out, step):
    """The whole state of a checkpoint, read without any of this project's code."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = folder / f"{out}-{step}.pt"
    dcp_to_torch_save(folder / out / "checkpoints" / f"step-{step:08}", target)
    return torch.load(target, weights_only=True)


def flatten(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flatten(sub, f"{prefix}.{key}").items()}


def test_twenty_steps_equal_five_and_five_and_ten_bit_for_bit(folder):
    """Across an epoch boundary: the text has fewer than 20 global batches."""
    flags = f"{SHARD_BATCH} --checkpoint-every 5 --decay-ratio 0 --warmup-steps 3"
    train_on(2, f"{flags} --steps 20 --out straight", folder)
    for steps in (5, 10, 20):
        output = train_on(2, f"{flags} --steps {steps} --out resumed", folder)
    assert "resumed" in output and "at step 10" in output
    straight, resumed = metrics_of(folder, "straight"), metrics_of(folder, "resumed")
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in straight] == [row[key] for row in resumed], key
    n_tokens = json.loads(next(folder.glob(".cache/*/index.json")).read_text())["n_tokens"]
    assert (n_tokens - 1) // 32 < 20 * 8, "the text must be seen more than once"
    a, b = (flatten(final_weights(folder, out, 20)) for out in ("straight", "resumed"))
    assert a.keys() == b.keys() and any("exp_avg_sq" in key for key in a)
    assert all(torch.equal(a[key], b[key]) for key in a)


def note_windows(rank):
    """In a forked rank: write every window that is read, by its global position, to a file."""
    original = data.batch_at

    def batch_at(tokens, positions, *, seq_len, seed):
        _, windows = data.window_at(np.asarray(positions), tokens.n_windows(seq_len), seed)
        with open(f"windows-{rank}.txt", "a") as file:
            file.writelines(f"{p} {w}\n" for p, w in zip(positions, windows, strict=True))
        return original(tokens, positions, seq_len=seq_len, seed=seed)

    data.batch_at = batch_at


def test_resuming_on_other_meshes_reads_the_same_windows_and_gives_the_same_losses(folder):
    constant = "--decay-ratio 0 --warmup-steps 0 --optimizer sgd --lr 0.3"
    flags = f"{SHARD_BATCH} --checkpoint-every 3 {constant}"
    train_on(1, f"{flags} --steps 21 --out one", folder)
    meshes = (
        (1, ""), (2, ""), (4, "--tp 2"), (2, "--pp 2 --local-batch-size 4"), (2, "--cp 2"),
        (4, "--dp-replicate 2"), (1, ""),
    )  # fmt: skip
    for i, (world_size, mesh) in enumerate(meshes):
        run = f"{flags} {mesh} --steps {3 * i + 3} --out moved"
        train_on(world_size, run, folder, note_windows)
    # float32 sums in another order; SGD keeps the difference that small
    assert losses_of(folder, "moved") == pytest.approx(losses_of(folder, "one"), rel=1e-5)
    assert [row["step"] for row in metrics_of(folder, "moved")] == list(range(1, 22))
    lines = [line for path in folder.glob("windows-*.txt") for line in path.read_text().split("\n")]
    seen = dict(map(int, line.split()) for line in lines if line)
    assert sorted(seen)[: 21 * 8] == list(range(21 * 8)), "positions are consecutive"
    assert len({*lines} - {""}) == len(seen), "a position means one window on every mesh"
    n_windows = max(seen.values()) + 1
    first_epoch = [seen[p] for p in range(n_windows)]
    assert sorted(first_epoch) == list(range(n_windows)), "no window twice or left out in an epoch"


def test_a_finished_run_says_so_and_can_be_extended(folder):
    train_on(1, "--steps 2 --out finished", folder)
    assert "nothing to do" in train_on(1, "--steps 2 --out finished", folder)
    output = train_on(1, "--steps 3 --lr 0.5 --out finished", folder)
    assert "flags changed since the checkpoint" in output and "lr 0.002 -> 0.5" in output
    assert "note   another schedule from here on: by it lr was 3.33e-01 at step 2" in output
    assert "tokens, ids below 258; 3 steps are 0.08 epochs" in output
    assert [row["step"] for row in metrics_of(folder, "finished")] == [1, 2, 3]
    # the warmup is cut to the run: steps 1 and 2 of 2 to a peak of 0.002, then step 3 of 3 to 0.5
    assert [row["lr"] for row in metrics_of(folder, "finished")] == [0.001, 0.002, 0.5]
    state = json.loads((folder / "finished/checkpoints/step-00000003/train.json").read_text())
    assert (state["step"], state["sequences"], state["tokens"]) == (3, 6, 6 * 32)


def flags_of_run(typed, ranks=1):
    return vars(train.read_flags(typed.split(), CPU, ranks)[0])


@pytest.mark.parametrize(
    "now, ranks, said",
    [
        ("--steps 100", 1, []),
        ("--steps 50", 1, []),  # the run is over
        # the longer run decays from step 11 to 201: 2e-3 (1 - 89/190)
        ("--steps 200", 1, ["by it lr was 1.06e-03 at step 100, and not 2.22e-05; --lr 2.222e-05"]),
        # 4e-3 (1 - 89/91)
        ("--steps 101 --lr 0.004", 1, ["by it lr was 8.79e-05 at step 100, and not 2.22e-05"]),
        ("--steps 100", 2, ["8 to 16 sequences, .*--global-batch-size 8 --local-batch-size 4 k"]),
        ("--steps 100", 4, ["8 to 32 sequences, .*--global-batch-size 8 --local-batch-size 2 k"]),
        ("--steps 100", 3, ["goes from 8 to 24 sequences, .*; 3 data ranks cannot share 8"]),
        ("--steps 300", 2, ["another schedule from here on", "the global batch goes from 8 to 16"]),
    ],
)
def test_what_jumps_when_a_run_goes_on_is_said_with_the_flags_that_keep_it(now, ranks, said):
    was = flags_of_run("--local-batch-size 8")
    notes = train.describe_jumps(was, flags_of_run(f"--local-batch-size 8 {now}", ranks), 100)
    assert len(notes) == len(said)
    for (_, text), pattern in zip(notes, said, strict=True):
        assert re.search(pattern, text), text
        if kept := re.search(r"(--.+) keeps", text):
            kept = flags_of_run(f"--local-batch-size 8 {now} {kept[1]}", ranks)
            lr = train.lr_at(101, argparse.Namespace(**kept))
            assert kept["global_batch_size"] == 8 or lr == pytest.approx(2e-3 / 90, rel=1e-3)


def test_resuming_an_older_step_sets_the_newer_aside_and_drops_its_rows(folder):
    train_on(1, "--steps 6 --checkpoint-every 2 --out branch", folder)
    output = train_on(1, "--steps 3 --checkpoint-every 0 --resume 2 --out branch", folder)
    assert output.count("set aside") == 2
    assert [row["step"] for row in metrics_of(folder, "branch")] == [1, 2, 3]
    names = {path.name for path in (folder / "branch/checkpoints").iterdir()}
    assert "step-00000002" in names and "step-00000006" not in names and len(names) == 3


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-len 16", "has --seq-len 32, and this run --seq-len 16: to go on give"),
        ("--seed 1", "has --seed 0, and this run --seed 1: to go on give"),
        ("--set n_layers=3", "step 2 in --out fixed has --set n_layers=2, and this .* n_layers=3:"),
        ("--model 8b --set dim=64", "has --model debug, .* and this run --model 8b, --set"),
        ("--resume 7", r"--resume 7 .*steps there: 2"),
        ("--resume never", "--resume never conflicts"),
        ("--optimizer sgd", "has --optimizer adamw, and this run --optimizer sgd: to go on give"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(folder, flags, message):
    if not (folder / "fixed").exists():
        train_on(1, "--steps 2 --out fixed", folder)
    before = (folder / "fixed" / "metrics.jsonl").read_text()
    codes, outputs = run_program(1, f"{TINY} --steps 4 --out fixed {flags}", cwd=folder)
    assert codes == [1]
    assert re.search(message, outputs[0]) and "Traceback" not in outputs[0], outputs[0]
    assert "ranks  1" not in outputs[0], "nothing was built"
    assert (folder / "fixed" / "metrics.jsonl").read_text() == before


def test_a_corrupt_newest_checkpoint_is_named_and_never_replaced_by_an_older_or_fresh_start(folder):
    flags = f"{TINY} --steps 6 --checkpoint-every 2 --out corrupt"
    train_on(1, "--steps 4 --checkpoint-every 2 --out corrupt", folder)
    newest = folder / "corrupt/checkpoints/step-00000004"
    os.truncate(newest / "__0_0.distcp", 5000)
    before = (folder / "corrupt/metrics.jsonl").read_text()
    codes, outputs = run_program(1, flags, cwd=folder)
    assert codes == [1] and "Traceback" not in outputs[0], outputs[0]
    assert re.search(r"error: --resume 4 conflicts with .*step \(there: 2\)", outputs[0])
    assert (folder / "corrupt/metrics.jsonl").read_text() == before and newest.exists()
    output = train_on(1, flags.removeprefix(TINY) + " --resume 2", folder)  # what it offers
    assert "at step 2" in output and "set aside" in output
    assert [row["step"] for row in metrics_of(folder, "corrupt")] == [1, 2, 3, 4, 5, 6]


def test_init_from_takes_weights_alone_and_begins_at_step_and_window_zero(folder):
    """Into an --out that exists and is empty, and on another mesh."""
    train_on(1, f"{SHARD_BATCH} --steps 3 --lr 0.3 --optimizer sgd --out seed", folder)
    (folder / "seeded").mkdir()
    flags = f"{SHARD_BATCH} --steps 2 --lr 0.1 --warmup-steps 4 --init-from seed --out seeded"
    assert "at step 0" in train_on(2, flags, folder)
    rows = metrics_of(folder, "seeded")
    assert [(row["step"], row["tokens"]) for row in rows] == [(1, 8 * 32), (2, 16 * 32)]
    assert [row["lr"] for row in rows] == [0.05, 0.1], "the warmup, cut to 2 steps, from its start"
    config = model.ModelConfig(32, 2, 4, 2, 48, **model.LLAMA_3 | {"vocab_size": 300})
    transformer = model.Transformer(config, seq_len=32)
    stored = flatten(final_weights(folder, "seed", 3))
    stored = {key.removeprefix(".").removeprefix("model."): t for key, t in stored.items()}
    transformer.load_state_dict({n: stored[n] for n, _ in transformer.named_parameters()})
    tokens = data.open_tokens(
        str(folder / "text"), "bytes", data_cache=folder / ".cache", is_builder=True
    )
    inputs, labels = data.batch_at(tokens, range(8), seq_len=32, seed=0)
    logits = transformer(inputs).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten()).item()
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-6)  # float32 sums in another order
    assert "is not looked at" in train_on(2, flags.replace("--steps 2", "--steps 3"), folder)


def watch_the_wires(rank):
    """In a forked rank: write down, in every step, what `pretrain` is to have connected."""
    train_step, make = train.train_step, checkpoint.Checkpointer.__init__
    made, seen = [], []

    def init(self, *args, **options):
        make(self, *args, **options)
        made.append(self)

    def timeout_s(group):
        backend = group._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    def step(job, *args, **options):
        try:
            with checkpoint.hold_folder("wired"):
                is_held = False
        except ValueError:
            is_held = True
        made[0].thread.submit(int).result()  # what it was given before is done
        seen.append({
            "lock is held": is_held, "gc is on": gc.isenabled(),
            "can copy": made[0].planner.host is not None,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "timeout_s": timeout_s(dist.group.WORLD), "its own": timeout_s(made[0].group),
            "of the mesh": timeout_s(job.mesh["fsdp"].get_group()),
            "lr": [group["lr"] for group in job.optimizer.param_groups],
        })  # fmt: skip
        Path("wires.json").write_text(json.dumps(seen))
        return train_step(job, *args, **options)

    train.train_step, checkpoint.Checkpointer.__init__ = step, init
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard_limit))


def test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon(folder):
    flags = f"{SHARD_BATCH} --steps 4 --checkpoint-every 2 --lr 0.4 --warmup-steps 4 --out wired"
    train_on(1, f"{flags} --timeout-s 77", folder, watch_the_wires)
    seen = json.loads((folder / "wires.json").read_text())
    assert [row["lock is held"] for row in seen] == [True] * 4
    assert [row["gc is on"] for row in seen] == [False] * 4
    assert [row["timeout_s"] for row in seen] == [600, 77, 77, 77], "shorter after the first step"
    assert [row["of the mesh"] for row in seen] == [600, 77, 77, 77]
    assert {limit for row in seen for limit in row["files"]} == {seen[0]["files"][1]}
    assert [row["can copy"] for row in seen] == [False, True, True, True], "before the first save"
    assert min(row["its own"] for row in seen) > 600, "a checkpoint's group waits for slow disks"
    assert [row["lr"] for row in seen] == [pytest.approx([0.1 * step]) for step in (1, 2, 3, 4)]


def test_a_resumed_run_goes_on_where_the_data_stopped_and_keeps_what_it_came_from(folder):
    """Half the global batch from step 2 on; position and tokens are those of the sequences read."""
    common = "--checkpoint-every 1 --optimizer sgd --lr 0.3 --out halved"
    train_on(1, f"--global-batch-size 8 --steps 2 {common}", folder, note_windows)
    (folder / "windows-0.txt").unlink()
    train_on(1, f"--global-batch-size 4 --steps 5 --keep-latest 1 {common}", folder, note_windows)
    read = [int(line.split()[0]) for line in (folder / "windows-0.txt").read_text().splitlines()]
    assert read[:12] == list(range(16, 28)), "no window is skipped or read again"
    assert [row["tokens"] for row in metrics_of(folder, "halved")] == [
        32 * n for n in (8, 16, 20, 24, 28)
    ]
    state = json.loads((folder / "halved/checkpoints/step-00000005/train.json").read_text())
    assert (state["sequences"], state["tokens"]) == (28, 28 * 32)
    # the newest, and the one that this run was resumed from
    assert checkpoint.list_checkpoints(folder / "halved/checkpoints") == [2, 5]


class TwoKinds(torch.optim.Optimizer):
    """Momentum for matrices, at a third of the rate, and RMSprop for the rest: other slots."""

    def __init__(self, parameters, lr):
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim < 2]
        groups = [{"params": matrices, "lr_scale": 0.33}, {"params": others}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if p.ndim == 2:
                    slot = state.setdefault("momentum", torch.zeros_like(p))
                    p.sub_(slot.mul_(0.9).add_(p.grad), alpha=group["lr"])
                else:
                    state["n_seen"] = state.get("n_seen", torch.zeros(())) + (group["lr"] > 0)
                    slot = state.setdefault("square", torch.zeros_like(p))
                    slot.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                    p.sub_(p.grad / (slot.sqrt() + 1e-3), alpha=group["lr"])


def use_two_kinds(rank):
    """In a forked rank: another optimizer, and a note of the rates in every step."""
    train_step, rates = train.train_step, []

    def step(job, *args, **options):
        rates.append([(g.get("lr_scale"), g["lr"]) for g in job.optimizer.param_groups])
        Path("rates.json").write_text(json.dumps(rates))
        return train_step(job, *args, **options)

    train.train_step = step
    train.build_optimizer = lambda args, parameters: TwoKinds(parameters, args.lr)


def plain_two_kinds(folder, steps):
    """The losses of a dozen lines, with the update written out once more."""
    tokens = data.open_tokens(
        str(folder / "text"), "bytes", data_cache=folder / ".cache", is_builder=True
    )
    config = model.ModelConfig(32, 2, 4, 2, 48, vocab_size=300)
    transformer = model.Transformer(config, seq_len=32)
    weights = dict(transformer.named_parameters())
    slots = {name: torch.zeros_like(p) for name, p in weights.items()}
    losses = []
    with torch.no_grad():
        for name, p in weights.items():
            p.copy_(model.draw_weight(name, p.shape, config=config, seed=0, device="cpu"))
    for step in range(steps):
        inputs, labels = data.batch_at(tokens, range(8 * step, 8 * step + 8), seq_len=32, seed=0)
        logits = transformer(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        with torch.no_grad():
            for name, p in weights.items():
                if p.ndim == 2:
                    slots[name] = 0.9 * slots[name] + p.grad
                    p -= 0.33 * 0.03 * slots[name]
                else:
                    slots[name] = 0.9 * slots[name] + 0.1 * p.grad**2
                    p -= 0.03 * p.grad / (slots[name].sqrt() + 1e-3)
                p.grad = None
    return losses


def test_another_optimizer_keeps_its_rates_and_its_slots_on_any_mesh(folder):
    """The contract of build_optimizer, with an optimizer of two kinds of state and two rates."""
    flags = f"{SHARD_BATCH} --checkpoint-every 2 --lr 0.03 --warmup-steps 0 --decay-ratio 0"
    mesh = "--dp-shard 2 --tp 2 --out kinds"
    train_on(4, f"{flags} --steps 2 {mesh}", folder, use_two_kinds)
    train_on(4, f"{flags} --steps 4 {mesh}", folder, use_two_kinds)
    rates = json.loads((folder / "rates.json").read_text())
    assert rates == [[[0.33, 0.33 * 0.03], [None, 0.03]]] * 2
    train_on(2, f"{flags} --steps 6 --pp 2 --local-batch-size 4 --out kinds", folder, use_two_kinds)
    # float32 sums in another order, over six steps
    assert losses_of(folder, "kinds") == pytest.approx(plain_two_kinds(folder, 6), rel=1e-4)
    stored = flatten(final_weights(folder, "kinds", 6))
    stored = {key: t for key, t in stored.items() if "optimizer." in key}
    assert {key.rsplit(".", 1)[1] for key in stored if "norm" in key} == {"n_seen", "square"}
    assert {key.rsplit(".", 1)[1] for key in stored if "norm" not in key} == {"momentum"}
    assert all(n == 6 for key, n in stored.items() if key.endswith("n_seen"))


@torch.no_grad()
def scales_and_amax(job):
    """{name: (the scale with which FSDP gathers a weight in float8, 448 / its largest value)}."""
    found = {}
    state = checkpoint.build_state(job.stages, None)
    for name, weight in job.weights:
        if hasattr(weight._local_tensor, "_precomputed_scale"):  # torchao's wrapper
            largest = parallel.whole_tensor(state[f"model.{name}"]).abs().max().item()
            found[name] = weight._local_tensor._precomputed_scale.item(), 448 / largest
    return found


def scales_over_a_run(folder):
    flags = "--set dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=304 --seq-len 32 "
    flags += "--float8 tensorwise --float8-all-gather --float8-emulate --lr 0.05 --param-dtype bf16"
    found = {}
    args, job = make_job(flags)
    found["at the start"] = scales_and_amax(job)
    tokens = torch.arange(128).reshape(4, 32)
    train.train_step(job, tokens, tokens, local_batch_size=4, max_norm=1.0)
    found["after a step"] = scales_and_amax(job)
    saver = checkpoint.Checkpointer(folder, mode="sync", keep_latest=0)
    saver.save(1, job.stages, job.optimizer, {})
    saver.close()
    _, other = make_job(f"{flags} --seed 1")
    train.load(other, folder, 1, init_from=None)
    found["after a load"] = scales_and_amax(other)
    return found


def test_float8_scales_are_those_of_the_weights_whenever_these_have_changed(tmp_path):
    for found in run_ranks(2, scales_over_a_run, tmp_path):
        for moment, scales in found.items():
            assert len(scales) == 14, moment
            for name, (scale, right) in scales.items():
                assert scale == pytest.approx(right, rel=1e-6), f"{name} {moment}"
        changed = [found["at the start"][n][0] != s[0] for n, s in found["after a step"].items()]
        assert any(changed), "else the test would show nothing"


# ---- 3. Steps that go wrong --------------------------------------------------------------------


def fill_the_disk(step):
    """A `before`: rank 1 finds no space for its part of the checkpoint of a step."""

    def before(rank):
        writer = checkpoint.PublishingWriter
        write = writer.write_data

        def write_data(self, *args):
            if rank == 1 and self.final.name.endswith(f"{step:08}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, *args)

        writer.write_data = write_data

    return before


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_loud_and_training_goes_on(folder, mode):
    flags = f"--steps 6 --checkpoint-every 2 --checkpoint-mode {mode} --out full-{mode}"
    output = train_on(2, flags, folder, fill_the_disk(step=4))
    told = r"WARNING: the save of step 4 failed \(rank 1, .*No space left.*newest .* 2; training"
    assert re.search(told, output), output
    names = {path.name for path in (folder / f"full-{mode}/checkpoints").iterdir()}
    assert names == {"step-00000002", "step-00000006"}, "nothing of the failed one is left"


def test_a_last_save_that_fails_is_an_error(folder):
    flags = f"{TINY} --steps 4 --checkpoint-every 2 --out full-end"
    codes, outputs = run_program(2, flags, cwd=folder, before=fill_the_disk(step=4))
    assert codes[0] == 1 and codes[1] != 0
    assert "error: the save of step 4 failed (rank 1, " in outputs[0], outputs[0]
    assert "Traceback" not in outputs[0] + outputs[1]
    assert "resumed" in train_on(2, "--steps 4 --checkpoint-every 2 --out full-end", folder)


def kill_after(seconds, victim):
    """A `before`: the victim's process is killed that long after it starts training."""

    def before(rank):
        if rank == victim:
            original = watch.catch_signals

            def catch_signals():
                timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
                return original()

            watch.catch_signals = catch_signals

    return before


def kill_and_compare(folder, n_kills, seed):
    """Kill a rank at a random moment of a run that saves every 3 steps, again and again.

    A launch that ends before its moment does not count. Returns: how many were killed.
    """
    generator = random.Random(seed)
    flags = f"{SHARD_BATCH} --steps 40 --checkpoint-every 3 --keep-latest 2"
    if not (folder / "unkilled").exists():
        train_on(2, f"{flags} --out unkilled", folder)
    out, killed = f"killed-{seed}", 0
    for _ in range(2 * n_kills):
        if killed == n_kills:
            break
        before = kill_after(generator.uniform(0.0, 1.5), generator.randrange(2))
        codes, outputs = run_program(2, f"{TINY} {flags} --out {out}", cwd=folder, before=before)
        killed += -signal.SIGKILL in codes
        assert "is published but" not in outputs[0], outputs[0]
        if (folder / f"{out}/checkpoints/step-00000040").exists():
            shutil.rmtree(folder / out)  # it got to the end: start over
    train_on(2, f"{flags} --out {out}", folder)
    assert losses_of(folder, out) == losses_of(folder, "unkilled")
    return killed


def test_killed_runs_resume_to_the_same_losses_bit_for_bit(folder):
    assert kill_and_compare(folder, n_kills=3, seed=1) == 3


@pytest.mark.soak
def test_fifty_kills_lose_nothing(folder):
    assert kill_and_compare(folder, n_kills=50, seed=2) == 50


def test_a_step_that_is_not_there_is_refused_on_every_rank(folder):
    codes, outputs = run_program(2, f"{TINY} --resume 7 --out none", cwd=folder)
    assert codes[0] == 1 and "--resume 7 is not among" in outputs[0]
    assert "Traceback" not in outputs[0] + outputs[1]


def step_without_labels():
    _, job = make_job(TINY)
    inputs = torch.zeros(2, 32, dtype=torch.int64)
    labels = torch.full((2, 32), -100)
    options = {"local_batch_size": 2, "max_norm": 1.0}
    return train.train_step(job, inputs, labels, **options).tolist()


def test_a_batch_without_a_valid_label_has_zero_loss_and_gradient():
    for stats in run_ranks(2, step_without_labels):
        assert stats == [0.0] * 5


def evaluate_on_ranks(folder, n_sequences):
    """Validation loss of this many windows on this mesh, and by one plain forward."""
    args, job = make_job(TINY)
    tokens = data.open_tokens(
        str(folder / "text"), "bytes", data_cache=folder / ".cache", is_builder=True
    )
    tokens.n_windows = lambda seq_len: n_sequences
    inputs, labels = data.validation_batch_at(tokens, range(n_sequences), seq_len=32)
    plain = model.Transformer(job.config, seq_len=32)
    plain.load_state_dict({name: parallel.whole_tensor(weight) for name, weight in job.weights})
    logits = plain(inputs).flatten(0, 1)
    reference = torch.nn.functional.cross_entropy(logits, labels.flatten())
    sizes = {"local_batch_size": args.local_batch_size, "val_steps": 9}
    return train.evaluate(job, tokens, seq_len=32, **sizes), reference.item()


@pytest.mark.parametrize("n_sequences", [3, 4, 7])
def test_validation_weighs_tokens_and_ends_on_ranks_with_unequal_shares(folder, n_sequences):
    for loss, reference in run_ranks(2, evaluate_on_ranks, folder, n_sequences):
        assert loss == pytest.approx(reference, rel=1e-6)


def test_validation_under_a_pipeline_and_the_row_it_is_logged_in(folder):
    flags = f"{SHARD_BATCH} --steps 3 --val-data text --val-every 2 --optimizer sgd --lr 0.3"
    said = train_on(1, f"{flags} --out val-1", folder)
    assert "--val-data holds the same tokens, and tells nothing of other text" in said
    train_on(2, f"{flags} --pp 2 --local-batch-size 4 --out val-pp", folder)
    one, two = metrics_of(folder, "val-1"), metrics_of(folder, "val-pp")
    assert [row["step"] for row in one if "val_loss" in row] == [2, 3]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        # the first batches hold other windows where the local batch differs, so not exactly equal
        assert ("val_loss" in a) == ("val_loss" in b)


# ---- 4. Refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, flags, message",
    [
        (1, "--steps 0", "--steps 0 must be at least 1"),
        (1, "--lr 0", "--lr 0 must be a number greater than 0"),
        (1, "--lr inf", "--lr inf must be a number greater than 0"),
        (1, "--set rope_factor=0", "--set rope_factor=0.0 must be a number greater than 0"),
        (1, "--set rope_theta=-5", "--set rope_theta=-5.0 must be a number greater than 0"),
        (1, "--set norm_eps=nan", "--set norm_eps=nan must be a number greater than 0"),
        (1, "--set norm_eps=inf", "--set norm_eps=inf must be a number greater than 0"),
        (1, "--step 5", "unrecognized argument: --step: try --steps"),
        (1, "--batch-size 5", "--batch-size: try .*--local-batch-size or --global-batch-size"),
        (1, "--learning-rate 1", "unrecognized argument: --learning-rate: try --lr"),
        (1, "--data README.md pyproject.toml", "in a glob's place; quote it, as in --data 'c4/"),
        (1, "--ac 0", "--ac 0 must be none, full, op or a number"),
        (128, "--tp 8 --pp 16", "--model with more layers, or --set n_layers=14 or more"),
        (1, "@nowhere.args", "@nowhere.args cannot be read .*No such file.*recipes/"),
        (1, "--eps nan", "--eps nan must be a number greater than 0"),
        (1, "--weight-decay nan", "--weight-decay nan must be at least 0"),
        (1, "--min-lr-ratio nan", "--min-lr-ratio nan must be between 0 and 1"),
        (1, "--seq-len many", "--seq-len invalid number value: 'many'"),
        (1, "--profile-steps 5:3", "--profile-steps 5:3 must be FIRST:LAST"),
        (1, "--model 7b", "--model invalid choice: '7b'"),
        (1, "--simulate 8", "run `python simulate.py` with the same flags and --world-size N"),
        (1, "--memory-snapshot", "--memory-snapshot conflicts with a CPU"),
        (1, "--beta2 1.5", "--beta2 1.5 must be between 0 and 1"),
        (4, "--dp-shard 8", "make 8 ranks, but the world size is 4.*try --dp-shard 4"),
        (4, "--dp-replicate 3", "make 3 ranks, but the world size is 4.*multiple of 3 ranks"),
        (4, "--dp-shard 0", "--dp-shard 0 must be at least 1"),
        (4, "--tp -2", "--tp -2 must be at least 1"),
        (4, "--dp-shard -1 --dp-replicate -1", "--dp-replicate -1 must be at least 1"),
        (2, "--global-batch-size 12", "multiple of --local-batch-size 4 times 2.*8 or 16"),
        (2, "--local-batch-size 0", "--local-batch-size 0 must be at least 1"),
        (8, "--tp 8 --model 1b --set n_kv_heads=4", "--tp 8 must divide n_kv_heads 4.*1 or 2 or 4"),
        (3, "--tp 3 --set n_heads=3 n_kv_heads=3 dim=384", "--tp 3 must divide ffn_dim|seq-len"),
        (8, "--tp 8 --seq-len 100", "--seq-len 100 must be a multiple of 8.*96 or 104"),
        (4, "--cp 4 --seq-len 100", "--seq-len 100 must be a multiple of 8.*96 or 104"),
        (2, "--pp 2 --model 1b", "--pp 2 and tied embeddings"),
        (2, "--pp 2 --microbatch-size 3 --local-batch-size 8", "--microbatch-size 3.*6 or 9"),
        (1, "--float8 tensorwise", "--float8 tensorwise conflicts with a CPU"),
        (1, "--float8-emulate", "--float8-emulate conflicts with --float8"),
        (1, "--float8 rowwise --float8-emulate --float8-filter wq,x", "--float8-filter x matches"),
        (2, "--pp 2 --stages-per-rank 2", "--stages-per-rank 2 conflicts with --pp-schedule 1F1B"),
        (2, "--pp 2 --pp-split layers.1,layers.2", "makes 3 stages.*needs 2"),
        (2, "--pp 2 --pp-split layers.9", "--pp-split layers.9 conflicts with n_layers 6"),
        (1, "--pp-split layers.1", "--pp is 1, so that there is no pipeline; add --pp 2"),
        (16, "--pp 16 --model 8b --local-batch-size 8", "--pp-schedule 1F1B with --pp 16 conf"),
        (8, "--pp 8 --set n_layers=5 --local-batch-size 16", "conflicts with n_layers 5"),
        (2, "--pp 2 --pp-schedule none.csv", "--pp-schedule none.csv cannot be read"),
        (2, "--pp 2 --pp-schedule ZBVZeroBubble --ac op", "--ac op conflicts"),
        (2, "--pp 2 --pp-schedule DualPipeV --compile", "--compile conflicts"),
        (2, "--pp 2 --pp-schedule ZBVZeroBubble --reshard always", "--reshard always conflicts"),
        (2, "--tp 2 --async-tp", "--async-tp conflicts with no --compile"),
        (1, "--async-tp --compile", "--async-tp conflicts with --tp 1"),
        (1, "--loss-chunks 3", "--loss-chunks 3 must divide the 256 tokens"),
        (1, "--val-every 3", "--val-every 3 would do nothing: --val-data is not given"),
        (1, "--set n_layerz=3", "--set n_layerz=3 names no field"),
        (1, "--set n_layers=three", "--set n_layers=three is not of type int"),
        (1, "--set n_heads=7", "--set dim=256 .* must be a multiple of 2 x n_heads = 14"),
        (1, "--set n_layers=0", "--set n_layers=0 must be at least 1"),
        (1, "--keep-latest -1", "--keep-latest -1 must be at least 0"),
        (1, "--out /dev/null/x", "--out /dev/null/x cannot be made"),
        (1, "--ac sometimes", "--ac sometimes must be none, full, op or a number: try op"),
        (1, "--tpp 2", "unrecognized argument: --tpp: try --tp"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_any_rank_waits(world_size, flags, message):
    with pytest.raises(ValueError) as error:
        train.read_flags(flags.split(), CPU, world_size)
    assert re.search(message, str(error.value)), error.value


@pytest.mark.parametrize(
    "ranks, flags, dp_shard, local, whole",
    [
        (1, "", 1, 4, 4),
        (4, "--dp-replicate 2", 2, 4, 16),
        (8, "--dp-replicate 2 --tp 2", 2, 4, 16),
        (4, "--cp 2", 2, 4, 8),
        (8, "--pp 8 --model 8b", 1, 8, 8),  # 1F1B: a microbatch for each stage
        (4, "--pp 4 --pp-schedule LoopedBFS --microbatch-size 2 --model 8b", 1, 16, 16),
        (4, "--local-batch-size 3 --global-batch-size 24", 4, 3, 24),
    ],
)
def test_what_is_not_given_follows_from_the_mesh(ranks, flags, dp_shard, local, whole):
    args, _ = train.read_flags(flags.split(), CPU, ranks)
    assert (args.dp_shard, args.local_batch_size, args.global_batch_size) == (
        dp_shard, local, whole,
    )  # fmt: skip
    assert args.param_dtype == "fp32"
    gpu = train.Hardware("cuda", (9, 0), None)
    assert train.read_flags(flags.split(), gpu, ranks)[0].param_dtype == "bf16"


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\xef\xbb\xbf--steps 7\n", None),  # the mark of an editor
        ("--steps 7\n".encode("utf-16"), "cannot be read .*text file of flags in UTF-8"),
        (b"--steps 7\n# it's a comment\n", None),
        (b"--steps 7\n--data it's\n", r"line 2 \(--data it's\): No closing quotation"),
    ],
)
def test_a_file_of_flags_is_read_or_named_with_its_line(content, said, tmp_path):
    path = tmp_path / "some.args"
    path.write_bytes(content)
    if said is None:
        assert train.parse_args([f"@{path}"]).steps == 7
    else:
        with pytest.raises(ValueError, match=f"@{path}.*{said}"):
            train.parse_args([f"@{path}"])


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 alone in the environment starts no job"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE= alone in the environment"),
        ({"RANK": "0"}, "RANK=0 alone in the environment"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment must be a number"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "srun has started 8 tasks"),
    ],
)
def test_ranks_that_torchrun_did_not_start_are_refused(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        train.check_environment()
        train.from_torchrun("WORLD_SIZE")


def test_what_torchrun_starts_under_slurm_is_fine(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    for name in names:
        monkeypatch.setenv(name, "4")
    train.check_environment()


def test_a_missing_compiler_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="--compile conflicts with this host, where none of c"):
        train.read_flags(["--compile"], CPU, 1)
    train.read_flags(["--compile"], train.Hardware("cuda", (9, 0), None), 1)


def test_validation_text_is_blamed_by_its_own_flag(folder):
    argv = shlex.split(f"{TINY} --val-data nowhere --val-every 1".replace("text", f"{folder}/text"))
    args, config = train.read_flags([*argv, "--data-cache", f"{folder}/.cache"], CPU, 1)
    with pytest.raises(ValueError, match="^--val-data nowhere names no text"):
        train.open_texts(args, config)


def test_a_model_without_memory_is_refused_once_and_in_bytes(folder):
    """On a host of two ranks that has 5 MB: 416,640 bytes of states fit, 8 MB of a head do not."""
    codes, outputs = run_program(
        2, f"{TINY} --steps 1 --set vocab_size=66000 --out unfit", cwd=folder, before=have_5_mb
    )
    assert codes[0] == 1 and "Traceback" not in outputs[0]
    # a rank's half of 4,223,040 + 2,048 parameters four times, and the head whole
    said = r"memory: rank 0 needs ([\d,]+) bytes .* has ([\d,]+) for"
    ((needed, there),) = re.findall(said, outputs[0])
    n_parameters = 2 * 66000 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 64) + 32
    assert int(needed.replace(",", "")) == 4 * (4 * n_parameters // 2 + 66000 * 32)
    assert there == "2,500,000"
    assert "model  debug" in outputs[0].split("error:")[0], "the plan comes first"
    flags = f"{TINY} --steps 1 --set vocab_size=66000 --out unfit --ignore-memory"
    assert run_program(2, flags, cwd=folder, before=have_5_mb)[0] == [0, 0]


def have_5_mb(rank):
    watch.free_host_bytes = lambda: 5_000_000


def test_the_allocator_grows_its_segments_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    now, before = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # its names
    for given, expected in (
        ({}, {now: "expandable_segments:True"}), ({now: "x"}, {now: "x"}), ({before: "x"}, {}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for name in (now, before):
                patch.setenv(name, "")  # noted, so that what there was comes back
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value)
            train.init_distributed(train.parse_args([]), CPU)
            assert {n: os.environ[n] for n in (now,) if n in os.environ} == expected


MOOT = {  # a setting that would do nothing -> what the refusal says is missing
    "--val-data text": "--val-every is 0",
    "--val-steps 3": "--val-every is 0",
    "--profile-steps 90:101": "the run ends at --steps 100",
    "--pp-end-weights 2 2": "--pp is 1",
    "--stages-per-rank 1": "--pp is 1",
    "--no-loss-parallel": "--tp is 1",
    "--float8-filter wq": "--float8 is not given",
    "--checkpoint-every 0 --keep-latest 3": "--checkpoint-every is 0",
    "--checkpoint-every 0 --checkpoint-mode sync": "--checkpoint-every is 0",
    "--optimizer sgd --beta1 0.5": "--optimizer sgd has no such number",
    "--optimizer sgd --beta2 0.5": "--optimizer sgd has no such number",
    "--optimizer sgd --eps 1": "--optimizer sgd has no such number",
}
FULFILLED = {  # the same with what it needs; ranks
    "--val-data text --val-every 5 --val-steps 3": 1,
    "--profile-steps 90:100": 1,
    "--pp 2 --pp-end-weights 2 2": 2,
    "--pp 2 --stages-per-rank 1": 2,
    "--tp 2 --no-loss-parallel": 2,
    "--float8 rowwise --float8-emulate --float8-filter wq": 1,
    "--keep-latest 3 --checkpoint-mode sync": 1,
    "--beta1 0.5 --beta2 0.5 --eps 1": 1,
    "--optimizer sgd --beta1 0.9 --keep-latest 10 --microbatch-size 1": 1,  # defaults may be typed
}


@pytest.mark.parametrize("flags", MOOT)
def test_a_setting_that_would_do_nothing_is_refused(flags):
    typed = flags.split("--")[-1].split()[0]
    with pytest.raises(ValueError) as error:
        train.read_flags(flags.split(), CPU, 1)
    said = f"--{typed} .*would do nothing: .*{MOOT[flags]}.*leave --{typed} out"
    assert re.match(said, str(error.value))


@pytest.mark.parametrize("flags", FULFILLED)
def test_a_setting_with_what_it_needs_is_taken(flags):
    train.read_flags(flags.split(), CPU, FULFILLED[flags])


def test_weights_of_the_ends_beside_a_split_by_name_are_refused():
    flags = "--pp 2 --pp-split layers.3 --pp-end-weights 2 2"
    with pytest.raises(ValueError, match="--pp-split layers.3 says where to cut; give one of the"):
        train.read_flags(flags.split(), CPU, 2)


def test_groups_of_heads_under_cp_are_refused_on_a_gpu_unless_in_bf16():
    h100 = train.Hardware("cuda", (9, 0), None)
    flags = "--cp 2 --set n_kv_heads=4 --param-dtype"
    with pytest.raises(ValueError, match="--param-dtype fp32 conflicts with --cp 2 .*try --param"):
        train.read_flags([*flags.split(), "fp32"], h100, 2)
    train.read_flags([*flags.split(), "bf16"], h100, 2)
    train.read_flags([*flags.split(), "fp32"], CPU, 2)
    train.read_flags("--cp 2 --param-dtype fp32".split(), h100, 2)  # a key for every head


def test_what_a_recipe_may_hold_in_vain_is_noted():
    """A schedule without a pipeline, as where `--pp 1` overrides a recipe's, and a long warmup."""
    recipe = [f"@{ROOT}/recipes/llama3_405b.args", *"--pp 1 --steps 9".split()]
    args, _ = train.read_flags(recipe, train.Hardware("cuda", (9, 0), None), 32)
    assert train.describe_moot(args) == [
        ("note", "--warmup-steps 600 is cut to --steps 9"),
        ("note", "--pp-schedule Interleaved1F1B does nothing, as --pp is 1"),
        ("note", "--microbatch-size 2 does nothing, as --pp is 1"),
    ]
    h100, flags = train.Hardware("cuda", (9, 0), None), "--tp 2 --compile --async-tp --float8"
    for recipe, noted in (("tensorwise", 0), ("rowwise", 1), ("rowwise_with_gw_hp", 1)):
        args, _ = train.read_flags([*flags.split(), recipe], h100, 2)
        notes = train.describe_moot(args)
        assert ["overlaps no all-gather" in text for _, text in notes] == [True] * noted


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--data nowhere", "--data nowhere"),
        ("--data empty", "--data empty"),
        ("--tokenizer text/00.txt", "--tokenizer text/00.txt"),
        ("--set vocab_size=100", "--tokenizer bytes has 258 tokens.*vocab_size=258"),
        ("--data text/00.txt --global-batch-size 64", "of --seq-len 32, but 64 are needed"),
    ],
)
def test_data_that_cannot_work_is_refused_once(folder, flags, message):
    (folder / "empty").mkdir(exist_ok=True)
    codes, outputs = run_program(2, f"{TINY} --out refused {flags}", cwd=folder)
    assert codes[0] == 1 and codes[1] != 0
    assert re.search(message, outputs[0]) and outputs[1] == "", outputs
    assert outputs[0].count("error: ") == 1 and "Traceback" not in outputs[0]


def test_two_runs_cannot_write_into_one_folder(folder):
    with checkpoint.hold_folder(folder / "locked"):
        codes, outputs = run_program(1, f"{TINY} --steps 1 --out locked", cwd=folder)
    assert codes == [1] and "is in use by" in outputs[0]


DIES_ONCE = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
original, calls = train.train_step, []
def train_step(*args, **options):
    calls.append(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)
train.train_step = train_step
train.run()
"""


def test_torchrun_restarts_after_a_killed_rank_and_the_run_resumes_by_itself(folder):
    (folder / "dies_once.py").write_text(DIES_ONCE.format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    flags = f"{TINY} --steps 9 --checkpoint-every 2 --checkpoint-mode sync --out restarted"
    result = subprocess.run(
        [*command, "--max-restarts", "1", "dies_once.py", *shlex.split(flags)],
        cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "resumed restarted/checkpoints at step 4" in result.stdout
    assert [row["step"] for row in metrics_of(folder, "restarted")] == list(range(1, 10))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SLURM = {  # stand-ins: one node, and a job step that is the process srun turns into
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> scontrol.log',
    "scancel": 'kill -USR1 "$(cat step.pid)"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ > step.pid; exec "$@"',
}


def test_slurm_logs_into_a_folder_that_a_clean_clone_has():
    (log,) = re.findall(r"^#SBATCH --output=(.+)$", (ROOT / "recipes/slurm.sh").read_text(), re.M)
    assert Path(log).parent == Path(), "SLURM makes no folder"


def test_a_slurm_job_saves_when_warned_requeues_itself_and_resumes(folder):
    """recipes/slurm.sh with 2 ranks: SIGUSR1 to the batch shell, then the same script once more."""
    (folder / "bin").mkdir()
    for name, body in SLURM.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    script = (
        (ROOT / "recipes/slurm.sh").read_text().replace("--nproc-per-node 8", "--nproc-per-node 2")
    )
    (folder / "slurm.sh").write_text(script.replace("29500", str(free_port())))
    (folder / "train.py").symlink_to(ROOT / "train.py")
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_JOB_ID": "42", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
    flags = shlex.split(f"{TINY} --steps 2000 --checkpoint-every 2000 --out slurm")
    run = subprocess.Popen(
        ["bash", "slurm.sh", *flags], cwd=folder, env=os.environ | job, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    rows, deadline = folder / "slurm/metrics.jsonl", time.monotonic() + 60
    while not (rows.exists() and rows.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.send_signal(signal.SIGUSR1)
    try:
        output, _ = run.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    step = int(re.search(r"stopped by SIGUSR1 at step (\d+)", output)[1])
    assert run.returncode == 0
    assert (folder / "scontrol.log").read_text() == "requeue 42\n"
    flags[flags.index("2000")] = str(step + 2)
    again = subprocess.run(
        ["bash", "slurm.sh", *flags], cwd=folder, env=os.environ | job, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert f"at step {step}" in again.stdout
    assert (folder / "scontrol.log").read_text() == "requeue 42\n", "once, and not at its end"


HOST_DIES = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
original, calls = train.train_step, []
def train_step(*args, **options):
    calls.append(1)
    if "HOST_DIES" in os.environ and len(calls) == 8:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)
train.train_step = train_step
train.run()
"""


def test_when_a_host_is_lost_the_other_goes_on_with_fewer_ranks(folder):
    """Two agents; one is killed with its rank and never comes back."""
    (folder / "host_dies.py").write_text(HOST_DIES.format(root=str(ROOT)))
    flags = f"{SHARD_BATCH} --steps 12 --checkpoint-every 3 --optimizer sgd --lr 0.3 --out"
    port = free_port()
    # with torchrun's own 15 s without a heartbeat and 30 s for late comers this would take a minute
    seconds = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
                "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"{seconds},is_host={host}",
                "host_dies.py", *shlex.split(f"{TINY} {flags} fewer --checkpoint-mode sync"),
            ],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | ({} if host else {"HOST_DIES": "1"}),
        )
        for host in (1, 0)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, -signal.SIGKILL], outputs
    # rank 0 may be on either host, and only it prints
    assert any("ranks  2 on cpu" in stdout for stdout, _ in outputs), outputs
    assert "ranks  1 on cpu" in outputs[0][0] and "at step 6" in outputs[0][0]
    train_on(1, f"{flags} as-one", folder)
    assert [row["step"] for row in metrics_of(folder, "fewer")] == list(range(1, 13))
    # float32 sums in another order; SGD keeps the difference that small
    assert losses_of(folder, "fewer") == pytest.approx(losses_of(folder, "as-one"), rel=1e-5)


def test_two_agents_form_one_job(folder):
    """As on two hosts: each starts its own torchrun, and they meet at a rendezvous."""
    port = free_port()
    flags = f"{TINY} --steps 2 --optimizer sgd --lr 0.3 --local-batch-size 4 --out"
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
                str(node), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                f"127.0.0.1:{port}", str(ROOT / "train.py"), *shlex.split(flags), "agents",
                "--pp", "2", "--tp", "2",
            ],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    train_on(1, flags.removeprefix(TINY) + " one-agent", folder)
    assert losses_of(folder, "agents") == pytest.approx(losses_of(folder, "one-agent"), rel=1e-5)


@pytest.mark.parametrize("name, ranks", [("8b", 8), ("70b", 256), ("405b", 512)])
def test_the_recipes_pass_every_check_on_the_hardware_they_are_for(name, ranks):
    h100 = train.Hardware("cuda", (9, 0), 95 * 2**30)
    args, _ = train.read_flags([f"@{ROOT}/recipes/llama3_{name}.args"], h100, ranks)
    assert args.global_batch_size == {"8b": 16, "70b": 512, "405b": 128}[name]  # the paper's


def test_flags_come_from_files_and_later_ones_win(tmp_path):
    path = tmp_path / "some.args"
    path.write_text("# a comment\n--steps 7 --lr 0.5  # another\n--set n_layers=2\n")
    args = train.parse_args([f"@{path}", "--lr", "0.25", "--set", "dim=64"])
    assert (args.steps, args.lr, args.set) == (7, 0.25, ["n_layers=2", "dim=64"])

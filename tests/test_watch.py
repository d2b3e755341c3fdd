"""watch.py: what a run writes, what ranks compare, and how it ends."""

import errno
import json
import math
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import TINY, losses_of, metrics_of, run_program, run_ranks, train_on

import checkpoint
import data
import parallel
import train
import watch

ROOT = Path(__file__).parents[1]
SHARD_BATCH = "--global-batch-size 8"
WRITER = "checkpoint:PublishingWriter"


# ---- 1. What ranks must have in common ---------------------------------------------------------


def differences_on_ranks(facts):
    return watch.find_differences(facts[dist.get_rank()])


def test_the_larger_group_is_right_and_a_tie_goes_to_rank_0():
    """One fact that all ranks have, one that three have, and one that they agree in."""
    facts = [
        {"step": 3, "batch": 7, "alone": 1},
        {"step": 3, "batch": 8},
        {"step": 4, "batch": 8},
        {"step": 3, "batch": 7, "list": [1]},
    ]
    for found in run_ranks(4, differences_on_ranks, facts):
        assert found == [("step", 3, {2: 4}, [0, 1, 3]), ("batch", 7, {1: 8, 2: 8}, [0, 3])]


def poison_gradient(rank):
    """In a forked rank: rank 1's gradient of one parameter is Inf at the third step."""
    original, calls = parallel.clip_grad_norm, []

    def clip_grad_norm(parameters, max_norm, mesh):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            parallel.local_tensor(parameters[1].grad).flatten()[0] = math.inf
        return original(parameters, max_norm, mesh)

    parallel.clip_grad_norm = clip_grad_norm


@pytest.mark.parametrize("every", [0, 1])
def test_a_gradient_that_is_not_finite_stops_all_ranks_and_is_not_saved(folder, every):
    """Steps that log nothing; where nothing is saved either, it is noticed one step later."""
    out = f"poisoned-{every}"
    flags = f"{TINY} --steps 9 --log-every 100 --checkpoint-every {every} --out {out}"
    codes, outputs = run_program(2, flags, cwd=folder, before=poison_gradient)
    assert codes[0] == 1 and codes[1] != 0
    assert "step 3 gave loss" in outputs[0] and "gradient norm inf" in outputs[0], outputs[0]
    if every:  # else step 4 has carried it on
        assert re.search(r"Loss not finite on ranks none; .* on ranks \[1\]: layers", outputs[0])
    assert checkpoint.list_checkpoints(folder / out / "checkpoints") == [1, 2][: 2 * every]


def compare_batches(inputs):
    """What check_ranks says where rank 1 has another token."""
    inputs = inputs.clone()
    inputs[0, 5] += dist.get_rank()
    try:
        watch.check_ranks(7, inputs, 0, [])
    except watch.TrainingError as error:
        return str(error)


def test_ranks_of_one_data_rank_that_read_another_token_are_named():
    for said in run_ranks(2, compare_batches, torch.zeros(2, 16, dtype=torch.int64)):
        assert said and said.startswith("step 7: ranks [1] differ from [0] in batch 0"), said


def drift(rank):
    """In a forked rank: rank 1's copy of a weight changes by one bit before the third check."""
    original = watch.check_ranks

    def check_ranks(step, inputs, data_rank, weights):
        weights = dict(weights)
        if rank == 1 and step == 3:
            weight = watch.local_tensor(weights["layers.0.ffn_norm.weight"].detach())
            weight.view(torch.int32)[0] ^= 1
        return original(step, inputs, data_rank, weights.items())

    watch.check_ranks = check_ranks


@pytest.mark.parametrize("mesh", ["--dp-replicate 2", "--tp 2"])
def test_a_rank_that_drifts_by_one_bit_is_named(folder, mesh):
    flags = f"{TINY} --steps 5 {mesh} --check-ranks-every 1 --checkpoint-every 0 --out drift"
    codes, outputs = run_program(2, flags, cwd=folder, before=drift)
    assert codes[0] == 1
    expected = "step 3: ranks [1] differ from [0] in weight layers.0.ffn_norm.weight"
    assert expected in outputs[0], outputs[0]


def change_the_text(folder_name):
    """A `before`: rank 1 sees one document less in this folder."""

    def before(rank):
        original = data.open_tokens

        def open_tokens(path, *args, **options):
            if path == folder_name and rank == 1:
                path, options = f"{path}/0*.txt", options | {"is_builder": True}
            return original(path, *args, **options)

        data.open_tokens = open_tokens

    return before


@pytest.mark.parametrize("flag", ["data", "val-data"])
def test_ranks_that_see_other_text_are_told_so(folder, flag):
    if not (folder / "text2").exists():
        shutil.copytree(folder / "text", folder / "text2")
    flags = f"{TINY} --val-data text2 --val-every 1 --out other-{flag}"
    changed = {"data": "text", "val-data": "text2"}[flag]
    codes, outputs = run_program(2, flags, cwd=folder, before=change_the_text(changed))
    assert codes[0] == 1
    said = rf"error: --{flag} \(its tokens\) is \w+ on rank 1 and \w+ on rank 0"
    assert re.search(said, outputs[0]), outputs[0]


# ---- 2. Numbers --------------------------------------------------------------------------------


def log_two_rows(folder):
    """Four steps in 8 s, then 3 s of something else, then two steps in 1 s."""
    clock = [100.0]
    watch.time = SimpleNamespace(perf_counter=lambda: clock[0])  # in this forked rank only
    metrics = watch.Metrics(
        folder, torch.device("cpu"), steps=(5, 20), tokens_per_step=640, flops_per_token=3e9,
        peak_tflops=2.0, tensorboard=False,
    )  # fmt: skip
    metrics.data_s += 0.5
    metrics.data_s += 1.5
    metrics.loss_sum += torch.tensor(11.0)
    stats = watch.Stats(2.5, 0.7, 600.0, 1.2, 0.0)
    clock[0] = 111.0
    metrics.log(8, stats, lr=0.1, tokens=5120, now_s=108.0, val_loss=None)
    clock[0] = 112.0
    metrics.data_s += 0.25
    metrics.loss_sum += torch.tensor(6.0)
    metrics.log(10, stats, lr=0.2, tokens=6400, now_s=112.0, val_loss=2.25)
    metrics.close()
    return watch.peak_memory_gib(metrics.device)


def test_the_numbers_of_a_row_are_those_of_the_steps_since_the_last(tmp_path, capfd):
    peaks = run_ranks(2, log_two_rows, tmp_path)
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first.pop("memory_gib") == pytest.approx(peaks[0], rel=0.2)
    rates = {"tokens_per_s": 4 * 640 / 8, "tokens_per_s_per_device": 160.0}  # two ranks
    rates |= {"tflops": 160 * 3e9 / 1e12, "mfu": 0.24, "data_s": 2.0 / 4}
    assert first == pytest.approx(
        {"step": 8, "loss": 2.5, "grad_norm": 0.7, "lr": 0.1, "tokens": 5120, **rates}
        | {"alloc_retries": None, "loss_mean": 11 / 4}
    )
    assert second["tokens_per_s"] == 2 * 640 / 1.0 and second["data_s"] == 0.25 / 2
    assert second["loss_mean"] == 6 / 2
    assert second["val_loss"] == 2.25 and "val_loss" not in first
    printed = capfd.readouterr().out.splitlines()
    assert "left" not in printed[0], "the first steps tell nothing: they compile, for one"
    assert printed[1].endswith("val 2.2500  0:00:05 left") and len(printed) == 2, "rank 0 alone"


def resume_on_a_full_disk(folder):
    """Rows after the resumed step are to be dropped, but nothing new can be written."""
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch.Path.write_text = full  # in this forked rank only
    options = {"tokens_per_step": 1, "flops_per_token": 1, "peak_tflops": None}
    watch.Metrics(folder, torch.device("cpu"), steps=(3, 9), tensorboard=False, **options).close()


def test_the_history_of_a_run_outlives_a_resume_on_a_full_disk(tmp_path, capfd):
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows)
    run_ranks(1, resume_on_a_full_disk, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == rows
    assert "metrics.jsonl cannot be written ([Errno 28]" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["nobody reads", "full"])
def test_a_console_that_cannot_be_written_to_is_told_once(kind, capfd):
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    console = watch.LastingConsole(open(descriptor, "w"))
    for text in ("one", "two", "three"):
        print(text, file=console, flush=True)
    console.close()
    assert capfd.readouterr().err.count("WARNING: the console cannot be written") == 1


def break_all_logs(rank):
    """In a forked rank: standard output leads to a full disk, and so do the rows of metrics."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    original, calls = watch.Metrics.append, []

    def append(self, text):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, text)

    watch.Metrics.append = append


def test_logs_that_cannot_be_written_do_not_end_the_training(folder):
    flags = f"{TINY} --steps 4 --checkpoint-every 2 --out logless"
    codes, outputs = run_program(1, flags, cwd=folder, before=break_all_logs)
    assert codes == [0], outputs
    assert outputs[0].count("WARNING: the console cannot be written") == 1
    assert outputs[0].count("metrics.jsonl cannot be written") == 1
    assert checkpoint.list_checkpoints(folder / "logless/checkpoints") == [2, 4]
    assert [row["step"] for row in metrics_of(folder, "logless")] == [1, 3, 4]


def fail_while_a_save_is_written(rank):
    """In a forked rank: a bug in step 4, while the checkpoint of step 3 is on its slow way."""
    signal_during(WRITER, "write_data", 1, signal.SIGUSR1, pause_s=1)(1)  # the pause is what counts
    original, calls = train.forward_backward, []

    def forward_backward(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("a bug")
        return original(*args)

    train.forward_backward = forward_backward


def test_whatever_ends_the_loop_the_save_on_its_way_is_waited_for(folder):
    flags = f"{TINY} --steps 9 --checkpoint-every 3 --out bug"
    codes, outputs = run_program(1, flags, cwd=folder, before=fail_while_a_save_is_written)
    assert codes == [1] and "RuntimeError: a bug" in outputs[0]
    assert checkpoint.list_checkpoints(folder / "bug/checkpoints") == [3]


def wait_under_a_short_timeout():
    """Rank 1 comes 2 s late to a collective of a checkpoint's group, and to one of training."""
    group = dist.new_group(backend="gloo")
    watch.set_timeouts(0.7, but=group)
    if dist.get_rank() == 1:
        time.sleep(2)
    dist.all_reduce(torch.zeros(1), group=group)
    if dist.get_rank() == 1:
        time.sleep(2)
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError:
        return "timed out"


def test_a_slow_write_outlives_the_timeout_that_ends_a_hang():
    assert run_ranks(2, wait_under_a_short_timeout)[0] == "timed out"


def test_tensorboard_shows_the_rows_of_metrics_jsonl(folder):
    """Of a run that was resumed at step 2: the rows after it are written anew."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = "--steps 4 --checkpoint-every 2 --val-every 2 --val-data text --tensorboard --out board"
    train_on(1, flags, folder)
    train_on(1, flags + " --resume 2", folder)
    events = reader.EventAccumulator(str(folder / "board/tensorboard"))
    events.Reload()
    rows = metrics_of(folder, "board")
    assert set(events.Tags()["scalars"]) == {k for r in rows for k, v in r.items() if v} - {"step"}
    for key in ("loss", "lr", "val_loss"):
        shown = [(event.step, event.value) for event in events.Scalars(key)]
        assert shown == [(r["step"], pytest.approx(r[key], rel=1e-6)) for r in rows if key in r]


def test_metrics_have_the_documented_keys(folder):
    train_on(1, "--steps 2 --out keys", folder)
    keys = "step loss loss_mean grad_norm lr tokens tokens_per_s tokens_per_s_per_device tflops "
    rows = metrics_of(folder, "keys")
    assert all(list(row) == (keys + "mfu memory_gib alloc_retries data_s").split() for row in rows)
    assert rows[-1]["mfu"] is None, "no peak is known for a CPU"
    assert all(row["data_s"] > 0 for row in rows), "a clock has run while the loader was asked"
    assert rows[-1]["tokens"] == 2 * 2 * 32


def test_the_mean_loss_is_that_of_the_steps_since_the_last_row(folder):
    train_on(1, "--steps 5 --out each", folder)
    train_on(1, "--steps 5 --log-every 2 --out some", folder)
    each = losses_of(folder, "each")
    means = {row["step"]: row["loss_mean"] for row in metrics_of(folder, "some")}
    expected = {1: each[0], 2: each[1], 4: (each[2] + each[3]) / 2, 5: each[4]}
    assert means == pytest.approx(expected, rel=1e-6)  # summed in float32


def test_the_profile_has_a_trace_per_rank_with_the_steps_asked_for(folder):
    flags = "--steps 5 --profile-steps 3:4 --checkpoint-every 0 --out profile"
    codes, outputs = run_program(2, f"{TINY} {flags}", cwd=folder)
    assert codes == [0, 0] and "Warning" not in outputs[0] + outputs[1]
    for rank in range(2):
        trace = json.loads((folder / f"profile/profile/rank-{rank}.json").read_text())
        steps = {e["name"] for e in trace["traceEvents"] if "ProfilerStep" in e.get("name", "")}
        assert len(steps) == 2


@pytest.mark.parametrize("done, traced", [(0, {3, 4}), (2, {3, 4}), (3, {4}), (4, None)])
def test_a_resumed_run_profiles_what_is_left_of_the_steps(tmp_path, monkeypatch, done, traced):
    monkeypatch.setattr(watch.dist, "get_rank", lambda: 0)
    profiler = watch.start_profiler(tmp_path, "3:4", done)
    assert (profiler is None) == (traced is None)
    if profiler:
        for _ in range(done + 1, 7):
            profiler.step()
        profiler.stop()
        trace = json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
        names = {e["name"] for e in trace if "ProfilerStep" in e.get("name", "")}
        assert names == {f"ProfilerStep#{step - done - 1}" for step in traced}


def test_a_profiler_says_nothing_of_its_own(folder):
    """In a process of its own, since the level of what it says is read as torch is imported."""
    flags = f"{TINY} --steps 2 --profile-steps 1:2 --checkpoint-every 0 --out quiet"
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(flags)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and (folder / "quiet/profile/rank-0.json").exists()
    assert not [line for line in done.stderr.splitlines() if not line.startswith("tokenised")]


def skip_a_collective(rank):
    """In a forked rank: rank 1 never comes to the third step's gradient norm."""
    original, calls = parallel.clip_grad_norm, []

    def clip_grad_norm(parameters, max_norm, mesh):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            time.sleep(100)
        return original(parameters, max_norm, mesh)

    parallel.clip_grad_norm = clip_grad_norm


def test_a_hang_leaves_the_last_collectives_of_every_rank(folder):
    flags = "--steps 9 --checkpoint-every 0 --timeout-s 4 --flight-recorder 200 --out hang"
    codes, outputs = run_program(2, f"{TINY} {flags}", cwd=folder, before=skip_a_collective)
    assert 0 not in codes
    out = folder / "hang"
    assert f"If a rank hung: `python watch.py {out}` names the one that did not come" in outputs[0]
    records = watch.read_flight_records(out / "flight")
    # the norm's all-reduce is what rank 0 began and rank 1 never did; fsdp 2 is all ranks here
    said, norm = watch.describe_hang(records), r"gloo:all_reduce of \[.+\] over all ranks"
    assert re.fullmatch(f"rank 0 came last to {norm}", said[0]), said
    behind = rf"rank 1 is 1 behind: it never came to number \d+, {norm}"
    assert re.fullmatch(behind, said[2]) and len(said) == 3, said

    # what torch's own record of rank 0 looks like beside that of a rank that was stopped
    (out / "flight/rank-1").write_bytes(b"")
    said = watch.describe_hang(watch.read_flight_records(out / "flight"))
    assert re.fullmatch(f"rank 0 came last to {norm}", said[0]), said
    assert said[1:] == ["rank 1 left no record: stopped or dead"]


def test_who_is_behind_is_told_for_each_group_and_sends_are_not_compared():
    """Ranks 0 to 3 as pp 2 x tp 2: rank 3 hangs, 2 waits for it in tp, 0 and 1 for both."""

    def entry(group, axis, n, name="nccl:all_gather", is_p2p=False):
        return {"process_group": (group, axis), "collective_seq_id": n, "profiling_name": name,
                "input_sizes": [[n]], "is_p2p": is_p2p}  # fmt: skip

    sends = [entry("7", "mesh_pp", n, "nccl:send 0->1", True) for n in (1, 2, 3)]
    records = {
        0: [entry("4", "mesh_tp", 9), *sends, entry("0", "default_pg", 5)],
        1: [entry("4", "mesh_tp", 9), *sends[:1], entry("0", "default_pg", 5)],
        2: [entry("0", "default_pg", 4), entry("5", "mesh_tp", 8)],
        3: [entry("0", "default_pg", 4), entry("5", "mesh_tp", 6)],
    }
    assert watch.describe_hang(records)[4:] == [
        "rank 2 is 1 behind: it never came to number 5, nccl:all_gather of [[5]] over all ranks",
        "rank 3 is 1 behind: it never came to number 5, nccl:all_gather of [[5]] over all ranks",
        "rank 3 is 2 behind: it never came to number 8, nccl:all_gather of [[8]] over tp",
    ]


def test_a_folder_without_records_is_told():
    command = [sys.executable, str(ROOT / "watch.py"), "nowhere"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr == (
        "watch.py: nowhere/flight holds no flight records: a run makes them by --flight-recorder: "
        "give the --out of a run\n"
    )


def interrupt_rank_one(rank):
    """In a forked rank: rank 1 is told to end in the middle of its third step."""
    original, calls = train.forward_backward, []

    def forward_backward(*args):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    train.forward_backward = forward_backward


@pytest.mark.parametrize("mesh", ["", "--tp 2", "--pp 2"])
def test_sigterm_on_one_rank_ends_all_after_the_same_step_with_a_checkpoint(folder, mesh):
    out = f"stopped{mesh.replace(' ', '')}"
    flags = f"--steps 50 --warmup-steps 0 --decay-ratio 0 {mesh} --out {out}"
    output = train_on(2, flags, folder, interrupt_rank_one)  # exit status 0 on both ranks
    # asked in step 3, when its answer was composed already: told in step 4 (or 5, if the watching
    # thread was late), read a step later
    step = int(re.search(r"stopped by a rank at step (\d+); checkpoint in", output)[1])
    assert step in (5, 6, 7)
    assert [row["step"] for row in metrics_of(folder, out)] == list(range(1, step + 1))
    assert "resumed" in train_on(1, flags.replace(mesh, "").replace("50", "8"), folder)


def signal_during(holder, name, call, number=signal.SIGTERM, pause_s=0):
    """A `before`: rank 1 gets a signal in the `call`-th call, from 1, of a function of `holder`."""

    def before(rank):
        namespace = pkgutil.resolve_name(holder)  # in the forked rank: inductor starts threads
        original, calls = getattr(namespace, name), []

        def function(*args, **options):
            calls.append(1)
            if rank == 1 and len(calls) == call:
                os.kill(os.getpid(), number)
                time.sleep(pause_s)
            return original(*args, **options)

        setattr(namespace, name, function)

    return before


def signal_twice(rank):
    signal_during("train", "evaluate", 1)(rank)
    signal_during(WRITER, "write_data", 1)(rank)


@pytest.mark.parametrize(
    "moment, flags, before, earliest",
    [
        # inductor is called for the first block, in the forward pass of the first step
        ("compile", "--compile", signal_during("torch._inductor.compile_fx", "compile_fx", 1), 1),
        ("evaluation", "", signal_during("train", "evaluate", 1), 2),
        # the save of step 3 is the first
        ("sync-save", "--checkpoint-mode sync", signal_during(WRITER, "write_data", 1), 3),
        # the writer is still at work when the run ends, and `close` waits for it
        ("async-save", "", signal_during(WRITER, "write_data", 1, pause_s=2), 3),
        # one to stop, and one while the save that this brings is written
        ("second", "--checkpoint-every 50", signal_twice, 2),
        ("ctrl-c", "", signal_during("train", "forward_backward", 3, signal.SIGINT), 3),
        ("hangup", "", signal_during("train", "forward_backward", 3, signal.SIGHUP), 3),
        ("usr2", "", signal_during("train", "forward_backward", 3, signal.SIGUSR2), 3),
    ],
)
def test_a_signal_at_any_moment_ends_the_run_with_a_checkpoint(
    folder, moment, flags, before, earliest
):
    steady = "--warmup-steps 0 --decay-ratio 0 --optimizer sgd --lr 0.3 --val-data text"
    common = f"{SHARD_BATCH} --checkpoint-every 3 --val-every 2 {steady}"
    if not (folder / "no-signal").exists():
        train_on(2, f"{common} --steps 9 --out no-signal", folder)
    out = f"signal-{moment}"
    output = train_on(2, f"{common} --steps 50 {flags} --out {out}", folder, before)  # status 0
    compiles = "drawing weights, then compiling in step 1: minutes on first use\n"
    assert (compiles in output) == ("--compile" in flags)  # told before it takes them
    step = int(re.search(r"stopped by a rank at step (\d+); checkpoint in", output)[1])
    # told in the same step or the next (the watching thread may be late by one), read one later
    assert earliest < step <= earliest + 3
    names = sorted(path.name for path in (folder / out / "checkpoints").iterdir())
    assert names[-1] == f"step-{step:08}" and not any("tmp" in name for name in names), names
    assert f"at step {step}" in train_on(2, f"{common} --steps 9 --out {out}", folder)
    # a compiled block sums in another order; SGD keeps the difference that small
    rel = 1e-5 if "--compile" in flags else 0
    assert losses_of(folder, out) == pytest.approx(losses_of(folder, "no-signal"), rel=rel, abs=0)


def hangup_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    came = watch.catch_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.2)
    return came


def test_under_nohup_a_hangup_stays_ignored():
    assert run_ranks(1, hangup_under_nohup) == [["SIGUSR2"]]


def interrupt_twice(rank):
    """In a forked rank: Ctrl-C in the second step and once more in the third, on every rank."""
    original, calls = train.forward_backward, []

    def forward_backward(*args):
        calls.append(1)
        if len(calls) in (2, 3):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    train.forward_backward = forward_backward


def test_a_second_ctrl_c_interrupts_at_once_with_one_line(folder):
    flags = f"{TINY} --steps 50 --checkpoint-every 1 --out twice"
    codes, outputs = run_program(2, flags, cwd=folder, before=interrupt_twice)
    assert codes[0] == 1 and codes[1] != 0
    assert re.findall("error: .*", outputs[0]) == [
        "error: interrupted; the steps since the last checkpoint are lost"
    ]
    assert "Traceback" not in outputs[0] + outputs[1] and "error" not in outputs[1]
    assert (folder / "twice/checkpoints/step-00000001").exists()


def fail_on_rank_one(rank):
    """In a forked rank: rank 1 has a bug in its third step."""
    original, calls = train.forward_backward, []

    def forward_backward(*args):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            raise RuntimeError("the first cause")
        return original(*args)

    train.forward_backward = forward_backward


def test_when_one_rank_fails_the_others_stop_and_the_first_cause_is_shown(folder):
    flags = f"{TINY} --steps 9 --checkpoint-every 0 --out one-fails"
    codes, outputs = run_program(2, flags, cwd=folder, before=fail_on_rank_one)
    assert 0 not in codes
    assert "RuntimeError: the first cause" in outputs[1] and "forward_backward" in outputs[1]


def test_torchrun_shows_a_refusal_once(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*command, str(ROOT / "train.py"), "--tp", "3"],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode != 0
    assert result.stderr.count("error: --pp 1 x --dp-replicate 1") == 1
    assert "Traceback" not in result.stderr.split("error: ")[1].split("torch")[0]

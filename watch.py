"""What a run tells of itself, and how it ends. Plain values in: it knows no model and no flags.

    python watch.py OUT       who was late in a hang, by the ranks' flight records

    OUT/
        metrics.jsonl         one object per logged step                      Metrics
        tensorboard/          the same numbers                                Metrics
        profile/rank-0.json   some steps, for ui.perfetto.dev                 start_profiler
        memory/rank-0.pickle  what filled a GPU, for pytorch.org/memory_viz   dump_memory
        flight/rank-0         a rank's last collectives                       dump_flight_record

A step's numbers reach the host without making it wait:

    host     enqueue 7, copy_to_host | enqueue 8, copy_to_host | read 7: finite? asked to stop?
    GPU      compute 6 ............. | compute 7, copy ....... | compute 8, copy ...

So the host runs at most one step ahead, and a step that gave NaN or Inf is noticed one step late,
but always before a save: it stops all ranks together and is never saved.

    a run ends by           who notices                     what happens
    its last step           everybody                       a checkpoint, exit status 0
    a signal on any rank    catch_signals; the request      all ranks end after the same step, with
                            travels with the loss           a checkpoint, exit status 0
    TrainingError           every rank, at the same step    one line per host, exit status 1
    a rank that dies or     the others, when a collective   each writes its flight record, and
    hangs                   fails or times out              torchrun restarts or ends them

Sources: TorchTitan (arXiv 2410.06511) §2.3; the Flight Recorder §2.3.2.
"""

import json
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.tensor import DTensor

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch.distributed.distributed_c10d._world             all groups, to change their timeouts
#     torch.distributed.distributed_c10d._set_pg_timeout    until torch 2.14 has dist.set_timeout
#     torch._C._distributed_c10d._dump_fr_trace             the flight record of gloo
#     torch._C._distributed_c10d._dump_nccl_trace           and of NCCL
#     torch.cuda.memory._record_memory_history              as pytorch.org/memory_viz says
#     torch.cuda.memory._dump_snapshot

# ---- 1. What ranks must have in common ---------------------------------------------------------


class TrainingError(Exception):
    """Training cannot begin or go on; every rank raises it at the same step."""


def local_tensor(tensor):
    """The part of a DTensor that this rank holds, same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(fact):
    """The facts of all ranks, in rank order (all must call); any picklable object."""
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def find_differences(facts):
    """What ranks report differently; all must call it, and all get the same answer.

    Args:    facts, {key: value}; a key is compared among the ranks that report it.
    Returns: [(key, the usual value, {rank: another value}, [ranks with the usual one])]; usual is
             what most ranks report, and rank 0's where that is a tie.
    """
    reports, found = gather(facts), []
    for key in dict.fromkeys(key for report in reports for key in report):
        holders = {rank: report[key] for rank, report in enumerate(reports) if key in report}
        values = list(holders.values())
        usual = max(values, key=values.count)  # the first of equals
        others = {rank: value for rank, value in holders.items() if value != usual}
        if others:
            found.append((key, usual, others, sorted(holders.keys() - others)))
    return found


def check_same(settings):
    """Raise TrainingError if ranks were started with other settings: {flag's name: value}."""
    for name, usual, others, alike in find_differences(settings):
        rank, value = next(iter(others.items()))
        raise TrainingError(
            f"--{name.replace('_', '-')} is {value} on rank {rank} and {usual} on rank {alike[0]}: "
            "give all ranks the same flags, and for text one --data folder of token shards"
        )


def checksum(tensor):
    """Sum of the bits of a tensor, 32 at a time: one flipped bit changes it (int)."""
    return tensor.contiguous().view(torch.int32).sum(dtype=torch.int64).item()


def check_ranks(step, inputs, data_rank, weights):
    """Raise TrainingError, naming the ranks, if what several ranks must share differs.

    Compared: the step; the batch, along tp, cp and pp; and every piece of the weights that more
    than one rank holds, along dp_replicate and, for norms, tp; routers' biases along all axes.
    Args:    inputs, of this data rank; weights, (name, DTensor or, if it is the same everywhere,
             tensor) pairs of this rank.
    """
    facts = {("step",): step, ("batch", data_rank): checksum(inputs)}
    for name, weight in weights:
        piece = []
        if isinstance(weight, DTensor):
            coordinates = zip(weight.placements, weight.device_mesh.get_coordinate(), strict=True)
            piece = [c for placement, c in coordinates if not placement.is_replicate()]
        facts["weight", name, *piece] = checksum(local_tensor(weight.detach()))
    for key, _, others, alike in find_differences(facts):
        raise TrainingError(
            f"step {step}: ranks {sorted(others)} differ from {alike} in "
            f"{' '.join(map(str, key[:2]))}, which they must share: look for faulty hardware "
            "or a missing collective, and resume from a checkpoint before it"
        )


def check_finite(step, stats, weights):
    """Raise TrainingError on every rank if the step's loss or gradient norm is NaN or Inf.

    Both numbers are the same on all ranks, so all come here together and can gather who began.
    """
    if math.isfinite(stats.loss) and math.isfinite(stats.grad_norm):
        return
    bad = [name for name, weight in weights if not local_tensor(weight).isfinite().all()]
    reports = gather((math.isfinite(stats.local_loss), bad))
    loss_ranks = [r for r, (finite, _) in enumerate(reports) if not finite]
    weight_ranks = [r for r, (_, names) in enumerate(reports) if names]
    names = sorted({name for _, names in reports for name in names})
    raise TrainingError(
        f"step {step} gave loss {stats.loss} and gradient norm {stats.grad_norm} and is not saved. "
        f"Loss not finite on ranks {loss_ranks or 'none'}; weights no longer finite on ranks "
        f"{weight_ranks or 'none'}: {', '.join(names[:3]) or 'none'}"
        f"{' and others' if len(names) > 3 else ''}. Go on from the last checkpoint with a lower "
        "--lr or --max-norm"
    )


def free_host_bytes():
    """The least of what is free and of what a control group (cgroup 2 or 1) has left, or None."""
    known, cgroup = [], Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        known.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max"
            known.append(int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
    return min(known, default=None)


def check_memory(needed_bytes, free_bytes, n_sharing):
    """Raise TrainingError on all ranks if one of them lacks the memory for its states.

    Args:    free_bytes, of the device, None if not known; n_sharing, ranks that share it.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    share = [] if free_bytes is None else [free_bytes // n_sharing]
    share += [] if limit == resource.RLIM_INFINITY else [limit]
    facts = gather((needed_bytes, min(share, default=math.inf)))
    rank, (needed, there) = max(enumerate(facts), key=lambda fact: fact[1][0] - fact[1][1])
    if needed > there:
        raise TrainingError(
            f"memory: rank {rank} needs {needed:,} bytes for parameters, gradients, optimizer and "
            f"the largest weight whole while it is drawn, and has {there:,} for itself: take more "
            "ranks or a smaller --model; --ignore-memory starts all the same"
        )


# ---- 2. Numbers --------------------------------------------------------------------------------


class Stats(NamedTuple):
    """What a step tells the host."""

    loss: float  # of the global batch
    grad_norm: float  # before clipping
    n_valid_tokens: float  # in the global batch
    local_loss: float  # this rank's share of the loss
    n_stops: float  # ranks that were asked to end
    expert_load: float | None = None  # the largest load over the mean, if there are experts


def copy_to_host(stats):
    """Start copying a step's numbers; the function returned waits for them and gives `Stats`."""
    host = torch.empty(stats.shape, dtype=stats.dtype, pin_memory=stats.is_cuda)
    host.copy_(stats, non_blocking=True)
    copied = torch.cuda.current_stream().record_event() if stats.is_cuda else None

    def read():
        if copied is not None:
            copied.synchronize()
        return Stats(*host.tolist())

    return read


def peak_memory_gib(device):
    """Most memory held so far in GiB: reserved by the allocator on CUDA, resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20 if sys.platform != "darwin" else kib / 2**30  # macOS counts bytes


def step_of(row):
    """Step of a line of metrics.jsonl; a line torn by a crash counts as never written."""
    try:
        return json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def try_to_write(what, write, told):
    """Call `write`. A log that cannot be written is told of once, and training goes on."""
    try:
        write()
    except OSError as error:
        if what not in told:
            told.add(what)
            warning = f"WARNING: {what} cannot be written ({error}); training goes on"
            print(warning, file=sys.stderr, flush=True)


class LastingConsole:
    """Stands in for sys.stdout: when nobody reads it any more, the rest of it goes nowhere."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        with suppress(OSError):  # `flush` tells of it
            self.stream.write(text)
        return len(text)

    def flush(self):
        told = set()
        try_to_write("the console", self.stream.flush, told)
        if told:  # what is left in its buffer would fail at the end of Python
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name):
        return getattr(self.stream, name)


class Metrics:
    """Rank 0's console line, OUT/metrics.jsonl and, if asked for, TensorBoard.

    On other ranks it does nothing. On resume the file is continued, and rows after the resumed step
    are dropped.

    Args:    out, the folder; steps, (the first, the last) of this run; tokens_per_step, of the
             global batch; flops_per_token, the model's; peak_tflops of a device, for MFU, or None.
    """

    def __init__(
        self, out, device, *, steps, tokens_per_step, flops_per_token, peak_tflops, tensorboard
    ):
        self.device, self.is_main = device, dist.get_rank() == 0
        self.first_step, self.last_step = steps
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        self.peak_tflops, self.tensorboard, self.told = peak_tflops, None, set()
        self.path, self.file = out / "metrics.jsonl", None
        self.start_interval(self.first_step - 1)
        if self.is_main:
            try_to_write(self.path, self.open_file, self.told)
        if self.is_main and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(out / "tensorboard", purge_step=self.first_step)

    def open_file(self):
        """Continue the file: what is dropped of it goes by a new one that takes its name whole."""
        rows = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [row for row in rows if step_of(row) < self.first_step]
        if kept != rows:
            new = self.path.with_suffix(".new")
            new.write_text("".join(kept))
            new.rename(self.path)
        self.file = open(self.path, "a")

    def start_interval(self, step):
        """Rates and means count from here."""
        self.since_step, self.since_s, self.data_s = step, time.perf_counter(), 0.0
        self.loss_sum = 0.0  # of the steps since, on the device

    def log(self, step, stats, *, lr, tokens, now_s, val_loss):
        """Write one row; `tokens` is the number of training tokens seen so far."""
        elapsed_s = now_s - self.since_s
        n_steps = step - self.since_step
        tokens_per_s = n_steps * self.tokens_per_step / elapsed_s
        per_device = tokens_per_s / dist.get_world_size()
        tflops = per_device * self.flops_per_token / 1e12
        # so often CUDA's allocator had to give its cache back and try again, a slow step each:
        # more than a few times mean that memory is all but full
        is_cuda = self.device.type == "cuda"
        retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"] if is_cuda else None
        row = {
            "step": step,
            "loss": stats.loss,
            "loss_mean": float(self.loss_sum) / n_steps,  # of the steps since the last row
            "grad_norm": stats.grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": per_device,
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "memory_gib": peak_memory_gib(self.device),
            "alloc_retries": retries,
            "data_s": self.data_s / n_steps,  # seconds per step spent waiting for the next batch
        }
        at_times = {"val_loss": val_loss, "expert_load": stats.expert_load}
        row |= {key: value for key, value in at_times.items() if value is not None}
        if self.is_main:
            seconds_left = round(elapsed_s / n_steps * (self.last_step - step))
            # the first row holds what happens once, such as compilation
            is_first = self.since_step < self.first_step
            left = "" if is_first else f"  {timedelta(seconds=seconds_left)} left"
            self.write(row, left)
            if stats.n_valid_tokens == 0:
                print(f"step {step}: the batch has no valid label; loss and gradients are zero")
        self.start_interval(step)

    def write(self, row, left):
        """One row to the file, the console (and to it how much time is `left`) and TensorBoard."""
        try_to_write(self.path, lambda: self.append(json.dumps(row) + "\n"), self.told)
        width = len(str(self.last_step))
        print(
            f"step {row['step']:>{width}}/{self.last_step}  loss {row['loss']:.4f}  "
            f"mean {row['loss_mean']:.4f}  grad {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_s']:>9,.0f} tok/s  {row['tflops']:.3f} TFLOPs"
            + (f"  mfu {row['mfu']:.1%}" if row["mfu"] else "")
            + f"  {row['memory_gib']:.2f} GiB"
            + (f"  allocator retries {row['alloc_retries']}" if row["alloc_retries"] else "")
            + (f"  load {row['expert_load']:.2f}" if "expert_load" in row else "")
            + (f"  val {row['val_loss']:.4f}" if "val_loss" in row else "")
            + left,
            flush=True,
        )
        for key, value in row.items() if self.tensorboard else ():
            if value is not None and key != "step":
                add = partial(self.tensorboard.add_scalar, key, value, row["step"])
                try_to_write("OUT/tensorboard", add, self.told)

    def append(self, text):
        """To the file; what an earlier failure has left in its buffer comes first."""
        if self.file:
            self.file.write(text)
            self.file.flush()

    def close(self):
        """Close the files."""
        if self.file:
            try_to_write(self.path, self.file.close, self.told)
        if self.tensorboard:
            try_to_write("OUT/tensorboard", self.tensorboard.close, self.told)


def print_pairs(pairs):
    """Print (label, text) pairs: labels in a column of their own, texts of any number of lines."""
    for label, text in pairs:
        print(f"{label:<6} {text}".replace("\n", "\n" + 7 * " "), flush=True)


# ---- 3. Traces, memory, collectives ------------------------------------------------------------


def check_records(*, tensorboard, memory_snapshot, device_type):
    """Raise ValueError for a record that cannot be made on this machine."""
    if tensorboard and not find_spec("tensorboard"):
        raise ValueError(
            "--tensorboard needs its package: pip install tensorboard, or leave it out; "
            "OUT/metrics.jsonl holds the same numbers"
        )
    if memory_snapshot and device_type != "cuda":
        raise ValueError(
            "--memory-snapshot conflicts with a CPU: it is of CUDA's allocator; leave it out"
        )


def start_profiler(folder, profile_steps, done):
    """Trace the steps FIRST:LAST: call `step()` after each step, `stop()` at the end. Or None.

    Args:    done, the steps behind a run that is resumed.
    """
    first, last = map(int, profile_steps.split(":")) if profile_steps else (0, 0)
    first = max(first, done + 1)
    if first > last:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank()}.json"
    warnings.filterwarnings("ignore", message="Profiler won't be using warmup")  # it needs a step
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=first - done - 1, warmup=0, active=last - first + 1, repeat=1
        ),
        on_trace_ready=lambda profiler: try_to_write(
            path, partial(profiler.export_chrome_trace, str(path)), set()
        ),
    )
    profiler.start()
    return profiler


def record_memory():
    """From now on CUDA's allocator notes what it hands out and takes back (--memory-snapshot)."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def dump_memory(folder):
    """Write what `record_memory` recorded (--memory-snapshot)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(folder / f"rank-{dist.get_rank()}.pickle"))


def record_collectives(folder, n_entries):
    """Remember the last collectives (--flight-recorder); call it before any group is made.

    NCCL dumps them by itself when one times out; for gloo `dump_flight_record` does. Until then
    the file is empty, as is that of a rank which is stopped and writes no more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{os.environ.get('RANK', 0)}").write_bytes(b"")
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(n_entries)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder.absolute()}/rank-"


def dump_flight_record(error=None):
    """Write this rank's last collectives, if they are recorded; not over what NCCL has written.

    Args:    error, the exception that ends the run: a note to it tells what reads them.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if error is not None and (prefix or "timed out" in str(error).lower()):
        reads = f"`python watch.py {Path(prefix).parents[1] if prefix else 'OUT'}`"
        needed = "" if prefix else ", after a run with --flight-recorder 2000,"
        error.add_note(f"If a rank hung: {reads}{needed} names the one that did not come.")
    if prefix and dist.is_initialized():
        path = Path(f"{prefix}{dist.get_rank()}")
        recorder = torch._C._distributed_c10d
        dump = recorder._dump_nccl_trace if torch.cuda.is_available() else recorder._dump_fr_trace
        if not path.stat().st_size:  # NCCL's own watchdog knows more
            path.write_bytes(dump(True, False, False))


def read_flight_records(folder):
    """{rank: its last collectives, oldest first}; none of a rank whose file is empty."""
    contents = {int(path.name[5:]): path.read_bytes() for path in folder.glob("rank-*")}
    if not contents:
        raise ValueError(f"{folder} holds no flight records: a run makes them by --flight-recorder")
    return {rank: pickle.loads(c)["entries"] if c else [] for rank, c in sorted(contents.items())}


def describe_hang(records):
    """Lines on what `read_flight_records` found: each rank's last collective, then who is behind.

    A rank is behind where others of its group have begun a collective to which it never came. Sends
    of a pipeline are not compared: ranks differ in them rightly, and gloo does not record them.
    """

    def tell(entry):
        axis = entry["process_group"][1].removeprefix("mesh_")
        group = {"default_pg": "all ranks", "undefined": "a checkpoint's group"}.get(axis, axis)
        return f"{entry['profiling_name']} of {entry['input_sizes']} over {group}"

    lines, groups = [], {}  # of each group {rank: its last entry there}
    for rank, entries in records.items():
        last = f"came last to {tell(entries[-1])}" if entries else "left no record: stopped or dead"
        lines.append(f"rank {rank} {last}")
        for entry in entries:
            if not entry["is_p2p"]:
                groups.setdefault(tuple(entry["process_group"]), {})[rank] = entry
    for last in groups.values():
        first = max(last.values(), key=lambda entry: entry["collective_seq_id"])
        n = first["collective_seq_id"]
        for rank, entry in last.items():
            if behind := n - entry["collective_seq_id"]:
                missed = f"it never came to number {n}, {tell(first)}"
                lines.append(f"rank {rank} is {behind} behind: {missed}")
    return lines


def set_timeouts(timeout_s, but=None):
    """Of collectives of all groups there are, `but` one: after it a missing rank counts as a hang.

    The groups of a mesh come with gloo's or NCCL's own limit, 30 minutes for gloo.
    """
    c10d = dist.distributed_c10d
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    for group in c10d._world.pg_map:
        if group is not but:
            set_timeout(timedelta(seconds=timeout_s), group)


# ---- 4. How it ends ----------------------------------------------------------------------------


def catch_signals():
    """From now on signals that mean "end soon" end the run after a step; lists those that came.

    They are SIGTERM, SIGUSR1 and SIGUSR2 (of schedulers), SIGHUP (a closed terminal; where it was
    ignored from the start, as under nohup, it stays so) and a first Ctrl-C. A second Ctrl-C
    interrupts at once.
    """
    came = []
    arrived, told = os.pipe()
    os.set_blocking(told, False)

    def watch():  # Python's own handlers wait while the main thread is inside a collective
        while True:
            came.append(signal.Signals(os.read(arrived, 1)[0]).name)
            dump_flight_record()  # torchrun sends SIGTERM to ranks that hang after another failed

    def handle(number, frame):
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, handle)
    threading.Thread(target=watch, daemon=True).start()
    return came


def fail(error, *, rank, local_rank):
    """Print the error (an exception) once per host and leave with status 1.

    torchrun kills all ranks as soon as one exits, so the others wait for that instead of taking the
    message from local rank 0. If nobody comes to kill them, the error was theirs alone.
    """
    text = str(error)
    if local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
        text = f"rank {rank}: {text}"
    print(f"error: {text}", file=sys.stderr, flush=True)
    get_error_handler().record_exception(type(error)(text))  # the last line of torchrun's summary
    sys.stdout.flush()
    os._exit(1)  # without a goodbye to ranks that may be gone, which could hang


if __name__ == "__main__":
    try:
        print(*describe_hang(read_flight_records(Path(sys.argv[1]) / "flight")), sep="\n")
    except (OSError, ValueError, IndexError) as problem:
        sys.exit(f"watch.py: {problem}: give the --out of a run")

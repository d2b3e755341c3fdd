"""What only a GPU can show, and how fast it is: `python tests/gpu_check.py`, under 8 minutes.

One process, one GPU, torch 2.11 to 2.13, torchao if it is there. First come the rows of a markdown
table: an 8B-shaped model, cut to the layers that fit, by techniques, and when in a step the GPU had
nothing to do. The table is printed however the program ends. Then come the checks: each goes from
train.py's flags through its own `build` and `train_step` and prints ok, FAILED or skipped, its
numbers and its seconds; one that fails does not stop the others. The exit status is 0 if nothing
failed.

`--cpu` runs the same functions on tiny shapes, float8 emulated, without what only CUDA has, so that
a machine without a GPU can tell whether this file still fits the program.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

if "--cpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    os.environ.setdefault(variable, "lo")  # one process needs no network and may find none

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoint  # noqa: E402
import data  # noqa: E402
import float8  # noqa: E402
import model  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402
import watch  # noqa: E402

SMALL = {  # grouped queries; head_dim 128 on CUDA; multiples of 16, for float8
    "cuda": "--set dim=1024 n_layers=4 n_heads=8 n_kv_heads=2 ffn_dim=2816 vocab_size=32768 "
    "--seq-len 2048 --local-batch-size 4 --lr 1e-3 --param-dtype bf16",
    "cpu": "--set dim=64 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=192 vocab_size=512 "
    "--seq-len 64 --local-batch-size 4 --lr 1e-2 --param-dtype bf16",
}
ROWS = {  # of the table
    "bf16": "--ac op",
    "+ compile": "--ac op --compile",
    "+ float8 tensorwise": "--ac op --compile --float8 tensorwise",
    "or float8 rowwise": "--ac op --compile --float8 rowwise",
    "compile, 8 loss chunks": "--ac op --compile --loss-chunks 8",
    "compile, --ac full": "--ac full --compile",
}
LIMIT_S = 475  # what runs then has hung
CHECK_S, ROW_S = 85, 120  # a check, a row begins only if so much is left
ROOT = Path(__file__).parents[1]
ULP = 2**-8  # bf16's relative rounding step

# ---- 1. Running checks -------------------------------------------------------------------------


class Skip(Exception):
    """Its text says why a check does not apply here."""


class Report:
    """Runs checks one by one, prints what came of each, and counts those that failed."""

    def __init__(self, limit_s=LIMIT_S):
        self.end_s, self.n_failed = time.monotonic() + limit_s, 0

    def run(self, name, check, *args, needs_s=CHECK_S):
        """Return check(*args), its numbers, or None if it failed or does not apply."""
        start_s, result = time.monotonic(), None
        try:
            if self.end_s - start_s < needs_s:
                raise Skip("the time is used up")
            result = check(*args)
            line = f"ok       {name}: {result}"
        except Skip as reason:
            line = f"skipped  {name} ({reason})"
        except Exception:
            self.n_failed += 1
            line = f"FAILED   {name}\n{traceback.format_exc(limit=-3).rstrip()}"
        print(f"{line}  [{time.monotonic() - start_s:.1f} s]", flush=True)
        torch.compiler.reset()  # else the graphs of all checks count towards one limit
        gc.collect()  # FSDP's modules lie in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return result


@dataclasses.dataclass(frozen=True)
class Bench:
    device: torch.device
    flags: str  # of the model that checks run on
    tokens: data.TokenShards  # this repository's source text, as bytes
    folder: Path  # for scratch files

    @property
    def is_cuda(self):
        return self.device.type == "cuda"


def build_job(bench, flags):
    """(args, job), made as train.py's main does it."""
    argv = shlex.split(f"{bench.flags} --out {bench.folder} {flags}")
    args, config = train.read_flags(argv, train.find_hardware(), 1)
    return args, train.start(args, train.build(args, config, bench.device))


def batch_at(bench, args, step):
    rows = range((step - 1) * args.global_batch_size, step * args.global_batch_size)
    batch = data.batch_at(bench.tokens, rows, seq_len=args.seq_len, seed=args.seed)
    return [x.to(bench.device) for x in batch]


def run_step(args, job, batch):
    options = {"local_batch_size": args.local_batch_size, "max_norm": args.max_norm}
    return train.train_step(job, *batch, **options)


def evaluate(bench, args, job):
    sizes = {"local_batch_size": args.local_batch_size, "val_steps": 2}
    return train.evaluate(job, bench.tokens, seq_len=args.seq_len, **sizes)


def run_steps(bench, args, job, n_steps):
    """Losses and gradient norms of the first steps: float64 (2, n_steps) on the host."""
    stats = [run_step(args, job, batch_at(bench, args, step + 1)) for step in range(n_steps)]
    return torch.stack(stats)[:, :2].double().cpu().T


def relative_error(values, references):
    return ((values - references).norm() / references.norm()).item()


class Operators(TorchDispatchMode):
    """Counts the operators that run, in backward passes too."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


# ---- 2. Checks ---------------------------------------------------------------------------------


def plain_attention(q, k, v):
    """Causal softmax(q k^T / sqrt(Dh)) v, written out: q (B, H, T, Dh), k and v (B, K, T, Dh)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (B, H, T, T)
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def check_attention(bench):
    """Fused kernels, right in float64's eyes: cp 1 has two chunks too, the second lower-right."""
    args, job = build_job(bench, "")
    c, notes = job.config, []
    shapes = [(1, n, args.seq_len, c.head_dim) for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads)]
    torch.manual_seed(0)
    qkv = [torch.randn(shape, device=bench.device).bfloat16() for shape in shapes]
    weights = torch.randn_like(qkv[0])  # of the outputs, for a gradient
    exact = [x.double().requires_grad_() for x in qkv]
    y = plain_attention(*exact)
    right = [y, *torch.autograd.grad(y, exact, weights.double())]
    lower_right = parallel.ContextParallelAttention(job.mesh["cp"], args.seq_len)
    backend = "inductor" if bench.is_cuda else "aot_eager"
    for title, core in (
        ("causal", model.CausalAttention()),
        ("lower-right", lower_right),
        ("lower-right compiled", torch.compile(lower_right, backend=backend, fullgraph=True)),
    ):
        given = [x.clone().requires_grad_() for x in qkv]
        is_eager = "compiled" not in title  # dynamo does not go with a dispatch mode
        with Operators() if is_eager else contextlib.nullcontext() as seen:
            y = core(*given)
        found = [y, *torch.autograd.grad(y, given, weights)]
        error = max(map(relative_error, found, right))
        counts = seen.counts if is_eager else {}
        kernels = {str(op).split(".")[1] for op in counts if "_attention" in str(op)}
        notes.append(
            f"{title} by {', '.join(sorted(kernels)) or 'what it takes'}, error {error:.1e}"
        )
        assert bool(kernels) == is_eager, notes
        assert all("_flash_" in k or "_cudnn_" in k for k in kernels), notes
        # probabilities, results and gradients are rounded to bf16; a wrong mask gives about 1
        assert error < 4 * ULP, notes
    return "; ".join(notes)


def requested_bytes():
    """Of live CUDA tensors, without the allocator's rounding; 0 without CUDA."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def check_recomputation(bench):
    """Matmuls run again, and bytes held instead, as parallel.py says of `none`, `op`, `full`."""
    matmuls, held = [], []
    for mode in ("none", "op", "full"):
        args, job = build_job(bench, f"--ac {mode}")
        inputs, labels = batch_at(bench, args, 1)
        run_step(args, job, (inputs, labels))  # from here on the optimizer's states are there
        before = requested_bytes()
        loss = job.loss_fn(job.stages[0](inputs), labels, inputs.numel())
        held.append(requested_bytes() - before)
        with Operators() as seen:
            loss.backward()
        matmuls.append(seen.counts[torch.ops.aten.mm.default])
        c, n_tokens = job.config, inputs.numel()
        del job
        gc.collect()
    again = [(n - matmuls[0]) / c.n_layers for n in matmuls]
    more = [(n - held[2]) / n_tokens / c.n_layers for n in held[:2]]
    # wq's and attention's results | wv's | w1's | the softmax's sums in float32
    predicted = 2 * (2 * c.dim + c.n_kv_heads * c.head_dim + c.ffn_dim) + 4 * c.n_heads
    note = f"none, op, full run {again} of 7 matmuls again; bytes per token and block that are "
    note += f"held beyond full's: none {more[0]:,.0f}, op {more[1]:,.0f}, counted {predicted:,}"
    assert again == [0, 3, 6], note
    if bench.is_cuda:  # kernels save a few bytes more, such as their random state
        assert more[0] > more[1] and abs(more[1] / predicted - 1) < 0.01, note
    return note


def check_compile(bench):
    """The eager losses, from two graphs, of a block and of the loss, and two for evaluation."""
    losses, counters = [], torch._dynamo.utils.counters
    counters.clear()
    for flags in ("", "--compile"):
        args, job = build_job(bench, f"--ac op {flags}")
        found = run_steps(bench, args, job, 4)[0].tolist()
        losses.append(torch.tensor([*found, evaluate(bench, args, job)]))
    n_graphs, error = counters["stats"]["unique_graphs"], relative_error(losses[1], losses[0])
    # a compiled block rounds to bf16 in other places; over thousands of tokens that averages out
    assert error < ULP and n_graphs == 4, f"{n_graphs} graphs, losses {losses}"
    return f"losses of 4 steps and an evaluation within {error:.1e}, {n_graphs} graphs"


def check_loss_chunks(bench):
    """The same loss and gradient norm, at a peak lower by more than the float32 logits."""
    found, peaks = [], []
    for n_chunks in (8, 1):  # the lower peak first
        args, job = build_job(bench, f"--loss-chunks {n_chunks}")
        found.append(run_steps(bench, args, job, 2))
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        n_logits = args.local_batch_size * args.seq_len * job.config.vocab_size
        del job
        gc.collect()
    loss_error, norm_error = map(relative_error, *found)
    note = f"losses within {loss_error:.1e}, gradient norms within {norm_error:.1e}; peak "
    note += f"{peaks[1]:.2f} -> {peaks[0]:.2f} GiB, logits {n_logits * 4 / 2**30:.2f}"
    # the same logits; but the head's gradient is added up over 8 pieces, in bf16
    assert loss_error < ULP / 8 and norm_error < 4 * ULP, note
    assert peaks[1] - peaks[0] > 7 / 8 * n_logits * 4 / 2**30 or not bench.is_cuda, note
    return note


def check_no_host_sync(bench):
    """A step passes although every synchronising operator is an error."""
    if not bench.is_cuda:
        raise Skip("set_sync_debug_mode is CUDA's")
    for flags in ("", "--ac op --loss-chunks 4"):
        args, job = build_job(bench, flags)
        run_steps(bench, args, job, 2)
        batch = batch_at(bench, args, 3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            stats = run_step(args, job, batch)
            watch.copy_to_host(stats)
            with contextlib.suppress(RuntimeError):
                raise AssertionError(f"the mode lets .item() pass: {stats[0].item()}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "none in train_step and copy_to_host, plain and with --ac op --loss-chunks 4"


def whole_state(job):
    """Copies of all weights and moments by name."""
    state = checkpoint.build_state(job.stages, job.optimizer)
    return {name: parallel.whole_tensor(tensor).clone() for name, tensor in state.items()}


def measure_save(bench, mode):
    """Save and train on, check what was written, return for how long training stood still (s)."""
    args, job = build_job(bench, "")
    folder, waits = bench.folder / mode, []
    checkpointer = checkpoint.Checkpointer(folder, mode=mode, keep_latest=0)

    def wait(*_):  # the hook of train.py's main
        start_s = time.perf_counter()
        checkpointer.wait_for_staging()
        waits.append(time.perf_counter() - start_s)

    job.optimizer.register_step_pre_hook(wait)
    batch = batch_at(bench, args, 1)
    for step in (1, 2):  # the first save allocates the staging memory
        run_step(args, job, batch).tolist()  # waits until the GPU is done
        checkpointer.wait()
        saved = whole_state(job)
        waits.clear()
        start_s = time.perf_counter()
        checkpointer.save(step, job.stages, job.optimizer, {})
        stall_s = time.perf_counter() - start_s
        run_step(args, job, batch).tolist()
        stall_s += sum(waits)
    checkpointer.close()
    _, other = build_job(bench, "--seed 1")
    checkpoint.load_checkpoint(folder, 2, other.stages, other.optimizer, shapes=other.shapes)
    loaded, now = whole_state(other), whole_state(job)
    wrong = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    assert not wrong, f"{mode}: {len(wrong)} tensors such as {wrong[0]} are not those of the step"
    assert not any(torch.equal(saved[name], now[name]) for name in saved), "nothing was trained"
    return stall_s


def check_async_save(bench):
    """The files hold the step of the save while training goes on, and cost less than waiting."""
    sync_s, async_s = measure_save(bench, "sync"), measure_save(bench, "async")
    note = f"bit-equal; training stood still for {async_s:.3f} s, in a sync save {sync_s:.3f} s"
    assert async_s < sync_s or not bench.is_cuda, note
    return note


@torch.no_grad()
def check_init(bench):
    """Sharded weights are those of a plain model, bit for bit."""
    args, job = build_job(bench, "")
    with torch.device("meta"):
        plain = model.Transformer(job.config, seq_len=args.seq_len)
    plain.to_empty(device=bench.device)
    plain.init_rope(torch.arange(args.seq_len, device=bench.device))
    draw = {"config": job.config, "seed": args.seed, "device": bench.device}
    sharded = dict(job.weights)
    for name, weight in plain.named_parameters():
        weight.copy_(model.draw_weight(name, weight.shape, **draw))
        assert torch.equal(weight, parallel.whole_tensor(sharded.pop(name))), name
    assert not sharded and torch.equal(plain.rope, job.stages[0].rope)
    return f"{len(job.shapes)} weights and the RoPE table"


def check_cpu_offload(bench):
    """The losses of a model that stays on the GPU."""
    args, job = build_job(bench, "--cpu-offload")
    _, resident = build_job(bench, "")
    targets = dict(resident.stages[0].named_parameters())
    for name, source in job.stages[0].named_parameters():  # host and GPU draw different weights
        assert source.device.type == "cpu", name
        parallel.local_tensor(targets[name].data).copy_(parallel.local_tensor(source.data))
    error = relative_error(run_steps(bench, args, job, 2), run_steps(bench, args, resident, 2))
    assert error < ULP, error  # the same kernels, but for sums of a norm and Adam's in float32
    return f"losses and gradient norms of 2 steps within {error:.1e}"


def float8_flags(bench, recipe):
    if importlib.util.find_spec("torchao") is None:
        raise Skip("torchao is not installed")
    is_native = bench.is_cuda and torch.cuda.get_device_capability() >= (8, 9)
    return f"--float8 {recipe}{'' if is_native else ' --float8-emulate'}"


def check_float8(bench, recipe):
    """20 losses nearer to bf16's than those of another seed are."""
    losses = []
    for flags in (float8_flags(bench, recipe), "", "--seed 1"):
        args, job = build_job(bench, flags)
        losses.append(run_steps(bench, args, job, 20)[0])
    found, right, other = losses
    worst, spread = (((x - right).abs() / right).max().item() for x in (found, other))
    assert right[-1] < 0.8 * right[0], f"bf16 does not learn: {right}"
    assert 0 < worst < spread, f"{worst:.2%}, seeds {spread:.2%}: {found}, bf16 {right}"
    return f"20 losses within {worst:.2%}, another seed's {spread:.2%}; the last {found[-1]:.4f}"


def check_float8_all_gather(bench):
    """The losses of --float8 tensorwise alone: on one rank it is the same scale."""
    flags = float8_flags(bench, "tensorwise") + (" --compile" if bench.is_cuda else "")
    losses = []
    for more in ("", " --float8-all-gather"):
        args, job = build_job(bench, flags + more)
        losses.append(run_steps(bench, args, job, 4)[0])
    error = relative_error(*losses)
    assert error < ULP, losses
    return f"4 losses within {error:.1e}"


def build_on_tp(bench, flags, styles):
    """As `build_job`, with the styles of tp on a mesh of one rank, and loss parallelism."""
    argv, fsdp = shlex.split(f"{bench.flags} --out {bench.folder} {flags}"), parallel.apply_fsdp

    def apply_both(stage, mesh, **options):
        parallel.apply_tp(stage, mesh["tp"], *styles, loss_parallel=True)
        fsdp(stage, mesh, **options)

    args, config = train.read_flags(argv, train.find_hardware(), 1)
    with mock.patch.object(parallel, "apply_fsdp", apply_both):
        job = train.build(args, config, bench.device)
    return args, train.start(args, dataclasses.replace(job, loss_parallel=True))


def check_tp(bench, recipe):
    """The losses of a model without tp; eager, and compiled where float8 is native."""
    float8_flag = float8_flags(bench, recipe) if recipe else ""
    styles, notes = float8.float8_tp_styles(recipe) if recipe else (), []
    for compiles in ("", "--compile")[: 1 if "emulate" in float8_flag else 2]:
        args, job = build_job(bench, f"{float8_flag} {compiles}")
        right = run_steps(bench, args, job, 3)[0]
        args, job = build_on_tp(bench, f"{float8_flag} {compiles}", styles)
        error = relative_error(run_steps(bench, args, job, 3)[0], right)
        notes.append(f"{compiles or 'eager'} within {error:.1e}")
        assert error < ULP, notes
    return f"3 losses: {', '.join(notes)}"


PROGRAM = """  # train.py, that writes its flight record although nothing fails
import sys, train, watch
sys.argv[0], end = "train.py", train.dist.destroy_process_group
train.dist.destroy_process_group = lambda: (watch.dump_flight_record(), end())
train.run()
"""


def check_program(bench):
    """train.py itself: saved, resumed and --deterministic, bit-equal to a run without a break."""
    common = f"{bench.flags} --data {bench.folder}/source.txt --data-cache {bench.folder} --ac op "
    common += "--deterministic --log-every 1 --warmup-steps 1 --decay-ratio 0 --flight-recorder 99"
    common += " --memory-snapshot" if bench.is_cuda else ""
    for out, steps in (("whole", 6), ("broken", 3), ("broken", 6)):
        flags = shlex.split(f"{common} --out {bench.folder}/{out} --steps {steps}")
        command = [sys.executable, "-c", PROGRAM, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    assert "resumed" in done.stdout
    whole, broken = (
        [json.loads(line) for line in (bench.folder / out / "metrics.jsonl").open()]
        for out in ("whole", "broken")
    )
    for a, b in zip(whole, broken, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"]), (a, b)
    record = pickle.loads((bench.folder / "broken" / "flight" / "rank-0").read_bytes())
    names = {entry["profiling_name"] for entry in record["entries"]}
    assert names, "an empty flight record"
    snapshot = bench.folder / "broken" / "memory" / "rank-0.pickle"
    assert snapshot.exists() == bench.is_cuda
    note = f"6 steps bit-equal; the flight record knows {', '.join(sorted(names))}"
    return note + (f", the snapshot has {snapshot.stat().st_size:,} bytes" if bench.is_cuda else "")


def check_async_tp_graphs(bench):
    """What is fused with matmuls in both graphs of a block, by this torch, on a pretended tp 8."""
    flags = "--set dim=256 n_layers=1 n_heads=8 n_kv_heads=8 ffn_dim=512 vocab_size=256 --seq-len "
    flags += "64 --optimizer sgd --param-dtype bf16 --local-batch-size 1"
    code = f"from ranks import async_tp_graphs; print(async_tp_graphs(8, [{flags!r}]))"
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    found = done.stdout.splitlines()[-1]
    assert found.count("fused_all_gather_matmul") == 2, found
    return found


CHECKS = {
    "attention": check_attention,
    "recomputation": check_recomputation,
    "compile": check_compile,
    "loss chunks": check_loss_chunks,
    "no host sync": check_no_host_sync,
    "async save": check_async_save,
    "init": check_init,
    "cpu offload": check_cpu_offload,
    "tp styles": functools.partial(check_tp, recipe=None),
    "tp styles float8": functools.partial(check_tp, recipe="tensorwise"),
    "float8 all-gather": check_float8_all_gather,
    "program": check_program,
    "async tp graphs": check_async_tp_graphs,
}

# ---- 3. Throughput -----------------------------------------------------------------------------


def shape_that_fits(free_bytes, seq_len):
    """(layers, local batch size) of an 8B-shaped model: batch 2 if it leaves room for 4 layers.

    Bytes: 16 per parameter (float32 weight, gradient, two moments); per token and block what
    --ac op holds; 14 per logit (bf16 and in float32 softmax and two gradients); 8 GiB for gathered
    weights and whatever comes and goes. A fifth stays free.
    """
    c = model.MODELS["8b"]
    ends = model.count_parameters(dataclasses.replace(c, n_layers=0))
    block = (model.count_parameters(c) - ends) // c.n_layers
    held = 2 * (3 * c.dim + c.n_kv_heads * c.head_dim + c.ffn_dim) + 4 * c.n_heads
    for local_batch_size, least in ((2, 4), (1, 1)):
        n_tokens = local_batch_size * seq_len
        fixed = 16 * ends + 14 * n_tokens * c.vocab_size + 8 * 2**30
        n_layers = int((0.8 * free_bytes - fixed) // (16 * block + held * n_tokens))
        if n_layers >= least:
            return min(n_layers, c.n_layers), local_batch_size
    raise Skip(f"no layer fits into the {free_bytes / 2**30:.0f} GiB that are free")


def find_gaps(events):
    """When no kernel ran on any stream: [(us, kernel before, kernel after)], longest first."""
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    gaps, busy_until, last = [], None, ""
    for start, end, name in kernels:
        if last and start > busy_until:
            gaps.append((start - busy_until, last, name))
        if not last or end > busy_until:
            busy_until, last = end, name
    return sorted(gaps, reverse=True)


def short_name(kernel):
    """A kernel's name without return type, name spaces, template arguments and parameters."""
    bare = re.sub(r"^void |\(anonymous namespace\)::|<.*", "", kernel).split("(")[0]
    return bare.split("::")[-1][:40]


def measure_row(bench, flags, n_steps):
    """Time steps on random tokens, then profile one: {column: text}."""
    if "float8" in flags and "emulate" in float8_flags(bench, ""):
        if bench.is_cuda:
            raise Skip("float8 needs a GPU of capability 8.9")
        flags = flags.replace("--compile", "--float8-emulate")
    args, job = build_job(bench, f"--lr 1e-5 {flags}")
    shape = args.local_batch_size, args.seq_len + 1
    tokens = torch.randint(job.config.vocab_size, shape, device=bench.device)
    batch = tokens[:, :-1], tokens[:, 1:]
    for _ in range(3):  # compiles, makes the optimizer's states, settles
        run_step(args, job, batch).tolist()
    start_s = time.perf_counter()
    for _ in range(n_steps):
        stats = run_step(args, job, batch)
    assert stats.isfinite().all(), stats  # and waits for the last step
    tokens_per_s = n_steps * batch[0].numel() / (time.perf_counter() - start_s)
    tflops = tokens_per_s * model.flops_per_token(job.config, args.seq_len) / 1e12
    peak, memory = model.peak_tflops(bench.device), torch.cuda.memory_stats()  # {} without CUDA
    gaps = []
    if bench.is_cuda:  # its kernels alone: watching the host too would slow it down
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run_step(args, job, batch).tolist()
        gaps = find_gaps(profile.events())[:5]
    texts = [f"{us:,.0f} (`{short_name(a)}`, `{short_name(b)}`)" for us, a, b in gaps]
    return {
        "tokens/s": f"{tokens_per_s:,.0f}",
        "TFLOPs": f"{tflops:,.1f}",
        "MFU of bf16's peak": f"{tflops / peak:.1%}" if peak else "n/a",
        "active GiB": f"{memory.get('active_bytes.all.peak', 0) / 2**30:.1f}",
        "reserved GiB": f"{memory.get('reserved_bytes.all.peak', 0) / 2**30:.1f}",
        "gaps": ", ".join(texts) or "no kernels seen",
    }


def table_bench(bench):
    """With the flags of the table's model."""
    shape = bench.flags
    if bench.is_cuda:
        n_layers, local_batch_size = shape_that_fits(torch.cuda.mem_get_info()[0], 8192)
        shape = f"--model 8b --set n_layers={n_layers} --seq-len 8192 --param-dtype bf16 "
        shape += f"--local-batch-size {local_batch_size}"
    return dataclasses.replace(bench, flags=shape)


def measure(bench, report, rows):
    """Measure the rows; those that failed or do not apply are left out."""
    bench = table_bench(bench)
    for name, flags in ROWS.items():
        n_steps = 5 if bench.is_cuda else 1
        row = report.run(name, measure_row, bench, flags, n_steps, needs_s=ROW_S)
        rows |= {name: row} if row else {}
    return f"{len(rows)} of {len(ROWS)} rows of `{bench.flags}`"


def check_simulation(bench, rows):
    """simulate.py's peaks of the rows' flags, beside the measured; it traces no compiler."""
    bench, simulated, notes = table_bench(bench), {}, []
    for name, row in rows.items():
        flags = ROWS[name].replace(" --compile", "")
        if "float8" not in flags and flags not in simulated and (bench.is_cuda or not simulated):
            command = f"simulate.py {bench.flags} {flags} --world-size 1 --out {bench.folder}/s"
            command = [sys.executable, *shlex.split(command)]
            options = {"cwd": ROOT, "capture_output": True, "text": True}
            done = subprocess.run(command, **options, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
            assert done.returncode == 0, done.stderr[-1500:]
            rank = json.loads((bench.folder / "s" / "simulation.json").read_text())["ranks"][0]
            keys = ("peak_bytes", "reserved_bytes")
            simulated[flags] = " and ".join(f"{rank[key] / 2**30:.2f}" for key in keys)
        measured = f"{row['active GiB']} and {row['reserved GiB']}"
        if flags in simulated:
            notes.append(f"{name} {simulated[flags]}, measured {measured}")
    return "GiB live and reserved: " + "; ".join(notes)


def print_table(bench, rows):
    gaps = "".join(f"* {name}: {row['gaps']}\n" for name, row in rows.items())
    for name, row in rows.items():
        row = {column: text for column, text in row.items() if column != "gaps"}
        if name == next(iter(rows)):
            print(f"\n{describe_machine(bench)}\n\n| | {' | '.join(row)} |")
            print(f"| --- |{' ---: |' * len(row)}")
        print(f"| {name} | {' | '.join(row.values())} |")
    print(
        f"\nLongest times without a kernel in one step, us (after, before):\n\n{gaps}", flush=True
    )


def describe_machine(bench):
    gpu = torch.cuda.get_device_name() if bench.is_cuda else "CPU, tiny shapes: no measurement"
    has_torchao = importlib.util.find_spec("torchao")
    torchao = importlib.metadata.version("torchao") if has_torchao else "not installed"
    return f"{datetime.date.today()}, {gpu}, torch {torch.__version__}, torchao {torchao}"


def main():
    device_type = "cpu" if "--cpu" in sys.argv else "cuda"
    if device_type == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check.py needs a CUDA device; --cpu tries it on tiny shapes without one")
    if device_type == "cpu":  # the compiler of real runs takes half a minute
        for function in (parallel.apply_compile, parallel.build_loss):
            quick = functools.partial(function, backend="aot_eager")
            setattr(parallel, function.__name__, quick)
    start_s, limit_s = time.monotonic(), LIMIT_S if device_type == "cuda" else 3600
    report, rows = Report(limit_s), {}
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), Path(name) / "source.txt"
        # easy and always the same, so that float8's deviation does not depend on the day
        text.write_text("".join(f"{k} times {k} is {k * k}. " for k in range(20_000)))
        tokens = data.open_tokens(str(text), "bytes", data_cache=folder, is_builder=True)
        device = train.init_distributed(train.parse_args([]), train.find_hardware())
        bench = Bench(device, SMALL[device_type], tokens, folder)

        def give_up():
            faulthandler.dump_traceback()
            print_table(bench, rows)
            os._exit(1)

        hung = threading.Timer(limit_s, give_up)
        hung.daemon = True
        hung.start()
        print(describe_machine(bench), flush=True)
        try:
            report.run("throughput", measure, bench, report, rows)
            for title, check in CHECKS.items():
                report.run(title, check, bench)
            for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
                report.run(f"float8 {recipe}", check_float8, bench, recipe)
            report.run("simulated memory", check_simulation, bench, rows)
        finally:
            print_table(bench, rows)
        hung.cancel()
        dist.destroy_process_group()
    print(f"{report.n_failed} failed, {time.monotonic() - start_s:.0f} s")
    sys.exit(report.n_failed > 0)


if __name__ == "__main__":
    main()

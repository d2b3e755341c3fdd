"""How fast it is on a CPU, and where the time goes: `python tests/bench.py`, a table in minutes.

    python tests/bench.py --size 512                 dim 512 in place of the debug model
    python tests/bench.py --profile "pp 2"           operators of a step on rank 0
    python tests/bench.py --torchtitan               beside torchtitan 0.2.2, if it is installed

Every case has one thread a rank, and beside it on the same ranks a plain loop: a dozen lines over
the same model.py with neither mesh nor FSDP, on whole batches. Their steps alternate, so that what
else the machine does meets both alike; shown are medians over the steps, and of the ratios of steps
that follow each other. "Of the plain loop" are the tokens/s of a rank over those of that loop; the
same of tokens per second of CPU time is disturbed less by more ranks than cores, or by another
program, since waiting for a rank costs none. The ceiling is one thread's rate on the ffn's matmul,
in between; FLOPs are those that MFU counts, over CPU time. Nothing is asserted.

torchtitan runs its own Trainer's step on the same shapes, in turn with the others, where it can on
a CPU: its context parallelism cannot, and compiled or recomputed it is left out.
"""

import argparse
import logging
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import make_job, run_ranks  # noqa: E402

import model  # noqa: E402
import train  # noqa: E402

ROOT = Path(__file__).parents[1]
SIZES = {
    "debug": ("--seq-len 512", 8),
    "512": ("--set dim=512 n_layers=8 n_heads=8 n_kv_heads=4 ffn_dim=1536 vocab_size=32000 "
            "--seq-len 512", 4),
}  # fmt: skip
CASES = {  # ranks and flags; a data rank has its share of the batch
    "one process": (1, ""),
    "dp 2": (2, "--dp-shard 2"),
    "tp 2": (2, "--tp 2"),
    "pp 2": (2, "--pp 2"),
    "cp 2": (2, "--cp 2"),
    "dp 2 x tp 2": (4, "--dp-shard 2 --tp 2"),
    "compile": (1, "--compile"),
    "ac op": (1, "--ac op"),
    "ac full": (1, "--ac full"),
}
BESIDE = ("one process", "dp 2", "tp 2", "pp 2", "dp 2 x tp 2")  # of these torchtitan's step too
PARTS = """
import os, sys, time
clock = [time.perf_counter()]
def lap(): clock.append(time.perf_counter()); return clock[-1] - clock[-2]
import torch, train
print("import", lap())
hardware = train.find_hardware()
args, config = train.read_flags(sys.argv[1:], hardware, 1)
device = train.init_distributed(args, hardware)
print("group", lap())
job = train.build(args, config, device)
print("build", lap())
job = train.start(args, job)
print("start", lap())
x = torch.zeros(args.local_batch_size, args.seq_len, dtype=torch.int64)
train.train_step(job, x, x, local_batch_size=args.local_batch_size, max_norm=1.0)
print("first step", lap())
os._exit(0)
"""


def random_batch(config, shape):
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, dims=1)


def read_flags(flags):
    return train.read_flags(flags.split(), train.Hardware("cpu", None, None), dist.get_world_size())


def plain_step(flags, n_rows):
    """The dozen lines: a function that makes a step."""
    args, config = read_flags(flags)
    net = model.Transformer(config, seq_len=args.seq_len)
    inputs, labels = random_batch(config, (n_rows, args.seq_len))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step():
        logits = net(inputs).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_rank(flags, n_rows):
    """Sequences of a data rank."""
    return n_rows // 2 if "--dp-shard" in flags else n_rows


def our_step(flags, n_rows):
    n_local = per_rank(flags, n_rows)
    args, job = make_job(f"{flags} --local-batch-size {n_local} --lr 1e-4")
    inputs, labels = random_batch(job.config, (n_local, args.seq_len))
    sizes = {"local_batch_size": n_local, "max_norm": 1.0}
    return lambda: train.train_step(job, inputs, labels, **sizes)


def torchtitan_step(flags, n_rows):
    """The same step by torchtitan's own Trainer, without its data, its logs and its checkpoints."""
    # experts' kernels, which want triton and are not called here
    sys.modules["torchtitan.models.moe.kernels"] = SimpleNamespace(generate_permute_indices=None)
    torch._utils._get_available_device_type = lambda: "cpu"  # it knows of accelerators alone
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.train import Trainer

    args, config = read_flags(f"{flags} --local-batch-size {per_rank(flags, n_rows)}")
    inputs, labels = random_batch(config, (args.local_batch_size, args.seq_len))
    shape = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "rope_theta", "norm_eps")
    shape = {name: getattr(config, name) for name in shape}
    degrees = train.degrees_of(args) | {"ep": 1, "etp": 1, "world_size": dist.get_world_size()}
    settings = JobConfig()
    settings.training.seq_len = args.seq_len
    settings.training.local_batch_size = args.local_batch_size
    settings.training.mixed_precision_param = "float32"
    settings.activation_checkpoint.mode = "none"
    settings.parallelism.pipeline_parallel_degree = args.pp
    settings.optimizer.lr = 1e-4

    titan, spec = object.__new__(Trainer), get_train_spec("llama3")
    titan.job_config, titan.device = settings, torch.device("cpu")
    titan.parallel_dims, titan.gradient_accumulation_steps = ParallelDims(**degrees), 1
    titan.parallel_dims.build_mesh()
    titan.model_args = TransformerModelArgs(**shape, max_seq_len=args.seq_len)
    titan.loss_fn = build_cross_entropy_loss(settings)
    with torch.device("meta"):
        whole = spec.model_cls(titan.model_args)
    assert sum(p.numel() for p in whole.parameters()) == model.count_parameters(config)
    if args.pp > 1:
        (titan.pp_schedule, titan.model_parts, titan.pp_has_first_stage,
         titan.pp_has_last_stage) = spec.pipelining_fn(
            whole, titan.parallel_dims, settings, titan.device, titan.model_args,
            spec.parallelize_fn, titan.loss_fn)  # fmt: skip
    else:
        titan.model_parts = [spec.parallelize_fn(whole, titan.parallel_dims, settings)]
    for part in titan.model_parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks what it asks for
    titan.optimizers = spec.build_optimizers_fn(
        titan.model_parts, settings.optimizer, titan.parallel_dims
    )
    constant = SimpleNamespace(get_last_lr=lambda: [1e-4])
    titan.lr_schedulers = SimpleNamespace(schedulers=[constant], step=lambda: None)
    titan.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    titan.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    titan.step = 1
    titan.train_context = dist_utils.get_train_context(args.tp > 1)
    titan.maybe_enable_amp = dist_utils.maybe_enable_amp(titan.parallel_dims, "float32", "cpu")
    return lambda: titan.train_step(iter([({"input": inputs}, labels)]))


def measure(flags, n_rows, n_steps, makers):
    """Seconds and seconds of CPU time of each step, which alternate, and the ceiling in between.

    Returns: float (n_steps, makers, 2), and FLOPs in a second of CPU time of one thread (n_steps,).
    """
    logging.disable(logging.INFO)  # torchtitan's
    args, config = read_flags(flags)
    x, w = torch.randn(n_rows * args.seq_len, config.dim), torch.randn(config.dim, config.ffn_dim)
    steps, times, ceilings = [make(flags, n_rows) for make in makers], [], []
    for step in steps:
        step()
    for turn in range(n_steps):
        times.append([None] * len(steps))
        for i in range(turn, turn + len(steps)):  # each comes first in turn
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            steps[i % len(steps)]()
            cpu_s = time.process_time() - start_cpu_s
            dist.barrier()
            times[-1][i % len(steps)] = time.perf_counter() - start_s, cpu_s
        start_s = time.process_time()
        for _ in range(5):
            x @ w  # as w1 does
        ceilings.append(5 * 2 * len(x) * w.numel() / (time.process_time() - start_s))
    return torch.tensor(times), torch.tensor(ceilings)


def profile(flags, n_rows):
    step = our_step(flags, n_rows)
    for _ in range(3):
        step()
    with torch.profiler.profile() as profiler:
        step()
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
    return "\n".join(line[:60] + line[-140:] for line in table.splitlines())


def print_parts(flags, n_rows):
    """Seconds until the end of the first step, and of --help, each in a fresh process."""
    argv = [*flags.split(), "--local-batch-size", str(n_rows)]
    for title, command in (
        ("one process", [sys.executable, "-c", PARTS, *argv]),
        ("the same, --compile", [sys.executable, "-c", PARTS, *argv, "--compile"]),
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        parts = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
        print(f"start of {title}: " + ", ".join(f"{name} {float(s):.1f} s" for name, s in parts))
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True)
    print(f"train.py --help: {time.perf_counter() - start_s:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="debug")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--torchtitan", action="store_true", help="two more columns")
    parser.add_argument("--profile", choices=CASES, help="instead of the table")
    args = parser.parse_args()
    if args.torchtitan and find_spec("torchtitan") is None:
        parser.error("--torchtitan needs its package: pip install torchtitan==0.2.2")
    size, n_rows = SIZES[args.size]
    if args.profile:
        n_ranks, flags = CASES[args.profile]
        print(run_ranks(n_ranks, profile, f"{size} {flags}", n_rows, timeout_s=600)[0])
        return
    job_args, config = train.read_flags(size.split(), train.Hardware("cpu", None, None), 1)
    n_tokens = n_rows * job_args.seq_len
    flops = n_tokens * model.flops_per_token(config, job_args.seq_len)
    heads = ["", "tokens/s a rank", "of the plain loop", "by CPU time", "of the ceiling"]
    heads += ["of torchtitan", "by CPU time"] * args.torchtitan
    print(f"| {' | '.join(heads)} |\n| --- {'| ---: ' * (len(heads) - 1)}|")
    for name in args.cases:
        n_ranks, flags = CASES[name]
        makers = [plain_step, our_step]
        if args.torchtitan and name in BESIDE:
            makers.append(torchtitan_step)
        task = (measure, f"{size} {flags}", n_rows, args.steps, makers)
        ranks = run_ranks(n_ranks, *task, timeout_s=1800)
        times, (_, ceilings) = torch.stack([times for times, _ in ranks]).mean(0), ranks[0]
        plain, ours = times[:, 0], times[:, 1] * n_ranks  # (steps, 2), for a rank's share
        cells = [f"{n_tokens / ours[:, 0].median():,.0f}"]
        cells += [f"{ratio:.2f}" for ratio in (plain / ours).median(0).values]
        cells.append(f"{(flops / ours[:, 1] / ceilings).median():.0%}")
        if torchtitan := times[:, 2:].unbind(1):
            cells += [f"{ratio:.2f}" for ratio in (torchtitan[0] * n_ranks / ours).median(0).values]
        cells += [""] * (len(heads) - 1 - len(cells))
        print(f"| {' | '.join([name, *cells])} |", flush=True)
    print()
    print_parts(size, n_rows)


if __name__ == "__main__":
    main()

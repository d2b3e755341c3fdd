"""How fast it is on a CPU, and where the time goes: `python tests/bench.py`, a table in minutes.

    python tests/bench.py --size 512 --rounds 5      dim 512 in place of the debug model
    python tests/bench.py --profile "pp 2"           operators of a step on rank 0
    python tests/bench.py --torchtitan               beside torchtitan 0.2.2, if it is installed

Runs of all cases alternate, so that what else the machine does meets them alike; shown are medians
over the rounds. One thread a rank. Every case trains on the same tokens a step as the plain loop, a
dozen lines over the same model.py with neither mesh nor FSDP. "Of the plain loop" is the tokens/s
of a rank over those of that loop, and the same of tokens per second of CPU time, which more ranks
than cores, or another program, disturb less; waiting for a rank costs none. The ceiling is one
thread's rate on the ffn's matmul, measured in each round; FLOPs are those that MFU counts, over CPU
time. Nothing is asserted.

torchtitan runs its own Trainer's step on the same shapes, in the same rounds, where it can on a
CPU: its context parallelism cannot, and compiled or recomputed it is left out.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
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


def plain_step(flags, n_rows):
    """The dozen lines: a function that makes a step, and the ModelConfig."""
    args, job = make_job(f"{flags} --local-batch-size {n_rows}")  # for its config
    net = model.Transformer(job.config, seq_len=args.seq_len)
    inputs, labels = random_batch(job.config, (n_rows, args.seq_len))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step():
        logits = net(inputs).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, job.config


def per_rank(flags, n_rows):
    return n_rows // 2 if "--dp-shard" in flags else n_rows


def our_step(flags, n_rows):
    n_local = per_rank(flags, n_rows)
    args, job = make_job(f"{flags} --local-batch-size {n_local} --lr 1e-4")
    inputs, labels = random_batch(job.config, (n_local, args.seq_len))
    sizes = {"local_batch_size": n_local, "max_norm": 1.0}
    return lambda: train.train_step(job, inputs, labels, **sizes), job.config


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

    args, job = make_job(f"{flags} --local-batch-size {per_rank(flags, n_rows)}")
    config, inputs = job.config, random_batch(job.config, (args.local_batch_size, args.seq_len))
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
    batch, labels = inputs
    return lambda: titan.train_step(iter([({"input": batch}, labels)])), config


def measure(make_step, flags, n_rows, n_steps):
    """Seconds and seconds of CPU time of a step of this rank."""
    step, _ = make_step(flags, n_rows)
    for _ in range(2):
        step()
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        step()
    cpu_s = time.process_time() - start_cpu_s
    dist.barrier()
    return (time.perf_counter() - start_s) / n_steps, cpu_s / n_steps


def ceiling_flops(config, n_tokens):
    """FLOPs in a second of CPU time of one thread, multiplying as w1 does."""
    x, w = torch.randn(n_tokens, config.dim), torch.randn(config.dim, config.ffn_dim)
    times = []
    for _ in range(10):
        start_s = time.process_time()
        x @ w
        times.append(time.process_time() - start_s)
    return 2 * n_tokens * w.numel() / min(times)


def profile(flags, n_rows):
    step, _ = our_step(flags, n_rows)
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--torchtitan", action="store_true", help="two more columns")
    parser.add_argument("--profile", choices=CASES, help="instead of the table")
    args = parser.parse_args()
    size, n_rows = SIZES[args.size]
    if args.profile:
        n_ranks, flags = CASES[args.profile]
        print(run_ranks(n_ranks, profile, f"{size} {flags}", n_rows, timeout_s=600)[0])
        return
    job_args, config = train.read_flags(size.split(), train.Hardware("cpu", None, None), 1)
    n_tokens, seen = n_rows * job_args.seq_len, defaultdict(list)
    flops = n_tokens * model.flops_per_token(config, job_args.seq_len)
    cases = {"plain loop": (1, plain_step, "")}
    for name in args.cases:
        n_ranks, flags = CASES[name]
        cases[name] = (n_ranks, our_step, flags)
        if args.torchtitan and name in BESIDE:
            cases[f"{name}, torchtitan"] = (n_ranks, torchtitan_step, flags)
    for _ in range(args.rounds):
        seen["ceiling"].append(ceiling_flops(config, n_tokens))
        for name, (n_ranks, make_step, flags) in cases.items():
            task = (measure, make_step, f"{size} {flags}", n_rows, args.steps)
            ranks = run_ranks(n_ranks, *task, timeout_s=900)
            # tokens of a second, per rank, and of a second of CPU time
            seen[name].append(
                (n_tokens / ranks[0][0] / n_ranks, n_tokens / sum(c for _, c in ranks))
            )
    ceiling = statistics.median(seen.pop("ceiling"))
    print(f"ceiling {ceiling / 1e9:.1f} GFLOPs a second and thread; {args.rounds} rounds\n")

    def ratio(name, other, i):
        """The median over the rounds; i: 0 by the clock, 1 by CPU time."""
        pairs = zip(seen[name], seen.get(other, []), strict=other in seen)
        ratios = [mine[i] / theirs[i] for mine, theirs in pairs]
        return f"{statistics.median(ratios):.2f}" if ratios else ""

    heads = ["", "tokens/s a rank", "of the plain loop", "tokens per CPU s", "of it"]
    heads += ["of the ceiling", *["of torchtitan", "of its tokens per CPU s"] * args.torchtitan]
    print(f"| {' | '.join(heads)} |\n| --- {'| ---: ' * (len(heads) - 1)}|")
    for name, rates in seen.items():
        if name.endswith("torchtitan"):
            continue
        cells = [name]
        for i in (0, 1):
            median = statistics.median(rate[i] for rate in rates)
            cells += [f"{median:,.0f}", ratio(name, "plain loop", i)]
        cells.append(f"{median * flops / n_tokens / ceiling:.0%}")
        cells += [ratio(name, f"{name}, torchtitan", i) for i in (0, 1) if args.torchtitan]
        print(f"| {' | '.join(cells)} |")
    print()
    print_parts(size, n_rows)


if __name__ == "__main__":
    main()

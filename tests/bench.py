"""How fast it is on a CPU, and where the time goes: `python tests/bench.py`, a table in minutes.

    python tests/bench.py --size 512 --rounds 5      dim 512 in place of the debug model
    python tests/bench.py --profile "pp 2"           operators of a step on rank 0

Runs of all cases alternate, so that what else the machine does meets them alike; shown are medians
over the rounds. One thread a rank. Every case trains on the same tokens a step as the plain loop, a
dozen lines over the same model.py with neither mesh nor FSDP. "Of the plain loop" is the tokens/s
of a rank over those of that loop, and the same of tokens per second of CPU time, which more ranks
than cores, or another program, disturb less; waiting for a rank costs none. The ceiling is one
thread's rate on the ffn's matmul, measured in each round; FLOPs are those that MFU counts, over CPU
time. Nothing is asserted.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

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


def our_step(flags, n_rows):
    per_rank = n_rows // 2 if "--dp-shard" in flags else n_rows
    args, job = make_job(f"{flags} --local-batch-size {per_rank} --lr 1e-4")
    inputs, labels = random_batch(job.config, (per_rank, args.seq_len))
    sizes = {"local_batch_size": per_rank, "max_norm": 1.0}
    return lambda: train.train_step(job, inputs, labels, **sizes), job.config


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
    parser.add_argument("--profile", choices=CASES, help="instead of the table")
    args = parser.parse_args()
    size, n_rows = SIZES[args.size]
    if args.profile:
        n_ranks, flags = CASES[args.profile]
        print(run_ranks(n_ranks, profile, f"{size} {flags}", n_rows, timeout_s=600)[0])
        return
    job_args, config = train.read_flags(size.split(), train.Hardware("cpu", None, 0, None), 1)
    n_tokens, seen = n_rows * job_args.seq_len, defaultdict(list)
    flops = n_tokens * model.flops_per_token(config, job_args.seq_len)
    cases = {"plain loop": (1, plain_step, "")}
    cases |= {name: (CASES[name][0], our_step, CASES[name][1]) for name in args.cases}
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
    print("| | tokens/s a rank | of the plain loop | tokens per CPU s | of it | of the ceiling |")
    print("| --- " + "| ---: " * 5 + "|")
    for name, rates in seen.items():
        cells = []
        for i in (0, 1):  # by the clock, by CPU time
            mine, plain = ([rate[i] for rate in of] for of in (rates, seen["plain loop"]))
            ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
            cells += [f"{statistics.median(mine):,.0f}", f"{ratio:.2f}"]
        share = statistics.median(cpu for _, cpu in rates) * flops / n_tokens / ceiling
        print(f"| {name} | {' | '.join(cells)} | {share:.0%} |")
    print()
    print_parts(size, n_rows)


if __name__ == "__main__":
    main()

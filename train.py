"""The training program: flags, checks, the order of transformations, the loop and what it prints.

    python train.py                                  one process, CPU or one GPU
    torchrun --nproc-per-node 2 train.py             the same run on two ranks
    torchrun --nnodes 32 --nproc-per-node 8 train.py @recipes/llama3_70b.args

    parse_args, check_args    §1   every flag, and every rule between them, before any rank waits
    init_distributed          §2   ranks, devices, timeouts
    build                     §3   model -> mesh, in the order of the paper's Appendix A
    train_step, evaluate      §4   one optimizer step, one validation: tests call these and `build`
    Metrics                   §5   what is printed and logged
    simulate                  §6   count what a rank of any mesh would hold, send and compute
    main                      §7   resume, the loop, the end

One loss for every mesh:

    loss = sum over the global batch of CE(logits, label) / number of valid labels in it

The count is summed over the data ranks before the first backward pass, so that a gradient needs no
factor afterwards: any number of ranks, accumulation steps or microbatches gives the same sum, and
batches whose ignored labels (-100) are unevenly spread are weighted by token, not by rank.

No host sync in a step that does not log, evaluate or save: it only enqueues work. Its loss and
gradient norm are copied to the host behind its back and looked at one step later. A step that gave
NaN or Inf stops all ranks together and is never saved.

Sources: TorchTitan (arXiv 2410.06511) §2.1, §2.3 and Appendix A; the learning rate schedule,
warmup-stable-decay: MiniCPM (arXiv 2404.06395).
"""

import argparse
import dataclasses
import gc
import importlib.util
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import data
import float8
import model
import parallel
import pipeline

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the mesh, outer to inner

# ---- 1. Flags ----------------------------------------------------------------------------------


def parse_args(argv=None):
    """Read the flags; @FILE reads flags from a file, and flags after it override it."""
    parser = argparse.ArgumentParser(
        description="Pretrain a Llama on one process, or with torchrun on any mesh of ranks.",
        epilog="@recipes/NAME.args reads flags from a file; in it, # starts a comment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = raise_value_error  # printed once like every other refusal, not once per rank

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=model.MODELS, default="debug", help="-> model.py:MODELS")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="override fields of the config, as in n_layers=5 dim=64 -> model.py:ModelConfig")
    add("--seq-len", type=int, default=256, help="tokens -> model.py:Transformer")
    add("--seed", type=int, default=0, help="of weights and data order -> model.py:draw_weight")

    add = parser.add_argument_group("data").add_argument
    add("--data", help="text (file, folder or glob) or a folder of token shards; if not given, "
        "the text of Python's standard library -> data.py:open_tokens")
    add("--data-cache", default=".cache", help="folder for tokens made here -> data.py:open_tokens")
    add("--tokenizer", default="bytes", help="bytes, or a tiktoken file -> data.py:load_tokenizer")
    add("--local-batch-size", type=int,
        help="sequences per data rank per forward and backward; if not given 4, or with a pipeline "
        "a microbatch for each of more stages -> train.py:train_step")
    add("--global-batch-size", type=int, default=-1,
        help="sequences per optimizer step on all ranks; what does not fit at once is accumulated; "
        "-1: no accumulation -> train.py:train_step")
    add("--val-data", help="like --data, for validation -> train.py:evaluate")
    add("--val-every", type=int, default=0, help="steps; 0: never -> train.py:evaluate")
    add("--val-steps", type=int, default=8, help="batches each time -> train.py:evaluate")

    add = parser.add_argument_group("parallel").add_argument
    add("--dp-replicate", type=int, default=1, help="HSDP replicas -> parallel.py:apply_fsdp")
    add("--dp-shard", type=int, default=-1,
        help="FSDP; -1: the ranks that the other axes leave -> parallel.py:apply_fsdp")
    add("--cp", type=int, default=1, help="context parallel -> parallel.py:apply_cp")
    add("--tp", type=int, default=1, help="tensor and sequence parallel -> parallel.py:apply_tp")
    add("--pp", type=int, default=1, help="pipeline parallel -> pipeline.py:build_schedule")
    add("--no-loss-parallel", action="store_true",
        help="gather logits over tp before the loss -> parallel.py:apply_tp")
    add("--reshard", choices=("default", "always", "never"), default="default",
        help="free gathered parameters after the forward pass -> parallel.py:apply_fsdp")
    add("--cpu-offload", action="store_true",
        help="keep parameters, gradients and optimizer on the host -> parallel.py:apply_fsdp")
    add("--ac", type=ac_choice, default="none", metavar="{none,full,op,N}",
        help="recompute activations in the backward pass -> parallel.py:apply_ac")
    add("--compile", action="store_true", help="each block -> parallel.py:apply_compile")
    add("--async-tp", action="store_true",
        help="overlap tp's collectives with matmuls -> parallel.py:enable_async_tp")
    add("--loss-chunks", type=int, default=1,
        help="compute head and loss in so many pieces of the sequence -> parallel.py:build_loss")
    add("--param-dtype", choices=DTYPES,
        help="computes in it; if not given bf16 on GPUs, fp32 on CPUs -> parallel.py:apply_fsdp")
    add("--reduce-dtype", choices=DTYPES, default="fp32",
        help="sums gradients in it -> parallel.py:apply_fsdp")

    add = parser.add_argument_group("pipeline").add_argument
    add("--pp-schedule", default="1F1B", metavar="{NAME,FILE.csv}",
        help=f"{', '.join(pipeline.SCHEDULES)}, or a file of one's own -> pipeline.py:kind_of")
    add("--microbatch-size", type=int, default=1,
        help="sequences; the local batch is cut into such -> pipeline.py:run_schedule")
    add("--stages-per-rank", type=int,
        help="if not given 1, or 2 where the schedule needs it -> pipeline.py:count_stages")
    add("--pp-split", metavar="NAMES", help="cut before these modules, as in layers.4,layers.8; "
        "if not given, evenly -> pipeline.py:split_at")
    add("--pp-end-weights", type=int, nargs=2, metavar=("IN", "OUT"),
        help="layers that embedding and head count as, if not given 1 1 "
        "-> pipeline.py:split_layers")

    add = parser.add_argument_group("float8").add_argument
    add("--float8", choices=float8.RECIPES, help="8-bit matmuls -> float8.py:apply_float8")
    add("--float8-all-gather", action="store_true",
        help="FSDP gathers 8-bit weights; tensorwise only -> float8.py:precompute_float8_scales")
    add("--float8-filter", type=lambda text: [name for name in text.split(",") if name],
        default="output", metavar="NAMES", help="linears to leave alone, as in "
        "output,layers.0,auto; auto: those too small to gain -> float8.py:skip_reason")
    add("--float8-emulate", action="store_true",
        help="the same numbers on any hardware, slowly -> float8.py:apply_float8")

    add = parser.add_argument_group("optimizer").add_argument
    add("--steps", type=int, default=100, help="-> train.py:main")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw",
        help="-> train.py:build_optimizer")
    add("--lr", type=float, default=2e-3, help="its peak -> train.py:lr_at")
    add("--warmup-steps", type=int, default=10, help="linear -> train.py:lr_at")
    add("--decay-ratio", type=float,
        help="share of the steps that decay; if not given, all after warmup -> train.py:lr_at")
    add("--decay", choices=("linear", "sqrt", "cosine"), default="linear", help="-> train.py:lr_at")
    add("--min-lr-ratio", type=float, default=0.0, help="end of the decay -> train.py:lr_at")
    add("--weight-decay", type=float, default=0.1, help="-> train.py:build_optimizer")
    add("--beta1", type=float, default=0.9, help="-> train.py:build_optimizer")
    add("--beta2", type=float, default=0.95, help="-> train.py:build_optimizer")
    add("--eps", type=float, default=1e-8, help="-> train.py:build_optimizer")
    add("--max-norm", type=float, default=1.0, help="-> parallel.py:clip_grad_norm")

    add = parser.add_argument_group("checkpoint").add_argument
    add("--out", default="out", help="folder for checkpoints and metrics -> train.py:main")
    add("--checkpoint-every", type=int, default=500,
        help="steps, and after the last; 0: save nothing -> checkpoint.py:Checkpointer")
    add("--checkpoint-mode", choices=("async", "sync"), default="async",
        help="train on while files are written, or wait -> checkpoint.py:Checkpointer")
    add("--keep-latest", type=int, default=10, help="0: all -> checkpoint.py:Checkpointer")
    add("--resume", type=resume_choice, default="auto", metavar="{auto,never,STEP}",
        help="from the newest checkpoint in OUT, or none, or STEP -> checkpoint.py:choose_step")

    add("--init-from", metavar="PATH", help="start at step 0 with the weights of a checkpoint or a "
        "Hugging Face folder -> checkpoint.py:load_weights")

    add = parser.add_argument_group("logging").add_argument
    add("--log-every", type=int, default=10, help="steps -> train.py:Metrics")
    add("--tensorboard", action="store_true", help="write OUT/tensorboard -> train.py:Metrics")
    add("--profile-steps", metavar="A:B",
        help="trace these steps into OUT/profile, one file per rank -> train.py:build_profiler")
    add("--memory-snapshot", action="store_true",
        help="CUDA: what filled the memory, at the end or when it runs out, into OUT/memory "
        "-> train.py:dump_memory")
    add("--flight-recorder", type=int, default=0, metavar="N",
        help="remember the last N collectives, and write them into OUT/flight when a rank fails or "
        "hangs -> train.py:init_distributed")
    add("--check-ranks-every", type=int, default=0, help="steps; compare what ranks must have in "
        "common, 0: never -> train.py:check_ranks")
    add("--timeout-s", type=float, default=300.0,
        help="after which a collective counts as hung, once the first step is done; before, 600 s "
        "or more -> train.py:init_distributed")
    add("--deterministic", action="store_true",
        help="only kernels that repeat bit for bit -> train.py:init_distributed")

    add = parser.add_argument_group("simulation").add_argument
    add("--simulate", type=int, metavar="WORLD_SIZE",
        help="train nothing, but count on this machine what a step on that many ranks holds, sends "
        "and computes -> train.py:simulate")
    add("--simulate-rank", type=int, nargs="+", metavar="RANK",
        help="if not given, one of the first and one of the last pp rank -> train.py:simulate")
    add("--gpu-memory-gib", type=float, metavar="GIB",
        help="simulate as well what would fit into it -> train.py:find_fit")
    return parser.parse_args(argv)


def raise_value_error(message):
    raise ValueError(message)


def ac_choice(text):
    if text not in ("none", "full", "op") and int(text) < 1:
        raise ValueError
    return text


def resume_choice(text):
    return text if text in ("auto", "never") else int(text)


def resolve_args(args, world_size):
    """Fill in, in place, the defaults that depend on other flags; return the ModelConfig."""
    config = model.override_config(model.MODELS[args.model], args.set)
    if args.dp_shard == -1:
        others = args.pp * args.dp_replicate * args.cp * args.tp
        args.dp_shard = max(1, world_size // max(1, others))
    if args.local_batch_size is None:
        one_each = pipeline.kind_of(args.pp_schedule).stages_per_rank == 1
        n_stages = args.pp * (1 if one_each else 2)
        args.local_batch_size = max(4, n_stages * args.microbatch_size if args.pp > 1 else 1)
    if args.global_batch_size == -1:
        args.global_batch_size = args.local_batch_size * args.dp_replicate * args.dp_shard
    if args.param_dtype is None:
        args.param_dtype = "bf16" if torch.cuda.is_available() or args.simulate else "fp32"
    return config


def require(is_met, message):
    """Refuse: flag and value, what it conflicts with, the rule, a way out."""
    if not is_met:
        raise ValueError(message)


def nearest_multiples(value, unit):
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def check_args(args, config, world_size):
    """Raise ValueError for the first rule that the resolved flags break; needs no process group."""
    at_least = {
        "steps": 1, "seq_len": 1, "pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1,
        "local_batch_size": 1, "global_batch_size": 1, "microbatch_size": 1, "log_every": 1,
        "loss_chunks": 1, "val_every": 0, "val_steps": 1,
        "warmup_steps": 0, "checkpoint_every": 0, "keep_latest": 0, "weight_decay": 0,
        "flight_recorder": 0, "check_ranks_every": 0,
    }  # fmt: skip
    for name, least in at_least.items():
        f, value = "--" + name.replace("_", "-"), getattr(args, name)
        require(value >= least, f"{f} {value} must be at least {least}: try {f} {max(1, least)}")
    for name in ("lr", "max_norm", "eps", "timeout_s"):
        f, value = "--" + name.replace("_", "-"), getattr(args, name)
        require(value > 0, f"{f} {value} must be greater than 0: try to leave {f} out")
    for name in ("decay_ratio", "min_lr_ratio", "beta1", "beta2"):
        f, value = "--" + name.replace("_", "-"), getattr(args, name)
        is_share = value is None or 0 <= value <= 1
        require(is_share, f"{f} {value} must be between 0 and 1: try to leave {f} out")
    check_simulation(args)
    model.check_config(config)
    check_mesh(args, config, world_size)
    check_pipeline(args, config)
    check_techniques(args)
    check_float8(args, config)
    has_begun = checkpoint.list_checkpoints(Path(args.out) / "checkpoints")
    if args.init_from and not has_begun and not args.simulate:
        checkpoint.check_init_from(args.init_from, dataclasses.asdict(config))
    n_data = args.dp_replicate * args.dp_shard
    unit = args.local_batch_size * n_data
    require(
        args.global_batch_size % unit == 0,
        f"--global-batch-size {args.global_batch_size} must be a multiple of --local-batch-size "
        f"{args.local_batch_size} times {n_data} data ranks (--dp-replicate x --dp-shard): try "
        f"--global-batch-size {nearest_multiples(args.global_batch_size, unit)}",
    )
    require(
        args.val_data or not args.val_every,
        f"--val-every {args.val_every} needs text, and --val-data is not given: validation reads "
        "its own text; add --val-data PATH or leave --val-every out",
    )
    require(
        not args.tensorboard or importlib.util.find_spec("tensorboard"),
        "--tensorboard needs the package tensorboard, which is not installed: pip install "
        f"tensorboard, or leave it out; {args.out}/metrics.jsonl holds the same numbers",
    )
    if args.profile_steps is not None:
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", args.profile_steps)
        require(
            match and int(match[1]) <= int(match[2]),
            f"--profile-steps {args.profile_steps} conflicts with its form, FIRST:LAST: try 10:12",
        )
    n_local = rank_from_env("LOCAL_WORLD_SIZE")
    require(
        not torch.cuda.is_available() or n_local <= torch.cuda.device_count(),
        f"--nproc-per-node {n_local} (torchrun) exceeds this host's {torch.cuda.device_count()} "
        "GPUs: each rank needs one; start fewer, or CUDA_VISIBLE_DEVICES= torchrun to use the CPU",
    )
    require(
        not args.memory_snapshot or torch.cuda.is_available() or args.simulate,
        "--memory-snapshot conflicts with a CPU: CUDA's allocator keeps the history; leave it out",
    )
    existing = next(p for p in (Path(args.out), *Path(args.out).absolute().parents) if p.exists())
    require(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        f"--out {args.out} cannot be made: {existing} is "
        f"{'not writable' if existing.is_dir() else 'not a folder'}, and a run writes its "
        "checkpoints and metrics there; try another --out",
    )


def check_simulation(args):
    for name in ("simulate_rank", "gpu_memory_gib"):
        f, value = "--" + name.replace("_", "-"), getattr(args, name)
        require(
            value is None or args.simulate is not None,
            f"{f} {value} is about a simulation, but --simulate is not given: add --simulate 8",
        )
    if args.simulate is None:
        return
    n = args.simulate
    require(n >= 1, f"--simulate {n} must be at least 1, a number of ranks: try --simulate 8")
    n_started = rank_from_env("WORLD_SIZE")
    require(
        n_started == 1,
        f"--simulate {n} conflicts with the {n_started} ranks that torchrun started: one process "
        "stands for all; start python train.py",
    )
    for rank in args.simulate_rank or ():
        require(
            0 <= rank < n,
            f"--simulate-rank {rank} is none of --simulate {n}: try 0 to {n - 1}",
        )
    require(
        args.gpu_memory_gib is None or 0 < args.gpu_memory_gib < math.inf,
        f"--gpu-memory-gib {args.gpu_memory_gib} must be a size greater than 0: try 80",
    )


def check_mesh(args, config, world_size):
    product = math.prod(getattr(args, axis) for axis in AXES)
    others = product // args.dp_shard
    typed = " x ".join(f"--{axis.replace('_', '-')} {getattr(args, axis)}" for axis in AXES)
    way_out = f"try --dp-shard {world_size // others}"
    if world_size % others:
        way_out = f"start a multiple of {others} ranks, or lower a degree"
    require(
        product == world_size,
        f"{typed} make {product} ranks, but the world size is {world_size}: the product of the "
        f"degrees must be the number of ranks; {way_out}",
    )
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(config, name)
        divisors = [str(n) for n in range(1, min(value, world_size) + 1) if value % n == 0]
        require(
            value % args.tp == 0,
            f'--tp {args.tp} must divide {name} {value} (model "{args.model}"): '
            f"try --tp {' or '.join(divisors)}",
        )
    rows = -(-config.vocab_size // args.tp)  # of all ranks but the last
    require(
        (args.tp - 1) * rows < config.vocab_size,
        f"--tp {args.tp} leaves the last rank no row of the embedding, of which there are "
        f"vocab_size {config.vocab_size} and others take {rows}: every rank holds some; try --tp 1",
    )
    unit = args.tp * (2 * args.cp if args.cp > 1 else 1)
    require(
        args.seq_len % unit == 0,
        f"--seq-len {args.seq_len} must be a multiple of {unit} with --tp {args.tp} and --cp "
        f"{args.cp} (tp, times 2 cp if cp > 1): try --seq-len "
        f"{nearest_multiples(args.seq_len, unit)}",
    )


def check_pipeline(args, config):
    if args.pp == 1:
        for name in ("stages_per_rank", "pp_split", "pp_end_weights"):
            f, value = "--" + name.replace("_", "-"), getattr(args, name)
            require(value is None, f"{f} {value} needs a pipeline, but --pp is 1: add --pp 2")
        return
    pipeline.check_pipeline(
        args.pp_schedule,
        pp=args.pp,
        local_batch_size=args.local_batch_size,
        microbatch_size=args.microbatch_size,
        stages_per_rank=args.stages_per_rank,
        tied=config.tied_embeddings,
    )
    split_stages(args, config)
    pipeline.check_split_backward(
        args.pp_schedule, ac=args.ac, compile=args.compile, reshard=args.reshard
    )


def check_techniques(args):
    local_len = args.seq_len // (args.cp * args.tp)
    require(
        local_len % args.loss_chunks == 0,
        f"--loss-chunks {args.loss_chunks} must divide the {local_len} tokens of a sequence that a "
        f"rank holds (--seq-len {args.seq_len} / --cp {args.cp} / --tp {args.tp}): try "
        f"--loss-chunks {math.gcd(local_len, args.loss_chunks)}",
    )
    if args.async_tp:
        has_cuda = torch.cuda.is_available()
        for is_met, has, needs in (
            (args.compile, "no --compile", "the compiler does the overlapping; add --compile"),
            (args.tp > 1, f"--tp {args.tp}", "it overlaps the collectives of tp; try --tp 2"),
            (has_cuda or args.simulate, "no CUDA device", "its kernels are CUDA's; leave it out"),
        ):
            require(is_met, f"--async-tp conflicts with {has}: {needs}")


def check_float8(args, config):
    capability = None
    if args.simulate:
        capability = (10, 0)  # needs no hardware, and CUDA must not start before it forks
    elif torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    float8.check_float8(
        args.float8,
        all_gather=args.float8_all_gather,
        skip=args.float8_filter,
        emulate=args.float8_emulate,
        compile=args.compile,
        capability=capability,
    )
    if args.float8:
        with torch.device("meta"):
            whole = model.Transformer(config, seq_len=1)
        rows = args.microbatch_size if args.pp > 1 else args.local_batch_size
        float8.check_float8_fits(
            args.float8,
            skip=args.float8_filter,
            linear_names=[n for n, m in whole.named_modules() if isinstance(m, torch.nn.Linear)],
            n_tokens=rows * args.seq_len // args.cp,
        )


def split_stages(args, config):
    """The module names of every pipeline stage: [[name, ...], ...]."""
    return pipeline.split_model(
        config.n_layers,
        args.pp_schedule,
        pp=args.pp,
        stages_per_rank=args.stages_per_rank,
        pp_split=args.pp_split,
        pp_end_weights=args.pp_end_weights,
    )


def read_flags(argv):
    """(args, ModelConfig) of a command that may run: its defaults filled in, its rules checked."""
    args = parse_args(argv)
    world_size = args.simulate or rank_from_env("WORLD_SIZE")
    config = resolve_args(args, world_size)
    check_args(args, config, world_size)
    return args, config


# ---- 2. Ranks and devices ----------------------------------------------------------------------


def rank_from_env(name="RANK"):
    """torchrun's RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE, or a single process's."""
    return int(os.environ.get(name, "1" if name.endswith("SIZE") else "0"))


def init_distributed(args):
    """Join the process group and return this rank's device."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank_from_env("LOCAL_RANK"))
        torch.cuda.set_device(device)
    if args.flight_recorder:  # read when the groups are made; NCCL dumps by itself on a timeout
        (Path(args.out) / "flight").mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(args.flight_recorder)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{Path(args.out).absolute()}/flight/rank-"
    if args.memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    options = {"timeout": timedelta(seconds=max(600.0, args.timeout_s))}  # compilation takes long
    if "RANK" not in os.environ:  # plain `python train.py`: a group of one, without a network
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # after --max-restarts the agent's store still holds where the dead ranks listened, and gloo
        # would call there: each attempt looks for its peers under a name of its own
        agent = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        options |= {
            "store": dist.PrefixStore(attempt, dist.TCPStore(*agent, is_master=False)),
            "rank": rank_from_env(),
            "world_size": rank_from_env("WORLD_SIZE"),
        }
    # gloo beside nccl: offloaded gradients and checkpoints are reduced on the host
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **options)
    return device


def shorten_timeouts(timeout_s, but):
    """After the first step no collective takes long, `but` a checkpoint's: notice hangs sooner."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not but:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def dump_flight_record():
    """Write this rank's last collectives as TORCH_FR_DUMP_TEMP_FILE says, if they are recorded."""
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if prefix and dist.is_initialized():
        path = Path(f"{prefix}{dist.get_rank()}")
        recorder = torch._C._distributed_c10d
        dump = recorder._dump_nccl_trace if torch.cuda.is_available() else recorder._dump_fr_trace
        if not path.exists():  # NCCL's own watchdog knows more
            path.write_bytes(dump(True, False, False))


def dump_memory(args):
    """Write the allocator's history as a picture for pytorch.org/memory_viz."""
    if args.memory_snapshot:
        folder = Path(args.out) / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank-{dist.get_rank()}.pickle"))


class TrainingError(Exception):
    """Training cannot begin or go on; every rank raises it at the same step."""


def fail(error):
    """Print the error once per node and leave with status 1.

    torchrun kills all ranks as soon as one exits, so the others wait for that instead of taking the
    message from local rank 0. If nobody comes to kill them, the error was theirs alone.
    """
    if rank_from_env("LOCAL_RANK") > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
        error = f"rank {rank_from_env()}: {error}"
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # without a goodbye to ranks that may be gone, which could hang


# ---- 3. Building a job -------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What `build` makes: this rank's share of the model and what `train_step` needs with it."""

    config: model.ModelConfig
    mesh: dict  # {axis: DeviceMesh}
    device: torch.device
    parts: list  # the model, or this rank's pipeline stages
    loss_fn: object  # (output of the last part, labels, n_valid_tokens) -> loss
    schedule: object  # of torch.distributed.pipelining; None without a pipeline
    optimizer: torch.optim.Optimizer
    positions: torch.Tensor  # global positions of the tokens this cp rank holds, (T/cp,)
    shapes: dict  # {parameter name: full shape} of the whole model
    loss_parallel: bool
    has_float8_scales: bool


def build(args, config, device, *, memory=None):
    """Model, mesh and optimizer of this rank, in the order of the paper's Appendix A.

    `memory` is a context in which weights are made: a simulation's gives them none.
    """
    memory = memory or nullcontext()
    mesh = parallel.build_mesh(
        device.type,
        pp=args.pp,
        dp_replicate=args.dp_replicate,
        dp_shard=args.dp_shard,
        cp=args.cp,
        tp=args.tp,
    )
    with torch.device("meta"):  # shapes only: any size, no memory
        whole = model.Transformer(config, seq_len=args.seq_len)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}

    parts = [whole]
    if args.pp > 1:  # first, so that nothing is done to a layer that lives elsewhere
        stages = split_stages(args, config)
        pp_rank = mesh["pp"].get_local_rank()
        mine = pipeline.stages_of_rank(pp_rank, args.pp, len(stages), args.pp_schedule)
        parts = [pipeline.cut_stage(whole, stages[stage]) for stage in mine]

    use_loss_parallel = args.tp > 1 and not args.no_loss_parallel
    positions = parallel.cp_positions(args.seq_len, cp=args.cp, cp_rank=mesh["cp"].get_local_rank())
    weight_device = torch.device("cpu") if args.cpu_offload else device

    def draw(name, shape):
        if args.simulate:
            return torch.empty(shape)  # a fake tensor has no values
        return model.draw_weight(name, shape, config=config, seed=args.seed, device=weight_device)

    if args.async_tp:
        parallel.enable_async_tp(mesh["tp"])
    for part in parts:
        tp_styles = ()
        if args.float8:
            report_float8(*apply_float8(args, part))
            tp_styles = float8.float8_tp_styles(args.float8)
        if args.tp > 1:
            parallel.apply_tp(part, mesh["tp"], *tp_styles, loss_parallel=use_loss_parallel)
        if args.cp > 1:
            parallel.apply_cp(part, mesh["cp"])
        if args.ac != "none":
            parallel.apply_ac(part, args.ac)
        if args.compile:
            parallel.apply_compile(part, ac=args.ac)
        parallel.apply_fsdp(
            part,
            mesh,
            param_dtype=DTYPES[args.param_dtype],
            reduce_dtype=DTYPES[args.reduce_dtype],
            reshard=args.reshard,
            cpu_offload=args.cpu_offload,
        )
        with memory:
            parallel.materialise(
                part, device=device, weight_device=weight_device, draw=draw, positions=positions
            )
    if args.float8_all_gather:
        with memory:
            float8.precompute_float8_scales(parts)
    loss_fn = parallel.build_loss(parts[-1], args.loss_chunks, args.tp)
    schedule = None
    if args.pp > 1:
        schedule = build_schedule(args, config, mesh["pp"], parts, loss_fn)
    return Job(
        config=config,
        mesh=mesh,
        device=device,
        parts=parts,
        loss_fn=loss_fn,
        schedule=schedule,
        optimizer=build_optimizer(args, parts),
        positions=positions.to(device),
        shapes=shapes,
        loss_parallel=use_loss_parallel,
        has_float8_scales=args.float8_all_gather,
    )


def apply_float8(args, part):
    return float8.apply_float8(
        part,
        args.float8,
        all_gather=args.float8_all_gather,
        skip=args.float8_filter,
        emulate=args.float8_emulate,
        tp=args.tp,
    )


def report_float8(converted, skipped):
    """Say on rank 0 which linears of its stages became 8-bit, and why others did not."""
    if dist.get_rank() > 0:
        return
    print(f"float8 {len(converted)} linears converted: {', '.join(converted[:7])}, ...")
    for reason in dict.fromkeys(skipped.values()):
        names = [name for name, why in skipped.items() if why == reason]
        print(f"       {len(names)} left alone ({reason}): {', '.join(names[:3])}")


def build_schedule(args, config, pp_mesh, parts, loss_fn):
    """The pipeline's schedule object, told the shapes that its stages exchange."""
    rows, local_len = args.microbatch_size, args.seq_len // args.cp
    tokens = torch.empty(rows, local_len, dtype=torch.int64, device="meta")
    dtype = DTYPES[args.param_dtype]
    activation = torch.empty(rows, local_len // args.tp, config.dim, dtype=dtype, device="meta")
    return pipeline.build_schedule(
        parts,
        args.pp_schedule,
        n_microbatches=args.local_batch_size // args.microbatch_size,
        loss_fn=loss_fn,
        pp_mesh=pp_mesh,
        microbatch=(tokens, activation),
    )


def build_optimizer(args, parts):
    """One optimizer over all parts; like the paper's, it decays norms and embeddings as well."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.eps,
        weight_decay=args.weight_decay,
        fused=True,  # one kernel for all parameters instead of a dozen each
    )


def lr_at(step, args):
    """Learning rate of optimizer step `step` (from 1): warmup, stable, decay.

    Warmup is linear and reaches the peak at its last step; decay covers the last steps and would
    reach its end one step after the last, so that no step is wasted at zero. Both are cut to the
    steps there are. It depends on nothing but the flags: a run resumed with more --steps follows
    the schedule of the longer run from there on.
    """
    warmup = min(args.warmup_steps, args.steps)
    decay = args.steps - warmup
    if args.decay_ratio is not None:
        decay = min(round(args.steps * args.decay_ratio), decay)
    stable_until = args.steps + 1 - decay
    if step <= warmup:
        return args.lr * step / warmup
    if step <= stable_until:
        return args.lr
    p = (step - stable_until) / decay  # progress, in (0, 1)
    shape = {"linear": p, "sqrt": math.sqrt(p), "cosine": 0.5 - 0.5 * math.cos(math.pi * p)}
    return args.lr * (1.0 - (1.0 - args.min_lr_ratio) * shape[args.decay])


# ---- 4. One step -------------------------------------------------------------------------------


def count_valid_tokens(job, labels):
    """Labels that count, over all data ranks (int64, on the device); labels are whole sequences."""
    n_valid_tokens = (labels != -100).sum()
    dist.all_reduce(n_valid_tokens, group=job.mesh["data"].get_group())
    return n_valid_tokens


def forward_backward(job, inputs, labels, divisor):
    """Add the gradients of one local batch; return this rank's part of the loss."""
    with loss_parallel() if job.loss_parallel else nullcontext():
        if job.schedule:
            return job.schedule.run(inputs, labels, divisor)
        loss = job.loss_fn(job.parts[0](inputs), labels, divisor)
        loss.backward()
        return loss.detach()


class Stats(NamedTuple):
    """What a step tells the host."""

    loss: float  # of the global batch
    grad_norm: float  # before clipping
    n_valid_tokens: float  # in the global batch
    local_loss: float  # this rank's share of the loss
    n_stops: float  # ranks that were asked to end


def sum_over_ranks(job, loss, n_stops):
    """Both numbers over all ranks, in one all-reduce, so that every rank gets the same bits."""
    # ranks of one tp group computed the same loss, and earlier stages of a pipeline none
    counts = job.mesh["tp"].get_local_rank() == 0
    pair = torch.stack([loss if counts else torch.zeros_like(loss), n_stops])
    dist.all_reduce(pair)
    return pair.unbind()


def refresh_scales(job):
    """After every change of the weights: the scales with which FSDP gathers them in float8."""
    if job.has_float8_scales:
        float8.precompute_float8_scales(job.parts)


def train_step(job, inputs, labels, *, local_batch_size, max_norm, wants_stop=False):
    """One optimizer step on this data rank's share of the global batch; no host sync.

    Args:    inputs and labels, int64 (global batch / data ranks, T), whole sequences; wants_stop,
             whether this rank was asked to end, which travels with the loss.
    Returns: float tensor (5,) on the device, with the names of `Stats`.
    """
    n_valid_tokens = count_valid_tokens(job, labels)
    divisor = n_valid_tokens.clamp(min=1)  # a batch without a valid label: zero loss and gradients
    inputs, labels = inputs[:, job.positions], labels[:, job.positions]  # (B, T) -> (B, T/cp)
    local_loss = torch.zeros((), device=job.device, dtype=torch.get_default_dtype())
    for x, y in zip(inputs.split(local_batch_size), labels.split(local_batch_size), strict=True):
        # FSDP reduces into the sharded gradient each time: accumulating costs traffic, not the
        # memory of whole gradients
        local_loss += forward_backward(job, x, y, divisor)
    loss, n_stops = sum_over_ranks(job, local_loss, local_loss.new_full((), wants_stop))
    parameters = [parameter for part in job.parts for parameter in part.parameters()]
    norm = parallel.clip_grad_norm(parameters, max_norm, job.mesh)
    job.optimizer.step()
    job.optimizer.zero_grad()
    refresh_scales(job)
    return torch.stack([loss, norm.to(loss), n_valid_tokens.to(loss), local_loss, n_stops])


@torch.no_grad()
def evaluate(job, tokens, args):
    """Mean loss over the first --val-steps batches of `tokens`, weighted by token.

    Every rank runs the same number of batches; places beyond the end of the text count as ignored
    labels, so that a short text neither hangs nor weighs some ranks more.
    """
    n_data, data_rank = job.mesh["data"].size(), job.mesh["data"].get_local_rank()
    n_windows = tokens.n_windows(args.seq_len)
    per_batch = args.local_batch_size * n_data
    sums = torch.zeros(2, device=job.device, dtype=torch.float64)  # loss sum, valid tokens
    for batch in range(min(args.val_steps, -(-n_windows // per_batch))):
        first = batch * per_batch + data_rank * args.local_batch_size
        inputs, labels = data.validation_batch_at(
            tokens, range(first, first + args.local_batch_size), seq_len=args.seq_len
        )
        inputs, labels = inputs.to(job.device), labels.to(job.device)
        n_valid_tokens = count_valid_tokens(job, labels)
        inputs, labels = inputs[:, job.positions], labels[:, job.positions]
        with loss_parallel() if job.loss_parallel else nullcontext():
            if job.schedule:
                loss_sum = job.schedule.run_forward(inputs, labels, 1)
            else:
                loss_sum = job.loss_fn(job.parts[0](inputs), labels, 1)
        loss_sum = loss_sum.to(sums)  # stages without the loss give a zero of another dtype
        loss_sum, _ = sum_over_ranks(job, loss_sum, torch.zeros_like(loss_sum))
        sums += torch.stack([loss_sum, n_valid_tokens.to(sums)])
    return (sums[0] / sums[1]).item()


def checksum(tensor):
    """Sum of the bits of a tensor, 32 at a time: one flipped bit changes it (int)."""
    return tensor.contiguous().view(torch.int32).sum(dtype=torch.int64).item()


def check_ranks(job, step, inputs):
    """Raise TrainingError, naming the ranks, if what several ranks must share differs.

    Compared: the step; the batch, along tp, cp and pp; and every piece of the weights that more
    than one rank holds, along dp_replicate and, for norms, tp. The larger group counts as right.
    """
    facts = {("step",): step, ("batch", job.mesh["data"].get_local_rank()): checksum(inputs)}
    for part in job.parts:
        for name, weight in parallel.named_weights(part):
            coordinates = zip(weight.placements, weight.device_mesh.get_coordinate(), strict=True)
            piece = [c for placement, c in coordinates if not placement.is_replicate()]
            facts["weight", name, *piece] = checksum(parallel.local_tensor(weight.detach()))
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, facts)
    for key in {key for report in reports for key in report}:
        holders = {rank: report[key] for rank, report in enumerate(reports) if key in report}
        values = list(holders.values())
        usual = max(values, key=values.count)
        drifted = [rank for rank, value in holders.items() if value != usual]
        if drifted:
            raise TrainingError(
                f"step {step}: ranks {drifted} differ from {sorted(holders.keys() - drifted)} in "
                f"{' '.join(map(str, key[:2]))}, which they must share: look for faulty hardware "
                "or a missing collective, and resume from a checkpoint before it"
            )


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


def check_finite(job, step, stats):
    """Raise TrainingError on every rank if the step's loss or gradient norm is NaN or Inf.

    Both numbers are the same on all ranks, so all come here together and can gather who began.
    """
    if math.isfinite(stats.loss) and math.isfinite(stats.grad_norm):
        return
    bad_weights = [
        name
        for part in job.parts
        for name, weight in parallel.named_weights(part)
        if not parallel.local_tensor(weight).isfinite().all()
    ]
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (math.isfinite(stats.local_loss), bad_weights))
    loss_ranks = [r for r, (finite, _) in enumerate(reports) if not finite]
    weight_ranks = [r for r, (_, names) in enumerate(reports) if names]
    names = sorted({name for _, names in reports for name in names})
    raise TrainingError(
        f"step {step} gave loss {stats.loss} and gradient norm {stats.grad_norm}: all ranks stop, "
        f"and the step is not saved. Loss not finite on ranks {loss_ranks or 'none'}; weights no "
        f"longer finite on ranks {weight_ranks or 'none'}: {', '.join(names[:3]) or 'none'}"
        f"{' and others' if len(names) > 3 else ''}. Try to go on from the last checkpoint with a "
        "lower --lr or --max-norm"
    )


# ---- 5. What is printed and logged -------------------------------------------------------------


def build_profiler(args, done):
    """Context that traces the steps of --profile-steps; `step()` marks the end of a step."""
    if args.profile_steps is None:
        return nullcontext()
    first, last = map(int, args.profile_steps.split(":"))
    folder = Path(args.out) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=max(0, first - done - 1), warmup=0, active=max(1, last - first + 1), repeat=1
        ),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(
            str(folder / f"rank-{dist.get_rank()}.json")
        ),
    )


def peak_memory_gib(device):
    """Most memory held so far in GiB: reserved by the allocator on CUDA, resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20 if sys.platform != "darwin" else kib / 2**30  # macOS counts bytes


def alloc_retries(device):
    """How often so far CUDA's allocator had to give its cache back and try again: a slow step each.

    None on CPU. More than a few mean that memory is all but full.
    """
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else None


class Metrics:
    """Rank 0's console line, OUT/metrics.jsonl and TensorBoard; on other ranks it does nothing.

    On resume the file is continued, and rows after the resumed step are dropped.
    """

    def __init__(self, args, job, first_step):
        self.args, self.is_main = args, dist.get_rank() == 0
        self.world_size, self.device = dist.get_world_size(), job.device
        self.flops_per_token = model.flops_per_token(job.config, args.seq_len)
        self.tokens_per_step = args.global_batch_size * args.seq_len
        self.start_interval(first_step - 1)
        if self.is_main:
            path = Path(args.out) / "metrics.jsonl"
            rows = path.read_text().splitlines(keepends=True) if path.exists() else []
            kept = [row for row in rows if step_of(row) < first_step]
            if kept != rows:
                path.write_text("".join(kept))
            self.file = open(path, "a")
        self.tensorboard = None
        if self.is_main and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(Path(args.out) / "tensorboard", purge_step=first_step)

    def start_interval(self, step):
        self.since_step, self.since_s, self.data_s = step, time.perf_counter(), 0.0

    def log(self, step, *, stats, lr, tokens, now_s, val_loss):
        """Write one row; `tokens` is the number of training tokens seen so far."""
        elapsed_s = now_s - self.since_s
        n_steps = step - self.since_step
        tokens_per_s = n_steps * self.tokens_per_step / elapsed_s
        per_device = tokens_per_s / self.world_size
        tflops = per_device * self.flops_per_token / 1e12
        # of bf16 alone: with float8, matmuls of two peaks are mixed (paper §3.2)
        is_bf16 = self.args.param_dtype == "bf16" and self.args.float8 is None
        peak = model.peak_tflops(self.device) if is_bf16 else None
        row = {
            "step": step,
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": per_device,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            "memory_gib": peak_memory_gib(self.device),
            "alloc_retries": alloc_retries(self.device),
            "data_s": self.data_s / n_steps,  # seconds per step spent waiting for the next batch
        } | ({} if val_loss is None else {"val_loss": val_loss})
        if self.is_main:
            self.write(row, seconds_left=elapsed_s / n_steps * (self.args.steps - step))
            if stats.n_valid_tokens == 0:
                print(f"step {step}: the batch has no valid label; loss and gradients are zero")
        self.start_interval(step)

    def write(self, row, *, seconds_left):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        width = len(str(self.args.steps))
        print(
            f"step {row['step']:>{width}}/{self.args.steps}  loss {row['loss']:.4f}  "
            f"grad {row['grad_norm']:.3f}  lr {row['lr']:.2e}  {row['tokens_per_s']:>9,.0f} tok/s  "
            f"{row['tflops']:.3f} TFLOPs"
            + (f"  mfu {row['mfu']:.1%}" if row["mfu"] else "")
            + f"  {row['memory_gib']:.2f} GiB"
            + (f"  {row['alloc_retries']} retries" if row["alloc_retries"] else "")
            + (f"  val {row['val_loss']:.4f}" if "val_loss" in row else "")
            + f"  {timedelta(seconds=round(seconds_left))} left",
            flush=True,
        )
        for key, value in row.items():
            if self.tensorboard and value is not None and key != "step":
                self.tensorboard.add_scalar(key, value, row["step"])

    def close(self):
        if self.is_main:
            self.file.close()
        if self.tensorboard:
            self.tensorboard.close()


def step_of(row):
    """Step of a line of metrics.jsonl; a line torn by a crash counts as never written."""
    try:
        return json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def print_plan(args, job):
    """Say on rank 0 what is about to run: model, ranks, stages, memory per rank and batch."""
    c = job.config
    parameters = [parameter for part in job.parts for parameter in part.parameters()]
    local = sum(parallel.local_tensor(parameter).numel() for parameter in parameters)
    states = {"adamw": 2, "sgd": 0}[args.optimizer]
    n_data = job.mesh["data"].size()
    stages = ""
    if job.schedule:
        n = args.local_batch_size // args.microbatch_size
        described = pipeline.describe_stages(
            split_stages(args, c), args.pp_schedule, pp=args.pp, n_microbatches=n, ac=args.ac
        )
        stages = f"stages {args.pp_schedule}, {n} microbatches of {args.microbatch_size}, "
        stages += described.replace("\n", "\n       ") + "\n"
    degrees = " x ".join(f"{axis} {getattr(args, axis)}" for axis in AXES)
    print(
        f"model  {args.model}: {model.count_parameters(c):,} parameters, {c.n_layers} layers, "
        f"dim {c.dim}, vocabulary {c.vocab_size:,}\n"
        f"ranks  {dist.get_world_size()} "
        f"{'simulated' if args.simulate else 'on ' + job.device.type}: {degrees}; computes in "
        f"{args.param_dtype}, sums gradients in {args.reduce_dtype}\n"
        f"{stages}memory {local:,} parameters on this rank; with gradients and optimizer states "
        f"{local * 4 * (2 + states) / 2**20:,.1f} MiB\n"
        f"batch  {args.global_batch_size} sequences x {args.seq_len} = "
        f"{args.global_batch_size * args.seq_len:,} tokens a step; {n_data} data rank(s) x "
        f"{args.local_batch_size} x {args.global_batch_size // (n_data * args.local_batch_size)} "
        "accumulated",
        flush=True,
    )


# ---- 6. Simulation -----------------------------------------------------------------------------


def skip_warmup(schedule):
    """For a fake process group: start without the ranks' vote on whether all shapes are known.

    No answer would come there. A real group needs it: it opens the neighbours' connections.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # new in torch 2.13

    def set_static(stages, _has_backward, _p2p_done):
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule.schedule._warmup_p2p = set_static


def trace_rank(args, config, rank):
    """Build the job of one rank and take one step, with a fake process group and fake tensors.

    A fake tensor has a shape and a storage of some size, but no memory; a fake group's collectives
    return at once. Model, parallelisms, schedule and step are those of a real run, but that
    --compile and --async-tp have no effect, and mxfp8 is emulated, for want of its kernels.

    Returns: {what: value}, an entry of OUT/simulation.json; "plan" is what was printed meanwhile.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # brings the fake backend

    started_s = time.perf_counter()
    args = argparse.Namespace(**vars(args) | {"compile": False, "async_tp": False})
    args.float8_emulate |= args.float8 == "mxfp8"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.simulate)
    memory, plan = FakeTensorMode(allow_non_fake_inputs=True), io.StringIO()
    with redirect_stdout(plan):
        job = build(args, config, torch.device("cpu"), memory=memory)
        print_plan(args, job)
    if job.schedule:
        skip_warmup(job.schedule)
    parameters = [parameter for part in job.parts for parameter in part.parameters()]
    with memory, parallel.thin_causal_mask(DTYPES[args.param_dtype]):
        shape = args.global_batch_size // job.mesh["data"].size(), args.seq_len
        tokens = torch.zeros(shape, dtype=torch.int64)
        for parameter in parameters:  # a first update, after which the optimizer has its states
            parameter.grad = torch.zeros_like(parameter)
        job.optimizer.step()
        job.optimizer.zero_grad()
        sizes = {"local_batch_size": args.local_batch_size, "max_norm": args.max_norm}
        with parallel.Account(job.parts, job.optimizer, job.mesh) as account:
            train_step(job, tokens, tokens, **sizes)
    moment, peak_bytes = account.peak()
    units = [[name for name, _ in parallel.named_units(part)] for part in job.parts]
    axes, phases = ("pp", "dp_replicate", "fsdp", "cp", "tp"), ("forward", "recomputed", "backward")
    return {
        "rank": rank,
        "coordinates": {axis: job.mesh[axis].get_local_rank() for axis in axes},
        "stages": [pipeline.span(names) for names in units],
        "parameters": sum(parallel.local_tensor(parameter).numel() for parameter in parameters),
        "state_bytes": account.state_bytes,
        "peak_bytes": sum(peak_bytes.values()),
        "peak_bytes_by_kind": peak_bytes,
        "peak_moment": dict(zip(("phase", "module", "op"), moment, strict=True)),
        "flops": {phase: sum(n[phase] for n in account.flops.values()) for phase in phases},
        "flops_by_module": account.flops,
        "collectives": account.collectives,
        "weights": [row for part in job.parts for row in describe_weights(part)],
        "plan": plan.getvalue(),
        "seconds": time.perf_counter() - started_s,
    }


def describe_weights(part):
    """Name, full shape, split and local shape of every parameter of a stage."""
    rows = []
    for name, weight in parallel.named_weights(part):
        axes = zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
        split = {axis: placement.dim for axis, placement in axes if not placement.is_replicate()}
        local = parallel.local_tensor(weight)
        rows.append(
            {"name": name, "shape": [*weight.shape], "split": split, "local_shape": [*local.shape]}
        )
    return rows


def trace_ranks(jobs):
    """[trace_rank(*job) for job in jobs], each in a process of its own, a core for each."""
    rows, n_cores = [], os.cpu_count()
    options = {
        "mp_context": multiprocessing.get_context("fork"),
        "initializer": signal.signal,  # end at once on Ctrl-C
        "initargs": (signal.SIGINT, signal.SIG_DFL),
    }
    for some in (jobs[i : i + n_cores] for i in range(0, len(jobs), n_cores)):
        try:
            with ProcessPoolExecutor(len(some), **options) as pool:
                rows += pool.map(trace_rank, *zip(*some, strict=True))
        except BrokenProcessPool as error:
            raise TrainingError(
                f"--simulate: one of {len(some)} processes was killed, for want of memory most "
                "likely: each takes about 0.5 GiB; try --simulate-rank 0, which needs one"
            ) from error
    return rows


def default_ranks(args):
    """One rank of the first pipeline stage and one of the last."""
    return sorted({0, args.simulate - args.simulate // args.pp})


def stage_durations(stages, *, head, block_again, head_again):
    """How long each stage computes, an average one's forward being 1, for `timeline`.

    Args:    stages, their module names; head, the cost of `output` in blocks; block_again and
             head_again, the share of its forward that either computes again in its backward (of
             which a split backward is supposed to do half in each of its halves).
    """
    blocks = [sum(name.startswith("layers.") for name in names) for names in stages]
    heads = [head * ("output" in names) for names in stages]
    unit = (sum(blocks) + sum(heads)) / len(stages)
    durations = []
    for n, h in zip(blocks, heads, strict=True):
        f, again = (n + h) / unit, (n * block_again + h * head_again) / unit
        durations.append({"F": f, "B": 2 * f + again, "I": f + again / 2, "W": f + again / 2})
    return durations


def simulate_schedule(args, config, rows):
    """A pipeline's accounts, with stages that cost what their FLOPs say; draws OUT/timeline.svg.

    `rows` are traced ranks', which know how much of their blocks is computed again.
    """
    stages = split_stages(args, config)
    head, block = (  # FLOPs of the head, and of a block with it
        model.flops_per_token(dataclasses.replace(config, n_layers=n), args.seq_len) for n in (0, 1)
    )
    modules = [pair for row in rows for pair in row["flops_by_module"].items()]
    blocks = [flops for name, flops in modules if name.startswith("layers.")]
    once, again = (sum(flops[phase] for flops in blocks) for phase in ("forward", "recomputed"))
    shape = (
        args.pp_schedule,
        args.pp,
        args.local_batch_size // args.microbatch_size,
        args.stages_per_rank,
    )
    durations = stage_durations(
        stages,
        head=head / (block - head),
        block_again=again / once if once else 0.0,
        head_again=1.0 if args.loss_chunks > 1 else 0.0,
    )
    even, uneven = pipeline.timeline(*shape), pipeline.timeline(*shape, durations=durations)
    (Path(args.out) / "timeline.svg").write_text(pipeline.draw_svg(uneven))
    busy = [sum(op.end - op.start for op in ops) for ops in uneven]
    return {
        "bubble_if_stages_were_equal": pipeline.bubble_fraction(even),
        "bubble": pipeline.bubble_fraction(uneven),
        "work": [b * args.pp / sum(busy) for b in busy],  # of each pp rank, 1 on average
        "in_flight": pipeline.peaks_in_flight(even),  # microbatches x stages, of each pp rank
    }


def peaks_of(argv, ranks, variants):
    """The ranks' largest peak in bytes under each list of further flags; infinite where refused."""
    jobs = {}
    for i, flags in enumerate(variants):
        with suppress(ValueError):
            jobs |= {(i, rank): (*read_flags([*argv, *flags]), rank) for rank in ranks}
    peaks = [0 if (i, ranks[0]) in jobs else math.inf for i in range(len(variants))]
    rows = trace_ranks([*jobs.values()]) if jobs else []
    for (i, _), row in zip(jobs, rows, strict=True):
        peaks[i] = max(peaks[i], row["peak_bytes"])
    return peaks


def batch_flags(args, size):
    """Another local batch: of `size` sequences, or with a pipeline as many microbatches of that."""
    n_microbatches = args.local_batch_size // args.microbatch_size if args.pp > 1 else 1
    sizes = {
        "--local-batch-size": size * n_microbatches,
        "--global-batch-size":  # accumulates as often as before
        args.global_batch_size // args.local_batch_size * size * n_microbatches,
    }  # fmt: skip
    if args.pp > 1:
        sizes["--microbatch-size"] = size
    return [str(item) for pair in sizes.items() for item in pair]


def find_largest_batch(args, argv, *, ranks, peak_bytes, limit_bytes):
    """The largest batch, as flags, with which the ranks stay within the limit; None if none is.

    It doubles what is there while that fits (to 64 times at most), then narrows down.
    """
    size = args.microbatch_size if args.pp > 1 else args.local_batch_size
    peaks = {0: 0, size: peak_bytes}
    while True:
        low = max(n for n, peak in peaks.items() if peak <= limit_bytes)
        high = min((n for n in peaks if n > low), default=None)
        if high == low + 1 or low >= 64 * size:
            return " ".join(batch_flags(args, low)) if low else None
        if high is None:
            guess = 2 * low
        elif low == 0 or peaks[high] == math.inf:
            guess = (low + high) // 2
        else:  # a peak is all but linear in the batch
            share = (limit_bytes - peaks[low]) / (peaks[high] - peaks[low])
            guess = min(max(low + 1, low + int(share * (high - low))), high - 1)
        sizes = [n for n in (guess, guess + 1) if n not in peaks]
        found = peaks_of(argv, ranks, [batch_flags(args, n) for n in sizes])
        peaks |= zip(sizes, found, strict=True)


def find_changes(args, argv, *, ranks, peak_bytes, limit_bytes):
    """Flags that make the largest peak smaller, one after the other until all is within the limit.

    Returns: [(all flags so far, peak bytes)], those that cost little speed first; what saves less
    than 1 % is left out.
    """
    changes = (
        {"--loss-chunks": 8},
        {"--ac": "op"},
        {"--ac": "full"},
        {"--reshard": "always"},
        {"--tp": 2 * args.tp, "--dp-shard": max(1, args.dp_shard // 2)},
    )
    flags, found = {}, []
    for change in changes:
        tried = flags | change
        (peak,) = peaks_of(argv, ranks, [[str(item) for pair in tried.items() for item in pair]])
        if peak < 0.99 * peak_bytes:
            flags, peak_bytes = tried, peak
            found.append((" ".join(f"{flag} {value}" for flag, value in flags.items()), peak))
        if peak_bytes <= limit_bytes:
            break
    return found


def find_fit(args, argv, rows):
    """Say whether the traced ranks fit into --gpu-memory-gib, and with which batch or flags."""
    limit_bytes, peak_bytes = args.gpu_memory_gib * 2**30, max(row["peak_bytes"] for row in rows)
    known = {"peak_bytes": peak_bytes, "limit_bytes": limit_bytes}
    known["ranks"] = [row["rank"] for row in rows]
    fit = {"fits": peak_bytes <= limit_bytes, "changes": []}
    print(
        f"fit    {readable(peak_bytes)} of tensors {'fit' if fit['fits'] else 'do NOT fit'} into "
        f"--gpu-memory-gib {args.gpu_memory_gib:g}; CUDA's allocator and NCCL take some on top",
        flush=True,
    )
    if not fit["fits"]:
        fit["changes"] = find_changes(args, argv, **known)
    for flags, peak in fit["changes"]:
        print(f"       {readable(peak)} with {flags}", flush=True)
    fit["largest_batch"] = find_largest_batch(args, argv, **known)
    print(f"       largest batch, all else as given: {fit['largest_batch'] or 'none fits'}")
    return fit


def readable(n_bytes):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size / 2:
            return f"{n_bytes / size:,.2f} {unit}"
    return f"{n_bytes} bytes"


def describe_rank(row):
    """A traced rank's account, in a few lines."""
    at, flops = row["peak_moment"], row["flops"]
    place = ", ".join(f"{axis} {i}" for axis, i in row["coordinates"].items())
    kinds = ", ".join(f"{kind} {readable(n)}" for kind, n in row["peak_bytes_by_kind"].items())
    lines = [
        f"rank   {row['rank']} ({place}): {', '.join(row['stages'])}",
        f"       holds at most {readable(row['peak_bytes'])}: {kinds}",
        f"       reached in the {at['phase']} pass of {at['module']}, by {at['op']}",
        f"       computes {(flops['forward'] + flops['backward']) / 1e12:,.3f} TFLOP a step, and "
        f"recomputes {flops['recomputed'] / 1e12:,.3f}",
    ]
    for axis, counts in sorted(row["collectives"].items()):
        sent = {kind: n for kind, n in counts.items() if n["sent_bytes"]}  # groups of one: nothing
        said = [f"{n['calls']} {kind} {readable(n['sent_bytes'])}" for kind, n in sent.items()]
        if said:
            lines.append(f"       sends over {axis + ':':<13} {', '.join(said)}")
    return "\n".join(lines)


def describe_split(weights):
    """A line for each kind of parameter: names, full shape, what is split over which axis."""
    kinds = {}
    for weight in weights:
        kinds.setdefault(re.sub(r"\.\d+", ".N", weight["name"]), []).append(weight)
    lines = []
    for kind, same in kinds.items():
        shape, local = (" x ".join(map(str, same[0][key])) for key in ("shape", "local_shape"))
        split = ", ".join(f"dim {dim} over {axis}" for axis, dim in same[0]["split"].items())
        lines.append(f"       {kind:<32} {len(same):>3} of {shape:<15} -> {local:<13} {split}")
    return "\n".join(lines)


def simulate(args, config, argv):
    """Print, and write into OUT/simulation.json, what ranks of --simulate do in one step.

    Counted, not timed: memory at its peak, FLOPs, bytes that are sent. The operations are those of
    a CPU, where RMSNorm is several that keep float32 copies; nothing is compiled or fused.
    """
    ranks = sorted(set(args.simulate_rank or default_ranks(args)))
    rows = trace_ranks([(args, config, rank) for rank in ranks])
    largest = max(rows, key=lambda row: row["peak_bytes"])
    weights = {weight["name"]: weight for row in rows for weight in row["weights"]}
    print(f"{rows[0]['plan']}split  of the weights of rank {' and '.join(map(str, ranks))}")
    print(describe_split(weights.values()))
    for is_on, note in (
        (args.compile, "--compile is not traced"),
        (args.async_tp, "--async-tp is not traced"),
        (args.float8 == "mxfp8", "mxfp8 is emulated, which under tp sends other tensors"),
    ):
        if is_on:
            print(f"note   {note}")
    for row in rows:
        print(describe_rank(row))
    print(f"peak   {readable(largest['peak_bytes'])} on rank {largest['rank']}, of those traced")
    result = {"flags": vars(args), "model": dataclasses.asdict(config), "ranks": rows}
    result["model_flops_per_token"] = model.flops_per_token(config, args.seq_len)
    path = Path(args.out) / "simulation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.pp > 1:
        schedule = result["schedule"] = simulate_schedule(args, config, rows)
        slowest = schedule["work"].index(max(schedule["work"]))
        print(
            f"time   bubble {schedule['bubble']:.1%} by the stages' FLOPs; pp rank {slowest} works "
            f"most, {max(schedule['work']):.2f} of the mean; drawn into {args.out}/timeline.svg\n"
            f"       chunks in flight on each pp rank: {schedule['in_flight']}"
        )
    path.write_text(json.dumps(result, indent=1))  # already, since what follows may take minutes
    if args.gpu_memory_gib:
        result["fit"] = find_fit(args, argv, rows)
        path.write_text(json.dumps(result, indent=1))
    print(f"done   traced in {max(row['seconds'] for row in rows):.0f} s a rank; all in {path}")


# ---- 7. The program ----------------------------------------------------------------------------


def train_state(args, job, tokens, step, sequences):
    """What a checkpoint says of its run beside the tensors; goes into its train.json."""
    return {
        "step": step,
        "sequences": sequences,  # the whole state of the data loader
        "tokens": sequences * args.seq_len,
        "data_fingerprint": tokens.fingerprint,
        "flags": vars(args),
        "model": dataclasses.asdict(job.config),
        "torch": torch.__version__,
        "world_size": dist.get_world_size(),
    }


def check_same(args, tokens, val_tokens):
    """Raise TrainingError if ranks started with other flags, or found other text, than rank 0."""
    mine = vars(args) | {"data (its tokens)": tokens.fingerprint}
    if val_tokens:
        mine["val-data (its tokens)"] = val_tokens.fingerprint
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise TrainingError(
                    f"--{name.replace('_', '-')} is {theirs.get(name)} on rank {rank} and {value} "
                    "on rank 0: all ranks must be started alike and see the same text; give them "
                    "the same flags, and for text one --data folder of token shards"
                )


def choose_checkpoint(args):
    """(step, its train.json) to resume from, or (0, None); rank 0 looks, and all see the same.

    Raises:  TrainingError on every rank.
    """
    folder = Path(args.out) / "checkpoints"
    found = [0, None, None]
    if dist.get_rank() == 0:
        for name in checkpoint.unpublished(folder):
            print(f"ignored: {folder / name} was never finished")
        try:
            if step := checkpoint.choose_step(folder, args.resume):
                found = [step, checkpoint.read_train_state(folder, step), None]
        except ValueError as error:
            found[2] = str(error)
    dist.broadcast_object_list(found)
    step, state, error = found
    if error:
        raise TrainingError(error)
    return step, state


def check_resumable(args, tokens, state):
    """Raise TrainingError if the data order could not be continued; print what else differs."""
    flags = state["flags"]
    for name, was, now in (
        ("--seq-len", flags["seq_len"], args.seq_len),
        ("--seed", flags["seed"], args.seed),
        ("--data (its tokens)", state["data_fingerprint"], tokens.fingerprint),
    ):
        if was != now:
            raise TrainingError(
                f"{name} {now} differs from {was} of the checkpoint at step {state['step']} in "
                f"--out {args.out}: the windows already seen would be counted wrongly; use the old "
                "value, or start afresh in another --out"
            )
    changed = [
        f"{name} {flags.get(name)} -> {value}"
        for name, value in vars(args).items()
        if flags.get(name) != value and name not in ("resume", "data", "data_cache")
    ]
    if changed and dist.get_rank() == 0:
        print("flags changed since the checkpoint: " + ", ".join(changed))


def load(args, job, step):
    """Fill the job from the checkpoint of `step`, or at step 0 from --init-from if it is given."""
    folder = Path(args.out) / "checkpoints"
    try:
        if step:
            checkpoint.load_checkpoint(folder, step, job.parts, job.optimizer, shapes=job.shapes)
        elif args.init_from:
            checkpoint.load_weights(args.init_from, job.parts, shapes=job.shapes)
    except ValueError as error:
        raise TrainingError(error) from error  # the same on all ranks
    refresh_scales(job)
    dist.barrier()
    if dist.get_rank() == 0 and step:
        print(f"resumed {folder} at step {step}")
        if args.init_from:
            print(f"--init-from {args.init_from} is not looked at: this run has begun")
        for name in checkpoint.set_aside_newer(folder, step):
            print(f"set aside: {folder / name} is newer than --resume {args.resume}")
    elif dist.get_rank() == 0 and args.init_from:
        print(f"weights of {args.init_from}, at step 0")


def save(checkpointer, step, job, state):
    """Begin a save; a failed one, this or the one before, is told loudly and training goes on."""
    try:
        checkpointer.save(step, job.parts, job.optimizer, state)
    except checkpoint.CheckpointError as error:
        if dist.get_rank() == 0:
            print(f"WARNING: {error}; training goes on", file=sys.stderr, flush=True)


def catch_signals():
    """From now on SIGTERM, SIGUSR1 and a first Ctrl-C end the run after a step; lists those caught.

    A second Ctrl-C interrupts at once.
    """
    came = []
    arrived, told = socket.socketpair()
    told.setblocking(False)

    def watch():  # Python's own handlers wait while the main thread is inside a collective
        while True:
            came.append(signal.Signals(arrived.recv(1)[0]).name)
            dump_flight_record()  # torchrun sends SIGTERM to ranks that hang after another failed

    def handle(number, frame, keep_open=told):
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, handle)
    threading.Thread(target=watch, daemon=True).start()
    return came


def main(argv=None):
    # 1. Flags and data, checked before any rank waits for another
    rank = rank_from_env()
    args, config = read_flags(argv)
    if args.simulate:
        return simulate(args, config, sys.argv[1:] if argv is None else argv)
    is_builder = rank_from_env("LOCAL_RANK") == 0
    cache = {"data_cache": args.data_cache, "is_builder": is_builder}
    fits = {"vocab_size": config.vocab_size, "seq_len": args.seq_len, "tokenizer": args.tokenizer}
    tokens = data.open_tokens(args.data, args.tokenizer, **cache)
    source = f"--data {args.data or '(default)'}"
    data.check_tokens(tokens, source=source, needed=args.global_batch_size, **fits)
    val_tokens = None
    if args.val_data:
        val_tokens = data.open_tokens(args.val_data, args.tokenizer, **cache)
        data.check_tokens(val_tokens, source=f"--val-data {args.val_data}", needed=1, **fits)
    if args.warmup_steps > args.steps and rank == 0:
        print(f"--warmup-steps {args.warmup_steps} is cut to --steps {args.steps}")
    out_lock = checkpoint.lock_folder(Path(args.out)) if rank == 0 else None

    # 2. Ranks, and whether this run has begun already
    device = init_distributed(args)
    check_same(args, tokens, val_tokens)
    done, state = choose_checkpoint(args)
    if state:
        check_resumable(args, tokens, state)
    if done >= args.steps:
        if rank == 0:
            print(f"nothing to do: {args.out} is at step {done}; extend it with --steps {2 * done}")
        dist.destroy_process_group()
        return

    # 3. The model on its mesh, and its state
    job = build(args, config, device)
    if rank == 0:
        print_plan(args, job)
        epochs = args.steps * args.global_batch_size / tokens.n_windows(args.seq_len)
        print(f"data   {tokens.n_tokens:,} tokens; {args.steps} steps are {epochs:.2f} epochs")
    load(args, job, done)
    sequences = state["sequences"] if state else 0
    checkpointer = None
    if args.checkpoint_every:
        checkpointer = checkpoint.Checkpointer(
            Path(args.out) / "checkpoints",
            mode=args.checkpoint_mode,
            keep_latest=args.keep_latest,
            protected_step=done or None,
        )
        # the optimizer may not write before an asynchronous save has taken its copy
        job.optimizer.register_step_pre_hook(lambda *_: checkpointer.wait_for_staging())

    # 4. Which windows a step reads is a pure function of the sequences consumed before it
    per_rank = args.global_batch_size // job.mesh["data"].size()
    skipped = job.mesh["data"].get_local_rank() * per_rank  # what other ranks read before this one

    def read(position):
        mine = range(position + skipped, position + skipped + per_rank)
        return data.batch_at(tokens, mine, seq_len=args.seq_len, seed=args.seed)

    loader = data.BatchLoader(read, device, stride=args.global_batch_size)
    metrics = Metrics(args, job, done + 1)
    gc.disable()  # ranks that collect at different moments make all others wait
    signals = catch_signals()
    read_stats, is_last = None, False

    # 5. The loop
    try:
        with build_profiler(args, done) as profiler:
            for step in range(done + 1, args.steps + 1):
                for group in job.optimizer.param_groups:
                    group["lr"] = lr_at(step, args)
                inputs, labels = loader.get(sequences)
                metrics.data_s += loader.wait_s
                stats = train_step(
                    job,
                    inputs,
                    labels,
                    local_batch_size=args.local_batch_size,
                    max_norm=args.max_norm,
                    wants_stop=bool(signals),
                )
                is_last = step == args.steps
                if read_stats is not None:  # of the step before: they are there, nothing waits
                    check_finite(job, step - 1, read_stats())
                    is_last |= read_stats().n_stops > 0  # the same on all ranks
                read_stats = copy_to_host(stats)
                sequences += args.global_batch_size

                do_eval = args.val_every and (step % args.val_every == 0 or step == args.steps)
                do_save = checkpointer and (step % args.checkpoint_every == 0 or is_last)
                do_log = step == 1 or step % args.log_every == 0 or do_eval or is_last
                if args.check_ranks_every and step % args.check_ranks_every == 0:
                    check_ranks(job, step, inputs)
                if do_log or do_save:
                    check_finite(job, step, read_stats())
                if do_save:
                    save(checkpointer, step, job, train_state(args, job, tokens, step, sequences))
                if do_log:
                    metrics.log(
                        step,
                        stats=read_stats(),
                        lr=lr_at(step, args),
                        tokens=sequences * args.seq_len,
                        now_s=time.perf_counter(),  # before the evaluation, which is not counted
                        val_loss=evaluate(job, val_tokens, args) if do_eval else None,
                    )
                if step % 50 == 0:
                    gc.collect(1)
                if step == done + 1:
                    shorten_timeouts(args.timeout_s, but=checkpointer and checkpointer.group)
                if profiler is not None:
                    profiler.step()
                if is_last:
                    break
    except TrainingError:
        if checkpointer:
            with suppress(checkpoint.CheckpointError):
                checkpointer.close()  # the last good step may still be on its way to the disk
        raise
    finally:
        dump_memory(args)

    # 6. The end
    metrics.close()
    if checkpointer:
        checkpointer.close()
    if rank == 0:
        ended = "done" if step == args.steps else f"stopped by {' or '.join(signals) or 'a rank'}"
        saved = f"checkpoint in {args.out}/checkpoints" if checkpointer else "nothing saved"
        print(f"{ended} at step {step}; {saved}, metrics in {args.out}/metrics.jsonl")
        if checkpointer:
            more = f" with --steps {2 * step}" if step == args.steps else ""
            print(f"next: the same command{more} goes on from here")
    dist.destroy_process_group()
    del out_lock


def run(argv=None):
    """`main`, with what a user can mend told in one line instead of a traceback per rank."""
    try:
        main(argv)
    except (TrainingError, checkpoint.CheckpointError) as error:
        fail(error)
    except KeyboardInterrupt:
        lost = "; the steps since the last checkpoint are lost" if dist.is_initialized() else ""
        fail(f"interrupted{lost}")
    except Exception as error:
        if isinstance(error, ValueError) and not dist.is_initialized():
            fail(error)  # a refusal: flags, data or folders
        dump_flight_record()
        raise


if __name__ == "__main__":
    run()

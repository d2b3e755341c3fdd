"""Every mesh trains the same model as one process: run this file for the tables.

    python tests/parity.py --world 8              every case on up to 8 forked gloo ranks
    python tests/parity.py --world 4 --dtype fp32 --steps 5
    python tests/parity.py --only 'tp2' --flags '--set tied_embeddings=true' --world 4

The third runs the cases whose names hold the pattern, with flags that the one process has as well:
what a fork asks of a new field of the model, or of a new technique.

A case is a list of train.py's own flags. It goes through the program's own `build`, `start`,
`gradients` and `update` on the same global batches, with labels ignored (-100) unevenly over
sequences, clipping active and SGD, which unlike Adam does not hide a gradient of the wrong scale.
Against one process:

    weights 0   initial weights, must be equal bit for bit
    loss, norm  worst relative error over the steps (norm: before clipping)
    grads       worst relative L2 error of any parameter's gradient before clipping, over the steps
    weights     worst relative L2 error of any parameter after the last step
    experts     of a model with experts: how many rows each got, summed over ranks and a step, and
                the routers' biases after the last, must be equal bit for bit (but not in bf16,
                where a token may choose otherwise)

The second table is of experts. There one gets half of all rows, as every token's first choice, and
two get none: on ep 4 those of one rank.

Tolerances. In float64 errors are about 1e-15 and a real fault is 1e-3 or more, so 1e-12 leaves no
doubt. In float32 sums of a few thousand terms in another order differ by about 1e-6, and parameters
whose gradient nearly cancels by more: 1e-5 for loss and norm, 1e-4 for gradients and weights. In
bf16, against one process in bf16, a mesh rounds partial sums (to 2^-9 = 2e-3) that one process does
not; the loss averages such errors away, a gradient holds several: 2e-3 and 3e-2.

Compiled rows use the backend aot_eager, which traces as inductor does and runs without it: what is
compared is the graph, not the code generator.
"""

import argparse
import logging
import re
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a script, from anywhere

from ranks import make_job, run_ranks  # noqa: E402

import parallel  # noqa: E402
import pipeline  # noqa: E402
import train  # noqa: E402

# Nothing is round: odd layers and vocabulary, 2 queries per key and value head
SMALL = "--set dim=32 n_layers=7 n_heads=8 n_kv_heads=4 ffn_dim=48 vocab_size=67 --seq-len 32"
BASE = f"{SMALL} --global-batch-size 8 --optimizer sgd --lr 0.5 --weight-decay 0.01 --max-norm 0.4"
TOLERANCES = {  # loss and norm; gradients, weights
    "fp64": (1e-12, 1e-12),
    "fp32": (1e-5, 1e-4),
    "bf16": (2e-3, 3e-2),
}
QUICK = {  # what compiles, in parallel.py
    function.__name__: partial(function, backend="aot_eager")
    for function in (parallel.apply_compile, parallel.build_loss)
}

# name -> (ranks, flags); --local-batch-size is set so that the global batch is `accumulation` parts
MESHES = {
    "dp2": (2, "--dp-shard 2"),
    "dp4": (4, "--dp-shard 4"),
    "replicate2": (2, "--dp-replicate 2"),
    "hsdp 2x2": (4, "--dp-replicate 2 --dp-shard 2"),
    "tp2": (2, "--tp 2"),
    "tp4": (4, "--tp 4"),
    "cp2": (2, "--cp 2"),
    "cp4": (4, "--cp 4"),
    "tp2 x cp2": (4, "--tp 2 --cp 2"),
    "dp2 x tp2": (4, "--dp-shard 2 --tp 2"),
    "dp2 x cp2": (4, "--dp-shard 2 --cp 2"),
    "pp2": (2, "--pp 2"),
    "pp4": (4, "--pp 4"),
    "pp2 x dp2": (4, "--pp 2 --dp-shard 2"),
    "pp2 x tp2": (4, "--pp 2 --tp 2"),
    "pp2 x cp2": (4, "--pp 2 --cp 2"),
    "pp2 x dp2 x tp2": (8, "--pp 2 --dp-shard 2 --tp 2"),
    "pp2 x cp2 x tp2": (8, "--pp 2 --cp 2 --tp 2"),
    "dp2 x cp2 x tp2": (8, "--dp-shard 2 --cp 2 --tp 2"),
}
# what a row is added to for a new technique: the default suite runs those without --compile, too
TECHNIQUES = {
    f"{mesh}, {technique}": (MESHES[mesh][0], f"{MESHES[mesh][1]} {technique}")
    for mesh in ("pp2 x dp2 x tp2", "dp2 x cp2")
    for technique in ("--ac op", "--ac full", "--loss-chunks 2", "--compile", "--compile --ac op")
}
EXPERTS = "--model debug-moe --set n_layers=3 expert_dim=16 --balance-speed 0.02"
# with few experts FSDP cuts each of them; softmax, nothing shared, no dense layer
FEW_EXPERTS = f"{EXPERTS} --set n_experts=2 top_k=1 n_shared_experts=0 n_dense_layers=0"
FEW_EXPERTS += " --set router_score=softmax normalise_top_k=false"
EXPERT_MESHES = {
    f"{mesh}, ep {ep}": (MESHES[mesh][0], f"{MESHES[mesh][1]} --ep {ep}")
    for mesh in MESHES
    for ep in (1, 2, 4, 8)
    if (MESHES[mesh][0] // (2 if "pp2" in mesh else 1) // (2 if "2x2" in mesh else 1)) % ep == 0
    and "pp4" not in mesh and "replicate" not in mesh
}  # fmt: skip
EXPERT_TECHNIQUES = {
    f"{mesh}, {technique}": (EXPERT_MESHES[mesh][0], f"{EXPERT_MESHES[mesh][1]} {technique}")
    for mesh in ("dp2, ep 2", "tp2, ep 2")
    for technique in ("--ac op", "--ac full", "--ac 2", "--loss-chunks 2")
}
SCHEDULES = {
    f"pp{pp} {name}": (pp, f"--pp {pp} --pp-schedule {name}")
    for pp in (2, 4)
    for name, kind in pipeline.SCHEDULES.items()
    if pp == 2 or kind.stages_per_rank != 1
}


def make_batches(steps, *, n_sequences, seq_len, vocab_size):
    """[(inputs, labels)] of the whole global batch; the later half has most labels ignored."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(vocab_size, (n_sequences, seq_len + 1), generator=generator)
        ignored = torch.rand(n_sequences, seq_len, generator=generator)
        share = torch.linspace(0.0, 0.9, n_sequences)[:, None]  # from none to nine tenths
        labels = torch.where(ignored < share, -100, tokens[:, 1:])
        batches.append((tokens[:, :-1].contiguous(), labels))
    return batches


def find_experts(job):
    """[(layer, the module)] of this rank's blocks with experts."""
    blocks = [pair for stage in job.stages for pair in stage.layers.items()]
    return [(number, block.moe) for number, block in blocks if block.moe is not None]


def sum_loads(job):
    """{layer: rows of each expert}, over all ranks of the stage."""
    loads = {number: moe.load.clone() for number, moe in find_experts(job)}
    for load in loads.values():
        dist.all_reduce(load, group=job.mesh["stage"].get_group())
    return {number: load.tolist() for number, load in loads.items()}


def gather_weights(job, value_of):
    """{name: whole tensor} of this rank's stages; a copy, since clipping changes gradients."""
    return {
        name: parallel.whole_tensor(value_of(parameter)).detach().clone()
        for name, parameter in job.weights
    }


def run_case(flags, dtype, steps):
    """Train on this rank as train.py would; return what `compare` looks at (all ranks call it)."""
    wide = "fp32" if dtype == "bf16" else dtype
    torch.set_default_dtype(train.DTYPES[wide])  # of master weights and the loss's sums as well
    with mock.patch.multiple(parallel, **QUICK):
        args, job = make_job(f"{BASE} --param-dtype {dtype} --reduce-dtype {wide} {flags}")
    result = {"weights 0": gather_weights(job, lambda p: p), "loss": [], "norm": [], "grads": []}
    result["loads"] = []
    for _, moe in find_experts(job):
        if len(moe.bias) == 8:
            moe.bias[1], moe.bias[6:] = 9.0, -9.0
    per_rank = args.global_batch_size // job.mesh["data"].size()
    first = job.mesh["data"].get_local_rank() * per_rank
    mine, vocab_size = slice(first, first + per_rank), job.config.vocab_size
    for inputs, labels in make_batches(
        steps, n_sequences=8, seq_len=args.seq_len, vocab_size=vocab_size
    ):
        local_loss, _ = train.gradients(
            job, inputs[mine], labels[mine], local_batch_size=args.local_batch_size
        )
        loss, _ = train.sum_over_ranks(job, local_loss, torch.zeros_like(local_loss))
        result["loss"].append(loss.item())
        result["loads"].append(sum_loads(job))
        result["grads"].append(gather_weights(job, lambda p: p.grad))
        result["norm"].append(train.update(job, max_norm=args.max_norm)[0].item())
    torch.set_default_dtype(torch.float32)
    result["biases"] = {number: moe.bias.tolist() for number, moe in find_experts(job)}
    return result | {"weights": gather_weights(job, lambda p: p)}


def run_cases(cases, dtype, steps):
    """Run [flags, ...] one after the other on this rank."""
    return [run_case(flags, dtype, steps) for flags in cases]


def merge_ranks(results):
    """One result from those of all ranks: every rank has the numbers, stages have their parameters.

    That all ranks report the same loss and norm is part of the claim.
    """
    merged = results[0]
    for result in results[1:]:
        assert result["loss"] == merged["loss"], "ranks disagree about the loss"
        assert result["norm"] == merged["norm"], "ranks disagree about the gradient norm"
        for key in ("weights 0", "weights"):
            merged[key] = result[key] | merged[key]
        shared = result["biases"].keys() & merged["biases"].keys()
        assert all(result["biases"][n] == merged["biases"][n] for n in shared), "biases differ"
        merged["biases"] = result["biases"] | merged["biases"]
        for key in ("grads", "loads"):
            merged[key] = [a | b for a, b in zip(result[key], merged[key], strict=True)]
    return merged


def relative_error(tensors, references):
    assert tensors.keys() == references.keys(), tensors.keys() ^ references.keys()
    return max(
        ((tensors[name] - reference).norm() / reference.norm()).item()
        for name, reference in references.items()
    )


def compare(result, reference):
    """{column of the table: worst relative error, or for the initial weights whether equal}."""
    names = reference["weights 0"].keys()
    return {
        "weights 0": result["weights 0"].keys() == names
        and all(torch.equal(result["weights 0"][n], reference["weights 0"][n]) for n in names),
        **{
            key: max(
                abs(a / b - 1) for a, b in zip(result[key], reference[key], strict=True)
            )
            for key in ("loss", "norm")
        },
        "grads": max(
            relative_error(a, b) for a, b in zip(result["grads"], reference["grads"], strict=True)
        ),
        "weights": relative_error(result["weights"], reference["weights"]),
        "experts": all(result[key] == reference[key] for key in ("loads", "biases")),
    }


def is_equal(errors, dtype):
    numbers, tensors = TOLERANCES[dtype]
    return (
        errors["weights 0"]
        and (errors["experts"] or dtype == "bf16")
        and max(errors["loss"], errors["norm"]) < numbers
        and max(errors["grads"], errors["weights"]) < tensors
    )


def run_matrix(cases, *, dtype, steps, common="", timeout_s=600):
    """{name: (ranks, flags)} -> {name: errors against one process}; a launch for every few cases.

    `common` are flags that the one process has as well. A rank keeps the groups of all its cases,
    and gloo two threads for each: with 72 cases they were 1,700, which no machine runs well.
    """
    reference = run_ranks(1, run_cases, [f"--local-batch-size 8 {common}"], dtype, steps)[0][0]
    errors = {}
    for world_size in sorted({ranks for ranks, _ in cases.values()}):
        names = [name for name, (ranks, _) in cases.items() if ranks == world_size]
        for some in (names[i : i + 20] for i in range(0, len(names), 20)):
            flags = [f"{cases[name][1]} {common}" for name in some]
            results = run_ranks(world_size, run_cases, flags, dtype, steps, timeout_s=timeout_s)
            for name, per_rank in zip(some, zip(*results, strict=True), strict=True):
                errors[name] = compare(merge_ranks(list(per_rank)), reference)
    return {name: errors[name] for name in cases}


def with_accumulation(flags, n_data, accumulation):
    return f"{flags} --local-batch-size {8 // n_data // accumulation}"


def data_ranks(flags):
    words = flags.split()
    values = dict(zip(words, words[1:], strict=False))
    return int(values.get("--dp-replicate", 1)) * int(values.get("--dp-shard", 1))


def all_cases(world):
    """Every mesh with every choice that applies to it."""
    return product(MESHES | TECHNIQUES | SCHEDULES, world)


def expert_cases(world):
    """Every mesh with experts, each ep, accumulation and one technique at a time."""
    schedules = {
        f"pp2 x dp2, ep 2, {name}": (4, f"--pp 2 --dp-shard 2 --ep 2 --pp-schedule {name}")
        for name in pipeline.SCHEDULES
    }
    return product(EXPERT_MESHES | EXPERT_TECHNIQUES | schedules, world)


def product(named, world):
    """{title: (ranks, flags)} on up to `world` ranks, with each accumulation that fits."""
    cases = {}
    for name, (ranks, flags) in named.items():
        # a part of the batch must hold a sequence, and a microbatch for each stage of a pipeline
        least = 8 if "DualPipeV" in name and "pp4" in name else 4 if "pp" in name else 1
        fitting = [n for n in (1, 2, 4) if 8 // data_ranks(flags) // n >= least]
        for accumulation in fitting if ranks <= world else ():
            both = "--tp" in flags and name in MESHES
            for loss in ("", " --no-loss-parallel") if both else ("",):
                title = f"{name}{', loss gathered' if loss else ''}, accumulation {accumulation}"
                full = with_accumulation(flags + loss, data_ranks(flags), accumulation)
                cases[title] = (ranks, full)
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=8, help="most ranks to use")
    parser.add_argument("--dtype", choices=TOLERANCES, default="fp64")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name holds it")
    parser.add_argument("--flags", default="", help="of train.py, for the one process as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torch's advice on how `full_tensor` gathers
    n_cases = n_failed = 0
    for cases, common in ((all_cases(args.world), ""), (expert_cases(args.world), EXPERTS)):
        cases = {name: case for name, case in cases.items() if re.search(args.only, name)}
        if not cases:
            continue
        size = {"dtype": args.dtype, "steps": args.steps, "timeout_s": 3600}
        table = run_matrix(cases, common=f"{common} {args.flags}", **size)
        width = max(map(len, table))
        print(f"{args.dtype}, {args.steps} steps, against one process; worst relative errors")
        print(f"{common}\n{'':{width}}  weights 0      loss      norm     grads   weights  experts")
        for name, e in table.items():
            ok = is_equal(e, args.dtype)
            n_failed += not ok
            print(
                f"{name:{width}}  {'equal' if e['weights 0'] else 'DIFFER':>9}"
                + "".join(f"{e[key]:10.1e}" for key in ("loss", "norm", "grads", "weights"))
                + f"{'equal' if e['experts'] else 'DIFFER':>9}"
                + ("" if ok else "   <- FAILED")
            )
        n_cases += len(table)
    print(f"{n_cases - n_failed} equal, {n_failed} failed")
    sys.exit(n_failed > 0 or n_cases == 0)


if __name__ == "__main__":
    main()

"""Simulate the published runs: `python tests/paper_tables.py` prints the tables of docs/figures.md.

Published: TorchTitan (arXiv 2410.06511) tables 1 to 4, on H100s with 95 GiB, and the page
benchmarks/llama3_h100_202412_torchtitan.md of its repository ("T2" below is table 2 there). Memory
is the peak of the bytes its allocator reserved, on the GPU where it was highest, and here that of
simulate.py's replay, on the first, the second or the last pipeline rank. The published runs do not
name the number of microbatches: here it is the pipeline's degree, as was the default then. Where
their layout differed from ours it is theirs here: `trace`. Their tokens/s are compared with what
simulate.py estimates from the work that is stored in published_work.json, which this writes.
"""

import dataclasses
import functools
import json
import os
import shlex
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model  # noqa: E402
import parallel  # noqa: E402
import pipeline  # noqa: E402
import simulate  # noqa: E402

WORK = ROOT / "tests/published_work.json"
FLOAT8 = "--float8 tensorwise --float8-all-gather"
LONG_405B = (
    "llama3_405b_pp8 --world-size 512 --pp-schedule 1F1B --local-batch-size 8 --microbatch-size 1"
)
# (name, recipe and flags here, tokens/s a GPU, GiB); "eager": without the recipe's --compile,
# "blocking": without its --async-tp
PUBLISHED = [
    ("table 1: 8B, FSDP 8", "eager llama3_8b --world-size 8", 6258, 81.9),
    ("+ compile", "llama3_8b --world-size 8", 6674, 77.0),
    ("+ float8", f"llama3_8b --world-size 8 {FLOAT8}", 9409, 76.8),
    ("T1, the same: FSDP 8", "eager llama3_8b --world-size 8", 5762, 82.4),
    ("+ compile", "llama3_8b --world-size 8", 6667, 77.0),
    ("+ float8", f"llama3_8b --world-size 8 {FLOAT8}", 8532, 76.8),
    ("table 2: 8B, FSDP 128", "eager llama3_8b --world-size 128", 5645, 67.0),
    ("+ compile", "llama3_8b --world-size 128", 6482, 62.1),
    ("+ float8", "llama3_8b_128 --world-size 128", 9319, 61.8),
    ("T3, the same: FSDP 128", "eager llama3_8b --world-size 128", 5605, 67.0),
    ("+ compile", "llama3_8b --world-size 128", 6514, 62.0),
    ("+ float8", "llama3_8b_128 --world-size 128", 8380, 61.8),
    ("table 3: 70B, FSDP 32 x TP 8", "blocking llama3_70b --world-size 256", 897, 70.3),
    ("+ async TP", "llama3_70b --world-size 256", 1010, 67.7),
    ("T4, the same: 70B", "blocking llama3_70b --world-size 256", 829, 71.9),
    ("+ async TP", "llama3_70b --world-size 256", 876, 67.6),
    ("table 4: 405B, FSDP 4 x TP 8 x PP 16, 1F1B",
     "llama3_405b --world-size 512 --pp-schedule 1F1B", 100, 78.0),
    ("interleaved", "llama3_405b --world-size 512", 130, 80.3),
    ("T5: 405B, FSDP 8 x TP 8 x PP 8, 1F1B",
     "llama3_405b_pp8 --world-size 512 --pp-schedule 1F1B", 100, 82.5),
    ("interleaved", "llama3_405b_pp8 --world-size 512", 128, 72.7),
    ("T2: 8B on 8 GPUs, sequence 32,768",
     "llama3_8b_long --world-size 8 --cp 1 --seq-len 32768", 3890, 83.9),
    ("65,536, CP 2", "llama3_8b_long --world-size 8 --cp 2 --seq-len 65536", 2540, 84.2),
    ("131,072, CP 4", "llama3_8b_long --world-size 8 --cp 4 --seq-len 131072", 1071, 84.0),
    ("262,144, CP 8", "llama3_8b_long --world-size 8", 548, 84.5),
    ("T6: 405B, TP 8 x PP 8, sequence 32,768, FSDP 8", f"{LONG_405B} --seq-len 32768", 76, 75.3),
    ("65,536, FSDP 4 x CP 2", f"{LONG_405B} --seq-len 65536 --dp-shard 4 --cp 2", 47, 75.9),
    ("131,072, FSDP 2 x CP 4", f"{LONG_405B} --seq-len 131072 --dp-shard 2 --cp 4", 31, 77.1),
    ("262,144, CP 8", f"{LONG_405B} --seq-len 262144 --dp-shard 1 --cp 8", 16, 84.9),
]  # fmt: skip
CHOICES = [  # changes to table 1's first row
    "", "--ac none", "--ac full", "--ac 2", "--loss-chunks 8", "--loss-chunks 8 --ac full",
    "--reshard never", "--reshard always", FLOAT8,
    "--loss-chunks 8 --cp 2 --local-batch-size 4", "--loss-chunks 8 --tp 2 --local-batch-size 4",
    "--dp-replicate 2",
]  # fmt: skip


def read(text):
    """(args, config) of a row: a recipe's name and further flags."""
    words = shlex.split(text)
    without = [word for word in words if word in ("eager", "blocking")]
    recipe, *flags = words[len(without) :]
    args, config = simulate.read_command([f"@{ROOT}/recipes/{recipe}.args", *flags])[1:]
    args.compile &= "eager" not in without
    args.async_tp &= "blocking" not in without
    args.rates = {"memory": 0.85 * 2400}  # GB/s: HBM2e
    return args, config


def ranks_of(args):
    """Of the first, second and last pipeline stage: published is the highest GPU's memory."""
    return sorted({*simulate.default_ranks(args), args.world_size // args.pp % args.world_size})


def eager_contexts():
    """What TorchTitan's selective checkpointing saves without a compiler: w2's product as well."""
    counts = Counter()

    def policy(context, op, *args, **kwargs):
        if op in parallel.MATMULS:
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 1
        else:
            scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
            is_saved = op in parallel.SAVED_OPS or op is scatter
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_published_fsdp(apply, stage, mesh, **options):
    """tok_embeddings, norm and output are one unit that is never freed, as for tied embeddings.

    Under a pipeline no unit is freed, and the two ends are on different stages.
    """
    config = stage.config
    if stage.tok_embeddings is not None and stage.norm is not None:
        stage.config = dataclasses.replace(config, tied_embeddings=True)
    apply(stage, mesh, **options)
    stage.config = config


def look_up_as_published(embedding, tokens, *, tp_mesh):
    """By RowwiseParallel's way, every rank makes the gradient of all rows of the embedding."""
    tokens = DTensor.from_local(tokens, tp_mesh, [Replicate()], run_check=False)
    found = torch.nn.functional.embedding(tokens, embedding.weight)
    return found.redistribute(placements=[Shard(1)]).to_local()


def call_and_keep_outputs(self, step, inputs, labels, n_valid_tokens):
    """Every stage kept its outputs until the next step, and the last one concatenated them."""
    losses = []
    step(inputs, target=labels, losses=losses, loss_kwargs={"n_valid_tokens": n_valid_tokens})
    return torch.stack([*map(parallel.whole_tensor, losses), torch.zeros(())]).detach().sum()


def trace(jobs, contexts=parallel.selective_contexts):
    """[(args, config, rank)] traced in the published runs' layout; contexts, of --ac op."""
    apply_fsdp = functools.partial(apply_published_fsdp, parallel.apply_fsdp)
    with (  # the traces are forked
        mock.patch.object(parallel, "apply_fsdp", apply_fsdp),
        mock.patch.object(parallel, "look_up", look_up_as_published),
        mock.patch.object(parallel, "selective_contexts", contexts),
        mock.patch.object(pipeline.PipelineSchedule, "call", call_and_keep_outputs),
        mock.patch.object(simulate, "fused_loss", nullcontext),  # their loss was not compiled
    ):
        return simulate.trace_ranks(jobs)


def trace_published(text, ranks):
    """The accounts of ranks of a row, in the published runs' layout, as compiled."""
    return trace([(*read(text), rank) for rank in ranks])


def largest_rows(texts, trace=trace):
    """{flags: accounts of its ranks, that which reserves most first}."""
    jobs = [(text, *read(text)) for text in dict.fromkeys(texts)]
    jobs = [
        (text, args, config, rank)
        for text, args, config in jobs
        for rank in ranks_of(args)
    ]
    rows = {}
    traced = trace([job[1:] for job in jobs])
    for (text, *_), row in zip(jobs, traced, strict=True):
        rows.setdefault(text, []).append(row)
    for same in rows.values():
        same.sort(key=lambda row: -row["reserved_bytes"])
    return rows


def work_of(row):
    """What an estimate takes of a rank's account; of its blocks an average one."""
    units, n_blocks = {}, sum(name.startswith("layers.") for name in row["work"])
    for name, phases in row["work"].items():
        unit, n = ("layers.0", n_blocks) if name.startswith("layers.") else (name, 1)
        for phase, work in phases.items():
            sums = units.setdefault(unit, {}).setdefault(phase, Counter())
            sums.update({what: amount / n for what, amount in work.items()})
    return {"work": units} | {key: row[key] for key in ("collectives", "coordinates")}


def estimate(text, work):
    """(Tokens/s of a GPU, the schedule's facts) of a row, from the work that was stored."""
    args, config = read(text)
    with tempfile.TemporaryDirectory() as args.out:
        found, schedule = simulate.estimate(args, config, work[text.removeprefix("blocking ")])
    return found["tokens_per_s_per_device"], schedule


def trace_all():
    """{(flags, whether of the paper): accounts of its ranks}."""
    found, of_paper = {}, True
    for name, text, *_ in PUBLISHED:
        if name.startswith(("table", "T")):  # the others belong to the one above them
            of_paper = name.startswith("table")
        found[text.removeprefix("blocking "), of_paper] = None
    for of_paper in (True, False):  # whose segments did not expand, and those of December 2024
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{not of_paper}"
        for eager, contexts in ((True, eager_contexts), (False, parallel.selective_contexts)):
            same = [text for text, paper in found if paper == of_paper]
            texts = [text for text in same if text.startswith("eager") == eager]
            traced = functools.partial(trace, contexts=contexts)
            for text, rows in largest_rows(texts, traced).items() if texts else ():
                found[text, of_paper] = rows
    del os.environ["PYTORCH_ALLOC_CONF"]
    return found


def print_published():
    found, of_paper = trace_all(), True
    work = {text: [work_of(row) for row in rows] for (text, _), rows in found.items()}
    WORK.write_text(json.dumps(work, separators=(",", ":")))
    print("| run | tokens/s a GPU | TFLOPs | estimated | ratio | GiB | reserved | ratio | live |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, text, speed, gib in PUBLISHED:
        if name.startswith(("table", "T")):
            of_paper = name.startswith("table")
        key = text.removeprefix("blocking ")
        row, (args, config) = found[key, of_paper][0], read(text)
        tflops = speed * model.flops_per_token(config, args.seq_len) / 1e12
        reserved, live = row["reserved_bytes"] / 2**30, row["peak_bytes"] / 2**30
        estimated = estimate(text, work)[0]
        print(
            f"| {name} | {speed:,} | {tflops:.0f} | {estimated:,.0f} | {estimated / speed:.2f} | "
            f"{gib} | {reserved:.1f} | {reserved / gib:.2f} | {live:.1f} |",
            flush=True,
        )
    return work


def print_schedules(work):
    """How much faster interleaving is at the same work: the ratio of busy shares."""
    print("| 405B | equal stages | stages by their time | published |")
    print("| --- | --- | --- | --- |")
    for recipe, published in (("llama3_405b", "130 / 100"), ("llama3_405b_pp8", "128 / 100")):
        busy = []
        for schedule in (" --pp-schedule 1F1B", ""):
            facts = estimate(f"{recipe} --world-size 512{schedule}", work)[1]
            busy.append([1 - facts["bubble_if_stages_were_equal"], 1 - facts["bubble"]])
        equal, timed = (new / old for old, new in zip(*busy, strict=True))
        print(f"| {recipe} | {equal:.3f} | {timed:.3f} | {published} |")


def print_choices():
    texts = [f"llama3_8b --world-size 8 {flags}" for flags in CHOICES]
    rows = {text: rows[0] for text, rows in largest_rows(texts, simulate.trace_ranks).items()}
    print("| flags | reserved GiB | live | activations | recomputed FLOPs | all-gathered GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for flags, text in zip(CHOICES, texts, strict=True):
        row = rows[text]
        kinds, flops = row["peak_bytes_by_kind"], row["flops"]
        sent = row["collectives"]["fsdp"]["all_gather"]["sent_bytes"]
        again = flops["recomputed"] / (flops["forward"] + flops["backward"])
        print(
            f"| {f'`{flags}`' if flags else 'as it is'} | {row['reserved_bytes'] / 2**30:.1f} | "
            f"{row['peak_bytes'] / 2**30:.1f} | "
            f"{kinds['activations'] / 2**30:.1f} | {again:.0%} | {sent / 2**30:.1f} |"
        )


if __name__ == "__main__":
    published_work = print_published()
    print()
    print_schedules(published_work)
    print()
    print_choices()

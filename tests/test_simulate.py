"""simulate.py: what it counts is what gloo ranks hold and send; closed forms; what fits."""

import dataclasses
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import paper_tables
import pytest
import torch
import torch.distributed as dist
from ranks import make_job, run_ranks

import model
import parallel
import pipeline
import simulate
import train
import watch

ROOT = Path(train.__file__).parent


def run(tmp_path, flags):
    """OUT/simulation.json of `simulate.py flags`."""
    simulate.main([*flags.split(), "--out", str(tmp_path)])
    return json.loads((tmp_path / "simulation.json").read_text())


# ---- against real ranks ------------------------------------------------------------------------


def flight_record():
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))["entries"]


def n_bytes(sizes, dtypes):
    widths = {"Float": 4, "BFloat16": 2, "Long": 8, "Double": 8, "Int": 4, "Byte": 1}
    return sum(math.prod(size) * widths[dtype] for size, dtype in zip(sizes, dtypes, strict=True))


def allocator_peak_bytes(function):
    """Most that torch's CPU allocator handed out at once during the call, from its own reports."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def real_step(flags):
    """Sizes and collectives of this rank's third step, counted without simulate.Account."""
    args, job = make_job(flags)
    rows = args.global_batch_size // job.mesh["data"].size()
    tokens = torch.randint(0, 200, (rows, args.seq_len), generator=torch.Generator().manual_seed(0))

    def step():
        train.train_step(
            job, tokens, tokens, local_batch_size=args.local_batch_size, max_norm=args.max_norm
        )

    step(), step()
    gradients, sent = [], Counter()
    parameters = job.parameters
    job.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(parallel.local_tensor(p.grad).nbytes for p in parameters))
    )
    make_operation = dist.P2POp.__init__

    def count_sends(self, op, tensor, *rest):  # gloo's flight recorder does not see these
        if op is dist.isend:
            sent.update(calls=1, bytes=tensor.nbytes)
        make_operation(self, op, tensor, *rest)

    dist.P2POp.__init__ = count_sends
    senders = {}  # number of a record -> who sent it, where that is no parallelism

    def name_records(sender, function):
        def call(*args, **kwargs):
            first = len(flight_record())
            result = function(*args, **kwargs)
            senders.update(dict.fromkeys(range(first, len(flight_record())), sender))
            return result

        return call

    train.count_valid_tokens = name_records("tokens", train.count_valid_tokens)
    train.sum_over_ranks = name_records("loss", train.sum_over_ranks)
    parallel.clip_grad_norm = name_records("norm", parallel.clip_grad_norm)
    parallel.balance = name_records("loads", parallel.balance)
    before = len(flight_record())
    peak = allocator_peak_bytes(step)
    groups = ("cp", "tp", "dp_replicate", "fsdp", "pp")
    axes = {job.mesh[axis].get_group().group_name: axis for axis in groups}
    collectives = {}
    for number, entry in enumerate(flight_record()[before:], start=before):
        kind = entry["profiling_name"].removeprefix("gloo:")
        sender = "ep" if kind == "all_to_all" else senders.get(number)
        axis = sender or axes[entry["process_group"][0]]
        size = n_bytes(entry["input_sizes"], entry["input_dtypes"])
        if kind == "all_gather":  # the buffer that all ranks fill
            size *= dist.distributed_c10d._resolve_process_group(entry["process_group"][0]).size()
        row = collectives.setdefault(axis, {}).setdefault(kind, Counter())
        row.update(calls=1, bytes=size)
    if sent:
        collectives.setdefault("pp", {})["send"] = sent
    states = [job.optimizer.state[p] for p in parameters]
    held = [parallel.local_tensor(t) for state in states for t in state.values()]
    state_bytes = {
        "parameters": sum(parallel.local_tensor(p).nbytes for p in parameters),
        "gradients": gradients[0],
        "optimizer": sum(t.nbytes for t in held),
    }
    return {"state_bytes": state_bytes, "collectives": collectives, "peak": peak}


def as_gloo_sees_them(collectives):
    """Simulated collectives in gloo's terms: its reduce-scatter is an all-reduce, of the input."""
    seen = {}
    for axis, kinds in collectives.items():
        for kind, row in kinds.items():
            gloo = {"reduce_scatter": "all_reduce"}.get(kind, kind)
            if gloo != "recv":
                total = seen.setdefault(axis, {}).setdefault(gloo, Counter())
                total.update(calls=row["calls"], bytes=row["bytes"])
    return seen


MESHES = {
    "dp 2, bf16": (2, "--local-batch-size 2 --param-dtype bf16"),
    "tp 2": (2, "--tp 2 --local-batch-size 2"),
    "pp 2": (2, "--pp 2"),
    "dp 2 x tp 2 x pp 2": (8, "--tp 2 --pp 2"),
    "replicate 2 x cp 2, recomputed, loss chunks": (
        4,
        # few weights, many tokens: gloo keeps copies of gradients while it reduces them
        "--dp-replicate 2 --cp 2 --ac full --loss-chunks 4 --local-batch-size 16 --set n_layers=2",
    ),
    # two experts for a token, of two: loads are even, as a simulation takes them
    "dp 2 x ep 2, bf16": (
        2,
        "--model debug-moe --ep 2 --local-batch-size 2 --param-dtype bf16 "
        "--set n_experts=2 top_k=2",
    ),
    "tp 2 x ep 2, op, bf16": (
        2,
        "--model debug-moe --tp 2 --ep 2 --ac op --local-batch-size 2 --param-dtype bf16 "
        "--set n_experts=2 top_k=2",
    ),
    "pp 2 x tp 2, interleaved, op": (
        4,
        "--pp 2 --tp 2 --pp-schedule Interleaved1F1B --ac op --reshard always",
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(name, tmp_path, monkeypatch):
    """State and collectives to the byte; the peak within 10 %, for the kernels' inner buffers."""
    world_size, flags = MESHES[name]
    flags += "" if "--param-dtype" in flags else " --param-dtype fp32"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "20000")
    monkeypatch.setattr(simulate, "fused_norms", nullcontext)  # real ranks here are CPUs
    real = run_ranks(world_size, real_step, flags)
    ranks = " ".join(map(str, range(world_size)))
    simulated = run(tmp_path, f"{flags} --world-size {world_size} --ranks {ranks}")
    for rank, (mine, theirs) in enumerate(zip(simulated["ranks"], real, strict=True)):
        assert mine["rank"] == rank
        assert mine["state_bytes"] == theirs["state_bytes"]
        assert as_gloo_sees_them(mine["collectives"]) == theirs["collectives"]
        # gloo copies what it reduces in threads of its own, at some ranks just then, at others not
        peers = [r["peak"] for r in real if r["state_bytes"] == theirs["state_bytes"]]
        before = sum(mine["state_bytes"][kind] for kind in ("parameters", "optimizer"))
        assert mine["peak_bytes"] == pytest.approx(before + min(peers), rel=0.10)


# ---- against closed forms ----------------------------------------------------------------------

SMALL = "--world-size 1 --seq-len 64 --local-batch-size 2"


def n_norms(config):
    return (2 * config.n_layers + 1) * config.dim


@pytest.mark.parametrize("name", ["debug", "debug-moe"])
def test_flops_are_those_of_the_formula(name, tmp_path):
    """All but the norms' parameters, which `flops_per_token` counts as if they multiplied."""
    config = model.MODELS[name]
    (rank,) = run(tmp_path, f"{SMALL} --model {name}")["ranks"]
    expected = 2 * 64 * (model.flops_per_token(config, 64) - 6 * n_norms(config))
    assert rank["flops"]["forward"] * 3 == expected
    assert rank["flops"]["backward"] == 2 * rank["flops"]["forward"]
    assert rank["flops"]["recomputed"] == 0


def test_a_compiled_loss_in_chunks_computes_the_head_again(tmp_path):
    (rank,) = run(tmp_path, f"{SMALL} --compile --loss-chunks 4")["ranks"]
    assert rank["flops"]["recomputed"] == 2 * 64 * 2 * 256 * 2048  # tokens, a multiply-add, D V


@pytest.mark.parametrize("ac, again", [("full", "wq wk wv wo w1 w3 core"), ("op", "wk wo w3")])
def test_recomputed_flops_are_those_of_the_matmuls_not_saved(ac, again, tmp_path):
    (rank,) = run(tmp_path, f"{SMALL} --ac {ac}")["ranks"]
    c = model.MODELS["debug"]
    kv = c.n_kv_heads * c.head_dim
    per_token = {"wq": c.dim * c.dim, "wk": c.dim * kv, "wv": c.dim * kv, "wo": c.dim * c.dim}
    per_token |= {name: c.dim * c.ffn_dim for name in ("w1", "w2", "w3")}
    per_token["core"] = 2 * c.dim * 64  # scores and their product with v, over 64 positions
    expected = 2 * 128 * c.n_layers * sum(per_token[name] for name in again.split())
    assert rank["flops"]["recomputed"] == expected


def test_context_parallel_ranks_multiply_prefixes_only(tmp_path):
    """2 cp chunks, the i-th of which sees i: (2 cp + 1) / 4 cp of all pairs, alike on all ranks."""
    c, cp = model.MODELS["debug"], 4
    flags = f"--world-size {cp} --cp {cp} --seq-len 64 --local-batch-size 2"
    for rank in run(tmp_path, f"{flags} --ranks 0 1 2 3")["ranks"]:
        linear = 2 * 64 * 6 * (model.count_parameters(c) - c.vocab_size * c.dim - n_norms(c))
        attention = 2 * 64 * 6 * c.n_layers * 2 * c.dim * 64 * (2 * cp + 1) / (4 * cp)
        assert rank["flops"]["forward"] * 3 == (linear + attention) / cp


def test_tensor_parallel_ranks_share_the_flops(tmp_path):
    (alone,) = run(tmp_path / "1", SMALL)["ranks"]
    (shared,) = run(tmp_path / "2", SMALL.replace("world-size 1", "world-size 4 --tp 4"))["ranks"]
    assert shared["flops"] == {phase: n // 4 for phase, n in alone["flops"].items()}


def test_the_8b_row_of_the_paper(tmp_path, monkeypatch):
    """16 N / 8 bytes of state; blocks gathered twice and their gradients scattered once."""
    monkeypatch.setattr(simulate, "fused_norms", nullcontext)  # as MemTracker saw it, on a CPU
    flags = "--model 8b --seq-len 8192 --local-batch-size 2 --ac op --world-size 8"  # eager
    (rank,) = run(tmp_path, flags)["ranks"]
    N, c = 8_030_261_248, model.MODELS["8b"]
    assert rank["parameters"] == N / 8
    assert rank["state_bytes"] == {
        "parameters": 4 * N / 8,
        "gradients": 4 * N / 8,
        "optimizer": 8 * N / 8 + 4 * len(rank["weights"]),  # with a step counter for each
    }
    head = c.vocab_size * c.dim  # the last unit is kept from forward to backward
    gathered = 2 * (2 * (N - head - c.dim) + head + c.dim)  # bf16
    sent = rank["collectives"]["fsdp"]
    assert sent["all_gather"] == {"calls": 67, "bytes": gathered, "sent_bytes": gathered * 7 / 8}
    assert sent["reduce_scatter"]["bytes"] == 4 * N  # float32
    assert rank["peak_moment"]["module"] == "loss"
    # torch's own MemTracker, an independent count of live tensors, gave 66.9 to 67.4 GiB where w2's
    # product was saved as well: 16,384 tokens, 32 blocks, bf16
    unsaved = 16_384 * 32 * 2 * c.dim
    assert 66.9 <= (rank["peak_bytes"] + unsaved) / 2**30 <= 67.4
    assert sum(rank["peak_bytes_by_kind"].values()) == rank["peak_bytes"]


def test_a_ring_sends_what_the_arithmetic_says(tmp_path):
    """Of tp 4: (n-1)/n of a buffer, twice that for an all-reduce; a pipeline sends all of it."""
    flags = "--world-size 8 --tp 4 --pp 2 --ranks 0"
    (rank,) = run(tmp_path, flags)["ranks"]
    tp, pp = rank["collectives"]["tp"], rank["collectives"]["pp"]
    assert tp["all_gather"]["sent_bytes"] * 4 == tp["all_gather"]["bytes"] * 3
    # in each of 4 microbatches: 2 in each of 3 blocks, as many in their backward, and 1 for the
    # gradient of the embedding, of (1, 256, 256) in bf16
    activation = 256 * 256 * 2
    expected = {"calls": 52, "bytes": 52 * activation, "sent_bytes": 39 * activation}
    assert tp["all_gather"] == expected
    assert tp["all_reduce"]["sent_bytes"] == tp["all_reduce"]["bytes"] * 2 * 3 / 4
    assert pp["send"] == {"calls": 4, "bytes": activation, "sent_bytes": activation}  # T/tp of it


def test_offloaded_states_take_no_memory_of_a_gpu(tmp_path):
    (kept,) = run(tmp_path / "1", SMALL)["ranks"]
    (offloaded,) = run(tmp_path / "2", f"{SMALL} --cpu-offload")["ranks"]
    gone = ("parameters", "gradients", "optimizer")
    assert all(offloaded["peak_bytes_by_kind"][kind] == 0 for kind in gone)
    assert offloaded["state_bytes"] == kept["state_bytes"]  # on the host
    states = 12 * model.count_parameters(model.MODELS["debug"])  # parameters and two moments
    assert kept["peak_bytes"] - offloaded["peak_bytes"] >= states


def test_axes_that_span_all_ranks_keep_their_own_rows(tmp_path):
    """cp 2 on 2 ranks: FSDP shards over the same two, and the loss and the norm cross them too."""
    (rank,) = run(tmp_path, "--world-size 2 --cp 2 --seq-len 64 --local-batch-size 1")["ranks"]
    c, sent = model.MODELS["debug"], rank["collectives"]
    # K and V of all positions in bf16, in each block; their gradients are scattered back
    keys_and_values = c.n_layers * 2 * 64 * c.n_kv_heads * c.head_dim * 2
    assert sent["cp"]["all_gather"]["bytes"] == keys_and_values
    assert sent["cp"]["reduce_scatter"]["bytes"] == keys_and_values
    assert sent["loss"] == {"all_reduce": {"calls": 1, "bytes": 8, "sent_bytes": 8}}  # two float32
    assert sent["tokens"] == {"all_reduce": {"calls": 1, "bytes": 8, "sent_bytes": 0}}  # one rank
    assert sent["norm"]["all_reduce"]["calls"] == 1
    assert set(sent["fsdp"]) == {"all_gather", "reduce_scatter"}


def test_float8_all_gather_sends_half(tmp_path):
    flags = "--world-size 8 --set dim=512 --float8 tensorwise"
    plain, small = (
        run(tmp_path / more, f"{flags} {more}")["ranks"][0]["collectives"]["fsdp"]
        for more in ("", "--float8-all-gather")
    )
    c = dataclasses.replace(model.MODELS["debug"], dim=512)
    linears = c.n_layers * (4 * c.dim * c.dim + 3 * c.dim * c.ffn_dim)  # all K = H here
    assert plain["all_gather"]["bytes"] - small["all_gather"]["bytes"] == 2 * linears  # twice each


def steps_with_and_without_an_account():
    args, job = make_job("--local-batch-size 1 --set n_layers=1")
    tokens = torch.zeros(1, args.seq_len, dtype=torch.int64)

    def step():
        train.train_step(job, tokens, tokens, local_batch_size=1, max_norm=1.0)

    def hooks():
        return sum(len(module._forward_hooks) for module in job.stages[0].modules())

    step()  # makes the optimizer's states, and FSDP's hooks
    before = hooks()
    with simulate.Account(job) as account:
        step()
    counted, flops = len(account.events), str(account.flops)
    step()
    assert counted > 100 and "backward" in flops and account.peak()[1]["optimizer"] > 0
    assert (hooks(), len(account.events), str(account.flops)) == (before, counted, flops)


def test_an_account_ends_with_its_step():
    run_ranks(1, steps_with_and_without_an_account)


def test_a_long_context_takes_no_mask(tmp_path):
    """A chunk of 4096 queries sees up to 65,536 keys: as bytes, a mask would be 0.25 GiB."""
    mask = parallel.lower_right(2**15, 2**18)
    assert mask.untyped_storage().nbytes() < 100
    assert (mask.seq_len_q, mask.seq_len_kv) == (2**15, 2**18)
    flags = "--world-size 8 --cp 8 --seq-len 65536 --local-batch-size 1 --ac full --loss-chunks 8"
    (rank,) = run(tmp_path, flags + " --set n_layers=1 dim=64 n_heads=2 n_kv_heads=2")["ranks"]
    assert rank["peak_bytes"] < 2**28


# ---- what a GPU would reserve ------------------------------------------------------------------

MIB = 2**20


def reserve(sizes_mib, is_expandable):
    """Reserved MiB after each allocation (> 0, in MiB) or release (< 0, an allocation's number)."""
    events, found, held = [], [], {}
    for size in sizes_mib:
        if size > 0:
            number = len(held) + 1
            held[number] = round(size * MIB)
            events.append((number, held[number], "", 0))
        else:
            events.append((-size, -held[-size], "", 0))
        found.append(simulate.reserved_bytes(events, is_expandable=is_expandable)[0] / MIB)
    return found


@pytest.mark.parametrize(
    "sizes, segments, expandable",
    [
        ([0.5, 0.5, 1, 0.25], [2, 2, 2, 4], [2, 2, 2, 4]),  # small ones share 2 MiB
        ([5, 5, 9], [20, 20, 20], [20, 20, 20]),  # of 20 MiB: 5, 5 and 9, and 1 is left
        ([5, 5, 9, 2], [20, 20, 20, 40], [20, 20, 20, 40]),
        ([11, 33.5], [12, 46], [20, 60]),  # each rounded to 2 MiB; or pages of 20
        ([30, 50, -1, 20, 9], [30, 80, 80, 80, 80], [40, 80, 80, 80, 80]),  # 30's hole: 20, then 9
        ([30, 50, -1, 29.5, 0.9], [30, 80, 80, 80, 82], [40, 80, 80, 80, 82]),
        ([30, 50, 30, -1, -3, 60], [30, 80, 110, 110, 110, 170], [40, 80, 120, 120, 120, 140]),
        ([30, 50, 30, -1, -2, 80], [30, 80, 110, 110, 110, 190], [40, 80, 120, 120, 120, 120]),
    ],
)
def test_the_replay_reserves_what_the_allocators_rules_say(sizes, segments, expandable):
    """By hand. The last: two freed neighbours make room for 80 only where segments are one."""
    assert reserve(sizes, False) == segments
    assert reserve(sizes, True) == expandable


def test_streams_do_not_share_what_they_have_freed():
    events = [(1, 30 * MIB, "", 0), (1, -30 * MIB, "", 0), (2, 30 * MIB, "", 1)]
    assert simulate.reserved_bytes(events, is_expandable=False) == {0: 30 * MIB, 1: 30 * MIB}


def test_the_8b_row_reserves_what_was_published(tmp_path, monkeypatch):
    """Table 1, compiled: 77.0 GiB. Within the 6 % that two publications of one run may differ."""
    found = {}
    for mode in ("True", "False"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{mode}")
        (found[mode],) = paper_tables.trace_published("llama3_8b --world-size 8", [0])
    assert found["False"]["reserved_bytes"] / 2**30 == pytest.approx(77.0, rel=0.06)
    assert found["True"]["reserved_bytes"] < found["False"]["reserved_bytes"]
    assert found["True"]["peak_bytes"] == found["False"]["peak_bytes"]
    # the sharded gradients are in a pool of their own, 4 bytes for each of N / 8
    by_stream = found["True"]["reserved_bytes_by_stream"].values()
    assert any(n == pytest.approx(4 * 8_030_261_248 / 8, rel=0.02) for n in by_stream)


def saved_by(norm, x):
    """Shapes and dtypes of what a module keeps for its backward pass."""
    saved = []

    def note(tensor):
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = norm(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and norm.weight.grad.shape == norm.weight.shape
    return saved


def test_a_norm_keeps_what_cudas_kernel_keeps():
    """x, the weight, and one number a token; a CPU keeps float32 copies of x."""
    norm = torch.nn.RMSNorm(16).bfloat16()
    x = torch.randn(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    with simulate.fused_norms():
        fused = saved_by(norm, x)
    assert fused == [
        ((2, 8, 16), torch.bfloat16), ((16,), torch.bfloat16), ((2, 8, 1), torch.float32),
    ]  # fmt: skip
    assert saved_by(norm, x).count(((2, 8, 16), torch.float32)) >= 2


def test_memory_is_drawn_by_kind_with_its_peak(tmp_path):
    found = run(tmp_path, SMALL)
    picture = xml.etree.ElementTree.parse(tmp_path / "memory-0.svg")
    drawn = [(e.tag.rpartition("}")[2], e) for e in picture.iter()]
    assert sum(tag == "polygon" for tag, _ in drawn) == len(simulate.KINDS)
    texts = {e.text for tag, e in drawn if tag == "text"}
    (row,) = found["ranks"]
    assert f"peak {simulate.readable(row['peak_bytes'])}" in texts
    assert f"reserved {simulate.readable(row['reserved_bytes'])}" in texts
    assert set(simulate.KINDS) <= texts


def test_a_compiler_makes_no_pointwise_results_and_no_float32_logits(tmp_path):
    """The loss's copy, and in a block at least silu(w1 x), which only its product with w3 x reads.

    A block recomputed in full has all of its results alive at once.
    """
    flags = f"{SMALL} --ac full --set vocab_size=64 n_layers=2 --local-batch-size 32"
    (eager,) = run(tmp_path / "1", flags)["ranks"]
    (compiled,) = run(tmp_path / "2", f"{flags} --compile")["ranks"]
    silu = 32 * 64 * model.MODELS["debug"].ffn_dim * 2
    assert eager["peak_bytes"] - compiled["peak_bytes"] >= silu
    flags = f"{SMALL} --set vocab_size=4096 n_layers=1 --local-batch-size 32"
    (eager,) = run(tmp_path / "3", flags)["ranks"]
    (compiled,) = run(tmp_path / "4", f"{flags} --compile")["ranks"]
    assert eager["peak_bytes"] - compiled["peak_bytes"] >= 32 * 64 * 4096 * 4
    assert eager["flops"] == compiled["flops"]


# ---- schedules ---------------------------------------------------------------------------------


def test_interleaving_the_405b_gains_what_the_formula_says():
    """(2p - 1) / (1.5p - 0.5) = 1.319 at p = m = 16; the paper's table 4 has 130 / 100."""
    times = [
        max(row[-1].end for row in pipeline.timeline(schedule, 16, 16)) / v
        for schedule, v in (("1F1B", 1), ("Interleaved1F1B", 2))
    ]
    assert times[0] / times[1] == pytest.approx(31 / 23.5, rel=1e-12)


def test_stages_take_as_long_as_their_blocks_and_ends():
    """Two stages, 2 blocks and 1 block with a head; of a block half is computed again."""
    stages = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]]
    block = {"forward": {"bf16": 0.75, "memory": 0.25}, "recomputed": {"bf16": 0.5},
             "backward": {"bf16": 2.0}}  # fmt: skip
    ends = {"output": {"forward": {"bf16": 2.0}, "backward": {"bf16": 4.0}},
            "loss": {"forward": {"memory": 1.0}, "backward": {"memory": 2.0}}}  # fmt: skip
    first, last = simulate.stage_durations(stages, {"block": block, **ends})
    for found, *expected in ((first, 2, 5, 2.5, 2.5), (last, 4, 8.5, 4.25, 4.25)):
        assert [found[kind] for kind in "FBIW"] == pytest.approx(expected)


def by_hand(flags):
    """args of a simulation, and its rates in base units."""
    args = simulate.read_command(flags.split())[1]
    return args, simulate.rates_of(args)


def test_rates_are_shares_of_peaks_and_rings_that_cross_hosts_take_the_nic():
    args, rates = by_hand("--world-size 32 --tp 4 --dp-shard 4 --dp-replicate 2")
    assert rates["bf16"] == pytest.approx(989e12 * 0.455)
    assert rates["tp"] == pytest.approx(300e9) and rates["fsdp"] == rates["dp_replicate"] == 50e9
    assert by_hand("--world-size 8")[1]["fsdp"] == pytest.approx(300e9)
    compiled = by_hand("--world-size 8 --tp 2 --compile --async-tp --rates bf16=500,hidden=0.5")[1]
    assert compiled["bf16"] == 500e12 and compiled["tp"] == pytest.approx(600e9)
    assert compiled["memory"] == pytest.approx(3350e9 * 0.85)


@pytest.mark.parametrize(
    "text, said",
    [("bf17=3", "has no rate 'bf17'"), ("bf16=-1", "greater than 0"), ("hidden=1", "less than 1"),
     ("bf16", "greater than 0")],
)  # fmt: skip
def test_rates_that_are_none_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        simulate.read_command(["--world-size", "8", "--rates", text])


def test_a_step_without_a_pipeline_takes_its_work_over_the_rates(tmp_path):
    """One process: 6 FLOPs a parameter and token, attention over half of the pairs, and bytes."""
    found = run(tmp_path, f"{SMALL} --rates memory=1e30")
    c, tokens = model.MODELS["debug"], 128
    matmuls = 6 * (model.count_parameters(c) - c.vocab_size * c.dim - n_norms(c)) * tokens
    # 2 matmuls of queries and keys in forward and, with the scores again, 5 in backward; half
    attention = 7 * c.n_layers * 2 * c.dim * 64 * tokens / 2
    seconds = matmuls / (989e12 * 0.455) + attention / (989e12 * 0.303)
    estimate = found["estimate"]
    assert estimate["step_s"] == pytest.approx(seconds, rel=1e-9)
    assert estimate["tokens_per_s"] == pytest.approx(tokens / seconds)
    flops = found["model_flops_per_token"]
    assert estimate["mfu"] == pytest.approx(flops * tokens / seconds / 989e12)
    assert all(s < 1e-9 for s in estimate["exposed"].values())


def test_published_runs_take_as_long_as_estimated():
    """Those without cp, within 15 %, as two publications of one run differ; 8 % root mean square.

    From the work that paper_tables.py stores, and three rates fitted to these very rows.
    """
    work = json.loads(paper_tables.WORK.read_text())
    errors = {}
    for name, text, speed, _ in paper_tables.PUBLISHED:
        if paper_tables.read(text)[0].cp == 1:
            errors[name, text, speed] = paper_tables.estimate(text, work)[0] / speed - 1
    assert len(errors) == 22
    assert max(map(abs, errors.values())) < 0.15
    assert math.sqrt(sum(e * e for e in errors.values()) / len(errors)) < 0.08


@pytest.mark.soak
def test_the_stored_work_of_published_runs_is_what_a_trace_finds():
    work = json.loads(paper_tables.WORK.read_text())
    for text in ("llama3_8b --world-size 8", "llama3_70b --world-size 256"):
        (row,) = paper_tables.trace_published(text, [0])
        found = paper_tables.work_of(row)["work"]
        assert found.keys() == work[text][0]["work"].keys()
        for unit, phases in found.items():
            for phase, amounts in phases.items():
                assert amounts == pytest.approx(work[text][0]["work"][unit][phase], rel=1e-6)


def test_fsdp_shows_where_its_bytes_take_longer_than_the_matmuls(tmp_path):
    flags = "--world-size 16 --local-batch-size 1 --rates nic=0.001,memory=1e30"
    found = run(tmp_path, flags)
    sent = found["ranks"][0]["collectives"]["fsdp"]
    sent_bytes = sum(row["sent_bytes"] for row in sent.values())
    assert found["estimate"]["step_s"] == pytest.approx(sent_bytes / 1e6, rel=1e-6)
    assert found["estimate"]["exposed"]["fsdp"] > 0.9 * found["estimate"]["step_s"]


def test_a_pipeline_shows_its_heavy_last_stage(tmp_path):
    found = run(tmp_path, "--world-size 2 --pp 2 --set vocab_size=32768")
    schedule = found["schedule"]
    assert schedule["bubble"] > schedule["bubble_if_stages_were_equal"] == pytest.approx(1 / 5)
    assert schedule["work"][1] > 1.3 and schedule["work"][0] < 0.7
    assert sum(schedule["work"]) == pytest.approx(2)
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    assert schedule["in_flight"] == [2, 1]


def test_the_time_line_does_not_depend_on_which_ranks_are_traced(tmp_path):
    """With or without the head: blocks are computed again, and in the last stage the head too."""
    flags = "--world-size 2 --pp 2 --pp-schedule Interleaved1F1B --ac full --loss-chunks 4"
    a, b = (run(tmp_path, f"{flags} --ranks {r}")["schedule"] for r in ("0", "1"))
    assert a == b


def test_a_v_schedule_with_the_head_on_the_first_rank(tmp_path):
    flags = "--world-size 4 --pp 4 --pp-schedule DualPipeV --local-batch-size 8 --ac full"
    found = run(tmp_path, flags)
    assert found["ranks"][0]["stages"] == ["tok_embeddings", "norm..output"]
    assert found["schedule"]["work"][0] < 1 < found["schedule"]["work"][1]


def test_a_stage_without_a_block_is_no_trouble(tmp_path):
    found = run(tmp_path, "--world-size 2 --pp 2 --pp-split layers.0 --set n_layers=1")
    assert found["ranks"][0]["stages"] == ["tok_embeddings"]
    # of an embedding and a block with norms, loss and head, by bytes more than by FLOPs
    assert found["schedule"]["work"][0] < 0.3


# ---- the command -------------------------------------------------------------------------------


def test_the_ranks_of_both_ends_are_the_default(tmp_path):
    found = run(tmp_path, "--world-size 16 --pp 4 --tp 2 --local-batch-size 4")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 12]
    assert [rank["coordinates"]["pp"] for rank in found["ranks"]] == [0, 3]
    assert found["ranks"][0]["stages"][0].startswith("tok_embeddings..")
    assert found["ranks"][1]["stages"][0].endswith("..output")
    assert {"name": "tok_embeddings.weight", "shape": [2048, 256], "split": {"fsdp": 0, "tp": 0},
            "local_shape": [512, 256]} in found["ranks"][0]["weights"]  # fmt: skip


def test_it_needs_no_data_tokenizer_or_hardware(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--tokenizer nowhere --data nowhere --memory-snapshot --compile --async-tp --tp 2"
    assert len(run(tmp_path / "out", f"--world-size 2 {flags}")["ranks"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--tp 2", "the following arguments are required: --world-size"),
        ("--world-size 0", "--world-size 0 must be at least 1"),
        ("--world-size 8 --ranks 8", "--ranks 8 is none of --world-size 8: try 0 to 7"),
        ("--world-size 8 --gpu-memory-gib 0", "--gpu-memory-gib 0 must be a number greater than 0"),
        ("--world-size 8 --tp 3", "make 6 ranks, but the world size is 8"),
    ],
)
def test_wrong_commands_are_refused(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate.read_command(flags.split())


def test_it_is_not_started_by_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="conflicts with the 2 ranks that torchrun started"):
        simulate.read_command(["--world-size", "8"])


def test_the_command_says_errors_in_one_line():
    command = [sys.executable, ROOT / "simulate.py", "--world-size", "8", "--tp", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("simulate.py: --pp 1 x") and done.stderr.count("\n") == 1


def reserved(tmp_path, flags):
    return max(rank["reserved_bytes"] for rank in run(tmp_path, flags)["ranks"])


@pytest.mark.parametrize("more", ["", " --pp 2"])
def test_the_largest_batch_fits_and_one_more_does_not(more, tmp_path):
    flags = "--world-size 2 --ac full --set n_layers=2" + more
    limit_gib = 0.2
    fit = run(tmp_path, f"{flags} --gpu-memory-gib {limit_gib}")["fit"]
    assert fit["fits"] and fit["changes"] == []
    assert reserved(tmp_path, f"{flags} {fit['largest_batch']}") <= limit_gib * 2**30
    per_microbatch = 4 if "--pp" in flags else 1
    size = int(re.search(r"--local-batch-size (\d+)", fit["largest_batch"])[1]) // per_microbatch
    more = f"--local-batch-size {(size + 1) * per_microbatch}"
    more += f" --microbatch-size {size + 1}" if "--pp" in flags else ""
    assert reserved(tmp_path, f"{flags} {more}") > limit_gib * 2**30


def test_what_does_not_fit_is_told_what_to_change(tmp_path):
    """Without recomputation the blocks' activations are most; the loss is small here."""
    flags = "--world-size 2 --local-batch-size 8 --set n_layers=4"
    now = reserved(tmp_path, flags)
    fit = run(tmp_path, f"{flags} --gpu-memory-gib {now * 0.6 / 2**30}")["fit"]
    assert not fit["fits"]
    change, peak = fit["changes"][-1]
    assert "--ac" in change and peak <= now * 0.6
    assert reserved(tmp_path, f"{flags} {change}") == peak
    sizes = [size for _, size in fit["changes"]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_batch_keeps_its_accumulation_and_refused_sizes_count_as_too_large(tmp_path):
    """Float8 takes 16 tokens at a time: 2, 4, 6 .. sequences of 24."""
    flags = "--world-size 2 --seq-len 24 --float8 rowwise --set n_layers=1 --local-batch-size 2"
    fit = run(tmp_path, f"{flags} --global-batch-size 12 --gpu-memory-gib 0.12")["fit"]
    local, whole = map(int, re.findall(r"\d+", fit["largest_batch"]))
    assert local % 2 == 0 and whole == 3 * 2 * local


def die(args, config, rank):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(simulate, "trace_rank", die)
    with pytest.raises(watch.TrainingError, match="was killed, for want of memory"):
        simulate.main(["--world-size", "2"])


def test_nothing_helps_where_the_state_is_too_large(tmp_path):
    fit = run(tmp_path, "--world-size 1 --gpu-memory-gib 0.01 --set n_layers=1")["fit"]
    assert not fit["fits"] and fit["largest_batch"] is None


@pytest.mark.soak
@pytest.mark.parametrize("recipe", sorted(path.stem for path in ROOT.glob("recipes/llama3*.args")))
def test_every_recipe_is_simulated_in_time_and_memory(recipe, tmp_path):
    """Each names its number of GPUs in its first line. 405B: under 9 min and 8 GiB for 2 ranks."""
    text = (ROOT / "recipes" / f"{recipe}.args").read_text()
    world_size = re.search(r"on (\d+) GPUs", text.splitlines()[0])[1]
    command = [sys.executable, str(ROOT / "simulate.py"), f"@{ROOT}/recipes/{recipe}.args"]
    command += ["--world-size", world_size, "--out", str(tmp_path)]
    measured = f"import resource, subprocess; subprocess.run({command!r}, check=True); " + (
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measured], capture_output=True, text=True, timeout=540, check=True
    )
    assert int(done.stdout.splitlines()[-1]) * 2 < 8 * 2**20  # KiB of one rank; there are two
    assert Path(tmp_path, "simulation.json").exists()

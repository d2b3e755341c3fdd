"""parallel.py: every mesh trains as one process; groups, shapes, collectives, bytes and graphs."""

import dataclasses
import functools
import gc
import math
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from ranks import async_tp_graphs, make_job, run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as llama
import parallel
import pipeline
import train

aten = torch.ops.aten
B, T, D, V, L = 8, 32, 32, 67, 7  # of parity.BASE: what every rank of tp, cp and pp sees of a batch
H, K, DH, F = 8, 4, 4, 48


# ---- Every mesh trains as one process ----------------------------------------------------------


def accumulated(ranks, flags, times=1):
    return ranks, parity.with_accumulation(flags, parity.data_ranks(flags), times)


MESHES = {name: accumulated(*case) for name, case in parity.MESHES.items()}
VARIATIONS = {  # one factor at a time
    "dp2, accumulation 2": accumulated(2, "--dp-shard 2", 2),
    "pp2, accumulation 2": accumulated(2, "--pp 2", 2),
    "tp2, loss gathered": accumulated(2, "--tp 2 --no-loss-parallel"),
    "dp2, reshard always": accumulated(2, "--dp-shard 2 --reshard always"),
    "dp2, reshard never": accumulated(2, "--dp-shard 2 --reshard never"),
    "dp2, cpu offload": accumulated(2, "--dp-shard 2 --cpu-offload"),
} | {n: accumulated(*case) for n, case in parity.TECHNIQUES.items() if "--compile" not in n}
COMPILED = {
    f"{name}, compiled{ac}": accumulated(ranks, f"{flags} --compile{ac}")
    for name, ranks, flags, recomputing in (
        ("1", 1, "", (" --ac op", " --ac full", " --loss-chunks 2")),
        ("dp2", 2, "--dp-shard 2", ()),
        ("tp2", 2, "--tp 2", (" --ac op", " --ac full", " --no-loss-parallel")),
        ("cp2", 2, "--cp 2", ()),
        ("pp2", 2, "--pp 2", ()),
        ("dp2 x tp2", 4, "--dp-shard 2 --tp 2", ()),
    )
    for ac in ("", *recomputing)
}
FLOAT32 = {f"{name}, float32": MESHES[name] for name in ("dp2", "tp2", "cp2")}
SWITCHES = {  # every boolean field of the model: {its name: the other value than the default}
    field.name: str(not field.default).lower()
    for field in dataclasses.fields(llama.ModelConfig)
    if field.type is bool
}
SWITCHES["qk_norm"] += " head_dim=6"  # 8 heads of 6, of a dim of 32
LAUNCHES = [  # (dtype, flags that the one process has as well, cases of one world size)
    (dtype, common, {name: case for name, case in cases.items() if case[0] == world_size})
    for dtype, common, cases in (
        ("fp64", "", MESHES | VARIATIONS | COMPILED),
        ("fp32", "", FLOAT32),
        *(
            (
                "fp64",
                f"--set {name}={value}",
                {f"{mesh}, {name}": MESHES[mesh] for mesh in ("dp2", "tp2", "cp2")},
            )
            for name, value in SWITCHES.items()
        ),
    )
    for world_size in sorted({ranks for ranks, _ in cases.values()})
]


@functools.cache
def run_launch(i):
    """{case: errors against one process} of LAUNCHES[i]; what stopped it, if anything, once."""
    dtype, common, cases = LAUNCHES[i]
    try:
        return parity.run_matrix(cases, dtype=dtype, steps=2, common=common)
    except AssertionError as error:
        return error


@pytest.mark.parametrize(
    ("i", "name"),
    [pytest.param(i, name, id=name) for i, launch in enumerate(LAUNCHES) for name in launch[2]],
)
def test_every_mesh_trains_as_one_process(i, name):
    errors = run_launch(i)
    if isinstance(errors, AssertionError):
        raise errors
    assert parity.is_equal(errors[name], LAUNCHES[i][0]), errors[name]


@pytest.mark.soak
def test_the_full_product_trains_as_one_process():
    table = parity.run_matrix(parity.all_cases(8), dtype="fp64", steps=5, timeout_s=3600)
    assert [name for name, e in table.items() if not parity.is_equal(e, "fp64")] == []


def test_gradients_summed_in_float32_of_a_float64_model_are_off_by_float32_rounding():
    cases = {"dp2": accumulated(2, "--dp-shard 2 --reduce-dtype fp32")}
    grads = parity.run_matrix(cases, dtype="fp64", steps=1)["dp2"]["grads"]
    # each half and the sum are rounded by 2^-24 = 6e-8; halves that cancel may double that or more
    assert 1e-9 < grads < 1e-6


def test_bf16_gradients_of_two_ranks_are_those_of_one_process_within_bf16_rounding():
    cases = {"dp2": MESHES["dp2"]}
    error = parity.run_matrix(cases, dtype="fp32", steps=1, common="--param-dtype bf16")["dp2"]
    assert error["weights 0"]
    # a gradient is rounded to bf16 (2^-9) once on one process, on two ranks each half is: against
    # their sum at most 2^-9 (1 + sqrt 2) while halves have no more than its norm / sqrt 2 each, and
    # about as much again where they partly cancel. Averaging instead of adding is an error of 1/2
    assert 0 < error["grads"] < 4 * 2**-9
    assert max(error["loss"], error["norm"]) < 2**-9


def run_in_bf16():
    """One AdamW step of one process; the dtypes of everything on the way."""
    args, job, inputs, labels = build_job("--param-dtype bf16 --optimizer adamw")
    seen = {}
    block = job.stages[0].layers["3"]
    block.attention.wq.register_forward_hook(
        lambda wq, x, y: seen.update(weight=wq.weight.dtype, input=x[0].dtype, output=y.dtype)
    )
    block.register_forward_hook(lambda block, x, y: seen.update(rope=x[1].dtype, residual=y.dtype))
    train.forward_backward(job, inputs, labels, divisor_of(labels))
    master = block.attention.wq.weight
    seen |= {"master": master.dtype, "gradient": master.grad.dtype}
    job.optimizer.step()
    state = job.optimizer.state[master]
    return seen | {name: state[name].dtype for name in ("exp_avg", "exp_avg_sq")}


def test_one_process_computes_in_bf16_and_keeps_weights_gradients_and_moments_in_float32():
    seen = run_ranks(1, run_in_bf16)[0]
    computing = {name: seen.pop(name) for name in ("weight", "input", "output", "residual")}
    assert set(computing.values()) == {torch.bfloat16}, computing
    assert len(seen) == 5 and set(seen.values()) == {torch.float32}, seen


# ---- What a rank holds and sends: one launch of many measurements ------------------------------


class Collectives(TorchDispatchMode):
    """Counts (name, elements of the whole tensor) of what is sent, below DTensor."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0].strip("_")
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            if name != "wrap_tensor_autograd":
                name = {"allgather_base": "fsdp_gather", "reduce_scatter_base": "fsdp_scatter"}.get(
                    name, name
                )
                tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
                self.counts[name, max(t.numel() for t in tensors)] += 1
        return result

    def taken(self):
        counts, self.counts = dict(self.counts), Counter()
        return counts


def build_job(flags):
    """The program's own job on this rank, and one batch of its data rank."""
    args, job = make_job(f"{parity.BASE} {flags}")
    batch = parity.make_batches(1, n_sequences=8, seq_len=T, vocab_size=job.config.vocab_size)[0]
    n, rank = job.mesh["data"].size(), job.mesh["data"].get_local_rank()
    inputs, labels = (whole.chunk(n)[rank][:, job.positions] for whole in batch)
    return args, job, inputs, labels


def divisor_of(labels):
    return (labels != -100).sum()


def held_bytes(tensors):
    storages = {id(s): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def live_tensors():
    """All tensors of this process that have memory, DTensors by what they wrap."""
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return [t for t in found if t.device.type == "cpu"]


def is_freed(stage):
    """Which FSDP units hold only their shard at the end of the forward pass."""
    names = {"tok_embeddings": stage.tok_embeddings, "norm": stage.norm, "output": stage.output}
    weights = {name: module.weight for name, module in names.items() if module is not None}
    weights |= {number: block.attention.wq.weight for number, block in stage.layers.items()}
    return {name: isinstance(weight, DTensor) for name, weight in weights.items()}


def measure(flags):
    """One forward, loss, backward and clipping on this rank: shapes, collectives, what is freed."""
    args, job, inputs, labels = build_job(flags)
    stage = job.stages[0]
    found = {"activations": {}, "freed": None, "rope": stage.rope}
    for name, module in (("tok_embeddings", stage.tok_embeddings), *stage.layers.items()):
        if module is not None:
            module.register_forward_hook(
                lambda m, x, y, name=name: found["activations"].update({name: tuple(y.shape)})
            )
    stage.register_forward_hook(lambda stage, x, y: found.update(freed=is_freed(stage), logits=y))
    found["shapes"] = {
        name: tuple(parallel.local_tensor(parameter).shape)
        for name, parameter in parallel.named_weights(stage)
    }
    with Collectives() as sent, loss_parallel() if job.loss_parallel else nullcontext():
        if job.schedule:
            train.forward_backward(job, inputs, labels, divisor_of(labels))  # opens connections
            sent.taken()
            train.forward_backward(job, inputs, labels, divisor_of(labels))
            found["step"] = sent.taken()
        else:
            output = stage(inputs)
            found["forward"] = sent.taken()
            loss = job.loss_fn(output, labels, divisor_of(labels))
            found["loss"] = sent.taken()
            loss.backward()
            found["backward"] = sent.taken()
        parallel.clip_grad_norm(list(stage.parameters()), 1.0, job.mesh)
        found["clip"] = sent.taken()
    logits = found.pop("logits")
    is_split = isinstance(logits, DTensor)
    placements = [str(p) for p in logits.placements] if is_split else None
    found["logits"] = placements, tuple(parallel.local_tensor(logits).shape)
    return found


def measure_all(cases):
    return [measure(flags) for flags in cases]


CASES = {
    2: [
        accumulated(2, flags)[1]
        for flags in (
            "--tp 2",
            "--tp 2 --no-loss-parallel",
            "--tp 2 --ac op",
            "--tp 2 --ac full",
            "--cp 2",
            "--cp 2 --ac op",
            "--dp-shard 2",
            "--dp-shard 2 --reshard always",
            "--dp-shard 2 --reshard never",
            "--dp-replicate 2",
            "--pp 2",
        )
    ],
    4: [
        accumulated(4, flags)[1]
        for flags in (
            "--dp-replicate 2 --dp-shard 2",
            "--dp-shard 2 --tp 2",
            "--pp 2 --dp-shard 2",
            "--pp 2 --dp-shard 2 --reshard always",
        )
    ],
}


@functools.cache
def measured(world_size):
    """{flags: [what rank 0 measured, rank 1, ...]}"""
    results = run_ranks(world_size, measure_all, CASES[world_size])
    return dict(zip(CASES[world_size], zip(*results, strict=True), strict=True))


def on_ranks(world_size, flags):
    return measured(world_size)[accumulated(world_size, flags)[1]]


# ---- 1. The mesh -------------------------------------------------------------------------------

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED = {
    "hsdp": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "data": ("dp_replicate", "dp_shard"),
}


def list_groups(cubes):
    """[{axis: this rank's group}] of several meshes."""
    found = []
    for degrees in cubes:
        mesh = parallel.build_mesh("cpu", **dict(zip(DEGREES, degrees, strict=True)))
        found.append({axis: sorted(piece.mesh.flatten().tolist()) for axis, piece in mesh.items()})
        assert mesh["hsdp"].mesh_dim_names == ("dp_replicate", "fsdp")
        for axis in mesh.keys() - {"hsdp"}:
            group = dist.get_process_group_ranks(mesh[axis].get_group())
            assert sorted(group) == found[-1][axis], axis
    return found


def groups_of(degrees, axes):
    """Ranks that differ only in the given axes, from the rank's digits in mixed radix."""
    cube = torch.arange(8).view(degrees)
    kept = [DEGREES.index(axis) for axis in axes]
    others = [dim for dim in range(5) if dim not in kept]
    n = torch.tensor([degrees[dim] for dim in kept]).prod().item()
    return sorted(cube.permute(*others, *kept).reshape(-1, n).sort().values.tolist())


def test_the_groups_of_every_axis_are_those_of_the_headers_picture():
    pictured, others = (2, 1, 2, 1, 2), [(1, 2, 2, 2, 1), (2, 2, 1, 2, 1), (1, 1, 2, 2, 2)]
    per_rank = run_ranks(8, list_groups, [pictured, *others])
    for i, degrees in enumerate([pictured, *others]):
        axes = {axis: (axis,) for axis in ("pp", "dp_replicate", "cp", "tp")} | JOINED
        for axis, members in axes.items():
            groups = [groups[i][axis] for groups in per_rank]
            assert all(rank in group for rank, group in enumerate(groups))
            unique = sorted(map(list, set(map(tuple, groups))))
            assert unique == groups_of(degrees, members), (degrees, axis)
    drawn = dict(re.findall(r"(\w+) +groups +([\d ]+)", parallel.__doc__))
    drawn = {axis: sorted([*map(int, g)] for g in text.split()) for axis, text in drawn.items()}
    assert drawn == {axis: groups_of(pictured, (axis,)) for axis in ("tp", "dp_shard", "pp")}


WALK = (
    "--set dim=32 n_layers=2 n_heads=8 n_kv_heads=4 ffn_dim=48 vocab_size=64 --seq-len 16 "
    "--pp 2 --dp-shard 2 --tp 2 --local-batch-size 2 --param-dtype fp32"
)


def walk_through_a_step():
    """{row of README's table: its local shape here}, and the collectives of a step."""
    args, job = make_job(WALK)
    (stage,) = job.stages
    (block,) = stage.layers.values()
    attention, feed_forward = block.attention, block.feed_forward
    tokens = torch.arange(32).reshape(2, 16)
    seen = {"tokens": tuple(tokens.shape)}

    def shape(tensor):
        return tuple(parallel.local_tensor(tensor).shape)

    for name, module in (
        ("tok_embeddings", stage.tok_embeddings), ("attention_norm", block.attention_norm),
        ("wq", attention.wq), ("wk", attention.wk), ("core", attention.core), ("wo", attention.wo),
        ("ffn_norm", block.ffn_norm), ("w1", feed_forward.w1), ("w2", feed_forward.w2),
        ("sent", block), ("norm", stage.norm), ("output", stage.output),
    ):  # fmt: skip
        if module is not None:
            module.register_forward_hook(
                lambda module, x, y, name=name: seen.update({name: shape(y)})
            )
    for name, module in (("attention", attention), ("feed_forward", feed_forward)):
        module.register_forward_pre_hook(
            lambda module, x, name=name: seen.update({name: shape(x[0])})
        )
    block.register_full_backward_hook(
        lambda module, into, out_of: seen.update({"sent back": shape(into[0])})
    )
    if stage.tok_embeddings is not None:
        seen["tok_embeddings.weight"] = shape(stage.tok_embeddings.weight)
    sizes = {"local_batch_size": args.local_batch_size}
    train.gradients(job, tokens, tokens, **sizes)  # opens connections
    job.optimizer.zero_grad()
    with Collectives() as sent:
        loss, _ = train.gradients(job, tokens, tokens, **sizes)
        seen |= {"loss": tuple(loss.shape), "w1.grad": shape(feed_forward.w1.weight.grad)}
        seen["grad norm"] = tuple(train.update(job, max_norm=1.0)[0].shape)
    return seen, dict(sent.counts)


def test_readmes_walk_through_a_step_has_the_shapes_and_sends_of_its_ranks():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = readme.split("### One step, tensor by")[1]
    rows = re.findall(r"^\| `(.+?)`.*? \| \(([\d, ]*)\) \| (.*?) ?\|$", table, flags=re.M)
    assert len(rows) == 20
    ranks = run_ranks(8, walk_through_a_step)
    names = {
        "all-gather over tp": "all_gather_into_tensor", "send over pp": "send",
        "reduce-scatter over tp": "reduce_scatter_tensor", "all-gather over fsdp": "fsdp_gather",
        "reduce-scatter over fsdp": "fsdp_scatter", "all-reduce over tp": "all_reduce",
        "all-reduce over shards": "all_reduce",
    }  # fmt: skip
    on_rank_4 = ("norm", "output", "loss", "sent back")
    for name, shape, sends in rows:
        seen, counts = ranks[4 if name in on_rank_4 else 0]
        assert seen[name] == tuple(int(n) for n in shape.split(",") if n.strip()), name
        if sends:
            kind, size = re.fullmatch(r"(.+) of \(([\d, ]*)\)", sends).groups()
            n_elements = math.prod(int(n) for n in size.split(",") if n.strip())
            assert (names[kind], n_elements) in counts, (name, sends, counts)


# ---- 2. Tensor, sequence and loss parallelism --------------------------------------------------


def test_a_module_without_a_tp_style_is_named():
    """As where a fork adds a norm to the block and forgets it in the plan."""

    def apply():
        mesh = parallel.build_mesh("cpu", pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=2)
        with torch.device("meta"):
            stage = llama.Transformer(CONFIG, seq_len=T)
            stage.layers["1"].attention.new_norm = torch.nn.RMSNorm(DH)
        with pytest.raises(AssertionError, match="no style for layers.1.attention.new_norm.weight"):
            parallel.apply_tp(stage, mesh["tp"], loss_parallel=True)

    run_ranks(2, apply)


def test_under_tp_activations_between_blocks_are_split_over_the_sequence():
    for rank in on_ranks(2, "--tp 2"):
        assert rank["activations"] == {
            name: (B, T // 2, D) for name in ("tok_embeddings", *map(str, range(L)))
        }


def test_under_tp_a_rank_holds_half_the_rows_or_columns_of_every_matrix():
    rows = {"wq": H * DH, "wk": K * DH, "wv": K * DH, "w1": F, "w3": F}
    expected = {name: (n // 2, D) for name, n in rows.items()}
    expected |= {"wo": (D, H * DH // 2), "w2": (D, F // 2)}
    expected |= dict.fromkeys(("attention_norm", "ffn_norm", "norm"), (D,))
    for rank, found in enumerate(on_ranks(2, "--tp 2")):
        expected |= dict.fromkeys(("tok_embeddings", "output"), ((34, 33)[rank], D))  # of 67
        for name, shape in found["shapes"].items():
            assert shape == expected[name.split(".")[-2]], name
        assert len(found["shapes"]) == 9 * L + 3


def test_logits_are_split_over_the_vocabulary_or_gathered():
    for rank, found in enumerate(on_ranks(2, "--tp 2")):
        assert found["logits"] == (["S(2)"], (B, T, (34, 33)[rank]))
    for found in on_ranks(2, "--tp 2 --no-loss-parallel"):
        assert found["logits"] == (None, (B, T, V))


def gathers_and_scatters(n_gathers, n_scatters, numel):
    return {
        ("all_gather_into_tensor", numel): n_gathers,
        ("reduce_scatter_tensor", numel): n_scatters,
    }


def test_tp_sends_two_gathers_and_two_scatters_per_block_and_direction():
    activation = B * T * D
    once = gathers_and_scatters(2 * L + 1, 2 * L + 1, activation)  # + before output, + embedding
    norms = {("all_reduce", D): 2 * L + 1}  # gradients of weights that saw half the sequence
    found = on_ranks(2, "--tp 2")[0]
    assert found["forward"] == once
    assert found["backward"] == once | norms
    assert found["loss"] == {("all_reduce", B * T): 3}  # maximum, sum of exp, label's logit
    gathered = on_ranks(2, "--tp 2 --no-loss-parallel")[0]
    padded = B * T * 2 * 34  # 67 logits from 34 and 33
    assert gathered["forward"] == once | {("all_gather_into_tensor", padded): 1}
    assert gathered["loss"] == {}
    assert gathered["backward"] == once | norms


def test_recomputing_a_block_repeats_its_gathers_and_full_one_scatter_too():
    again = {("all_reduce", D): 2 * L + 1}
    for ac, n_gathers, n_scatters in (("op", 2, 0), ("full", 2, 1)):
        once = gathers_and_scatters((2 + n_gathers) * L + 1, (2 + n_scatters) * L + 1, B * T * D)
        assert on_ranks(2, f"--tp 2 --ac {ac}")[0]["backward"] == once | again


class EmbeddingGradients(TorchDispatchMode):
    """The shapes that embedding_dense_backward makes on this rank."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = op(*args, **kwargs or {})
        if op is torch.ops.aten.embedding_dense_backward.default:
            self.shapes.append(tuple(result.shape))
        return result


def embedding_gradient_shapes():
    _, job, inputs, labels = build_job("--tp 2")
    with EmbeddingGradients() as made:
        train.forward_backward(job, inputs[:B], labels[:B], divisor_of(labels))
    return made.shapes


def test_no_tp_rank_makes_more_than_its_rows_of_the_embeddings_gradient():
    assert run_ranks(2, embedding_gradient_shapes) == [[(34, D)], [(33, D)]]  # of 67


# ---- 3. Context parallelism --------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "cp"), [(8, 1), (8, 2), (24, 2), (24, 3), (32, 4), (64, 8)])
def test_cp_positions_divide_tokens_and_causal_work_evenly(seq_len, cp):
    held = [parallel.cp_positions(seq_len, cp=cp, cp_rank=rank).tolist() for rank in range(cp)]
    assert sorted(sum(held, [])) == list(range(seq_len))
    # a query at position i meets i + 1 keys
    assert {sum(positions) for positions in held} == {seq_len * (seq_len - 1) // 2 // cp}
    assert all(positions == sorted(positions) for positions in held)


def plain_attention(q, k, v):
    """softmax(q k^T / sqrt(Dh)) v, each key and value head repeated for its group of queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def attend_on_ranks(shapes):
    """Worst errors of outputs and of the gradients of q, k, v against plain attention."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    mesh = parallel.build_mesh("cpu", pp=1, dp_replicate=1, dp_shard=1, cp=cp, tp=1)
    errors = []
    for n_heads, n_kv_heads, seq_len in shapes:
        generator = torch.Generator().manual_seed(seq_len)
        whole = [
            torch.randn(2, n, seq_len, 6, generator=generator, dtype=torch.float64)
            for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)
        ]
        positions = parallel.cp_positions(seq_len, cp=cp, cp_rank=rank)
        mine = [x[:, :, positions].requires_grad_() for x in whole]
        output = parallel.ContextParallelAttention(mesh["cp"], seq_len)(*mine[:3])
        (output * mine[3]).sum().backward()
        leaves = [x.clone().requires_grad_() for x in whole]
        expected = plain_attention(*leaves[:3])
        (expected * leaves[3]).sum().backward()
        pairs = [(output, expected), *((m.grad, x.grad) for m, x in zip(mine, leaves, strict=True))]
        errors.append(max((a - b[:, :, positions]).abs().max().item() for a, b in pairs))
    return errors


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_over_cp_ranks_is_plain_causal_attention(cp):
    shapes = [(4, 4, 16), (4, 2, 16), (6, 1, 24)]  # heads, kv heads, tokens
    for errors in run_ranks(cp, attend_on_ranks, shapes):
        assert max(errors) < 1e-13  # numbers of size 1 in float64


def test_under_cp_a_rank_holds_its_share_of_the_sequence_and_sends_k_and_v_once_each_way():
    kv = 2 * B * K * T * DH
    for flags in ("--cp 2", "--cp 2 --ac op"):
        for found in on_ranks(2, flags):
            names = ("tok_embeddings", *map(str, range(L)))
            assert found["activations"] == {name: (B, T // 2, D) for name in names}
            forward, backward = ({k: n for k, n in found[p].items() if "fsdp" not in k[0]}
                                 for p in ("forward", "backward"))  # fmt: skip
            again = {("all_gather_into_tensor", kv): L} if "--ac" in flags else {}
            assert forward == {("all_gather_into_tensor", kv): L}
            assert backward == {("reduce_scatter_tensor", kv): L} | again


def test_flash_attention_3_is_taken_where_it_is_installed_on_an_h100(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append)
    assert not parallel.enable_flash_attention_3()  # a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, module in (((9, 0), None), ((8, 0), "there"), ((9, 0), "there")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        monkeypatch.setattr(parallel, "find_spec", lambda name, m=module: m)
        is_taken = parallel.enable_flash_attention_3()
        assert is_taken == (capability == (9, 0) and module is not None)
    assert taken == ["FA3"]


# ---- 5. Activation checkpointing ---------------------------------------------------------------

LAYERS = 4
CONFIG = llama.ModelConfig(D, LAYERS, H, K, F, **llama.LLAMA_3 | {"vocab_size": V})


def build_alone(mode, *, seq_len=16, dtype=torch.float32):
    """A model of one process, without a mesh."""
    model = llama.Transformer(CONFIG, seq_len=seq_len)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = functools.partial(llama.draw_weight, config=CONFIG, seed=0, device="cpu")
            parameter.copy_(draw(name, parameter.shape))
    if mode != "none":
        parallel.apply_ac(model, mode)
    model.to(dtype)
    model.init_rope(torch.arange(seq_len))
    return model


class Watch(TorchDispatchMode):
    """Counts operators and remembers, weakly, every storage that they allocated."""

    def __init__(self):
        super().__init__()
        self.counts, self.made = Counter(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.counts[function] += 1
        given, made = ({t.untyped_storage() for t in tree_leaves(x) if isinstance(t, torch.Tensor)}
                       for x in ((args, kwargs), result))  # fmt: skip
        for storage in made - given:  # not a view of what was there
            self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self):
        return sum(n_bytes for storage, n_bytes in self.made.values() if not storage.expired())


def test_recomputed_matmuls_per_block_are_0_3_and_6_of_7_and_gradients_the_same_bit_for_bit():
    tokens = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(1))
    reference = None
    modes = {"none": (0, 0), "op": (3, 0), "full": (6, 1), "2": (3, 0.5)}
    for mode, (recomputed, attention) in modes.items():
        model = build_alone(mode)
        with Watch() as forward:
            loss = model(tokens).square().mean()
        with Watch() as backward:
            loss.backward()
        forward_mm = 7 * LAYERS + 1  # and the head's
        assert forward.counts[aten.mm.default] == forward_mm, mode
        # gradients of input and weight are a matmul each
        extra = backward.counts[aten.mm.default] - 2 * forward_mm
        assert extra == recomputed * LAYERS, mode
        run = backward.counts[aten._scaled_dot_product_flash_attention_for_cpu.default]
        assert run == attention * LAYERS, mode
        grads = {name: p.grad for name, p in parallel.named_weights(model)}
        reference = reference or grads
        assert grads.keys() == reference.keys()
        assert all(torch.equal(grads[name], reference[name]) for name in grads), mode


def bytes_held(mode, dtype, n_sequences=2, seq_len=16):
    """Bytes per token that one block keeps for its backward, its input included."""
    model = build_alone(mode, seq_len=seq_len, dtype=dtype)
    x = torch.randn(n_sequences, seq_len, D, dtype=dtype, requires_grad=True)
    with Watch() as watch:
        output = model.layers["1"](x, model.rope)
    held = x.nbytes + watch.alive_bytes() - output.nbytes
    return held / (n_sequences * seq_len)


def test_a_block_holds_fewer_bytes_for_its_backward_with_op_and_fewest_with_full():
    """Of storages that the forward made, those alive after it: SAC's cache included."""
    kv = K * DH
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        held = {mode: bytes_held(mode, dtype) for mode in ("none", "op", "full")}
        assert held["none"] > held["op"] > held["full"]
        assert held["full"] == size * D  # its input
        # input, wq's result and attention's | wv's | w1's | softmax's sums in float32; not w2's
        assert held["op"] == size * (3 * D + kv + F) + 4 * H
    # twice (norm's input, normalised, times its weight), q, attention | k, v | w1, silu, w3, their
    # product | softmax's sums and two norms' scales
    assert bytes_held("none", torch.float32) == 4 * (8 * D + 2 * kv + 4 * F + H + 2)


def test_every_second_block_is_chosen_by_its_global_number_on_any_stage():
    config = llama.ModelConfig(D, L, H, K, F, vocab_size=V)
    with torch.device("meta"):
        whole = llama.Transformer(config, seq_len=T)
    for n_stages in (1, 2, 3):
        chosen = []
        for names in pipeline.split_layers(L, n_stages):
            stage = pipeline.cut_stage(whole, names)
            plain_names = {name for name, _ in stage.named_parameters()}
            parallel.apply_ac(stage, "2")
            chosen += [n for n, b in stage.layers.items() if type(b) is not llama.TransformerBlock]
            assert {name for name, _ in parallel.named_weights(stage)} == plain_names
        assert chosen == ["1", "3", "5"], n_stages


# ---- 6. Regional compile and asynchronous tensor parallelism -----------------------------------


def count_graphs(cases):
    """Graphs compiled so far: after each of 2 steps, of 2 evaluations, and after 1 step more."""
    counters = torch._dynamo.utils.counters
    tokens = SimpleNamespace(
        n_windows=lambda seq_len: 16,
        read=lambda start, count: torch.arange(start, start + count).remainder(V).numpy(),
    )
    found = []
    for flags in cases:
        torch._dynamo.reset()
        counters.clear()
        args, job, inputs, labels = build_job(f"--compile {flags}")
        sizes, graphs = {"local_batch_size": args.local_batch_size}, []
        for evaluates in (False, False, True, True, False):
            if evaluates:
                train.evaluate(job, tokens, seq_len=T, val_steps=8, **sizes)
            else:
                train.train_step(job, inputs, labels, max_norm=1.0, **sizes)
            graphs.append(counters["stats"]["unique_graphs"])
        found.append(graphs)
    return found


@mock.patch.multiple(parallel, **parity.QUICK)  # inductor is slow, and has a test of its own
def test_all_blocks_and_steps_share_one_graph_and_evaluations_another():
    """And the losses, where there is one: on the last pp rank, and not under loss parallelism."""
    alone = ["", "--set n_layers=2", "--ac full", "--ac op", "--loss-chunks 2"]
    for world_size, meshes in ((1, alone), (2, ["--dp-shard 2", "--pp 2", "--tp 2"])):
        cases = [accumulated(world_size, flags)[1] for flags in meshes]
        for rank, per_case in enumerate(run_ranks(world_size, count_graphs, cases)):
            for flags, graphs in zip(meshes, per_case, strict=True):
                n = 1 if flags == "--tp 2" or (flags == "--pp 2" and rank == 0) else 2
                assert graphs == [n, n, 2 * n, 2 * n, 2 * n], (flags, rank)


@pytest.mark.parametrize("ac", ["none", "full", "op", "2"])
def test_every_block_is_compiled_and_with_op_its_checkpoint_too(ac, monkeypatch):
    """Module.compile changes a module in place: note on which it is called."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    with torch.device("meta"):
        stage = llama.Transformer(CONFIG, seq_len=T)
    blocks = list(stage.layers.values())
    if ac != "none":
        parallel.apply_ac(stage, ac)
    parallel.apply_compile(stage, ac=ac)
    expected = list(stage.layers.values()) if ac == "op" else blocks
    assert len(compiled) == CONFIG.n_layers
    assert all(a is b for a, b in zip(compiled, expected, strict=True))


def run_inductor():
    """Loss and gradients of one step, eager and compiled by the compiler of real runs."""
    results = []
    for flags in ("", "--compile"):
        _, job, inputs, labels = build_job(f"{flags} --set n_layers=2 --local-batch-size 8")
        loss = train.forward_backward(job, inputs, labels, divisor_of(labels))
        results.append((loss, parity.gather_weights(job, lambda p: p.grad)))
    (loss, grads), (compiled_loss, compiled_grads) = results
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a block, the loss
    return abs(compiled_loss / loss - 1).item(), parity.relative_error(compiled_grads, grads)


def test_inductor_computes_the_eager_loss_and_gradients():
    loss_error, gradient_error = run_ranks(1, run_inductor)[0]
    assert loss_error < 1e-5 and gradient_error < 1e-4  # float32 in another order: parity.py


ASYNC_TP = (  # every linear is converted, of 16 rows at least on 4 ranks; sequences in a forward
    "--set dim=128 n_layers=1 n_heads=8 n_kv_heads=4 ffn_dim=256 vocab_size=256 --seq-len 64 "
    "--optimizer sgd --param-dtype bf16 --local-batch-size"
)
FUSED = Counter(fused_all_gather_matmul=2, fused_matmul_reduce_scatter=2)
FUSED8 = Counter(fused_all_gather_scaled_matmul=2, fused_scaled_matmul_reduce_scatter=2)
SUMS = {"reduce_scatter_tensor": 2}  # of several matmuls' gradients, which the pass leaves alone


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_async_tp_fuses_6_of_a_blocks_8_collectives_with_matmuls_and_2_with_rowwise(n_sequences):
    """Forward and backward graph: all but the waits. The all-reduces are of scales."""
    expected = {
        "": (FUSED, {"fused_all_gather_matmul": 2} | SUMS),
        "--ac op": (FUSED, {"fused_all_gather_matmul": 4} | SUMS),  # 2 gathered once more
        "--float8 tensorwise --float8-all-gather": (
            FUSED8 | {"all_reduce": 4},
            {"fused_all_gather_scaled_matmul": 2, "all_reduce": 7} | SUMS,
        ),
        "--float8 rowwise": (
            {"all_gather_into_tensor": 2, "fused_scaled_matmul_reduce_scatter": 2, "all_reduce": 9},
            {"all_gather_into_tensor": 2, "all_reduce": 7} | SUMS,
        ),
    }
    cases = [f"{ASYNC_TP} {n_sequences} {technique}" for technique in expected]
    (found,) = run_ranks(1, async_tp_graphs, 4, cases, timeout_s=400)
    for technique, graphs in zip(expected, found, strict=True):
        for graph in graphs:
            graph.pop("wait_tensor", None)
        assert graphs == list(map(dict, expected[technique])), technique


# ---- 7. Fully sharded data parallelism ---------------------------------------------------------


def unit_numels(degree):
    """Elements of each FSDP unit, dim 0 of every parameter padded to a multiple of the degree."""
    rows = -(-V // degree) * degree
    block = 2 * D * DH * (H + K) + 3 * D * F + 2 * D
    return {"tok_embeddings": rows * D, "block": block, "norm, output": D + rows * D}


def fsdp_counts(n_embedding, n_block, n_head, name="fsdp_gather", shards=1):
    numels = unit_numels(2)
    counts = Counter()
    for unit, n in (("tok_embeddings", n_embedding), ("block", n_block), ("norm, output", n_head)):
        counts[name, numels[unit] // shards] += n
    return dict(+counts)


def test_fsdp_gathers_each_unit_once_again_if_freed_and_scatters_its_gradient_once():
    forward, scatters = fsdp_counts(1, L, 1), fsdp_counts(1, L, 1, "fsdp_scatter")
    regathered = {"": (1, L, 0), " --reshard always": (1, L, 1), " --reshard never": (0, 0, 0)}
    for flags, again in regathered.items():
        found = on_ranks(2, f"--dp-shard 2{flags}")[0]
        assert found["forward"] == forward and found["loss"] == {}
        assert found["backward"] == fsdp_counts(*again) | scatters
    hsdp = on_ranks(4, "--dp-replicate 2 --dp-shard 2")[0]
    shards = fsdp_counts(1, L, 1, "allreduce", shards=2)
    assert hsdp["forward"] == forward
    assert hsdp["backward"] == fsdp_counts(1, L, 0) | scatters | shards


def test_replicas_only_reduce_whole_gradients():
    found = on_ranks(2, "--dp-replicate 2")[0]
    numels = Counter({("allreduce", V * D): 1, ("allreduce", V * D + D): 1})
    numels["allreduce", unit_numels(1)["block"]] = L
    assert found["forward"] == {} and found["backward"] == dict(numels)


def test_a_pipeline_sends_an_activation_and_its_gradient_per_microbatch_and_nothing_else():
    for found in on_ranks(2, "--pp 2"):
        assert found["step"] == {("send", T * D): B, ("recv", T * D): B}


def count_wrapped(flags):
    """How many modules of a rank FSDP has in hand, and whether its parameters are DTensors."""
    _, job = make_job(f"{parity.BASE} {flags}")
    modules = [module for stage in job.stages for module in stage.modules()]
    are_dtensors = {isinstance(parameter, DTensor) for parameter in job.parameters}
    return sum(isinstance(module, FSDPModule) for module in modules), *are_dtensors


def test_fsdp_leaves_a_stage_alone_where_there_is_nothing_to_shard_to_sum_or_to_cast():
    fp32 = "--param-dtype fp32 --reduce-dtype fp32"
    assert run_ranks(1, count_wrapped, fp32) == [(0, False)]
    assert run_ranks(2, count_wrapped, f"{fp32} --pp 2") == [(0, False)] * 2
    wrapped = L + 4, True  # embedding, blocks, norm, output, the root
    for flags in ("--param-dtype bf16 --reduce-dtype fp32", f"{fp32} --cpu-offload"):
        assert run_ranks(1, count_wrapped, flags) == [wrapped]
    assert run_ranks(2, count_wrapped, f"{fp32} --tp 2") == [wrapped] * 2


def test_units_are_freed_after_forward_as_reshard_says():
    ends, blocks = {"tok_embeddings": True, "norm": False, "output": False}, map(str, range(L))
    default = ends | dict.fromkeys(blocks, True)
    for world_size, flags, expected in (
        (2, "--dp-shard 2", default),
        (2, "--dp-shard 2 --reshard always", dict.fromkeys(default, True)),
        (2, "--dp-shard 2 --reshard never", dict.fromkeys(default, False)),
        (4, "--pp 2 --dp-shard 2", dict.fromkeys(default, False)),
        (4, "--pp 2 --dp-shard 2 --reshard always", dict.fromkeys(default, True)),
    ):
        for found in on_ranks(world_size, flags):
            assert found["freed"] == {name: expected[name] for name in found["freed"]}, flags
            assert len(found["freed"]) == (len(default) if world_size == 2 else 1 + L // 2 + 1)


# an odd vocabulary, and where tp need not divide it an odd ffn_dim (179)
ODD = "--set dim=64 n_layers=5 n_heads=4 n_kv_heads=2 vocab_size=515"


def expected_bytes(n_blocks, *, is_first, is_last, ffn_dim=179, fsdp=1, tp=1):
    """float32 bytes of a rank's parameters by the mesh's arithmetic; under tp norms stay whole."""
    head = 515 * 64
    block = (2 * 64 * 16 * (4 + 2) + 3 * 64 * ffn_dim) / tp + 2 * 64
    ends = is_first * head / tp + is_last * (head / tp + 64)
    return 4 * (n_blocks * block + ends) / fsdp


whole_bytes = functools.partial(expected_bytes, 5, is_first=True, is_last=True)
STAGES = [  # 5 blocks and two ends count as 7: 4 and 3
    expected_bytes(3, is_first=True, is_last=False),
    expected_bytes(2, is_first=False, is_last=True),
]
BYTES = {  # world size -> {flags: what each rank should hold}
    1: {"": [whole_bytes()]},
    2: {
        "--dp-shard 2": [whole_bytes(fsdp=2)] * 2,
        "--cp 2": [whole_bytes(fsdp=2)] * 2,
        "--dp-replicate 2": [whole_bytes()] * 2,
        "--tp 2": [whole_bytes(tp=2, ffn_dim=180)] * 2,
        "--pp 2": STAGES,
    },
    4: {
        "--dp-shard 4": [whole_bytes(fsdp=4)] * 4,
        "--dp-replicate 2 --dp-shard 2": [whole_bytes(fsdp=2)] * 4,
        "--dp-shard 2 --tp 2": [whole_bytes(fsdp=2, tp=2, ffn_dim=180)] * 4,
    },
}


def weigh_all(cases):
    """Bytes of parameters, gradients and moments, and of all tensors that a job keeps alive."""
    found = []
    for flags in cases:
        gc.collect()
        before = held_bytes(live_tensors())
        ffn_dim = 180 if "--tp" in flags else 179
        _, job, inputs, labels = build_job(f"--optimizer adamw {ODD} ffn_dim={ffn_dim} {flags}")
        train.forward_backward(job, inputs, labels, divisor_of(labels))
        job.optimizer.step()
        parameters = job.parameters
        moments = [s[k] for s in job.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
        kinds = [parameters, [p.grad for p in parameters], moments]
        weights = [held_bytes(map(parallel.local_tensor, tensors)) for tensors in kinds]
        del inputs, labels
        gc.collect()
        found.append((*weights, held_bytes(live_tensors()) - before))
        del job, parameters, moments, kinds
    return found


@pytest.mark.parametrize("world_size", BYTES)
def test_bytes_held_per_rank_are_the_arithmetic_of_the_mesh(world_size):
    cases = BYTES[world_size]
    flags = [accumulated(world_size, case)[1] for case in cases]
    for rank, found in enumerate(run_ranks(world_size, weigh_all, flags)):
        for (case, expected), held in zip(cases.items(), found, strict=True):
            weights, grads, moments, alive = held
            if "--pp" in case:  # a buffer for what each microbatch's neighbour sends
                alive -= B * T * 64 * 4
            for n_bytes in (weights, grads, moments / 2, alive / 4):
                assert n_bytes == pytest.approx(expected[rank], rel=0.01), (case, held)


# ---- 8. Weights --------------------------------------------------------------------------------


def test_after_materialise_the_rope_table_is_that_of_the_ranks_positions():
    positions = [[*range(8), *range(24, 32)], list(range(8, 24))]  # chunks 0 and 3, 1 and 2
    frequencies = llama.rope_frequencies(CONFIG)
    for found, own in zip(on_ranks(2, "--cp 2"), positions, strict=True):
        angles = torch.tensor(own, dtype=torch.float64)[:, None] * frequencies
        torch.testing.assert_close(found["rope"], torch.stack([angles.cos(), angles.sin()]).float())
    for found in on_ranks(2, "--tp 2"):
        assert found["rope"].shape == (2, T, DH // 2)


def layers_differ():
    _, job, _, _ = build_job("--local-batch-size 8")
    pair = [job.stages[0].layers[number].feed_forward.w1.weight for number in "01"]
    pair = torch.stack([parallel.whole_tensor(weight).flatten() for weight in pair])
    return torch.corrcoef(pair)[0, 1].item()


def test_two_layers_do_not_start_alike():
    assert abs(run_ranks(1, layers_differ)[0]) < 0.1  # of 1,536 pairs: 4 standard deviations


# ---- 9. Gradient clipping ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "meshes"),
    [(2, ["--tp 2", "--pp 2"]), (4, ["--pp 2 --tp 2", "--dp-replicate 2 --dp-shard 2"])],
)
def test_clipping_scales_by_the_norm_of_the_whole_gradient_on_every_rank(world_size, meshes):
    lr, weight_decay, max_norm = 0.5, 0.01, 1e-3  # of parity.BASE, but a norm that always acts
    cases = [f"{accumulated(world_size, flags)[1]} --max-norm {max_norm}" for flags in meshes]
    results = run_ranks(world_size, parity.run_cases, cases, "fp64", 1)
    for flags, per_rank in zip(meshes, zip(*results, strict=True), strict=True):
        merged = parity.merge_ranks(list(per_rank))  # and asserts that all ranks gave one norm
        (grads,), (norm,) = merged["grads"], merged["norm"]
        assert len(grads) == 9 * L + 3  # each parameter once, norms that tp replicates too
        expected = sum(g.square().sum() for g in grads.values()).sqrt().item()
        assert norm == pytest.approx(expected, rel=1e-12), flags
        assert norm > 100 * max_norm
        for name, before in merged["weights 0"].items():
            after = before * (1 - lr * weight_decay) - lr * max_norm / norm * grads[name]
            # 1e-6: torch divides by norm + 1e-6
            torch.testing.assert_close(merged["weights"][name], after, rtol=1e-12, atol=1e-9)


def clip_with_a_bit_of_difference():
    """Norm and a gradient after clipping, where rank 1 finds a norm one bit larger."""
    _, job, inputs, labels = build_job(accumulated(2, "--dp-replicate 2")[1])
    train.forward_backward(job, inputs, labels, divisor_of(labels))
    get_total_norm = torch.nn.utils.get_total_norm

    def one_bit_larger(*args, **options):
        norm = parallel.whole_tensor(get_total_norm(*args, **options))
        return torch.nextafter(norm, norm + 1) if dist.get_rank() == 1 else norm

    torch.nn.utils.get_total_norm = one_bit_larger  # in this forked rank only
    norm = parallel.clip_grad_norm(job.parameters, 1e-3, job.mesh)
    return norm.item(), parallel.local_tensor(job.parameters[0].grad).tolist()


def test_replicas_scale_by_one_norm_though_they_found_two():
    a, b = run_ranks(2, clip_with_a_bit_of_difference)
    assert a == b


# ---- 9. The loss -------------------------------------------------------------------------------


def test_a_compiled_loss_is_the_eager_one_and_keeps_2_bytes_of_a_bf16_logit_in_place_of_4():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 16, 515, generator=generator).bfloat16()
    labels = torch.randint(515, (2, 16), generator=generator)
    labels[0, :7] = -100
    n_bytes, found = [], []
    for compile in (False, True):
        loss_fn = parallel.build_loss(SimpleNamespace(output="a head"), 1, 1, compile=compile)
        kept, x = {}, logits.clone().requires_grad_()

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_fn(x, labels, (labels != -100).sum())
        loss.backward()
        n_bytes.append(sum(kept.values()) // logits.numel())
        found.append((loss, x.grad))
    (loss, grad), (compiled_loss, compiled_grad) = found
    assert n_bytes == [4, 2] and compiled_grad.dtype == torch.bfloat16
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=0)  # float32 in another order
    torch.testing.assert_close(compiled_grad, grad, rtol=2**-7, atol=1e-8)  # a rounding to bf16

"""One function per technique, most given a piece of the mesh: each changes a stage in place.

A stage is the whole model, or the part of it that a pipeline leaves to this rank. The ranks form a
cube with five axes, outer to inner pp, dp_replicate, dp_shard, cp, tp; the last varies fastest, so
that the chattiest axis (tp) lies on neighbouring GPUs of one host. 8 ranks as pp 2 x dp_shard 2 x
tp 2:

              dp_shard 0        dp_shard 1
              tp 0   tp 1       tp 0   tp 1         tp        groups  01 23 45 67
    pp 0       0      1          2      3           dp_shard  groups  02 13 46 57
    pp 1       4      5          6      7           pp        groups  04 15 26 37

With tp 8 and pp 16 on 128 ranks, rank 19 = 2 * 8 + 3 is pp 2, tp 3: its tp group is 16 ... 23, its
pp group 3, 11, 19 ... 123. Four groups of the mesh are made of several axes:

    fsdp    dp_shard x cp               where parameters, gradients and optimizer states are sharded
    hsdp    dp_replicate x fsdp         the two-dimensional mesh that fully_shard takes for hybrid
                                        sharding (HSDP): shards in a group, replicas between groups
    data    dp_replicate x dp_shard     ranks that read different sequences
    shards  fsdp x tp                   ranks that hold a stage's weights together: DTensor finds
                                        this group by itself, for the norm of gradients split on
                                        both axes, in one all-reduce

The collectives, on 4 ranks that hold a, b, c, d; each is cut in four pieces a0 a1 a2 a3, and
S0 = a0 + b0 + c0 + d0:

    rank    all-gather         reduce-scatter           all-reduce
    0       a -> a b c d       a0 a1 a2 a3 -> S0        a0 a1 a2 a3 -> S0 S1 S2 S3
    1       b -> a b c d       b0 b1 b2 b3 -> S1        b0 b1 b2 b3 -> S0 S1 S2 S3
    2       c -> a b c d       c0 c1 c2 c3 -> S2        c0 c1 c2 c3 -> S0 S1 S2 S3
    3       d -> a b c d       d0 d1 d2 d3 -> S3        d0 d1 d2 d3 -> S0 S1 S2 S3

An all-reduce is a reduce-scatter and an all-gather of its pieces. In a ring, where every rank
passes pieces on to its neighbour, each of the two sends 3/4 of the whole from every rank. The
fourth is the pipeline's send, from one rank to another.

A DTensor is one tensor held by several ranks. Along each axis of its mesh it says how: Shard(d),
cut along dim d; Replicate(), whole on every rank; Partial(), to be summed. From Shard to Replicate
is an all-gather, from Partial to Shard a reduce-scatter, from Partial to Replicate an all-reduce.

What is split, what is sent per block, and what becomes of each send in the backward pass, where the
gradient of a gathered tensor is a sum to be scattered and the other way round:

    axis          splits                  forward                   backward             function
    ------------  ----------------------  ------------------------  -------------------  ----------
    tp            wq wk wv w1 w3 by rows  all-gather of (B, T, D)   reduce-scatter       apply_tp
                  wo w2 by columns        reduce-scatter of it      all-gather
                  (each twice a block: attention and feed_forward)
    cp            the sequence (T)        all-gather of K and V     reduce-scatter       apply_cp
    ep            experts                 all-to-all of the rows    the same, back       apply_ep
                  (twice a block: to their experts and back)
    fsdp          parameters, by dim 0    all-gather of the         reduce-scatter of    apply_fsdp
                                          block's parameters        their gradients
                                                                    (and, if freed, the
                                                                    all-gather again)
    dp_replicate  nothing (batch only)    nothing                   all-reduce of the    apply_fsdp
                                                                    gradient shards
    pp            the layers              send of an activation     send of its          pipeline.py
                                                                    gradient

Which slice is mine? tp cuts first, and fsdp cuts what tp has left: of the rows of wq, on fsdp 2 x
tp 2, rank (fsdp f, tp t) holds the f-th half of the t-th half, quarter 2 t + f. So FSDP's
all-gather brings together just what tp left to this rank.

Gradients are sums, not means: the loss is divided by the global number of valid tokens before the
backward pass, so that every reduction here is a plain sum and no mesh needs a factor of its own.
The loss is a sum over tokens, and a rank's gradient is that of its own tokens' share: so gradients
may be summed over all ranks that hold different tokens, over cp as well as over data ranks. What a
key owes to the queries of other cp ranks has come back to it through the reduce-scatter of K and V.

The order in which train.py applies them is pp split -> float8 -> tp -> cp -> ep -> activation
checkpointing -> compile -> fsdp, all on the meta device; then `materialise` gives every rank its
slice of weights that do not depend on the mesh. simulate.py counts what a rank holds and sends.

Letters are model.py's. Shapes are written for cp 1: a cp rank has T/cp tokens where they say T.

Left out: experts split by tp; DistributedDataParallel, which averages and cannot be composed
(dp_replicate with dp_shard 1 is the same thing).

Sources: TorchTitan (arXiv 2410.06511) §2.1, Appendix A, B.1-B.3; FSDP (arXiv 2304.11277);
Megatron-LM (arXiv 1909.08053); sequence parallelism (arXiv 2205.05198); Llama 3 (arXiv
2407.21783) §3.3.2; experts: GShard (arXiv 2006.16668), DeepSeek-V3 (arXiv 2412.19437) §2.1.2.
"""

import itertools
import math
import os
import shutil
import warnings
from collections import Counter
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch.distributed.device_mesh.DeviceMesh._unflatten      axes of the same ranks cut otherwise
#     torch.distributed.device_mesh.DeviceMesh._flatten        one group of two axes
#     torch.distributed._functional_collectives                collectives that autograd knows
#     torch.distributed._functional_collectives._maybe_view_chunk_cat   how a gather is put together
#     torch.distributed.fsdp._fully_shard._fsdp_common         two meshes in one unit of FSDP
#     torch.distributed._symmetric_memory                      and the next: asynchronous tp
#     torch._inductor.config._micro_pipeline_tp
#     torch.distributed.algorithms._checkpoint.checkpoint_wrapper  saves a block's input alone
#     torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper.
#         _checkpoint_wrapped_module                           the block inside
#     torch.ops._c10d_functional                               and the next: what --ac op saves
#     torch.ops.aten._scaled_mm
#     torch.ops.aten._grouped_mm
#     torch.ops.aten._scaled_dot_product_flash_attention
#     torch.ops.aten._scaled_dot_product_efficient_attention
#     torch.ops.aten._scaled_dot_product_cudnn_attention
#     torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# ---- 1. The mesh -------------------------------------------------------------------------------


def nearest_multiples(value, unit):
    """The multiples of `unit` around `value`, for an error: 96 or 104."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def check_mesh(degrees, config, *, model, seq_len, world_size):
    """Raise ValueError if the mesh does not fit the ranks, the model or the sequence.

    Args:    degrees, {axis: degree} outer to inner; model, the flag; world_size, of the job.
    """
    product = math.prod(degrees.values())
    if product != world_size:
        typed = " x ".join(f"--{axis.replace('_', '-')} {n}" for axis, n in degrees.items())
        others = product // degrees["dp_shard"]
        way_out = f"try --dp-shard {world_size // others}"
        if world_size % others:
            way_out = f"start a multiple of {others} ranks, or lower a degree"
        raise ValueError(
            f"{typed} make {product} ranks, but the world size is {world_size}: {way_out}"
        )
    tp, cp = degrees["tp"], degrees["cp"]
    widths = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads}
    if not config.n_experts or config.n_dense_layers:
        widths["ffn_dim"] = config.ffn_dim
    widths["n_shared_experts x expert_dim"] = config.n_shared_experts * config.expert_dim  # or 0
    for name, value in widths.items():
        if value % tp:
            divisors = [str(n) for n in range(1, min(value, world_size) + 1) if value % n == 0]
            raise ValueError(
                f'--tp {tp} must divide {name} {value} (model "{model}"): '
                f"try --tp {' or '.join(divisors)}"
            )
    rows = -(-config.vocab_size // tp)  # of the embedding, on all ranks but the last
    if (tp - 1) * rows >= config.vocab_size:
        raise ValueError(
            f"--tp {tp} leaves the last rank no row of the embedding: the others take {rows} each "
            f"of vocab_size {config.vocab_size}; try --tp 1"
        )
    unit = tp * (2 * cp if cp > 1 else 1)
    if seq_len % unit:
        raise ValueError(
            f"--seq-len {seq_len} must be a multiple of {unit} with --tp {tp} and --cp {cp} (tp, "
            f"times 2 cp if cp > 1): try --seq-len {nearest_multiples(seq_len, unit)}"
        )


def build_mesh(device_type, *, pp, dp_replicate, dp_shard, cp, tp, ep=0):
    """Return {axis: DeviceMesh} for all ranks; axes of degree 1 are there too.

    Axes:    pp, dp_replicate, cp, tp, the joined fsdp, data and shards, and the two-dimensional
             hsdp = (dp_replicate, fsdp). Each is the piece that this rank belongs to. With experts
             (ep > 0) also ep, efsdp, ehsdp and stage: see §4.
    Needs:   an initialised process group of exactly the product of the degrees.
    Source:  paper §2.1 and B.2.
    """
    world_size = pp * dp_replicate * dp_shard * cp * tp
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "fsdp": dp_shard * cp, "tp": tp}
    weights = world._unflatten(0, (*degrees.values(),), (*degrees,))
    tokens = weights._unflatten("fsdp", (dp_shard, cp), ("dp_shard", "cp"))  # the same other groups
    mesh = {axis: weights[axis] for axis in degrees} | {"cp": tokens["cp"]}
    mesh["hsdp"] = weights["dp_replicate", "fsdp"]
    mesh["shards"] = weights["fsdp", "tp"]._flatten("shards")
    mesh["data"] = tokens["dp_replicate", "dp_shard"]._flatten("data")
    if ep:
        degrees = {"pp": pp, "dp_replicate": dp_replicate}
        degrees |= {"efsdp": dp_shard * cp * tp // ep, "ep": ep}
        experts = world._unflatten(0, (*degrees.values(),), (*degrees,))
        mesh |= {"ep": experts["ep"], "efsdp": experts["efsdp"]}
        mesh["ehsdp"] = experts["dp_replicate", "efsdp"]
        mesh["expert_shards"] = experts["efsdp", "ep"]._flatten("expert_shards")
        mesh["stage"] = world._unflatten(0, (pp, world_size // pp), ("pp", "stage"))["stage"]
    return mesh


# ---- 2. Tensor, sequence and loss parallelism --------------------------------------------------
#
# Why one linear is split by columns and the next by rows. Two matrices A and B with an activation f
# between them, as w1 and w2 with silu, or wq wk wv and wo with attention, on two ranks:
#
#     by columns   A = [A0 | A1]           f(x A) = [f(x A0) | f(x A1)]    a slice of it each
#     by rows      B = [B0 over B1]        h B = h0 B0 + h1 B1             a partial sum each
#     both         y = f(x A0) B0 + f(x A1) B1                             nothing sent in between
#
# f works on single elements, or attention on single heads, so each rank's slice of the hidden layer
# goes through it alone, and the partial sums are added once, at the end. Split the other way round,
# x A would be a sum that f needs whole: f(a + b) is not f(a) + f(b), and every pair of linears
# would cost a collective more in either direction.
#
# These formulas have matrices of (in, out). nn.Linear stores its weight as (out, in) and computes
# x W^T: the columns of A are rows of wq's `weight`. torch's ColwiseParallel therefore cuts dim 0 of
# the weight, and RowwiseParallel dim 1.
#
# Sequence parallelism costs nothing on top. The sum at the end would be an all-reduce of (B, T, D),
# which is a reduce-scatter and an all-gather. Between those two a rank has 1/tp of the tokens, and
# norms and the residual stream work token by token: they run there, on (B, T/tp, D), and the
# all-gather waits until the next linear needs all tokens. As many bytes are sent, and activations
# between blocks take 1/tp of the memory.


def look_up(embedding, tokens, *, tp_mesh):
    """(B, T) -> (B, T/tp, D): each rank finds the tokens among its rows, the sum is scattered.

    It is the forward of tok_embeddings under tp, a vocabulary-parallel embedding: tokens are int64
    of the whole vocabulary. The paper's style for it (B.3, RowwiseParallel) gives the same numbers,
    but in the backward pass every rank makes the gradient of all V rows before it takes its own:
    for 405B under a pipeline 8 GiB, kept from the first microbatch to the last.
    """
    rows = embedding.weight.to_local()  # (V/tp, D)
    first = tp_mesh.get_local_rank() * -(-embedding.num_embeddings // tp_mesh.size())
    elsewhere = (tokens < first) | (tokens >= first + rows.shape[0])
    found = nn.functional.embedding((tokens - first).masked_fill(elsewhere, 0), rows)
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # (B, T, D), zero where others have it
    partial_sum = DTensor.from_local(found, tp_mesh, [Partial()], run_check=False)
    return partial_sum.redistribute(placements=[Shard(1)]).to_local()  # reduce-scatter over tp


def apply_tp(
    stage,
    tp_mesh,
    colwise=ColwiseParallel,
    rowwise=RowwiseParallel,
    prepare_input=PrepareModuleInput,
    *,
    loss_parallel,
):
    """Split the stage over the tp axis, in place; float8 brings other styles for these three.

    Before:  full weights on the meta device, identical on every rank.
    After:   wq wk wv w1 w3 output hold 1/tp of their rows, wo w2 1/tp of their columns and
             tok_embeddings 1/tp of the vocabulary. Between blocks the activations are split over
             the sequence: (B, T/tp, D), norms included. Logits are a DTensor (B, T, V/tp) with
             `loss_parallel`, else plain (B, T, V) on every rank.
    Costs:   per block 2 all-gathers and 2 reduce-scatters of (B, T, D) forward, as many backward,
             and 2 all-reduces of norm gradients (D), with qk_norm 2 more of (Dh); 1 all-gather
             before output and 1 reduce-scatter after tok_embeddings, mirrored backward; for the
             loss 3 all-reduces of (B, T), or without `loss_parallel` 1 all-gather of (B, T, V).
    Needs:   tp divides n_heads, n_kv_heads, ffn_dim and T (checked by check_mesh).
    Source:  paper §2.1.3 and B.3.
    """
    plan = {
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    plan = {name: style for name, style in plan.items() if getattr(stage, name) is not None}
    parallelize_module(stage, tp_mesh, plan)
    if (embedding := stage.tok_embeddings) is not None:
        weight = distribute_tensor(embedding.weight, tp_mesh, [Shard(0)], src_data_rank=None)
        embedding.weight = nn.Parameter(weight)
        embedding.forward = partial(look_up, embedding, tp_mesh=tp_mesh)
    for block in stage.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),  # (B, T/tp, D), as is the residual stream
            "attention": prepare_input(  # (B, T/tp, D) -> (B, T, D)  all-gather over tp
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": colwise(),  # (B, T, D) -> (B, T, H/tp * Dh)
            "attention.wk": colwise(),
            "attention.wv": colwise(),
            "attention.wo": rowwise(output_layouts=Shard(1)),  # -> (B, T/tp, D)  reduce-scatter
            "ffn_norm": SequenceParallel(),
        }
        dense = "feed_forward"
        if block.moe is not None:  # its experts are not split: each rank sends its own tokens there
            dense = "moe.shared_expert"
            plan["ffn_norm"] = plan["moe.router"] = SequenceParallel(use_local_output=True)
        if block.moe is None or block.moe.shared_expert is not None:
            plan |= {
                dense: prepare_input(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                f"{dense}.w1": colwise(),  # (B, T, D) -> (B, T, F/tp)
                f"{dense}.w3": colwise(),
                f"{dense}.w2": rowwise(output_layouts=Shard(1)),
            }
        if stage.config.qk_norm:  # (B, T, H/tp, Dh): a rank has some of the heads
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
        parallelize_module(block, tp_mesh, plan)
    stage.tie_embeddings()  # parallelize_module gave each its own DTensor
    left = [(n, w) for n, w in stage.named_parameters() if ".experts." not in n]  # are apply_ep's
    whole = [name for name, weight in left if not isinstance(weight, DTensor)]
    assert not whole, f"apply_tp's plan has no style for {', '.join(whole)}: a new module needs one"


# ---- 3. Context parallelism --------------------------------------------------------------------

all_gather = getattr(funcol, "all_gather_single_autograd", None)  # its name since torch 2.13
all_gather = all_gather or funcol.all_gather_tensor_autograd


def cp_positions(seq_len, *, cp, cp_rank):
    """Global positions of the tokens this cp rank holds: int64 (T/cp,).

    The sequence is cut into 2 cp chunks, and rank r takes the chunks r and 2cp-1-r (head-tail, or
    zigzag). Under causal attention a query multiplies with all keys before it, so a chunk near the
    end costs more than one near the beginning; one of each costs every rank the same.
    """
    if cp == 1:
        return torch.arange(seq_len)
    chunks = torch.arange(seq_len).chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]])


def check_cp(*, cp, param_dtype, is_grouped, device_type):
    """Raise ValueError if torch would write out the mask of every pair of tokens, or fail."""
    if cp > 1 and param_dtype != "bf16" and is_grouped and device_type == "cuda":
        raise ValueError(
            f"--param-dtype {param_dtype} conflicts with --cp {cp} where heads share keys and "
            "values: of CUDA's kernels that need no mask only FlashAttention takes groups of "
            "heads, and only in bf16; try --param-dtype bf16"
        )


def enable_flash_attention_3():
    """Let cp's attention take FlashAttention 3 on an H100 where it is installed; whether it does.

    A causal mask of a prefix goes to FlashAttention, which in torch is version 2, while attention
    without cp takes cuDNN's kernel there.
    """
    is_h100 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if is_taken := is_h100 and find_spec("flash_attn_interface") is not None:
        nn.attention.activate_flash_attention_impl("FA3")
    return is_taken


def lower_right(n_queries, n_keys):
    """The causal mask of the last `n_queries` positions among `n_keys`: a note to the kernel.

    It is told its lengths after it is made, because it is a tensor to which torch gives memory by
    its arguments, 8 n_queries n_keys bytes that nothing reads: 32 GiB at 262,144 tokens on 8 ranks.
    """
    bias = causal_lower_right(1, 1)
    bias.seq_len_q, bias.seq_len_kv = n_queries, n_keys
    return bias


class ContextParallelAttention(nn.Module):
    """Causal attention where every rank holds two chunks of the queries, keys and values.

    Keys and values of all ranks are gathered (with GQA they are small: K heads, not H), each query
    chunk attends to its own prefix, and the backward pass scatters the sums of their gradients.

    Shapes:  q (B, H, T/cp, Dh), k and v (B, K, T/cp, Dh) -> (B, H, T/cp, Dh)
    Costs:   1 all-gather forward, 1 reduce-scatter backward of 2 B K T Dh elements.
    Source:  Llama 3 (arXiv 2407.21783) §3.3.2, which trains its long contexts this way.
    """

    def __init__(self, cp_mesh, seq_len):
        super().__init__()
        self.cp_mesh = cp_mesh
        chunk, cp, rank = seq_len // (2 * cp_mesh.size()), cp_mesh.size(), cp_mesh.get_local_rank()
        self.prefixes = [(rank + 1) * chunk, (2 * cp - rank) * chunk]  # keys that a chunk may see
        # made here because they cannot be constructed inside a compiled region
        self.causal = [lower_right(chunk, prefix) for prefix in self.prefixes]

    def forward(self, q, k, v):
        kv = torch.stack([k, v])  # (2, B, K, T/cp, Dh)
        # kv -> (2 cp, B, K, T/cp, Dh)  all-gather over cp; backward: reduce-scatter
        kv = all_gather(kv, gather_dim=0, group=(self.cp_mesh, 0))
        heads, tails = kv.unflatten(0, (-1, 2)).chunk(2, dim=-2)  # (cp, 2, B, K, T/2cp, Dh) each
        k, v = torch.cat([*heads, *reversed(tails.unbind(0))], dim=-2)  # (B, K, T, Dh), in order
        is_grouped = q.shape[1] != k.shape[1]
        outputs = [
            nn.functional.scaled_dot_product_attention(
                chunk, k[:, :, :n], v[:, :, :n], attn_mask=causal, enable_gqa=is_grouped
            )
            for chunk, n, causal in zip(q.chunk(2, dim=-2), self.prefixes, self.causal, strict=True)
        ]
        return torch.cat(outputs, dim=-2)


def apply_cp(stage, cp_mesh):
    """Let every block's attention see the whole sequence while it holds 1/cp of it, in place.

    Needs:   inputs, labels and RoPE rows in the order of `cp_positions`; 2 cp divides T.
    """
    for block in stage.layers.values():
        block.attention.core = ContextParallelAttention(cp_mesh, stage.seq_len)


# ---- 4. Expert parallelism ---------------------------------------------------------------------
#
# Experts are never split by tp. For them tp ranks are data ranks: sequence parallelism has given
# each its own tokens already. ep takes no ranks of its own either; it borrows those of a stage's
# replica, dp_shard x cp x tp, innermost first, and what is left of them shards the experts as fsdp
# shards all other weights. 8 ranks as dp_shard 4 x tp 2, with 8 experts:
#
#     --ep 1   efsdp 8   all ranks   keep an expert each, and FSDP gathers all 8 for a block
#     --ep 4   efsdp 2   0 1 2 3     compute experts 01 23 45 67; FSDP keeps the first of each two
#                        4 5 6 7     as well, and keeps the second
#     --ep 8   efsdp 1   all ranks   keep and compute an expert each, and FSDP gathers none
#
#     ep             where rows go to their experts and come back
#     efsdp          dp_shard cp tp / ep: the fsdp axis of experts
#     ehsdp          dp_replicate x efsdp, where there are replicas
#     expert_shards  efsdp x ep, found by DTensor for the norm, as `shards` is
#     stage          all ranks that hold the same layers: they sum what they counted
#
# A loss is a sum over tokens, and an expert's gradient on a rank is that of the tokens it was sent.
# So here too all reductions are plain sums, and no mesh needs a factor.


def check_ep(ep, config, degrees, *, param_dtype, is_compiled):
    """Raise ValueError if experts cannot be placed on the mesh.

    Args:    degrees, {axis: degree}; param_dtype, the flag; is_compiled, by --compile or by a
             simulation, which traces grouped_mm by the same rules.
    """
    if not config.n_experts:
        if ep > 1:
            raise ValueError(
                f"--ep {ep} conflicts with a model without experts (n_experts 0): try --model "
                "debug-moe, or leave --ep out"
            )
        return
    n_ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    fitting = [str(n) for n in range(1, n_ranks + 1) if n_ranks % n == config.n_experts % n == 0]
    for what, value in {"n_experts": config.n_experts, "--dp-shard x --cp x --tp": n_ranks}.items():
        if value % ep:
            raise ValueError(
                f"--ep {ep} must divide {what} = {value}: every rank holds as many experts, and "
                f"the axis borrows its ranks there; try --ep {' or '.join(fitting)}"
            )
    efsdp = n_ranks // ep
    for name in ("dim", "expert_dim"):
        value = getattr(config, name)
        if value % 8 and param_dtype != "fp64":
            raise ValueError(
                f"--set {name}={value} conflicts with experts in --param-dtype {param_dtype}: "
                "grouped matmuls want rows of 16 bytes or a multiple; try "
                f"{name}={nearest_multiples(value, 8)}"
            )
        if config.n_experts // ep % efsdp and value % efsdp:
            raise ValueError(
                f"--ep {ep} leaves {efsdp} ranks (--dp-shard x --cp x --tp / --ep) to shard "
                f"{config.n_experts // ep} experts each, of {name} {value}: they must divide the "
                f"experts or both dim and expert_dim; try --ep {fitting[-1]}"
            )
    if is_compiled and param_dtype != "bf16":
        raise ValueError(
            f"--compile, and a simulation, conflict with experts in --param-dtype {param_dtype}: "
            "torch knows the shape of a grouped matmul in bf16 alone; add --param-dtype bf16"
        )


def read_lengths(sent, received):
    """Rows for each rank and from each rank, as lists: the one time a step waits for the GPU.

    Both int64 (ep,), copied together. A rank cannot know otherwise how much memory to hold ready.
    """
    return torch.stack([sent, received]).tolist()


def exchange(experts, rows, counts, *, ep_mesh):
    """Rows to the ranks that hold their experts, through them, and back: `moe.experts` under ep.

    On ep 2 with experts 01 | 23, a row named after its expert:

        held, sorted by expert     0 1 1 2 | 0 2 3 3
        all-to-all                 0 1 1 0 | 2 2 3 3       rank 0's, then rank 1's
        sorted by expert again     0 0 1 1 | 2 2 3 3

    Shapes:  rows (R, D) sorted by expert, counts (E,) -> (R, D); R differs from rank to rank.
    """
    group, ep = (ep_mesh, 0), ep_mesh.size()
    counts = counts.view(ep, -1)  # (ep, E/ep): for each expert of each rank
    theirs = funcol.all_to_all_single(counts, None, None, group)  # of each rank for my experts
    sent, received = read_lengths(counts.sum(1), theirs.sum(1))
    rows = funcol.all_to_all_single_autograd(rows, received, sent, group)
    number = torch.arange(counts.shape[1], device=counts.device).repeat(ep)
    number = number.repeat_interleave(theirs.flatten(), output_size=sum(received))
    order = number.argsort(stable=True)
    weights = (weight.to_local() for weight in (experts.w1, experts.w2, experts.w3))
    rows = experts.compute(rows[order], theirs.sum(0), *weights)
    rows = torch.empty_like(rows).index_copy(0, order, rows)
    return funcol.all_to_all_single_autograd(rows, sent, received, group)


def apply_ep(stage, ep_mesh):
    """Give each rank of ep its own E/ep experts of every block, in place.

    Before:  experts whole on the meta device, E of them.
    After:   DTensors split over ep by their dim 0, and `exchange` as the forward.
    Costs:   per block 3 all-to-alls forward (k rows of D a token, there and back, and E counts) and
             2 backward; the host waits once for the counts.
    Needs:   ep divides n_experts and dp_shard x cp x tp (checked by check_ep).
    """
    for block in stage.layers.values():
        if block.moe is not None:
            experts = block.moe.experts
            for name, weight in list(experts.named_parameters()):
                split = distribute_tensor(weight, ep_mesh, [Shard(0)], src_data_rank=None)
                setattr(experts, name, nn.Parameter(split))
            experts.forward = partial(exchange, experts, ep_mesh=ep_mesh)


@torch.no_grad()
def balance(stages, mesh, *, balance_speed):
    """Move each router's bias against its load, and start counting afresh; once a step.

    Returns: the largest load of an expert over the mean of its block's, the same on all ranks.
    Costs:   1 all-reduce of E numbers for each block; under pp one number more.
    Note:    the direction is found in integers, and the loads are summed over all ranks of a stage,
             so that every rank moves every bias alike.
    Source:  arXiv 2408.15664; DeepSeek-V3 (arXiv 2412.19437) §2.1.2.
    """
    blocks = [block.moe for stage in stages for block in stage.layers.values()]
    moes = [moe for moe in blocks if moe is not None]
    worst = torch.zeros((), dtype=torch.float32, device=mesh["pp"].device_type)
    if moes:
        loads = torch.stack([moe.load for moe in moes])  # (blocks with experts, E)
        dist.all_reduce(loads, group=mesh["stage"].get_group())
        totals, n_experts = loads.sum(1, keepdim=True), loads.shape[1]
        worst = (loads * n_experts / totals).max().float()
        for moe, direction in zip(moes, (loads * n_experts - totals).sign(), strict=True):
            moe.bias -= balance_speed * direction
            moe.load.zero_()
    if mesh["pp"].size() > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh["pp"].get_group())
    return worst


# ---- 5. Activation checkpointing ---------------------------------------------------------------

# A checkpointed block forgets what its forward pass computed, and computes it again in the backward
# pass. Selective activation checkpointing (SAC, `--ac op`) saves the results worth their memory.

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
# of a plain linear, of a float8 one, of experts; a router's product is none of them
MATMULS = {aten.mm.default, aten._scaled_mm.default, aten._grouped_mm.default}
SAVED_OPS = {  # slow to compute
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.max.default,  # amax, for a float8 scale: a pass over a whole tensor for one number
    aten.topk.default,  # a choice of experts is made once
    c10d.all_to_all_single.default,
}


def selective_contexts():
    """Contexts for one checkpointed block: what its forward saves and its backward computes again.

    Of the matmuls wq wk wv wo w1 w3 w2, counted in the order of execution, every second one is
    saved: wq, wv and w1. The last needs neither: what is added to the residual stream is read by no
    backward. So with the reduce-scatters of tp, at the end of wo and of w2: the first is saved. The
    counts start afresh in each block and pass.
    """
    counts = {False: Counter(), True: Counter()}  # in the forward pass, in the recomputation

    def policy(context, op, *args, **kwargs):
        kind = "matmul" if op in MATMULS else op
        counts[context.is_recompute][kind] += 1
        nth = counts[context.is_recompute][kind]
        is_saved = op in SAVED_OPS or (kind == "matmul" and nth in (1, 3, 5))
        is_saved |= op is c10d.reduce_scatter_tensor.default and nth == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_ac(stage, ac):
    """Trade memory for recomputation, block by block, in place.

    Modes:   full  a block saves only its input (B, T, D) and runs again in the backward pass: 6 of
                   its 7 matmuls, as the last one's output is not needed (7 with float8, which saves
                   more for its backward)
             op    a block saves some expensive results and recomputes the rest: norms, RoPE, silu
                   and 3 matmuls (4 with float8 unless compiled; `selective_contexts`)
             "N"   `full` for every Nth block, counted by the block's number in the whole model
    Saves:   bytes per token and block in bf16, 8B's shape, counted on CPU: none 225,416, op 55,424
             = 2 (3 D + K Dh + F) + 4 H, full 8,192 = 2 D.
    Costs:   collectives are recomputed as well: under tp 2 all-gathers a block, with `full` also 1
             reduce-scatter; under cp the all-gather of K and V.
    Note:    gradients are the same bit for bit, where the kernels are deterministic. A block draws
             no random numbers, so the generators' states need not be kept.
    Source:  paper §2.2.1 and B.5; arXiv 1604.06174; selectively: arXiv 2205.05198.
    """
    for number, block in list(stage.layers.items()):
        if ac == "op":
            stage.layers[number] = checkpoint_wrapper(
                block, context_fn=selective_contexts, preserve_rng_state=False
            )
        elif ac == "full" or (int(number) + 1) % int(ac) == 0:
            stage.layers[number] = checkpoint_wrapper(block, preserve_rng_state=False)


def inner_block(block):
    """The block of model.py inside a wrapper of apply_ac, or the block itself."""
    return block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block


# ---- 6. Regional compile and asynchronous tensor parallelism -----------------------------------


def check_compile(device_type):
    """Raise ValueError if there is no C++ compiler, which the code for a CPU needs."""
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    if device_type == "cpu" and not any(map(shutil.which, names)):
        raise ValueError(
            f"--compile conflicts with this host, where none of {', '.join(names)} is found: code "
            "for a CPU goes through a C++ compiler; install one, or leave --compile out"
        )


def apply_compile(stage, *, ac="none", backend="inductor"):
    """Compile each block on its own, in place: one graph, reused by all blocks of the same shape.

    A graph must be whole (a break is an error), and what happens between blocks, such as FSDP's
    gathering, stays outside of it. With `ac` "op" the checkpoint is part of the graph, since the
    compiler must know what to save; otherwise it stays outside and runs the compiled block twice
    (torch 2.13 cannot compile a full checkpoint under tp: it would save a DeviceMesh).

    Source:  paper §2.2.2.
    """
    for block in stage.layers.values():
        region = block if ac == "op" else inner_block(block)
        region.compile(backend=backend, fullgraph=True)


def check_async_tp(*, tp, compile, device_type):
    """Raise ValueError for what asynchronous tensor parallelism cannot do without."""
    for is_met, has, needs in (
        (compile, "no --compile", "the compiler does the overlapping; add --compile"),
        (tp > 1, f"--tp {tp}", "it overlaps the collectives of tp; try --tp 2"),
        (device_type == "cuda", "no CUDA device", "its kernels are CUDA's; leave it out"),
    ):
        if not is_met:
            raise ValueError(f"--async-tp conflicts with {has}: {needs}")


def enable_async_tp(tp_mesh):
    """Let the compiler cut the matmuls next to tp's collectives into pieces and overlap the two.

    An all-gather with the matmuls that read it becomes fused_all_gather_matmul, a matmul with the
    reduce-scatter of its result fused_matmul_reduce_scatter; both move data through symmetric
    memory, which the GPUs of one host map into each other's address space. Which of a block's 4
    collectives each way the compiler of torch 2.13 fuses:

                                    forward                     backward
        bf16, float8 tensorwise     all                         the 2 all-gathers
        other recipes of float8     the 2 reduce-scatters       none

    The reduce-scatters of a backward are of a sum of matmuls (wq wk wv, or w1 w3), which it does
    not know. Recipes other than tensorwise quantise what was gathered, and only that is multiplied.
    With tensorwise, --float8-all-gather saves 7 all-reduces of a weight's scale a block over tp.

    Needs:   compiled blocks, CUDA with NVLink between all tp ranks, tp > 1.
    Source:  paper §2.2.3 and B.6.
    """
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True
    # one sequence's gather is a view of what arrives, which the compiler's pass does not know: let
    # it be put together from pieces as several are, though that copies where nothing is fused
    funcol._maybe_view_chunk_cat = lambda arrived, n, dim: torch.cat(arrived.chunk(n), dim=dim)
    with warnings.catch_warnings():
        # called deprecated and needless, but without it the compiler's pass returns at once
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)


# ---- 7. Fully sharded data parallelism ---------------------------------------------------------


def expert_placement(stage, mesh):
    """For fully_shard: where the experts of a stage are sharded, a parameter at a time.

    By dim 0, whole experts, where their number allows it, else by dim 1, a piece of each.
    """
    moes = [block.moe for block in stage.layers.values() if block.moe is not None]
    mine = {id(parameter) for moe in moes for parameter in moe.experts.parameters()}
    n_ranks, ep = mesh["efsdp"].size(), mesh["ep"].size()
    if mesh["dp_replicate"].size() > 1:
        where = HSDPMeshInfo(mesh["ehsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        where = FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    is_same_group = mesh["efsdp"].get_group() == mesh["fsdp"].get_group()

    def place(parameter):
        if id(parameter) not in mine:
            return None
        split = Shard(0 if parameter.shape[0] // ep % n_ranks == 0 else 1)
        # torch wants one object for one group, and has made that of the other weights itself
        return split if is_same_group else ShardPlacementResult(split, where)

    return place


def apply_fsdp(stage, mesh, *, param_dtype, reduce_dtype, reshard, cpu_offload):
    """Shard parameters, gradients and optimizer states over the fsdp axis, in place.

    Before:  parameters on the meta device, full or split over tp.
    After:   every parameter is a DTensor sharded by its dim 0 over fsdp (dp_shard x cp) and
             replicated over dp_replicate (HSDP). It is gathered in `param_dtype` just before its
             unit runs, and its gradient is summed in `reduce_dtype`; master weights stay float32.
             Experts are sharded over efsdp instead (`expert_placement`), in the same unit.
             A stage with nothing to shard, to sum or to cast is left alone: FSDP would copy every
             parameter once a step, and every gradient twice.
    Units:   tok_embeddings | each block | norm with output. Tied embeddings: blocks | the rest.
    Freed:   by `reshard`. `always` frees a unit's gathered weights when its forward ends and
             gathers them again for its backward; `never` keeps them from forward to backward;
             `default` frees blocks, but not norm with output, whose backward comes first, and
             nothing under a pipeline, where every microbatch would gather again. After its
             backward a unit is always freed: under a pipeline after that of the last microbatch,
             when its gradients, added up until then, are reduced once.
    Hidden:  on a GPU gathers, reductions and the computation have streams of their own. While a
             block runs, the next one's weights are being gathered (prefetch), in the backward pass
             those of the block before it, and the gradients of the one just done are being reduced.
             So two blocks are whole at a time, and communication shows only where a block computes
             for less time than a gather takes.
    Costs:   per unit 1 all-gather (2 if resharded) and 1 reduce-scatter, and with dp_replicate > 1
             an all-reduce of the shard; at degree 1 only the casts, and copies.
    Source:  paper §2.1.2, §2.2.4, B.1, B.2 and B.7.
    """
    # what tp has split, and weights that float8 gathers, have types of their own
    is_plain = all(
        type(p) is nn.Parameter and p.dtype == param_dtype == reduce_dtype
        for p in stage.parameters()
    )
    if is_plain and mesh["hsdp"].size() == 1 and not cpu_offload:
        return
    # the outputs of tp are views of DTensors, which is wrong only for who changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    is_hsdp = mesh["dp_replicate"].size() > 1
    options = {
        "mesh": mesh["hsdp"] if is_hsdp else mesh["fsdp"],
        # inputs are not cast: activations arrive in param_dtype, and the RoPE table that travels
        # with them must stay float32 (bf16 cannot tell position 1,000 from 1,001)
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": OffloadPolicy(),
    }
    if cpu_offload:
        pin_memory = mesh["fsdp"].device_type == "cuda"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
    if stage.config.n_experts:
        options["shard_placement_fn"] = expert_placement(stage, mesh)
    free_blocks = reshard == "always" or (reshard == "default" and mesh["pp"].size() == 1)
    ends = [stage.norm, stage.output]
    if stage.config.tied_embeddings:  # one weight cannot live in two units
        ends.insert(0, stage.tok_embeddings)
    elif stage.tok_embeddings is not None:
        fully_shard(stage.tok_embeddings, reshard_after_forward=free_blocks, **options)
    for block in stage.layers.values():
        fully_shard(block, reshard_after_forward=free_blocks, **options)
    if "ep" in mesh and mesh["ep"].size() > 1:
        # the host waits inside every block with experts (§4): until then the next gather is begun
        for block, following in itertools.pairwise(stage.layers.values()):
            block.set_modules_to_forward_prefetch([following])
    if stage.norm is not None:
        fully_shard(ends, reshard_after_forward=reshard == "always", **options)
    fully_shard(stage, **options)  # the root: no parameters of its own, it drives the others
    n_summed = mesh["dp_replicate"].size() * mesh["fsdp"].size()
    if stage.config.n_experts:
        n_summed *= mesh["efsdp"].size()  # with tp and dp_shard 1 greater than fsdp
    if n_summed == 1:
        return
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)  # by SUM, which gloo has too


# ---- 8. Weights --------------------------------------------------------------------------------


def local_tensor(tensor):
    """The part of a DTensor that this rank holds, same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor):
    """All of a DTensor, gathered from the ranks that hold it (all must call), or reduced."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_weights(stage):
    """(name, parameter) pairs under the names of model.py, whatever wraps its blocks."""
    for name, parameter in stage.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def named_biases(stage):
    """(name, bias) pairs of the routers: saved like weights, the same on all ranks of the stage."""
    for name, buffer in stage.named_buffers():
        if name.endswith("moe.bias"):
            yield name.replace("_checkpoint_wrapped_module.", ""), buffer


def held_range(tensor, dim):
    """Which indices of `dim` this rank holds of an evenly split DTensor: a range."""
    held = range(tensor.shape[dim])
    axes = list(enumerate(tensor.placements)) if isinstance(tensor, DTensor) else []
    for axis, placement in reversed(axes):  # the innermost axis has cut first
        if not placement.is_replicate() and placement.dim == dim:
            n = len(held) // tensor.device_mesh.size(axis)
            first = n * tensor.device_mesh.get_local_rank(axis)
            held = held[first : first + n]
    return held


def draw_experts(name, parameter, draw):
    """Fill this rank's part of (E, out, in), expert by expert: it draws those that it holds."""
    rows = held_range(parameter, 1)
    for number, part in zip(held_range(parameter, 0), local_tensor(parameter), strict=True):
        part.copy_(draw(f"{name}.{number}", parameter.shape[1:])[rows.start : rows.stop])


@torch.no_grad()
def materialise(stage, *, device, weight_device, draw, positions):
    """Give a meta-device model its memory and initial values, in place.

    Args:    device, where it computes; weight_device, where its shards live (cpu under offload);
             draw(name, shape) -> full tensor, the same on every rank that calls it;
             positions, the global positions of this rank's tokens (for the RoPE table).
    Note:    every rank draws each parameter whole and keeps its slice: no communication, one full
             tensor at a time in memory, and the same values on every mesh. DTensor's own random
             operators do not keep that promise on CPU.
    Source:  paper §2.1.1.
    """
    stage.to_empty(device=weight_device)
    stage.tie_embeddings()
    for module in stage.modules():  # buffers: counts and biases of experts are zero
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
    for name, parameter in named_weights(stage):
        if ".experts." in name:
            draw_experts(name, parameter, draw)
            continue
        full = draw(name, parameter.shape)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full = distribute_tensor(full, mesh, placements, src_data_rank=None)
        local_tensor(parameter).copy_(local_tensor(full))
    stage.init_rope(positions.to(device))


# ---- 9. Gradient clipping ----------------------------------------------------------------------


def clip_grad_norm(parameters, max_norm, mesh):
    """Scale all gradients so that their global L2 norm is at most `max_norm`, in place.

    Returns: the norm before clipping, a 0-d tensor; no host sync.
    Note:    the norm of a DTensor reduces over the axes it is sharded on, and only over those, so a
             norm weight replicated over tp counts once. Stages hold different parameters: their
             squares are added over pp. Every rank multiplies by the same factor. Experts live on
             another mesh, and no operation takes tensors of two: each mesh has its own norm first.
    Source:  the global norm of "On the difficulty of training RNNs" (arXiv 1211.5063).
    """
    on_mesh = {}
    for p in parameters:
        if p.grad is not None:
            on_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    norms = [
        whole_tensor(nn.utils.get_total_norm([p.grad for p in some], foreach=True))
        for some in on_mesh.values()
    ]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
    if mesh["pp"].size() > 1:
        squares = norm.square()
        dist.all_reduce(squares, group=mesh["pp"].get_group())
        norm = squares.sqrt()
    if mesh["dp_replicate"].size() > 1:
        # replicas have summed the same numbers, maybe in another order: one bit of difference in
        # the factor would let their weights drift apart
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh["dp_replicate"].get_group())
    for some in on_mesh.values():
        nn.utils.clip_grads_with_norm_(some, max_norm, norm, foreach=True)
    return norm


# ---- 10. The loss ------------------------------------------------------------------------------


def cross_entropy(logits, labels, n_valid_tokens):
    """Sum of -log p(label) over the labels that are not -100, divided by `n_valid_tokens`.

    Shapes:  logits (B, T, V), or a DTensor split over V (loss parallel); labels (B, T) -> scalar.
    Costs:   under loss parallelism each rank has V/tp of the logits of every token, and a softmax
             needs three numbers of all V: their maximum, the sum of the exponentials, and the
             label's own logit. Each is an all-reduce of (B, T) over tp, for (B, T, V) gathered.
    Note:    the softmax is computed in at least float32; the copy of bf16 logits this takes is the
             largest tensor of a step. Compiled, it is never made.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss_sum = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(0, 1), reduction="sum", ignore_index=-100
    )
    # under loss parallelism the sum is a DTensor, but the same on every tp rank: nothing is sent
    return whole_tensor(loss_sum) / n_valid_tokens


def check_loss_chunks(loss_chunks, *, seq_len, cp, tp):
    """Raise ValueError if the tokens that a rank holds cannot be cut into so many pieces."""
    local_len = seq_len // (cp * tp)
    if local_len % loss_chunks:
        raise ValueError(
            f"--loss-chunks {loss_chunks} must divide the {local_len} tokens of a sequence that a "
            f"rank holds (--seq-len {seq_len} / --cp {cp} / --tp {tp}): try "
            f"--loss-chunks {math.gcd(local_len, loss_chunks)}"
        )


def build_loss(last_stage, loss_chunks, tp, *, compile=False, backend="inductor"):
    """Return loss_fn(output, labels, n_valid_tokens), the one callable of every path.

    With `compile` cross_entropy is one graph: it saves bf16 logits and two numbers a token, where
    eager saves float32 logits. Of loss_chunks it is each piece's, behind the eager head. Not for
    loss parallelism, whose logits are a DTensor with a softmax of its own.

    With loss_chunks > 1 the model stops at norm, and the loss calls the head on one piece of the
    sequence after the other under checkpointing: the logits of one piece exist at a time, in the
    backward pass too. At 8B, 8,192 tokens and 2 sequences the whole logits, their float32 copy and
    its gradient are 8 + 2 bytes for each of 2.1e9 elements, 20 GiB.

    Under tp every rank hands the head its next piece, and the head gathers them. Of 8 tokens on
    tp 2, in 2 chunks:

        held by tp ranks    0 1 2 3 | 4 5 6 7
        first piece         0 1     | 4 5           labels 0 1 4 5
        second piece            2 3 |     6 7       labels 2 3 6 7

    Shapes:  output is (B, T, V) logits, or with chunks (B, T/tp, D).
    Costs:   the head's forward runs a second time, in the backward pass, with its collectives.
    """
    sum_up = cross_entropy
    if compile:
        sum_up = torch.compile(cross_entropy, backend=backend, fullgraph=True)
    if loss_chunks == 1 or last_stage.output is None:
        return sum_up
    last_stage.stops_at_norm = True

    def piece_loss(hidden, labels, n_valid_tokens):
        return sum_up(last_stage.output(hidden), labels, n_valid_tokens)

    def chunked_loss(hidden, labels, n_valid_tokens):
        pieces = local_tensor(hidden).chunk(loss_chunks, dim=1)  # (B, T/tp/n, D) each
        labels = labels.unflatten(1, (tp, loss_chunks, -1))  # (B, T) -> (B, tp, n, T/tp/n)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        losses = [
            checkpoint(piece_loss, piece, labels[:, :, i].flatten(1), n_valid_tokens, **options)
            for i, piece in enumerate(pieces)
        ]
        return torch.stack(losses).sum()

    return chunked_loss

"""What any rank of any mesh would hold, compute and send in one step, counted on one process.

    python simulate.py @recipes/llama3_405b.args --world-size 512
    python simulate.py @recipes/llama3_8b.args --world-size 8 --ranks 3 --gpu-memory-gib 40

All other flags are train.py's. Its own `build`, `start` and `train_step` run here, over two things
that pretend:

    a fake process group    any rank of any world size; its collectives return at once
    fake tensors            a shape, a dtype and a storage of some size, but no memory

so that model, parallelisms, schedule and step are those of a real run, and 405B on 512 GPUs takes a
laptop less than a minute. An `Account` (a tracker, as such modes are called) sees every operation:

    counted          how                                                            in units of
    live memory      storages made, resized and released, by kind; the highest sum  bytes
    reserved memory  the same events, replayed by CUDA's caching allocator (§2)     bytes
    FLOPs            of matmuls and attention, by module and pass                   2 a multiply-add
    traffic          every collective, by axis: what a rank of a ring sends         bytes
    a pipeline       its time line, with stages that cost what their FLOPs say      a share

It goes into OUT/simulation.json, OUT/timeline.svg and, shorter, to the console.

Left out: time; what kernels and NCCL take for themselves; fusion by compile. --compile and
--async-tp have no effect, mxfp8 is emulated for want of its kernels, CPU offload changes nothing,
since host and device are one here, and all experts get as many rows.

Nothing imports this file but tests: it is a client of the trainer.

Source: FakeTensorMode and the fake process group are torch's own; FLOPs as MFU counts them, PaLM
(arXiv 2204.02311) Appendix B.
"""

import argparse
import bisect
import dataclasses
import gc
import io
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

import checkpoint
import model
import parallel
import pipeline
import train
import watch

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch._subclasses                                     fake tensors
#     torch.testing._internal.distributed.fake_pg           the fake process group
#     torch.utils._python_dispatch                          sees every operation,
#     torch.utils._pytree                                   the tensors in its arguments,
#     torch.ops.aten.mm.default._schema                     and their names
#     torch.distributed.distributed_c10d._resolve_process_group    the group behind a name
#     torch._C._current_graph_task_id                       whether a backward pass is going on
#     torch.distributed.tensor._sharding_prop.ShardingPropagator._fake_mode_lock    see __enter__
#     torch.nn.attention.bias.CausalBias._materialize       the mask that a CPU kernel wants
#     torch.distributed.pipelining._utils.InferenceMode     and the next: see skip_warmup
#     torch.distributed.pipelining.PipelineStage._inference_mode
#     torch.distributed.pipelining.schedules.PipelineScheduleSingle._warmup_p2p
#     torch.ops.aten._grouped_mm                            the matmuls of experts
#     torch.ops.aten._scaled_dot_product_flash_attention_for_cpu    attention as it runs here
#     torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# ---- 1. The account ----------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
COLLECTIVES = {  # of torch.distributed and, as DTensor calls them, functional
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "send": "send", "recv_": "recv", "all_to_all_single": "all_to_all",
}  # fmt: skip
PLAIN = {torch.Tensor, nn.Parameter, FakeTensor}


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def named_units(stage):
    """(name, module) of what a stage holds: tok_embeddings, blocks, norm, output, in this order."""
    blocks = [(f"layers.{number}", block) for number, block in stage.layers.items()]
    units = [("tok_embeddings", stage.tok_embeddings), *blocks]
    units += [("norm", stage.norm), ("output", stage.output)]
    return [(name, module) for name, module in units if module is not None]


def count_bytes(tensors):
    """Bytes of memory that the tensors take on this rank."""
    return sum(plain.nbytes for tensor in tensors for plain in checkpoint.plain_tensors(tensor))


def count_flops(op, args, kwargs, result):
    """FLOPs of a matmul or of attention, else 0.

    As in model.py:flops_per_token, attention counts all keys that the kernel is given (under cp a
    chunk is given its prefix only, (2 cp + 1) / 4 cp of them on average), and its backward counts
    as two forwards, although kernels compute the scores once more.
    """
    packet, aten = op.overloadpacket, torch.ops.aten
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2 * sdpa_flop_count(*(tensor.shape for tensor in args[1:4]))
    if packet is aten._grouped_mm:  # (R, in) times (E, in, out), or rows of both times each other
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=result) if formula else 0


class Account(TorchDispatchMode):
    """What this rank holds, computes and sends in one training step, counted op by op.

    A context for that step. It sees what comes out of autograd and DTensor, on real tensors and on
    fake ones alike:

        events        (storage number, bytes more or less, moment, stream), a row for each time that
                      memory is taken or given back
        kinds         one of KINDS for each storage number
        flops         {module: {forward, recomputed or backward: FLOPs}}
        state_bytes   {parameters, gradients, optimizer: bytes}, what lives from step to step
        collectives   {axis: {kind: {calls, bytes, sent_bytes}}}: bytes of the larger one of
                      input and output, and what a rank of a ring sends of it

    A moment is (phase, module, op). Of the kinds, "gathered" are FSDP's buffers: whole weights, and
    gradients on their way to be scattered; "activations" all that a forward pass makes, again or
    for the first time, such as the loss's float32 logits; "gradients" what outlives the backward
    pass that made it, including what goes to another stage, or from the first half of a split
    backward to the second; "temporary" what a backward pass makes and does not keep.

    Args:    a job whose optimizer has made its states.
    """

    def __init__(self, job):
        super().__init__()
        # where several axes span all ranks, and so share a group, the later name counts
        axes = ("stage", "efsdp", "ep", "data", "cp", "tp", "dp_replicate", "fsdp", "pp")
        axes = [axis for axis in axes if axis in job.mesh]
        self.axes = {job.mesh[axis].get_group().group_name: axis for axis in axes}
        self.events, self.kinds, self.sizes = [], [], []
        self.streams = {torch.cpu.current_stream(): 0}  # FSDP enters its streams on a CPU as well
        self.numbers = WeakIdKeyDictionary()  # storage -> its number
        self.young = []  # storages made in a backward pass that is still going on
        self.flops, self.collectives, self.state_bytes = {}, {}, {}
        self.place, self.depth, self.phase, self.is_open = "before", 0, "forward", True
        parameters, optimizer = job.parameters, job.optimizer
        self.hold("parameters", parameters)
        self.hold("optimizer", tensors_in([optimizer.state[p] for p in parameters]))

        def begin_update(*_):
            self.place, self.phase = "optimizer", "update"
            self.hold("gradients", [p.grad for p in parameters if p.grad is not None])

        self.hooks = [optimizer.register_step_pre_hook(begin_update)]
        for name, module in (unit for stage in job.stages for unit in named_units(stage)):
            self.watch(name, parallel.inner_block(module))

    def watch(self, name, module):
        """Notice when the module runs: forward, forward again (recomputed) and backward."""

        def arrive(*_):
            self.place = name

        def enter(*_):
            arrive()
            self.depth += 1

        def leave(module, inputs, output):
            self.depth -= 1
            if name == "output":
                self.place = "loss"
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(arrive)

        self.hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        # always: a recomputation is broken off as soon as it has all it needs
        self.hooks.append(module.register_forward_hook(leave, always_call=True))

    # what storages there are

    def hold(self, kind, tensors):
        """Count tensors that live from step to step; those counted already change their kind."""
        self.state_bytes[kind] = count_bytes(tensors)
        for plain in (p for tensor in tensors for p in checkpoint.plain_tensors(tensor)):
            self.kinds[self.register(plain, kind, ("before", "", ""))] = kind

    def register(self, tensor, kind, moment):
        """The number of the tensor's storage; a new one is counted, as being of this kind."""
        storage = tensor.untyped_storage()
        number = self.numbers.get(storage)
        if number is None:
            number = self.numbers[storage] = len(self.kinds)
            self.kinds.append(kind)
            self.sizes.append(0)
            self.resize(number, storage.nbytes(), moment)
            released = weakref.finalize(storage, self.resize, number, 0, None)
            released.atexit = False
            if moment[0] == "backward":
                self.young.append(number)
        return number

    def resize(self, number, size, moment):
        if self.is_open:
            stream = self.streams.setdefault(torch.cpu.current_stream(), len(self.streams))
            self.events.append((number, size - self.sizes[number], moment, stream))
            self.sizes[number] = size

    # while it is open

    def __enter__(self):
        # torch lets this be a lock: it is held while DTensor works out shapes, by operations on
        # tensors of global size which take no memory
        ShardingPropagator._fake_mode_lock = self.shapes_lock = threading.Lock()
        torch_resize = self.torch_resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # FSDP frees and fills its buffers by this: it is no op
            if storage in self.numbers:
                self.resize(self.numbers[storage], size, ("gather", self.place, "resize_"))
            return torch_resize(storage, size)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self.torch_resize
        ShardingPropagator._fake_mode_lock = nullcontext()  # torch's own
        self.is_open = False
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not PLAIN.issuperset(types):
            return NotImplemented  # let a DTensor unwrap itself: what it does inside comes here
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if not self.shapes_lock.locked():
            moment = self.phase_now(), self.place, op.__name__
            self.note_memory(op, args, kwargs, result, moment)
            self.note_traffic(op, args, result)
            self.note_flops(op, args, kwargs, result, moment)
        return result

    def phase_now(self):
        """The phase of the operation that has just run; at the end of a backward, its gradients."""
        if torch._C._current_graph_task_id() != -1:  # inside autograd's backward
            return "recomputed" if self.depth else "backward"
        for number in self.young:  # what outlives the backward pass that made it is a gradient
            if self.sizes[number]:
                self.kinds[number] = "gradients"
        self.young = []
        return self.phase

    def note_memory(self, op, args, kwargs, result, moment):
        """Storages that the operation made, and FSDP's buffers that it filled."""
        kind = "activations" if moment[0] in ("forward", "recomputed") else "temporary"
        for tensor in tensors_in(result):
            self.register(tensor, kind, moment)
        if op.namespace == "fsdp":  # copies into buffers: `out`, or the second argument
            for tensor in tensors_in(kwargs.get("out", args[1:2])):
                self.kinds[self.register(tensor, kind, moment)] = "gathered"

    def note_flops(self, op, args, kwargs, result, moment):
        """What it computed, to the account of the module that runs."""
        if flops := count_flops(op, args, kwargs, result):
            self.flops.setdefault(self.place, Counter())[moment[0]] += flops

    def note_traffic(self, op, args, result):
        """What it sent, to the account of the axis whose group it used."""
        name = op.overloadpacket.__name__
        if op.namespace not in ("c10d", "_c10d_functional") or name in ("wait_tensor", "barrier"):
            return
        assert name in COLLECTIVES, f"{op} is a collective that nobody accounts for"
        kind = COLLECTIVES[name]
        named = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
        if "process_group" in named:
            group = dist.ProcessGroup.unbox(named["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(named["group_name"])
        size = max(tensor.nbytes for tensor in tensors_in((args, result)))
        others = (group.size() - 1) / group.size()
        share = {"all_reduce": 2 * others, "send": 1, "recv": 0}.get(kind, others)
        axis = self.axes.get(group.group_name, "joined axes")  # the loss and the norm cross them
        row = self.collectives.setdefault(axis, {}).setdefault(kind, Counter())
        row.update(calls=1, bytes=size, sent_bytes=round(size * share))

    # results

    def held(self):
        """Bytes by kind after each event: int64 (events, len(KINDS))."""
        changes = torch.zeros(len(self.events), len(KINDS), dtype=torch.int64)
        columns = [KINDS.index(self.kinds[event[0]]) for event in self.events]
        changes[range(len(columns)), columns] = torch.tensor([event[1] for event in self.events])
        return changes.cumsum(0)

    def peak(self):
        """(moment, {kind: bytes}) when this rank held most."""
        held = self.held()
        at = int(held.sum(1).argmax())
        return self.events[at][2], dict(zip(KINDS, held[at].tolist(), strict=True))


# ---- 2. What a GPU would reserve ---------------------------------------------------------------
#
# What a user reads on a GPU is not what tensors take, but what CUDA's caching allocator has
# reserved for them: it keeps freed memory in pools, one for each stream and size class, and a
# pool's holes serve only what fits into them. FSDP gathers in one stream and makes the sharded
# gradients in another, whose memory the loss can therefore never use. The rules, from torch's
# sources (c10/cuda/CUDACachingAllocator.cpp):
#
#     sizes       are rounded up to 512 bytes; those up to 1 MiB are small, and have their own pool
#     segments    of a pool: 2 MiB for small ones; 20 MiB below 10 MiB; else rounded up to 2 MiB
#     expandable  one segment a pool, which grows at its end by pages of 2 MiB (small) or 20 MiB
#     best fit    the smallest free block that is large enough, of equal ones that with the lowest
#                 address, the growing end last
#     split       what is left over stays a free block: from 512 bytes on, in large segments that do
#                 not expand from 1 MiB on
#     merge       a block that is freed joins the free ones beside it; segments are never given back

MIB = 2**20


class Block:
    """A piece of a segment, with its neighbours; `start` is its address in the pool."""

    __slots__ = ("start", "size", "is_free", "before", "after")

    def __init__(self, start, size, before=None, after=None):
        self.start, self.size, self.is_free = start, size, True
        self.before, self.after = before, after


class Pool:
    """The blocks of one stream and size class."""

    def __init__(self, *, is_small, is_expandable):
        self.is_small, self.is_expandable = is_small, is_expandable
        self.free = []  # (size, start, block), ascending
        self.end = None  # the last block of the segment that expands
        self.reserved = 0

    def put(self, block):
        block.is_free = True
        bisect.insort(self.free, (block.size, block.start, block))

    def remove(self, block):
        del self.free[bisect.bisect_left(self.free, (block.size, block.start))]

    def take(self, size):
        """A block of this size, from the best free one or from new memory."""
        i = bisect.bisect_left(self.free, (size,))
        if self.is_expandable and i + 1 < len(self.free) and self.free[i][2] is self.end:
            i += 1  # the end is as large as it may grow
        block = self.free.pop(i)[2] if i < len(self.free) else self.grow(size)
        left = block.size - size
        if left >= (512 if self.is_small or self.is_expandable else MIB + 1):
            rest = Block(block.start + size, left, before=block, after=block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self.end = rest if self.end is block else self.end
            self.put(rest)
        block.is_free = False
        return block

    def grow(self, size):
        """A free block with room for `size`, which is on no list."""
        if not self.is_expandable:
            segment = 2 * MIB if self.is_small else 20 * MIB
            if size >= 10 * MIB:
                segment = -(-size // (2 * MIB)) * 2 * MIB
            self.reserved += segment
            return Block(self.reserved - segment, segment)
        page = 2 * MIB if self.is_small else 20 * MIB
        if not self.end or not self.end.is_free:
            block = Block(self.reserved, 0, before=self.end)
            if self.end:
                self.end.after = block
            self.end = block
        else:
            self.remove(self.end)
        more = -(-(size - self.end.size) // page) * page
        self.end.size += more
        self.reserved += more
        return self.end

    def give_back(self, block):
        """Free the block, and make one of it and of free neighbours."""
        after = block.after
        if after and after.is_free:
            self.remove(after)
            self.end = block if self.end is after else self.end
            block.size, block.after = block.size + after.size, after.after
            if block.after:
                block.after.before = block
        before = block.before
        if before and before.is_free:
            self.remove(before)
            self.end = before if self.end is block else self.end
            before.size, before.after = before.size + block.size, block.after
            if before.after:
                before.after.before = before
            block = before
        self.put(block)


def reserved_bytes(events, *, is_expandable):
    """Bytes that CUDA's allocator would have reserved after a step: {stream: bytes}.

    Args:    events, of an Account: a step from an allocator that holds the states.
    """
    pools, blocks = {}, {}  # (stream, is small) -> pool; storage number -> (pool, block)
    for number, more, _, stream in events:
        if more > 0:
            size = -(-more // 512) * 512
            key = stream, size <= MIB
            if key not in pools:
                pools[key] = Pool(is_small=key[1], is_expandable=is_expandable)
            blocks[number] = pools[key], pools[key].take(size)
        elif more < 0 and number in blocks:
            pool, block = blocks.pop(number)
            pool.give_back(block)
    totals = Counter()
    for (stream, _), pool in pools.items():
        totals[stream] += pool.reserved
    return dict(totals)


def has_expandable_segments():
    """As in real runs, unless PYTORCH_ALLOC_CONF says otherwise (train.py:init_distributed)."""
    conf = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return not conf or "expandable_segments:True" in conf


# ---- 3. A rank without memory ------------------------------------------------------------------


@contextmanager
def thin_causal_mask(dtype):
    """While open, the mask that a CPU kernel wants has one element, expanded to T/2cp x prefix.

    So fake tensors count what CUDA would allocate, whose kernels want no mask.
    """
    original = CausalBias._materialize

    def materialise(bias, device=None):
        return torch.zeros((), dtype=dtype, device=device).expand(bias.seq_len_q, bias.seq_len_kv)

    CausalBias._materialize = materialise
    try:
        yield
    finally:
        CausalBias._materialize = original


class FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA's kernel keeps it, for fake tensors, whose values nobody reads.

    A CPU computes it by several operations, which keep two float32 copies of x for the backward
    pass; the kernel keeps x, its weight and one float32 number a token, and needs no other memory.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """x and its norm (B, T, D)."""
        ctx.save_for_backward(x, weight, x.sum(-1, keepdim=True, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        """Of x, and of the weight a sum over tokens: under tp a partial one, to be reduced."""
        return torch.empty_like(grad), grad.sum(tuple(range(grad.ndim - 1)))


@contextmanager
def fused_norms():
    """While open, RMSNorm is `FusedNorm`."""
    original = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: FusedNorm.apply(x, self.weight)
    try:
        yield
    finally:
        nn.RMSNorm.forward = original


@contextmanager
def even_loads(n_rows):
    """While open, ep exchanges as if every expert had as many rows: fake counts cannot be read."""
    original = parallel.read_lengths

    def read_lengths(sent, received):
        ep = len(sent)
        return [[n_rows // ep + (rank < n_rows % ep) for rank in range(ep)]] * 2

    parallel.read_lengths = read_lengths
    try:
        yield
    finally:
        parallel.read_lengths = original


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

    Returns: {what: value}, an entry of OUT/simulation.json; "plan" is what was printed meanwhile.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # brings the fake backend

    gc.disable()  # as in a run; and what cycles hold would be given back at chance moments
    started_s = time.perf_counter()
    args = argparse.Namespace(**vars(args) | {"compile": False, "async_tp": False})
    args.float8_emulate |= args.float8 == "mxfp8"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    plan = io.StringIO()
    with redirect_stdout(plan):
        job = train.build(args, config, torch.device("cpu"))
        watch.print_pairs(train.describe_job(args, job, "simulated"))
    n_sequences = args.microbatch_size if args.pp > 1 else args.local_batch_size
    n_tokens = n_sequences * args.seq_len // (args.cp * args.tp)  # of a rank, in one forward
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        thin_causal_mask(train.DTYPES[args.param_dtype]),
        fused_norms(),
        even_loads(n_tokens * config.top_k),
    ):
        job = train.start(args, job, draw=lambda name, shape: torch.empty(shape))
        if job.schedule:
            skip_warmup(job.schedule)
        shape = args.global_batch_size // job.mesh["data"].size(), args.seq_len
        tokens = torch.zeros(shape, dtype=torch.int64)
        for parameter in job.parameters:  # a first update: it makes the optimizer's states
            parameter.grad = torch.zeros_like(parameter)
        job.optimizer.step()
        job.optimizer.zero_grad()
        sizes = {"local_batch_size": args.local_batch_size, "max_norm": args.max_norm}
        with Account(job) as account:
            train.train_step(job, tokens, tokens, **sizes)
    moment, peak_bytes = account.peak()
    reserved = reserved_bytes(account.events, is_expandable=has_expandable_segments())
    units = [[name for name, _ in named_units(stage)] for stage in job.stages]
    axes, phases = ("pp", "dp_replicate", "fsdp", "cp", "tp"), ("forward", "recomputed", "backward")
    axes += ("ep",) if config.n_experts else ()
    return {
        "rank": rank,
        "coordinates": {axis: job.mesh[axis].get_local_rank() for axis in axes},
        "stages": [pipeline.span(names) for names in units],
        "parameters": job.n_local,
        "state_bytes": account.state_bytes,
        "peak_bytes": sum(peak_bytes.values()),
        "reserved_bytes": sum(reserved.values()),
        "reserved_bytes_by_stream": reserved,
        "peak_bytes_by_kind": peak_bytes,
        "peak_moment": dict(zip(("phase", "module", "op"), moment, strict=True)),
        "flops": {phase: sum(n[phase] for n in account.flops.values()) for phase in phases},
        "flops_by_module": account.flops,
        "collectives": account.collectives,
        "weights": [describe_weight(name, weight) for name, weight in job.weights],
        "plan": plan.getvalue(),
        "seconds": time.perf_counter() - started_s,
    }


def describe_weight(name, weight):
    """Full shape, split and local shape of a parameter."""
    axes = zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
    split = {axis: placement.dim for axis, placement in axes if not placement.is_replicate()}
    local_shape = [*parallel.local_tensor(weight).shape]
    return {"name": name, "shape": [*weight.shape], "split": split, "local_shape": local_shape}


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
            raise watch.TrainingError(
                f"one of {len(some)} processes was killed, for want of memory most likely: each "
                "takes about 0.5 GiB; try --ranks 0, which needs one"
            ) from error
    return rows


def default_ranks(args):
    """One of the first and one of the last pp rank: both ends of the model, or of a V of stages."""
    return sorted({0, args.world_size - args.world_size // args.pp})


# ---- 4. The schedule, by FLOPs -----------------------------------------------------------------


def stage_durations(stages, *, head, block_again, head_again):
    """How long each stage computes, an average one's forward being 1, for `pipeline.timeline`.

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


def time_schedule(args, config, rows):
    """A pipeline's accounts, with stages that cost what their FLOPs say; draws OUT/timeline.svg.

    `rows` are traced ranks', which know how much of their blocks is computed again.
    """
    modules = [pair for row in rows for pair in row["flops_by_module"].items()]
    blocks = [flops for name, flops in modules if name.startswith("layers.")]
    once, again = (sum(flops[phase] for flops in blocks) for phase in ("forward", "recomputed"))
    last_block = model.block_flops(config, args.seq_len, config.n_layers - 1)
    durations = stage_durations(
        train.stage_names(args, config),
        head=model.head_flops(config) / last_block,
        block_again=again / once if once else 0.0,
        head_again=1.0 if args.loss_chunks > 1 else 0.0,
    )
    n_microbatches = args.local_batch_size // args.microbatch_size
    shape = (args.pp_schedule, args.pp, n_microbatches, args.stages_per_rank)
    even, uneven = pipeline.timeline(*shape), pipeline.timeline(*shape, durations=durations)
    (Path(args.out) / "timeline.svg").write_text(pipeline.draw_svg(uneven))
    busy = [sum(op.end - op.start for op in ops) for ops in uneven]
    return {
        "bubble_if_stages_were_equal": pipeline.bubble_fraction(even),
        "bubble": pipeline.bubble_fraction(uneven),
        "work": [b * args.pp / sum(busy) for b in busy],  # of each pp rank, 1 on average
        "in_flight": pipeline.peaks_in_flight(even),  # microbatches x stages, of each pp rank
    }


# ---- 5. What fits ------------------------------------------------------------------------------


def as_text(flags):
    """{"tp": 2} -> --tp 2"""
    return " ".join(f"{train.flag_of(name)} {value}" for name, value in flags.items())


def reserved_with(typed, flags, ranks):
    """Bytes that the ranks reserve at most with these flags changed; infinite where refused."""
    try:
        args, config = resolve(typed, **flags)
    except ValueError:
        return math.inf
    rows = trace_ranks([(args, config, rank) for rank in ranks])
    return max(row["reserved_bytes"] for row in rows)


def batch_flags(args, size):
    """Another local batch: of `size` sequences, or with a pipeline as many microbatches of that."""
    n_microbatches = args.local_batch_size // args.microbatch_size if args.pp > 1 else 1
    n_accumulated = args.global_batch_size // args.local_batch_size  # as often as before
    flags = {"local_batch_size": size * n_microbatches}
    flags["global_batch_size"] = n_accumulated * flags["local_batch_size"]
    return flags | ({"microbatch_size": size} if args.pp > 1 else {})


def find_largest_batch(typed, args, ranks, *, now_bytes, limit_bytes):
    """The flags of the largest batch with which the ranks stay within the limit; None if none is.

    It doubles what is there while that fits (to 64 times at most), then halves what is between.
    """
    size = args.microbatch_size if args.pp > 1 else args.local_batch_size
    fitting, too_large = (size, None) if now_bytes <= limit_bytes else (0, size)
    while too_large is None or too_large - fitting > 1:
        guess = 2 * fitting if too_large is None else (fitting + too_large) // 2
        if guess > 64 * size:
            break
        if reserved_with(typed, batch_flags(args, guess), ranks) <= limit_bytes:
            fitting = guess
        else:
            too_large = guess
    return batch_flags(args, fitting) if fitting else None


def find_changes(typed, args, ranks, *, now_bytes, limit_bytes):
    """Flags that make it smaller, one after the other until all is within the limit.

    Returns: [(all flags so far, bytes reserved)], those that cost little speed first; what saves
    less than 1 % is left out.
    """
    flags, found = {}, []
    for change in (
        {"loss_chunks": 8},
        {"ac": "op"},
        {"ac": "full"},
        {"reshard": "always"},
        {"tp": 2 * args.tp, "dp_shard": max(1, args.dp_shard // 2)},
    ):
        peak = reserved_with(typed, flags | change, ranks)
        if peak < 0.99 * now_bytes:
            flags, now_bytes = flags | change, peak
            found.append((flags, peak))
        if now_bytes <= limit_bytes:
            break
    return found


def find_fit(typed, args, rows):
    """Say whether the traced ranks fit into --gpu-memory-gib, and with which batch or flags."""
    limit_bytes, now_bytes = args.gpu_memory_gib * 2**30, max(row["reserved_bytes"] for row in rows)
    known = {"now_bytes": now_bytes, "limit_bytes": limit_bytes}
    ranks, fits = [row["rank"] for row in rows], now_bytes <= limit_bytes
    watch.print_pairs([("fit", (
        f"{readable(now_bytes)} reserved for tensors {'fit' if fits else 'do NOT fit'} into "
        f"--gpu-memory-gib {args.gpu_memory_gib:g}; CUDA itself and NCCL take some on top"
    ))])  # fmt: skip
    changes = [] if fits else find_changes(typed, args, ranks, **known)
    changes = [(as_text(flags), peak) for flags, peak in changes]
    watch.print_pairs([("", f"{readable(peak)} with {text}") for text, peak in changes])
    largest = find_largest_batch(typed, args, ranks, **known)
    text = as_text(largest) if largest else None
    watch.print_pairs([("", f"largest batch, all else as given: {text or 'none fits'}")])
    return {"fits": fits, "changes": changes, "largest_batch": text}


# ---- 6. What is printed ------------------------------------------------------------------------


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
        f"{row['rank']} ({place}): {', '.join(row['stages'])}",
        f"reserves {readable(row['reserved_bytes'])} of a GPU, for the tensors of a step",
        f"holds at most {readable(row['peak_bytes'])}: {kinds}",
        f"reached in the {at['phase']} pass of {at['module']}, by {at['op']}",
        f"computes {(flops['forward'] + flops['backward']) / 1e12:,.3f} TFLOP a step, and "
        f"recomputes {flops['recomputed'] / 1e12:,.3f}",
    ]
    for axis, counts in sorted(row["collectives"].items()):
        sent = {kind: n for kind, n in counts.items() if n["sent_bytes"]}  # groups of one: nothing
        said = [f"{n['calls']} {kind} {readable(n['sent_bytes'])}" for kind, n in sent.items()]
        if said:
            lines.append(f"sends over {axis + ':':<13} {', '.join(said)}")
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
        lines.append(f"{kind:<32} {len(same):>3} of {shape:<15} -> {local:<13} {split}")
    return "\n".join(lines)


def describe_ranks(args, rows):
    """(label, text) pairs: what is split, what is not traced, and each rank's account."""
    weights = {weight["name"]: weight for row in rows for weight in row["weights"]}
    ranks = " and ".join(str(row["rank"]) for row in rows)
    pairs = [("split", f"of the weights of rank {ranks}\n{describe_split(weights.values())}")]
    for is_on, note in (
        (args.compile, "--compile is not traced"),
        (args.async_tp, "--async-tp is not traced"),
        (args.ep > 1, "every expert is taken to get as many rows"),
        (args.float8 == "mxfp8", "mxfp8 is emulated, which under tp sends other tensors"),
    ):
        if is_on:
            pairs.append(("note", note))
    pairs += [*train.describe_moot(args), *(("rank", describe_rank(row)) for row in rows)]
    largest = max(rows, key=lambda row: row["reserved_bytes"])
    text = f"{readable(largest['reserved_bytes'])} reserved, {readable(largest['peak_bytes'])} live"
    return [*pairs, ("peak", f"{text} on rank {largest['rank']}, of those traced")]


# ---- 7. The program ----------------------------------------------------------------------------


def parse_args(argv=None):
    """The flags as typed: train.py's, and the simulation's own."""
    parser = train.build_parser()
    parser.description = "Count what ranks of any mesh hold, compute and send in one step."
    parser.epilog = "All flags but the last group's are train.py's."
    add = parser.add_argument_group("simulate").add_argument
    add("--world-size", type=train.at_least(1), required=True,
        help="ranks of the job -> simulate.py:trace_rank")
    add("--ranks", type=train.at_least(0), nargs="+", metavar="RANK", help="to trace; if not "
        "given, one of the first and one of the last pp rank -> simulate.py:default_ranks")
    add("--gpu-memory-gib", type=train.more_than_zero, metavar="GIB",
        help="of one GPU: find what would fit into it -> simulate.py:find_fit")
    return train.parse_args(argv, parser)


def resolve(typed, **changes):
    """(args, ModelConfig) of the flags as typed, some of them changed; their rules are checked."""
    args = argparse.Namespace(**vars(typed) | changes)
    args.init_from = None  # no weights are read
    memory_bytes = args.gpu_memory_gib and round(args.gpu_memory_gib * 2**30)
    hardware = train.Hardware("cuda", (10, 0), args.world_size, memory_bytes)
    config = train.resolve_args(args, hardware, args.world_size)
    train.check_args(args, config, hardware, args.world_size)
    experts = {"param_dtype": args.param_dtype, "is_compiled": True}
    parallel.check_ep(args.ep, config, train.degrees_of(args), **experts)
    return args, config


def read_command(argv=None):
    """(the flags as typed, args, ModelConfig) of a simulation that may run."""
    typed = parse_args(argv)
    n_started = train.from_torchrun("WORLD_SIZE")
    if n_started > 1:
        raise ValueError(
            f"simulate.py conflicts with the {n_started} ranks that torchrun started: one process "
            "stands for all; start python simulate.py"
        )
    args, config = resolve(typed)
    for rank in args.ranks or ():
        if rank >= args.world_size:
            raise ValueError(
                f"--ranks {rank} is none of --world-size {args.world_size}: try 0 to "
                f"{args.world_size - 1}"
            )
    return typed, args, config


def main(argv=None):
    typed, args, config = read_command(argv)
    out = Path(args.out)
    ranks = sorted(set(args.ranks or default_ranks(args)))
    rows = trace_ranks([(args, config, rank) for rank in ranks])
    print(rows[0]["plan"], end="")
    watch.print_pairs(describe_ranks(args, rows))
    result = {"flags": vars(args), "model": dataclasses.asdict(config), "ranks": rows}
    result["model_flops_per_token"] = model.flops_per_token(config, args.seq_len)
    out.mkdir(parents=True, exist_ok=True)
    if args.pp > 1:
        schedule = result["schedule"] = time_schedule(args, config, rows)
        slowest = schedule["work"].index(max(schedule["work"]))
        watch.print_pairs([("time", (
            f"bubble {schedule['bubble']:.1%} by the stages' FLOPs; pp rank {slowest} works most, "
            f"{max(schedule['work']):.2f} of the mean; drawn into {out}/timeline.svg\n"
            f"chunks in flight on each pp rank: {schedule['in_flight']}"
        ))])  # fmt: skip
    path = out / "simulation.json"
    path.write_text(json.dumps(result, indent=1))  # already, since what follows may take minutes
    if args.gpu_memory_gib:
        result["fit"] = find_fit(typed, args, rows)
        path.write_text(json.dumps(result, indent=1))
    seconds = max(row["seconds"] for row in rows)
    watch.print_pairs([("done", f"traced in {seconds:.0f} s a rank; all in {path}")])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            main()
        except (ValueError, watch.TrainingError) as error:
            sys.exit(f"simulate.py: {error}")

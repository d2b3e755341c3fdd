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
    time             all of this over a device's rates, through the pipeline (§4)   seconds

It goes into OUT/simulation.json, as pictures into OUT/timeline.svg and OUT/memory-RANK.svg, and,
shorter, to the console.

Left out: what kernels and NCCL take for themselves. Of --compile only what it fuses is traced, of
--async-tp only a share of tp's time; mxfp8 is emulated for want of its kernels; with --cpu-offload
parameters, gradients and optimizer states count nowhere, nor the copy of one unit's on its way; all
experts get as many rows.

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
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
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
#     torch.ops.aten._to_copy                               casts, which lack the pointwise tag
#     torch.ops.aten._scaled_dot_product_flash_attention_for_cpu    attention as it runs here
#     torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# ---- 1. The account ----------------------------------------------------------------------------

PHASES = ("forward", "recomputed", "backward")  # then the optimizer's "update"
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
COLLECTIVES = {  # of torch.distributed and, as DTensor calls them, functional
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "send": "send", "recv_": "recv", "all_to_all_single": "all_to_all",
}  # fmt: skip
PLAIN = {torch.Tensor, nn.Parameter, FakeTensor}
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CAST = torch.ops.aten._to_copy
RATES_OF = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def named_units(stage):
    """(name, module) of what a stage holds: tok_embeddings, blocks, norm, output, in this order."""
    unit = re.compile(r"tok_embeddings|layers\.\d+|norm|output")
    return [(name, module) for name, module in stage.named_modules() if unit.fullmatch(name)]


def attention_flops(op, args):
    """(FLOPs as model.py:flops_per_token counts them, FLOPs that a kernel really does).

    Counted are all keys that the kernel is given (under cp a chunk is given its prefix only,
    (2 cp + 1) / 4 cp of them on average), and a backward pass as two forwards, of two matmuls each.
    The kernel leaves out pairs above the diagonal (its queries are the last of the keys, all of
    them where cp is 1), and its backward is five matmuls: it computes the scores once more.
    """
    is_backward = op.overloadpacket is FLASH_BACKWARD
    q, k, v = (tensor.shape for tensor in (args[1:4] if is_backward else args[:3]))
    counted = sdpa_flop_count(q, k, v) * (2 if is_backward else 1)
    return counted, counted * (5 / 4 if is_backward else 1) * (1 - q[-2] / k[-2] / 2)


def matmul_flops(op, args, kwargs, result):
    """FLOPs of a matmul, else 0."""
    if op.overloadpacket is torch.ops.aten._grouped_mm:
        # (R, in) times (E, in, out), or rows of both times each other
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(op.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


SENDERS = {  # what a step sends beside its parallelisms: the function that sends it
    "tokens": (train, "count_valid_tokens"),
    "loss": (train, "sum_over_ranks"),
    "norm": (parallel, "clip_grad_norm"),
    "scales": (train, "refresh_scales"),
    "loads": (parallel, "balance"),
}


class Account(TorchDispatchMode):
    """What this rank holds, computes and sends in one training step, counted op by op.

    A context for that step. It sees what comes out of autograd and DTensor, on real tensors and on
    fake ones alike:

        events        (storage number, bytes more or less, moment, stream), a row for each time that
                      memory is taken or given back
        kinds         one of KINDS for each storage number
        flops         {module: {forward, recomputed or backward: FLOPs}}
        state_bytes   {parameters, gradients, optimizer: bytes}, what lives from step to step
        work          {module: {phase: {what: FLOPs or bytes}}}, what takes time: `time_units`
        collectives   {axis or sender: {kind: {calls, bytes, sent_bytes}}}: bytes of the larger one
                      of input and output, and what a rank of a ring sends of it

    A moment is (phase, module, op). Of the kinds, "gathered" are FSDP's buffers: whole weights, and
    gradients on their way to be scattered; "activations" all that a forward pass makes, again or
    for the first time, such as the loss's float32 logits; "gradients" what outlives the backward
    pass that made it, including what goes to another stage, or from the first half of a split
    backward to the second; "temporary" what a backward pass makes and does not keep.

    Args:    a job whose optimizer has made its states; is_compiled, whether a compiler fuses
             pointwise operations: see `note_fusion`; is_offloaded, whether states are on the host.
    """

    def __init__(self, job, *, is_compiled=False, is_offloaded=False):
        super().__init__()
        self.is_offloaded = is_offloaded
        # axes that span all ranks share a group: what calls it tells them apart
        self.axes = {
            (namespace, job.mesh[axis].get_group().group_name): axis
            for namespace, axes in (
                ("_c10d_functional", ("cp", "tp")),  # DTensor and ring attention
                ("c10d", ("dp_replicate", "efsdp", "fsdp", "pp")),  # FSDP and the pipeline
            )
            for axis in axes
            if axis in job.mesh
        }
        self.sender, self.until_exit = None, ExitStack()
        self.is_compiled, self.fusible = is_compiled, {}  # storage number -> where it was made
        self.touched = {}  # (phase, module) -> {storage number: bytes}, with a compiler
        self.events, self.kinds, self.sizes = [], [], []
        self.streams = {torch.cpu.current_stream(): 0}  # FSDP enters its streams on a CPU as well
        self.numbers = WeakIdKeyDictionary()  # storage -> its number
        self.young = []  # storages made in a backward pass that is still going on
        self.flops, self.work, self.collectives, self.state_bytes = {}, {}, {}, {}
        self.place, self.depth, self.phase, self.is_open = "before", 0, "forward", True
        parameters, optimizer = job.parameters, job.optimizer
        self.hold("parameters", parameters)
        self.hold("optimizer", tensors_in([optimizer.state[p] for p in parameters]))

        def begin_update(*_):
            self.place, self.phase = "optimizer", "update"
            self.hold("gradients", [p.grad for p in parameters if p.grad is not None])

        self.until_exit.enter_context(optimizer.register_step_pre_hook(begin_update))
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

        self.until_exit.enter_context(module.register_forward_pre_hook(enter, prepend=True))
        # always: a recomputation is broken off as soon as it has all it needs
        self.until_exit.enter_context(module.register_forward_hook(leave, always_call=True))

    # what storages there are

    def hold(self, kind, tensors):
        """Count tensors that live from step to step; those counted already change their kind."""
        held = [plain for tensor in tensors for plain in checkpoint.plain_tensors(tensor)]
        self.state_bytes[kind] = sum(plain.nbytes for plain in held)
        for plain in held:
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
        self.shapes_lock = threading.Lock()
        self.patch(ShardingPropagator, "_fake_mode_lock", self.shapes_lock)
        torch_resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # FSDP frees and fills its buffers by this: it is no op
            if storage in self.numbers:
                self.resize(self.numbers[storage], size, ("gather", self.place, "resize_"))
            return torch_resize(storage, size)

        self.patch(torch.UntypedStorage, "resize_", resize_)
        for sender, (module, name) in SENDERS.items():
            self.patch(module, name, self.named_sender(sender, getattr(module, name)))
        return super().__enter__()

    def patch(self, owner, name, value):
        self.until_exit.enter_context(mock.patch.object(owner, name, value))

    def named_sender(self, sender, function):
        """The function, with what it sends booked under this name."""

        def call(*args, **kwargs):
            self.sender = sender
            try:
                return function(*args, **kwargs)
            finally:
                self.sender = None

        return call

    def __exit__(self, *exception):
        self.until_exit.close()
        self.is_open = False
        left_out = self.fusible.keys()
        if self.is_offloaded:
            states = ("parameters", "gradients", "optimizer")
            left_out |= {number for number, kind in enumerate(self.kinds) if kind in states}
        self.events = [event for event in self.events if event[0] not in left_out]
        for moment, touched in self.touched.items():
            made = (n for number, n in touched.items() if number not in self.fusible)
            self.book(moment, memory=sum(made))
        return super().__exit__(*exception)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not PLAIN.issuperset(types):
            return NotImplemented  # let a DTensor unwrap itself: what it does inside comes here
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if not self.shapes_lock.locked():
            moment = self.phase_now(), self.place, op.__name__
            made, read = tensors_in(result), tensors_in((args, kwargs))
            self.note_memory(op, args, kwargs, made, moment)
            sends = op.namespace in ("c10d", "_c10d_functional")
            if sends:
                self.note_traffic(op, args, result, moment)
            # a view makes nothing and changes nothing
            storages = {tensor.untyped_storage() for tensor in read}
            if op._schema.is_mutable or any(t.untyped_storage() not in storages for t in made):
                if self.is_compiled:
                    self.note_fusion(op, made, read, moment)
                if not sends:
                    self.note_work(op, args, kwargs, result, moment)
        return result

    def phase_now(self):
        """The phase of the operation that has just run; marks gradients after a backward pass."""
        if torch._C._current_graph_task_id() != -1:  # inside autograd's backward
            return "recomputed" if self.depth else "backward"
        for number in self.young:  # what outlives the backward pass that made it is a gradient
            if self.sizes[number]:
                self.kinds[number] = "gradients"
        self.young = []
        return self.phase

    def note_memory(self, op, args, kwargs, made, moment):
        """Storages that the operation made, and FSDP's buffers that it filled."""
        kind = "activations" if moment[0] in ("forward", "recomputed") else "temporary"
        for tensor in made:
            self.register(tensor, kind, moment)
        if op.namespace == "fsdp":  # copies into buffers: `out`, or the second argument
            for tensor in tensors_in(kwargs.get("out", args[1:2])):
                self.kinds[self.register(tensor, kind, moment)] = "gathered"

    def note_fusion(self, op, made, read, moment):
        """A compiler makes no result that only pointwise operations of its block and pass read.

        Storages are fusible until another operation, or one of another block or pass, reads them.
        """
        read = {self.numbers.get(t.untyped_storage()) for t in read}
        made = {self.numbers[t.untyped_storage()] for t in made} - read
        is_pointwise = torch.Tag.pointwise in op.tags or op.overloadpacket is CAST
        joins = is_pointwise or torch.Tag.reduction in op.tags
        for number in read & self.fusible.keys():
            if not joins or self.fusible[number] != moment[:2]:
                del self.fusible[number]
        if is_pointwise and moment[1].startswith("layers."):
            self.fusible |= dict.fromkeys(made, moment[:2])

    def book(self, moment, **work):
        """Add what takes time to the account of the moment's module and phase."""
        phase, place = moment[:2]
        self.work.setdefault(place, {}).setdefault(phase, Counter()).update(work)

    def note_work(self, op, args, kwargs, result, moment):
        """What it computed, or else which bytes of memory it read and wrote."""
        if op.overloadpacket in (FLASH, FLASH_BACKWARD):
            flops, done = attention_flops(op, args)
            self.book(moment, attention=done)
        elif flops := matmul_flops(op, args, kwargs, result):
            self.book(moment, **{RATES_OF.get(args[0].dtype, "fp32"): flops})
        if flops:
            self.flops.setdefault(self.place, Counter())[moment[0]] += flops
            return
        if op.namespace == "fsdp" or "empty" in op.overloadpacket.__name__:
            return  # FSDP copies in streams of its own, beside the matmuls
        tensors = tensors_in((result, args, kwargs))
        if not self.is_compiled:
            self.book(moment, memory=sum(tensor.nbytes for tensor in tensors))
            return
        touched = self.touched.setdefault(moment[:2], {})  # by one kernel, once
        touched |= {self.numbers.get(t.untyped_storage()): t.nbytes for t in tensors}

    def note_traffic(self, op, args, result, moment):
        """What it sent, to the account of its sender, or of the axis whose group it used."""
        name = op.overloadpacket.__name__
        if name in ("wait_tensor", "barrier"):
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
        sender = "ep" if kind == "all_to_all" else self.sender
        sender = sender or self.axes[op.namespace, group.group_name]
        row = self.collectives.setdefault(sender, {}).setdefault(kind, Counter())
        row.update(calls=1, bytes=size, sent_bytes=round(size * share))
        if sender in ("tp", "cp", "ep"):  # nothing is computed meanwhile
            self.book(moment, **{sender: round(size * share)})

    # results

    def held(self):
        """Bytes by kind after each event: int64 (events, len(KINDS))."""
        changes = torch.zeros(len(self.events), len(KINDS), dtype=torch.int64)
        kinds = [KINDS.index(self.kinds[event[0]]) for event in self.events]
        changes[range(len(kinds)), kinds] = torch.tensor([event[1] for event in self.events])
        return changes.cumsum(0)

    def columns(self):
        """At most 400 rows of `held`, for a picture: of as many groups of events the highest."""
        held = self.held()
        groups = held.tensor_split(min(400, len(held)))
        return [group[group.sum(1).argmax()].tolist() for group in groups]

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


class Pool:
    """The free blocks of one stream and size class. A block is (start, end), by address."""

    def __init__(self, *, is_small, is_expandable):
        self.is_small, self.is_expandable = is_small, is_expandable
        self.free = []  # (size, start), ascending
        self.end_of, self.start_of = {}, {}  # of a free block, by its start and by its end
        self.reserved = 0
        self.top = 0  # the end of the last segment

    def remove(self, start):
        """Take the free block that starts there off the lists; its end."""
        end = self.end_of.pop(start)
        del self.start_of[end]
        del self.free[bisect.bisect_left(self.free, (end - start, start))]
        return end

    def take(self, size):
        """A block of this size, from the best free one or from new memory."""
        i = bisect.bisect_left(self.free, (size,))
        if self.is_expandable and i + 1 < len(self.free) and sum(self.free[i]) == self.top:
            i += 1  # the end is as large as it may grow
        if i < len(self.free):
            start = self.free[i][1]
            end = self.remove(start)
        else:
            start, end = self.grow(size)
        if end - start - size >= (512 if self.is_small or self.is_expandable else MIB + 1):
            self.give_back(start + size, end)
            end = start + size
        return start, end

    def grow(self, size):
        """A block with room for `size`, of new memory and a free end."""
        page = 2 * MIB if self.is_small else 20 * MIB
        if self.is_expandable:
            start = self.start_of.get(self.top, self.top)
            if start < self.top:
                self.remove(start)
            more = -(-(size - (self.top - start)) // page) * page
            self.top += more
        else:
            more = page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            start = self.top + 1  # a gap: blocks of two segments are never merged
            self.top = start + more
        self.reserved += more
        return start, self.top

    def give_back(self, start, end):
        """Free the block, and make one of it and of free neighbours."""
        if end in self.end_of:
            end = self.remove(end)
        if start in self.start_of:
            start = self.start_of[start]
            self.remove(start)
        bisect.insort(self.free, (end - start, start))
        self.end_of[start], self.start_of[end] = end, start


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
            pool.give_back(*block)
    totals = Counter()
    for (stream, _), pool in pools.items():
        totals[stream] += pool.reserved
    return dict(totals)


def has_expandable_segments():
    """As in real runs, unless PYTORCH_ALLOC_CONF says otherwise (train.py:init_distributed)."""
    conf = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return not conf or "expandable_segments:True" in conf


# ---- 3. A rank without memory ------------------------------------------------------------------


def thin_causal_mask(dtype):
    """While open, the mask that a CPU kernel wants has one element, expanded to T/2cp x prefix.

    So fake tensors count what CUDA would allocate, whose kernels want no mask.
    """

    def materialise(bias, device=None):
        return torch.zeros((), dtype=dtype, device=device).expand(bias.seq_len_q, bias.seq_len_kv)

    return mock.patch.object(CausalBias, "_materialize", materialise)


class FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA's kernel keeps it, for fake tensors, whose values nobody reads.

    A CPU computes it by several operations, which keep two float32 copies of x for the backward
    pass; the kernel keeps x, its weight and one float32 number a token, and needs no other memory.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """x and its norm (B, T, D)."""
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return x * 1.0  # reads and writes what the kernel does

    @staticmethod
    def backward(ctx, grad):
        """Of x, and of the weight a sum over tokens: under tp a partial one, to be reduced."""
        return grad * ctx.saved_tensors[0], grad.sum(tuple(range(grad.ndim - 1)))


def fused_norms():
    """While open, RMSNorm is `FusedNorm`."""
    return mock.patch.object(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))


class FusedLoss(torch.autograd.Function):
    """Cross-entropy as a compiler makes it: for backward it keeps the logits as they came."""

    @staticmethod
    def forward(ctx, logits, labels, n_valid_tokens):
        """The loss of logits (B, T, V); two float32 numbers a token are kept as well."""
        ctx.save_for_backward(logits, labels, *(n.float() for n in logits.aminmax(dim=-1)))
        return n_valid_tokens.float() * 0

    @staticmethod
    def backward(ctx, grad):
        logits = ctx.saved_tensors[0]  # a checkpointed piece of the loss hands them out once
        return logits * grad.to(logits), None, None


def fused_loss():
    """While open, the loss is `FusedLoss`."""
    return mock.patch.object(parallel, "cross_entropy", FusedLoss.apply)


def even_loads(n_rows):
    """While open, ep exchanges as if every expert had as many rows: fake counts cannot be read."""

    def read_lengths(sent, received):
        ep = len(sent)
        return [[n_rows // ep + (rank < n_rows % ep) for rank in range(ep)]] * 2

    return mock.patch.object(parallel, "read_lengths", read_lengths)


def skip_warmup(schedule):
    """For a fake process group: start without the ranks' vote on whether all shapes are known.

    No answer would come there. A real group needs it: it opens the neighbours' connections.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # new in torch 2.13

    for stage in schedule.stages:
        stage._inference_mode = InferenceMode.STATIC
    schedule.schedule._warmup_p2p = lambda *_: None


def trace_rank(args, config, rank):
    """Build the job of one rank and take one step, with a fake process group and fake tensors.

    Returns: {what: value}, an entry of OUT/simulation.json but for "columns", which are drawn;
             "plan" is what was printed meanwhile.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # brings the fake backend

    gc.disable()  # as in a run; and what cycles hold would be given back at chance moments
    started_s = time.perf_counter()
    is_compiled = args.compile
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
        fused_loss() if is_compiled and not job.loss_parallel else nullcontext(),
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
        with Account(job, is_compiled=is_compiled, is_offloaded=args.cpu_offload) as account:
            train.train_step(
                job, tokens, tokens, local_batch_size=args.local_batch_size, max_norm=args.max_norm
            )
    moment, peak_bytes = account.peak()
    reserved = reserved_bytes(account.events, is_expandable=has_expandable_segments())
    axes = ("pp", "dp_replicate", "fsdp", "cp", "tp", *(["ep"] if config.n_experts else []))
    return {
        "rank": rank,
        "coordinates": {axis: job.mesh[axis].get_local_rank() for axis in axes},
        "stages": [pipeline.span([name for name, _ in named_units(s)]) for s in job.stages],
        "parameters": job.n_local,
        "state_bytes": account.state_bytes,
        "peak_bytes": sum(peak_bytes.values()),
        "reserved_bytes": sum(reserved.values()),
        "reserved_bytes_by_stream": reserved,
        "peak_bytes_by_kind": peak_bytes,
        "peak_moment": dict(zip(("phase", "module", "op"), moment, strict=True)),
        "flops": {phase: sum(n[phase] for n in account.flops.values()) for phase in PHASES},
        "flops_by_module": account.flops,
        "work": account.work,
        "collectives": account.collectives,
        "weights": [describe_weight(name, weight) for name, weight in job.weights],
        "plan": plan.getvalue(),
        "columns": account.columns(),
        "seconds": time.perf_counter() - started_s,
    }


def describe_weight(name, weight):
    """Full shape, split and local shape of a parameter."""
    axes = []
    if isinstance(weight, DTensor):  # else it is whole, and FSDP has nothing to do with it
        axes = zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
    split = {axis: placement.dim for axis, placement in axes if not placement.is_replicate()}
    local_shape = [*parallel.local_tensor(weight).shape]
    return {"name": name, "shape": [*weight.shape], "split": split, "local_shape": local_shape}


def trace_ranks(jobs):
    """[trace_rank(*job) for job in jobs], each in a process of its own, a core for each.

    Says on stderr that it does, since large models take minutes.
    """
    rows, n_cores = [], os.cpu_count()
    options = {
        "mp_context": multiprocessing.get_context("fork"),
        "initializer": signal.signal,  # end at once on Ctrl-C
        "initargs": (signal.SIGINT, signal.SIG_DFL),
    }
    for some in (jobs[i : i + n_cores] for i in range(0, len(jobs), n_cores)):
        numbers = ", ".join(str(rank) for _, _, rank in some)
        print(f"tracing rank {numbers} ..", end="\r", file=sys.stderr, flush=True)
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


# ---- 4. Time -----------------------------------------------------------------------------------
#
# A step's seconds are its work over the rates of a device, added up stage by stage:
#
#     matmuls      FLOPs by dtype, the recomputed ones as well
#     attention    FLOPs of the pairs that a causal mask leaves, those of scores in backward again
#     memory       bytes that all other operations read and write; with --compile each tensor that
#                  is made at all once, by the kernel of a block and pass
#     tp, cp, ep   bytes that a rank sends while it waits; AsyncTP hides a part of tp's
#     a pipeline   its time line, of stages that take this long
#     fsdp         what its bytes take longer than the computation that they hide behind
#
# The rates are shares of published peaks. Three are fitted, to 22 published runs on H100s
# (tests/paper_tables.py has them): bf16, float8, and what AsyncTP hides. The others were set once.
# Not estimated: latencies, waiting for slow ranks, data, checkpoints and what a pipeline sends.

# NVIDIA's data sheets of the SXM cards, dense TFLOP/s; GB/s of memory, and of NVLink in one
# direction. That each GPU has a NIC of 400 Gb/s is supposed.
DEVICES = {
    "h100": {"fp8": 1979, "fp32": 67, "memory": 3350, "nvlink": 450, "nic": 50},
    "h200": {"fp8": 1979, "fp32": 67, "memory": 4800, "nvlink": 450, "nic": 50},
    "b200": {"fp8": 4500, "fp32": 80, "memory": 8000, "nvlink": 900, "nic": 50},
}
SHARES = {"bf16": 0.455, "fp8": 0.394, "fp32": 0.455, "memory": 0.85, "nvlink": 2 / 3, "nic": 1.0}
ATTENTION_SHARE = 0.303  # of the bf16 peak
HIDDEN = 0.6  # of tp's bytes, by AsyncTP
GPUS_A_HOST = 8
TERA = ("bf16", "fp8", "fp32", "attention")  # TFLOP/s; the others are GB/s


def bf16_peak(args):
    return model.PEAK_TFLOPS[args.device_name.upper()]


def rates_of(args):
    """{what: FLOPs or bytes a second} of --device-name and --rates, as a job of these flags does.

    An axis's ring takes the NIC if its ranks, with all axes further in, are more than a host has.
    """
    peaks = {"bf16": bf16_peak(args)} | DEVICES[args.device_name]
    rates = {what: peak * SHARES[what] for what, peak in peaks.items()}
    rates |= {"attention": peaks["bf16"] * ATTENTION_SHARE, "hidden": HIDDEN} | args.rates
    rates |= {what: rate * 1000 for what, rate in rates.items() if what in TERA}
    extent = 1
    for axis, degree in reversed(train.degrees_of(args).items()):  # from tp outwards
        extent *= degree
        rates[axis] = rates["nvlink" if extent <= GPUS_A_HOST else "nic"]
    rates["fsdp"] = rates["efsdp"] = rates["dp_shard"]
    rates["ep"] = rates["nvlink" if args.ep <= GPUS_A_HOST else "nic"]
    rates["tp"] /= 1 - rates["hidden"] if args.async_tp else 1
    return {what: rate * 1e9 for what, rate in rates.items()}


def unit_of(name):
    return "block" if name.startswith("layers.") else name


def time_units(rows, rates, n_runs):
    """{unit: {phase: {what: seconds in one microbatch}}}; the unit "block" is an average block.

    Args:    n_runs, how often each module ran in the step that was traced.
    """
    units = {}
    n_traced = Counter(unit_of(name) for row in rows for name in row["work"])
    for name, phases in (pair for row in rows for pair in row["work"].items()):
        for phase, work in phases.items():
            spent = units.setdefault(unit_of(name), {}).setdefault(phase, Counter())
            for what, amount in work.items():
                spent[what] += amount / rates[what] / n_runs / n_traced[unit_of(name)]
    return units


def spent_on(names, units, phases=PHASES):
    """{what: seconds} of one microbatch in a stage of these modules."""
    spent = Counter()
    for name in [*names, *(["loss"] if "output" in names else [])]:
        for phase in phases:
            spent.update(units.get(unit_of(name), {}).get(phase, {}))
    return spent


def stage_durations(stages, units):
    """Seconds of each stage's F, B, I and W in one microbatch, for `pipeline.timeline`.

    Args:    stages, their module names; units, of `time_units`. Of a backward split in two, each
             half is supposed to take as long.
    """
    durations = []
    for names in stages:
        forward = spent_on(names, units, ["forward"]).total()
        backward = spent_on(names, units, ["recomputed", "backward"]).total()
        durations.append({"F": forward, "B": backward, "I": backward / 2, "W": backward / 2})
    return durations


def time_schedule(args, stages, durations):
    """Of one local batch, (seconds, [seconds that each pp rank computes], the schedule's facts).

    Draws OUT/timeline.svg where there is a pipeline.
    """
    if args.pp == 1:
        busy = [durations[0]["F"] + durations[0]["B"]]
        return busy[0], busy, None
    n_microbatches = args.local_batch_size // args.microbatch_size
    shape = (args.pp_schedule, args.pp, n_microbatches, args.stages_per_rank)
    even, uneven = pipeline.timeline(*shape), pipeline.timeline(*shape, durations=durations)
    bubble = pipeline.bubble_fraction(uneven)
    title = f"One local batch: {args.pp_schedule}, {n_microbatches} microbatches, idle {bubble:.1%}"
    Path(args.out, "timeline.svg").write_text(pipeline.draw_svg(uneven, title, "seconds"))
    busy = [sum(op.end - op.start for op in ops) for ops in uneven]
    schedule = {
        "bubble_if_stages_were_equal": pipeline.bubble_fraction(even),
        "bubble": bubble,
        "work": [b * args.pp / sum(busy) for b in busy],  # of each pp rank, 1 on average
        "in_flight": pipeline.peaks_in_flight(even),  # microbatches x stages, of each pp rank
    }
    return max(ops[-1].end for ops in uneven), busy, schedule


def estimate(args, config, rows):
    """(How long a step takes on GPUs, and the schedule's facts or None): simulation.json has both.

    Args:    rows of traced ranks, the first and the last stage's among them.
    """
    rates, stages = rates_of(args), train.stage_names(args, config)
    n_data_ranks = args.dp_replicate * args.dp_shard
    n_batches = args.global_batch_size // (args.local_batch_size * n_data_ranks)
    n_runs = n_batches * (args.local_batch_size // args.microbatch_size if args.pp > 1 else 1)
    units = time_units(rows, rates, n_runs)
    batch_s, busy_s, schedule = time_schedule(args, stages, stage_durations(stages, units))
    fsdp_s = 0.0
    for row in rows:
        sent_s = sum(
            n["sent_bytes"] / rates[axis]
            for axis in ("fsdp", "efsdp", "dp_replicate")
            for n in row["collectives"].get(axis, {}).values()
        )
        fsdp_s = max(fsdp_s, sent_s - n_batches * busy_s[row["coordinates"]["pp"]])
    update_s = spent_on(["optimizer"], units, ["update"]).total() * n_runs
    step_s = n_batches * batch_s + fsdp_s + update_s
    spent = Counter()
    for names in stages:
        spent.update(spent_on(names, units))
    mean = {what: s * n_runs / args.pp for what, s in spent.items()}  # of an average rank
    per_device = args.global_batch_size * args.seq_len / step_s / args.world_size
    flops = per_device * model.flops_per_token(config, args.seq_len)
    return {
        "device": args.device_name,
        "step_s": step_s,
        "tokens_per_s": per_device * args.world_size,
        "tokens_per_s_per_device": per_device,
        # of bf16 alone, as train.py's: with float8, matmuls of two peaks are mixed (paper §3.2)
        "mfu": None if args.float8 else flops / 1e12 / bf16_peak(args),
        "exposed": {  # seconds of an average rank's step in which no matmul and no attention runs
            "bubble": n_batches * (batch_s - sum(busy_s) / args.pp),
            **{axis: mean.get(axis, 0.0) for axis in ("tp", "cp", "ep")},
            "fsdp": fsdp_s,
            "memory": mean["memory"] + update_s,
        },
    }, schedule


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
    """The flags of the largest batch with which the ranks stay within the limit; None if none does.

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
    return as_text(batch_flags(args, fitting)) if fitting else None


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
        if now_bytes <= limit_bytes:
            break
        peak = reserved_with(typed, flags | change, ranks)
        if peak < 0.99 * now_bytes:
            flags, now_bytes = flags | change, peak
            found.append((as_text(flags), peak))
    return found


def find_fit(typed, args, rows):
    """Say whether the traced ranks fit into --gpu-memory-gib, and with which batch or flags."""
    limit_bytes, now_bytes = args.gpu_memory_gib * 2**30, max(row["reserved_bytes"] for row in rows)
    ranks, fits = [row["rank"] for row in rows], now_bytes <= limit_bytes
    watch.print_pairs([("fit", (
        f"{readable(now_bytes)} reserved for tensors {'fit' if fits else 'do NOT fit'} into "
        f"--gpu-memory-gib {args.gpu_memory_gib:g}; CUDA itself and NCCL take some on top"
    ))])  # fmt: skip
    changes = find_changes(typed, args, ranks, now_bytes=now_bytes, limit_bytes=limit_bytes)
    watch.print_pairs([("", f"{readable(peak)} with {flags}") for flags, peak in changes])
    largest = find_largest_batch(typed, args, ranks, now_bytes=now_bytes, limit_bytes=limit_bytes)
    watch.print_pairs([("", f"largest batch, all else as given: {largest or 'none fits'}")])
    return {"fits": fits, "changes": changes, "largest_batch": largest}


# ---- 6. What is printed and drawn --------------------------------------------------------------


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


KIND_COLORS = ("#6baed6", "#fd8d3c", "#9e9ac8", "#fdd0a2", "#a1d99b", "#d9d9d9")  # as KINDS


def draw_memory(columns, reserved_bytes, rank):
    """What a rank holds in the course of a step, stacked by kind, as an SVG picture.

    Args:    columns, of `Account.columns`: from left to right are allocations, not seconds.
    """
    left, top, width, height = 60, 44, pipeline.PAGE - 70, 300
    bottom, stacked = top + height, torch.tensor(columns).cumsum(1).T.tolist()
    x_step, y_step = width / (len(columns) - 1), height / reserved_bytes
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" '
        f'viewBox="0 0 {pipeline.PAGE} {bottom + 12}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="6" y="16" font-size="13">Memory of rank {rank} in a step, allocation by '
        "allocation</text>",
    ]
    for i in reversed(range(len(KINDS))):  # the sums of all kinds first, smaller ones over them
        x, color = left + 130 * i, KIND_COLORS[i]
        parts.append(f'<rect x="{x}" y="25" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="35">{KINDS[i]}</text>')
        sums = enumerate(stacked[i])
        points = [f"{left + at * x_step:.1f},{bottom - n * y_step:.1f}" for at, n in sums]
        points = " ".join([f"{left},{bottom}", *points, f"{left + width},{bottom}"])
        parts.append(f'<polygon fill="{color}" points="{points}"/>')
    peak = max(stacked[-1])
    marks = (("reserved", 0, reserved_bytes), ("peak", stacked[-1].index(peak), peak))
    for name, at, n_bytes in marks:
        x, y = round(left + at * x_step), round(bottom - n_bytes * y_step)
        parts.append(f'<path d="M{left} {y}H{left + width}" stroke="#444" stroke-dasharray="4"/>')
        parts.append(f'<text x="{x + 4}" y="{y + 12}">{name} {readable(n_bytes)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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
        (args.compile, "of --compile, what it fuses in a block and in the loss is traced"),
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


def describe_time(args, found, schedule):
    """(label, text) pairs: the step's estimated time, and a pipeline's time line."""
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%}"
    exposed = [f"{what} {s / found['step_s']:.0%}" for what, s in found["exposed"].items() if s]
    lines = [
        f"{found['step_s']:.3g} s a step, estimated from the rates of {found['device']}: "
        f"{found['tokens_per_s_per_device']:,.0f} tokens/s a GPU{mfu}",
        f"of it without a matmul or attention: {', '.join(exposed)}",
    ]
    if schedule:
        slowest = schedule["work"].index(max(schedule["work"]))
        lines += [
            f"bubble {schedule['bubble']:.1%}; pp rank {slowest} works most, "
            f"{max(schedule['work']):.2f} of the mean; drawn into {args.out}/timeline.svg",
            f"chunks in flight on each pp rank: {schedule['in_flight']}",
        ]
    return [("time", "\n".join(lines))]


# ---- 7. The program ----------------------------------------------------------------------------


def read_rates(text):
    """bf16=460,memory=2040 -> {"bf16": 460.0, "memory": 2040.0}"""
    known, rates = [*SHARES, "attention", "hidden"], {}
    for pair in text.split(","):
        what, _, rate = pair.partition("=")
        if what not in known:
            raise argparse.ArgumentTypeError(f"has no rate {what!r}: try {', '.join(known)}")
        rates[what] = train.more_than_zero(rate or "0")
    if rates.get("hidden", 0) >= 1:
        raise argparse.ArgumentTypeError("hides all of tp's bytes: hidden must be less than 1")
    return rates


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
    add("--device-name", choices=DEVICES, default="h100",
        help="whose published rates the time is estimated from -> simulate.py:rates_of")
    add("--rates", type=read_rates, default={}, metavar="WHAT=RATE,..", help="measured ones "
        f"instead: {', '.join(TERA)} in TFLOP/s; memory, nvlink, nic in GB/s; hidden, a share "
        "-> simulate.py:rates_of")
    add("--gpu-memory-gib", type=train.more_than_zero, metavar="GIB",
        help="of one GPU: find what would fit into it -> simulate.py:find_fit")
    return train.parse_args(argv, parser)


def resolve(typed, **changes):
    """(args, ModelConfig) of the flags as typed, some of them changed; their rules are checked."""
    args = argparse.Namespace(**vars(typed) | changes)
    args.init_from = None  # no weights are read
    memory_bytes = args.gpu_memory_gib and round(args.gpu_memory_gib * 2**30)
    hardware = train.Hardware("cuda", (10, 0), memory_bytes)
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
    out.mkdir(parents=True, exist_ok=True)
    ends = default_ranks(args)  # whose stages the time needs
    asked = sorted(set(args.ranks or ends))
    traced = trace_ranks([(args, config, rank) for rank in sorted({*asked, *ends})])
    rows = [row for row in traced if row["rank"] in asked]
    for row in traced:
        picture = draw_memory(row.pop("columns"), row["reserved_bytes"], row["rank"])
        (out / f"memory-{row['rank']}.svg").write_text(picture)
    print(rows[0]["plan"], end="")
    watch.print_pairs(describe_ranks(args, rows))
    time_found, schedule = estimate(args, config, traced)
    watch.print_pairs(describe_time(args, time_found, schedule))
    result = {"flags": vars(args), "model": dataclasses.asdict(config), "ranks": rows}
    result["model_flops_per_token"] = model.flops_per_token(config, args.seq_len)
    result |= {"estimate": time_found} | ({"schedule": schedule} if schedule else {})
    path = out / "simulation.json"
    path.write_text(json.dumps(result, indent=1))  # already, since what follows may take minutes
    if args.gpu_memory_gib:
        result["fit"] = find_fit(typed, args, rows)
        path.write_text(json.dumps(result, indent=1))
    seconds = max(row["seconds"] for row in traced)
    watch.print_pairs([("done", f"traced in {seconds:.0f} s a rank; all in {path}")])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            main()
        except (ValueError, watch.TrainingError) as error:
            sys.exit(f"simulate.py: {error}")

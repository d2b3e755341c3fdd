"""Pipeline parallelism: the model cut into stages, and one call that trains them.

A stage is a run of neighbouring modules. The local batch is cut into M microbatches: stage 0
embeds one and sends its activation on, the last stage computes the loss, and gradients travel back
the same way. With S stages on p ranks, a rank holds v = S / p of them. A schedule is the order in
which each rank takes its forwards and backwards. 1F1B ("one forward, one backward") on 4 ranks with
6 microbatches, a column per unit of time, digits forward, letter pairs backward, dots idle:

    time    0         10        20
    rank 0  0123......AA4BB5CC.DD.EE.FF
    rank 1  .012....AA3BB4CC5DD.EE.FF..
    rank 2  ..01..AA2BB3CC4DD5EE.FF....
    rank 3  ...0AA1BB2CC3DD4EE5FF......

(`python pipeline.py --pp-schedule 1F1B --pp 4 --n-microbatches 6` draws it, and any other.) With
equal stages and a backward as long as two forwards, a rank works 3 M units and waits 3 (p-1) for
the pipeline to fill and drain. The bubble, the idle share of its time, is (p-1) / (M + p-1):

    schedule                v      bubble                  most chunks in flight on rank r
    GPipe                   1      (p-1) / (M + p-1)       M
    1F1B                    1      (p-1) / (M + p-1)       min(M, p-r)
    LoopedBFS               >= 2   (p-1) / (v M + p-1)     v M
    Interleaved1F1B         >= 2   (p-1) / (v M + p-1)     min(v M, 2(p-r-1) + (v-1)p + 1)
    InterleavedZeroBubble*  >= 2   (p-1) / (3 v M + p-1)   v p
    ZBVZeroBubble*          2      (p-1) / (3 v M + p-1)   2 p
    DualPipeV*              2      (p-1) / (3 v M + p-1)   2 p + 1

A chunk is one microbatch on one stage, 1/v of the rank's layers; in flight means that its
activations wait for the backward. So 1F1B has GPipe's bubble with less memory, and interleaving
divides the bubble by about v. The rows with v >= 2 hold for M >= p (ZBVZeroBubble: 2p - 1), the
chunks also ask that p divides M. The starred ones split a backward into the gradients of the input
(I), which the previous stage waits for, and of the weights (W), which nobody waits for and which
fill bubbles. Op-level SAC, compiled blocks and `--reshard always` do not survive that split, and
with `--ac full` a block runs forward again in I and once more for each weight matrix in W: up to 8
times (3.5 to 8 simulated with the zero-bubble schedules on 2 ranks, 1 to 1.7 with DualPipeV).

    sent forward    1 activation (microbatch, T/(cp*tp), D) per microbatch and border of stages
    sent backward   its gradient, of the same shape and dtype

Nothing else, whatever the number of parameters: hence pp is the outermost axis, over the slowest
links. torch keeps a receive buffer for every microbatch and direction, under 1F1B too.

Rank r holds the stages r, r + p, r + 2p ... (a loop), or under ZBVZeroBubble and DualPipeV r and
S-1-r (a V, which puts the last stage, and so the loss, on rank 0).

Three traps, each a wrong gradient without an error:

    * a second schedule object, for evaluation, would share the stages, and gradients come out zero:
      there is one object, and `evaluate` borrows it;
    * torch divides gradients by M after the backward unless `scale_grads=False`, but our loss is
      already divided by the number of valid tokens of the whole global batch;
    * a split backward finds no weights that FSDP has freed: `build_schedule` has it keep them.

Left out: tracing a model into stages, embeddings tied over two stages, skip connections.

Sources: TorchTitan (arXiv 2410.06511) §2.1.4, Appendix A and B.4; GPipe (arXiv 1811.06965); 1F1B
and interleaving, Megatron-LM (arXiv 2104.04473) §2.2; LoopedBFS (arXiv 2211.05953); zero bubble
(arXiv 2401.10241); DualPipe, DeepSeek-V3 (arXiv 2412.19437).
"""

import argparse
import copy
import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

# ---- 1. Schedules ------------------------------------------------------------------------------
#
# Where a function takes a schedule's name, the path of a CSV file will do as well: a row per rank,
# a cell per computation, such as 0F0,0F1,0B0,0B1 (stage, kind, microbatch).

SINGLE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)


def is_multi_stage(schedule):
    """Whether a rank holds several stages (a CSV schedule may hold any number)."""
    return schedule not in SINGLE_STAGE


def splits_backward(schedule):
    """Whether backwards are split in two: no op-level SAC, compile or `--reshard always` then."""
    if schedule in SCHEDULES:
        return schedule in ("InterleavedZeroBubble", *V_SHAPED)
    return any(kind == "I" for row in read_csv(schedule) for kind, _, _ in row)


def flatten_actions(actions):
    """torch's actions as (kind, stage, microbatch), without idle steps and communication."""
    return [
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for action in actions
        if action is not None
        for part in action.sub_actions or (action,)  # DualPipeV pairs a forward with a backward
        if part.is_compute_op
    ]


def read_csv(path):
    """Return a schedule file's computations: [[(kind, stage, microbatch), ...] per rank].

    Raises:  ValueError if the file cannot be read or holds anything else.
    """
    try:
        with open(path, newline="") as file:
            cells = [[cell.strip() for cell in row] for row in csv.reader(file)]
        rows = [[_Action.from_str(cell) for cell in row] for row in cells]
        for cell, action in zip(sum(cells, []), sum(rows, []), strict=True):
            if action and (str(action) != cell or not action.is_compute_op):
                raise RuntimeError(f"{cell} is no computation")  # torch takes a good beginning
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ValueError(
            f"--pp-schedule-csv {path} cannot be read as a schedule ({error}): it needs a row per "
            "rank of cells like 0F0 (stage, F B I or W, microbatch): mend it or use --pp-schedule"
        ) from error
    return [flatten_actions(row) for row in rows]


def count_stages(schedule, pp, stages_per_rank=None):
    """Number of stages S over all ranks; None stands for 1 per rank, or 2, or what the file holds.

    Raises:  ValueError if the schedule cannot have that many stages on a rank.
    """
    if schedule not in SCHEDULES:
        stages = {stage for row in read_csv(schedule) for _, stage, _ in row}
        n_stages = 1 + max(stages, default=-1)
        if stages_per_rank not in (None, n_stages / pp):
            raise ValueError(
                f"--stages-per-rank {stages_per_rank} conflicts with --pp-schedule-csv {schedule}, "
                f"which has {n_stages} stages for --pp {pp}: leave --stages-per-rank to the file"
            )
        return n_stages
    exactly = {**dict.fromkeys(SINGLE_STAGE, 1), **dict.fromkeys(V_SHAPED, 2)}.get(schedule)
    v = (exactly or 2) if stages_per_rank is None else stages_per_rank
    if v < 2 if exactly is None else v != exactly:
        raise ValueError(
            f"--stages-per-rank {v} conflicts with --pp-schedule {schedule}, which needs "
            f"{f'exactly {exactly}' if exactly else 'at least 2'}: leave --stages-per-rank out, or "
            f"take --pp-schedule {'1F1B' if v < 2 else 'Interleaved1F1B'}"
        )
    return pp * v


def stages_of_rank(pp_rank, pp, n_stages, schedule):
    """Indices of the stages that a pp rank holds, ascending."""
    if schedule not in SCHEDULES:
        return sorted({stage for _, stage, _ in read_csv(schedule)[pp_rank]})
    if schedule in V_SHAPED:
        return [pp_rank, n_stages - 1 - pp_rank]
    return list(range(pp_rank, n_stages, pp))


def check_schedule(schedule, *, pp, n_microbatches, stages_per_rank=None):
    """Raise ValueError, naming the flags, if torch cannot run this schedule. No process group."""
    given = f"{n_microbatches} microbatches (--local-batch-size / --microbatch-size)"
    if min(pp, n_microbatches) < 1:
        raise ValueError(f"--pp {pp} with {given} is no pipeline: each must be 1 or more")
    n_stages = count_stages(schedule, pp, stages_per_rank)
    if schedule not in SCHEDULES:
        problem = _csv_problem(schedule, n_stages, pp=pp, n_microbatches=n_microbatches)
        if problem:
            raise ValueError(
                f"--pp-schedule-csv {schedule} conflicts with --pp {pp} and {given}: {problem}, "
                "but it needs a row per rank and, of each stage and microbatch, one F, then one B "
                "or one I and W: mend the file, or change --pp or the batch"
            )
        return
    conflict = f"--pp-schedule {schedule} with --pp {pp} conflicts with {given}"
    least = {"1F1B": pp, "DualPipeV": n_stages}.get(schedule, 1)
    if n_microbatches < least:
        raise ValueError(
            f"{conflict}: it needs one for each of its {least} stages: raise --local-batch-size, "
            f"lower --microbatch-size, or take {'GPipe' if n_stages == pp else 'ZBVZeroBubble'}"
        )
    rounds = max(1, n_microbatches // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and n_microbatches % rounds:
        raise ValueError(
            f"{conflict}: they must divide into {n_microbatches} // {pp} = {rounds} equal rounds: "
            f"try {rounds * pp} or {(rounds + 1) * pp} microbatches, or LoopedBFS"
        )


def _csv_problem(path, n_stages, *, pp, n_microbatches):
    """What keeps a file from being a complete, executable schedule here, or None."""
    rows = read_csv(path)
    if len(rows) != pp or not all(rows):
        return f"it has {sum(map(bool, rows))} rows with computations"
    kinds = defaultdict(str)  # (stage, microbatch) -> what is done with it
    for kind, stage, i in (op for row in rows for op in row):
        kinds[stage, i] += kind
    expected = {(stage, i) for stage in range(n_stages) for i in range(n_microbatches)}
    for stage, i in sorted(expected | kinds.keys()):
        done = "".join(sorted(kinds[stage, i]))
        if (stage, i) not in expected or done not in ("BF", "FIW"):
            return f"of microbatch {i} stage {stage} does {done or 'nothing'}"
    try:
        _mock_schedule(path, pp, n_microbatches, None)
    except AssertionError as error:  # torch finds the order impossible
        return str(error).splitlines()[0]
    return None


# ---- 2. From the model to stages ---------------------------------------------------------------


def split_layers(n_layers, n_stages, *, input_weight=1, output_weight=1):
    """Return the module names of each stage, dividing the layers as evenly as may be.

    tok_embeddings counts as `input_weight` layers, norm and output together as `output_weight`: the
    first and the last stage give up as many. A remainder goes to the first stages, one each.
    405B on 16 stages: 126 layers + 2 = 16 * 8, so 7, 8, ... 8, 7. An end may hold no block.

    Raises:  ValueError if the stages cannot be filled.
    Source:  paper §2.1.4; the rule is the one of the paper's system.
    """
    total = n_layers + input_weight + output_weight
    flags = f"--pp times --stages-per-rank is {n_stages}, which conflicts with n_layers {n_layers}"
    if not 1 <= n_stages <= total:
        raise ValueError(
            f"{flags}: with tok_embeddings and output that counts as {total}, and a stage needs 1: "
            f"take 1 to {total} stages"
        )
    base, extra = divmod(total, n_stages)
    heaviest = max(input_weight, output_weight)
    if n_stages > 1 and heaviest > base:
        raise ValueError(
            f"{flags}: a stage counts {base} layers, and tok_embeddings or output alone weighs "
            f"{heaviest}: take fewer stages, or cut by name with --pp-split"
        )
    sizes = [base + (stage < extra) for stage in range(n_stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    starts = [sum(sizes[:stage]) for stage in range(1, n_stages)]
    # a last stage without a block starts at norm
    return split_at(n_layers, [f"layers.{i}" if i < n_layers else "norm" for i in starts])


def split_at(n_layers, points):
    """Return the module names of each stage, a new stage beginning at each of the named modules.

    Raises:  ValueError if a point is not layers.N or norm, or the points do not rise.
    Source:  paper B.4, whose split points name the module before which the model is cut.
    """
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    cuts = [names.index(point) if point in names[1:-1] else 0 for point in points]
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise ValueError(
            f"--pp-split {','.join(points)} conflicts with n_layers {n_layers}: points rise, each "
            f"is norm or layers.N with N below {n_layers}: try layers.{n_layers // 2}"
        )
    return [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def cut_stage(model, names):
    """Return a copy of the full model (on the meta device) that holds only the named modules.

    Blocks keep their global number, so layers.17.attention.wq.weight is that name on any split.
    """
    stage = copy.deepcopy(model)
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(stage, name, None)
    for number in list(stage.layers):
        if f"layers.{number}" not in names:
            del stage.layers[number]
    return stage


# ---- 3. Training and evaluating through a schedule ---------------------------------------------


def _make_schedule(stages, schedule, n_microbatches, loss_fn=None):
    """torch's schedule object, for real stages or for stand-ins."""
    if schedule not in SCHEDULES:
        runtime = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn, scale_grads=False)
        runtime._load_csv(schedule)
        return runtime
    schedule_class = get_schedule_class(schedule)
    stages = stages if is_multi_stage(schedule) else stages[0]
    return schedule_class(stages, n_microbatches, loss_fn=loss_fn, scale_grads=False)


def build_schedule(stage_modules, schedule, *, n_microbatches, loss_fn, pp_mesh, microbatch):
    """Return the one schedule object of this rank.

    Args:    stage_modules, in the order of `stages_of_rank`; loss_fn(output, labels,
             n_valid_tokens=...); microbatch, two examples on the meta device: tokens (microbatch,
             T/cp) int64 and the activation sent, (microbatch, T/(cp*tp), D), in the blocks' dtype.
    When:    after FSDP has been applied.
    Note:    knowing these shapes, torch runs no extra forward and backward to find them. The last
             stage's output goes to loss_fn and is never sent, so its shape need not be told: plain
             or vocabulary-sharded logits, or the input of a chunked head.
    Source:  paper §2.1.4 and Appendix A.
    """
    pp, pp_rank = pp_mesh.size(), pp_mesh.get_local_rank()
    stages_per_rank = len(stage_modules) if schedule in SCHEDULES else None
    check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=stages_per_rank)
    n_stages = count_stages(schedule, pp, stages_per_rank)
    indices = stages_of_rank(pp_rank, pp, n_stages, schedule)
    tokens, activation = microbatch
    activation = activation.detach().requires_grad_()  # its gradient is sent back
    for module in stage_modules if splits_backward(schedule) else ():
        if isinstance(module, FSDPModule):
            # I looks for the weights in the graph; freed ones are not found, and W skips them
            module.set_reshard_after_forward(False)
    stages = [
        PipelineStage(
            module,
            index,
            n_stages,
            torch.device(pp_mesh.device_type),
            input_args=tokens if index == 0 else activation,
            output_args=activation,
            group=pp_mesh.get_group(),
        )
        for index, module in zip(indices, stage_modules, strict=True)
    ]
    return _make_schedule(stages, schedule, n_microbatches, loss_fn)


def skip_warmup(schedule):
    """For a fake process group: start without the ranks' vote on whether all shapes are known.

    No answer would come there. A real group needs it: it opens the neighbours' connections.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # new in torch 2.13

    def set_static(stages, _has_backward, _p2p_done):
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = set_static


def _local_stages(schedule):
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


def _run(step, schedule, inputs, labels, n_valid_tokens):
    """Call schedule.step or schedule.eval; 0-d sum of the losses, zero without the last stage."""
    n_rows = schedule._n_microbatches * _local_stages(schedule)[0]._user_meta.inputs[0].shape[0]
    assert inputs.shape[0] == n_rows, f"a schedule for {n_rows} sequences got {inputs.shape[0]}"
    losses = []
    step(
        inputs,
        target=labels,
        losses=losses,
        return_outputs=False,
        loss_kwargs={"n_valid_tokens": n_valid_tokens},
    )
    if not losses:
        return torch.zeros((), device=inputs.device)
    plain = [x.full_tensor() if isinstance(x, DTensor) else x for x in losses]  # loss parallel
    return torch.stack(plain).detach().sum()


def run_schedule(schedule, inputs, labels, n_valid_tokens):
    """Forward and backward of the local batch; gradients add to `.grad`.

    Args:    inputs and labels (local_batch, T/cp), the same on every pp rank; n_valid_tokens, the
             divisor of the loss: a tensor, so that nothing waits for its value.
    Returns: the sum of the microbatches' losses on the rank with the last stage, else zero: the
             loss is the sum over pp. Under loss parallel, call it inside `loss_parallel()`.
    Costs:   no host sync after the first run; under FSDP one reduce-scatter per parameter group,
             after the last microbatch, and again for each further run that accumulates.
    """
    return _run(schedule.step, schedule, inputs, labels, n_valid_tokens)


def forward_only(actions, stages):
    """One rank's actions, communication included, without what belongs to the backward.

    FSDP gathers before and frees after them: without backwards, torch's own places for that may
    gather a stage that is not used, which it refuses.
    """
    parts = [part for action in actions for part in action.sub_actions or (action,)]
    forwards = [a for a in parts if a.computation_type.value in ("F", "SEND_F", "RECV_F")]
    gather = [_Action.from_str(f"{stage.stage_index}UNSHARD") for stage in stages]
    free = [_Action.from_str(f"{stage.stage_index}RESHARD") for stage in stages]
    return gather + forwards + free


@torch.no_grad()
def evaluate(schedule, inputs, labels, n_valid_tokens):
    """The loss as in `run_schedule`, forward only, between optimizer steps.

    torch's own `eval` walks through the backwards too, and fails under the V-shaped schedules:
    meanwhile a multi-stage one gets a forward-only order. The last stage would also keep every
    microbatch's logits for a backward that never comes: all but the newest are let go.

    Note:    on changing to or from evaluation torch drops the gradients of FSDP modules.
    """
    stages, loss_fn = _local_stages(schedule), schedule._loss_fn
    orders = getattr(schedule, "pipeline_order_with_comms", None)  # multi-stage ones have it

    def forget_then_loss(output, labels, n_valid_tokens):
        cache = stages[-1].fwd_cache  # stages ascend: the last one here is the one with the loss
        for i in list(cache)[:-1]:
            del cache[i]
        return loss_fn(output, labels, n_valid_tokens=n_valid_tokens)

    try:
        schedule._loss_fn = forget_then_loss
        if orders:
            rank = schedule.rank
            schedule.pipeline_order_with_comms = {rank: forward_only(orders[rank], stages)}
        return _run(schedule.eval, schedule, inputs, labels, n_valid_tokens)
    finally:
        schedule._loss_fn = loss_fn
        if orders:
            schedule.pipeline_order_with_comms = orders


# ---- 4. Time line, bubble, microbatches in flight ----------------------------------------------


class Op(NamedTuple):
    """One computation on the time line."""

    kind: str  # F forward, B backward, or its halves I (input) and W (weights)
    stage: int
    microbatch: int
    start: float  # in units of one stage's forward of one microbatch
    end: float


DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def _mock_schedule(schedule, pp, n_microbatches, stages_per_rank):
    """The schedule object with stand-ins for stages: torch reads no more than this of them."""
    n_stages = count_stages(schedule, pp, stages_per_rank)
    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=n_stages, submod=None)
    return _make_schedule([stage] * max(1, n_stages // pp), schedule, n_microbatches)


def compute_order(schedule):
    """What each rank computes, in order: [[(kind, stage, microbatch), ...] per rank]."""
    if not isinstance(schedule, Schedule1F1B):
        return [flatten_actions(row) for _, row in sorted(schedule.pipeline_order.items())]
    # torch 2.13's own list has the last rank start at microbatch 1, but what it runs is this
    p, m = schedule._num_stages, schedule._n_microbatches
    rows = []
    for stage in range(p):
        forwards = [("F", stage, i) for i in range(m)]
        backwards = [("B", stage, i) for i in range(m)]
        warmup = min(m, p - stage)  # forwards until the first backward can arrive
        steady = [op for pair in zip(backwards, forwards[warmup:], strict=False) for op in pair]
        rows.append(forwards[:warmup] + steady + backwards[m - warmup :])
    return rows


def timeline(schedule, pp, n_microbatches, stages_per_rank=None, *, durations=None):
    """Return when each rank computes what, [[Op, ...] per rank], from torch's schedule object.

    A computation starts once its rank is free and its input is there; communication takes no time.
    `durations`, a dict like DURATION per stage, are for stages that differ.
    """
    check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=stages_per_rank)
    n_stages = count_stages(schedule, pp, stages_per_rank)
    pending = compute_order(_mock_schedule(schedule, pp, n_microbatches, stages_per_rank))
    durations = durations or [DURATION] * n_stages
    rows = [[] for _ in range(pp)]
    ends = {}  # (F or B, stage, microbatch) -> when its result is there
    while any(pending):
        waiting = sum(map(len, pending))
        for row, ops in zip(rows, pending, strict=True):
            while ops and (needs := _needs(*ops[0], n_stages)) <= ends.keys():
                kind, stage, i = ops.pop(0)
                start = max([ends[need] for need in needs] + [row[-1].end if row else 0])
                row.append(Op(kind, stage, i, start, start + durations[stage][kind]))
                if kind != "W":
                    ends["F" if kind == "F" else "B", stage, i] = row[-1].end
        assert sum(map(len, pending)) < waiting, "deadlock: every rank waits for another"
    return rows


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


def _needs(kind, stage, microbatch, n_stages):
    """The results, as (F or B, stage, microbatch), that a computation waits for."""
    if kind == "F":
        return {("F", stage - 1, microbatch)} if stage > 0 else set()
    if kind == "W":
        return {("B", stage, microbatch)}
    arriving = {("B", stage + 1, microbatch)} if stage < n_stages - 1 else set()
    return {("F", stage, microbatch)} | arriving


def bubble_fraction(rows):
    """Idle share of all ranks' time, from the first start to the last end."""
    busy = sum(op.end - op.start for row in rows for op in row)
    return 1 - busy / (len(rows) * max(row[-1].end for row in rows))


def closed_form_bubble(schedule, pp, n_microbatches, stages_per_rank):
    """The bubble fraction of the header's table, or None where it gives none."""
    p, m, v = pp, n_microbatches, stages_per_rank
    enough = {**dict.fromkeys(SINGLE_STAGE, 1), "ZBVZeroBubble": 2 * p - 1}.get(schedule, p)
    if schedule not in SCHEDULES or m < enough:
        return None
    return (p - 1) / ((3 if splits_backward(schedule) else 1) * v * m + p - 1)


def peaks_in_flight(rows):
    """Per rank, the most chunks that have been through forward and still need their backward."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(itertools.accumulate(change[op.kind] for op in row)) for row in rows]


# ---- 5. The tool: draw a schedule --------------------------------------------------------------

LEGEND = """microbatches 0, 1, 2 ..:  forward 0 1 2 ..   backward AA BB CC ..   or its two halves,
input A B C .. and weights a b c ..   (from microbatch 10 on they start again)   . idle"""


def draw_text(rows):
    """The time line as text: a line per rank and stage, a column per unit of time."""
    span = max(row[-1].end for row in rows)
    lines = [f"{'time':<17}" + "".join(f"{t:<10}" for t in range(0, span, 10)).rstrip()]
    first = {"F": "0", "B": "A", "I": "A", "W": "a"}
    for rank, row in enumerate(rows):
        cells = {stage: ["."] * span for stage in sorted({op.stage for op in row})}
        for op in row:
            letter = chr(ord(first[op.kind]) + op.microbatch % 10)
            for stage, line in cells.items():  # blank where the rank is busy with another stage
                line[op.start : op.end] = (letter if stage == op.stage else " ") * (
                    op.end - op.start
                )
        for stage, line in cells.items():
            lines.append(f"rank {rank:<2} stage {stage:<3}{''.join(line)}".rstrip())
    return "\n".join(lines)


def draw_svg(rows):
    """The time line as an SVG picture, a row per rank; its later stages have thicker frames."""
    unit, height, left = 18, 24, 60  # pixels
    colors = {"F": "#9ecae1", "B": "#a1d99b", "I": "#c7e9c0", "W": "#fdd0a2"}
    width = left + unit * max(row[-1].end for row in rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="10" '
        f'viewBox="0 0 {width:g} {height * len(rows) + 10}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for rank, row in enumerate(rows):
        y = 5 + rank * height
        parts.append(f'<text x="6" y="{y + 15}">rank {rank}</text>')
        stages = sorted({op.stage for op in row})
        for op in row:
            x, w = left + unit * op.start, unit * (op.end - op.start)
            frame = 0.5 + 1.5 * stages.index(op.stage)
            parts.append(
                f'<rect x="{x:g}" y="{y + 2}" width="{w:g}" height="{height - 4}" stroke="#444" '
                f'stroke-width="{frame}" fill="{colors[op.kind]}">'
                f"<title>{op.kind} of microbatch {op.microbatch} on stage {op.stage}</title></rect>"
                f'<text x="{x + w / 2:g}" y="{y + 15}" text-anchor="middle">{op.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def parse_args():
    parser = argparse.ArgumentParser(
        description="Draw a pipeline schedule: each rank's time line, the bubble and the memory.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pp-schedule", choices=SCHEDULES, default="1F1B", help="default 1F1B -> timeline")
    add("--pp", type=int, default=4, help="pipeline ranks (default 4) -> timeline")
    add("--n-microbatches", type=int, default=8, help="per schedule run (default 8) -> timeline")
    add("--stages-per-rank", type=int, help="default 1, or 2 where needed -> count_stages")
    add("--pp-schedule-csv", metavar="FILE", help="a schedule of one's own -> read_csv")
    add("--svg", metavar="FILE", help="draw it into this file as well -> draw_svg")
    parser.error = lambda message: sys.exit(f"pipeline.py: {message}")  # one line, exit status 1
    return parser.parse_args()


def main(args):
    schedule = args.pp_schedule_csv or args.pp_schedule
    rows = timeline(schedule, args.pp, args.n_microbatches, args.stages_per_rank)
    stages_per_rank = count_stages(schedule, args.pp, args.stages_per_rank) / args.pp
    closed_form = closed_form_bubble(schedule, args.pp, args.n_microbatches, stages_per_rank)
    print(
        f"{schedule}: {args.pp} ranks, {stages_per_rank:g} stages each, "
        f"{args.n_microbatches} microbatches\n\n{draw_text(rows)}\n\n{LEGEND}\n"
    )
    formula = "no closed form" if closed_form is None else f"closed form {closed_form:.4f}"
    print(f"bubble fraction  {bubble_fraction(rows):.4f}   ({formula})")
    print(f"most in flight   {peaks_in_flight(rows)}   (microbatches x stages, per rank)")
    if args.svg:
        Path(args.svg).write_text(draw_svg(rows))
        print(f"drawn into       {args.svg}")


if __name__ == "__main__":
    try:
        main(parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"pipeline.py: {error}")

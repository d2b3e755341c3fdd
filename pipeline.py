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
the pipeline to fill and drain. The bubble, the idle share of its time, is (p-1) / (M + p-1): 27 %
for 4 ranks and 8 microbatches. What a schedule needs stands in SCHEDULES (§1), what it gives here:

    schedule               bubble                 most chunks in flight on rank r
    GPipe                  (p-1) / (M + p-1)      M
    1F1B                   (p-1) / (M + p-1)      min(M, p-r)
    LoopedBFS              (p-1) / (v M + p-1)    v M
    Interleaved1F1B        (p-1) / (v M + p-1)    min(v M, 2(p-r-1) + (v-1)p + 1)
    InterleavedZeroBubble  (p-1) / (3 v M + p-1)  v p
    ZBVZeroBubble          (p-1) / (3 v M + p-1)  2 p
    DualPipeV              (p-1) / (3 v M + p-1)  2 p + 1

A chunk is one microbatch on one stage, 1/v of the rank's layers; it is in flight while its
activations wait for the backward. So 1F1B has GPipe's bubble with less memory, and interleaving
divides the bubble by about v. The bubbles of schedules with v >= 2 hold for M >= p (ZBVZeroBubble:
2p - 1), their numbers of chunks if p also divides M.

The last three schedules split a backward in two: the gradients of the input (I), for which the
previous stage waits, and those of the weights (W), for which nobody waits, so that they can fill
bubbles. Op-level SAC, compiled blocks and `--reshard always` do not survive that split. With `--ac
full` a block's forward is repeated in I and once more for each weight matrix in W, up to 8 times.
On 2 ranks, 3.5 to 8 repetitions were simulated for the zero-bubble schedules and 1 to 1.7 for
DualPipeV.

    sent forward    1 activation (microbatch, T/(cp*tp), D) per microbatch and boundary of stages
    sent backward   its gradient, of the same shape and dtype

Nothing else, whatever the number of parameters: hence pp is the outermost axis, over the slowest
links. torch keeps a receive buffer for every microbatch and direction, under 1F1B too. Letters are
model.py's, and M, S, p and v as above.

Three traps, each a wrong gradient without an error:

    * a second schedule object, for evaluation, would share the stages, and gradients come out zero:
      there is one object, PipelineSchedule, for both;
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
import math
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch.distributed.pipelining.schedules._Action                    reads and writes "0F1"
#     torch.distributed.pipelining.schedules._PipelineScheduleRuntime   runs a schedule of one's own
#     torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv

# ---- 1. Schedules ------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a schedule asks of ranks and microbatches, and what it does with them."""

    stages_per_rank: int | None  # v, exactly; None: 2 or more
    shape: str  # loop: rank r holds the stages r, r + p, r + 2p ...; V: r and S - 1 - r
    backward: str  # whole, or split into the gradients of the input (I) and of the weights (W)
    microbatches: str  # how many: any; per-stage: one for each at least; rounds: equal ones of p


SCHEDULES = {  # a V puts the last stage, and so the loss, on rank 0
    "GPipe": Kind(1, "loop", "whole", "any"),
    "1F1B": Kind(1, "loop", "whole", "per-stage"),
    "Interleaved1F1B": Kind(None, "loop", "whole", "rounds"),
    "LoopedBFS": Kind(None, "loop", "whole", "any"),
    "InterleavedZeroBubble": Kind(None, "loop", "split", "rounds"),
    "ZBVZeroBubble": Kind(2, "V", "split", "any"),
    "DualPipeV": Kind(2, "V", "split", "per-stage"),
}


def order_1f1b(stage, n_stages, n_microbatches):
    """What the rank of a stage computes under 1F1B, in order: [(kind, stage, microbatch), ...].

    F: receive an activation from the stage before, compute forward, send the result on.
    B: receive the gradient of what was sent on, compute backward, send that of what was received.
    """
    warmup = min(n_microbatches, n_stages - stage)  # forwards until the first gradient can arrive
    steady = n_microbatches - warmup
    order = [("F", stage, i) for i in range(warmup)]  # the deeper stages are being filled
    for i in range(steady):  # one backward, one forward: a new activation takes the old one's place
        order += [("B", stage, i), ("F", stage, warmup + i)]
    order += [("B", stage, i) for i in range(steady, n_microbatches)]  # draining
    return order


def kind_of(schedule):
    """The row of SCHEDULES, or one made of what a CSV file holds: the path of one is a name too."""
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    is_split = any(kind == "I" for row in read_csv(schedule) for kind, _, _ in row)
    return Kind(None, "file", "split" if is_split else "whole", "file")


def splits_backward(schedule):
    """Whether backwards are split in two: no op-level SAC, compile or `--reshard always` then."""
    return kind_of(schedule).backward == "split"


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

    A row per rank, a cell per computation, such as 0F0,0F1,0B0,0B1 (stage, kind, microbatch).
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
            f"--pp-schedule {path} cannot be read as a schedule ({error}): it is none of "
            f"{', '.join(SCHEDULES)}, and a file needs a row per rank of cells like 0F0 (stage, F "
            "B I or W, microbatch): mend the file, or take one of those"
        ) from error
    return [flatten_actions(row) for row in rows]


def write_csv(path, rows):
    """Write a time line as such a file, to start from."""
    cells = [[f"{op.stage}{op.kind}{op.microbatch}" for op in row] for row in rows]
    Path(path).write_text("".join(",".join(row) + "\n" for row in cells))


def count_stages(schedule, pp, stages_per_rank=None):
    """Number of stages S over all ranks; None stands for 1 per rank, or 2, or what the file holds.

    Raises:  ValueError if the schedule cannot have that many stages on a rank.
    """
    kind = kind_of(schedule)
    if kind.shape == "file":
        n_stages = 1 + max((stage for row in read_csv(schedule) for _, stage, _ in row), default=-1)
        if stages_per_rank not in (None, n_stages / pp):
            raise ValueError(
                f"--stages-per-rank {stages_per_rank} conflicts with --pp-schedule {schedule}, "
                f"which has {n_stages} stages for --pp {pp}: leave --stages-per-rank to the file"
            )
        return n_stages
    least, most = kind.stages_per_rank or 2, kind.stages_per_rank or math.inf
    v = least if stages_per_rank is None else stages_per_rank
    if not least <= v <= most:
        raise ValueError(
            f"--stages-per-rank {v} conflicts with --pp-schedule {schedule}, which needs "
            f"{'exactly' if most == least else 'at least'} {least}: leave --stages-per-rank out, "
            f"or take --pp-schedule {'1F1B' if v < 2 else 'Interleaved1F1B'}"
        )
    return pp * v


def stages_of_rank(pp_rank, pp, n_stages, schedule):
    """Indices of the stages that a pp rank holds, ascending."""
    match kind_of(schedule).shape:
        case "loop":
            return list(range(pp_rank, n_stages, pp))
        case "V":
            return [pp_rank, n_stages - 1 - pp_rank]
        case "file":
            return sorted({stage for _, stage, _ in read_csv(schedule)[pp_rank]})


def check_schedule(schedule, *, pp, n_microbatches, stages_per_rank=None):
    """Raise ValueError, naming the flags, if torch cannot run this schedule. No process group."""
    several = "es" * (n_microbatches != 1)
    given = f"{n_microbatches} microbatch{several} (--local-batch-size / --microbatch-size)"
    if min(pp, n_microbatches) < 1:
        raise ValueError(f"--pp {pp} with {given} is no pipeline: each must be 1 or more")
    n_stages = count_stages(schedule, pp, stages_per_rank)
    conflict = f"--pp-schedule {schedule} with --pp {pp} conflicts with {given}"
    match kind_of(schedule).microbatches:
        case "file":
            if problem := csv_problem(schedule, n_stages, pp=pp, n_microbatches=n_microbatches):
                raise ValueError(
                    f"{conflict}: {problem}, but it needs a row per rank and, of each stage and "
                    "microbatch, one F, then one B or one I and W: mend the file, or change --pp "
                    "or the batch"
                )
        case "per-stage":
            if n_microbatches < n_stages:
                raise ValueError(
                    f"{conflict}: it needs one for each of its {n_stages} stages: raise the first, "
                    f"lower the second, or take {'GPipe' if n_stages == pp else 'ZBVZeroBubble'}"
                )
        case "rounds":
            rounds = max(1, n_microbatches // pp)
            if n_microbatches % rounds:
                raise ValueError(
                    f"{conflict}: they must divide into {n_microbatches} // {pp} = {rounds} equal "
                    f"rounds: try {rounds * pp} or {(rounds + 1) * pp} microbatches, or LoopedBFS"
                )


def csv_problem(path, n_stages, *, pp, n_microbatches):
    """What keeps a file from being a complete, executable schedule here, or None."""
    rows = read_csv(path)
    if len(rows) != pp or not all(rows):
        return f"it has {sum(map(bool, rows))} rows with computations"
    kinds = defaultdict(str)  # (stage, microbatch) -> what is done with it
    for kind, stage, i in itertools.chain(*rows):
        kinds[stage, i] += kind
    expected = {*itertools.product(range(n_stages), range(n_microbatches))}
    for stage, i in sorted(expected | kinds.keys()):
        done = "".join(sorted(kinds[stage, i]))
        if (stage, i) not in expected or done not in ("BF", "FIW"):
            return f"of microbatch {i} stage {stage} does {done or 'nothing'}"
    _, stuck = play(rows, n_stages, [DURATION] * n_stages)
    if stuck:
        cells = (f"rank {rank} at {stage}{kind}{i}" for rank, (kind, stage, i) in stuck.items())
        return f"its order is circular: all wait for one another, {', '.join(cells)}"
    try:
        mock_schedule(path, pp, n_microbatches, None)
    except AssertionError as error:  # torch finds the order impossible
        return str(error).splitlines()[0]
    return None


def check_pipeline(schedule, *, pp, local_batch_size, microbatch_size, stages_per_rank, tied):
    """Raise ValueError if batch or model do not suit this pipeline; tied, its embeddings are."""
    if tied:
        raise ValueError(
            f"--pp {pp} and tied embeddings exclude each other: the first and the last stage would "
            "share one weight; try --pp 1, or --set tied_embeddings=false"
        )
    n_microbatches, rest = divmod(local_batch_size, microbatch_size)
    if rest:
        below = local_batch_size - rest
        raise ValueError(
            f"--local-batch-size {local_batch_size} must be a multiple of --microbatch-size "
            f"{microbatch_size}, into which a pipeline cuts it: try --local-batch-size "
            f"{f'{below} or ' if below else ''}{below + microbatch_size}"
        )
    check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=stages_per_rank)


def check_split_backward(schedule, *, ac, compile, reshard):
    """Raise ValueError for a technique that does not survive a backward in two halves."""
    for typed, is_given, instead in (
        ("--ac op", ac == "op", "--ac full"),
        ("--compile", compile, "no --compile"),
        ("--reshard always", reshard == "always", "--reshard default"),
    ):
        if is_given and splits_backward(schedule):
            raise ValueError(
                f"{typed} conflicts with --pp-schedule {schedule}, which runs a block's "
                "backward in two halves: what it needs is used up or freed after the first; try "
                f"{instead}, or --pp-schedule Interleaved1F1B"
            )


# ---- 2. From the model to stages ---------------------------------------------------------------


def split_layers(n_layers, n_stages, input_weight=1, output_weight=1):
    """Return the module names of each stage, dividing the layers as evenly as may be.

    tok_embeddings counts as `input_weight` layers, norm and output together as `output_weight`: the
    first and the last stage give up as many. A remainder goes to the first stages, one each.
    405B on 16 stages: 126 layers + 2 = 16 * 8, so 7, 8, ... 8, 7. An end may hold no block.

    Raises:  ValueError if the stages cannot be filled.
    Source:  paper §2.1.4; the rule is TorchTitan's.
    """
    if min(input_weight, output_weight) < 0:
        raise ValueError(
            f"--pp-end-weights {input_weight} {output_weight} must not be negative: try 1 1"
        )
    total = n_layers + input_weight + output_weight
    flags = f"--pp times --stages-per-rank is {n_stages}, which conflicts with n_layers {n_layers}"
    if not 1 <= n_stages <= total:
        raise ValueError(
            f"{flags}: with tok_embeddings and output that counts as {total}, and a stage needs 1: "
            f"take 1 to {total} stages, or a --model with more layers, or --set n_layers="
            f"{n_stages - input_weight - output_weight} or more"
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
    starts = itertools.accumulate(sizes[:-1])  # a last stage without a block starts at norm
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


def split_model(n_layers, schedule, *, pp, stages_per_rank, pp_split, pp_end_weights):
    """Return the module names of each stage as the flags say, which may be None but for `pp`.

    Raises:  ValueError if the flags make another number of stages than the schedule has.
    """
    n_stages = count_stages(schedule, pp, stages_per_rank)
    if not pp_split:
        return split_layers(n_layers, n_stages, *(pp_end_weights or ()))
    stages = split_at(n_layers, pp_split.split(","))
    if len(stages) != n_stages:
        raise ValueError(
            f"--pp-split {pp_split} makes {len(stages)} stages, but --pp {pp} with --pp-schedule "
            f"{schedule} needs {n_stages}: name {n_stages - 1} modules"
        )
    return stages


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


def make_torch_schedule(stages, schedule, n_microbatches, loss_fn=None):
    """torch's schedule object, for real stages or for stand-ins."""
    if schedule not in SCHEDULES:
        runtime = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn, scale_grads=False)
        runtime._load_csv(schedule)
        return runtime
    schedule_class = get_schedule_class(schedule)
    stages = stages[0] if SCHEDULES[schedule].stages_per_rank == 1 else stages
    return schedule_class(stages, n_microbatches, loss_fn=loss_fn, scale_grads=False)


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


class PipelineSchedule:
    """This rank's stages and the one torch schedule that runs them, to train and to evaluate.

    Args:    stages, torch's PipelineStages of this rank, ascending; n_rows, the sequences of a
             local batch; loss_fn(output, labels, n_valid_tokens).
    """

    def __init__(self, stages, schedule, *, n_microbatches, n_rows, loss_fn):
        self.stages, self.n_rows, self.loss_fn = stages, n_rows, loss_fn
        self.is_evaluating = False
        self.schedule = make_torch_schedule(stages, schedule, n_microbatches, self.compute_loss)

    def compute_loss(self, output, labels, n_valid_tokens):
        """The loss of one microbatch: torch calls this after its forward on the last stage."""
        if self.is_evaluating:
            # torch keeps every microbatch's logits for a backward that never comes: let all but
            # the newest go. Stages ascend, so the last one here is the one with the loss
            cache = self.stages[-1].fwd_cache
            for i in list(cache)[:-1]:
                del cache[i]
        return self.loss_fn(output, labels, n_valid_tokens)

    def call(self, step, inputs, labels, n_valid_tokens):
        """Call torch's `step` or `eval`; 0-d sum of the losses, zero without the last stage."""
        n_rows = inputs.shape[0]
        assert n_rows == self.n_rows, f"a schedule for {self.n_rows} sequences got {n_rows}"
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

    def run(self, inputs, labels, n_valid_tokens):
        """Forward and backward of the local batch; gradients add to `.grad`.

        Args:    inputs and labels (local_batch, T/cp), the same on every pp rank; n_valid_tokens,
                 the divisor of the loss: a tensor, so that nothing waits for its value.
        Returns: the sum of the microbatches' losses on the rank with the last stage, else zero: the
                 loss is the sum over pp. Under loss parallel, call it inside `loss_parallel()`.
        Costs:   no host sync after the first run; under FSDP one reduce-scatter per parameter
                 group, after the last microbatch, and again for each further run that accumulates.
        """
        return self.call(self.schedule.step, inputs, labels, n_valid_tokens)

    @torch.no_grad()
    def run_forward(self, inputs, labels, n_valid_tokens):
        """The loss as in `run`, forward only, between optimizer steps.

        torch's own `eval` walks through the backwards too, and fails under the V-shaped schedules:
        meanwhile a schedule of several stages a rank gets a forward-only order.

        Note:    on changing to or from evaluation torch drops the gradients of FSDP modules.
        """
        orders = getattr(self.schedule, "pipeline_order_with_comms", None)
        try:
            self.is_evaluating = True
            if orders:
                rank = self.schedule.rank
                short = {rank: forward_only(orders[rank], self.stages)}
                self.schedule.pipeline_order_with_comms = short
            return self.call(self.schedule.eval, inputs, labels, n_valid_tokens)
        finally:
            self.is_evaluating = False
            if orders:
                self.schedule.pipeline_order_with_comms = orders


def build_schedule(modules, schedule, *, n_microbatches, loss_fn, pp_mesh, microbatch):
    """Return the PipelineSchedule of this rank.

    Args:    modules, its stages of the model in the order of `stages_of_rank`; microbatch, two
             examples on the meta device: tokens (microbatch, T/cp) int64 and the activation sent,
             (microbatch, T/(cp*tp), D), in the blocks' dtype.
    When:    after FSDP has been applied.
    Note:    knowing these shapes, torch runs no extra forward and backward to find them. The last
             stage's output goes to loss_fn and is never sent, so its shape need not be told: plain
             or vocabulary-sharded logits, or the input of a chunked head.
    Source:  paper §2.1.4 and Appendix A.
    """
    pp, pp_rank = pp_mesh.size(), pp_mesh.get_local_rank()
    stages_per_rank = len(modules) if schedule in SCHEDULES else None
    check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=stages_per_rank)
    n_stages = count_stages(schedule, pp, stages_per_rank)
    indices = stages_of_rank(pp_rank, pp, n_stages, schedule)
    tokens, activation = microbatch
    activation = activation.detach().requires_grad_()  # its gradient is sent back
    for module in modules:
        if splits_backward(schedule) and isinstance(module, FSDPModule):
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
        for index, module in zip(indices, modules, strict=True)
    ]
    # NCCL makes a group's connections at its first use, for which all its ranks must come: the
    # first sends and receives are of two ranks each
    dist.all_reduce(torch.zeros(1, device=pp_mesh.device_type), group=pp_mesh.get_group())
    n_rows = n_microbatches * tokens.shape[0]
    sizes = {"n_microbatches": n_microbatches, "n_rows": n_rows}
    return PipelineSchedule(stages, schedule, **sizes, loss_fn=loss_fn)


# ---- 4. Time line, bubble, microbatches in flight ----------------------------------------------


class Op(NamedTuple):
    """One computation on the time line."""

    kind: str  # F forward, B backward, or its halves I (input) and W (weights)
    stage: int
    microbatch: int
    start: float  # in units of one stage's forward of one microbatch
    end: float


DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def mock_schedule(schedule, pp, n_microbatches, stages_per_rank):
    """The schedule object with stand-ins for stages: torch reads no more than this of them."""
    n_stages = count_stages(schedule, pp, stages_per_rank)
    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=n_stages, submod=None)
    return make_torch_schedule([stage] * max(1, n_stages // pp), schedule, n_microbatches)


def needs(kind, stage, microbatch, n_stages):
    """The results, as (F or B, stage, microbatch), that a computation waits for."""
    if kind == "F":
        return {("F", stage - 1, microbatch)} if stage > 0 else set()
    if kind == "W":
        return {("B", stage, microbatch)}
    arriving = {("B", stage + 1, microbatch)} if stage < n_stages - 1 else set()
    return {("F", stage, microbatch)} | arriving


def timeline(schedule, pp, n_microbatches, stages_per_rank=None, *, durations=None):
    """Return when each rank computes what, [[Op, ...] per rank], from torch's schedule object.

    A computation starts once its rank is free and its input is there; communication takes no time.
    `durations`, a dict like DURATION per stage, are for stages that differ.
    """
    check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=stages_per_rank)
    n_stages = count_stages(schedule, pp, stages_per_rank)
    if schedule == "1F1B":
        # torch 2.13's own list has the last rank start at microbatch 1, but what it runs is this
        orders = [order_1f1b(stage, pp, n_microbatches) for stage in range(pp)]
    else:
        made = mock_schedule(schedule, pp, n_microbatches, stages_per_rank)
        orders = [flatten_actions(row) for _, row in sorted(made.pipeline_order.items())]
    rows, stuck = play(orders, n_stages, durations or [DURATION] * n_stages)
    assert not stuck, f"every rank waits for another: {stuck}"
    return rows


def play(orders, n_stages, durations):
    """Play [[(kind, stage, microbatch), ...] per rank], what each rank computes, in order.

    Returns: (the time line, {rank: the computation at which it waits for ever}).
    """
    pending, rows = [deque(order) for order in orders], [[] for _ in orders]
    ends = {}  # (F or B, stage, microbatch) -> when its result is there
    went_on = True
    while went_on:
        went_on = False
        for row, ops in zip(rows, pending, strict=True):
            while ops and needs(*ops[0], n_stages) <= ends.keys():
                went_on = True
                kind, stage, i = ops.popleft()
                arrivals = [ends[need] for need in needs(kind, stage, i, n_stages)]
                start = max([row[-1].end if row else 0, *arrivals])
                row.append(Op(kind, stage, i, start, start + durations[stage][kind]))
                if kind != "W":
                    ends["F" if kind == "F" else "B", stage, i] = row[-1].end
    return rows, {rank: ops[0] for rank, ops in enumerate(pending) if ops}


def bubble_fraction(rows):
    """Idle share of all ranks' time, from the first start to the last end."""
    busy = sum(op.end - op.start for row in rows for op in row)
    return 1 - busy / (len(rows) * max(row[-1].end for row in rows))


def peaks_in_flight(rows):
    """Per rank, the most chunks that have been through forward and still need their backward."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(itertools.accumulate(change[op.kind] for op in row)) for row in rows]


def describe_stages(stages, schedule, *, pp, n_microbatches, ac):
    """Which rank holds which layers, and what the schedule makes of them; a line per pp rank.

    Args:    stages, the module names of each; ac, the flag.
    """
    stages_per_rank = len(stages) // pp if schedule in SCHEDULES else None
    rows = timeline(schedule, pp, n_microbatches, stages_per_rank)
    lines = [f"bubble {bubble_fraction(rows):.1%} if all stages cost the same"]
    if ac != "none" and splits_backward(schedule):
        lines.append(
            f"--ac {ac} repeats a block for each of its weights, as backwards are split: "
            "Interleaved1F1B repeats it once"
        )
    for pp_rank in range(pp):
        mine = stages_of_rank(pp_rank, pp, len(stages), schedule)
        lines.append(f"pp {pp_rank}: {', '.join(span(stages[stage]) for stage in mine)}")
    return "\n".join(lines)


def span(names):
    """layers.3..layers.7"""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


# ---- 5. The tool: draw a schedule --------------------------------------------------------------

LEGEND = """microbatches 0, 1, 2 ..:  forward 0 1 2 ..   backward AA BB CC ..   or its two halves,
input A B C .. and weights a b c ..   (from microbatch 10 on they start again)   . idle"""


def draw_text(rows):
    """The time line as text: a line per rank and stage, a column per unit of time."""
    end = max(row[-1].end for row in rows)
    lines = [f"{'time':<17}" + "".join(f"{t:<10}" for t in range(0, end, 10)).rstrip()]
    first = {"F": "0", "B": "A", "I": "A", "W": "a"}
    for rank, row in enumerate(rows):
        for stage in sorted({op.stage for op in row}):
            line = ["."] * end
            for op in row:  # blank where the rank is busy with another stage
                letter = chr(ord(first[op.kind]) + op.microbatch % 10)
                mark = letter if op.stage == stage else " "
                line[op.start : op.end] = mark * (op.end - op.start)
            lines.append(f"rank {rank:<2} stage {stage:<3}{''.join(line)}".rstrip())
    return "\n".join(lines)


PAGE = 1000  # pixels


def time_axis(end, x_of, y, unit):
    """SVG of some ten ticks from 0 to `end`, at round numbers, below y."""
    step = 10.0 ** math.floor(math.log10(end))
    step = next(step * f for f in (0.1, 0.2, 0.5, 1) if step * f * 12 >= end)
    ticks = [i * step for i in range(int(end / step) + 1)]
    parts = [f'<text x="{x_of(t):.1f}" y="{y + 14}">{t:g}</text>' for t in ticks]
    lines = [f'<path d="M{x_of(t):.1f} {y}v4" stroke="#444"/>' for t in ticks]
    return [*lines, *parts, f'<text x="6" y="{y + 14}">{unit}</text>']


def draw_svg(rows, title, unit="forwards"):
    """The time line as an SVG picture at page width: a row per pp rank, time in `unit`s.

    Later stages of a rank are darker. A microbatch's number is left out where it has no room.
    """
    height, left, top = 22, 60, 44  # pixels
    end, bottom = max(row[-1].end for row in rows), top + height * len(rows)
    colors = {"F": "#9ecae1", "B": "#a1d99b", "I": "#c7e9c0", "W": "#fdd0a2"}
    names = {"F": "forward", "B": "backward", "I": "of inputs", "W": "of weights"}
    used = [kind for kind in colors if any(op.kind == kind for row in rows for op in row)]

    def x_of(time):
        return left + (PAGE - left - 10) * time / end

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" '
        f'viewBox="0 0 {PAGE} {bottom + 22}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="6" y="16" font-size="13">{title}</text>',
    ]
    for i, kind in enumerate(used):
        x = left + 110 * i
        parts.append(f'<rect x="{x}" y="25" width="12" height="12" fill="{colors[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="35">{names[kind]}</text>')
    for rank, row in enumerate(rows):
        y = top + rank * height
        parts.append(f'<text x="6" y="{y + 15}">pp {rank}</text>')
        stages = sorted({op.stage for op in row})
        for op in row:
            x, width = x_of(op.start), x_of(op.end) - x_of(op.start)
            opacity = 1 - 0.45 * (len(stages) - 1 - stages.index(op.stage)) / len(stages)
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{height - 2}" '
                f'stroke="#444" stroke-width="0.4" fill="{colors[op.kind]}" '
                f'fill-opacity="{opacity:.2f}"/>'
            )
            if width >= 7 * len(str(op.microbatch)):
                parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}" font-size="10" '
                             f'text-anchor="middle">{op.microbatch}</text>')  # fmt: skip
    return "\n".join([*parts, *time_axis(end, x_of, bottom, unit), "</svg>"]) + "\n"


def parse_args():
    """The tool's flags: which schedule, how large, and where to draw or write it."""
    parser = argparse.ArgumentParser(
        description="Draw a pipeline schedule: each rank's time line, the bubble and the memory.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pp-schedule", default="1F1B", metavar="{NAME,FILE.csv}",
        help=f"{', '.join(SCHEDULES)}, or a file of one's own (default 1F1B) -> kind_of")
    add("--pp", type=int, default=4, help="pipeline ranks (default 4) -> timeline")
    add("--n-microbatches", type=int, default=8, help="per schedule run (default 8) -> timeline")
    add("--stages-per-rank", type=int, help="default 1, or 2 where needed -> count_stages")
    add("--svg", metavar="FILE", help="draw it into this file as well -> draw_svg")
    add("--csv", metavar="FILE", help="write it as a schedule to start from -> write_csv")
    parser.error = lambda message: sys.exit(f"pipeline.py: {message}")  # one line, exit status 1
    return parser.parse_args()


def main(args):
    """Print the schedule's time line and figures; draw and write it where that is asked for."""
    shape = (args.pp_schedule, args.pp, args.n_microbatches, args.stages_per_rank)
    rows = timeline(*shape)
    stages_per_rank = count_stages(args.pp_schedule, args.pp, args.stages_per_rank) / args.pp
    print(
        f"{args.pp_schedule}: pp {args.pp}, stages on each {stages_per_rank:g}, "
        f"microbatches {args.n_microbatches}\n\n{draw_text(rows)}\n\n{LEGEND}\n"
    )
    print(f"bubble fraction  {bubble_fraction(rows):.4f}")
    print(f"most in flight   {peaks_in_flight(rows)}   (microbatches x stages, per rank)")
    if args.svg:
        title = f"{args.pp_schedule}, {args.pp} ranks, {args.n_microbatches} microbatches: idle "
        Path(args.svg).write_text(draw_svg(rows, f"{title}{bubble_fraction(rows):.1%}"))
        print(f"drawn into       {args.svg}")
    if args.csv:
        write_csv(args.csv, rows)
        print(f"written into     {args.csv}: change its cells, then --pp-schedule {args.csv}")


if __name__ == "__main__":
    try:
        main(parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"pipeline.py: {error}")

"""The training program: what is built and in which order, one step, and the loop around it.

    python train.py                                  one process, CPU or one GPU
    torchrun --nproc-per-node 2 train.py             the same run on two ranks
    torchrun --nnodes 32 --nproc-per-node 8 train.py @recipes/llama3_70b.args

    build, start          §1   model -> mesh, in the order of the paper's Appendix A; weights
    gradients, update     §2   the two halves of an optimizer step; one validation
    main, pretrain        §3   everything once, then the loop
    load, save            §4   where a run stands: plan, resume, checkpoints
    build_parser          §5   every flag; check_args asks every rule, before any rank waits
    init_distributed      §6   ranks and devices

To read how a model is trained, stop after §3. simulate.py calls the functions of §1 and §2 for any
rank of any mesh, on one process.

One loss for every mesh:

    loss = sum over the global batch of CE(logits, label) / number of valid labels in it

The count is summed over the data ranks before the first backward pass, so that a gradient needs no
factor afterwards: any number of ranks, accumulation steps or microbatches gives the same sum, and
batches whose ignored labels (-100) are unevenly spread are weighted by token, not by rank.

A step that does not log, evaluate or save makes no host sync: it only enqueues work. Its loss and
gradient norm are copied to the host behind its back and looked at one step later (watch.py). With
--ep > 1 there is one for each block with experts and forward pass: parallel.py:read_lengths.

Sources: TorchTitan (arXiv 2410.06511) §2.1, §2.3 and Appendix A; the learning rate schedule,
warmup-stable-decay: MiniCPM (arXiv 2404.06395).
"""

import argparse
import dataclasses
import gc
import math
import os
import re
import resource
import shlex
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read by the next line: a quiet profiler

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import data
import float8
import model
import parallel
import pipeline
import watch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the mesh, outer to inner

# ---- 1. The job --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """This rank's share of the model, and what a step needs with it."""

    config: model.ModelConfig
    mesh: dict  # {axis: DeviceMesh}
    device: torch.device
    stages: list  # the model, or this rank's pipeline stages of it
    positions: torch.Tensor  # global positions of the tokens this cp rank holds, (T/cp,)
    shapes: dict  # {name: full shape} of the whole model's parameters and routers' biases
    loss_parallel: bool
    has_float8_scales: bool
    balance_speed: float  # of the routers' biases
    loss_fn: object = None  # (output of the last stage, labels, n_valid_tokens) -> loss; by `start`
    schedule: object = None  # pipeline.PipelineSchedule, None without a pipeline; by `start`
    optimizer: object = None  # torch.optim.Optimizer; by `start`

    @property
    def parameters(self):
        """This rank's parameters, of all its stages."""
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    @property
    def n_local(self):
        """How many numbers this rank holds of its parameters."""
        return sum(parallel.local_tensor(parameter).numel() for parameter in self.parameters)

    @property
    def weights(self):
        """(name, parameter) pairs of all its stages, under the names of model.py, one by one."""
        return (pair for stage in self.stages for pair in parallel.named_weights(stage))

    @property
    def biases(self):
        """(name, buffer) pairs of the routers' biases, which the optimizer does not know."""
        return (pair for stage in self.stages for pair in parallel.named_biases(stage))


def build(args, config, device):
    """This rank's part of the model, transformed, in the order of the paper's Appendix A.

    All of it on the meta device, where a tensor has a shape and no memory: 405B takes seconds.
    README tells what happened when two of these were swapped.
    """
    ep = args.ep if config.n_experts else 0
    mesh = parallel.build_mesh(device.type, **degrees_of(args), ep=ep)
    with torch.device("meta"):
        whole = model.Transformer(config, seq_len=args.seq_len)
    kept = [*whole.named_parameters(), *parallel.named_biases(whole)]
    shapes = {name: tuple(tensor.shape) for name, tensor in kept}
    loss_parallel = args.tp > 1 and not args.no_loss_parallel

    stages = [whole]
    if args.pp > 1:  # first: FSDP modules cannot be copied, and what lives elsewhere needs no work
        names = stage_names(args, config)
        pp_rank = mesh["pp"].get_local_rank()
        mine = pipeline.stages_of_rank(pp_rank, args.pp, len(names), args.pp_schedule)
        stages = [pipeline.cut_stage(whole, names[index]) for index in mine]
    if args.async_tp:
        parallel.enable_async_tp(mesh["tp"])
    if args.cp > 1 and parallel.enable_flash_attention_3() and dist.get_rank() == 0:
        watch.print_pairs([("cp", "attends by FlashAttention 3")])
    for stage in stages:
        styles = ()
        if args.float8:  # before tp and FSDP: new linears beside DTensors fail in the first forward
            convert_to_float8(args, stage)
            styles = float8.float8_tp_styles(args.float8)
        if args.tp > 1:  # before FSDP: what is a DTensor over fsdp cannot be distributed once more
            parallel.apply_tp(stage, mesh["tp"], *styles, loss_parallel=loss_parallel)
        if args.cp > 1:
            parallel.apply_cp(stage, mesh["cp"])
        if ep > 1:  # experts alone, which tp has left as they were
            parallel.apply_ep(stage, mesh["ep"])
        if args.ac != "none":  # before compile: afterwards its policy sees one opaque call a block
            parallel.apply_ac(stage, args.ac)
        if args.compile:  # either side of FSDP gives the same losses; this is how it is read
            parallel.apply_compile(stage, ac=args.ac)
        parallel.apply_fsdp(  # at degree 1 it casts, so that mixed precision is the same everywhere
            stage,
            mesh,
            param_dtype=DTYPES[args.param_dtype],
            reduce_dtype=DTYPES[args.reduce_dtype],
            reshard=args.reshard,
            cpu_offload=args.cpu_offload,
        )
    positions = parallel.cp_positions(args.seq_len, cp=args.cp, cp_rank=mesh["cp"].get_local_rank())
    return Job(
        config=config,
        mesh=mesh,
        device=device,
        stages=stages,
        positions=positions.to(device),
        shapes=shapes,
        loss_parallel=loss_parallel,
        has_float8_scales=args.float8_all_gather,
        balance_speed=args.balance_speed,
    )


def convert_to_float8(args, stage):
    """Swap linears for 8-bit ones; say on rank 0 which, and why others were left alone."""
    converted, skipped = float8.apply_float8(
        stage,
        args.float8,
        all_gather=args.float8_all_gather,
        skip=args.float8_filter,
        emulate=args.float8_emulate,
        tp=args.tp,
    )
    if dist.get_rank() == 0:
        text = [f"{len(converted)} linears converted: {', '.join(converted[:7])}, ..."]
        for reason in dict.fromkeys(skipped.values()):
            names = [name for name, why in skipped.items() if why == reason]
            text.append(f"{len(names)} left alone ({reason}): {', '.join(names[:3])}")
        watch.print_pairs([("float8", "\n".join(text))])


def start(args, job, draw=None):
    """The job with memory and weights, and with what needs them: loss, schedule, optimizer.

    Args:    draw(name, shape) -> full tensor; a simulation's gives tensors without values.
    """
    weight_device = torch.device("cpu") if args.cpu_offload else job.device
    draw = draw or partial(
        model.draw_weight, config=job.config, seed=args.seed, device=weight_device
    )
    for stage in job.stages:  # after tp and FSDP, so that no rank holds the whole model
        parallel.materialise(
            stage,
            device=job.device,
            weight_device=weight_device,
            draw=draw,
            positions=job.positions,
        )
    is_compiled = args.compile and not job.loss_parallel
    loss_fn = parallel.build_loss(job.stages[-1], args.loss_chunks, args.tp, compile=is_compiled)
    schedule = None
    if args.pp > 1:  # told the shapes that its stages exchange
        rows, local_len = args.microbatch_size, args.seq_len // args.cp
        tokens = torch.empty(rows, local_len, dtype=torch.int64, device="meta")
        activation = torch.empty(rows, local_len // args.tp, job.config.dim, device="meta")
        schedule = pipeline.build_schedule(
            job.stages,
            args.pp_schedule,
            n_microbatches=args.local_batch_size // rows,
            loss_fn=loss_fn,
            pp_mesh=job.mesh["pp"],
            microbatch=(tokens, activation.to(DTYPES[args.param_dtype])),
        )
    # last: FSDP has replaced the parameters, and an optimizer of the old ones would train nothing
    optimizer = build_optimizer(args, job.parameters)
    job = dataclasses.replace(job, loss_fn=loss_fn, schedule=schedule, optimizer=optimizer)
    refresh_scales(job)
    return job


OPTIMIZERS = {"adamw": 4, "sgd": 2}  # numbers that a parameter takes: value, gradient, states


def build_optimizer(args, parameters):
    """One optimizer over all stages; like the paper's, it decays norms and embeddings as well.

    Another one joins OPTIMIZERS and the `if` below, and keeps this contract:

    1. It is one torch.optim.Optimizer of all `parameters`, which are DTensors, split as FSDP and tp
       have them, or plain where both had nothing to do; so are their clipped gradients.
       step(closure=None) runs once a global batch.
    2. Each step sets the lr of a group to `lr_at` times its "lr_scale", 1 if the group has none.
    3. What needs a whole matrix gathers it (`parallel.whole_tensor`), on all ranks in one order.
    4. Its state are tensors, per parameter and slot: of the parameter's shape and split, or 0-d.
       Parameters may differ in their slots; on any mesh checkpoints find them by these names.
    5. With lr 0 and zero gradients a step leaves weights as they are: so torch makes the state that
       a checkpoint is then read into.
    6. Hyperparameters are the flags' of this run; a checkpoint holds none.
    """
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


# ---- 2. One step -------------------------------------------------------------------------------


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
        loss = job.loss_fn(job.stages[0](inputs), labels, divisor)
        loss.backward()
        return loss.detach()


def gradients(job, inputs, labels, *, local_batch_size):
    """Add the gradients of this data rank's share of the global batch to `.grad`.

    Args:    inputs and labels, int64 (global batch / data ranks, T), whole sequences.
    Returns: this rank's share of the loss, and the valid tokens of the global batch: 0-d tensors.
    """
    n_valid_tokens = count_valid_tokens(job, labels)
    divisor = n_valid_tokens.clamp(min=1)  # a batch without a valid label: zero loss and gradients
    inputs, labels = inputs[:, job.positions], labels[:, job.positions]  # (B, T) -> (B, T/cp)
    local_loss = torch.zeros((), device=job.device, dtype=torch.get_default_dtype())
    for x, y in zip(inputs.split(local_batch_size), labels.split(local_batch_size), strict=True):
        # FSDP reduces into the sharded gradient each time: accumulating costs traffic, not the
        # memory of whole gradients
        local_loss += forward_backward(job, x, y, divisor)
    return local_loss, n_valid_tokens


def refresh_scales(job):
    """After every change of the weights: the scales with which FSDP gathers them in float8."""
    if job.has_float8_scales:
        float8.precompute_float8_scales(job.stages)


def update(job, *, max_norm):
    """Clip the gradients, balance experts, step the optimizer, clear the gradients.

    Returns: [the norm before clipping], with experts also the largest load over the mean.
    """
    told = [parallel.clip_grad_norm(job.parameters, max_norm, job.mesh)]
    if job.config.n_experts:
        told.append(parallel.balance(job.stages, job.mesh, balance_speed=job.balance_speed))
    job.optimizer.step()
    job.optimizer.zero_grad()
    refresh_scales(job)
    return told


def sum_over_ranks(job, loss, n_stops):
    """Both numbers over all ranks, in one all-reduce, so that every rank gets the same bits."""
    # ranks of one tp group computed the same loss, and earlier stages of a pipeline none
    counts = job.mesh["tp"].get_local_rank() == 0
    pair = torch.stack([loss if counts else torch.zeros_like(loss), n_stops])
    dist.all_reduce(pair)
    return pair.unbind()


def train_step(job, inputs, labels, *, local_batch_size, max_norm, wants_stop=False):
    """One optimizer step on this data rank's share of the global batch; no host sync but of ep.

    Args:    inputs and labels, as for `gradients`; wants_stop, whether this rank was asked to end,
             which travels with the loss.
    Returns: float tensor (5 or 6,) on the device, with the names of `watch.Stats`.
    """
    local_loss, n_valid_tokens = gradients(job, inputs, labels, local_batch_size=local_batch_size)
    loss, n_stops = sum_over_ranks(job, local_loss, local_loss.new_full((), wants_stop))
    norm, *load = update(job, max_norm=max_norm)
    stats = [loss, norm, n_valid_tokens, local_loss, n_stops, *load]
    return torch.stack([number.to(loss) for number in stats])


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


@torch.no_grad()
def evaluate(job, tokens, *, seq_len, local_batch_size, val_steps):
    """Mean loss over the first `val_steps` batches of `tokens`, weighted by token.

    Every rank runs the same number of batches; places beyond the end of the text count as ignored
    labels, so that a short text neither hangs nor weighs some ranks more.
    """
    n_data, data_rank = job.mesh["data"].size(), job.mesh["data"].get_local_rank()
    per_batch = local_batch_size * n_data
    end = min(val_steps * per_batch, tokens.n_windows(seq_len))
    sums = torch.zeros(2, device=job.device, dtype=torch.float64)  # loss sum, valid tokens
    for position in range(0, end, per_batch):
        first = position + data_rank * local_batch_size
        rows = range(first, first + local_batch_size)
        batch = data.validation_batch_at(tokens, rows, seq_len=seq_len)
        inputs, labels = data.send_to(job.device, batch)
        n_valid_tokens = count_valid_tokens(job, labels)
        inputs, labels = inputs[:, job.positions], labels[:, job.positions]
        with loss_parallel() if job.loss_parallel else nullcontext():
            if job.schedule:
                loss_sum = job.schedule.run_forward(inputs, labels, 1)
            else:
                loss_sum = job.loss_fn(job.stages[0](inputs), labels, 1)
        loss_sum = loss_sum.to(sums)  # stages without the loss give a zero of another dtype
        loss_sum, _ = sum_over_ranks(job, loss_sum, torch.zeros_like(loss_sum))
        sums += torch.stack([loss_sum, n_valid_tokens.to(sums)])
    return (sums[0] / sums[1]).item()


# ---- 3. The program ----------------------------------------------------------------------------


def is_due(step, every):
    """Whether what happens `every` so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0


def main(argv=None):
    """Flags and data, checked before any rank waits for another; then the run."""
    sys.stdout = watch.LastingConsole(sys.stdout)
    check_environment()
    hardware, is_main = find_hardware(), from_torchrun("RANK") == 0
    args, config = read_flags(argv, hardware, from_torchrun("WORLD_SIZE"))
    tokens, val_tokens = open_texts(args, config)
    with checkpoint.hold_folder(args.out) if is_main else nullcontext():
        device = init_distributed(args, hardware)
        pretrain(args, config, device, hardware, tokens=tokens, val_tokens=val_tokens)
        dist.destroy_process_group()


def pretrain(args, config, device, hardware, *, tokens, val_tokens):
    """A run from where its folder stands to its last step, or until it is asked to end."""
    # 1. Whether ranks agree, and whether this run has begun already
    out, is_main = Path(args.out), dist.get_rank() == 0
    steps, seq_len = args.steps, args.seq_len
    texts = {"data (its tokens)": tokens.fingerprint}
    texts["val-data (its tokens)"] = val_tokens and val_tokens.fingerprint
    watch.check_same(vars(args) | texts)
    done, state = choose_checkpoint(out / "checkpoints", args.resume)
    if state:
        check_resumable(args, config, tokens, state)
    if done >= steps:
        if is_main:
            print(f"nothing to do: {out} is at step {done}; extend it with --steps {2 * done}")
        return

    # 2. The model on its mesh, and its state
    if is_main:
        print(f"building {args.model}", flush=True)
    job = build(args, config, device)
    watch.set_timeouts(max(FIRST_STEP_S, args.timeout_s))  # of the mesh's groups, too
    if is_main:
        n_epochs = steps * args.global_batch_size / tokens.n_windows(seq_len)
        watch.print_pairs(describe_job(args, job, f"on {device.type}"))
        watch.print_pairs(describe_data(tokens, val_tokens, f"{steps} steps", n_epochs))
        watch.print_pairs(describe_moot(args))
    if not args.ignore_memory:
        check_fit(job, hardware, n_numbers=OPTIMIZERS[args.optimizer], on_host=args.cpu_offload)
    if is_main:
        then = ", then compiling in step 1: minutes on first use" if args.compile else ""
        print(f"drawing weights{then}", flush=True)
    job = start(args, job)
    load(job, out / "checkpoints", done, init_from=args.init_from)
    checkpointer = None
    if args.checkpoint_every:
        checkpointer = checkpoint.Checkpointer(
            out / "checkpoints",
            mode=args.checkpoint_mode,
            keep_latest=args.keep_latest,
            protected_step=done or None,
        )

    # 3. What a step reads is a pure function of the sequences consumed before it
    per_rank = args.global_batch_size // job.mesh["data"].size()
    skipped = job.mesh["data"].get_local_rank() * per_rank  # what the ranks before this one read

    def read(position):
        mine = range(position + skipped, position + skipped + per_rank)
        return data.batch_at(tokens, mine, seq_len=seq_len, seed=args.seed)

    position = state["sequences"] if state else 0
    loader = data.BatchLoader(read, device, position=position, stride=args.global_batch_size)

    # 4. What the run tells
    # MFU is of bf16 alone: with float8, matmuls of two peaks are mixed (paper §3.2)
    is_bf16 = args.param_dtype == "bf16" and args.float8 is None
    metrics = watch.Metrics(
        out,
        device,
        steps=(done + 1, steps),
        tokens_per_step=args.global_batch_size * seq_len,
        flops_per_token=model.flops_per_token(config, seq_len),
        peak_tflops=model.peak_tflops(device) if is_bf16 else None,
        tensorboard=args.tensorboard,
    )
    profiler = watch.start_profiler(out / "profile", args.profile_steps, done)
    gc.disable()  # ranks that collect at different moments make all others wait
    signals = watch.catch_signals()

    # 5. The loop
    local_batch_size = args.local_batch_size
    step, is_last, read_stats = done, False, None
    try:
        while not is_last:
            step += 1
            lr = lr_at(step, args)
            for group in job.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            inputs, labels = loader.get()
            metrics.data_s += loader.wait_s
            stats = train_step(
                job,
                inputs,
                labels,
                local_batch_size=local_batch_size,
                max_norm=args.max_norm,
                wants_stop=bool(signals),
            )
            metrics.loss_sum += stats[0]
            is_last = step == steps
            if read_stats is not None:  # of the step before: the host is one ahead, and waits here
                watch.check_finite(step - 1, read_stats(), job.weights)
                is_last |= read_stats().n_stops > 0  # the same on all ranks
            read_stats = watch.copy_to_host(stats)

            # once in a while: compare what ranks must have in common
            if is_due(step, args.check_ranks_every):
                shared, data_rank = [*job.weights, *job.biases], job.mesh["data"].get_local_rank()
                watch.check_ranks(step, inputs, data_rank, shared)

            # once in a while: save
            if checkpointer and (is_due(step, args.checkpoint_every) or is_last):
                state = train_state(args, job, tokens, step, loader.position)
                save(checkpointer, step, job, read_stats(), state)

            # once in a while: a row of metrics, with a validation loss where one is due
            do_eval = is_due(step, args.val_every) or (args.val_every and step == steps)
            if step == 1 or is_due(step, args.log_every) or do_eval or is_last:
                watch.check_finite(step, read_stats(), job.weights)
                now_s = time.perf_counter()  # before the evaluation, which is not counted
                val_loss = None
                if do_eval:
                    val_loss = evaluate(job, val_tokens, seq_len=seq_len, val_steps=args.val_steps,
                                        local_batch_size=local_batch_size)  # fmt: skip
                seen = loader.position * seq_len
                metrics.log(step, read_stats(), lr=lr, tokens=seen, now_s=now_s, val_loss=val_loss)

            # once in a while: what would disturb a step
            if is_due(step, 50):
                gc.collect(1)
            if step == done + 1:
                watch.set_timeouts(args.timeout_s, but=checkpointer and checkpointer.group)
                if checkpointer:
                    checkpointer.prepare(job.stages, job.optimizer)
            if profiler:
                profiler.step()
    except Exception:
        if checkpointer:
            with suppress(checkpoint.CheckpointError):
                checkpointer.close()  # the last good step may still be on its way to the disk
        raise
    finally:
        if profiler:
            profiler.stop()
        if args.memory_snapshot:
            watch.dump_memory(out / "memory")

    # 6. The end
    metrics.close()
    if checkpointer:
        checkpointer.close()
    if is_main:
        ended = "done" if step == steps else f"stopped by {' or '.join(signals) or 'a rank'}"
        saved = f"checkpoint in {out}/checkpoints" if checkpointer else "nothing saved"
        print(f"{ended} at step {step}; {saved}, metrics in {out}/metrics.jsonl")
        if checkpointer:
            more = f" with --steps {2 * step}" if step == steps else ""
            print(f"next: the same command{more} goes on from here")


def run(argv=None):
    """`main`, with what a user can mend told in one line instead of a traceback per rank."""
    ranks = {"rank": os.environ.get("RANK"), "local_rank": int(os.environ.get("LOCAL_RANK") or 0)}
    try:
        main(argv)
    except (watch.TrainingError, checkpoint.CheckpointError) as error:
        watch.fail(error, **ranks)
    except KeyboardInterrupt:
        lost = "; the steps since the last checkpoint are lost" if dist.is_initialized() else ""
        watch.fail(KeyboardInterrupt(f"interrupted{lost}"), **ranks)
    except Exception as error:
        if isinstance(error, (ValueError, OSError)) and not dist.is_initialized():
            watch.fail(error, **ranks)  # a refusal: flags, data or folders
        watch.dump_flight_record(error)
        raise


# ---- 4. Where a run stands ---------------------------------------------------------------------


def open_texts(args, config):
    """(tokens, validation tokens or None), of which each fits the model."""
    cache = {"data_cache": args.data_cache, "is_builder": from_torchrun("LOCAL_RANK") == 0}
    fits = {"tokenizer": args.tokenizer, "vocab_size": config.vocab_size, "seq_len": args.seq_len}
    tokens = data.open_tokens(args.data, args.tokenizer, **cache)
    source = f"--data {args.data or '(default)'}"
    data.check_tokens(tokens, source=source, needed=args.global_batch_size, **fits)
    if not args.val_data:
        return tokens, None
    try:
        val_tokens = data.open_tokens(args.val_data, args.tokenizer, **cache)
    except ValueError as error:  # which speaks of --data
        raise ValueError(str(error).replace("--data", "--val-data", 1)) from error
    data.check_tokens(val_tokens, source=f"--val-data {args.val_data}", needed=1, **fits)
    return tokens, val_tokens


def describe_job(args, job, place):
    """(label, text) pairs: model, ranks, stages, memory per rank and batch; `place`, "on cuda"."""
    c, seq_len, n_data = job.config, args.seq_len, job.mesh["data"].size()
    whole, local = args.global_batch_size, args.local_batch_size
    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees_of(args).items())
    pairs = [
        ("model", f"{args.model}: {model.count_parameters(c):,} parameters, {c.n_layers} layers, "
         f"dim {c.dim}, vocabulary {c.vocab_size:,}"),
        ("ranks", f"{dist.get_world_size()} {place}: {axes}; computes in {args.param_dtype}, sums "
         f"gradients in {args.reduce_dtype}"),
        ("memory", f"{job.n_local:,} parameters on this rank; with gradients and optimizer states "
         f"{job.n_local * 4 * OPTIMIZERS[args.optimizer] / 2**20:,.1f} MiB"),
        ("batch", f"{whole} sequences x {seq_len} = {whole * seq_len:,} tokens a step; {n_data} "
         f"data rank{'s' * (n_data > 1)} x {local} x {whole // (n_data * local)} accumulated"),
    ]  # fmt: skip
    if c.n_experts:
        n_layers, ep = c.n_layers - c.n_dense_layers, job.mesh["ep"].size()
        text = f"{c.n_experts} in each of {n_layers} layers, of which a token takes {c.top_k}: "
        text += f"{model.count_parameters(c, active=True):,} parameters active; ep {ep}: a rank's "
        text += f"{c.n_experts // ep}, sharded over {job.mesh['efsdp'].size()} ranks"
        pairs.insert(1, ("expert", text + ("; not in float8" if args.float8 else "")))
    if args.pp > 1:
        names, n = stage_names(args, c), local // args.microbatch_size
        text = f"{args.pp_schedule}, microbatches {n} of {args.microbatch_size}, "
        text += pipeline.describe_stages(
            names, args.pp_schedule, pp=args.pp, n_microbatches=n, ac=args.ac
        )
        pairs.insert(-2, ("stages", text))
    return pairs


def describe_data(tokens, val_tokens, run, n_epochs):
    """(label, text) pair: how much text there is, and how often the run reads it."""
    epochs = f"{n_epochs:.2f}" if n_epochs >= 0.01 else "less than 0.01"
    text = f"{tokens.n_tokens:,} tokens, ids below {tokens.vocab_size:,}; {run} are {epochs} epochs"
    if val_tokens and val_tokens.fingerprint == tokens.fingerprint:
        text += "\n--val-data holds the same tokens, and tells nothing of other text"
    return [("data", text)]


def check_fit(job, hardware, *, n_numbers, on_host):
    """Raise TrainingError if a rank has no memory for its states, before it asks for any."""
    # whole, one at a time, and of experts each by itself
    drawn = max(math.prod(shape[-2:]) for shape in job.shapes.values())
    on_gpu = job.device.type == "cuda" and not on_host
    watch.check_memory(
        4 * (job.n_local * n_numbers + drawn),
        hardware.memory_bytes if on_gpu else watch.free_host_bytes(),
        1 if on_gpu else from_torchrun("LOCAL_WORLD_SIZE"),
    )


def describe_moot(args):
    """(label, text) pairs about settings that other flags make moot, in part or whole."""
    pairs = []
    if args.warmup_steps > args.steps:
        pairs.append(f"--warmup-steps {args.warmup_steps} is cut to --steps {args.steps}")
    for name in ("pp_schedule", "microbatch_size") if args.pp == 1 else ():
        if is_given(args, name):
            pairs.append(f"{flag_of(name)} {getattr(args, name)} does nothing, as --pp is 1")
    if args.async_tp and args.float8 not in (None, "tensorwise"):
        pairs.append("--async-tp overlaps no all-gather with this --float8, but with tensorwise")
    return [("note", text) for text in pairs]


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


def choose_checkpoint(folder, resume):
    """(step, its train.json) to resume from, or (0, None): what rank 0 gets or raises, all do."""
    found = [0, None, None]
    if dist.get_rank() == 0:
        for name in checkpoint.unpublished(folder):
            print(f"ignored: {folder / name} was never finished")
        try:
            if step := checkpoint.choose_step(folder, resume):
                found = [step, checkpoint.read_train_state(folder, step), None]
        except ValueError as error:
            found[2] = str(error)
    dist.broadcast_object_list(found)
    step, state, error = found
    if error:
        raise watch.TrainingError(error)
    return step, state


def check_resumable(args, config, tokens, state):
    """Raise TrainingError if this run cannot go on from there; print what else differs."""
    flags = state["flags"]

    def tell(flags, config, fingerprint):
        """The model, and what decides which windows were already seen."""
        typed = [f"{flag_of(name)} {flags[name]}" for name in ("optimizer", "seq_len", "seed")]
        fields = [f"--set {key}={value}" for key, value in dataclasses.asdict(config).items()]
        return [f"--model {flags['model']}", *fields, *typed, f"--data (its tokens) {fingerprint}"]

    there = model.ModelConfig(**state["model"])  # with defaults of fields that are younger
    was = tell(flags, there, state["data_fingerprint"])
    now = tell(vars(args), config, tokens.fingerprint)
    if was[1:] != now[1:]:  # the name alone makes no other model
        there, here = [x for x in was if x not in now], [x for x in now if x not in was]
        raise watch.TrainingError(
            f"the checkpoint at step {state['step']} in --out {args.out} has {', '.join(there)}, "
            f"and this run {', '.join(here)}: to go on give the former, or start in another --out"
        )
    changed = [
        f"{name} {flags.get(name)} -> {value}"
        for name, value in vars(args).items()
        if flags.get(name) != value and name not in ("resume", "data", "data_cache")
    ]
    if dist.get_rank() == 0:
        if changed:
            print("flags changed since the checkpoint: " + ", ".join(changed))
        watch.print_pairs(describe_jumps(flags, vars(args), state["step"]))


def describe_jumps(was, now, step):
    """(label, text) pairs: what changes in the midst of a run, and the flags that keep it.

    Args:    was and now, {name: value} of the flags up to `step` and from there on.
    """
    lr, lr_now = (lr_at(step, argparse.Namespace(**flags)) for flags in (was, now))
    notes, n_data = [], now["dp_replicate"] * now["dp_shard"]
    if step < now["steps"] and not math.isclose(lr, lr_now):
        notes.append(
            f"another schedule from here on: by it lr was {lr_now:.2e} at step {step}, and not "
            f"{lr:.2e}; --lr {lr:.4g} --warmup-steps 0 --decay-ratio 0 keeps that"
        )
    batch, batch_now = (flags["global_batch_size"] for flags in (was, now))
    if batch != batch_now:
        local = math.gcd(batch // n_data, now["local_batch_size"])
        keeps = f"--global-batch-size {batch} --local-batch-size {local} keeps the former"
        notes.append(
            f"the global batch goes from {batch} to {batch_now} sequences, and lr does not follow; "
            + (f"{n_data} data ranks cannot share {batch}" if batch % n_data else keeps)
        )
    return [("note", text) for text in notes]


def load(job, folder, step, *, init_from):
    """Fill the job from the checkpoint of `step`, or at step 0 from --init-from if it is given."""
    try:
        if step:
            checkpoint.load_checkpoint(folder, step, job.stages, job.optimizer, shapes=job.shapes)
        elif init_from:
            checkpoint.load_weights(init_from, job.stages, shapes=job.shapes)
    except ValueError as error:
        raise watch.TrainingError(error) from error  # the same on all ranks
    refresh_scales(job)
    dist.barrier()
    if dist.get_rank() == 0 and step:
        print(f"resumed {folder} at step {step}")
        if init_from:
            print(f"--init-from {init_from} is not looked at: this run has begun")
        for name in checkpoint.set_aside_newer(folder, step):
            print(f"set aside: {folder / name} is newer than --resume {step}")
    elif dist.get_rank() == 0 and init_from:
        print(f"weights of {init_from}, at step 0")


def save(checkpointer, step, job, stats, state):
    """Begin to save a step, but never one that is not finite.

    A failed save, this or the one before, is told loudly, and training goes on.
    """
    watch.check_finite(step, stats, job.weights)
    try:
        checkpointer.save(step, job.stages, job.optimizer, state)
    except checkpoint.CheckpointError as error:
        if dist.get_rank() == 0:
            print(f"WARNING: {error}; training goes on", file=sys.stderr, flush=True)


# ---- 5. Flags ----------------------------------------------------------------------------------


def checked(kind, rule, is_met):
    """A type for argparse: `kind(text)`, if it meets the rule."""

    def number(text):
        value = kind(text)
        if not is_met(value):  # NaN meets none
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    return number


def at_least(least, or_else=None):
    """Numbers of the kind of `least` from there on, or the one `or_else`."""
    rule = f"at least {least}: try {least}"
    return checked(type(least), rule, lambda value: value >= least or value == or_else)


more_than_zero = checked(
    float, "a number greater than 0: try its default", lambda value: 0 < value < math.inf
)
share = checked(float, "between 0 and 1: try 0.5", lambda value: 0 <= value <= 1)
ac_choice = checked(
    str, "none, full, op or a number: try op", re.compile(r"none|full|op|0*[1-9]\d*").fullmatch
)


def resume_choice(text):
    return text if text in ("auto", "never") else int(text)


def is_range(text):
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    return match and int(match[1]) <= int(match[2])


def build_parser():
    """Every flag, in the groups of the files that it lands in. @FILE reads flags from a file."""
    parser = argparse.ArgumentParser(
        description="Pretrain a model on one process, or with torchrun on any mesh of ranks.",
        epilog="@recipes/NAME.args reads flags from a file; in it, # starts a comment. "
        "`python simulate.py --world-size N` takes the same flags and needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = raise_value_error  # printed once like every other refusal, not once per rank

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=model.MODELS, default="debug", help="its shape -> model.py:MODELS")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override "
        "fields of the config, as in n_layers=5 dim=64 -> model.py:override_config")
    add("--seq-len", type=at_least(1), default=256, help="tokens -> model.py:Transformer")
    add("--seed", type=int, default=0, help="of weights and data order -> model.py:draw_weight")

    add = parser.add_argument_group("data").add_argument
    add("--data", help="text (file, folder or glob) or a folder of token shards; if not given, "
        "the text of Python's standard library -> data.py:open_tokens")
    add("--data-cache", default=".cache", help="folder for tokens made here -> data.py:open_tokens")
    add("--tokenizer", default="bytes", help="bytes, or a tiktoken file -> data.py:load_tokenizer")
    add("--local-batch-size", type=at_least(1), help="sequences per data rank per forward and "
        "backward; if not given 4, or a microbatch per stage if that is more -> train.py:gradients")
    add("--global-batch-size", type=at_least(1, or_else=-1), default=-1,
        help="sequences per optimizer step on all ranks; what does not fit at once is accumulated; "
        "-1: no accumulation -> train.py:resolve_args")
    add("--val-data", help="like --data, for validation -> train.py:open_texts")
    add("--val-every", type=at_least(0), default=0, help="steps; 0: never -> train.py:pretrain")
    add("--val-steps", type=at_least(1), default=8, help="batches each time -> train.py:evaluate")

    add = parser.add_argument_group("parallel").add_argument
    add("--dp-replicate", type=at_least(1), default=1,
        help="HSDP replicas -> parallel.py:apply_fsdp")
    add("--dp-shard", type=at_least(1, or_else=-1), default=-1,
        help="FSDP; -1: the ranks that the other axes leave -> parallel.py:apply_fsdp")
    add("--cp", type=at_least(1), default=1, help="context parallel -> parallel.py:apply_cp")
    add("--tp", type=at_least(1), default=1,
        help="tensor and sequence parallel -> parallel.py:apply_tp")
    add("--pp", type=at_least(1), default=1, help="pipeline parallel -> pipeline.py:build_schedule")
    add("--ep", type=at_least(1), default=1, help="expert parallel: ranks of dp-shard x cp x tp "
        "that share the experts -> parallel.py:apply_ep")
    add("--balance-speed", type=at_least(0.0), default=1e-3,
        help="of the biases that level the load of experts, per step -> parallel.py:balance")
    add("--no-loss-parallel", action="store_true",
        help="gather logits over tp before the loss -> parallel.py:apply_tp")
    add("--reshard", choices=("default", "always", "never"), default="default",
        help="free gathered parameters after the forward pass -> parallel.py:apply_fsdp")
    add("--cpu-offload", action="store_true", help="keep weights, gradients and optimizer on the "
        "host, which under accumulation waits for each unit's gradient -> parallel.py:apply_fsdp")
    add("--ac", type=ac_choice, default="none", metavar="{none,full,op,N}",
        help="recompute activations in the backward pass -> parallel.py:apply_ac")
    add("--compile", action="store_true", help="each block, and without "
        "loss parallelism the loss -> parallel.py:apply_compile")
    add("--async-tp", action="store_true",
        help="overlap tp's collectives with matmuls -> parallel.py:enable_async_tp")
    add("--loss-chunks", type=at_least(1), default=1,
        help="compute head and loss in so many pieces of the sequence -> parallel.py:build_loss")
    add("--param-dtype", choices=DTYPES,
        help="computes in it; if not given bf16 on GPUs, fp32 on CPUs. On GPUs fp32 does without "
        "TF32: torch.set_float32_matmul_precision is yours to call -> parallel.py:apply_fsdp")
    add("--reduce-dtype", choices=DTYPES, default="fp32",
        help="sums gradients in it -> parallel.py:apply_fsdp")

    add = parser.add_argument_group("pipeline").add_argument
    add("--pp-schedule", default="1F1B", metavar="{NAME,FILE.csv}", help="one of "
        f"{', '.join(pipeline.SCHEDULES)}, or a file of one's own -> pipeline.py:check_schedule")
    add("--microbatch-size", type=at_least(1), default=1,
        help="sequences in each piece of a local batch -> pipeline.py:check_pipeline")
    add("--stages-per-rank", type=int,
        help="if not given 1, or 2 where the schedule needs it -> pipeline.py:count_stages")
    add("--pp-split", metavar="NAMES", help="cut before these modules, as in layers.4,layers.8; "
        "if not given, evenly -> pipeline.py:split_at")
    add("--pp-end-weights", type=int, nargs=2, metavar=("IN", "OUT"), help="layers that embedding "
        "and head count as, if not given 1 1 -> pipeline.py:split_layers")

    add = parser.add_argument_group("float8").add_argument
    add("--float8", choices=float8.RECIPES, help="8-bit matmuls -> float8.py:apply_float8")
    add("--float8-all-gather", action="store_true",
        help="FSDP gathers 8-bit weights; tensorwise only -> float8.py:precompute_float8_scales")
    add("--float8-filter", type=lambda text: [name for name in text.split(",") if name],
        default="output", metavar="NAMES", help="linears to leave alone, as in "
        "output,layers.0,auto; auto: those too small to gain -> float8.py:skip_reason")
    add("--float8-emulate", action="store_true",
        help="the same numbers on any hardware, slowly -> float8.py:check_float8")

    add = parser.add_argument_group("train").add_argument
    add("--steps", type=at_least(1), default=100, help="of the optimizer -> train.py:pretrain")
    add("--optimizer", choices=OPTIMIZERS, default="adamw",
        help="what it is -> train.py:build_optimizer")
    add("--lr", type=more_than_zero, default=2e-3, help="its peak -> train.py:lr_at")
    add("--warmup-steps", type=at_least(0), default=10, help="linear -> train.py:lr_at")
    add("--decay-ratio", type=share,
        help="share of the steps that decay; if not given, all after warmup -> train.py:lr_at")
    add("--decay", choices=("linear", "sqrt", "cosine"), default="linear",
        help="its shape -> train.py:lr_at")
    add("--min-lr-ratio", type=share, default=0.0, help="end of the decay -> train.py:lr_at")
    add("--weight-decay", type=at_least(0.0), default=0.1,
        help="of all parameters -> train.py:build_optimizer")
    add("--beta1", type=share, default=0.9, help="of AdamW -> train.py:build_optimizer")
    add("--beta2", type=share, default=0.95, help="of AdamW -> train.py:build_optimizer")
    add("--eps", type=more_than_zero, default=1e-8, help="of AdamW -> train.py:build_optimizer")
    add("--max-norm", type=checked(float, "greater than 0: try 1", lambda x: x > 0), default=1.0,
        help="of all gradients together; larger ones are scaled -> parallel.py:clip_grad_norm")

    add = parser.add_argument_group("checkpoint").add_argument
    add("--out", default="out", help="folder for checkpoints and metrics -> train.py:pretrain")
    add("--checkpoint-every", type=at_least(0), default=500,
        help="steps, and after the last; 0: save nothing -> train.py:pretrain")
    add("--checkpoint-mode", choices=("async", "sync"), default="async",
        help="train on while files are written, or wait -> checkpoint.py:Checkpointer")
    add("--keep-latest", type=at_least(0), default=10,
        help="checkpoints that stay; 0: all -> checkpoint.py:Checkpointer")
    add("--resume", type=resume_choice, default="auto", metavar="{auto,never,STEP}",
        help="from the newest checkpoint in OUT, or none, or STEP -> checkpoint.py:choose_step")
    add("--init-from", metavar="PATH", help="start at step 0 with the weights of a checkpoint or a "
        "Hugging Face folder -> checkpoint.py:load_weights")

    add = parser.add_argument_group("watch").add_argument
    add("--log-every", type=at_least(1), default=10, help="steps -> train.py:pretrain")
    add("--tensorboard", action="store_true", help="write OUT/tensorboard -> watch.py:Metrics")
    add("--profile-steps", type=checked(str, "FIRST:LAST: try 10:12", is_range),
        metavar="FIRST:LAST",
        help="trace these steps into OUT/profile, one file per rank -> watch.py:start_profiler")
    add("--memory-snapshot", action="store_true", help="CUDA: what filled the memory, at the end "
        "or when it runs out, into OUT/memory -> watch.py:dump_memory")
    add("--flight-recorder", type=at_least(0), default=0, metavar="N",
        help="remember the last N collectives, and write them into OUT/flight when a rank fails or "
        "hangs, for `python watch.py OUT` -> watch.py:record_collectives")
    add("--check-ranks-every", type=at_least(0), default=0, help="steps; compare what ranks must "
        "have in common, 0: never -> watch.py:check_ranks")
    add("--timeout-s", type=more_than_zero, default=300.0, help="after which a collective counts "
        "as hung, once the first step is done; before, 600 s or more -> watch.py:set_timeouts")
    add("--deterministic", action="store_true",
        help="only kernels that repeat bit for bit -> train.py:init_distributed")
    add("--ignore-memory", action="store_true",
        help="start although memory seems too small for the states -> train.py:pretrain")
    return parser


def raise_value_error(message):
    """argparse's "argument --steps: 0 must be ..." without its first word and the colon."""
    raise ValueError(re.sub(r"^argument (--\S+): ", r"\1 ", message))


def expand_files(argv):
    """argv with the flags of each @FILE in its place; ValueError names the file and the line."""
    words = []
    for word in argv:
        if not word.startswith("@"):
            words.append(word)
            continue
        place = "as text"
        try:
            for n, line in enumerate(Path(word[1:]).read_text("utf-8-sig").splitlines(), start=1):
                place = f"in line {n} ({line.strip()})"
                words += shlex.split(line, comments=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{word} cannot be read {place}: {error}: @FILE is a text file of flags in UTF-8; "
                "mend it, or try one of recipes/*.args"
            ) from error
    return words


def parse_args(argv=None, parser=None):
    """The flags as typed, each in its range, of train.py's parser or of one with more flags."""
    parser, words = parser or build_parser(), expand_files(sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        flag, known = unknown[0].split("=")[0], map(flag_of, vars(args))
        near = {"--learning-rate": ["--lr"]}.get(flag) or get_close_matches(flag, known, 3, 0.5)
        way_out = f"try {' or '.join(near) or '--help'}"
        if flag in ("--simulate", "--simulate-rank"):
            way_out = "run `python simulate.py` with the same flags and --world-size N"
        elif not flag.startswith("-") and Path(flag).exists():
            way_out = "the shell has put file names in a glob's place; quote it, as in --data "
            way_out += "'c4/*.json.gz'"
        raise ValueError(f"unrecognized argument: {unknown[0]}: {way_out}")
    return args


def resolve_args(args, hardware, world_size):
    """Fill in, in place, the defaults that depend on other flags; return the ModelConfig."""
    config = model.override_config(model.MODELS[args.model], args.set)
    if args.dp_shard == -1:
        args.dp_shard = max(1, world_size // (args.pp * args.dp_replicate * args.cp * args.tp))
    if args.local_batch_size is None:
        args.local_batch_size = 4
        if args.pp > 1:
            n_stages = args.pp * (pipeline.kind_of(args.pp_schedule).stages_per_rank or 2)
            args.local_batch_size = max(4, n_stages * args.microbatch_size)
    if args.global_batch_size == -1:
        args.global_batch_size = args.local_batch_size * args.dp_replicate * args.dp_shard
    if args.param_dtype is None:
        args.param_dtype = "bf16" if hardware.device_type == "cuda" else "fp32"
    return config


def degrees_of(args):
    """{axis: degree}, outer to inner."""
    return {axis: getattr(args, axis) for axis in AXES}


def stage_names(args, config):
    """The module names of every pipeline stage: [[name, ...], ...]."""
    return pipeline.split_model(
        config.n_layers,
        args.pp_schedule,
        pp=args.pp,
        stages_per_rank=args.stages_per_rank,
        pp_split=args.pp_split,
        pp_end_weights=args.pp_end_weights,
    )


def flag_of(name):
    return "--" + name.replace("_", "-")


def is_given(args, name):
    """Whether a setting differs from its default."""
    return getattr(args, name) != getattr(build_parser().parse_args([]), name)


def check_needs(args, config):
    """Raise ValueError for a setting that would be accepted and do nothing."""
    for names, is_met, missing, way_out in (
        (("val_data", "val_steps"), args.val_every,
         "--val-every is 0, so that nothing is validated", "add --val-every 100"),
        (("val_every",), args.val_data,
         "--val-data is not given, and validation reads its own text", "add --val-data PATH"),
        (("stages_per_rank", "pp_split", "pp_end_weights"), args.pp > 1,
         "--pp is 1, so that there is no pipeline", "add --pp 2"),
        (("pp_end_weights",), not args.pp_split,
         f"--pp-split {args.pp_split} says where to cut", "give one of the two"),
        (("no_loss_parallel",), args.tp > 1,
         "--tp is 1, so that every rank has whole logits", "add --tp 2"),
        (("balance_speed",), config.n_experts,
         "the model has no experts", "take --model debug-moe"),
        (("float8_filter",), args.float8,
         "--float8 is not given, so that no linear is converted", "add --float8 tensorwise"),
        (("beta1", "beta2", "eps"), args.optimizer == "adamw",
         f"--optimizer {args.optimizer} has no such number", "take --optimizer adamw"),
        (("keep_latest", "checkpoint_mode"), args.checkpoint_every,
         "--checkpoint-every is 0, so that nothing is saved", "add --checkpoint-every 500"),
        (("profile_steps",), int((args.profile_steps or "0:0").split(":")[1]) <= args.steps,
         f"the run ends at --steps {args.steps}", "trace earlier steps"),
    ):  # fmt: skip
        for name in names:
            if not is_met and is_given(args, name):
                raise ValueError(
                    f"{flag_of(name)} {getattr(args, name)} would do nothing: {missing}; "
                    f"{way_out}, or leave {flag_of(name)} out"
                )


def check_args(args, config, hardware, world_size):
    """Raise ValueError for the first rule that the resolved flags break; needs no process group.

    The rules live with their techniques: this asks them, in one order.
    """
    degrees, cp, tp, pp = degrees_of(args), args.cp, args.tp, args.pp
    seq_len, dtype, device_type = args.seq_len, args.param_dtype, hardware.device_type
    check_needs(args, config)
    model.check_config(config)
    parallel.check_mesh(degrees, config, model=args.model, seq_len=seq_len, world_size=world_size)
    parallel.check_ep(args.ep, config, degrees, param_dtype=dtype, is_compiled=args.compile)
    parallel.check_loss_chunks(args.loss_chunks, seq_len=seq_len, cp=cp, tp=tp)
    is_grouped = config.n_kv_heads < config.n_heads
    parallel.check_cp(cp=cp, param_dtype=dtype, is_grouped=is_grouped, device_type=device_type)
    if args.compile:
        parallel.check_compile(device_type)
    if args.async_tp:
        parallel.check_async_tp(tp=tp, compile=args.compile, device_type=device_type)
    if pp > 1:
        pipeline.check_pipeline(
            args.pp_schedule,
            pp=pp,
            local_batch_size=args.local_batch_size,
            microbatch_size=args.microbatch_size,
            stages_per_rank=args.stages_per_rank,
            tied=config.tied_embeddings,
        )
        pipeline.check_split_backward(
            args.pp_schedule, ac=args.ac, compile=args.compile, reshard=args.reshard
        )
        stage_names(args, config)  # raises what is wrong with the split
    float8.check_float8(
        args.float8,
        all_gather=args.float8_all_gather,
        skip=args.float8_filter,
        emulate=args.float8_emulate,
        compile=args.compile,
        capability=hardware.capability,
    )
    if args.float8:
        rows = args.microbatch_size if pp > 1 else args.local_batch_size
        float8.check_float8_fits(
            args.float8,
            skip=args.float8_filter,
            linear_names=model.linear_names(config),
            n_tokens=rows * seq_len // cp,
        )
    n_data = args.dp_replicate * args.dp_shard
    data.check_batch(args.global_batch_size, args.local_batch_size, n_data)
    watch.check_records(
        tensorboard=args.tensorboard,
        memory_snapshot=args.memory_snapshot,
        device_type=device_type,
    )
    has_begun = checkpoint.check_out(Path(args.out))
    if args.init_from and not has_begun:
        checkpoint.check_init_from(args.init_from, dataclasses.asdict(config))


def read_flags(argv, hardware, world_size):
    """(args, ModelConfig) of a command that may run: its defaults filled in, its rules checked."""
    args = parse_args(argv)
    config = resolve_args(args, hardware, world_size)
    check_args(args, config, hardware, world_size)
    return args, config


# ---- 6. Ranks and devices ----------------------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """What a rank runs on; a simulation hands over what it pretends to run on."""

    device_type: str  # cuda or cpu
    capability: tuple | None  # of a GPU: (major, minor)
    memory_bytes: int | None  # of one GPU


def find_hardware():
    """This host's; ValueError if torchrun has started more ranks than there are GPUs."""
    if not torch.cuda.is_available():
        return Hardware("cpu", None, None)
    n_local, n_devices = from_torchrun("LOCAL_WORLD_SIZE"), torch.cuda.device_count()
    if n_local > n_devices:
        raise ValueError(
            f"--nproc-per-node {n_local} (torchrun) exceeds this host's {n_devices} GPUs: each "
            "rank needs one; start fewer, or CUDA_VISIBLE_DEVICES= torchrun to use the CPU"
        )
    gpu = torch.cuda.get_device_properties(from_torchrun("LOCAL_RANK"))
    return Hardware("cuda", (gpu.major, gpu.minor), gpu.total_memory)


def from_torchrun(name):
    """torchrun's RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE, or a single process's."""
    text = os.environ.get(name, "1" if name.endswith("SIZE") else "0")
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment must be a number: unset {name}")
    return int(text)


def check_environment():
    """Raise ValueError if ranks were started in a way that torchrun does not start them."""
    tells = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if len(tells) == 1:
        raise ValueError(
            f"{' '.join(map('='.join, tells.items()))} alone in the environment starts no job: "
            "torchrun sets RANK and WORLD_SIZE; start it, or unset the one"
        )
    n_tasks = os.environ.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in os.environ else "1"
    if not tells and n_tasks != "1":
        raise ValueError(
            f"srun has started {n_tasks} tasks, and each would be a run of its own: let each start "
            "torchrun, as recipes/slurm.sh does"
        )


FIRST_STEP_S = 600.0  # least limit of a collective until the first step is done: compiling is slow


def init_distributed(args, hardware):
    """Join the process group and return this rank's device.

    Before that, what must be said before CUDA or the groups start: --deterministic, the recorders,
    how many files may be open.
    """
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over every new tensor
    if args.flight_recorder:
        watch.record_collectives(Path(args.out) / "flight", args.flight_recorder)
    device = torch.device(hardware.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", from_torchrun("LOCAL_RANK"))
        torch.cuda.set_device(device)
    if args.memory_snapshot:
        watch.record_memory()
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read at the first tensor
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # gloo holds a descriptor for each peer in each group
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    store = None  # torchrun's, at the address in the environment
    if "RANK" not in os.environ:  # plain `python train.py`: a group of one, without a network
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # after --max-restarts the agent's store still holds where the dead ranks listened, and gloo
        # would call there: each attempt looks for its peers under a name of its own
        agent = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        store = dist.PrefixStore(attempt, dist.TCPStore(*agent, is_master=False))
    address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    said = f"waiting for {from_torchrun('WORLD_SIZE')} ranks to meet at {address} ..."
    waits = threading.Timer(15.0, partial(print, said, file=sys.stderr, flush=True))
    waits.daemon = True
    waits.start()
    dist.init_process_group(
        # gloo beside nccl: offloaded gradients and checkpoints are reduced on the host
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=max(FIRST_STEP_S, args.timeout_s)),
        store=store,
        rank=from_torchrun("RANK"),
        world_size=from_torchrun("WORLD_SIZE"),
    )
    waits.cancel()
    return device


if __name__ == "__main__":
    run()

"""Float8 and MXFP8 linears: 8-bit operands, which tensor cores multiply twice as fast as bf16.

apply_float8 swaps nn.Linear for torchao's on the meta device, before anything is sharded; parameter
names and float32 master weights stay. A linear y = x W^T is three matmuls, and each operand is
quantised just before its matmul: q = cast(x * scale), scale = format maximum / amax, where amax is
the largest magnitude, which then just fits; the product is divided by both scales, in bf16. BT is
the number of tokens, B times T in model.py's letters.

    forward        x  (BT, in)    @  W^T (in, out)   ->  y  (BT, out)    sum over in
    grad input     dy (BT, out)   @  W   (out, in)   ->  dx (BT, in)     sum over out
    grad weight    dy^T (out, BT) @  x   (BT, in)    ->  dW (out, in)    sum over BT

A scale that is constant along the sum can be taken out of it as a factor. So there is one for the
whole operand, or one for each row of the left and for each column of the right operand. The number
of scales of the left | the right operand:

    recipe               forward                grad input             grad weight
    tensorwise           1         | 1          1          | 1         1          | 1
    rowwise              BT        | out        BT         | in        out        | in
    rowwise_with_gw_hp   BT        | out        BT         | 1         bf16, not quantised
    mxfp8                BT in/32  | out in/32  BT out/32  | in out/32 out BT/32  | in BT/32

    format   exponent, mantissa bits   largest   holds
    e4m3     4, 3                      448       x, W and dy, but for
    e5m2     5, 2                      57344     dy of tensorwise: gradients need range
    e8m0     8, 0, no sign             2^127     the scales of MXFP8

The scales of both rowwise recipes are rounded down to a power of two. MXFP8 (OCP Microscaling 1.0)
gives every 32 neighbours along the sum one power of two, 2^ceil(log2(amax / 448)), which the tensor
cores of a B200 apply inside the sum. Floating point rounds every normal number to the same relative
step (2^-4 either way in e4m3), whatever its scale. What an outlier does is push the small values
that share its scale below the smallest normal number, 448 / 28672: finer scales limit the damage.

Float8 all-gather (tensorwise only) lets FSDP2 gather quantised weights, 1 byte per element for 2.
87 % of 8b's parameters are in converted linears, so a gather moves 0.57 times the bytes. The
scale needs the amax over all shards: an all-reduce of one number per weight and gather, or, with
precompute_float8_scales, one all-reduce per step for all weights.

When it does not pay: quantising reads and writes every operand, which small matmuls do not earn
back (`auto` in --float8-filter skips them), and without --compile each of these passes is a kernel
of its own. Activations are saved for backward in bf16, so memory hardly falls: in the paper's
table 1 it goes from 77.0 to 76.8 GiB, and tokens/s per GPU from 6674 to 9409.

Scaling is dynamic: computed from the values at hand. The paper also names delayed scaling (the amax
of earlier steps: saves a pass over the tensor, but is state and late when values grow) and static
scaling (numbers fixed beforehand). torchao withdrew both in 0.10 (pytorch/ao#1680).

Left out: `output` unless the filter is changed; biases, which this model has none of.

Sources: paper §2.2.4; FP8 formats (arXiv 2209.05433); Microscaling (arXiv 2310.10537); torchao
0.18: `torchao.float8` and its prototype `torchao.prototype.moe_training.mxfp8_linear`.
"""

import dataclasses
import logging
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch._C._dispatch_has_kernel_for_dispatch_key    whether MXFP8's kernels are loaded,
#     torchao.prototype.mx_formats.kernels._mxfp8_cuda_kernels_available    and whether they can be
#     torch.distributed.tensor.parallel.ParallelStyle._apply    what a style of one's own overrides
#     torchao.float8.float8_training_tensor.Float8TrainingTensor._data    its bytes, for gloo
#     torch.ops._c10d_functional    the all-gather of those bytes

# ---- 1. Refusals -------------------------------------------------------------------------------


def check_float8(recipe, *, all_gather, skip, emulate, compile, capability):
    """Raise ValueError for flags that cannot go together, from plain values alone.

    Args:    recipe, one of RECIPES or None; skip, the entries of --float8-filter; capability, the
             GPU's (major, minor) compute capability, None without a GPU.
    """
    if recipe is None:
        if all_gather or emulate:
            flag = "--float8-all-gather" if all_gather else "--float8-emulate"
            raise ValueError(
                f"{flag} conflicts with --float8, which is not given: add --float8 tensorwise or "
                f"drop {flag}"
            )
        return
    flag = f"--float8 {recipe}"
    if find_spec("torchao") is None:
        raise ValueError(
            f"{flag} conflicts with this Python, where torchao is not installed: torchao holds the "
            "float8 linears; run `pip install torchao==0.18.0` or drop --float8"
        )
    if all_gather and recipe != "tensorwise":
        raise ValueError(
            f"--float8-all-gather conflicts with {flag}: only a scale that is one number for the "
            "whole weight is known to every shard; use --float8 tensorwise or drop the flag"
        )
    if "auto" in skip and recipe not in ("tensorwise", "rowwise"):
        raise ValueError(
            f"--float8-filter auto conflicts with {flag}: small matmuls were only measured for "
            "tensorwise and rowwise; name the modules to leave out instead, such as attention.wk"
        )
    if emulate and compile:
        raise ValueError(
            f"--float8-emulate conflicts with --compile ({flag}): emulation checks numbers and "
            "runs eagerly; drop one of the two"
        )
    needed, hardware = ((10, 0), "B200") if recipe == "mxfp8" else ((8, 9), "L40S or H100")
    if not emulate and (capability is None or capability < needed):
        device = "a CPU" if capability is None else "a GPU of capability {}.{}".format(*capability)
        raise ValueError(
            f"{flag} conflicts with {device}: its matmuls need compute capability "
            f"{needed[0]}.{needed[1]} ({hardware}) or more; add --float8-emulate to run the same "
            "numbers slowly, or drop --float8"
        )


def check_float8_fits(recipe, *, skip, linear_names, n_tokens):
    """Raise ValueError for filters that match nothing and token counts that no matmul can take.

    Args:    linear_names, of the whole model; n_tokens, the tokens of one forward on one rank: T/cp
             times the microbatch, or without a pipeline times the local batch.
    """
    for entry in skip:
        if entry != "auto" and not any(is_within(name, entry) for name in linear_names):
            raise ValueError(
                f"--float8-filter {entry} matches none of the model's linears, such as "
                f"{linear_names[0]}: an entry is a module's name or whole dotted parts of it; try "
                "output, layers.0, attention.wk or feed_forward"
            )
    multiple = size_multiple(recipe)
    if recipe != "rowwise_with_gw_hp" and n_tokens % multiple:
        raise ValueError(
            f"--float8 {recipe} conflicts with {n_tokens} tokens per forward and rank (--seq-len / "
            "--cp times --microbatch-size, or --local-batch-size without --pp): a weight gradient "
            f"sums over them in groups of {multiple}; choose --seq-len / --cp divisible by it"
        )


# ---- 2. Which linears --------------------------------------------------------------------------


def size_multiple(recipe):
    """What a matmul's dimensions must be multiples of: the MX block, or 16 bytes for cuBLAS."""
    return 32 if recipe == "mxfp8" else 16


def is_within(name, entry):
    """Whether a filter entry is some whole, consecutive parts of a dotted module name."""
    return f".{entry}." in f".{name}."


def is_small(recipe, *, out_features, in_features):
    """Whether a matmul is too small to earn back its casts: torchao's figures for an H100."""
    if recipe == "tensorwise":
        return in_features <= 4096 and out_features <= 1024
    narrow = out_features <= 4096 and in_features <= 2048
    return out_features <= 2048 or in_features <= 1024 or narrow  # rowwise


def skip_reason(name, shape, *, recipe, skip, tp):
    """Why a linear with a weight of this full shape (out, in) stays as it is, or None."""
    out_features, in_features = shape
    for entry in skip:
        if entry != "auto" and is_within(name, entry):
            return f"--float8-filter {entry}"
    if "auto" in skip and is_small(recipe, out_features=out_features, in_features=in_features):
        return f"--float8-filter auto: {out_features} x {in_features} is too small to gain"
    is_rowwise = name.split(".")[-1] in ("wo", "w2")  # TP splits their in features
    local_out = out_features / (1 if is_rowwise else tp)
    local_in = in_features / (tp if is_rowwise else 1)
    multiple = size_multiple(recipe)
    if local_out % multiple or local_in % multiple:
        return f"{local_out:g} x {local_in:g} per tp rank is no multiple of {multiple} both ways"
    return None


# ---- 3. Conversion -----------------------------------------------------------------------------


@contextmanager
def quiet_torchao():
    """Import torchao without the log lines that it writes on every rank.

    They say that its optional CUDA libraries do not load here: `torchao.float8` does not use them,
    and swap_in_mxfp8 asks for MXFP8's itself.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def apply_float8(stage, recipe, *, all_gather, skip, emulate, tp=1):
    """Swap the stage's linears for 8-bit ones, in place, and say which.

    Before:  the whole model or a pipeline stage on the meta device, nothing sharded.
    After:   same parameter names and shapes. With all_gather the weights are wrapped in a tensor
             subclass that FSDP2 asks for the bytes to gather.
    Returns: (names converted, {name skipped: reason}).
    Raises:  ValueError if MXFP8's CUDA kernels are missing.
    """
    converted, skipped = [], {}
    for name, module in stage.named_modules():
        if isinstance(module, nn.Linear):
            reason = skip_reason(name, module.weight.shape, recipe=recipe, skip=skip, tp=tp)
            if reason is None:
                converted.append(name)
            else:
                skipped[name] = reason
    if recipe == "mxfp8":
        swap_in_mxfp8(stage, converted, emulate=emulate)
    else:
        swap_in_float8(stage, converted, recipe=recipe, all_gather=all_gather, emulate=emulate)
    return converted, skipped


def swap_in_float8(stage, names, *, recipe, all_gather, emulate):
    """Make torchao's float8 linears of those with these names, in place."""
    with quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=emulate)
    convert_to_float8_training(stage, config=config, module_filter_fn=lambda _, name: name in names)


def swap_in_mxfp8(stage, names, *, emulate):
    """The same with MXFP8; ValueError if this torchao came without its kernels."""
    with quiet_torchao():
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.prototype.mx_formats import kernels
        from torchao.quantization.quantize_.common import KernelPreference
    has_kernels = kernels._mxfp8_cuda_kernels_available and (
        torch._C._dispatch_has_kernel_for_dispatch_key("torchao::mxfp8_quantize", "CUDA")
    )
    if not emulate and not has_kernels:  # torchao itself would only fail in the first backward
        raise ValueError(
            "--float8 mxfp8 conflicts with this torchao, whose MXFP8 kernels are not loaded: they "
            "need a B200 and CUDA 12.8 or newer; install the torchao wheel built for this CUDA, or "
            "add --float8-emulate"
        )
    # this linear has a plain parameter, where torchao's quantize_ would wrap the weight: FSDP2, TP
    # and checkpoints need to know nothing about MXFP8
    kernel = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    for name in names:
        old = stage.get_submodule(name)
        with torch.device("meta"):
            new = MXFP8Linear(
                old.in_features, old.out_features, bias=False, kernel_preference=kernel
            )
        new.weight = old.weight
        stage.set_submodule(name, new)


# ---- 4. Tensor parallelism ---------------------------------------------------------------------


class Float8Style(ParallelStyle):
    """Apply `float8` to modules whose linears were all converted, and `plain` to the others.

    Costs:   the all-gather of activations before wq wk wv and w1 w3, and in backward that of the
             gradient before wo and w2, move 1 byte per element for 2. One skipped linear in
             attention makes its input travel in bf16; the others then quantise it themselves.
    """

    def __init__(self, float8, plain, **layouts):
        super().__init__()
        self.float8 = float8(**layouts)
        self.plain = plain(**layouts)

    def _apply(self, module, device_mesh):
        from torchao.float8.float8_linear import Float8Linear

        if device_mesh.device_type == "cpu":
            gather_float8_as_bytes()
        linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
        is_float8 = all(isinstance(linear, Float8Linear) for linear in linears)
        style = self.float8 if is_float8 else self.plain
        return style._apply(module, device_mesh)


def gather_float8_as_bytes():
    """Let torchao's all-gather send float8 as uint8: gloo refuses the type, NCCL does not."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE, allgather_fp8

    def gather(op, args, kwargs=None):
        data_type = args[0]._data.dtype

        def gather_bytes(data, *rest, **options):
            return op(data.view(torch.uint8), *rest, **options).view(data_type)

        return allgather_fp8(gather_bytes, args, kwargs or {})

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = gather


def float8_tp_styles(recipe):
    """(colwise, rowwise, prepare_input) for parallel.py:apply_tp, after apply_float8.

    Tensorwise agrees on one scale over the tp ranks, quantises, then gathers. torchao has such
    styles for it alone; the other recipes use torch's own and gather bf16.
    """
    if recipe != "tensorwise":
        return ColwiseParallel, RowwiseParallel, PrepareModuleInput
    with quiet_torchao():
        from torchao.float8 import float8_tensor_parallel as styles
    return (
        partial(Float8Style, styles.Float8ColwiseParallel, ColwiseParallel),
        partial(Float8Style, styles.Float8RowwiseParallel, RowwiseParallel),
        partial(Float8Style, styles.PrepareFloat8ModuleInput, PrepareModuleInput),
    )


# ---- 5. Float8 all-gather with FSDP2 -----------------------------------------------------------


def precompute_float8_scales(stages):
    """Compute the scales of all float8-gathered weights of this rank's stages at once.

    When:    after every change of the weights: initialisation, resume and each optimizer step. A
             scale kept from older weights would be used without an error.
    Costs:   one all-reduce of a vector, one number per weight (two with TP, whose axis it reduces
             over as well; without this call TP ranks scale their slices each by themselves).
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(nn.ModuleList(stages))

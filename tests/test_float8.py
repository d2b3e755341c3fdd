"""float8.py: scales and matmuls against plain formulas, meshes against one process, refusals."""

import logging
import math
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import float8
import model as llama
import parallel

with float8.quiet_torchao():
    from torchao.float8 import float8_scaling_utils  # once, before the ranks are forked

CONFIG = llama.ModelConfig(64, 2, 4, 2, 128, vocab_size=96)
SEQ_LEN = 16
MAXIMUM = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# (relative half step of a normal number, absolute half step of a subnormal one), before scaling
HALF_STEP = {torch.float8_e4m3fn: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}


def build_meta(config=CONFIG):
    with torch.device("meta"):
        return llama.Transformer(config, seq_len=SEQ_LEN)


# ---- One linear --------------------------------------------------------------------------------


def scale_of(x, recipe, along):
    """The header's scales by plain arithmetic, shaped to broadcast over the 2-D operand x."""
    if recipe == "mxfp8":
        blocks = x.unflatten(along, (-1, 32))
        amax = blocks.abs().amax(along + 1, keepdim=True).expand_as(blocks)
        return 2.0 ** -torch.ceil(torch.log2(amax.flatten(along, along + 1) / 448))
    dtype = dtype_of(recipe)
    amax = x.abs().amax() if recipe.startswith("tensorwise") else x.abs().amax(along, keepdim=True)
    scale = (MAXIMUM[dtype] / amax.double()).float()
    return scale if recipe in ("tensorwise", "tensorwise_gradient") else 2 ** scale.log2().floor()


def dtype_of(recipe):
    return torch.float8_e5m2 if recipe == "tensorwise_gradient" else torch.float8_e4m3fn


def quantise(x, recipe, along):
    """x as 8-bit numbers, read back in float32; `along` is the dimension that is summed over."""
    scale = scale_of(x, recipe, along)
    return (x * scale).to(dtype_of(recipe)).float() / scale


def operands(recipe, x, w, dy):
    """((left, its quantiser, along), (right, ...)) of the three matmuls; None: not quantised."""
    gradient = "tensorwise_gradient" if recipe == "tensorwise" else recipe
    if recipe != "rowwise_with_gw_hp":
        return {
            "y": ((x, recipe, 1), (w.t(), recipe, 0)),
            "dx": ((dy, gradient, 1), (w, recipe, 0)),
            "dw": ((dy.t(), gradient, 1), (x, recipe, 0)),
        }
    return {
        "y": ((x, "rowwise", 1), (w.t(), "rowwise", 0)),
        "dx": ((dy, "rowwise", 1), (w, "tensorwise_power_of_two", 0)),
        "dw": ((dy.t(), None, 1), (x, None, 0)),
    }


def run_linear(recipe):
    """Forward and backward of one converted linear (64 -> 96) on 32 tokens, all in float32."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(32, n, generator=generator) for n in (64, 96))
    x[3, 5] = 40.0  # outliers: the recipes must differ
    dy[7, 11] = -30.0
    holder = nn.ModuleDict({"wq": nn.Linear(64, 96, bias=False)})
    w = torch.randn(96, 64, generator=generator) * 0.02
    holder["wq"].weight.data.copy_(w)
    converted, _ = float8.apply_float8(holder, recipe, all_gather=False, skip=(), emulate=True)
    assert converted == ["wq"]
    leaf = x.clone().requires_grad_()
    y = holder["wq"](leaf)
    y.backward(dy)
    return (x, w, dy), {"y": y.detach(), "dx": leaf.grad, "dw": holder["wq"].weight.grad}


@pytest.mark.parametrize("recipe", float8.RECIPES)
def test_the_three_matmuls_are_those_of_the_headers_table(recipe):
    tensors, results = run_linear(recipe)
    for name, pair in operands(recipe, *tensors).items():
        left, right = (t if q is None else quantise(t, q, along) for t, q, along in pair)
        # only the order of a float32 sum of at most 96 products may differ
        torch.testing.assert_close(results[name], left @ right, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("recipe", float8.RECIPES)
def test_output_and_gradients_are_within_the_formats_bound_of_float32(recipe):
    """|sum ab - sum a'b'| <= sum |a| db + da |b| + da db, with da, db the half steps of a and b."""
    tensors, results = run_linear(recipe)
    for name, pair in operands(recipe, *tensors).items():
        (a, da), (b, db) = ((t.abs(), half_steps(t, q, along)) for t, q, along in pair)
        bound = a @ db + da @ b + da @ db + 1e-5  # and rounding of the float32 sums
        exact = pair[0][0] @ pair[1][0]
        assert ((results[name] - exact).abs() <= bound).all(), name


def half_steps(x, recipe, along):
    if recipe is None:
        return torch.zeros_like(x)
    relative, absolute = HALF_STEP[dtype_of(recipe)]
    return torch.maximum(relative * x.abs(), absolute / scale_of(x, recipe, along))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantising_is_off_by_half_a_step_at_most_and_the_largest_value_is_exact(dtype):
    assert torch.finfo(dtype).max == MAXIMUM[dtype]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(
        -6, 2
    ).repeat(512)
    q = float8_scaling_utils.hp_tensor_to_float8_dynamic(x, dtype, None)
    scale = MAXIMUM[dtype] / x.abs().max()
    relative, absolute = HALF_STEP[dtype]
    error = (q.to_original_precision() - x).abs()
    # 1e-6: x * scale and its inverse are rounded to float32
    assert (error <= torch.maximum(relative * x.abs(), absolute / scale) + 1e-6 * x.abs()).all()
    assert error[x.abs().argmax()] <= 1e-6 * x.abs().max()


def test_one_float8_gather_of_8b_moves_the_fraction_of_bytes_that_the_header_states():
    config = llama.MODELS["8b"]
    n_parameters = llama.count_parameters(config)
    assert n_parameters == 8_030_261_248
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    in_linears = 32 * (attention + 3 * 4096 * 14336)
    assert round(in_linears / n_parameters, 2) == 0.87
    assert round((in_linears + 2 * (n_parameters - in_linears)) / (2 * n_parameters), 2) == 0.57


# ---- Which linears -----------------------------------------------------------------------------

WQ, WK, W2 = (f"layers.3.{name}" for name in ("attention.wq", "attention.wk", "feed_forward.w2"))
SKIPS = [  # name, (out, in), recipe, filter, tp, what the reason must hold or None
    (WQ, (4096, 4096), "tensorwise", "auto", 1, None),
    (WK, (1024, 4096), "tensorwise", "auto", 1, "too small"),  # 8b's wk
    (WK, (1024, 8192), "tensorwise", "auto", 1, None),  # 70b's: in > 4096
    (WK, (1040, 4096), "tensorwise", "auto", 1, None),
    (WK, (1024, 4096), "tensorwise", "output", 1, None),
    (WQ, (2048, 8192), "rowwise", "auto", 1, "too small"),
    (WQ, (2064, 8192), "rowwise", "auto", 1, None),
    (WQ, (8192, 1024), "rowwise", "auto", 1, "too small"),
    (WQ, (4096, 2048), "rowwise", "auto", 1, "too small"),
    (WQ, (4112, 2048), "rowwise", "auto", 1, None),
    (WQ, (4096, 2064), "rowwise", "auto", 1, None),
    (WQ, (96, 64), "tensorwise", "output", 4, "24 x 64"),  # 24 rows per rank
    (W2, (64, 96), "tensorwise", "output", 4, "64 x 24"),  # row-wise: 24 columns per rank
    (W2, (24, 96), "tensorwise", "output", 1, "24 x 96"),
    (WQ, (128, 64), "tensorwise", "output", 4, None),
    (WQ, (96, 48), "tensorwise", "output", 1, None),  # 16 divides 48 and 32 does not
    (WQ, (96, 48), "mxfp8", "output", 1, "96 x 48"),
    (WQ, (96, 64), "mxfp8", "output", 2, "48 x 64"),
    ("output", (128256, 4096), "tensorwise", "output", 1, "output"),
    ("output", (128256, 4096), "tensorwise", "auto", 1, None),
    ("output", (97, 64), "tensorwise", "auto", 2, "too small"),
    ("output", (97, 8192), "tensorwise", "auto", 2, "48.5 x 8192"),
    (WQ, (4096, 4096), "tensorwise", "layers.3", 1, "layers.3"),
    (WQ, (4096, 4096), "tensorwise", "layers", 1, "layers"),
    (WQ, (4096, 4096), "tensorwise", "attention.wq", 1, "attention.wq"),
    (WQ, (4096, 4096), "tensorwise", WQ, 1, WQ),
    ("layers.31.attention.wq", (4096, 4096), "tensorwise", "layers.3", 1, None),
    (WQ, (4096, 4096), "tensorwise", "attention.w", 1, None),
    ("output_2", (4096, 4096), "tensorwise", "output", 1, None),
]


@pytest.mark.parametrize(("name", "shape", "recipe", "filters", "tp", "expected"), SKIPS)
def test_the_filter_rules(name, shape, recipe, filters, tp, expected):
    reason = float8.skip_reason(name, shape, recipe=recipe, skip=filters.split(","), tp=tp)
    assert (reason is None) if expected is None else (expected in reason), reason


@pytest.mark.parametrize("recipe", float8.RECIPES)
def test_conversion_keeps_names_and_shapes_and_lists_every_linear_once(recipe):
    plain, model = build_meta(), build_meta()
    converted, skipped = float8.apply_float8(
        model, recipe, all_gather=recipe == "tensorwise", skip=("output", "layers.1"), emulate=True
    )
    linears = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    linears += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    assert sorted(converted) == sorted(f"layers.0.{name}" for name in linears)
    assert sorted(skipped) == sorted(["output"] + [f"layers.1.{name}" for name in linears])
    for name, module in model.named_modules():
        assert (type(module) is nn.Linear) == (name in skipped), name
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (plain, model)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_pipeline_stage_is_converted_under_its_global_names():
    stage = build_meta()
    stage.tok_embeddings = stage.output = stage.norm = None
    del stage.layers["0"]
    converted, skipped = float8.apply_float8(
        stage, "rowwise", all_gather=False, skip=("output",), emulate=True
    )
    assert len(converted) == 7 and converted[0] == "layers.1.attention.wq" and skipped == {}


# ---- Refusals ----------------------------------------------------------------------------------

H100, B200 = (9, 0), (10, 0)
GOOD = {
    "all_gather": False,
    "skip": ("output",),
    "emulate": False,
    "compile": True,
    "capability": H100,
}
REFUSED = [
    ("rowwise", {"all_gather": True}, ["--float8-all-gather", "--float8 rowwise", "tensorwise"]),
    ("mxfp8", {"all_gather": True, "capability": B200}, ["--float8-all-gather", "mxfp8"]),
    ("rowwise_with_gw_hp", {"skip": ("auto",)}, ["--float8-filter auto", "attention.wk"]),
    ("mxfp8", {"skip": ("auto",), "capability": B200}, ["--float8-filter auto", "mxfp8"]),
    ("tensorwise", {"emulate": True}, ["--float8-emulate", "--compile", "drop one"]),
    ("tensorwise", {"capability": (8, 0)}, ["tensorwise", "8.0", "8.9", "--float8-emulate"]),
    ("rowwise", {"capability": None}, ["rowwise", "a CPU", "8.9", "--float8-emulate"]),
    ("mxfp8", {}, ["mxfp8", "9.0", "10.0", "B200", "--float8-emulate"]),
    (None, {"all_gather": True}, ["--float8-all-gather", "--float8 tensorwise"]),
    (None, {"emulate": True}, ["--float8-emulate", "--float8 tensorwise"]),
]


@pytest.mark.parametrize(("recipe", "changes", "parts"), REFUSED)
def test_flags_that_cannot_go_together_are_refused_with_a_way_out(recipe, changes, parts):
    with pytest.raises(ValueError) as error:
        float8.check_float8(recipe, **{**GOOD, **changes})
    assert all(part in str(error.value) for part in [*parts, "conflicts with"]), error.value


def test_good_flags_pass():
    float8.check_float8("tensorwise", **{**GOOD, "all_gather": True, "skip": ("output", "auto")})
    float8.check_float8("tensorwise", **{**GOOD, "capability": (8, 9)})
    float8.check_float8("mxfp8", **{**GOOD, "capability": B200})
    float8.check_float8(None, **{**GOOD, "capability": None})
    for recipe in float8.RECIPES:
        float8.check_float8(
            recipe, **{**GOOD, "emulate": True, "compile": False, "capability": None}
        )


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install torchao==0\.18\.0"):
        float8.check_float8("rowwise", **GOOD)


def test_filters_that_match_nothing_and_odd_token_counts_are_refused():
    names = [name for name, m in build_meta().named_modules() if isinstance(m, nn.Linear)]
    fits = {"skip": ("output", "auto", "attention.wk"), "linear_names": names}
    float8.check_float8_fits("tensorwise", **fits, n_tokens=48)
    float8.check_float8_fits("rowwise_with_gw_hp", **fits, n_tokens=5)  # sums over tokens in bf16
    with pytest.raises(ValueError, match="40 tokens"):
        float8.check_float8_fits("rowwise", **fits, n_tokens=40)
    with pytest.raises(ValueError, match="48 tokens"):
        float8.check_float8_fits("mxfp8", **fits, n_tokens=48)
    with pytest.raises(ValueError, match="--float8-filter atention matches none"):
        float8.check_float8_fits("rowwise", **{**fits, "skip": ("atention",)}, n_tokens=16)


def test_mxfp8_without_its_kernels_is_refused_before_the_first_step():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without MXFP8 kernels")
    with pytest.raises(ValueError, match="kernels are not loaded"):
        float8.apply_float8(build_meta(), "mxfp8", all_gather=False, skip=(), emulate=False)


# ---- Meshes ------------------------------------------------------------------------------------


def build_sharded(
    recipe, *, mesh, all_gather=False, skip=("output",), dtype=torch.float32, config=CONFIG
):
    """The model as train.py builds it: float8, tp, fsdp, weights."""
    model = build_meta(config)
    tp = mesh["tp"].size()
    if recipe is not None:
        float8.apply_float8(model, recipe, all_gather=all_gather, skip=skip, emulate=True, tp=tp)
    if tp > 1:
        colwise, rowwise, prepare_input = float8.float8_tp_styles(recipe)
        parallel.apply_tp(
            model,
            mesh["tp"],
            loss_parallel=False,
            colwise=colwise,
            rowwise=rowwise,
            prepare_input=prepare_input,
        )
    parallel.apply_fsdp(
        model,
        mesh,
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        reshard="default",
        cpu_offload=False,
    )
    parallel.materialise(
        model,
        device="cpu",
        weight_device="cpu",
        draw=lambda name, shape: draw(name, shape, config),
        positions=torch.arange(SEQ_LEN),
    )
    return model


def draw(name, shape, config=CONFIG):
    return llama.draw_weight(name, shape, config=config, seed=3, device="cpu")


def build_mesh(*, dp=1, tp=1, replicate=1):
    return parallel.build_mesh("cpu", pp=1, dp_replicate=replicate, dp_shard=dp, cp=1, tp=tp)


def tokens_of_step(step, n_sequences=4):
    """(4, 17) token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, CONFIG.vocab_size, (n_sequences, SEQ_LEN + 1), generator=generator)


def sum_loss(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def weight_scales(degrees, precompute):
    """The scale that FSDP2 will gather each float8 weight with, by name."""
    mesh = build_mesh(**degrees)
    model = build_sharded("tensorwise", all_gather=True, mesh=mesh)
    if precompute:
        float8.precompute_float8_scales([model])
    scales = {}
    for name, parameter in model.named_parameters():
        local = parallel.local_tensor(parameter)
        if hasattr(parameter._local_tensor, "fsdp_pre_all_gather"):
            local = parameter._local_tensor
            (data,), (scale,) = local.fsdp_pre_all_gather(mesh["fsdp"])
            assert data.dtype == torch.float8_e4m3fn
            assert (local._precomputed_scale is not None) == precompute
            scales[name] = scale.item()
    return scales


@pytest.mark.parametrize(
    ("degrees", "precompute"),
    [
        ({"dp": 1}, True),
        ({"dp": 2}, False),
        ({"dp": 2}, True),
        ({"dp": 3}, True),  # 64 rows over 3 ranks: uneven shards
        ({"dp": 2, "tp": 2}, True),
        ({"replicate": 2, "dp": 2}, True),
    ],
)
def test_shards_of_a_weight_share_the_scale_of_the_whole_weight(degrees, precompute):
    expected = {}
    for name, parameter in build_meta().named_parameters():
        if parameter.ndim == 2 and "layers" in name:
            amax = draw(name, parameter.shape).abs().max().double()
            expected[name] = (448.0 / amax).float().item()
    assert len(expected) == 14
    for scales in run_ranks(math.prod(degrees.values()), weight_scales, degrees, precompute):
        assert scales == expected


def forward_scales(degrees):
    """Scales of inputs and weights in one forward, repeats of a shared input dropped."""
    mesh = build_mesh(**degrees)
    model = build_sharded("tensorwise", mesh=mesh)
    found = {"INPUT": [], "WEIGHT": []}
    original = float8_scaling_utils.hp_tensor_and_scale_to_float8

    def spy(tensor, scale, dtype, config, role, *rest):
        value = (scale.full_tensor() if isinstance(scale, DTensor) else scale).item()
        if not found[role.name] or found[role.name][-1] != value:
            found[role.name].append(value)
        return original(tensor, scale, dtype, config, role, *rest)

    float8_scaling_utils.hp_tensor_and_scale_to_float8 = spy  # in this forked rank only
    model(torch.arange(64).view(4, 16))
    return found


def test_tp_ranks_scale_weights_and_activations_as_one_process_does():
    (alone,) = run_ranks(1, forward_scales, {"tp": 1})
    assert len(alone["INPUT"]) == 2 * 4 and len(alone["WEIGHT"]) == 2 * 7
    for split in run_ranks(2, forward_scales, {"tp": 2}):
        # weights are the same numbers; activations went through sums in another order
        assert split["WEIGHT"] == alone["WEIGHT"]
        assert split["INPUT"] == pytest.approx(alone["INPUT"], rel=1e-5)


# ---- Training ----------------------------------------------------------------------------------

MX_SKIP = ("output", "attention.wk", "attention.wv")  # 16 rows per tp rank: no block of 32
CASES = [  # recipe, all_gather, skip
    ("tensorwise", True, ("output",)),
    ("tensorwise", True, ("output", "attention.wk")),  # attention's input gathered in bf16, wq cast
    ("tensorwise", False, ("output",)),
    ("rowwise", False, ("output",)),
    ("rowwise_with_gw_hp", False, ("output",)),
    ("mxfp8", False, MX_SKIP),
]


def train_two_steps(degrees, cases, n_chunks):
    """Losses and second-step gradients of each case. One process runs the batch in n_chunks."""
    mesh = build_mesh(**degrees)
    rank, n_ranks = mesh["data"].get_local_rank(), mesh["data"].size()
    results = []
    for recipe, all_gather, skip in cases:
        model = build_sharded(recipe, all_gather=all_gather, skip=skip, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            if all_gather:
                float8.precompute_float8_scales([model])
            total = torch.zeros(())
            for chunk in tokens_of_step(step).chunk(n_ranks)[rank].chunk(n_chunks):
                loss = sum_loss(model, chunk) / 64
                loss.backward()
                total += loss.detach()
            dist.all_reduce(total, group=mesh["data"].get_group())
            losses.append(total.item())
            weights = model.named_parameters()
            gradients = {name: parallel.whole_tensor(weight.grad) for name, weight in weights}
            optimizer.step()
        results.append((losses, gradients))
    return results


@pytest.fixture(scope="module")
def alone():
    """Results of one process by the number of chunks it cut the batch into."""
    return {n: run_ranks(1, train_two_steps, {"dp": 1}, CASES, n)[0] for n in (1, 2)}


@pytest.mark.parametrize(
    ("degrees", "chosen"),
    [({"dp": 2}, range(6)), ({"tp": 2}, range(6)), ({"dp": 2, "tp": 2}, (0, 5))],
)
def test_losses_and_gradients_on_a_mesh_are_those_of_one_process(alone, degrees, chosen):
    """A dp rank quantises its own sequences: so does one process that runs them in two chunks.

    Summing in another order moves an activation by 1e-7, and now and then across the edge between
    two 8-bit numbers: one changed operand among 4096 is 6e-2 / 64 = 1e-3 of a gradient. An operand
    that is not quantised, or by another scale, changes it by 2e-2 and more.
    """
    cases = [CASES[i] for i in chosen]
    expected = [alone[degrees.get("dp", 1)][i] for i in chosen]
    for split in run_ranks(math.prod(degrees.values()), train_two_steps, degrees, cases, 1):
        for case, (losses, gradients), (right_losses, right) in zip(
            cases, split, expected, strict=True
        ):
            assert losses == pytest.approx(right_losses, rel=1e-5), case
            for name, gradient in gradients.items():
                error = (gradient - right[name]).norm() / right[name].norm()
                assert error < 2e-3, (case, name, error)


def curve(recipe, all_gather, config, n_steps, tokens_of, skip=("output",)):
    """Losses of n_steps of AdamW on one process, bf16 compute, FSDP2 at degree 1."""
    mesh = build_mesh()
    model = build_sharded(
        recipe, all_gather=all_gather, skip=skip, mesh=mesh, dtype=torch.bfloat16, config=config
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(n_steps):
        if all_gather:
            float8.precompute_float8_scales([model])
        tokens = tokens_of(step)
        loss = sum_loss(model, tokens) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def short_curves():
    recipes = [(None, False), ("tensorwise", True)]
    recipes += [(recipe, False) for recipe in float8.RECIPES]
    return [curve(*recipe, CONFIG, 12, lambda step: tokens_of_step(0)) for recipe in recipes]


def test_every_recipe_trains_as_bf16_does():
    """Twelve steps on one batch. Rounding moves the loss by parts in a thousand, 1 % is a fault."""
    ((bf16, *others),) = run_ranks(1, short_curves)
    assert bf16[-1] < bf16[0] - 0.5
    for losses in others:
        assert losses == pytest.approx(bf16, rel=1e-2)
        assert losses != bf16


def stdlib_bytes():
    text = b"".join(pathlib.Path(module.__file__).read_bytes() for module in (pathlib, subprocess))
    return torch.tensor(list(text))


def long_curve(recipe, all_gather):
    """200 steps of the debug model on 256 tokens each of the standard library's source."""
    text = stdlib_bytes()

    def tokens_of(step):
        starts = torch.randint(
            0, len(text) - SEQ_LEN - 1, (16,), generator=torch.Generator().manual_seed(step)
        )
        return torch.stack([text[s : s + SEQ_LEN + 1] for s in starts])

    return curve(recipe, all_gather, llama.MODELS["debug"], 200, tokens_of)


@pytest.mark.soak
def test_two_hundred_steps_stay_within_two_percent_of_bf16():
    (bf16,) = run_ranks(1, long_curve, None, False, timeout_s=1800)
    assert bf16[-1] < 0.6 * bf16[0]
    for recipe in float8.RECIPES:
        (losses,) = run_ranks(1, long_curve, recipe, recipe == "tensorwise", timeout_s=1800)
        worst = max(abs(a / b - 1) for a, b in zip(losses, bf16, strict=True))
        print(f"{recipe}: bf16 {bf16[-1]:.4f}, {losses[-1]:.4f}, worst step {worst:.2%}")
        assert worst < 0.02, recipe


# ---- Import ----------------------------------------------------------------------------------


def test_importing_is_quiet_and_needs_no_torchao():
    code = (
        "import sys, float8\n"
        "assert not any(name.startswith('torchao') for name in sys.modules)\n"
        "from torch import nn\n"
        "for recipe in float8.RECIPES:\n"
        "    holder = nn.ModuleDict({'wq': nn.Linear(64, 64, bias=False)})\n"
        "    float8.apply_float8(holder, recipe, all_gather=False, skip=(), emulate=True)\n"
        "    float8.float8_tp_styles(recipe)\n"
    )
    root = pathlib.Path(float8.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_torchao_is_quiet_while_it_is_imported_and_loud_afterwards(caplog):
    logger = logging.getLogger("torchao")
    with float8.quiet_torchao():
        logger.warning("Failed to load _C.so: no such file")
        logger.error("something is wrong")
    logger.warning("Failed to load, but later")
    assert [record.getMessage() for record in caplog.records] == [
        "something is wrong",
        "Failed to load, but later",
    ]

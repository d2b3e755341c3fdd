"""model.py against a straight-line transformer written here, and against published figures."""

import dataclasses
import math
from functools import partial

import pytest
import torch

import model
from model import MODELS, ModelConfig, Transformer

SMALL = ModelConfig(24, 3, 6, 2, 40, **model.LLAMA_3 | {"vocab_size": 51})


def build_small(config=SMALL, *, seq_len=16, seed=3):
    transformer = Transformer(config, seq_len=seq_len).double()
    draw = partial(model.draw_weight, config=config, seed=seed, device="cpu")
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".experts." in name:
                for number, expert in enumerate(parameter):
                    expert.copy_(draw(f"{name}.{number}", expert.shape))
                continue
            parameter.copy_(draw(name, parameter.shape))
            if "norm" in name:  # ones would hide a norm that is left out
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    return transformer


def swiglu(h, w1, w2, w3):
    gate = h @ w1.T
    return (gate * torch.sigmoid(gate) * (h @ w3.T)) @ w2.T


def reference_experts(w, h, config):
    """One token through its experts, chosen by score + bias and weighted by score."""
    logits = (w["moe.router.weight"] @ h).tolist()
    scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    if config.router_score == "softmax":
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    ranking = sorted(range(config.n_experts), key=lambda e: -(scores[e] + w["moe.bias"][e].item()))
    chosen = ranking[: config.top_k]
    total = sum(scores[e] for e in chosen) if config.normalise_top_k else 1.0
    y = 0.0
    for e in chosen:
        expert = swiglu(h, *(w[f"moe.experts.{name}"][e] for name in ("w1", "w2", "w3")))
        y = y + config.routed_scale * scores[e] / total * expert
    if config.n_shared_experts:
        y = y + swiglu(h, *(w[f"moe.shared_expert.{name}.weight"] for name in ("w1", "w2", "w3")))
    return y


def reference_logits(weights, tokens, config):
    """For one sequence, in loops over positions and heads, rotating complex numbers."""

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(vector, position):
        half = len(vector) // 2
        angles = position * model.rope_frequencies(config)
        turned = torch.complex(vector[:half], vector[half:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat([turned.real, turned.imag])

    x = torch.stack([weights["tok_embeddings.weight"][token] for token in tokens])
    T, Dh = len(tokens), config.head_dim
    for i in range(config.n_layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items()}
        h = norm(x, w["attention_norm.weight"])
        q, k, v = (h @ w[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        heads = []
        for head in range(config.n_heads):
            group = head * config.n_kv_heads // config.n_heads
            mine, shared = (slice(n * Dh, (n + 1) * Dh) for n in (head, group))
            queries, keys = q[:, mine], k[:, shared]
            if config.qk_norm:
                queries = norm(queries, w["attention.q_norm.weight"])
                keys = norm(keys, w["attention.k_norm.weight"])
            queries = torch.stack([rotate(queries[t], t) for t in range(T)])
            keys = torch.stack([rotate(keys[t], t) for t in range(T)])
            rows = []
            for t in range(T):
                scores = (keys[: t + 1] @ queries[t]) / math.sqrt(Dh)
                rows.append(torch.softmax(scores, 0) @ v[: t + 1, shared])
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, -1) @ w["attention.wo.weight"].T
        h = norm(x, w["ffn_norm.weight"])
        if "moe.bias" in w:
            x = x + torch.stack([reference_experts(w, token, config) for token in h])
        else:
            x = x + swiglu(h, *(w[f"feed_forward.{name}.weight"] for name in ("w1", "w2", "w3")))
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tied_embeddings": True}, {"qk_norm": True, "head_dim": 10, "rope_factor": 1.0},
        {"n_experts": 5, "top_k": 3, "expert_dim": 16},
        {"n_experts": 6, "top_k": 2, "expert_dim": 16, "n_shared_experts": 2, "n_dense_layers": 1,
         "router_score": "sigmoid", "normalise_top_k": True, "routed_scale": 1.5},
    ],
    ids=["Llama", "tied", "Qwen3", "experts", "shared experts"],
)
def test_the_model_is_the_straight_line_one(changes):
    config = dataclasses.replace(SMALL, **changes)
    transformer = build_small(config)
    tokens = torch.randint(config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    for block in transformer.layers.values():
        if block.moe is not None:  # large enough to change choices
            block.moe.bias.copy_(torch.linspace(-0.2, 0.2, config.n_experts))
    weights = transformer.state_dict()
    with torch.no_grad():
        logits = transformer(tokens)
        for row in range(2):
            expected = reference_logits(weights, tokens[row].tolist(), config)
            # float64 throughout, but the RoPE table is float32: its rounding, 6e-8, is the bound
            assert (logits[row] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_alike_by_grouped_matmuls_and_one_by_one(dtype):
    """float64 runs them one by one; with an expert that has no row, in both passes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (10, 16), (3, 24, 16), (3, 16, 24), (3, 24, 16)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    results = []
    for wide in (dtype, torch.float64):
        rows, w1, w2, w3 = (t.to(wide, copy=True).requires_grad_() for t in tensors)
        y = model.Experts.compute(rows, torch.tensor([4, 0, 6]), w1, w2, w3)
        y.square().sum().backward()
        results.append([y, rows.grad, w1.grad, w2.grad, w3.grad])
    for narrow, right in zip(*results, strict=True):
        # sums of a few dozen rounded products, relative to the largest of them
        assert (narrow - right).abs().max() < 8 * torch.finfo(dtype).eps * right.abs().max()
    assert all(grad[1].abs().max() == 0 for grad in results[0][2:])


def test_a_forward_pass_leaves_the_counts_and_only_training_adds_them_up():
    config = dataclasses.replace(SMALL, n_experts=4, top_k=2, expert_dim=8, n_dense_layers=2)
    transformer, tokens = build_small(config), torch.arange(32).reshape(2, 16)
    assert [block.moe is None for block in transformer.layers.values()] == [True, True, False]
    moe = transformer.layers["2"].moe
    transformer(tokens)
    once = moe.load.clone()
    assert once.sum() == 2 * 32 and torch.equal(once, moe.counts)
    moe(torch.zeros(1, 3, 24, dtype=torch.float64))  # as a recomputation does
    transformer(tokens)
    assert torch.equal(moe.load, 2 * once)
    with torch.no_grad():
        transformer(tokens)
    assert torch.equal(moe.load, 2 * once)
    assert [name for name, _ in transformer.named_buffers()] == [
        "rope", *(f"layers.2.moe.{name}" for name in ("bias", "counts", "load"))
    ]  # fmt: skip
    assert [name for name in transformer.state_dict() if "moe" in name][0] == "layers.2.moe.bias"
    assert "layers.2.moe.load" not in transformer.state_dict()
    scores = moe.router(torch.ones(1, 3, 24, dtype=torch.bfloat16))
    assert scores.dtype == torch.float32  # bf16 could not tell biases apart that differ by 0.001


@pytest.mark.parametrize(
    "name, parameters, flops_at_8192",
    [  # model cards of Llama 3.1, 3.2 and Qwen3; FLOPs: 6 (N - N_emb) + 12 L H Dh T by hand
        ("debug", 6_163_712, None),
        ("1b", 1_235_814_400, 10_636_111_872),
        ("3b", 3_212_749_824, 27_732_215_808),
        ("8b", 8_030_261_248, 57_914_449_920),
        ("70b", 70_553_706_496, 481_442_709_504),
        ("405b", 405_853_388_800, 2_625_449_459_712),
        ("qwen3-0.6b", 596_049_920, None),
        ("qwen3-1.7b", 1_720_574_976, None),
        ("qwen3-8b", 8_190_735_360, None),
        ("qwen3-30b-a3b", 30_532_122_624, None),
        ("mixtral-8x7b", 46_702_792_704, None),
    ],
)
def test_parameters_and_flops_are_the_published_ones(name, parameters, flops_at_8192):
    config = MODELS[name]
    with torch.device("meta"):
        transformer = Transformer(config, seq_len=128)
    assert sum(p.numel() for p in transformer.parameters()) == parameters
    assert model.count_parameters(config) == parameters
    if flops_at_8192:
        assert model.flops_per_token(config, 8192) == flops_at_8192


SWITCHES = [f.name for f in dataclasses.fields(ModelConfig) if f.type is bool]


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_of_the_model_is_counted_and_has_weights_to_begin_with(name):
    config = dataclasses.replace(SMALL, **{name: not getattr(SMALL, name)})
    transformer = build_small(config)  # draws every parameter by its name
    assert sum(p.numel() for p in transformer.parameters()) == model.count_parameters(config)


def test_a_token_meets_some_of_the_experts():
    """By hand, of the 30B of which 3.3B are active: 8 of 128 experts in 48 layers."""
    config = MODELS["qwen3-30b-a3b"]
    idle = 48 * (128 - 8) * 3 * 2048 * 768
    assert model.count_parameters(config, active=True) == 30_532_122_624 - idle == 3_353_032_704
    embeddings = 151936 * 2048
    flops = 6 * (3_353_032_704 - embeddings) + 48 * 12 * 32 * 128 * 4096
    assert model.flops_per_token(config, 4096) == flops
    debug = MODELS["debug-moe"]
    assert model.block_parameters(debug, 0) == model.block_parameters(MODELS["debug"], 0)
    moe = model.block_parameters(debug, 1) - model.block_parameters(debug, 1, active=True)
    assert moe == 6 * 3 * 256 * 256


def test_the_blocks_and_the_head_of_the_8b_cost_what_their_shapes_say():
    """By hand, at 8,192 tokens: wq wo 2 x 4096^2, wk wv 2 x 4096 x 1024, w1 w2 w3, two norms."""
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    blocks, head = 32 * (6 * block + 12 * 32 * 128 * 8192), 6 * (128256 * 4096 + 4096)
    assert model.flops_per_token(MODELS["8b"], 8192) == blocks + head


def test_debug_flops_at_2048():
    assert model.flops_per_token(MODELS["debug"], 2048) == 71_585_280


def test_the_largest_model_is_built_on_meta_without_memory():
    with torch.device("meta"):
        transformer = Transformer(MODELS["405b"], seq_len=8192)
    assert all(t.is_meta for t in (*transformer.parameters(), *transformer.buffers()))


def test_rope_keeps_short_wavelengths_and_stretches_long_ones():
    config = MODELS["8b"]
    plain = model.rope_frequencies(dataclasses.replace(config, rope_factor=1.0))
    scaled = model.rope_frequencies(config)
    wavelengths = 2 * math.pi / plain
    for wavelength, f, g in zip(wavelengths.tolist(), plain.tolist(), scaled.tolist(), strict=True):
        if wavelength < 2048:  # 8192 / 4
            assert g == f
        elif wavelength > 8192:
            assert g == pytest.approx(f / 8, rel=1e-12)
        else:
            s = (8192 / wavelength - 1) / (4 - 1)
            assert g == pytest.approx((1 - s) * f / 8 + s * f, rel=1e-12)
    assert {w < 2048 for w in wavelengths.tolist()} == {True, False}


@pytest.mark.parametrize("position", [8_191, 131_071])
def test_rotation_is_exact_to_float32_far_into_a_long_context(position):
    """Angles in float64; q and k of bf16 are rotated in float32, and rounded once at the end."""
    config = MODELS["8b"]
    angles = position * model.rope_frequencies(config)
    table = model.build_rope(config, torch.tensor([position]))
    assert table.dtype == torch.float32
    exact = torch.stack([angles.cos(), angles.sin()])
    assert (table[:, 0].double() - exact).abs().max() < 1e-7  # float32 near 1: 2^-25
    x = torch.randn(1, 1, 2, config.head_dim, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16()
    x1, x2 = x.double().chunk(2, dim=-1)
    right = torch.cat(
        [x1 * exact[0] - x2 * exact[1], x2 * exact[0] + x1 * exact[1]], dim=-1
    )  # fmt: skip
    rotated = model.apply_rope(x, table)
    assert rotated.dtype == torch.bfloat16
    # half of bf16's last place, 2^-8, and float32's own error where two products nearly cancel
    assert ((rotated.double() - right).abs() <= right.abs() * 2**-8 + 1e-6).all()


def test_the_width_of_a_head_follows_from_dim_unless_it_is_set():
    widths = {
        ("debug", "dim=64"): 4, ("debug", "n_layers=2"): 16, ("debug", "head_dim=6 dim=64"): 6,
        ("qwen3-0.6b", "dim=64"): 128, ("qwen3-8b", "dim=64 n_heads=8"): 8,
    }  # fmt: skip
    for (name, settings), width in widths.items():
        config = model.override_config(MODELS[name], settings.split())
        assert config.head_dim == width, (name, settings)
        model.check_config(config)
    for settings, told in (
        ("top_k=2", "top_k=2 conflicts with n_experts 0: only experts need it"),
        ("n_experts=8 top_k=9 expert_dim=8", "top_k=9 conflicts .* at most 8"),
        ("n_experts=8 top_k=2", "expert_dim=0 conflicts .* at least 1: try expert_dim=1"),
        ("n_experts=-1", "n_experts=-1 conflicts"),
        ("n_experts=8 top_k=2 expert_dim=8 n_dense_layers=7", "n_dense_layers=7 .* at most 6"),
        ("n_experts=8 top_k=2 expert_dim=8 router_score=relu", "relu must be softmax or sigmoid"),
        ("head_dim=7", "head_dim=7 must be even"), ("head_dim=-2", "head_dim=-2 must be even"),
        ("dim=250", "dim=250 conflicts with n_heads 16: dim must be a multiple of 2 x n_heads"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            model.check_config(model.override_config(MODELS["debug"], settings.split()))


def test_a_token_sees_no_later_token():
    transformer = build_small()
    tokens = torch.randint(51, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 51
    with torch.no_grad():
        difference = (transformer(tokens) - transformer(changed)).abs().amax(dim=(0, 2))
    assert difference[:9].max() == 0.0
    assert difference[9:].min() > 0.0


def test_stages_run_one_after_the_other_are_the_model():
    transformer, first, last = build_small(), build_small(), build_small()
    first.norm = first.output = None
    del first.layers["1"], first.layers["2"]
    last.tok_embeddings = None
    del last.layers["0"]
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(last(first(tokens)), transformer(tokens))


def test_weights_have_the_documented_distributions():
    config = ModelConfig(dim=256, n_layers=3, n_heads=8, n_kv_heads=8, ffn_dim=512, vocab_size=1024)
    expected = {
        "tok_embeddings.weight": 1.0,
        "layers.0.attention.wq.weight": 0.02,
        "layers.2.attention.wv.weight": 0.02,
        "layers.2.feed_forward.w1.weight": 0.02,
        "layers.0.attention.wo.weight": 0.02 / math.sqrt(2),
        "layers.2.feed_forward.w2.weight": 0.02 / math.sqrt(6),
        "layers.1.feed_forward.w3.weight": 0.02 / math.sqrt(4),
        "layers.1.moe.router.weight": 0.02,
        "layers.1.moe.experts.w1.7": 0.02,
        "layers.1.moe.experts.w2.7": 0.02 / math.sqrt(4),
        "layers.1.moe.shared_expert.w3.weight": 0.02 / math.sqrt(4),
        # a normal cut at 3 standard deviations has 0.9866 of its standard deviation left
        "output.weight": 0.9866 * 256**-0.5,
    }
    for name, std in expected.items():
        weight = model.draw_weight(name, (512, 512), config=config, seed=0, device="cpu")
        # 262,144 values: the sample's std is within 0.14 % (one sigma) of the true one
        assert weight.std().item() == pytest.approx(std, rel=0.01), name
        assert abs(weight.mean().item()) < std / 100
    assert weight.abs().max() <= 3 * 256**-0.5
    name = "layers.0.ffn_norm.weight"
    assert (model.draw_weight(name, (256,), config=config, seed=0, device="cpu") == 1).all()
    tied = dataclasses.replace(config, tied_embeddings=True)
    name = "tok_embeddings.weight"
    weight = model.draw_weight(name, (512, 512), config=tied, seed=0, device="cpu")
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)


def test_weights_depend_on_seed_and_name_only():
    def draw(name, seed):
        return model.draw_weight(name, (8, 8), config=SMALL, seed=seed, device="cpu")

    name = "layers.0.attention.wq.weight"
    torch.manual_seed(0)
    first = draw(name, 0)
    torch.manual_seed(1)
    assert torch.equal(first, draw(name, 0))
    for other in ("layers.1.attention.wq.weight", "layers.0.attention.wk.weight"):
        assert not torch.equal(first, draw(other, 0))
    assert not torch.equal(first, draw(name, 1))


def test_the_first_loss_is_ln_vocabulary_plus_a_half():
    """The head's logits are about N(0, 1), and E[log sum exp] of V such is ln V + 1/2."""
    config = ModelConfig(dim=128, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=997)
    transformer = build_small(config, seq_len=64)
    torch.nn.init.ones_(transformer.norm.weight)
    tokens = torch.randint(997, (8, 64), generator=torch.Generator().manual_seed(2))
    labels = torch.randint(997, (8, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = transformer(tokens).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
    # 512 labels whose logits have std 1: the mean is within 1/sqrt(512) = 0.044 (one sigma)
    assert loss.item() == pytest.approx(math.log(997) + 0.5, abs=0.15)


def test_logits_equal_transformers_llama():
    """The same weights in Hugging Face's implementation, where it is installed."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=SMALL.dim,
            num_hidden_layers=SMALL.n_layers,
            num_attention_heads=SMALL.n_heads,
            num_key_value_heads=SMALL.n_kv_heads,
            intermediate_size=SMALL.ffn_dim,
            vocab_size=SMALL.vocab_size,
            rms_norm_eps=SMALL.norm_eps,
            max_position_embeddings=131072,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
    ).double()
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }  # fmt: skip
    transformer = build_small()
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            ours = name.removeprefix("model.")
            for theirs, mine in names.items():
                ours = ours.replace(theirs, mine)
            parameter.copy_(transformer.get_parameter(ours))
        tokens = torch.randint(51, (2, 16), generator=torch.Generator().manual_seed(4))
        # their RoPE table is float32 as well, but its powers are taken in float32
        assert (llama(tokens).logits - transformer(tokens)).abs().max() < 1e-5

"""Llama 3 and Qwen3 on one device. This file knows no ranks: parallelism comes from outside.

    tokens (B, T) -> tok_embeddings -> block 0 -> ... -> block L-1 -> norm -> output -> (B, T, V)

    block:  x = x + attention(attention_norm(x))          attention: wq wk wv -> RoPE -> core -> wo
            x = x + feed_forward(ffn_norm(x))             SwiGLU: w2(silu(w1 x) * w3 x)

Qwen3 adds a norm over each head of q and of k, before RoPE (q_norm, k_norm), and its heads need not
make up dim together. In a Mixture of Experts (§4) blocks have `moe` in place of feed_forward: E
small feed_forwards, of which a router picks k for each token.

Letters in shape comments, here and in the other files:

    B batch    T sequence    D dim    H query heads    K kv heads    Dh head_dim
    F ffn      V vocabulary  L layers N parameters
    E experts  k of them for a token   Fe ffn of an expert

What the other files rely on, and a fork must keep:

    * `tok_embeddings`, `norm` and `output` may each be None and `layers` is a ModuleDict keyed by
      the global layer number, so a pipeline stage is this model with modules removed, and a name
      such as layers.17.attention.wq.weight means the same tensor on any mesh;
    * a block takes and returns plain tensors: (B, T, D) and the RoPE table -> (B, T, D); on a mesh
      it holds its share of the tokens, (B, T/(cp*tp), D);
    * attention infers its number of heads from the width of wq's and wk's output, so that tensor
      parallelism may hand it a share of them;
    * `attention.core` is the part between RoPE and wo; context parallelism replaces it;
    * a block has either `feed_forward` or `moe`, and None for the other; `moe.experts` is the part
      between sorting the rows by expert and weighting them, with `compute` for its arithmetic;
      expert parallelism replaces its forward;
    * `draw_weight(name, ...)` is the only source of initial weights: they depend on the seed and
      the parameter's name, never on how many ranks there are.

RoPE uses the half-split layout of Hugging Face: element j of a head is rotated with element
j + Dh/2. TorchTitan pairs neighbours (2j, 2j + 1); the two are the same model with wq and
wk permuted, and with this one Hugging Face weights need no permutation.

Left out: dropout and biases of linears (no family here has any), KV caching (this trains), document
masks; of experts capacity and dropped tokens, auxiliary and z losses.

Sources: Llama 3 (arXiv 2407.21783) §3.2 and table 3; Qwen3 (arXiv 2505.09388) §2; RoPE (arXiv
2104.09864); GQA (arXiv 2305.13245); SwiGLU (arXiv 2002.05202); TorchTitan (arXiv 2410.06511) §2.1.1
and Appendix A; experts: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, Mixtral (arXiv 2401.04088).
"""

import dataclasses
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- 1. Configurations -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Defaults add nothing: a family's own values stand in MODELS."""

    dim: int  # D
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # K, groups of H / K query heads share one key and value head
    ffn_dim: int  # F
    vocab_size: int  # V
    head_dim: int = 0  # Dh; 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # Llama 3.1's stretch of the long wavelengths; 1: none
    rope_original_seq_len: int = 8192  # context length before the stretch
    tied_embeddings: bool = False  # output.weight is tok_embeddings.weight
    qk_norm: bool = False  # a norm over each head's q and k, before RoPE
    # experts, from layer n_dense_layers on; the layers before it have a feed_forward
    n_experts: int = 0  # E; 0: none
    top_k: int = 0  # k
    expert_dim: int = 0  # Fe
    n_shared_experts: int = 0  # that every token passes through as well, side by side
    n_dense_layers: int = 0
    router_score: str = "softmax"  # or sigmoid: of the router's logits
    normalise_top_k: bool = False  # the weights of a token's k experts add up to 1
    routed_scale: float = 1.0  # times this

    def __post_init__(self):
        if not self.head_dim and self.n_heads > 0 and self.dim % (2 * self.n_heads) == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)  # it is frozen


LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0, "rope_factor": 8.0}
LLAMA_3_2 = LLAMA_3 | {"rope_factor": 32.0, "tied_embeddings": True}
QWEN_3 = {"vocab_size": 151936, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 1e6}
QWEN_3 |= {"qk_norm": True}
MODELS = {
    # the debug model: 6,163,712 parameters, small enough for a laptop, all parts present
    "debug": ModelConfig(256, 6, 16, 16, 768, **LLAMA_3 | {"vocab_size": 2048}),
    # Llama 3.2
    "1b": ModelConfig(2048, 16, 32, 8, 8192, **LLAMA_3_2),
    "3b": ModelConfig(3072, 28, 24, 8, 8192, **LLAMA_3_2),
    # Llama 3.1
    "8b": ModelConfig(4096, 32, 32, 8, 14336, **LLAMA_3),
    "70b": ModelConfig(8192, 80, 64, 8, 28672, **LLAMA_3),
    "405b": ModelConfig(16384, 126, 128, 8, 53248, **LLAMA_3),
    # Qwen3
    "qwen3-0.6b": ModelConfig(1024, 28, 16, 8, 3072, tied_embeddings=True, **QWEN_3),
    "qwen3-1.7b": ModelConfig(2048, 28, 16, 8, 6144, tied_embeddings=True, **QWEN_3),
    "qwen3-8b": ModelConfig(4096, 36, 32, 8, 12288, **QWEN_3),
    # with experts; ffn_dim is what dense layers have, of which the last two have none
    "debug-moe": ModelConfig(
        256, 6, 16, 16, 768, **LLAMA_3 | {"vocab_size": 2048}, n_experts=8, top_k=2, expert_dim=256,
        n_shared_experts=1, n_dense_layers=1, router_score="sigmoid", normalise_top_k=True,
    ),
    "qwen3-30b-a3b": ModelConfig(
        2048, 48, 32, 4, 6144, **QWEN_3, n_experts=128, top_k=8, expert_dim=768,
        normalise_top_k=True,
    ),
    "mixtral-8x7b": ModelConfig(
        4096, 32, 32, 8, 14336, vocab_size=32000, rope_theta=1e6, n_experts=8, top_k=2,
        expert_dim=14336, normalise_top_k=True,
    ),
}  # fmt: skip


def override_config(config, settings):
    """Return the config with the fields of ["n_layers=5", "dim=64"]; ValueError if one is none."""
    types = {field.name: field.type for field in dataclasses.fields(config)}
    changes = {}
    if config.head_dim * config.n_heads == config.dim:
        changes["head_dim"] = 0  # it follows from the two, unless it is set itself
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in types:
            raise ValueError(f"--set {setting} names no field of the model: try {', '.join(types)}")
        kind = types[key]
        try:
            value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise ValueError(
                f"--set {setting} is not of type {kind.__name__}, as {key} of --model is: try "
                f"{key}={str(getattr(config, key)).lower()}"
            ) from None
        changes[key] = value
    return dataclasses.replace(config, **changes)


def check_experts(config):
    """Raise ValueError if the fields of experts make none."""
    if config.router_score not in ("softmax", "sigmoid"):
        raise ValueError(f"--set router_score={config.router_score} must be softmax or sigmoid")
    if not config.n_experts:
        for name in ("top_k", "expert_dim", "n_shared_experts", "n_dense_layers"):
            if value := getattr(config, name):
                raise ValueError(
                    f"--set {name}={value} conflicts with n_experts 0: only experts need it; set "
                    "n_experts=8 as well, or take --model debug-moe"
                )
        return
    for name, least, most in (
        ("n_experts", 0, math.inf), ("top_k", 1, config.n_experts), ("expert_dim", 1, math.inf),
        ("n_shared_experts", 0, math.inf), ("n_dense_layers", 0, config.n_layers),
    ):  # fmt: skip
        if not least <= (value := getattr(config, name)) <= most:
            above = f" and at most {most}" if most < math.inf else ""
            raise ValueError(
                f"--set {name}={value} conflicts with n_experts {config.n_experts} and n_layers "
                f"{config.n_layers}: it must be at least {least}{above}: try {name}={least}"
            )


def check_config(config):
    """Raise ValueError if the fields make no model."""
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"--set {name}={value} must be at least 1: try {name}=1")
    for name in ("norm_eps", "rope_theta", "rope_factor", "rope_original_seq_len", "routed_scale"):
        if not 0 < (value := getattr(config, name)) < math.inf:  # NaN is neither
            raise ValueError(
                f"--set {name}={value} must be a number greater than 0: leave it out for --model's"
            )
    if config.head_dim and (config.head_dim < 2 or config.head_dim % 2):
        raise ValueError(
            f"--set head_dim={config.head_dim} must be even, since RoPE rotates pairs, and at "
            "least 2: try head_dim=64"
        )
    for whole, part, factor in (("dim", "n_heads", 2), ("n_heads", "n_kv_heads", 1)):
        value, unit = getattr(config, whole), getattr(config, part) * factor
        if value % unit and (whole == "n_heads" or not config.head_dim):
            raise ValueError(
                f"--set {whole}={value} conflicts with {part} {unit // factor}: {whole} must be a "
                f"multiple of {factor} x {part} = {unit}: try {whole}={-(-value // unit) * unit}"
            )
    check_experts(config)


def has_experts(config, number):
    """Whether the block with this number in the whole model has experts."""
    return config.n_experts > 0 and number >= config.n_dense_layers


def block_parameters(config, number, *, active=False):
    """Parameters of the block with this number; `active`, only those that one token meets."""
    attention = 2 * config.dim * config.head_dim * (config.n_heads + config.n_kv_heads)
    norms = 2 * config.dim + 2 * config.head_dim * config.qk_norm
    if not has_experts(config, number):
        return attention + norms + 3 * config.dim * config.ffn_dim
    n_experts = (config.top_k if active else config.n_experts) + config.n_shared_experts
    router = config.n_experts * config.dim
    return attention + norms + router + n_experts * 3 * config.dim * config.expert_dim


def count_parameters(config, *, active=False):
    """Number of parameters N; tied embeddings count once. `active`, those that one token meets."""
    embeddings = config.vocab_size * config.dim * (1 if config.tied_embeddings else 2)
    blocks = (block_parameters(config, i, active=active) for i in range(config.n_layers))
    return sum(blocks) + embeddings + config.dim


def flops_per_token(config, seq_len):
    """Model FLOPs of one token's forward and backward: 6 N + 6 L H (2 Dh) T.

    A multiply-add is 2 FLOPs and the backward pass costs twice the forward, hence 6 for each
    parameter that the token meets: k of E experts. Attention counts in full, without a discount for
    causality, and recomputation not at all, as in PaLM's MFU (arXiv 2204.02311, Appendix B).
    """
    blocks = sum(block_parameters(config, i, active=True) for i in range(config.n_layers))
    attention = 6 * config.n_layers * config.n_heads * 2 * config.head_dim * seq_len
    # norm and output; looking an embedding up multiplies nothing
    return 6 * blocks + attention + 6 * (config.vocab_size * config.dim + config.dim)


# Dense bf16 peak of one device, TFLOPs, by a part of its name; the first match counts
PEAK_TFLOPS = {
    "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "H200": 989, "H20": 148, "A100": 312,
    "B200": 2250, "L40S": 362, "MI300X": 1300, "MI325X": 1300, "MI355X": 2500, "MI250X": 191.5,
}  # fmt: skip


def peak_tflops(device):
    """Peak of a torch.device for MFU, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


# ---- 2. Rotary positions -----------------------------------------------------------------------


def rope_frequencies(config):
    """Angle per position of each rotated pair, in radians: float64 (Dh/2,).

    theta^(-2j/Dh), and from Llama 3.1 on stretched for long contexts: wavelengths above the
    original context are lengthened by `rope_factor`, those below a quarter of it are kept, and in
    between the frequency is blended linearly in (original context / wavelength).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_factor == 1.0:
        return frequencies
    low, high = 1.0, 4.0  # how often the original context holds the wavelength, at either end
    turns = config.rope_original_seq_len * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / config.rope_factor


def build_rope(config, positions):
    """Cosines and sines for the given global positions (T,): float32 (2, T, Dh/2)."""
    frequencies = rope_frequencies(config).to(positions.device)
    angles = torch.outer(positions.to(torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()]).float()


def apply_rope(x, rope):
    """Rotate (B, T, heads, Dh) by its positions' angles, computed in at least float32."""
    cos, sin = rope[:, : x.shape[1], None, :]  # (T, 1, Dh/2) each, broadcast over B and heads
    x1, x2 = x.chunk(2, dim=-1)
    # bf16 * float32 is float32 and float64 stays float64: precision is never lost here
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)


# ---- 3. Attention and feed-forward -------------------------------------------------------------


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(Dh)) v with a causal mask: q (B, H, T, Dh), k and v (B, K, T, Dh)."""

    def forward(self, q, k, v):
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.core = CausalAttention()

    def forward(self, x, rope):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, -1, self.head_dim)  # (B, T, H, Dh); H/tp of them under TP
        k = self.wk(x).view(B, T, -1, self.head_dim)  # (B, T, K, Dh)
        v = self.wv(x).view(B, T, -1, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, T, Dh)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # (B, T, D) -> (B, T, F) -> (B, T, D)


# ---- 4. Experts --------------------------------------------------------------------------------
#
# One token needs k of E feed_forwards, so a model can have many more parameters than it multiplies
# with. Three tokens a b c with k 2 and E 3; each of the 6 rows is a token on its way to one expert:
#
#     chosen            a: 2 0     b: 2 1     c: 0 2
#     rows              a2 a0 b2 b1 c0 c2             a token k times
#     sorted by expert  a0 c0 | b1 | a2 b2 c2         counts 2 1 3: one matmul for each expert
#     back in order     a2 a0 b2 b1 c0 c2             weighted, and summed over each token's k rows
#
# The router is trained through the weights alone. Left alone it falls for a few experts, so a bias
# for each expert takes part in the choice, but not in the weights; after each step it goes up for
# experts with few tokens and down for others (parallel.py:balance). No loss is added, no token is
# dropped, and the choice does not depend on how a batch is cut over ranks.


class Router(nn.Module):
    """How well an expert suits a token: (B, T, D) -> scores (B, T, E), in at least float32."""

    def __init__(self, config):
        super().__init__()
        # no nn.Linear, so that nothing quantises it: small errors here change which experts run
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.is_softmax = config.router_score == "softmax"

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        # a matmul for each sequence: under tp T is split, and cannot be merged with B
        weight = self.weight.to(wide).T.expand(len(x), -1, -1)  # (B, D, E)
        logits = torch.bmm(x.to(wide), weight)
        return logits.softmax(-1) if self.is_softmax else logits.sigmoid()


def grouped_linear(rows, weight, counts):
    """Rows sorted by expert (R, in), each times its expert's (out, in) of (E, out, in) -> (R, out).

    `counts` are the rows of each expert, int64 (E,) on the device; they add up to R.
    """
    if rows.dtype == torch.float64:  # which grouped_mm lacks; this waits for the host
        parts = rows.split(counts.tolist())
        return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])
    offsets = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)


class Experts(nn.Module):
    """E feed_forwards in three tensors; rows (R, D) sorted by expert, counts (E,) -> (R, D)."""

    def __init__(self, config):
        super().__init__()
        n, dim, expert_dim = config.n_experts, config.dim, config.expert_dim
        self.w1 = nn.Parameter(torch.empty(n, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n, expert_dim, dim))

    def forward(self, rows, counts):
        return self.compute(rows, counts, self.w1, self.w2, self.w3)

    @staticmethod
    def compute(rows, counts, w1, w2, w3):
        """SwiGLU with the given weights, of all experts or of some."""
        hidden = F.silu(grouped_linear(rows, w1, counts)) * grouped_linear(rows, w3, counts)
        return grouped_linear(hidden, w2, counts)


class MixtureOfExperts(nn.Module):
    """k of E experts for each token, and the shared ones: (B, T, D) -> (B, T, D).

    Buffers: bias (E,) float32, added to the scores for the choice; saved, but no parameter.
             counts, the rows of each expert in the forward pass just done: overwritten, so that a
             recomputation does no harm; load, their sum since the last update.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.n_shared_experts * config.expert_dim  # side by side one feed_forward
        self.shared_expert = FeedForward(config.dim, width) if width else None
        self.register_buffer("bias", torch.zeros(config.n_experts, dtype=torch.float32))
        for name in ("counts", "load"):
            zeros = torch.zeros(config.n_experts, dtype=torch.int64)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, x):
        k, n_experts = self.config.top_k, self.config.n_experts
        scores = self.router(x).flatten(0, 1)  # (B T, E)
        chosen = (scores + self.bias).topk(k, dim=-1).indices  # (B T, k)
        weights = scores.gather(1, chosen)
        if self.config.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.config.routed_scale

        experts = chosen.flatten()  # of each row, (B T k,)
        counts = torch.zeros(n_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts))
        self.counts.copy_(counts)
        order = experts.argsort(stable=True)
        rows = x.flatten(0, 1)[:, None].expand(-1, k, -1).flatten(0, 1)  # (B T k, D)
        rows = self.experts(rows[order], counts)
        # back in order, by a copy and a sum over k: no two rows are added where they happen to meet
        rows = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, (-1, k))
        y = (rows * weights.unsqueeze(-1)).sum(1).type_as(x).view_as(x)
        return y if self.shared_expert is None else y + self.shared_expert(x)


# ---- 5. The transformer ------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.attention = Attention(config)
        is_moe = has_experts(config, number)
        self.feed_forward = None if is_moe else FeedForward(config.dim, config.ffn_dim)
        self.moe = MixtureOfExperts(config) if is_moe else None
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x, rope):
        x = x + self.attention(self.attention_norm(x), rope)
        feed_forward = self.feed_forward if self.moe is None else self.moe
        return x + feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The whole model, or a pipeline stage of it when some modules are None.

    Args:    config; seq_len T, the rows of the RoPE table (under cp T/cp: see init_rope).
    Forward: (B, T) int64 tokens, or (B, T, D) activations where tok_embeddings is None
             -> (B, T, V) logits, or (B, T, D) where output is None or stops_at_norm is set.
    Note:    build it under `torch.device("meta")`: any size takes milliseconds and no memory. Move
             it with `to_empty`, then fill parameters from `draw_weight` and call `init_rope`, since
             meta tensors carry no values.
    """

    def __init__(self, config, *, seq_len):
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(config, i) for i in range(config.n_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_embeddings()
        self.stops_at_norm = False  # True where the loss calls output itself, chunk by chunk
        self.register_buffer("rope", None, persistent=False)
        self.init_rope(torch.arange(seq_len))

    def forward(self, x):
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)  # (B, T) -> (B, T, D)
        for block in self.layers.values():
            x = block(x, self.rope)
            if block.moe is not None and torch.is_grad_enabled():  # an evaluation counts nothing
                block.moe.load += block.moe.counts
        if self.norm is not None:
            x = self.norm(x)
        if self.output is not None and not self.stops_at_norm:
            x = self.output(x)  # (B, T, D) -> (B, T, V)
        return x

    def init_rope(self, positions):
        """(Re)make the RoPE table on the positions' device; under CP a rank gives its own."""
        self.rope = build_rope(self.config, positions)

    def tie_embeddings(self):
        """Let output share the embedding's weight if the config says so.

        Sharding and `to_empty` replace parameters one module at a time, and so untie them without
        an error: call this again after each.
        """
        if self.config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight


def linear_names(config):
    """Names of all linears of the model, such as layers.0.attention.wq, in its order."""
    with torch.device("meta"):
        whole = Transformer(config, seq_len=1)
    return [name for name, module in whole.named_modules() if isinstance(module, nn.Linear)]


# ---- 6. Initial weights ------------------------------------------------------------------------


def weight_std(name, config):
    """Standard deviation a parameter is drawn with, by its name (std of norms: None, they are 1).

    The two linears that add to the residual stream, and w3, shrink with depth: 0.02 / sqrt(2 (i+1))
    in block i of the whole model. An expert's name ends in its number: layers.3.moe.experts.w1.5.
    """
    parts = name.split(".")
    module = parts[-2]
    if module in ("attention_norm", "ffn_norm", "norm", "q_norm", "k_norm"):
        return None
    if module == "tok_embeddings":
        return 0.02 if config.tied_embeddings else 1.0  # tied: it is the head's weight as well
    if module == "output":
        return config.dim**-0.5
    if module in ("wq", "wk", "wv", "w1", "router"):
        return 0.02
    assert module in ("wo", "w2", "w3"), f"no initial distribution is known for {name}"
    return 0.02 / math.sqrt(2 * (int(parts[1]) + 1))


def draw_weight(name, shape, *, config, seed, device):
    """Return the full initial value of one parameter, drawn in float32 on `device`.

    The generator is seeded by a hash of (seed, name), so that any rank of any mesh draws the same
    tensor and keeps its slice: one process, FSDP, TP and PP start bitwise equal, without a seed
    checkpoint. (CPU and CUDA generators differ from each other.) `output` is cut at 3 standard
    deviations; the others, cut at 100 in TorchTitan, are plain normal here: much faster. Experts
    are drawn one by one, each by its number, since no rank needs all of them.

    Costs:   one full tensor in memory at a time, at most V * D * 4 bytes.
    """
    std = weight_std(name, config)
    if std is None:
        return torch.ones(shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    weight = torch.empty(shape, dtype=torch.float32, device=device)
    if name == "output.weight":
        nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
        return weight
    return weight.normal_(0.0, std, generator=generator)

"""checkpoint.py §5 to §7: Hugging Face folders in and out on any mesh, the tool, float8 weights.

Right values: weights drawn here, every tensor another one; a model written out below under Hugging
Face's names; published config.json files; and transformers itself, where it is installed. Files are
written and read by the safetensors package. Copies are compared bit for bit.
"""

import base64
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from test_checkpoint import SEQ_LEN, build, n_ranks, shapes_of

import checkpoint
import data
import parallel
from model import MODELS, ModelConfig, Transformer, draw_weight

# GQA 4/2, a stretch that moves wavelengths within 16 positions, sizes that divide by nothing
CONFIG = ModelConfig(
    24, 3, 4, 2, 6, vocab_size=261, rope_theta=100.0, rope_factor=4.0, rope_original_seq_len=16
)
TIED = dataclasses.replace(CONFIG, n_layers=2, tied_embeddings=True)
QWEN = dataclasses.replace(CONFIG, rope_factor=1.0, head_dim=8, qk_norm=True)
TIED_QWEN = dataclasses.replace(QWEN, n_layers=2, tied_embeddings=True)
TOKENS = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 37 % 261


# ---- values from elsewhere ---------------------------------------------------------------------


def llama_shapes(config):
    """{Hugging Face's name: shape}, written out."""
    D, heads = config.dim, config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    for i in range(config.n_layers):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (config.n_heads * heads, D),
            f"model.layers.{i}.self_attn.k_proj.weight": (config.n_kv_heads * heads, D),
            f"model.layers.{i}.self_attn.v_proj.weight": (config.n_kv_heads * heads, D),
            f"model.layers.{i}.self_attn.o_proj.weight": (D, config.n_heads * heads),
            f"model.layers.{i}.mlp.gate_proj.weight": (config.ffn_dim, D),
            f"model.layers.{i}.mlp.up_proj.weight": (config.ffn_dim, D),
            f"model.layers.{i}.mlp.down_proj.weight": (D, config.ffn_dim),
            f"model.layers.{i}.input_layernorm.weight": (D,),
            f"model.layers.{i}.post_attention_layernorm.weight": (D,),
        }
        if config.qk_norm:
            norms = (f"model.layers.{i}.self_attn.{name}_norm.weight" for name in "qk")
            shapes |= dict.fromkeys(norms, (heads,))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    return shapes


def random_llama(config, seed=0):
    """Weights that bf16 holds exactly, of a size at which every one moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in llama_shapes(config).items():
        weight = torch.randn(shape, generator=generator) * 0.3
        weights[name] = (1 + weight if "norm" in name else weight).bfloat16().float()
    return weights


def plain_llama(w, config, tokens):
    """Logits by the textbook, with Hugging Face's rotate-half and wavelength rule."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[name]

    head_dim = config.head_dim
    frequencies = []
    for j in range(head_dim // 2):
        frequency = config.rope_theta ** (-2 * j / head_dim)
        wavelength = 2 * math.pi / frequency
        original, factor = config.rope_original_seq_len, config.rope_factor
        if wavelength > original:
            frequency /= factor
        elif wavelength > original / 4:
            smooth = (original / wavelength - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    angles = torch.arange(tokens.shape[1])[:, None] * torch.tensor(frequencies * 2)  # (T, Dh)

    def rotate(x):  # (B, heads, T, Dh)
        half = torch.cat([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], dim=-1)
        return x * angles.cos() + half * angles.sin()

    def heads_of(x, name):
        return (x @ w[name].T).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config.n_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q = heads_of(h, at + "self_attn.q_proj.weight")
        k = heads_of(h, at + "self_attn.k_proj.weight")
        if config.qk_norm:
            q = norm(q, at + "self_attn.q_norm.weight")
            k = norm(k, at + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k)
        v = heads_of(h, at + "self_attn.v_proj.weight")
        groups = config.n_heads // config.n_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) / head_dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = h @ w[at + "mlp.gate_proj.weight"].T, h @ w[at + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    x = norm(x, "model.norm.weight")
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def config_json(config):
    """As transformers 4 wrote it for Llama 3.1 or Qwen3."""
    if config.qk_norm:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.dim,
            "intermediate_size": config.ffn_dim,
            "model_type": "qwen3",
            "num_attention_heads": config.n_heads,
            "num_hidden_layers": config.n_layers,
            "num_key_value_heads": config.n_kv_heads,
            "rms_norm_eps": config.norm_eps,
            "rope_scaling": None,
            "rope_theta": config.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": config.tied_embeddings,
            "use_sliding_window": False,
            "vocab_size": config.vocab_size,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": {
            "factor": config.rope_factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": config.rope_original_seq_len,
            "rope_type": "llama3",
        },
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }


def write_folder(folder, config, weights, n_files=3):
    safetensors = pytest.importorskip("safetensors.torch")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    names, weight_map = list(weights), {}
    for i in range(n_files):
        file = f"model-{i + 1}-of-{n_files}.safetensors" if n_files > 1 else "model.safetensors"
        part = {name: weights[name].bfloat16() for name in names[i::n_files]}
        safetensors.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if n_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_folder(folder):
    """{name: tensor} of all files, and that the index names the right one for each."""
    safetensors = pytest.importorskip("safetensors.torch")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors, files = {}, {}
    for path in folder.glob("*.safetensors"):
        part = safetensors.load_file(path)
        tensors |= part
        files |= dict.fromkeys(part, path.name)
    assert files == index["weight_map"]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    return tensors


# ---- models on meshes --------------------------------------------------------------------------


@torch.no_grad()
def logits_of(parts, mesh):
    """On the ranks of the last stage; None on the others."""
    x, pp_rank = TOKENS, mesh["pp"].get_local_rank()
    if pp_rank == 1:
        x = torch.empty(2, SEQ_LEN, CONFIG.dim)
        dist.recv(x, group=mesh["pp"].get_group(), group_src=0)
    x = parts[0](x)
    for module in parts[0].modules():
        if hasattr(module, "reshard"):  # else norm and output stay gathered, for a backward pass
            module.reshard()
    if mesh["pp"].size() > 1 and pp_rank == 0:
        dist.send(x, group=mesh["pp"].get_group(), group_dst=1)
        return None
    return x


def gather(parts):
    return {
        name: parallel.whole_tensor(weight).detach().clone()
        for part in parts
        for name, weight in parallel.named_weights(part)
    }


def save_run(folder, step, parts, config, optimizer=None, **facts):
    """A checkpoint as train.py writes it."""
    optimizer = optimizer or torch.optim.SGD(parts[0].parameters(), lr=0.1)
    state = {
        "step": step,
        "tokens": step * 1000,
        "flags": {"model": "debug", "seq_len": SEQ_LEN, "tokenizer": "bytes"} | facts,
        "model": dataclasses.asdict(config),
    }
    saver = checkpoint.Checkpointer(folder, mode="sync", keep_latest=0)
    saver.save(step, parts, optimizer, state)
    saver.close()


@torch.no_grad()
def perturb(parts):
    """Move every weight, as training would, by an amount that depends on its name alone."""
    for part in parts:
        for name, weight in parallel.named_weights(part):
            parallel.local_tensor(weight).mul_(1 + sum(name.encode()) % 97 / 500).add_(0.01)


def export(source, to, *flags):
    checkpoint.main(["export", "--from", str(source), "--to", str(to), *flags])
    return to


def run_tool(capsys, *argv):
    """(exit status, stdout, the one line of the error)"""
    status = 0
    try:
        checkpoint.main([str(word) for word in argv])
    except SystemExit as exit_:
        status = 1 if isinstance(exit_.code, str) else exit_.code
        print(exit_.code, file=sys.stderr)
    told = capsys.readouterr()
    assert len(told.err.splitlines()) <= 1
    return status, told.out, told.err


# ---- definition: the same model under other names ----------------------------------------------


def load_and_compare(folder, config, mesh_name):
    """Weights arrive bit for bit; returns the logits."""
    parts, mesh = build(mesh_name, config)
    checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
    weights = random_llama(config)
    loaded = gather(parts)
    for name, weight in loaded.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[checkpoint.huggingface_name(name)]), name
    return set(loaded), logits_of(parts, mesh)


@pytest.mark.parametrize(
    "mesh_name, config",
    [(name, CONFIG) for name in ("one process", "dp2", "dp3", "dp2 x tp2", "pp2")]
    + [("dp2 x tp2", QWEN)],
    ids=lambda value: value if isinstance(value, str) else checkpoint.family_of(vars(value)),
)
def test_every_mesh_computes_the_logits_of_the_plain_model(tmp_path, mesh_name, config):
    write_folder(tmp_path / "hf", config, random_llama(config))
    args = tmp_path / "hf", config, mesh_name
    results = run_ranks(n_ranks(mesh_name), load_and_compare, *args)
    assert set().union(*(names for names, _ in results)) == set(shapes_of(config))
    expected = plain_llama(random_llama(config), config, TOKENS)
    for _, logits in results:
        # float32 rounding: both sum a few dozen products in other orders, logits are of order 10
        assert logits is None or torch.allclose(logits, expected, rtol=1e-5, atol=1e-4)
    assert results[-1][1] is not None


@pytest.mark.parametrize("mesh_name", ["one process", "tp2"])
def test_a_tied_folder_is_read_and_its_extras_are_ignored(tmp_path, mesh_name):
    weights = random_llama(TIED)
    extras = {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    write_folder(tmp_path / "hf", TIED, weights | extras)
    args = tmp_path / "hf", TIED, mesh_name
    for names, logits in run_ranks(n_ranks(mesh_name), load_and_compare, *args):
        assert "output.weight" not in names
        assert torch.allclose(logits, plain_llama(weights, TIED, TOKENS), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n_files", [1, 3])
def test_only_the_files_that_the_folder_names_are_read(tmp_path, n_files):
    """Zeros under the same names beside them: before and after in the alphabet, and an adapter."""
    safetensors = pytest.importorskip("safetensors.torch")
    weights = random_llama(CONFIG)
    write_folder(tmp_path / "hf", CONFIG, weights, n_files)
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name in ("a", "consolidated.00", "z", "adapter_model"):
        safetensors.save_file(zeros, tmp_path / f"hf/{name}.safetensors")
    (_, logits), = run_ranks(1, load_and_compare, tmp_path / "hf", CONFIG, "one process")
    assert torch.allclose(logits, plain_llama(weights, CONFIG, TOKENS), rtol=1e-5, atol=1e-4)


def test_a_folder_that_does_not_say_which_files_count_is_refused(tmp_path):
    write_folder(tmp_path / "hf", CONFIG, random_llama(CONFIG))
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    (text,), _ = run_ranks(2, load_refused, [tmp_path / "hf"], CONFIG)
    assert "no model.safetensors and no model.safetensors.index.json says which files" in text
    assert "there: config.json, model-1-of-3.safetensors" in text


def check_only_own_slices(folder):
    """Every rank gets a copy of the files in which the other one's rows are spoilt."""
    parts, _ = build("tp2", CONFIG)
    rank = dist.get_rank()
    weights = random_llama(CONFIG)
    for name in weights:
        if "q_proj" in name or "gate_proj" in name:
            weights[name].chunk(2)[1 - rank].fill_(math.nan)
        if "o_proj" in name:
            weights[name].chunk(2, dim=1)[1 - rank].fill_(math.nan)
    write_folder(folder / str(rank), CONFIG, weights)
    checkpoint.load_weights(folder / str(rank), parts, shapes=shapes_of(CONFIG))
    return all(parallel.local_tensor(p).isfinite().all() for p in parts[0].parameters())


def test_a_rank_uses_its_own_slices_only(tmp_path):
    pytest.importorskip("safetensors")
    assert run_ranks(2, check_only_own_slices, tmp_path) == [True, True]


# ---- config.json -------------------------------------------------------------------------------

# fields of the files that Meta published with Llama 3.1 8B and Llama 3.2 1B
LLAMA_3_1_8B = config_json(MODELS["8b"]) | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip


# and by Qwen with Qwen3 0.6B
QWEN_3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


QWEN_3_30B_A3B = QWEN_3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
    "intermediate_size": 6144, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


def accepts(folder, published, config):
    pytest.importorskip("safetensors")
    text = json.dumps({key: v for key, v in published.items() if v is not None})
    (folder / "config.json").write_text(text)
    return checkpoint.check_init_from(folder, dataclasses.asdict(config)) == folder


@pytest.mark.parametrize(
    "name, published",
    [("8b", LLAMA_3_1_8B), ("1b", LLAMA_3_2_1B), ("qwen3-0.6b", QWEN_3_0_6B),
     ("qwen3-30b-a3b", QWEN_3_30B_A3B)],
)
def test_published_configs_are_those_of_model_py_both_ways(tmp_path, name, published):
    assert accepts(tmp_path, published, MODELS[name])
    written = checkpoint.config_to_huggingface(dataclasses.asdict(MODELS[name]))
    assert {key: written[key] for key in written if key in published} == {
        key: value for key, value in published.items() if key != "architectures"
    }


def test_what_a_family_does_not_compute_is_refused(tmp_path):
    for changes, told in (
        ({"model_type": "llama"}, "model_type is llama there and qwen3 here"),
        ({"use_sliding_window": True}, "use_sliding_window is True there and False here"),
        ({"head_dim": 64}, "head_dim is 64 there and 128 here"),
    ):
        with pytest.raises(ValueError, match=told):
            accepts(tmp_path, QWEN_3_0_6B | changes, MODELS["qwen3-0.6b"])


def test_a_run_older_than_a_field_is_read_as_having_none_of_it(tmp_path, tied_run):
    shutil.copytree(tied_run[0], tmp_path / "run")
    path = tmp_path / "run/checkpoints/step-00000003/train.json"
    facts = json.loads(path.read_text())
    del facts["model"]["qk_norm"], facts["model"]["head_dim"]
    path.write_text(json.dumps(facts))
    checkpoint.check_init_from(tmp_path / "run", dataclasses.asdict(TIED))


def test_older_and_newer_spellings_of_rope_are_read(tmp_path):
    newer = LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 500000.0}
    changes = {"rope_scaling": None, "rope_theta": None, "rope_parameters": newer}
    assert accepts(tmp_path, LLAMA_3_1_8B | changes, MODELS["8b"])
    llama_3 = dataclasses.replace(MODELS["8b"], rope_factor=1.0)  # before 3.1: not stretched
    changes = {"rope_scaling": None}
    assert accepts(tmp_path, LLAMA_3_1_8B | changes, llama_3)
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert accepts(tmp_path, LLAMA_3_1_8B | changes | {"rope_theta": None}, llama_3)
    llama_2 = dataclasses.replace(llama_3, rope_theta=10000.0)  # the default of LlamaConfig
    assert accepts(tmp_path, LLAMA_3_1_8B | {"rope_scaling": None, "rope_theta": None}, llama_2)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"model_type": "mistral"}, "model_type is mistral there and llama here"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu there and silu here"),
        ({"head_dim": 256}, "head_dim is 256 there and 128 here"),
        ({"hidden_size": None}, "hidden_size is None there and 4096 here"),
        ({"num_attention_heads": 16}, "num_attention_heads is 16 there and 32 here"),  # same shapes
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06 there and 1e-05 here"),
        ({"rope_theta": 10000.0}, "rope_theta is 10000.0"),
        ({"rope_scaling": None}, "rope_type is default there and llama3 here"),
        ({"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"rope_type": "yarn"}}, "is yarn there"),
        ({"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"high_freq_factor": 8.0}}, "is 8.0"),
        ({"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0}}, "is 32.0 there and 8"),
    ],
    ids=str,
)
def test_a_model_that_no_shape_tells_apart_is_refused(tmp_path, changes, told):
    with pytest.raises(ValueError, match=f"--init-from .*{told}"):
        accepts(tmp_path, LLAMA_3_1_8B | changes, MODELS["8b"])


@pytest.mark.parametrize(
    "older",
    [
        lambda c: c | {"head_dim": None},
        lambda c: {key: value for key, value in c.items() if key != "head_dim"},
        lambda c: c | {"rope_scaling": {
            "type" if key == "rope_type" else key: v for key, v in c["rope_scaling"].items()}},
    ],
)  # fmt: skip
def test_configs_of_other_ages_are_read(tmp_path, older):
    c = checkpoint.config_to_huggingface(dataclasses.asdict(CONFIG))
    write_folder(tmp_path / "hf", CONFIG, random_llama(CONFIG))
    (tmp_path / "hf/config.json").write_text(json.dumps(older(c)))
    checkpoint.check_init_from(tmp_path / "hf", dataclasses.asdict(CONFIG))


def test_a_config_without_kv_heads_means_as_many_as_heads(tmp_path):
    whole = dataclasses.replace(CONFIG, n_kv_heads=CONFIG.n_heads)
    c = checkpoint.config_to_huggingface(dataclasses.asdict(whole))
    del c["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(c))
    checkpoint.check_init_from(tmp_path, dataclasses.asdict(whole))
    with pytest.raises(ValueError, match="num_key_value_heads is 4 there and 2 here"):
        checkpoint.check_init_from(tmp_path, dataclasses.asdict(CONFIG))


def test_a_linear_stretch_is_not_taken_for_none(tmp_path):
    llama_3 = dataclasses.replace(MODELS["8b"], rope_factor=1.0)
    published = LLAMA_3_1_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="factor is 2.0 there and 1.0 here"):
        accepts(tmp_path, published, llama_3)


def test_without_safetensors_one_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="--init-from .*pip install safetensors"):
        (tmp_path / "config.json").write_text("{}")
        checkpoint.check_init_from(tmp_path, {})


# ---- what is refused at loading ----------------------------------------------------------------


def load_refused(folders, config):
    texts, (parts, _) = [], build("tp2", config)
    for folder in folders:
        with pytest.raises(ValueError) as error:
            checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
        assert not any(weight.any() for weight in gather(parts).values())  # nothing was written
        texts.append(str(error.value))
    return texts


def spoil(folder, how):
    weights = random_llama(CONFIG)
    if how == "missing":
        del weights["model.norm.weight"]
    elif how == "extra":
        weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(24)
    elif how == "shape":
        weights["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(24, 25)
    write_folder(folder, CONFIG, weights)
    file = folder / "model-2-of-3.safetensors"
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "gone":
        file.unlink()


def test_other_weights_or_unreadable_files_are_refused_alike_on_every_rank(tmp_path):
    words = {
        "missing": "model.norm.weight is absent there and (24,) in this run)",
        "extra": "model.layers.1.self_attn.q_proj.bias is (24,) there and absent in this run)",
        "shape": "model.layers.1.self_attn.q_proj.weight is (24, 25) there and (24, 24) in this",
        "cut": "(SafetensorError: ",
        "gone": "model-2-of-3.safetensors",
    }
    for how in words:
        spoil(tmp_path / how, how)
    (tmp_path / "nothing").mkdir()
    words |= {"nothing": "conflicts with what is there", "none": "conflicts with what is there"}
    folders = [tmp_path / how for how in words]
    first, second = run_ranks(2, load_refused, folders, CONFIG)
    assert first == second
    for text, folder, part in zip(first, folders, words.values(), strict=True):
        assert text.startswith(f"--init-from {folder} conflicts with") and part in text, text


def test_one_rank_that_cannot_read_stops_all(tmp_path):
    write_folder(tmp_path / "hf", CONFIG, random_llama(CONFIG))

    def load(path):
        path = path if dist.get_rank() == 0 else path / "elsewhere"
        return load_refused([path], CONFIG)

    texts = run_ranks(2, load, tmp_path / "hf")
    assert all("elsewhere conflicts with what is there" in text for (text,) in texts)


# ---- out again ---------------------------------------------------------------------------------


def from_folder_to_run(folder, out, config, mesh_name):
    """Load, move every weight, save; returns the logits before, then weights and logits."""
    parts, mesh = build(mesh_name, config)
    checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
    before = logits_of(parts, mesh)
    perturb(parts)
    save_run(out, 3, parts, config)
    return before, gather(parts), logits_of(parts, mesh)


def load_whole(paths, config, mesh_name):
    loaded = []
    for path in paths:
        parts, _ = build(mesh_name, config)
        checkpoint.load_weights(path, parts, shapes=shapes_of(config))
        loaded.append(gather(parts))
    return loaded


@pytest.mark.parametrize(
    "mesh_name, config", [("dp2 x tp2", CONFIG), ("pp2", CONFIG), ("dp2 x tp2", QWEN)]
)
def test_native_to_hugging_face_to_native_is_bit_equal(tmp_path, monkeypatch, mesh_name, config):
    monkeypatch.setattr(checkpoint, "SAFETENSORS_BYTES", 4000)
    write_folder(tmp_path / "in", config, random_llama(config))
    args = tmp_path / "in", tmp_path / "run/checkpoints", config, mesh_name
    results = run_ranks(n_ranks(mesh_name), from_folder_to_run, *args)
    ours = {name: weight for _, weights, _ in results for name, weight in weights.items()}
    out = export(tmp_path / "run", tmp_path / "out")
    tensors = read_folder(out)
    for path in out.glob("*.safetensors"):  # the last tensor of a file may stick out
        size, header = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
        assert size - header < 4000 + 4 * 261 * 24
        assert path.stat().st_mode & 0o044 == 0o044  # for others to read
    assert len(list(out.glob("*.safetensors"))) > 5
    assert {key: tensor.shape for key, tensor in tensors.items()} == llama_shapes(config)
    for name, weight in ours.items():
        assert torch.equal(tensors[checkpoint.huggingface_name(name)], weight), name
    logits = next(logits for _, _, logits in results if logits is not None)
    assert torch.allclose(plain_llama(tensors, config, TOKENS), logits, rtol=1e-5, atol=1e-4)
    (back,) = run_ranks(1, load_whole, [out], config, "one process")[0]
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def save_drawn(folder, config, optimizer=None, mesh_name="one process", **facts):
    """A run whose weights are those of random_llama; returns them by model.py's names."""
    drawn = random_llama(config)
    draw = lambda name, shape: drawn[checkpoint.huggingface_name(name)]  # noqa: E731
    parts, _ = build(mesh_name, config, draw=draw)
    save_run(folder, 3, parts, config, optimizer and optimizer(parts[0].parameters()), **facts)
    return gather(parts)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory):
    """(OUT of a run of the tied model, its weights)"""
    out = tmp_path_factory.mktemp("tied")
    return out, run_ranks(1, save_drawn, out / "checkpoints", TIED)[0]


def test_a_tied_weight_is_exported_once_and_bf16_rounds_once(tmp_path, tied_run):
    pytest.importorskip("safetensors")
    run, weights = tied_run
    tensors = read_folder(export(run, tmp_path / "out", "--dtype", "bf16"))
    assert "lm_head.weight" not in tensors
    for name, weight in weights.items():
        assert torch.equal(tensors[checkpoint.huggingface_name(name)], weight.bfloat16()), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 64  # 16 stretched by 4
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)


def test_the_torch_file_is_a_state_dict_of_the_model(tmp_path, tied_run):
    run, weights = tied_run
    out = export(run / "checkpoints/step-00000003", tmp_path / "out", "--format", "torch")
    state = torch.load(out / "weights.pt", weights_only=True)
    model = Transformer(TIED, seq_len=SEQ_LEN)
    model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    n_bytes = 4 * sum(weight.numel() for weight in weights.values())
    assert (out / "weights.pt").stat().st_size < n_bytes + 10_000  # the tied weight once


def test_init_from_takes_a_step_a_run_or_its_checkpoints(tmp_path, tied_run):
    run, weights = tied_run
    paths = [run, run / "checkpoints", run / "checkpoints/step-00000003"]
    for loaded in run_ranks(2, load_whole, paths, TIED, "tp2")[0]:
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    config = dataclasses.asdict(TIED) | {"norm_eps": 1e-6}
    with pytest.raises(ValueError, match=r"--init-from .*norm_eps is 1e-05 there and 1e-06 here"):
        checkpoint.check_init_from(run, config)
    config = dataclasses.asdict(TIED)
    assert checkpoint.check_init_from(run, config) == run / "checkpoints/step-00000003"


# ---- the tool ----------------------------------------------------------------------------------


def test_of_a_run_inspect_marks_what_does_not_count(tmp_path, tied_run, capsys):
    steps = tmp_path / "checkpoints"
    for name in ("step-00000003", "step-100000000", "step-00000005.set-aside-1"):
        shutil.copytree(tied_run[0] / "checkpoints/step-00000003", steps / name)
    (steps / "step-00000007.tmp-ab").mkdir()
    status, out, _ = run_tool(capsys, "inspect", tmp_path)
    size = sum(p.stat().st_size for p in (steps / "step-00000003").iterdir()) / 2**20
    told = f"{size:.2f} MiB  3,000 tokens", "does not count: unfinished, half deleted or set aside"
    assert status == 0 and out.splitlines()[:5] == [
        f"step-00000003  {told[0]}", f"step-100000000  {told[0]}",
        f"step-00000005.set-aside-1  {told[1]}", f"step-00000007.tmp-ab  {told[1]}",
        f"{steps}/step-100000000",
    ]  # fmt: skip
    assert run_tool(capsys, "inspect", steps)[1] == out
    _, of_one, _ = run_tool(capsys, "inspect", steps / "step-00000003")
    assert of_one.startswith(f"{steps}/step-00000003\n")


def test_inspect_groups_the_layers(tmp_path, capsys):
    run_ranks(2, save_drawn, tmp_path, CONFIG, torch.optim.AdamW, "tp2")
    status, out, _ = run_tool(capsys, "inspect", tmp_path)
    rows = {row.split()[-1]: row.split() for row in out.splitlines()}
    assert status == 0
    mib = f"{3 * 6 * 24 * 4 / 2**20:.2f}"  # of three layers, whole though the run was sharded
    w1, w2 = "model.layers.*.feed_forward.w1.weight", "optimizer.layers.*.feed_forward.w2.weight"
    assert rows[w1][:6] == ["3", "6", "x", "24", "float32", mib]
    assert rows[f"{w2}.exp_avg"][:6] == ["3", "24", "x", "6", "float32", mib]
    assert rows["optimizer.norm.weight.step"][:2] == ["1", "scalar"]
    assert '"step": 3' in out and '"rope_factor": 4.0' in out and '"tokenizer": "bytes"' in out


def test_an_export_is_whole_or_absent_and_overwrites_nothing(tmp_path, tied_run, capsys):
    pytest.importorskip("safetensors")
    (tmp_path / "there").mkdir()
    source = "--from", tied_run[0]
    status, _, error = run_tool(capsys, "export", *source, "--to", tmp_path / "there")
    assert status == 1 and "--to" in error and "overwrites nothing" in error
    shutil.copytree(tied_run[0], tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-00000003/__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    for kind in ("hf", "torch"):
        argv = "export", "--from", tmp_path / "run", "--to", tmp_path / "new", "--format", kind
        status, _, error = run_tool(capsys, *argv)
        assert status == 1 and str(tmp_path / "run") in error and "cannot be used" in error
    assert {path.name for path in tmp_path.iterdir()} == {"there", "run"}


@pytest.mark.parametrize("command", [("inspect",), ("export", "--to", "x", "--from")])
def test_what_is_no_checkpoint_is_told_in_one_line(tmp_path, capsys, command):
    pytest.importorskip("safetensors")  # without it a Hugging Face folder is refused for that
    half_deleted = tmp_path / "step-00000005.tmp-deleted"
    half_deleted.mkdir()
    (half_deleted / ".metadata").write_text("")
    of_others = tmp_path / "hugging-face"
    of_others.mkdir()
    (of_others / "config.json").write_text("{}")
    for path in (half_deleted, tmp_path / "no", of_others):
        status, _, error = run_tool(capsys, *command, path)
        assert status == 1 and f"{path} conflicts with what is there" in error


def bpe_file(path):
    """A tiktoken file: all bytes, then pairs of letters."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [pair.encode() for pair in ("th", "he", "in", "er", " t", "an", "the", " the")]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path, len(tokens)


def test_the_tokenizer_file_goes_along_with_its_ids(tmp_path, capsys):
    pytest.importorskip("safetensors")
    path, n_ranks = bpe_file(tmp_path / "some.model")
    config = dataclasses.replace(CONFIG, n_layers=1, vocab_size=n_ranks + 256)
    run = partial(save_drawn, tokenizer=str(path))
    run_ranks(1, run, tmp_path / "run", config)
    out = export(tmp_path / "run", tmp_path / "out")
    assert (out / "tokenizer.model").read_bytes() == path.read_bytes()
    tokenizer = data.load_tokenizer(path)
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((out / name).read_text())
        assert ids["bos_token_id"] == tokenizer.bos_id
        assert ids["eos_token_id"] == tokenizer.eos_id
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = "the other thing in 1234 hands,\n  then\u00e4 "
    assert theirs(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)]
    assert theirs.eos_token_id == tokenizer.eos_id


def test_readmes_four_lines_let_a_model_of_bytes_speak(tmp_path, capsys, monkeypatch):
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, n_layers=1, vocab_size=258)
    run_ranks(1, save_drawn, tmp_path / "run", config)
    out = export(tmp_path / "run", tmp_path / "llama")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(out), data.load_tokenizer("bytes")
    text = "".join(map(chr, range(256))) + " größer\n\t→"  # every byte but those of no text
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    (lines,) = re.findall(r"((?:^    .*\n)*^    print\(tokenizer\.decode.*\n)", readme, flags=re.M)
    assert lines.count("\n") == 4
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(textwrap.dedent(lines), {})
    assert capsys.readouterr().out.startswith("<|begin_of_text|>def main(")


def test_a_tokenizer_file_that_is_gone_is_told(tmp_path, capsys):
    pytest.importorskip("safetensors")
    run_ranks(1, partial(save_drawn, tokenizer="some/file"), tmp_path / "run", TIED)
    export(tmp_path / "run", tmp_path / "out")
    assert "no tokenizer written: some/file" in capsys.readouterr().out


# ---- float8 weights ----------------------------------------------------------------------------

FLOAT8 = ModelConfig(32, 2, 4, 2, 48, vocab_size=64)


def train_and_save(folder, recipe):
    """One step of AdamW on two FSDP ranks, saved; returns weights and moments, whole, by key."""
    draw = partial(draw_weight, config=FLOAT8, seed=0, device="cpu")
    parts, _ = build("dp2", FLOAT8, recipe=recipe, draw=draw)
    optimizer = torch.optim.AdamW(parts[0].parameters(), lr=0.1, fused=True)
    parts[0](TOKENS % 64).logsumexp(-1).sum().backward()
    optimizer.step()
    save_run(folder, 3, parts, FLOAT8, optimizer)
    return whole_state(parts, optimizer)


def whole_state(parts, optimizer):
    """Read off the live objects, not by checkpoint.py."""
    whole = {}
    for name, weight in parts[0].named_parameters():
        whole[name] = parallel.whole_tensor(weight.detach()).clone()
        for kind, value in optimizer.state[weight].items():
            whole[f"{name} {kind}"] = parallel.whole_tensor(value).clone()
    return {name: getattr(value, "_tensor", value) for name, value in whole.items()}


def load_into(folder, recipe):
    if recipe is None:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
            del sys.modules[name]
        sys.modules["torchao"] = None  # importing it fails from here on
    parts, _ = build("dp2", FLOAT8, recipe=recipe)
    optimizer = torch.optim.AdamW(parts[0].parameters(), lr=0.1, fused=True)
    checkpoint.load_checkpoint(folder, 3, parts, optimizer, shapes=shapes_of(FLOAT8))
    only_weights, _ = build("dp2", FLOAT8, recipe=recipe)
    checkpoint.load_weights(folder, only_weights, shapes=shapes_of(FLOAT8))
    state = whole_state(parts, optimizer)
    for name, weight in only_weights[0].named_parameters():
        weight = parallel.whole_tensor(weight.detach())
        assert torch.equal(getattr(weight, "_tensor", weight), state[name]), name
    return state


@pytest.mark.parametrize("recipes", [("tensorwise", None), (None, "tensorwise")])
def test_a_float8_gather_run_and_a_plain_one_read_each_other_without_torchao(tmp_path, recipes):
    saved = run_ranks(2, train_and_save, tmp_path, recipes[0])[0]
    loaded = run_ranks(2, load_into, tmp_path, recipes[1])[0]
    assert saved.keys() == loaded.keys() and len(saved) == 4 * len(shapes_of(FLOAT8))
    for name, value in saved.items():
        assert type(value) is torch.Tensor and torch.equal(value, loaded[name]), name
    for path in tmp_path.glob("*/*"):
        assert b"torchao" not in path.read_bytes(), path


# ---- transformers itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, mesh_name",
    [(CONFIG, "one process"), (TIED, "one process"), (CONFIG, "tp2"), (CONFIG, "pp2")]
    + [(QWEN, "tp2"), (TIED_QWEN, "one process")],
)
def test_transformers_agrees_before_and_after_training(tmp_path, config, mesh_name):
    transformers = pytest.importorskip("transformers")
    build_theirs = transformers.AutoModelForCausalLM.from_config
    settings = transformers.AutoConfig.for_model(**config_json(config), max_position_embeddings=64)
    theirs, weights = build_theirs(settings), random_llama(config)
    assert weights.keys() <= theirs.state_dict().keys()
    theirs.load_state_dict(weights, strict=not config.tied_embeddings)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="5KB")
    args = tmp_path / "in", tmp_path / "run", config, mesh_name
    results = run_ranks(n_ranks(mesh_name), from_folder_to_run, *args)
    ours, _, moved = results[-1]  # a rank of the last stage
    out = export(tmp_path / "run", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is type(theirs)
    assert again.dtype == torch.float32
    with torch.no_grad():
        # as above; they also compute frequencies in float32, angles up to 16 are off by 1e-6
        assert torch.allclose(ours, theirs(TOKENS).logits, rtol=1e-5, atol=1e-4)
        assert torch.allclose(moved, again(TOKENS).logits, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(ours, moved, atol=0.01)

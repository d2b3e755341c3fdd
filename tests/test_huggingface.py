"""checkpoint.py §5 to §7: Hugging Face folders in and out on any mesh, the tool, float8 weights.

Right values: weights drawn here, every tensor another one; a Llama written out below under Hugging
Face's names; a safetensors reader and writer written from the format's description; published
config.json files; and transformers itself, where it is installed. Copies are compared bit for bit.
"""

import base64
import dataclasses
import json
import math
import os
import shutil
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks

import checkpoint
import data
import float8
import parallel
import pipeline
from model import MODELS, ModelConfig, Transformer, draw_weight

# GQA 4/2, a stretch that moves wavelengths within 16 positions, sizes that divide by nothing
CONFIG = ModelConfig(
    24, 3, 4, 2, 6, vocab_size=261, rope_theta=100.0, rope_factor=4.0, rope_original_seq_len=16
)
TIED = dataclasses.replace(CONFIG, n_layers=2, tied_embeddings=True)
SEQ_LEN = 16
TOKENS = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 37 % 261
MESHES = {  # degrees of parallel.build_mesh
    "one process": {},
    "tp2": {"tp": 2},
    "dp2": {"dp_shard": 2},
    "dp4": {"dp_shard": 4},  # 6 rows over 4 ranks: one has none
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "dp2 x pp2": {"dp_shard": 2, "pp": 2},
}

# ---- values from elsewhere ---------------------------------------------------------------------


def llama_shapes(config):
    """{Hugging Face's name: shape}, written out."""
    D, heads = config.dim, config.dim // config.n_heads
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

    head_dim = config.dim // config.n_heads
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
        q = rotate(heads_of(h, at + "self_attn.q_proj.weight"))
        k = rotate(heads_of(h, at + "self_attn.k_proj.weight"))
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
    """As transformers 4 wrote it for Llama 3.1."""
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


def write_file(path, tensors, code="BF16"):
    """A safetensors file by the book, its header not padded: tensors begin where they happen to."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.to({"BF16": torch.bfloat16, "F32": torch.float32}[code])
                    .flatten().view(torch.uint8).tolist())  # fmt: skip
        span = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": span}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (len(text) % 2 == 0)  # an odd length
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_folder(folder, config, weights, n_files=3):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    names, index = list(weights), {}
    for i in range(n_files):
        file = f"model-{i + 1}-of-{n_files}.safetensors"
        write_file(folder / file, {name: weights[name] for name in names[i::n_files]})
        index |= dict.fromkeys(names[i::n_files], file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def read_folder(folder):
    """{name: tensor} of all files, and that the index names the right one for each."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors, files = {}, {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]
            piece = bytearray(raw[start + begin : start + end])
            tensors[name] = torch.frombuffer(piece, dtype=dtype).view(entry["shape"])
            files[name] = path.name
    assert files == index["weight_map"]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    return tensors


# ---- models on meshes --------------------------------------------------------------------------


def shapes_of(config):
    with torch.device("meta"):
        model = Transformer(config, seq_len=SEQ_LEN)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def build(config, mesh_name="one process", *, recipe=None):
    """(this rank's parts, mesh), built as train.py does, with zero weights."""
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | MESHES[mesh_name]
    mesh = parallel.build_mesh("cpu", **degrees)
    with torch.device("meta"):
        model = Transformer(config, seq_len=SEQ_LEN)
    if degrees["pp"] == 2:
        stages = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
        model = pipeline.cut_stage(model, stages[mesh["pp"].get_local_rank()])
    if recipe:
        float8.apply_float8(model, recipe, all_gather=True, skip=("output",), emulate=True)
    if degrees["tp"] > 1:
        parallel.apply_tp(model, mesh["tp"], loss_parallel=False)
    parallel.apply_fsdp(
        model,
        mesh,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard="default",
        cpu_offload=False,
    )
    parallel.materialise(
        model,
        device="cpu",
        weight_device="cpu",
        draw=lambda name, shape: torch.zeros(shape),
        positions=torch.arange(SEQ_LEN),
    )
    return [model], mesh


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
    parts, mesh = build(config, mesh_name)
    checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
    weights = random_llama(config)
    loaded = gather(parts)
    for name, weight in loaded.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[checkpoint.huggingface_name(name)]), name
    return set(loaded), logits_of(parts, mesh)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_a_hugging_face_folder_gives_the_logits_of_a_plain_llama(tmp_path, config):
    weights = random_llama(config)
    write_folder(tmp_path / "hf", config, weights)
    ((names, logits),) = run_ranks(1, load_and_compare, tmp_path / "hf", config, "one process")
    assert {checkpoint.huggingface_name(name) for name in names} == set(weights)
    expected = plain_llama(weights, config, TOKENS)
    # float32 rounding: both sum a few dozen products in other orders, logits are of order 10
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-4), (logits - expected).abs().max()
    swapped = dict(weights)  # the comparison sees what a wrong mapping would do
    for pair in (("mlp.gate_proj", "mlp.up_proj"), ("input_layernorm", "post_attention_layernorm")):
        a, b = (f"model.layers.1.{name}.weight" for name in pair)
        swapped = weights | {a: weights[b], b: weights[a]}
        assert not torch.allclose(plain_llama(swapped, config, TOKENS), expected, atol=0.05)


@pytest.mark.parametrize("mesh_name", list(MESHES)[2:])
def test_every_mesh_loads_the_same_weights_and_computes_the_same_logits(tmp_path, mesh_name):
    write_folder(tmp_path / "hf", CONFIG, random_llama(CONFIG))
    world_size = math.prod(MESHES[mesh_name].values())
    results = run_ranks(world_size, load_and_compare, tmp_path / "hf", CONFIG, mesh_name)
    assert set().union(*(names for names, _ in results)) == set(shapes_of(CONFIG))
    expected = plain_llama(random_llama(CONFIG), CONFIG, TOKENS)
    for _, logits in results:
        if logits is not None:
            assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-4)


def test_a_tied_folder_loads_on_shards_and_its_extras_are_ignored(tmp_path):
    weights = random_llama(TIED)
    extras = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    write_folder(tmp_path / "hf", TIED, weights | extras)
    for names, logits in run_ranks(2, load_and_compare, tmp_path / "hf", TIED, "tp2"):
        assert "output.weight" not in names
        assert torch.allclose(logits, plain_llama(weights, TIED, TOKENS), rtol=1e-5, atol=1e-4)


def check_only_own_slices(folder):
    """Every rank gets a copy of the files in which the other one's rows are spoilt."""
    parts, _ = build(CONFIG, "tp2")
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


@pytest.mark.parametrize("name, published", [("8b", LLAMA_3_1_8B), ("1b", LLAMA_3_2_1B)])
def test_published_configs_are_those_of_model_py_both_ways(tmp_path, name, published):
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = checkpoint.config_from_huggingface(tmp_path)
    assert ModelConfig(**config) == MODELS[name]
    written = checkpoint.config_to_huggingface(
        dataclasses.asdict(MODELS[name]), seq_len=131072, dtype=torch.bfloat16
    )
    assert {key: written[key] for key in published} == published
    assert written["torch_dtype"] == "bfloat16"


def test_older_and_newer_spellings_of_rope_are_read(tmp_path):
    def read(changes):
        text = json.dumps({k: v for k, v in (LLAMA_3_1_8B | changes).items() if v is not None})
        (tmp_path / "config.json").write_text(text)
        return ModelConfig(**checkpoint.config_from_huggingface(tmp_path))

    newer = LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 500000.0}
    changes = {"rope_scaling": None, "rope_theta": None, "rope_parameters": newer}
    assert read(changes) == MODELS["8b"]
    llama_3 = dataclasses.replace(MODELS["8b"], rope_factor=1.0)  # before 3.1: not stretched
    assert read({"rope_scaling": None}) == llama_3
    assert read({"rope_scaling": None, "rope_theta": None}).rope_theta == 10000.0  # Llama 1 and 2


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 256},
        {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"rope_type": "yarn"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"high_freq_factor": 8.0}},
    ],
    ids=str,
)
def test_a_config_that_model_py_does_not_compute_is_refused(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | changes))
    with pytest.raises(ValueError, match="config.json: .* is .*, but model.py computes"):
        checkpoint.config_from_huggingface(tmp_path)


# ---- what is refused at loading ----------------------------------------------------------------


def load_refused(folders, config):
    texts, (parts, _) = [], build(config, "tp2")
    for folder in folders:
        with pytest.raises(ValueError) as error:
            checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
        assert not any(weight.any() for weight in gather(parts).values())  # nothing was written
        texts.append(str(error.value))
    return texts


def spoil(folder, how):
    weights = random_llama(CONFIG)
    norm, q_proj = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    if how == "missing":
        del weights[norm]
    elif how == "extra":
        weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(24)
    elif how == "shape":
        weights[q_proj] = torch.zeros(24, 25)
    config = CONFIG
    if how == "heads":
        config = dataclasses.replace(CONFIG, n_heads=8, n_kv_heads=4)  # no shape tells
    elif how == "rope":
        config = dataclasses.replace(CONFIG, rope_factor=8.0)
    write_folder(folder, config, weights)
    file = folder / "model-2-of-3.safetensors"
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "gone":
        file.unlink()
    elif how == "float8":
        file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F8_X"', 1))
    elif how == "config":
        (folder / "config.json").write_text("{")


def test_another_model_or_unreadable_files_are_refused_alike_on_every_rank(tmp_path):
    words = {
        "missing": "model.norm.weight is absent there and (24,) in this run: ",
        "extra": "model.layers.1.self_attn.q_proj.bias is (24,) there and absent in this run: ",
        "shape": "model.layers.1.self_attn.q_proj.weight is (24, 25) there and (24, 24) in this",
        "heads": "n_heads is 8 there and 4 here, n_kv_heads is 4 there and 2 here: weights mean",
        "rope": "rope_factor is 8.0 there and 4.0 here: ",
        "cut": "conflicts with its files (ValueError: ",
        "empty": "conflicts with its files (ValueError: cannot mmap an empty file",
        "gone": "model-2-of-3.safetensors",
        "float8": "is of type F8_X",
        "config": "config.json cannot be read",
    }
    for how in words:
        spoil(tmp_path / how, how)
    (tmp_path / "nothing").mkdir()
    words |= {"nothing": "is no checkpoint (it holds nothing)", "none": "there is no such folder"}
    folders = [tmp_path / how for how in words]
    first, second = run_ranks(2, load_refused, folders, CONFIG)
    assert first == second
    for text, folder, part in zip(first, folders, words.values(), strict=True):
        assert text.startswith(f"--init-from {folder}") and part in text, text
    assert first[3].endswith("add --set n_heads=8 n_kv_heads=4")


def test_one_rank_that_cannot_read_stops_all(tmp_path):
    write_folder(tmp_path / "hf", CONFIG, random_llama(CONFIG))

    def load(path):
        path = path if dist.get_rank() == 0 else path / "elsewhere"
        return load_refused([path], CONFIG)

    texts = run_ranks(2, load, tmp_path / "hf")
    assert texts[0] == texts[1] and "elsewhere" in texts[0][0]


# ---- out again ---------------------------------------------------------------------------------


def from_folder_to_run(folder, out, config, mesh_name, *, move=True):
    """Load, move every weight, save; returns the weights and logits."""
    parts, mesh = build(config, mesh_name)
    checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
    if move:
        perturb(parts)
    save_run(out, 3, parts, config)
    return gather(parts), logits_of(parts, mesh)


@pytest.mark.parametrize("mesh_name", ["dp2 x tp2", "dp2 x pp2"])
def test_native_to_hugging_face_to_native_is_bit_equal(tmp_path, monkeypatch, mesh_name):
    monkeypatch.setattr(checkpoint, "SAFETENSORS_BYTES", 4000)
    write_folder(tmp_path / "in", CONFIG, random_llama(CONFIG))
    run = tmp_path / "run"
    results = run_ranks(
        4, from_folder_to_run, tmp_path / "in", run / "checkpoints", CONFIG, mesh_name
    )
    ours = {name: weight for weights, _ in results for name, weight in weights.items()}
    out = export(run, tmp_path / "out")
    tensors = read_folder(out)
    for path in out.glob("*.safetensors"):  # a header takes some 150 bytes per tensor
        assert path.stat().st_size < 4000 + 9 * 150 or path.read_bytes().count(b"dtype") == 1
    assert {key: tensor.shape for key, tensor in tensors.items()} == llama_shapes(CONFIG)
    for name, weight in ours.items():
        assert torch.equal(tensors[checkpoint.huggingface_name(name)], weight), name
    logits = next(logits for _, logits in results if logits is not None)
    assert torch.allclose(plain_llama(tensors, CONFIG, TOKENS), logits, rtol=1e-5, atol=1e-4)
    unmoved = partial(from_folder_to_run, move=False)
    ((back, _),) = run_ranks(1, unmoved, out, tmp_path / "back", CONFIG, "one process")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory):
    """(OUT of a run of the tied model, its weights)"""
    folder = tmp_path_factory.mktemp("tied")
    write_folder(folder / "hf", TIED, random_llama(TIED))
    args = folder / "hf", folder / "run/checkpoints", TIED, "one process"
    ((weights, _),) = run_ranks(1, from_folder_to_run, *args)
    return folder / "run", weights


def test_a_tied_weight_is_exported_once_and_bf16_rounds_once(tmp_path, tied_run):
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


def load_native(paths):
    loaded = []
    for path in paths:
        parts, _ = build(TIED, "tp2")
        checkpoint.load_weights(path, parts, shapes=shapes_of(TIED))
        loaded.append(gather(parts))
    return loaded


def test_init_from_takes_a_step_a_run_or_its_checkpoints(tmp_path, tied_run):
    run, weights = tied_run
    paths = [run, run / "checkpoints", run / "checkpoints/step-00000003"]
    for loaded in run_ranks(2, load_native, paths)[0]:
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    config = dataclasses.asdict(TIED) | {"norm_eps": 1e-6}
    with pytest.raises(ValueError, match=r"--init-from .*norm_eps is 1e-05 there.*norm_eps=1e-05"):
        checkpoint.check_init_from(run, config)


# ---- the tool ----------------------------------------------------------------------------------


def test_list_marks_what_does_not_count(tmp_path, tied_run, capsys):
    steps = tmp_path / "checkpoints"
    shutil.copytree(tied_run[0] / "checkpoints/step-00000003", steps / "step-00000003")
    shutil.copytree(tied_run[0] / "checkpoints/step-00000003", steps / "step-100000000")
    shutil.copytree(steps / "step-00000003", steps / "step-00000005.set-aside-1")
    (steps / "step-00000007.tmp-ab-1").mkdir()
    (steps / "step-abc").mkdir()
    status, out, _ = run_tool(capsys, "list", tmp_path)
    rows = out.splitlines()
    assert status == 0
    assert [row.split()[0] for row in rows] == [
        "step-00000003", "step-00000005.set-aside-1", "step-00000007.tmp-ab-1", "step-100000000"
    ]  # fmt: skip
    assert [row.split("(")[1:] for row in rows] == [
        [], ["set aside: does not count)"], ["unfinished or half deleted: does not count)"], []
    ]  # fmt: skip
    size = sum(p.stat().st_size for p in (steps / "step-00000003").iterdir()) / 2**20
    assert f"{size:.2f} MiB" in rows[0] and "3,000 tokens  --model debug" in rows[0]
    assert run_tool(capsys, "list", steps)[1] == out


def save_with_adamw(folder):
    parts, _ = build(CONFIG, "tp2")
    save_run(folder, 3, parts, CONFIG, torch.optim.AdamW(parts[0].parameters()))


def test_inspect_groups_the_layers_and_sums_the_bytes(tmp_path, capsys):
    run_ranks(2, save_with_adamw, tmp_path)
    status, out, _ = run_tool(capsys, "inspect", tmp_path)
    rows = {row.split()[-1]: row.split() for row in out.splitlines()}
    assert status == 0
    mib = 3 * 6 * 24 * 4 / 2**20
    w1 = rows["model.layers.*.feed_forward.w1.weight"]
    assert w1[:5] == ["3", "6", "x", "24", "float32"] and w1[5] == f"{mib:.2f}"
    assert rows["optimizer.layers.*.feed_forward.w2.weight.exp_avg"][:5] == [
        "3", "24", "x", "6", "float32"
    ]  # fmt: skip
    assert rows["optimizer.norm.weight.step"][:2] == ["1", "scalar"]
    n_weights = sum(math.prod(shape) for shape in llama_shapes(CONFIG).values())
    n_steps = len(llama_shapes(CONFIG))
    assert f"model {n_weights * 4 / 2**20:.2f} MiB" in out
    assert f"optimizer {(2 * n_weights + n_steps) * 4 / 2**20:.2f} MiB" in out
    assert "step: 3" in out and "rope_factor=4.0" in out and "tokenizer=bytes" in out


def test_an_export_is_whole_or_absent_and_overwrites_nothing(tmp_path, tied_run, capsys):
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


@pytest.mark.parametrize("command", [("list",), ("inspect",), ("export", "--to", "x", "--from")])
def test_what_is_no_checkpoint_is_told_in_one_line(tmp_path, capsys, command):
    half_deleted = tmp_path / "step-00000005.tmp-deleted"
    half_deleted.mkdir()
    (half_deleted / ".metadata").write_text("")
    rest = [half_deleted] if command[0] != "list" else []  # which shows it, marked
    for path in (*rest, tmp_path / "no", half_deleted / "deeper"):
        status, _, error = run_tool(capsys, *command, path)
        assert status == 1 and f"{path} is no checkpoint (" in error


def bpe_file(path):
    """A tiktoken file: all bytes, then pairs of letters."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [pair.encode() for pair in ("th", "he", "in", "er", " t", "an", "the", " the")]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path, len(tokens)


def save_vocabulary(folder, config, tokenizer):
    parts, _ = build(config)
    save_run(folder, 3, parts, config, tokenizer=tokenizer)


def test_the_tokenizer_file_goes_along_with_its_ids(tmp_path, capsys):
    path, n_ranks = bpe_file(tmp_path / "some.model")
    config = dataclasses.replace(CONFIG, n_layers=1, vocab_size=n_ranks + 256)
    run_ranks(1, save_vocabulary, tmp_path / "run", config, str(path))
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


def test_a_tokenizer_that_is_absent_or_too_large_is_told(tmp_path, tied_run, capsys):
    path, n_ranks = bpe_file(tmp_path / "some.model")
    argv = "export", "--from", tied_run[0], "--to", tmp_path / "out", "--tokenizer"
    status, _, error = run_tool(capsys, *argv, path)
    assert status == 1 and f"--tokenizer {path} has {n_ranks + 2} tokens" in error
    assert not (tmp_path / "out").exists()
    status, _, error = run_tool(capsys, *argv, tmp_path / "none")
    assert status == 1 and "none" in error


# ---- float8 weights ----------------------------------------------------------------------------

FLOAT8 = ModelConfig(32, 2, 4, 2, 48, vocab_size=64)


def train_and_save(folder, recipe):
    """One step of AdamW on two FSDP ranks, saved; returns weights and moments, whole, by key."""
    parts, _ = build(FLOAT8, "dp2", recipe=recipe)
    for name, weight in parallel.named_weights(parts[0]):
        full = draw_weight(name, weight.shape, config=FLOAT8, seed=0, device="cpu")
        full = full.chunk(2)[dist.get_rank()]
        with torch.no_grad():
            parallel.local_tensor(weight).copy_(full)
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
    parts, _ = build(FLOAT8, "dp2", recipe=recipe)
    optimizer = torch.optim.AdamW(parts[0].parameters(), lr=0.1, fused=True)
    checkpoint.load_checkpoint(folder, 3, parts, optimizer, shapes=shapes_of(FLOAT8))
    only_weights, _ = build(FLOAT8, "dp2", recipe=recipe)
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


def their_model(config):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config_json(config), max_position_embeddings=64)
    )


def logits_before_and_after(folder, out, config, mesh_name):
    parts, mesh = build(config, mesh_name)
    checkpoint.load_weights(folder, parts, shapes=shapes_of(config))
    before = logits_of(parts, mesh)
    perturb(parts)
    save_run(out, 3, parts, config)
    return before, logits_of(parts, mesh)


@pytest.mark.parametrize(
    "config, mesh_name",
    [(CONFIG, "one process"), (TIED, "one process"), (CONFIG, "tp2"), (CONFIG, "dp2 x pp2")],
)
def test_transformers_agrees_before_and_after_training(tmp_path, config, mesh_name):
    transformers = pytest.importorskip("transformers")
    theirs = their_model(config)
    weights = random_llama(config)
    state = {k: v for k, v in theirs.state_dict().items() if k in weights}
    assert state.keys() == weights.keys()
    theirs.load_state_dict(weights, strict=not config.tied_embeddings)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="5KB")
    args = tmp_path / "in", tmp_path / "run", config, mesh_name
    results = run_ranks(math.prod(MESHES[mesh_name].values()), logits_before_and_after, *args)
    ours, moved = next(pair for pair in results if pair[0] is not None)
    out = export(tmp_path / "run", tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(out)
    assert again.dtype == torch.float32
    with torch.no_grad():
        # as above; they also compute frequencies in float32, angles up to 16 are off by 1e-6
        assert torch.allclose(ours, theirs(TOKENS).logits, rtol=1e-5, atol=1e-4)
        assert torch.allclose(moved, again(TOKENS).logits, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(ours, moved, atol=0.01)

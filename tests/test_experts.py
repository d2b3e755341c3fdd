"""Experts on every mesh: model.py §4 and parallel.py §4, where several files meet.

The arithmetic of experts on one process is test_model.py's.
"""

import functools
import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from ranks import make_job, metrics_of, run_program, run_ranks, train_on
from test_parallel import Collectives

import checkpoint
import parallel
import simulate
import train
import watch

# ---- Every mesh trains as one process ----------------------------------------------------------


def accumulated(flags, times=1):
    degrees = [int(n) for f, n in zip(flags.split(), flags.split()[1:]) if f in AXES]  # noqa: B905
    ranks = functools.reduce(lambda a, b: a * b, degrees, 1)
    return ranks, parity.with_accumulation(flags, parity.data_ranks(flags), times)


AXES = "--pp --dp-replicate --dp-shard --cp --tp".split()
CASES = {  # each factor once
    flags: accumulated(flags)
    for flags in (
        "--dp-shard 2", "--dp-shard 2 --ep 2", "--tp 2", "--tp 2 --ep 2", "--cp 2 --ep 2",
        "--dp-replicate 2", "--pp 2 --pp-schedule ZBVZeroBubble",
        "--dp-shard 2 --ep 2 --ac op", "--tp 2 --ep 2 --ac op", "--tp 2 --ep 2 --ac full",
        "--dp-shard 2 --ep 2 --ac 2", "--dp-shard 2 --ep 2 --reshard always",
        "--dp-shard 2 --ep 2 --cpu-offload",
        "--dp-shard 4 --ep 4", "--dp-shard 2 --tp 2 --ep 2", "--cp 2 --tp 2 --ep 4",
        "--pp 2 --dp-shard 2 --ep 2", "--pp 2 --tp 2 --ep 2",
        "--dp-replicate 2 --dp-shard 2 --ep 2", "--dp-replicate 2 --dp-shard 2",
    )
} | {
    f"{flags}, accumulated": accumulated(flags, 2)
    for flags in ("--dp-shard 2 --ep 2", "--pp 2")
}  # fmt: skip
FEW = {flags: accumulated(flags) for flags in ("--dp-shard 4", "--dp-shard 2 --tp 2 --ep 2")}
LAUNCHES = [
    (common, {name: case for name, case in cases.items() if case[0] == ranks})
    for common, cases in ((parity.EXPERTS, CASES), (parity.FEW_EXPERTS, FEW))
    for ranks in sorted({ranks for ranks, _ in cases.values()})
]


@functools.cache
def run_launch(i):
    """{case: errors against one process} of LAUNCHES[i]; what stopped it, if anything, once."""
    common, cases = LAUNCHES[i]
    try:
        return parity.run_matrix(cases, dtype="fp64", steps=5, common=common)
    except AssertionError as error:
        return error


@pytest.mark.parametrize(
    ("i", "name"),
    [pytest.param(i, name, id=name) for i, launch in enumerate(LAUNCHES) for name in launch[1]],
)
def test_every_mesh_trains_experts_as_one_process(i, name):
    errors = run_launch(i)
    if isinstance(errors, AssertionError):
        raise errors
    assert parity.is_equal(errors[name], "fp64"), errors[name]


@pytest.mark.soak
def test_the_full_product_trains_experts_as_one_process():
    size = {"dtype": "fp64", "steps": 5, "timeout_s": 3600}
    table = parity.run_matrix(parity.expert_cases(8), common=parity.EXPERTS, **size)
    assert [name for name, e in table.items() if not parity.is_equal(e, "fp64")] == []


def test_the_cases_hold_a_full_an_empty_and_an_idle_expert():
    """What the runs above meet on one process: every token's first choice, and two of nobody."""
    result = run_ranks(1, parity.run_case, f"--local-batch-size 8 {parity.EXPERTS}", "fp64", 2)[0]
    rows = 8 * 32 * 2  # sequences, tokens, k
    for loads in result["loads"]:
        assert loads.keys() == {"1", "2"}
        for load in loads.values():
            assert sum(load) == rows and load[1] == rows // 2 and load[6:] == [0, 0]
    drawn = result["weights 0"]["layers.2.moe.experts.w3"]
    assert len({expert.sum().item() for expert in drawn}) == 8, "each by its own number"


# ---- What ep alone shows -----------------------------------------------------------------------

SMALL = (
    "--model debug-moe --set dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=300 "
    "expert_dim=16 --seq-len 32 --local-batch-size 2 --log-every 1 --data text"
)


def loads_of(cases):
    """[(rows of each expert on this rank, all-to-alls, gradient norm)] of two passes, summed."""
    compile_blocks = functools.partial(parallel.apply_compile, backend="aot_eager")
    found = []
    for flags in cases:
        with mock.patch.object(parallel, "apply_compile", compile_blocks):
            args, job = make_job(f"{SMALL} --param-dtype bf16 {flags}")
        ((_, moe),) = parity.find_experts(job)
        batch = parity.make_batches(1, n_sequences=2, seq_len=32, vocab_size=300)[0]
        with nullcontext() if args.compile else Collectives() as sent:
            train.gradients(job, *batch, local_batch_size=1)
        counts = sent.counts.items() if sent else ()
        n_sent = sum(n for (name, _), n in counts if name == "all_to_all_single")
        norm = parallel.clip_grad_norm(job.parameters, 1.0, job.mesh).item()
        found.append((moe.load.tolist(), n_sent, norm))
        train.evaluate(job, Batch(*batch), seq_len=32, local_batch_size=1, val_steps=1)
        assert moe.load.tolist() == found[-1][0], "an evaluation counts nothing"
    return found


class Batch:
    """A batch in place of a text, for an evaluation."""

    def __init__(self, inputs, labels):
        self.tokens = torch.cat([inputs.flatten(), labels[-1, -1:].clamp(min=0)]).numpy()

    def n_windows(self, seq_len):
        return 2

    n_tokens = property(lambda self: len(self.tokens))

    def read(self, start, count):
        return self.tokens[start : start + count]


def test_recomputation_and_compiled_blocks_count_what_a_plain_step_does():
    """Two accumulated passes of 32 tokens with 2 experts each; biases would hide a factor of 2."""
    cases = ["", "--ac op", "--ac full", "--compile", "--compile --ac op"]
    for found in run_ranks(2, loads_of, [f"--dp-shard 2 --ep 2 {case}" for case in cases]):
        loads, exchanges, norms = zip(*found, strict=True)
        assert sum(loads[0]) == 2 * 32 * 2
        assert all(load == loads[0] for load in loads), loads
        assert norms == pytest.approx([norms[0]] * 5, rel=2**-8)  # bf16 of other orders of sums
        # a pass: counts, rows there and back, and two gradients; `full` does the first three anew
        assert exchanges[:3] == (2 * 5, 2 * 5, 2 * 8)


def test_a_bias_that_drifted_stops_the_run_and_is_named(folder):
    def before(rank):
        balance = parallel.balance

        def drift(stages, mesh, **speed):
            told = balance(stages, mesh, **speed)
            stages[0].layers["1"].moe.bias[3] += 1e-6 * rank
            return told

        parallel.balance = drift

    flags = f"{SMALL} --ep 2 --steps 3 --check-ranks-every 1 --checkpoint-every 0 --out drift"
    codes, outputs = run_program(2, flags, cwd=folder, before=before)
    assert codes != [0, 0]
    assert "ranks [1] differ from [0] in weight layers.1.moe.bias" in outputs[0]


@pytest.mark.parametrize(
    "world, flags, told",
    [
        (2, "--model debug --ep 2", "--ep 2 conflicts with a model without experts"),
        (3, "--ep 3", "--ep 3 must divide n_experts = 8: .* try --ep 1$"),
        (2, "--ep 4", "--ep 4 must divide --dp-shard x --cp x --tp = 2: .* try --ep 1 or 2$"),
        (2, "--pp 2 --ep 2", "--ep 2 must divide --dp-shard x --cp x --tp = 1"),
        (1, "--set expert_dim=20", "expert_dim=20 conflicts .* rows of 16 bytes .*=16 or 24"),
        (3, "--set expert_dim=24", "3 ranks .* to shard 8 experts each, of dim 256.* try --ep 1"),
        (1, "--compile", "--compile, and a simulation, conflict with experts in .* fp32"),
        (2, "--tp 2 --set ffn_dim=7", "--tp 2 must divide ffn_dim 7"),
        (3, "--tp 3 --set n_heads=3 n_kv_heads=3 dim=96 ffn_dim=9", "must divide n_shared_experts"),
        (1, "--model debug --balance-speed 0.1", "--balance-speed 0.1 would do nothing"),
    ],
)
def test_experts_that_do_not_fit_the_mesh_are_refused(world, flags, told):
    with pytest.raises(ValueError, match=told):
        train.read_flags(
            f"--model debug-moe {flags}".split(), train.Hardware("cpu", None, None), world
        )


def test_any_expert_dim_runs_in_float64():
    flags = "--model debug-moe --set expert_dim=20 --param-dtype fp64 --reduce-dtype fp64"
    train.read_flags(flags.split(), train.Hardware("cpu", None, None), 1)


def trained_in_float8(cases):
    """[(loss of a step, kinds of wq, shared w1 and experts' w1, dtypes that experts compute in)]"""
    found = []
    for flags in cases:
        args, job = make_job(f"{SMALL} --set expert_dim=32 --param-dtype bf16 {flags}")
        ((_, moe),) = parity.find_experts(job)
        kinds = (job.stages[0].layers["1"].attention.wq, moe.shared_expert.w1, moe.experts.w1)
        dtypes = set()
        moe.experts.register_forward_hook(
            lambda m, x, y, dtypes=dtypes: dtypes.update({x[0].dtype, m.w1.dtype, y.dtype})
        )
        loss = one_step(args, job, 1)[0]
        found.append((loss, [type(kind).__name__ for kind in kinds], dtypes))
    return found


@pytest.mark.parametrize("mesh", ["--dp-shard 2 --ep 2", "--tp 2 --ep 2"])
def test_experts_stay_in_bf16_beside_float8_linears(mesh):
    pytest.importorskip("torchao")
    cases = [mesh, f"{mesh} --float8 tensorwise --float8-emulate"]
    (plain, kinds, _), (loss, float8_kinds, dtypes) = run_ranks(2, trained_in_float8, cases)[0]
    assert kinds == ["Linear", "Linear", "DTensor"]
    assert float8_kinds == ["Float8Linear", "Float8Linear", "DTensor"]
    assert dtypes == {torch.bfloat16}
    # e4m3 rounds by 2^-4 at most, and a loss of hundreds of sums hardly sees it
    assert loss != plain and loss == pytest.approx(plain, rel=0.02)


# ---- The program -------------------------------------------------------------------------------


def level():
    """(loads, bias before, bias after, told) of one call of balance; then what many calls tell."""
    args, job = make_job(f"{SMALL} --local-batch-size 8")
    ((_, moe),) = parity.find_experts(job)
    moe.bias[1] = 0.1  # sigmoids of an untrained router lie near a half
    ((inputs, labels),) = parity.make_batches(1, n_sequences=8, seq_len=32, vocab_size=300)
    told = []
    for _ in range(80):
        before = moe.bias.clone()
        train.gradients(job, inputs, labels, local_batch_size=8)
        loads = moe.load.clone()
        told.append(parallel.balance(job.stages, job.mesh, balance_speed=0.002).item())
        if len(told) == 1:
            first = loads, before, moe.bias.clone(), moe.load.clone()
    return *first, told


def test_a_bias_moves_against_its_load_until_loads_are_level():
    loads, before, after, left, told = run_ranks(1, level)[0]
    mean = 8 * 32 * 2 / 8
    assert loads.sum() == 8 * mean and not left.any()
    for load, old, new in zip(loads.tolist(), before.tolist(), after.tolist(), strict=True):
        moved = -0.002 if load > mean else 0.002 if load < mean else 0.0
        assert new == pytest.approx(old + moved, abs=1e-7)
    assert told[0] == pytest.approx(loads.max().item() / mean) == 4.0  # every token's first choice
    # 0.03 is the spread of the scores: a step of 0.002 moves a few of the 512 rows
    assert max(told[-5:]) < 1.5


def test_a_run_tells_the_load_of_its_experts(folder):
    output = train_on(2, f"{SMALL} --ep 2 --steps 3 --out told", folder)
    rows = metrics_of(folder, "told")
    assert [f"load {row['expert_load']:.2f}" in output for row in rows] == [True] * 3
    assert all(1 <= row["expert_load"] <= 4 for row in rows)  # 2 of 8 experts for a token
    train_on(1, "--steps 1 --out dense", folder)
    assert "expert_load" not in metrics_of(folder, "dense")[0]


# ---- Checkpoints -------------------------------------------------------------------------------

WIDE = "--param-dtype fp64 --reduce-dtype fp64 --lr 0.01 --balance-speed 0.02 --ac 2"


def build_wide(flags):
    torch.set_default_dtype(torch.float64)
    return make_job(f"{SMALL} {WIDE} --global-batch-size 4 {flags}")


def whole_state(job):
    """{key: whole tensor} of weights, moments and biases."""
    state = checkpoint.build_state(job.stages, job.optimizer)
    return {key: parallel.whole_tensor(tensor).detach().clone() for key, tensor in state.items()}


def one_step(args, job, seed):
    """[loss, gradient norm, largest load over the mean] of a step on a batch of its own."""
    batches = parity.make_batches(seed, n_sequences=4, seq_len=32, vocab_size=300)[-1]
    n, rank = job.mesh["data"].size(), job.mesh["data"].get_local_rank()
    mine = (whole.chunk(n)[rank] for whole in batches)
    sizes = {"local_batch_size": args.local_batch_size, "max_norm": 1.0}
    stats = watch.Stats(*train.train_step(job, *mine, **sizes).tolist())
    return [stats.loss, stats.grad_norm, stats.expert_load]


def save_step(folder, flags):
    """(the state saved after a step, what the next step tells)"""
    args, job = build_wide(flags)
    one_step(args, job, 1)
    saver = checkpoint.Checkpointer(folder, mode="sync", keep_latest=0)
    saver.save(1, job.stages, job.optimizer, {"step": 1})
    saver.close()
    return whole_state(job), one_step(args, job, 2)


def load_step(folder, flags):
    """The same of a job that loads it."""
    args, job = build_wide(flags)
    checkpoint.load_checkpoint(folder, 1, job.stages, job.optimizer, shapes=job.shapes)
    return whole_state(job), one_step(args, job, 2)


def test_a_checkpoint_goes_on_at_any_other_ep_and_back(tmp_path):
    """States bit for bit; the next step within float64's rounding."""
    pairs = [
        ((4, "--dp-shard 4 --ep 4 --local-batch-size 1"), "ep4", [
            (4, "--dp-shard 4 --ep 2 --local-batch-size 1"), (4, "--pp 2 --tp 2 --ep 1"),
            (4, "--pp 2 --tp 2 --ep 2"), (2, "--cp 2 --ep 2"), (1, ""),
        ]),
        ((1, ""), "one", [(4, "--dp-shard 4 --ep 4 --local-batch-size 1"), (2, "--tp 2 --ep 2")]),
    ]  # fmt: skip
    for (ranks, flags), name, others in pairs:
        saved, told = run_ranks(ranks, save_step, tmp_path / name, flags)[0]
        assert {key.split(".")[-1] for key in saved if "moe" in key} == {
            "bias", "weight", "w1", "w2", "w3", "exp_avg", "exp_avg_sq", "step"
        }  # fmt: skip
        assert saved["model.layers.1.moe.bias"].any()
        for ranks, flags in others:
            loaded, tells = {}, set()
            for state, tell in run_ranks(ranks, load_step, tmp_path / name, flags):
                loaded |= state
                tells.add(tuple(tell))
            assert loaded.keys() == saved.keys()
            differing = [key for key in saved if not torch.equal(saved[key], loaded[key])]
            assert differing == [], (name, flags)
            (tell,) = tells
            assert tell == pytest.approx(told, rel=1e-12), (name, flags)


# ---- Hugging Face ------------------------------------------------------------------------------

TINY_FIELDS = "dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=300 expert_dim=16"
FAMILIES = {  # model_type: (the program's flags, what transformers' config says beside them)
    "qwen3_moe": (
        f"--model qwen3-30b-a3b --set {TINY_FIELDS} head_dim=8 top_k=2",
        {"moe_intermediate_size": 16, "intermediate_size": 48,
         "norm_topk_prob": True, "head_dim": 8, "rms_norm_eps": 1e-6},
    ),
    "mixtral": (
        f"--model mixtral-8x7b --set {TINY_FIELDS}",
        {"intermediate_size": 16, "sliding_window": None,
         "rms_norm_eps": 1e-5},
    ),
}  # fmt: skip


def write_theirs(family, folder, n_experts):
    """(transformers' model with random weights that move every logit, its files' tensors)"""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.AutoConfig.for_model(
        family, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, num_experts_per_tok=2, rope_theta=1e6, tie_word_embeddings=False,
        num_local_experts=n_experts, **FAMILIES[family][1],
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(1 + drawn if "norm" in name else drawn)
    theirs.save_pretrained(folder)
    return theirs, load_file(folder / "model.safetensors")


@torch.no_grad()
def logits_from(folder, flags):
    """Of the job that --init-from makes of a folder; None on ranks without the last stage."""
    args, job = make_job(f"{flags} --seq-len 32 --init-from {folder} --out {folder}/none")
    train.load(job, folder / "none", 0, init_from=args.init_from)
    x, pp = torch.arange(64).reshape(2, 32) * 37 % 300, job.mesh["pp"]
    if pp.get_local_rank() == 1:
        x = torch.empty(2, 32, 32)
        dist.recv(x, group=pp.get_group(), group_src=0)
    x = job.stages[0](x)
    if pp.size() > 1 and pp.get_local_rank() == 0:
        dist.send(x, group=pp.get_group(), group_dst=1)
        return None
    return x


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_logits_on_every_mesh(family, tmp_path):
    theirs, files = write_theirs(family, tmp_path / "hf", 4)
    expert = {"qwen3_moe": "mlp.experts.3.gate_proj", "mixtral": "block_sparse_moe.experts.3.w1"}
    assert files[f"model.layers.1.{expert[family]}.weight"].shape == (16, 32)
    with torch.no_grad():
        expected = theirs(torch.arange(64).reshape(2, 32) * 37 % 300).logits
    for ranks, mesh in (
        (1, ""), (2, "--tp 2 --no-loss-parallel"), (2, "--pp 2"), (2, "--dp-shard 2 --ep 2"),
    ):  # fmt: skip
        flags = f"{FAMILIES[family][0]} {mesh} --set n_experts=4"
        found = [x for x in run_ranks(ranks, logits_from, tmp_path / "hf", flags) if x is not None]
        for logits in found:  # float32 sums of a few dozen products; logits are of order 10
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4), (mesh, logits - expected)
        assert found


@pytest.mark.parametrize(
    "family, n_experts, mesh",
    [("qwen3_moe", 4, "--dp-shard 4 --ep 2"), ("qwen3_moe", 4, "--pp 2 --tp 2 --ep 2"),
     ("mixtral", 2, "--dp-shard 2 --tp 2"), ("qwen3_moe", 2, "--dp-shard 4 --ep 2")],
)  # fmt: skip
def test_in_and_out_again_is_the_same_to_the_bit(family, n_experts, mesh, tmp_path, folder):
    """A step of a vanishing learning rate between; 2 experts are cut, 4 are whole on a rank."""
    from safetensors.torch import load_file

    theirs, files = write_theirs(family, tmp_path / "hf", n_experts)
    flags = f"{FAMILIES[family][0]} --set n_experts={n_experts} {mesh} --seq-len 32 --data text "
    flags += f"--init-from {tmp_path / 'hf'} --steps 1 --lr 1e-300 --balance-speed 0"
    codes, outputs = run_program(4, f"{flags} --out {tmp_path / 'run'}", cwd=folder)
    assert codes == [0] * 4, outputs
    source = ["export", "--from", str(tmp_path / "run"), "--to"]
    checkpoint.main([*source, str(tmp_path / "out")])
    written = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    assert written.keys() == files.keys()
    assert max((written[name] - files[name]).abs().max().item() for name in files) == 0.0
    again = type(theirs).from_pretrained(tmp_path / "out")
    tokens = torch.arange(64).reshape(2, 32) * 37 % 300
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_what_no_family_has_is_not_exported(tmp_path, folder, capsys):
    pytest.importorskip("safetensors")
    export = ["export", "--to", str(tmp_path / "out"), "--from"]
    for name, flags, told in (
        ("debug", SMALL, "n_shared_experts=1 conflicts with Hugging Face's mixtral"),
        ("moved", FAMILIES["mixtral"][0] + " --seq-len 32 --data text",
         "layers.0.moe.bias, which --balance-speed has moved"),
    ):  # fmt: skip
        codes, outputs = run_program(1, f"{flags} --steps 1 --out {name}", cwd=folder)
        assert codes == [0], outputs
        with pytest.raises(SystemExit, match=told):
            checkpoint.main([*export, str(folder / name)])
        assert not (tmp_path / "out").exists()
        checkpoint.main([*export, str(folder / name), "--format", "torch"])
        (tmp_path / "out/weights.pt").unlink(), (tmp_path / "out").rmdir()


# ---- README's figures --------------------------------------------------------------------------

ROOT = Path(train.__file__).parent
RECIPE = f"@{ROOT}/recipes/qwen3_30b_a3b.args --world-size 64"


def test_the_recipe_of_the_30b_may_run_on_64_gpus():
    _, args, config = simulate.read_command(RECIPE.split())
    assert (args.dp_shard, args.ep, config.n_experts) == (64, 8, 128)


@pytest.mark.soak
@pytest.mark.parametrize("ep", [1, 8, 64])
def test_readme_says_what_a_simulation_of_the_30b_counts(ep, tmp_path, capsys):
    simulate.main([*RECIPE.split(), "--ep", str(ep), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "simulation.json").read_text())
    (rank,), sent = result["ranks"], Counter()
    for kinds in rank["collectives"].values():
        for kind, row in kinds.items():
            sent[kind] += row["sent_bytes"] / 2**30
    fsdp, rows = sent["all_gather"] + sent["reduce_scatter"], sent["all_to_all"]
    reserved, gathered = rank["reserved_bytes"], rank["peak_bytes_by_kind"]["gathered"]
    row = f"{reserved / 2**30:.1f} GiB | {gathered / 2**30:.2f} GiB | {fsdp:.0f} GiB | "
    row += f"{rows:.0f} GiB |" if rows else "nothing |"
    row += f" {result['estimate']['step_s']:.2f} s |"
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^\| {ep}( .*?)? \| {re.escape(row)}$", readme, flags=re.M), row


@pytest.mark.soak
def test_rungs_of_experts_have_the_losses_that_readme_prints(folder):
    section = (ROOT / "README.md").read_text().split("## Experts")[1].split("\n## ")[0]
    rungs = re.findall(r"^\| `(.*?)train.py (@.+?)` \| ([\d., ]+) \|$", section, flags=re.M)
    assert len(rungs) == 2 and len({losses for *_, losses in rungs}) == 1
    found = set()
    for launcher, flags, _ in rungs:
        ranks = int((re.findall(r"--nproc-per-node (\d+)", launcher) or [1])[0])
        flags = flags.replace("@recipes", f"@{ROOT}/recipes") + f" --out rung-{ranks}"
        codes, outputs = run_program(ranks, flags, cwd=folder, timeout_s=600)
        assert codes == [0] * ranks, outputs
        rows = {row["step"]: f"{row['loss']:.4f}" for row in metrics_of(folder, f"rung-{ranks}")}
        found.add(", ".join(rows[step] for step in (1, 10, 20)))
    assert len(found) == 1, "the losses stay"
    if found != {rungs[0][2]}:
        pytest.skip(f"README's losses are of another Python's text: here {found}")

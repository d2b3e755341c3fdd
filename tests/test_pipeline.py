"""pipeline.py: training through schedules equals one process; the split; schedule arithmetic."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import make_job, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import model as model_file
import parallel
import pipeline
import simulate

SINGLE = ["GPipe", "1F1B"]
LOOPED = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
V_SHAPED = ["ZBVZeroBubble", "DualPipeV"]
TOOL = Path(pipeline.__file__)


def default_v(schedule):
    return 1 if schedule in SINGLE else 2


# ---- 1. Training through a schedule is training ------------------------------------------------


def make_config(n_layers):
    return model_file.ModelConfig(32, n_layers, 4, 2, 48, vocab_size=67)


def full_model(n_layers, seq_len=16):
    with torch.device("meta"):
        return model_file.Transformer(make_config(n_layers), seq_len=seq_len)


def fill(module):
    """Memory and initial weights, in float64 so that a wrong gradient stands clear of rounding."""
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        weight = model_file.draw_weight(
            name, parameter.shape, config=module.config, seed=7, device="cpu"
        )
        parameter.data = weight.double()
    module.init_rope(torch.arange(module.seq_len))
    return module


def make_batch(step, n_sequences, seq_len=16):
    """Inputs, labels of which very unequal shares are ignored per sequence, and the valid count."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(67, (n_sequences, seq_len), generator=generator)
    labels = torch.randint(67, (n_sequences, seq_len), generator=generator)
    ignored = torch.rand(n_sequences, seq_len, generator=generator)
    labels[ignored < torch.linspace(0, 0.9, n_sequences)[:, None]] = -100
    return inputs, labels, (labels != -100).sum()


def loss_fn(output, labels, n_valid_tokens):
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / n_valid_tokens


def reference_run(n_layers, n_sequences):
    """One process without a pipeline: losses and gradients of two SGD steps, evaluation between."""
    model = fill(full_model(n_layers))
    found = []
    for step in (0, 1):
        inputs, labels, n_valid = make_batch(step, n_sequences)
        loss = loss_fn(model(inputs), labels, n_valid)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        sgd_step([model])
        with torch.no_grad():
            inputs, labels, n_valid = make_batch(9, n_sequences)
            found.append((loss.item(), grads, loss_fn(model(inputs), labels, n_valid).item()))
    return found


@torch.no_grad()
def sgd_step(modules):
    for parameter in (p for module in modules for p in module.parameters()):
        parameter -= 0.5 * parameter.grad
        parameter.grad = None


def pipeline_stages(schedule, pp_mesh, model, stages_per_rank=None):
    n_stages = pipeline.count_stages(schedule, pp_mesh.size(), stages_per_rank)
    names = pipeline.split_layers(model.config.n_layers, n_stages)
    mine = pipeline.stages_of_rank(pp_mesh.get_local_rank(), pp_mesh.size(), n_stages, schedule)
    return [pipeline.cut_stage(model, names[stage]) for stage in mine]


def example(n_sequences, seq_len=16, dtype=torch.float64, tp=1):
    return (
        torch.empty(n_sequences, seq_len, dtype=torch.int64, device="meta"),
        torch.empty(n_sequences, seq_len // tp, 32, dtype=dtype, device="meta"),
    )


def record(schedule):
    """Have the stages write down what torch calls, in order."""
    calls = []
    for stage in schedule.stages:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def forward_and_note(i, *args, _f=forward, _s=stage.stage_index, **kwargs):
            calls.append(("F", _s, i))
            return _f(i, *args, **kwargs)

        def backward_and_note(
            i, *args, full_backward=True, _f=backward, _s=stage.stage_index, **kwargs
        ):
            calls.append(("B" if full_backward else "I", _s, i))
            return _f(i, *args, full_backward=full_backward, **kwargs)

        def weight_and_note(i, *args, _f=weight, _s=stage.stage_index, **kwargs):
            calls.append(("W", _s, i))
            return _f(i, *args, **kwargs)

        stage.forward_one_chunk = forward_and_note
        stage.backward_one_chunk = backward_and_note
        stage.backward_weight_one_chunk = weight_and_note
    return calls


def worst_error(gradient, expected):
    return ((gradient - expected).norm() / expected.norm()).item()


def check_schedule_run(schedule, pp_mesh, reference, n_layers, n_microbatches, stages_per_rank):
    """Two steps with evaluations between, each compared; returns what torch executed in a step."""
    stages = [
        fill(s) for s in pipeline_stages(schedule, pp_mesh, full_model(n_layers), stages_per_rank)
    ]
    made = pipeline.build_schedule(
        stages,
        schedule,
        n_microbatches=n_microbatches,
        loss_fn=loss_fn,
        pp_mesh=pp_mesh,
        microbatch=example(1),
    )
    calls, executed = record(made), []
    for step, (loss, grads, eval_loss) in enumerate(reference):
        calls.clear()
        found = made.run(*make_batch(step, n_microbatches))
        executed.append(calls.copy())
        dist.all_reduce(found)  # every rank but one adds zero
        where = f"{schedule}, step {step}"
        # float64: rounding is 1e-14, a real mistake 1e-3 or more
        assert abs(found.item() - loss) <= 1e-12 * loss, where
        for name, parameter in (x for s in stages for x in s.named_parameters()):
            assert worst_error(parameter.grad, grads[name]) < 1e-12, f"{where}, {name}"
        sgd_step(stages)
        calls.clear()
        found = made.run_forward(*make_batch(9, n_microbatches))
        assert {kind for kind, _, _ in calls} <= {"F"} or schedule in SINGLE
        last = made.stages[-1]
        assert not last.is_last or len(last.fwd_cache) <= 1, "logits of all microbatches are kept"
        dist.all_reduce(found)
        assert abs(found.item() - eval_loss) <= 1e-12 * eval_loss, f"{where}, evaluation"
        assert all(p.grad is None for s in stages for p in s.parameters()), where
    assert executed[0] == executed[1]
    return executed[0]


def parity_on_ranks(cases, n_layers, n_microbatches):
    torch.set_default_dtype(torch.float64)  # the zero of ranks without a loss, too
    pp_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    reference = reference_run(n_layers, n_microbatches)
    return {
        (schedule, v): check_schedule_run(schedule, pp_mesh, reference, n_layers, n_microbatches, v)
        for schedule, v in cases
    }


def write_csv(path, schedule, pp, n_microbatches):
    """A schedule as a file, written without pipeline.py's help: one row per rank."""
    rows = pipeline.timeline(schedule, pp, n_microbatches)
    text = "\n".join(",".join(f"{op.stage}{op.kind}{op.microbatch}" for op in r) for r in rows)
    path.write_text(text + "\n")
    return str(path)


def assert_executed_as_drawn(ranks, cases, n_microbatches):
    for schedule, v in cases:
        rows = pipeline.timeline(schedule, len(ranks), n_microbatches, v)
        drawn = [[(op.kind, op.stage, op.microbatch) for op in row] for row in rows]
        assert [rank[schedule, v] for rank in ranks] == drawn, schedule


def test_two_ranks_under_every_schedule_train_and_evaluate_as_one_process(tmp_path):
    """Losses and gradients of two steps, and evaluations; torch executes what timeline draws."""
    csv_files = [
        write_csv(tmp_path / f"{schedule}.csv", schedule, 2, 4)
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    ]
    cases = [(schedule, None) for schedule in (*pipeline.SCHEDULES, *csv_files)]
    cases += [("Interleaved1F1B", 3), ("LoopedBFS", 3)]  # 7 layers over 6 stages
    ranks = run_ranks(2, parity_on_ranks, cases, 5, 4)
    assert_executed_as_drawn(ranks, cases, 4)


def test_four_ranks_with_stages_that_hold_no_block_train_as_one_process():
    """6 layers over 8 stages: the first holds tok_embeddings alone, the last norm and output."""
    cases = [(schedule, None) for schedule in pipeline.SCHEDULES]
    ranks = run_ranks(4, parity_on_ranks, cases, 6, 8)
    assert_executed_as_drawn(ranks, cases, 8)


def fsdp_on_ranks():
    torch.set_default_dtype(torch.float64)
    mesh = parallel.build_mesh("cpu", pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=1)
    data_rank = mesh["fsdp"].get_local_rank()
    model = fill(full_model(6))
    inputs, labels, n_valid = make_batch(0, 8)
    loss = loss_fn(model(inputs), labels, n_valid)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    mine = slice(4 * data_rank, 4 * data_rank + 4)
    counts = {}
    for schedule, reshard, v in [
        ("GPipe", "always", 1),
        ("1F1B", "default", 1),
        ("Interleaved1F1B", "default", 2),
        ("LoopedBFS", "always", 4),
        ("InterleavedZeroBubble", "default", 4),
        ("ZBVZeroBubble", "always", 2),
        ("DualPipeV", "always", 2),
    ]:
        stages = pipeline_stages(schedule, mesh["pp"], full_model(6), v)
        for stage in stages:
            parallel.apply_fsdp(
                stage,
                mesh,
                param_dtype=torch.float64,
                reduce_dtype=torch.float64,
                reshard=reshard,
                cpu_offload=False,
            )
            fill_sharded(stage)
        made = pipeline.build_schedule(
            stages,
            schedule,
            n_microbatches=4,
            loss_fn=loss_fn,
            pp_mesh=mesh["pp"],
            microbatch=example(1),
        )
        for times in (1, 2):  # the second run without clearing: accumulation doubles the gradient
            with count_reduce_scatters() as counter:
                found = made.run(inputs[mine], labels[mine], n_valid)
            n_units = sum(
                len(s.layers) + (s.tok_embeddings is not None) + (s.norm is not None)
                for s in stages
            )
            counts[schedule, reshard, v, times] = (len(counter), n_units)
            dist.all_reduce(found)
            assert abs(found.item() - loss.item()) <= 1e-12 * loss.item(), schedule
            for name, parameter in (x for s in stages for x in s.named_parameters()):
                error = worst_error(parameter.grad.full_tensor(), times * expected[name])
                assert error < 1e-12, f"{schedule}, reshard {reshard}, {name}, run {times}"
        for stage in stages:
            stage.zero_grad()
        found = made.run_forward(inputs[mine], labels[mine], n_valid)
        dist.all_reduce(found)
        assert abs(found.item() - loss.item()) <= 1e-12 * loss.item(), f"{schedule}, evaluation"
        made.run(inputs[mine], labels[mine], n_valid)
        for name, parameter in (x for s in stages for x in s.named_parameters()):
            assert worst_error(parameter.grad.full_tensor(), expected[name]) < 1e-12, name
    return counts


def fill_sharded(stage):
    parallel.materialise(
        stage,
        device="cpu",
        weight_device="cpu",
        draw=lambda name, shape: model_file.draw_weight(
            name, shape, config=stage.config, seed=7, device="cpu"
        ).double(),
        positions=torch.arange(16),
    )


class count_reduce_scatters:
    """Collect the reduce-scatters that FSDP starts inside the block."""

    def __enter__(self):
        self.original, self.calls = dist.reduce_scatter_single, []
        dist.reduce_scatter_single = lambda *args, **kwargs: (
            self.calls.append(1),
            self.original(*args, **kwargs),
        )[1]
        return self.calls

    def __exit__(self, *_):
        dist.reduce_scatter_single = self.original


def test_fsdp_inside_stages_sums_exactly_and_reduces_once_per_run():
    """Data ranks with unequal valid tokens; a second run accumulates; evaluation is harmless."""
    for counts in run_ranks(4, fsdp_on_ranks):
        assert all(n == n_units for n, n_units in counts.values()), counts


def tp_on_ranks():
    torch.set_default_dtype(torch.float64)
    mesh = parallel.build_mesh("cpu", pp=2, dp_replicate=1, dp_shard=1, cp=1, tp=2)
    model = fill(full_model(3))
    inputs, labels, n_valid = make_batch(0, 4)
    loss = loss_fn(model(inputs), labels, n_valid)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        stages = pipeline_stages(schedule, mesh["pp"], full_model(3), None)
        for stage in stages:
            parallel.apply_tp(stage, mesh["tp"], loss_parallel=True)
            fill_sharded(stage)
        made = pipeline.build_schedule(
            stages,
            schedule,
            n_microbatches=4,
            loss_fn=loss_fn,
            pp_mesh=mesh["pp"],
            microbatch=example(1, tp=2),
        )
        with loss_parallel():
            found = made.run(inputs, labels, n_valid)
        assert not isinstance(found, DTensor)
        dist.all_reduce(found, group=mesh["pp"].get_group())
        assert abs(found.item() - loss.item()) <= 1e-12 * loss.item(), schedule
        for name, parameter in (x for s in stages for x in s.named_parameters()):
            assert worst_error(parameter.grad.full_tensor(), expected[name]) < 1e-12, name


def first_uses_of_groups():
    """Ranks of each group that `start` uses, on a pp 2 x tp 2 mesh."""
    used, reduce = [], dist.all_reduce

    def note(tensor, *args, group=None, **options):
        used.append(dist.get_process_group_ranks(group))
        return reduce(tensor, *args, group=group, **options)

    flags = "--pp 2 --tp 2 --set dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=67"
    dist.all_reduce = note  # in this forked rank only
    make_job(f"{flags} --seq-len 32 --local-batch-size 2")
    return used


def test_all_ranks_of_a_pipeline_meet_before_two_of_them_send_and_receive():
    """NCCL connects a group at its first use, which takes all its ranks: a CPU can but show it."""
    assert run_ranks(4, first_uses_of_groups) == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]


def test_stages_with_tensor_and_loss_parallelism_take_the_same_static_shapes():
    """Logits are a vocabulary-sharded DTensor here, of which build_schedule is told nothing."""
    run_ranks(4, tp_on_ranks)


# ---- 2. One process with no peers --------------------------------------------------------------


def run_without_peers(schedules):
    """Rank 1 of 4 on a fake group with fake tensors: nothing may wait for a received value."""
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    pp_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    return [run_one(schedule, pp_mesh, FakeTensorMode) for schedule in schedules]


def run_one(schedule, pp_mesh, fake_tensor_mode):
    stages = pipeline_stages(schedule, pp_mesh, full_model(6))
    made = pipeline.build_schedule(
        stages,
        schedule,
        n_microbatches=8,
        loss_fn=loss_fn,
        pp_mesh=pp_mesh,
        microbatch=example(1, dtype=torch.float32),
    )
    simulate.skip_warmup(made)
    calls = record(made)
    with fake_tensor_mode(allow_non_fake_inputs=True):
        for stage in stages:
            stage.to_empty(device="cpu")
            stage.init_rope(torch.arange(16))
        batch = torch.zeros(8, 16, dtype=torch.int64)
        made.run(batch, batch, torch.tensor(128))
        assert all(p.grad.shape == p.shape for s in stages for p in s.parameters())
    return calls


def test_a_schedule_runs_on_a_fake_process_group_without_tensor_data():
    schedules = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    (found,) = run_ranks(1, run_without_peers, schedules)
    for schedule, calls in zip(schedules, found, strict=True):
        drawn = [(op.kind, op.stage, op.microbatch) for op in pipeline.timeline(schedule, 4, 8)[1]]
        assert calls == drawn


# ---- 3. The split ------------------------------------------------------------------------------


def blocks_per_stage(stages):
    return [sum(name.startswith("layers.") for name in names) for names in stages]


@pytest.mark.parametrize(
    "n_stages, n_layers, blocks",
    [  # SEMANTICS: the paper's system
        (2, 32, [16, 16]),
        (4, 32, [8, 9, 8, 7]),
        (8, 32, [4, 5, 4, 4, 4, 4, 4, 3]),
        (16, 126, [7, *[8] * 14, 7]),
        (32, 126, [3, *[4] * 30, 3]),
        (8, 126, [15, *[16] * 6, 15]),
        (16, 80, [5, 6, *[5] * 13, 4]),
        (3, 2, [1, 1, 0]),
        (8, 6, [0, *[1] * 6, 0]),
    ],
)
def test_layers_are_split_as_in_the_papers_system(n_stages, n_layers, blocks):
    assert blocks_per_stage(pipeline.split_layers(n_layers, n_stages)) == blocks


def test_every_split_holds_every_module_once_in_order_or_is_refused_with_both_numbers():
    for n_layers, n_stages in itertools.product(range(1, 14), range(1, 9)):
        whole = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
        if n_stages > n_layers + 2:
            with pytest.raises(ValueError, match=f"is {n_stages}, .*n_layers {n_layers}:"):
                pipeline.split_layers(n_layers, n_stages)
            continue
        stages = pipeline.split_layers(n_layers, n_stages)
        assert len(stages) == n_stages
        assert [name for names in stages for name in names] == whole
        assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ["norm", "output"]


def test_weights_of_the_ends_move_blocks_away_from_them_and_too_heavy_ends_are_refused():
    # 6 + 2 + 4 = 12 over 3 stages: 4 each, of which the first gives up 2 and the last 4
    stages = pipeline.split_layers(6, 3, input_weight=2, output_weight=4)
    assert blocks_per_stage(stages) == [2, 4, 0]
    with pytest.raises(ValueError, match="--stages-per-rank is 4.*weighs 4"):
        pipeline.split_layers(6, 4, input_weight=2, output_weight=4)


def test_flags_that_split_the_model_must_make_the_stages_of_the_schedule():
    flags = {"pp": 2, "stages_per_rank": None, "pp_split": None, "pp_end_weights": None}
    assert pipeline.split_model(6, "1F1B", **flags) == pipeline.split_layers(6, 2)
    split = {**flags, "pp_split": "layers.1,layers.2,layers.5"}
    assert blocks_per_stage(pipeline.split_model(6, "LoopedBFS", **split)) == [1, 1, 3, 1]
    with pytest.raises(ValueError, match="makes 4 stages, but --pp 2 .*1F1B needs 2: name 1 mod"):
        pipeline.split_model(6, "1F1B", **split)
    heavy = {**flags, "pp_end_weights": [3, 0]}
    assert blocks_per_stage(pipeline.split_model(6, "1F1B", **heavy)) == [2, 4]
    with pytest.raises(ValueError, match="--pp-end-weights -1 1 must not be negative"):
        pipeline.split_model(6, "1F1B", **{**flags, "pp_end_weights": [-1, 1]})


def test_split_points_begin_stages_and_bad_ones_are_refused():
    stages = pipeline.split_at(12, ["layers.4", "layers.8"])
    assert blocks_per_stage(stages) == [4, 4, 4]
    assert stages[1] == ["layers.4", "layers.5", "layers.6", "layers.7"]
    assert pipeline.split_at(2, ["layers.0", "norm"]) == [
        ["tok_embeddings"],
        ["layers.0", "layers.1"],
        ["norm", "output"],
    ]
    bad = [["layers.12"], ["layers.4", "layers.4"], ["layers.8", "layers.4"], ["output"], ["x"]]
    for points in [*bad, ["tok_embeddings"]]:
        with pytest.raises(ValueError, match=f"--pp-split {','.join(points)} .*n_layers 12"):
            pipeline.split_at(12, points)


def test_a_stage_keeps_global_names_and_leaves_the_model_alone():
    model = full_model(5)
    before = [name for name, _ in model.named_parameters()]
    stages = [pipeline.cut_stage(model, names) for names in pipeline.split_layers(5, 3)]
    assert [name for name, _ in model.named_parameters()] == before
    found = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(found) == sorted(before) and len(set(found)) == len(found)


# ---- 4. The arithmetic of schedules ------------------------------------------------------------


def runnable(schedule, v):
    """Every (p, m) up to 8 ranks and 16 microbatches that torch takes, and its time line."""
    for p, m in itertools.product(range(1, 9), range(1, 17)):
        try:
            pipeline.check_schedule(schedule, pp=p, n_microbatches=m, stages_per_rank=v)
        except ValueError:
            continue
        yield p, m, pipeline.timeline(schedule, p, m, v)


ALL = [(schedule, default_v(schedule)) for schedule in pipeline.SCHEDULES]


@pytest.mark.parametrize("schedule, v", ALL)
def test_every_dependency_holds_and_each_stage_does_each_microbatch_once(schedule, v):
    for p, m, rows in runnable(schedule, v):
        n_stages, start, end = p * v, {}, {}
        for rank, row in enumerate(rows):
            assert {op.stage for op in row} == set(
                pipeline.stages_of_rank(rank, p, n_stages, schedule)
            )
            for op, following in itertools.pairwise(row):
                assert op.end <= following.start, "a rank does one thing at a time"
            for op in row:
                key = (op.kind, op.stage, op.microbatch)
                assert key not in start
                assert op.end - op.start == {"F": 1, "B": 2, "I": 1, "W": 1}[op.kind]
                start[key], end[key] = op.start, op.end
        for stage, i in itertools.product(range(n_stages), range(m)):
            split = ("I", stage, i) in start
            assert ("B", stage, i) in start or (split and ("W", stage, i) in start)
            assert not (("B", stage, i) in start and split)
            backward = "I" if split else "B"
            assert end["F", stage, i] <= start[backward, stage, i]
            if split:
                assert end["I", stage, i] <= start["W", stage, i]
            if stage > 0:
                assert end["F", stage - 1, i] <= start["F", stage, i]
            if stage < n_stages - 1:
                above = "I" if ("I", stage + 1, i) in start else "B"
                assert end[above, stage + 1, i] <= start[backward, stage, i]
        assert len(start) == n_stages * m * 2 + sum(kind == "W" for kind, _, _ in start)


def closed_form_bubble(schedule, p, m, v):
    """The bubble fraction of the header's table, or None where it gives none."""
    enough = {**dict.fromkeys(SINGLE, 1), "ZBVZeroBubble": 2 * p - 1}.get(schedule, p)
    split = {"InterleavedZeroBubble": 3, "ZBVZeroBubble": 3, "DualPipeV": 3}.get(schedule, 1)
    return (p - 1) / (split * v * m + p - 1) if m >= enough else None


@pytest.mark.parametrize("schedule, v", [*ALL[:4], ("Interleaved1F1B", 3), ("LoopedBFS", 3)])
def test_bubble_equals_the_closed_form(schedule, v):
    """(p-1)/(v m+p-1). With fewer microbatches than ranks, one returns to a rank only after p
    slots, of which p - m are idle in each of the first v - 1 rounds."""
    seen = 0
    for p, m, rows in runnable(schedule, v):
        idle = (p - 1) + max(0, p - m) * (v - 1)
        assert pipeline.bubble_fraction(rows) == pytest.approx(idle / (v * m + idle), abs=1e-12)
        shown = closed_form_bubble(schedule, p, m, v)
        assert shown is None or shown == pytest.approx(idle / (v * m + idle), abs=1e-12)
        seen += 1
    assert seen > 50


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", *V_SHAPED])
def test_split_backwards_leave_a_third_of_the_idle_time_and_never_more_than_interleaving(schedule):
    """Zero bubble (arXiv 2401.10241): (p-1)(F + B - W) idle units = p-1 with F = B = W = 1."""
    seen = 0
    for p, m, rows in runnable(schedule, 2):
        bubble = pipeline.bubble_fraction(rows)
        shown = closed_form_bubble(schedule, p, m, 2)
        if shown is not None:
            assert bubble == pytest.approx((p - 1) / (6 * m + p - 1), abs=1e-12)
            assert shown == pytest.approx(bubble, abs=1e-12)
            seen += 1
        assert bubble <= ((p - 1) + max(0, p - m)) / (2 * m + (p - 1) + max(0, p - m)) + 1e-12
    assert seen > 50


def test_published_bubbles_and_speedups():
    """Figures that PUBLISHED.md §4 took from an independent replay and from the paper's table 4."""
    published = {
        ("1F1B", 4, 8, 1): 0.2727,
        ("1F1B", 8, 8, 1): 0.4667,
        ("1F1B", 16, 16, 1): 0.4839,
        ("1F1B", 16, 32, 1): 0.3191,
        ("Interleaved1F1B", 4, 8, 2): 0.1579,
        ("Interleaved1F1B", 8, 8, 2): 0.3043,
        ("Interleaved1F1B", 16, 16, 2): 0.3191,
        ("Interleaved1F1B", 4, 8, 3): 0.1111,
        ("InterleavedZeroBubble", 4, 8, 2): 0.0588,
        ("InterleavedZeroBubble", 8, 8, 2): 0.1273,
    }
    for (schedule, p, m, v), bubble in published.items():
        found = pipeline.bubble_fraction(pipeline.timeline(schedule, p, m, v))
        assert found == pytest.approx(bubble, abs=5e-5)  # published with four digits
    # paper table 4: 130 / 100 tokens per second on 16 stages; the model gives 1.319
    plain, interleaved = (
        max(row[-1].end for row in pipeline.timeline(schedule, 16, 16))
        for schedule in ("1F1B", "Interleaved1F1B")
    )
    # an interleaved stage holds half the layers: its units are half as long
    assert plain / (interleaved / 2) == pytest.approx(31 / 23.5, abs=1e-12)


@pytest.mark.parametrize("schedule, v", [*ALL, ("Interleaved1F1B", 3)])
def test_microbatches_in_flight_equal_the_closed_form(schedule, v):
    for p, m, rows in runnable(schedule, v):
        # torch generalises Megatron's p microbatches per round to m that p does not divide
        q = m // max(1, m // p)
        expected = {
            "GPipe": lambda r, p=p, m=m: m,
            "1F1B": lambda r, p=p, m=m: min(m, p - r),
            "LoopedBFS": lambda r, p=p, m=m: v * m,
            "Interleaved1F1B": lambda r, p=p, m=m, q=q: min(
                v * m, 2 * (p - r - 1) + (v - 1) * q + 1
            ),
            "InterleavedZeroBubble": lambda r, p=p, m=m, q=q: min(v * m, (v - 1) * q + p),
        }.get(schedule)
        found = pipeline.peaks_in_flight(rows)
        if expected:
            assert found == [expected(r) for r in range(p)], (p, m)
        else:
            assert max(found) <= 2 * p + (schedule == "DualPipeV"), (p, m)
            assert max(found) == min(2 * m, 2 * p + (schedule == "DualPipeV")) or m < 2 * p - 1


def test_a_slow_stage_sets_the_pace():
    """GPipe, one stage at cost 3: its microbatches take 9 units each, and 3 in and 3 out again."""
    rows = pipeline.timeline("GPipe", 3, 4, durations=[dict(F=n, B=2 * n) for n in (1, 3, 1)])
    assert max(row[-1].end for row in rows) == 4 * 9 + 3 + 3


@pytest.mark.parametrize("schedule, v", [*ALL[2:], ("Interleaved1F1B", 3), ("LoopedBFS", 4)])
def test_no_deadlock_even_if_every_send_blocks_until_it_is_received(schedule, v):
    """Rendezvous semantics, stricter than gloo's and NCCL's, for training and for evaluation."""
    for p, m in itertools.product((2, 3, 4, 8), (1, 2, 4, 6, 8, 16)):
        try:
            pipeline.check_schedule(schedule, pp=p, n_microbatches=m, stages_per_rank=v)
        except ValueError:
            continue
        made = pipeline.mock_schedule(schedule, p, m, v)
        training = made.pipeline_order_with_comms
        evaluation = {rank: pipeline.forward_only(row, []) for rank, row in training.items()}
        for order in (training, evaluation):
            rendezvous([order[rank] for rank in range(p)], made.stage_index_to_group_rank)


def rendezvous(rows, rank_of_stage):
    """Step all ranks; a send and its receive go together or not at all."""
    rows = [list(row) for row in rows]

    def partner(action):
        kind, stage, i = action.computation_type.value, action.stage_index, action.microbatch_index
        step = 1 if kind in ("SEND_F", "RECV_B") else -1
        other = kind.replace("SEND", "recv").replace("RECV", "SEND").upper()
        return rank_of_stage[stage + step], (other, stage + step, i)

    def front(rank):
        a = rows[rank][0] if rows[rank] else None
        return a and (a.computation_type.value, a.stage_index, a.microbatch_index)

    while any(rows):
        before = sum(map(len, rows))
        for row in rows:
            while row and "_F" != row[0].computation_type.value[-2:] != "_B":
                row.pop(0)
            while row and row[0].computation_type.value == "OVERLAP_F_B":
                row.pop(0)
            if row and row[0].computation_type.value.startswith(("SEND", "RECV")):
                peer, wanted = partner(row[0])
                if front(peer) == wanted:
                    row.pop(0)
                    rows[peer].pop(0)
        assert sum(map(len, rows)) < before, f"deadlock at {[row[:1] for row in rows]}"


# ---- 5. Refusals and the tool ------------------------------------------------------------------


def test_facts_about_schedules():
    assert [s for s, kind in pipeline.SCHEDULES.items() if kind.stages_per_rank == 1] == SINGLE
    for schedule, v in ALL:  # against what torch's orders hold
        kinds = Counter(op.kind for row in pipeline.timeline(schedule, 2, 4, v) for op in row)
        assert pipeline.splits_backward(schedule) == (kinds["I"] > 0)
    assert [pipeline.stages_of_rank(r, 2, 6, "Interleaved1F1B") for r in (0, 1)] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    assert [pipeline.stages_of_rank(r, 3, 6, "DualPipeV") for r in (0, 1, 2)] == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]


@pytest.mark.parametrize(
    "schedule, pp, n_microbatches, v, text",
    [
        ("1F1B", 4, 3, None, "--pp-schedule 1F1B with --pp 4 .* 3 microbatches.*4 stages.*GPipe"),
        ("DualPipeV", 4, 7, None, "DualPipeV with --pp 4 .* 7 microbatches.* 8"),
        ("Interleaved1F1B", 4, 9, None, "--pp 4 .* 9 microbatches.*2 equal rounds: try 8 or 12"),
        ("1F1B", 4, 8, 2, "--stages-per-rank 2 .*1F1B.*exactly 1"),
        ("Interleaved1F1B", 4, 8, 1, "--stages-per-rank 1 .*at least 2"),
        ("ZBVZeroBubble", 4, 8, 3, "--stages-per-rank 3 .*exactly 2"),
        ("LoopedBFS", 4, 8, 0, "--stages-per-rank 0 .*at least 2"),
        ("GPipe", 0, 8, None, "--pp 0"),
        ("GPipe", 2, 0, None, "0 microbatches"),
        ("nosuch", 2, 4, None, "--pp-schedule nosuch .*none of GPipe, 1F1B"),
    ],
)
def test_schedules_that_torch_cannot_run_are_refused(schedule, pp, n_microbatches, v, text):
    with pytest.raises(ValueError, match=text):
        pipeline.check_schedule(schedule, pp=pp, n_microbatches=n_microbatches, stages_per_rank=v)


FITS = {"pp": 2, "local_batch_size": 8, "microbatch_size": 2, "stages_per_rank": None}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"tied": True}, "--pp 2 and tied embeddings exclude each other"),
        ({"microbatch_size": 3}, "--microbatch-size 3.*try --local-batch-size 6 or 9"),
        ({"microbatch_size": 16}, "--microbatch-size 16.*try --local-batch-size 16"),
        ({"local_batch_size": 2}, "1 microbatch .*one for each of its 2 stages"),
    ],
)
def test_batches_and_models_that_do_not_suit_a_pipeline_are_refused(changes, text):
    pipeline.check_pipeline("1F1B", **FITS, tied=False)
    with pytest.raises(ValueError, match=text):
        pipeline.check_pipeline("1F1B", **{**FITS, "tied": False, **changes})


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_what_a_split_backward_does_not_survive_is_refused(schedule):
    fine = {"ac": "full", "compile": False, "reshard": "default"}
    pipeline.check_split_backward(schedule, **fine)
    for change in ({"ac": "op"}, {"compile": True}, {"reshard": "always"}):
        if schedule in ("InterleavedZeroBubble", *V_SHAPED):
            (name,) = change
            with pytest.raises(ValueError, match=f"--{name}.* conflicts with --pp-schedule"):
                pipeline.check_split_backward(schedule, **fine | change)
        else:
            pipeline.check_split_backward(schedule, **fine | change)


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "cannot be read"),
        ("0F0,0B0\n1F0,1X0\n", "1X0"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "0SEND_F0 is no"),
        ("0F0,0B0\n", "1 rows"),
        ("0F0,0B0\n\n", "1 rows"),
        ("0F0,0B0\n1F0\n", "of microbatch 0 stage 1 does F,"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "of microbatch 0 stage 0 does BFF"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "of microbatch 1 stage 0 does BF"),
        ("0F0,0B0\n2F0,2B0\n", "of microbatch 0 stage 1 does nothing"),
        ("0B0,0F0\n1F0,1B0\n", "circular: all wait for one another, rank 0 at 0B0, rank 1 at 1F0"),
        ("0F0,2F0,0B0,2B0\n1B0,1F0\n", "one another, rank 0 at 2F0, rank 1 at 1B0, but it needs"),
        ("0F0,2F0,0B0,2B0\n1F0,1B0\n", "one another, rank 0 at 0B0, rank 1 at 1B0, but it needs"),
        ("", "0 rows"),
    ],
)
def test_files_that_are_no_schedule_for_the_mesh_are_refused(tmp_path, content, text):
    path = tmp_path / "order.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"--pp-schedule {path} .*{text}"):
        pipeline.check_schedule(str(path), pp=2, n_microbatches=1)


def test_a_file_gives_the_time_line_of_the_schedule_it_was_written_from(tmp_path):
    for schedule, v in ALL:
        path = write_csv(tmp_path / "order.csv", schedule, 4, 8)
        assert pipeline.timeline(path, 4, 8) == pipeline.timeline(schedule, 4, 8)
        assert pipeline.count_stages(path, 4) == 4 * v
        assert pipeline.splits_backward(path) == pipeline.splits_backward(schedule)
        for rank in range(4):
            assert pipeline.stages_of_rank(rank, 4, 4 * v, path) == pipeline.stages_of_rank(
                rank, 4, 4 * v, schedule
            )
    with pytest.raises(ValueError, match="--stages-per-rank 3 conflicts with --pp-schedule .*csv"):
        pipeline.count_stages(path, 4, 3)


def run_tool(*args):
    return subprocess.run([sys.executable, TOOL, *args], capture_output=True, text=True, timeout=60)


def test_the_headers_time_line_is_what_the_tool_draws():
    drawn = pipeline.draw_text(pipeline.timeline("1F1B", 4, 6)).splitlines()
    header = pipeline.__doc__.splitlines()
    for rank, line in enumerate(drawn[1:]):
        assert f"    rank {rank}  {line.split()[-1]}" in header


def test_the_tool_prints_a_schedule_within_100_columns_and_draws_it(tmp_path):
    svg = tmp_path / "schedule.svg"
    args = ["--pp-schedule", "Interleaved1F1B", "--pp", "4", "--n-microbatches", "8"]
    done = run_tool(*args, "--svg", svg)
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100
    # (p-1)/(v m + p-1) = 3/19; in flight 2(p-r-1) + (v-1)p + 1
    assert "fraction  0.1579" in done.stdout and "[11, 9, 7, 5]" in done.stdout
    drawn = list(xml.etree.ElementTree.parse(svg).iter())
    boxes = [e for e in drawn if "stroke-width" in e.attrib]
    assert len(boxes) == 2 * 8 * 8  # forward and backward, 8 stages, 8 microbatches
    # 24 of a forward's time on each of 2 stages, and 3 idle stages' at 3: 2 (3 x 8) + 3 x 3 = 57
    ends = [float(e.attrib["x"]) + float(e.attrib["width"]) for e in boxes]
    assert max(ends) == pytest.approx(pipeline.PAGE - 10, abs=0.2)
    texts = [e.text for e in drawn if e.tag.endswith("text")]
    assert {"pp 0", "pp 3", "forward", "backward", "forwards", "50"} <= set(texts)


def test_the_tool_writes_a_schedule_to_start_from(tmp_path, capsys):
    for schedule, _ in ALL:
        path, right = str(tmp_path / "order.csv"), write_csv(tmp_path / "right.csv", schedule, 4, 8)
        shape = {"pp": 4, "n_microbatches": 8, "stages_per_rank": None, "svg": None, "csv": path}
        pipeline.main(SimpleNamespace(pp_schedule=schedule, **shape))
        assert f"then --pp-schedule {path}" in capsys.readouterr().out
        assert Path(path).read_text() == Path(right).read_text()
        pipeline.check_schedule(path, pp=4, n_microbatches=8)


def test_the_tool_refuses_in_one_line_with_exit_status_1():
    done = run_tool("--pp", "9")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(
        "pipeline.py: --pp-schedule 1F1B"
    )


def test_a_wrong_flag_is_refused_in_one_line_too(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--pp", "four"])
    with pytest.raises(SystemExit) as refusal:
        pipeline.parse_args()
    # a text as the code means: print it on stderr, exit with 1
    assert "invalid int value: 'four'" in refusal.value.code and "\n" not in refusal.value.code

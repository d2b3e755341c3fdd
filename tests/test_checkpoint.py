"""checkpoint.py: what is loaded equals what was saved, on any mesh, whatever happens in between.

Right values: every weight and moment is drawn from its name (`expected`), so what a checkpoint must
give back is known without reading one. Comparisons are bitwise: saving and loading compute nothing.
"""

import dataclasses
import errno
import gc
import io
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

import checkpoint
import float8
import parallel
import pipeline
from model import MODELS, ModelConfig, Transformer, draw_weight

# odd on purpose: a norm of 4 on 3 ranks leaves one of them nothing, 257 divides by nothing
CONFIG = ModelConfig(4, 5, 2, 2, 6, vocab_size=257)
TIED = ModelConfig(4, 2, 2, 2, 6, vocab_size=257, tied_embeddings=True)
SEQ_LEN = 16
MESHES = {  # degrees of parallel.build_mesh; stages are dealt to the pp ranks in turn
    "one process": {},
    "two stages on one rank": {"stages": 2},
    "dp2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "stages": 2},
    "dp3": {"dp_shard": 3},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "cp2 x dp2": {"cp": 2, "dp_shard": 2},
    "pp2 interleaved x tp2": {"pp": 2, "tp": 2, "stages": 4},
}


def n_ranks(mesh_name):
    return math.prod(degree for axis, degree in MESHES[mesh_name].items() if axis != "stages")


def shapes_of(config):
    with torch.device("meta"):
        model = Transformer(config, seq_len=SEQ_LEN)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def expected(name, shape, kind, seed):
    """The full value of a weight, a moment or a counter, from its name alone."""
    if kind == "step":
        return torch.tensor(float(seed))
    seed = f"{seed} {kind} {name}"
    value = draw_weight("layers.0.attention.wq.x", shape, config=CONFIG, seed=seed, device="cpu")
    return value.square() if kind == "exp_avg_sq" else value


def build(mesh_name, config=CONFIG, *, draw=None, recipe=None, reshard="default"):
    """(this rank's parts, mesh), built as train.py does; the weights are zero without `draw`."""
    settings = dict(MESHES[mesh_name])
    n_stages = settings.pop("stages", 1)
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | settings
    mesh = parallel.build_mesh("cpu", **degrees)
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(config.n_layers)), "norm", "output"]
    parts = []
    for stage in range(mesh["pp"].get_local_rank(), n_stages, degrees["pp"]):
        with torch.device("meta"):
            part = Transformer(config, seq_len=SEQ_LEN)
        if n_stages > 1:
            first, last = (len(names) * i // n_stages for i in (stage, stage + 1))
            part = pipeline.cut_stage(part, names[first:last])
        if recipe:
            float8.apply_float8(part, recipe, all_gather=True, skip=("output",), emulate=True)
        if degrees["tp"] > 1:
            parallel.apply_tp(part, mesh["tp"], loss_parallel=False)
        if mesh_name == "dp2":  # activation checkpointing, whose wrappers have names of their own
            for name, block in list(part.layers.items()):
                part.layers[name] = checkpoint_wrapper(block)
        parallel.apply_fsdp(
            part,
            mesh,
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            reshard=reshard,
            cpu_offload=False,
        )
        parallel.materialise(
            part,
            device="cpu",
            weight_device="cpu",
            draw=draw or (lambda name, shape: torch.zeros(shape)),
            positions=torch.arange(SEQ_LEN),
        )
        parts.append(part)
    return parts, mesh


def build_optimizer(parts, **settings):
    parameters = [parameter for part in parts for parameter in part.parameters()]
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, "foreach": False} | settings)


def visit(parts, optimizer):
    """(global name, kind, live tensor) of everything a checkpoint must hold, found without it."""
    for part in parts:
        for name, parameter in part.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            yield name, "weight", parameter.detach()
            for kind, value in optimizer.state[parameter].items():
                yield name, kind, value


def fill(parts, optimizer, seed, shapes):
    """Give every weight, moment and counter its expected value of this seed."""
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    for name, kind, tensor in visit(parts, optimizer):
        value = expected(name, shapes[name], kind, seed)
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(value)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_holds(parts, optimizer, seed, shapes):
    """Every tensor has its expected value, bit for bit, and none is missing; returns how many."""
    count = 0
    for name, kind, tensor in visit(parts, optimizer):
        value = full(tensor)
        assert torch.equal(value, expected(name, shapes[name], kind, seed)), (name, kind)
        count += 1
    return count


def save_one(folder, step, *, mode="sync", mesh_name="one process", config=CONFIG, keep_latest=0):
    """Save a state whose seed is the step."""
    parts, _ = build(mesh_name, config)
    optimizer = build_optimizer(parts)
    fill(parts, optimizer, step, shapes_of(config))
    saver = checkpoint.Checkpointer(folder, mode=mode, keep_latest=keep_latest)
    saver.save(step, parts, optimizer, {"step": step})
    saver.close()


def check_loads(folder, step, mesh_name="one process", config=CONFIG):
    parts, _ = build(mesh_name, config)
    optimizer = build_optimizer(parts)
    checkpoint.load_checkpoint(folder, step, parts, optimizer, shapes=shapes_of(config))
    return check_holds(parts, optimizer, step, shapes_of(config))


def check_retention_is_a_side_matter(folder):
    """A user's file and link under a leftover's name, and a folder that NFS does not let go yet."""
    for name in ("step-00000009.tmp-note", "elsewhere"):
        (folder / name).write_text("keep me")
    (folder / "step-00000008.tmp-link").symlink_to(folder / "elsewhere")
    (folder / "step-00000007.tmp-busy").mkdir()
    rmtree, busy = shutil.rmtree, [True]

    def rmtree_or_not(path, *args, **options):
        if "busy" in str(path) and busy[0]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        return rmtree(path, *args, **options)

    checkpoint.shutil.rmtree = rmtree_or_not  # in this forked rank only
    parts, _ = build("one process")
    optimizer = build_optimizer(parts)
    saver = checkpoint.Checkpointer(folder, mode="sync", keep_latest=1)
    for step in (1, 2, 3):
        saver.save(step, parts, optimizer, {"step": step})  # raises nothing
        busy[0] = step < 2
    saver.close()
    return sorted(path.name for path in folder.iterdir())


def test_what_cannot_be_deleted_is_told_once_and_no_save_fails_for_it(tmp_path, capfd):
    (names,) = run_ranks(1, check_retention_is_a_side_matter, tmp_path)
    assert names == [
        "elsewhere", "step-00000003", "step-00000008.tmp-link", "step-00000009.tmp-note",
    ]  # fmt: skip
    err = capfd.readouterr().err
    for name in ("00000007.tmp-busy", "00000008.tmp-link", "00000009.tmp-note"):
        assert err.count(f"{name} cannot be deleted") == 1, err


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys, reason):
    def no_locks(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    with checkpoint.hold_folder(tmp_path / "run"):
        assert "run cannot be locked" in capsys.readouterr().err


def fake_checkpoint(folder, step):
    path = checkpoint.checkpoint_path(folder, step)
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")


# ---- definition: load equals save --------------------------------------------------------------


def save_meshes(folder, names):
    for name in names:
        save_one(folder / name, 3, mode="async", mesh_name=name)


def load_meshes(folder, names, distances):
    """For each mesh, load what the meshes `distances` further on in the table saved."""
    table = list(MESHES)
    counts = {}
    for name in names:
        for distance in distances:
            saved = table[(table.index(name) + distance) % len(table)]
            counts[name] = check_loads(folder / saved, 3, name)
    return counts


def check_meshes(folder, distances):
    worlds = {n: [m for m in MESHES if n_ranks(m) == n] for n in sorted(set(map(n_ranks, MESHES)))}
    for world_size, names in worlds.items():
        run_ranks(world_size, save_meshes, folder, names)
    n_tensors = 4 * len(shapes_of(CONFIG))  # weight, two moments, step
    for world_size, names in worlds.items():
        counts = run_ranks(world_size, load_meshes, folder, names, distances)
        for name in names:
            pp = MESHES[name].get("pp", 1)
            # pp is the outermost axis: the ranks at 0 and world / pp hold all stages between them
            held = [counts[i * world_size // pp][name] for i in range(pp)]
            assert sum(held) == n_tensors, name


def test_what_is_loaded_on_another_mesh_is_bitwise_what_was_saved(tmp_path):
    check_meshes(tmp_path, (1, 3))


@pytest.mark.soak
def test_what_is_loaded_on_any_mesh_is_bitwise_what_was_saved_on_any_other(tmp_path):
    check_meshes(tmp_path, range(len(MESHES)))


def train(model, optimizer, step):
    """One step on data that depend on the step alone."""
    tokens = (torch.arange(SEQ_LEN).reshape(1, SEQ_LEN) * (step + 3)) % 257
    optimizer.zero_grad()
    model(tokens).logsumexp(-1).sum().backward()
    optimizer.step()


def check_continues(folder, fused):
    def start():
        (model,), _ = build("dp2", draw=partial(expected, kind="weight", seed=0))
        return model, build_optimizer([model], foreach=None if fused else False, fused=fused)

    model, optimizer = start()
    saver = checkpoint.Checkpointer(folder, mode="async", keep_latest=0)
    for step in range(1, 5):
        train(model, optimizer, step)
        if step == 2:
            saver.save(2, [model], optimizer, {})
        saver.wait_for_staging()
    saver.close()
    straight = {name: full(p).clone() for name, p in model.named_parameters()}
    model, optimizer = start()
    checkpoint.load_checkpoint(folder, 2, [model], optimizer, shapes=shapes_of(CONFIG))
    for step in range(3, 5):
        train(model, optimizer, step)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), straight[name]), name


@pytest.mark.parametrize("fused", [False, True])
def test_training_continues_bit_for_bit(tmp_path, fused):
    run_ranks(2, check_continues, tmp_path, fused)


def check_tied(folder):
    save_one(folder, 3, config=TIED)
    metadata = checkpoint.read_metadata(checkpoint.checkpoint_path(folder, 3))
    assert "model.tok_embeddings.weight" in metadata.state_dict_metadata
    assert "model.output.weight" not in metadata.state_dict_metadata
    model = Transformer(TIED, seq_len=SEQ_LEN)
    optimizer = build_optimizer([model])
    checkpoint.load_checkpoint(folder, 3, [model], optimizer, shapes=shapes_of(TIED))
    check_holds([model], optimizer, 3, shapes_of(TIED))
    assert model.output.weight is model.tok_embeddings.weight


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path):
    run_ranks(1, check_tied, tmp_path)


def check_fresh_optimizer(folder):
    model = Transformer(CONFIG, seq_len=SEQ_LEN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer([model], lr=0.5, weight_decay=0.3)
    state = checkpoint.build_state([model], optimizer)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(not value.any() for key, value in state.items() if key.startswith("optimizer."))
    assert all(parameter.grad is None for parameter in model.parameters())
    save_one(folder, 3)
    checkpoint.load_checkpoint(folder, 3, [model], optimizer, shapes=shapes_of(CONFIG))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.3)

    plain = torch.optim.SGD(model.parameters(), lr=0.5)  # has no state, and saving makes none
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = checkpoint.build_state([model], plain)
    assert not any(key.startswith("optimizer.") for key in state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_optimizer_gets_zero_state_and_keeps_its_own_hyperparameters(tmp_path):
    run_ranks(1, check_fresh_optimizer, tmp_path)


def check_after_evaluation(folder):
    parts, _ = build("dp2", reshard="never")
    optimizer = build_optimizer(parts)
    fill(parts, optimizer, 3, shapes_of(CONFIG))
    with torch.no_grad():
        parts[0](torch.arange(SEQ_LEN).reshape(1, SEQ_LEN))  # leaves the weights gathered
    saver = checkpoint.Checkpointer(folder, mode="sync", keep_latest=0)
    saver.save(3, parts, optimizer, {})
    check_loads(folder, 3, "dp2")


def test_a_save_right_after_an_evaluation_holds_the_shards(tmp_path):
    run_ranks(2, check_after_evaluation, tmp_path)


# ---- saving while training goes on -------------------------------------------------------------


def check_async(folder):
    parts, _ = build("dp2")
    optimizer = build_optimizer(parts)
    shapes = shapes_of(CONFIG)
    release = threading.Event()
    write = checkpoint.PublishingWriter.write_data
    checkpoint.PublishingWriter.write_data = lambda *a: (release.wait(30), write(*a))[1]
    copy = torch._foreach_copy_  # late, so that who does not wait for it changes what it copies
    torch._foreach_copy_ = lambda *a, **kw: (time.sleep(0.3), copy(*a, **kw))[1]
    make_plan, planned = checkpoint.StagingPlanner._create_global_plan, []
    checkpoint.StagingPlanner._create_global_plan = lambda *a: (planned.append(1), make_plan(*a))[1]
    saver = checkpoint.Checkpointer(folder, mode="async", keep_latest=0)
    for step in (3, 6):  # twice: the second save reuses the first's staging memory and plan
        fill(parts, optimizer, step, shapes)
        train_state = {"step": step, "sequences": 10 * step}
        saver.save(step, parts, optimizer, train_state)
        train_state["step"] = -1
        saver.wait_for_staging()
        fill(parts, optimizer, step + 1, shapes)  # training goes on
        assert step not in checkpoint.list_checkpoints(folder)
        release.set()
        saver.wait()
        assert step in checkpoint.list_checkpoints(folder)
        release.clear()
        assert checkpoint.read_train_state(folder, step) == {"step": step, "sequences": 10 * step}
    saver.close()
    assert len(planned) == (dist.get_rank() == 0)
    for step in (3, 6):
        check_loads(folder, step, "dp2")


def test_an_async_save_holds_the_values_of_its_step(tmp_path):
    run_ranks(2, check_async, tmp_path)
    assert checkpoint.unpublished(tmp_path) == []


def check_that_the_step_waits(folder, mode):
    """Copying takes its time, and the optimizer steps at once after `save` has returned."""
    copy = checkpoint.StagingPlanner.set_up_planner

    def copy_late(self, *args, **options):
        time.sleep(0.5)
        return copy(self, *args, **options)

    checkpoint.StagingPlanner.set_up_planner = copy_late  # in this forked rank only
    (model,), _ = build("dp2", draw=partial(expected, kind="weight", seed=0))
    optimizer = build_optimizer([model])
    saver = checkpoint.Checkpointer(folder / mode, mode=mode, keep_latest=0)
    for step in (1, 2, 3):
        train(model, optimizer, step)  # its update waits for the copy of the step before
        saved = {name: full(tensor).clone() for name, _, tensor in visit([model], optimizer)}
        kinds = {(n, k): full(t).clone() for n, k, t in visit([model], optimizer)}
        saver.save(step, [model], optimizer, {})
    train(model, optimizer, 4)
    saver.close()
    (other,), _ = build("dp2")
    loaded = build_optimizer([other])
    checkpoint.load_checkpoint(folder / mode, 3, [other], loaded, shapes=shapes_of(CONFIG))
    for name, kind, tensor in visit([other], loaded):
        assert torch.equal(full(tensor), kinds[name, kind]), (name, kind)
    assert len(kinds) == 4 * len(saved)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_optimizer_waits_by_itself_until_a_save_has_its_copy(tmp_path, mode):
    run_ranks(2, check_that_the_step_waits, tmp_path, mode)


def record_the_order(folder):
    """Names of what is flushed and renamed by a save, in order, and what can be read right then."""
    events, folder = [], folder / "checkpoints"
    fsync, rename = os.fsync, os.rename

    def note(path):
        name = Path(path).name
        return "step" if name.startswith("step-") else name.removesuffix(".tmp")

    def fsync_and_note(descriptor):
        events.append(("flush", note(os.readlink(f"/proc/self/fd/{descriptor}"))))
        return fsync(descriptor)

    def rename_and_note(source, target, *args, **options):
        result = rename(source, target, *args, **options)
        events.append(("rename", note(target)))
        for step in checkpoint.list_checkpoints(folder):  # as if all ended here
            assert checkpoint.read_train_state(folder, step) == {"step": step}
            assert checkpoint.read_metadata(checkpoint.checkpoint_path(folder, step))
        return result

    os.fsync, os.rename = fsync_and_note, rename_and_note
    Path.rename = lambda self, target: Path(target) if rename_and_note(self, target) else target
    save_one(folder, 1)
    return events


def test_a_checkpoint_gets_its_name_when_all_of_it_is_flushed_and_the_name_is_flushed_too(tmp_path):
    (events,) = run_ranks(1, record_the_order, tmp_path)
    assert [event for event in events if event[0] == "rename"][-1] == ("rename", "step")
    published = events.index(("rename", "step"))
    for name in ("__0_0.distcp", "train.json", ".metadata", "step"):
        assert ("flush", name) in events[:published], (name, events)
    # the folder's own entries, after the last file was put into it; then the new name's folder
    last = max(i for i, (_, name) in enumerate(events) if name in ("train.json", ".metadata"))
    assert ("flush", "step") in events[last:published], events
    assert events[published + 1] == ("flush", "checkpoints"), events


def stalls(folder, config):
    """Median time (s) for which a loop stands still per save: {mode: (first, median of the rest)}.

    In turns, and each in a loop of its own, so that what the machine does meanwhile hits both.
    """
    model = Transformer(config, seq_len=SEQ_LEN)
    optimizer = build_optimizer([model], foreach=None, fused=True)
    seen, savers = {}, {}
    for mode in ("sync", "async"):
        savers[mode] = checkpoint.Checkpointer(folder / mode, mode=mode, keep_latest=1)
        seen[mode] = []
    for step in range(1, 7):
        for mode, saver in savers.items():
            train(model, optimizer, step)
            start_s = time.perf_counter()
            saver.save(step, [model], optimizer, {})
            stall_s = time.perf_counter() - start_s
            optimizer.zero_grad()
            model(torch.zeros(1, SEQ_LEN, dtype=torch.int64)).logsumexp(-1).sum().backward()
            start_s = time.perf_counter()
            saver.wait_for_staging()
            seen[mode].append(stall_s + time.perf_counter() - start_s)
            optimizer.step()
            saver.wait()
    for saver in savers.values():
        saver.close()
    return {mode: (times[0], statistics.median(times[1:])) for mode, times in seen.items()}


LARGE = ModelConfig(768, 10, 12, 12, 2048, vocab_size=32768)  # 121 M parameters, 1.4 GiB of state


@pytest.mark.soak  # it asks a clock, and so an idle machine
@pytest.mark.parametrize("config", [MODELS["debug"], LARGE])
def test_an_async_save_holds_training_up_for_a_fifth_of_a_sync_one(tmp_path, config):
    seen = run_ranks(1, stalls, tmp_path, config)[0]
    assert seen["async"][1] < seen["sync"][1] / 5, seen


def check_failed_staging(folder):
    parts, _ = build("dp2")
    optimizer = build_optimizer(parts)
    saver = checkpoint.Checkpointer(folder, mode="async", keep_latest=0)
    make, left = checkpoint.empty_on_host, [1]

    def no_memory(state):
        left[0] -= 1
        if dist.get_rank() == 1 and left[0] == 0:
            raise MemoryError("no room for a copy")
        return make(state)

    checkpoint.empty_on_host = no_memory
    for step in (3, 6):
        fill(parts, optimizer, step, shapes_of(CONFIG))
        saver.save(step, parts, optimizer, {})
        saver.wait_for_staging()  # returns
        if step == 3:
            with pytest.raises(checkpoint.CheckpointError, match="step 3 .*rank 1.*no room"):
                saver.wait()
    saver.close()
    check_loads(folder, 6, "dp2")


def test_a_rank_without_memory_for_the_copy_fails_the_save_on_all_ranks_and_not_the_next(tmp_path):
    run_ranks(2, check_failed_staging, tmp_path)
    assert checkpoint.list_checkpoints(tmp_path) == [6]
    assert checkpoint.unpublished(tmp_path) == []


def check_staging_memory(folder):
    """Local rank 3 of a host with GPUs, as far as a CPU can show: what CUDA is asked for, where."""
    parts, _ = build("dp3")
    optimizer = build_optimizer(parts)
    fill(parts, optimizer, 3, shapes_of(CONFIG))
    state = checkpoint.build_state(parts, optimizer)
    plain = [checkpoint.local_tensor(tensor) for tensor in state.values()]
    asked = []

    def note(*what):
        asked.append((*what, threading.current_thread() is threading.main_thread()))
        return 0

    torch.cuda.is_available, torch.cuda.current_device = (lambda: True), (lambda: 3)
    torch.cuda.Stream, torch.cuda.check_error = (lambda: None), (lambda code: None)
    torch.cuda.set_device = partial(note, "set_device")
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=partial(note, "register"), cudaHostUnregister=partial(note, "unregister")
    )
    saver = checkpoint.Checkpointer(folder, mode="async", keep_latest=0)
    saver.prepare(parts, optimizer)
    saver.thread.submit(int).result()  # what was submitted before is done
    device, (what, place, n_bytes, flags, in_main) = asked
    assert device == ("set_device", 3, False) and (what, flags, in_main) == ("register", 1, False)
    host = {key: checkpoint.local_tensor(copy) for key, copy in saver.planner.host.items()}
    assert host.keys() == state.keys()
    end = place
    for tensor, copy in zip(plain, host.values(), strict=True):
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        assert copy.untyped_storage().nbytes() == tensor.nbytes, "no view, which DCP would clone"
        if copy.numel():
            assert copy.data_ptr() % 64 == 0 and 0 <= copy.data_ptr() - end < 64
            end = copy.data_ptr() + copy.nbytes
    assert any(tensor.numel() == 0 for tensor in plain) == (dist.get_rank() == 2)
    assert sum(t.nbytes for t in plain) <= n_bytes < end - place + 64, "nor anything rounded up"
    made = saver.planner.host
    saver.planner.reserve(state)
    assert saver.planner.host is made, "one memory for all saves"
    saver.close()
    del host, made, copy, saver
    gc.collect()
    assert asked[2:] == [("unregister", place, True)]


def test_staging_memory_is_one_pinned_buffer_made_ahead_by_a_thread_of_the_ranks_gpu(tmp_path):
    run_ranks(3, check_staging_memory, tmp_path)


def save_steps(folder, steps, keep_latest, protected_step):
    parts, _ = build("one process")
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    saver = checkpoint.Checkpointer(
        folder, mode="async", keep_latest=keep_latest, protected_step=protected_step
    )
    for step in steps:
        saver.save(step, parts, optimizer, {})
    saver.close()


def test_retention_keeps_the_newest_and_the_protected_and_counts_only_published_ones(tmp_path):
    fake_checkpoint(tmp_path, 1)
    for name in ("step-00000099", "step-abc", "old-step-5", "step-00000098.set-aside-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000097").write_text("a file")
    (tmp_path / "step-00000003.tmp-dead-1").mkdir()
    run_ranks(1, save_steps, tmp_path, [2, 4, 5], 0, 1)  # 0: keep all
    assert checkpoint.list_checkpoints(tmp_path) == [1, 2, 4, 5]
    run_ranks(1, save_steps, tmp_path, [6, 8], 2, 1)
    assert checkpoint.list_checkpoints(tmp_path) == [1, 6, 8]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000001", "step-00000006", "step-00000008"} | {
        "step-00000099", "step-abc", "old-step-5", "step-00000098.set-aside-1", "step-00000097"
    }  # fmt: skip


# ---- faults ------------------------------------------------------------------------------------


def hang(flag):
    flag.write_text("here")
    time.sleep(60)


def killed_rank(folder, point, flag):
    """A run that publishes step 5 and then hangs inside the save of step 10, at `point`."""
    dist.init_process_group("gloo", init_method=f"file://{flag}.store", rank=0, world_size=1)
    save_one(folder, 5)
    if point == "data":
        write = checkpoint.PublishingWriter.write_data
        checkpoint.PublishingWriter.write_data = lambda *a: (write(*a), hang(flag))
    elif point == "before the rename":
        fsync = checkpoint.fsync_path
        checkpoint.fsync_path = lambda path: hang(flag) if path.is_dir() else fsync(path)
    else:  # half of the old checkpoint is deleted, its .metadata not yet
        checkpoint.shutil.rmtree = lambda path: ((path / "__0_0.distcp").unlink(), hang(flag))
    save_one(folder, 10, mode="async", keep_latest=1)


@pytest.mark.parametrize(
    "point, survivor", [("data", 5), ("before the rename", 5), ("deletion", 10)]
)
def test_a_kill_during_a_save_leaves_only_whole_checkpoints(tmp_path, point, survivor):
    folder, flag = tmp_path / "checkpoints", tmp_path / "flag"
    process = multiprocessing.get_context("fork").Process(
        target=killed_rank, args=(folder, point, flag)
    )
    process.start()
    deadline = time.monotonic() + 60
    while not flag.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert flag.exists()
    assert checkpoint.list_checkpoints(folder) == [survivor]
    assert len(checkpoint.unpublished(folder)) == 1
    run_ranks(1, check_loads, folder, survivor)
    run_ranks(1, save_one, folder, 15)  # and the next run clears what is left
    assert checkpoint.list_checkpoints(folder) == [survivor, 15]
    assert checkpoint.unpublished(folder) == []


def check_disk_full(folder, mode):
    parts, _ = build("dp2")
    optimizer = build_optimizer(parts)
    saver = checkpoint.Checkpointer(folder, mode=mode, keep_latest=1)
    write = checkpoint.PublishingWriter.write_data
    is_full = False

    def write_until_full(self, *args):
        result = write(self, *args)
        if is_full and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return result

    checkpoint.PublishingWriter.write_data = write_until_full
    fill(parts, optimizer, 5, shapes_of(CONFIG))
    saver.save(5, parts, optimizer, {})
    saver.wait()
    is_full = True
    with pytest.raises(checkpoint.CheckpointError, match="step 10 .*rank 1.*No space left"):
        saver.save(10, parts, optimizer, {})  # "sync" raises here
        saver.wait()
    dist.barrier()
    assert checkpoint.list_checkpoints(folder) == [5] and checkpoint.unpublished(folder) == []
    if mode == "async":  # the error comes with the next save, which is begun all the same
        saver.save(15, parts, optimizer, {})
        with pytest.raises(checkpoint.CheckpointError, match="step 15 .*newest.* 5"):
            while not saver.in_flight[2].__self__.done():
                time.sleep(0.01)
            is_full = False
            fill(parts, optimizer, 20, shapes_of(CONFIG))
            saver.save(20, parts, optimizer, {})
        saver.wait()
        assert checkpoint.list_checkpoints(folder) == [20]
        is_full = True
        saver.save(25, parts, optimizer, {})
        with pytest.raises(checkpoint.CheckpointError, match="step 25"):
            saver.close()
        return 20
    return 5


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_told_on_every_rank_and_spares_the_last_checkpoint(tmp_path, mode):
    survivor = run_ranks(2, check_disk_full, tmp_path, mode)[0]
    assert checkpoint.list_checkpoints(tmp_path) == [survivor]
    run_ranks(1, check_loads, tmp_path, survivor)


def check_unshared_disk(folder):
    folder = folder / f"node{dist.get_rank()}"
    with pytest.raises(checkpoint.CheckpointError, match="rank 0 cannot see __1_0.distcp"):
        save_one(folder, 5, mesh_name="dp2")
    assert checkpoint.list_checkpoints(folder) == []


def test_nodes_that_do_not_share_the_folder_publish_nothing(tmp_path):
    run_ranks(2, check_unshared_disk, tmp_path)


# ---- names and choices -------------------------------------------------------------------------


def test_only_published_folders_are_listed_and_steps_are_read_as_numbers(tmp_path):
    assert checkpoint.list_checkpoints(tmp_path / "nothing") == []
    for step in (100_000_000, 5, 99_999_999, 20):  # as text, nine digits sort before eight nines
        fake_checkpoint(tmp_path, step)
    (tmp_path / "step-00000030").mkdir()  # no .metadata
    for name in ("step-30", "step-abc", "old-step-5", "step-30.tmp", "step-00000031.tmp-ab-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_text("")
    (tmp_path / "step-00000040").write_text("a file")
    assert checkpoint.list_checkpoints(tmp_path) == [5, 20, 99_999_999, 100_000_000]
    assert checkpoint.unpublished(tmp_path) == ["step-00000031.tmp-ab-1"]
    assert checkpoint.choose_step(tmp_path, "auto") == 100_000_000


def test_choosing_a_step(tmp_path):
    assert checkpoint.choose_step(tmp_path, "auto") is None
    assert checkpoint.choose_step(tmp_path, "never") is None
    with pytest.raises(ValueError, match="--resume 7 .*none"):
        checkpoint.choose_step(tmp_path, 7)
    fake_checkpoint(tmp_path, 5)
    fake_checkpoint(tmp_path, 10)
    assert checkpoint.choose_step(tmp_path, 5) == 5
    for missing in (7, -2, 0):
        with pytest.raises(ValueError, match=f"--resume {missing} .*5, 10"):
            checkpoint.choose_step(tmp_path, missing)
    with pytest.raises(ValueError, match="--resume never .*another --out"):
        checkpoint.choose_step(tmp_path, "never")


def test_newer_checkpoints_are_set_aside_and_not_deleted(tmp_path):
    for attempt in (1, 2):
        for step in (10, 15) if attempt == 2 else (5, 10, 15):
            fake_checkpoint(tmp_path, step)
        names = checkpoint.set_aside_newer(tmp_path, 5)
        assert names == [f"step-000000{step}.set-aside-{attempt}" for step in (10, 15)]
        assert all((tmp_path / name / ".metadata").exists() for name in names)
        assert checkpoint.choose_step(tmp_path, "auto") == 5
    assert checkpoint.unpublished(tmp_path) == []


def test_one_run_at_a_time_holds_a_folder(tmp_path):
    with checkpoint.hold_folder(tmp_path / "run"):
        with pytest.raises(ValueError, match=r"--out .*run is in use by another"):
            with checkpoint.hold_folder(tmp_path / "run"):
                pass
    with checkpoint.hold_folder(tmp_path / "run"):
        pass


# ---- what is refused at loading ----------------------------------------------------------------


def refusal(folder, config, build_optimizer=build_optimizer):
    """The error text of loading step 5 into a model of `config`."""
    parts, _ = build("dp2" if dist.get_world_size() > 1 else "one process", config)
    optimizer = build_optimizer(parts)
    with pytest.raises(ValueError) as error:
        checkpoint.load_checkpoint(folder, 5, parts, optimizer, shapes=shapes_of(config))
    return str(error.value)


def refusals(folder):
    def sgd(parts):
        return torch.optim.SGD(parts[0].parameters(), lr=0.1)

    save_one(folder, 5, mesh_name="dp2")
    return (
        refusal(folder, dataclasses.replace(CONFIG, n_layers=6)),
        refusal(folder, dataclasses.replace(CONFIG, n_layers=4)),
        refusal(folder, dataclasses.replace(CONFIG, vocab_size=300)),
        refusal(folder, CONFIG, sgd),
    )


def test_another_model_or_optimizer_is_refused_alike_on_every_rank(tmp_path):
    texts = run_ranks(2, refusals, tmp_path)
    assert texts[0] == texts[1]
    missing, extra, shape, optimizer = texts[0]
    for text in texts[0]:
        assert text.startswith(f"--resume 5 conflicts with {tmp_path}")
        assert text.endswith("or another --out")
    # a block has 9 parameters, each with a weight and three entries of the optimizer
    assert "model.layers.5.attention.wk.weight is absent there and (4, 4) in" in missing
    assert "and 35 other keys differ" in missing
    assert "model.layers.4.attention.wk.weight is (4, 4) there and absent in" in extra
    assert "model.output.weight is (257, 4) there and (300, 4) in" in shape
    assert "optimizer.layers.0.attention.wk.weight.exp_avg is (4, 4) there and absent" in optimizer


def check_one_blind_rank(folder):
    save_one(folder, 5, mesh_name="dp2")
    if dist.get_rank() == 1:
        shutil.copytree(folder, folder.parent / "blind")
        (checkpoint.checkpoint_path(folder.parent / "blind", 5) / "__1_0.distcp").unlink()
        folder = folder.parent / "blind"
    first = refusal(folder, CONFIG)
    if dist.get_rank() == 1:
        (checkpoint.checkpoint_path(folder, 5) / ".metadata").unlink()
    return first, refusal(folder, CONFIG)


def test_what_one_rank_cannot_read_stops_all_ranks(tmp_path):
    for texts in run_ranks(2, check_one_blind_rank, tmp_path / "seen"):
        assert all("FileNotFoundError" in text for text in texts)


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch {}".format(os.environ["TRAP"]),)


class ReachesOut:
    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def damage(path, how):
    metadata = checkpoint.read_metadata(path)
    cuts = {"data cut": ("__0_0.distcp", 2000), "metadata cut": (".metadata", 100)}
    cuts["metadata empty"] = ".metadata", 0
    if how in cuts:
        os.truncate(path / cuts[how][0], cuts[how][1])
    elif how == "data gone":
        (path / "__0_0.distcp").unlink()
    elif how == "pickle runs code":
        (path / ".metadata").write_bytes(pickle.dumps(RunsCode()))
    elif how == "pickle reaches out":
        (path / ".metadata").write_bytes(pickle.dumps(ReachesOut()))
    else:  # DCP's own metadata, but a weight is declared to be a pickled object
        metadata.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
        (path / ".metadata").write_bytes(pickle.dumps(metadata))


def check_damage(folder, trap):
    os.environ["TRAP"] = str(trap)
    path = checkpoint.checkpoint_path(folder, 5)
    save_one(folder, 4)
    save_one(folder, 5)
    shutil.copytree(path, folder / "copy")
    texts = {}
    for how, words in {
        "data cut": "rank 0, ",
        "data gone": "FileNotFoundError",
        "metadata cut": "truncated",
        "metadata empty": "EOFError",
        "pickle runs code": "posix.system has no place",
        "pickle reaches out": "getattr of numel has no place",
        "bytes": "BytesStorageMetadata has no place",
    }.items():
        shutil.rmtree(path)
        shutil.copytree(folder / "copy", path)
        damage(path, how)
        texts[how] = refusal(folder, CONFIG)
        assert words in texts[how], texts[how]
        assert texts[how].startswith(f"--resume 5 conflicts with {path}")
        assert "--resume with another step (there: 4)" in texts[how]
    assert not trap.exists()


def test_a_damaged_or_hostile_checkpoint_is_named_with_the_way_out(tmp_path):
    run_ranks(1, check_damage, tmp_path / "checkpoints", tmp_path / "trap")


class OldEnum:
    def __reduce__(self):
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")


def test_metadata_of_other_pythons_can_be_read():
    """3.11.2 pickles an enum's member by getattr; 3.13 has moved PosixPath."""
    for text in (pickle.dumps(OldEnum()), b"cpathlib._local\nPosixPath\n(Vx\ntR."):
        found = checkpoint.MetadataUnpickler(io.BytesIO(text)).load()
        assert found in (_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, Path("x"))


def test_a_damaged_train_state_is_named_with_the_way_out(tmp_path):
    fake_checkpoint(tmp_path, 5)
    for text in (None, "{", ""):
        if text is not None:
            (checkpoint.checkpoint_path(tmp_path, 5) / "train.json").write_text(text)
        with pytest.raises(ValueError, match="--resume 5 .*another --out"):
            checkpoint.read_train_state(tmp_path, 5)
    (checkpoint.checkpoint_path(tmp_path, 5) / "train.json").write_text(json.dumps({"step": 5}))
    assert checkpoint.read_train_state(Path(tmp_path), 5) == {"step": 5}

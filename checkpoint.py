"""Checkpoints: saved while training goes on, published whole or not at all, read back on any mesh.

    python checkpoint.py inspect OUT                   the steps of a run, and what the newest holds
    python checkpoint.py inspect CKPT                  what one step holds
    python checkpoint.py export --from CKPT --to DIR   weights for Hugging Face, or one torch file

    OUT/
        .lock                               held while a run writes here: hold_folder
        checkpoints/                        the `folder` of the functions below
            step-00000100/                  published: this name says that every byte is on disk
                .metadata                   DCP: which slice of which tensor lies where
                __0_0.distcp, __1_0.distcp  one file per rank: its slices of weights and moments
                train.json                  what else the run needs: step, sequences consumed, flags
            step-00000200.tmp-3f9c21aa/     unfinished, by a save under way or one that was killed
            step-00000150.set-aside-1/      kept by `--resume 100`, but no longer counted

A save, with training above the line and a thread below it:

    step 200 | forward, backward | wait_for_staging | update | step 202 | step 203 ...
    ---------+-------------------+------------------+--------+------------------------
             stage      | plan, write, fsync own file | all done: rank 0 writes .metadata,
                                                        renames, prunes

Staging copies the state to host memory, so the files hold step 200 although the weights move on.
A checkpoint counts from the rename on: what a kill or a full disk tears before it does no harm. Not
waiting for the writing cut the overhead 5 to 15 times for Llama 3.1 8B in the paper (§2.3.1).

A mesh never shows in the files. Tensors carry their global names and shapes, a DTensor knows which
slice of one it holds, and at loading DCP reads the intersections of stored and wanted slices:

    key                                         shape       kept by
    model.layers.0.attention.wq.weight          (H Dh, D)   every optimizer
    optimizer.layers.0.attention.wq.weight.
        exp_avg, exp_avg_sq                     (H Dh, D)   AdamW
        step                                    ()          AdamW
    model.layers.1.moe.bias                     (E,)        every run with experts: a buffer

Hugging Face in and out is renaming alone, since model.py has its RoPE layout, and taking the three
tensors of experts apart; DCP reads slices of safetensors files as it does of its own. The tool
needs no model code and no process group.

Not stored: the optimizer's hyperparameters, which come from the flags of the run that resumes; RNG
state, since after initialisation a training step draws no random number; and other buffers, which
are computed. A stranger's checkpoint cannot run code: tensors are read by torch's weights-only
loader, the pickle `.metadata` by an unpickler that knows a dozen names. DCP verifies no checksum.

Sources: TorchTitan (arXiv 2410.06511) §2.3.1; torch.distributed.checkpoint ("DCP").
"""

import argparse
import enum
import fcntl
import json
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard

# What we borrow: names that torch or torchao keep private, and why no public one will do.
#     torch.distributed.tensor.DTensor._spec    mesh and placements, for a copy in host memory
#     torch.distributed.tensor.DTensor.__create_chunk_list__    where this rank's part begins
#     torch._foreach_copy_                      all tensors in one call, without Python's lock

# ---- 1. Names in the folder --------------------------------------------------------------------


def describe_error(error) -> str:
    """One line about an exception; DCP's hold those of all ranks, of which the first is told."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank = min(error.failures)
    return f"rank {rank}, {describe_error(error.failures[rank][0])}"


def checkpoint_path(folder, step: int) -> Path:
    """Where the published checkpoint of a step lies, or would lie."""
    return Path(folder) / f"step-{step:08d}"


def list_checkpoints(folder) -> list[int]:
    """Steps of the published checkpoints, ascending; whatever else lies there is ignored."""
    matches = [re.fullmatch(r"step-(\d{8,})", path.name) for path in Path(folder).glob("step-*")]
    steps = {int(match[1]) for match in matches if match}
    return sorted(step for step in steps if (checkpoint_path(folder, step) / ".metadata").is_file())


def unpublished(folder) -> list[str]:
    """What a killed save or deletion left: never read, removed after the next published save."""
    names = sorted(path.name for path in Path(folder).glob("step-*"))
    return [name for name in names if re.match(r"step-\d{8,}\.tmp-", name)]


def choose_step(folder, resume: str | int) -> int | None:
    """The step to resume from: `resume` is "auto" (the newest), "never" or a step; None: start new.

    Raises:  ValueError if that step is not there, or if "never" would mix two runs in one folder.
    """
    steps = list_checkpoints(folder)
    there = f"the checkpoints in {folder} (steps there: {', '.join(map(str, steps)) or 'none'})"
    if resume == "never" and steps:
        raise ValueError(
            f"--resume never conflicts with {there}: one folder holds one run: give another "
            "--out, or --resume auto to continue this one"
        )
    if resume in ("auto", "never"):
        return steps[-1] if steps else None
    if resume not in steps:
        raise ValueError(f"--resume {resume} is not among {there}: try one of those, or auto")
    return resume


def describe_refusal(folder, step, reason) -> str:
    """The error text for a published checkpoint that this run cannot take, and never skips."""
    others = [other for other in list_checkpoints(folder) if other != step]
    return (
        f"--resume {step} conflicts with {checkpoint_path(folder, step)} ({reason}): it fits only "
        "the model and optimizer it was saved from: give the --model, --set and --optimizer of its "
        f"train.json, --resume with another step (there: {', '.join(map(str, others)) or 'none'}), "
        "or another --out"
    )


def read_json(path):
    """Content of a JSON file; ValueError if it is missing or none."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error


def read_train_state(folder, step: int) -> dict:
    """What the run gave to `Checkpointer.save` beside the tensors."""
    try:
        return read_json(checkpoint_path(folder, step) / "train.json")
    except ValueError as error:
        raise ValueError(describe_refusal(folder, step, error)) from error


def set_aside_newer(folder, step: int) -> list[str]:
    """Rename the checkpoints after `step`, and return the new names. For one rank.

    Resuming an older step starts a new branch; the next automatic resume must not fall back to the
    abandoned one.
    """
    names = []
    for newer in [s for s in list_checkpoints(folder) if s > step]:
        path = checkpoint_path(folder, newer)
        n = 1 + len(list(path.parent.glob(f"{path.name}.set-aside-*")))
        names.append(path.rename(f"{path}.set-aside-{n}").name)
    return names


def check_out(out) -> list[int]:
    """The steps published in OUT, if there are any; ValueError if a run could not write there."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fault = "not writable" if existing.is_dir() else "not a folder"
        raise ValueError(f"--out {out} cannot be made: {existing} is {fault}: try another --out")
    return list_checkpoints(out / "checkpoints")


@contextmanager
def hold_folder(folder):
    """Hold OUT for this run, on one rank, while the context is open.

    The kernel drops the lock with the process, however that ends: a kill leaves no stale one.
    Raises:  ValueError if another run holds it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out {folder} is in use by another run: wait for its end or give another --out"
            ) from None
        except OSError as error:  # some file systems of clusters have no locks
            warning = f"WARNING: {folder} cannot be locked ({error}): let no other run write there"
            print(warning, file=sys.stderr, flush=True)
        yield


# ---- 2. What is saved --------------------------------------------------------------------------


def local_tensor(tensor):
    """The part of a DTensor that this rank holds, same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_tensor(tensor, local):
    """Like `tensor`, with another part of the same shape."""
    if not isinstance(tensor, DTensor):
        return local
    # not from_local: on a GPU's mesh it would move a part in host memory to the GPU
    return DTensor(local, tensor._spec, requires_grad=False)


def plain_tensors(tensor):
    """The tensors in memory that a DTensor, float8 or other tensor subclass is made of here."""
    if isinstance(tensor, DTensor):
        return plain_tensors(tensor.to_local())
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for part in inner for plain in plain_tensors(part)]


def without_wrapper(tensor):
    """The tensor without torchao's wrapper for float8 gathers, same memory.

    As they are, wrapped weights would be pickled as torchao's classes, for a Python with torchao
    only. The weight comes first in the wrapper, a scale may follow.
    """
    if not hasattr(local_tensor(tensor), "__tensor_flatten__"):
        return tensor
    return with_local_tensor(tensor, plain_tensors(tensor)[0])


def build_state(stages, optimizer) -> dict[str, torch.Tensor]:
    """This rank's weights and optimizer state by global name: the live tensors, not copies.

    `stages` are this rank's of the model, all stepped by the one optimizer (None: only weights). An
    optimizer that never stepped is given zero moments, as the target of a load.
    """
    stages = nn.ModuleList(stages)  # one module, since torch maps an optimizer to one
    # canonical names, free of wrappers. This comes first: it reshards what an evaluation gathered.
    weights = dcp_state.get_model_state_dict(stages)
    every_name = dict(stages.named_parameters(remove_duplicate=False)).keys()
    for name in every_name - dict(stages.named_parameters()).keys():
        del weights[name]  # the second name of a tied weight
    # the ModuleList numbers the stages: "3.layers.7..." here and "state.3.layers.7..." below
    state = {"model." + key.split(".", 1)[1]: without_wrapper(t) for key, t in weights.items()}
    if optimizer is None:
        return state
    is_fresh = not optimizer.state
    # torch fills an empty state by a step with lr 0 and zero gradients: weights stay, but counters
    # become 1, and a bias correction that is a step ahead would go unnoticed
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    slots = dcp_state.get_optimizer_state_dict(stages, optimizer, options=options)
    for key, value in slots.items():
        if not key.startswith("state."):
            continue  # param_groups: hyperparameters belong to the flags
        if is_fresh and key.endswith(".step"):
            value.zero_()
        state["optimizer." + key.split(".", 2)[2]] = without_wrapper(value)
    return state


# ---- 3. Saving ---------------------------------------------------------------------------------


class CheckpointError(Exception):
    """A save failed. Training and earlier checkpoints are unharmed."""


def fsync_path(path):
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_retention(folder, *, keep_latest, protected_step, told):
    """Delete published checkpoints but the newest `keep_latest` (0: keep all), and leftovers.

    A doomed one loses its name first: a deletion that is killed half-way leaves nothing that looks
    whole. `protected_step` (the one resumed from) stays. What cannot be deleted is tried again next
    time, and told of once: `told` are the paths that were.
    """

    def attempt(delete, path):
        try:
            delete(path)
        except OSError as error:
            if path not in told:
                told.add(path)
                print(f"WARNING: {path} cannot be deleted ({error})", file=sys.stderr, flush=True)

    steps = list_checkpoints(folder)
    for step in steps[:-keep_latest] if keep_latest else []:
        if step != protected_step:
            attempt(lambda path: path.rename(f"{path}.tmp-deleted"), checkpoint_path(folder, step))
    for name in unpublished(folder):
        attempt(shutil.rmtree, Path(folder) / name)


class PublishingWriter(dcp.FileSystemWriter):
    """DCP's file writer, whose last act is to publish.

    DCP calls `finish` on rank 0 when every rank has written and fsynced its file, and gives what it
    raises to all ranks: so a save succeeds, or fails, on every rank alike.
    """

    def __init__(self, temporary, final, *, train_state, prune):
        super().__init__(temporary)
        self.final = final
        self.train_state = train_state  # JSON text
        self.prune = prune  # apply_retention with its arguments

    def finish(self, metadata, results):
        """Write the rest, rename, prune: from the rename on the save is a success."""
        files = {write.storage_data.relative_path for rank in results for write in rank}
        unseen = sorted(name for name in files if not (self.path / name).exists())
        if unseen:
            raise OSError(f"rank 0 cannot see {unseen[0]}: do all nodes share {self.path.parent}?")
        (self.path / "train.json").write_text(self.train_state, "utf-8")
        fsync_path(self.path / "train.json")
        super().finish(metadata, results)  # writes .metadata and fsyncs it
        fsync_path(self.path)
        self.path.rename(self.final)
        fsync_path(self.final.parent)
        self.prune()


class StagingPlanner(dcp.DefaultSavePlanner):
    """DCP's planner, which has it write a copy in host memory in place of the live tensors.

    DCP calls `set_up_planner` first, on every rank, and gives what it raises to all ranks.
    (`dcp.async_save` stages before that, tensor by tensor: it held the debug model's loop up for 25
    to 50 ms, and a rank that fails there leaves the others waiting.)
    """

    def __init__(self):
        # from the second save on plans are the first one's: rank 0 need not gather and check them
        super().__init__(enable_plan_caching=True)
        self.host = None  # {key: tensor} for the copy, which every save overwrites
        self.staged = threading.Event()

    def reserve(self, state):
        """Make the memory for copies of such a state, once."""
        if self.host is None:
            self.host = empty_on_host(state)

    @torch.no_grad()
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        """In the thread that saves: copy, let the optimizer go on, plan."""
        self.reserve(state_dict)
        copies = [local_tensor(self.host[key]) for key in state_dict]
        # one call, and without Python's lock, so that the loop goes on meanwhile
        originals = list(map(local_tensor, state_dict.values()))
        torch._foreach_copy_(copies, originals, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.staged.set()
        super().set_up_planner(self.host, storage_meta, is_coordinator)


def empty_on_host(state):
    """Host memory for a copy of the state: {key: tensor}, each in its piece of one flat buffer.

    A GPU copies in the background only to pinned memory. torch's own allocator of pinned memory
    would round every request up to a power of two, so the buffer is registered with CUDA instead.
    """
    likes = [local_tensor(tensor) for tensor in state.values()]
    starts = [0, *accumulate(-(-like.nbytes // 64) * 64 for like in likes)]  # aligned
    flat = torch.empty(starts[-1], dtype=torch.uint8).numpy()  # kept alive by the pieces
    if torch.cuda.is_available():
        cuda, place = torch.cuda.cudart(), flat.ctypes.data
        torch.cuda.check_error(cuda.cudaHostRegister(place, flat.nbytes, 1))
        weakref.finalize(flat, cuda.cudaHostUnregister, place)
    host = {}
    for (key, tensor), like, start in zip(state.items(), likes, starts, strict=False):
        piece = torch.empty(like.shape, dtype=like.dtype)  # if it holds nothing
        if n := like.numel():  # a storage of its own: DCP would clone a view to write it
            piece = torch.frombuffer(flat, dtype=like.dtype, count=n, offset=start)
        host[key] = with_local_tensor(tensor, piece.view(like.shape))
    return host


class Checkpointer:
    """Saves the states of one run into `folder`. Every method is for all ranks together.

    mode         "async": a thread copies the state to host memory and writes the copy, while the
                 loop goes on as far as the optimizer's next step, which waits until the copy is
                 taken. "sync": `save` writes, without a copy.
    keep_latest  published checkpoints to keep beside `protected_step`; 0 keeps all.
    Raises:      CheckpointError, on every rank, if a save failed: at once if "sync", otherwise at
                 the next `save` (which has then begun the new one), `wait` or `close`. To be
                 reported; training may go on. What the failed save wrote is removed.
    """

    def __init__(self, folder, *, mode: str, keep_latest: int, protected_step: int | None = None):
        assert mode in ("async", "sync"), f"unknown mode {mode}"
        self.folder, self.mode = Path(folder), mode
        kept = {"keep_latest": keep_latest, "protected_step": protected_step}
        self.prune = partial(apply_retention, self.folder, **kept, told=set())
        # its own group: the thread's messages must not mix with those of training, nor need a GPU.
        # gloo's 30 minutes bound the time from the first rank's end of writing to the last one's.
        self.group = dist.new_group(backend="gloo")
        unique = [os.urandom(4).hex()]  # a killed run may have left its files of the same step
        dist.broadcast_object_list(unique, src=0, group=self.group)
        self.unique = unique[0]
        self.in_flight = None  # (step, writer, function that returns when all is written)
        self.hook = None  # of the optimizer
        self.stream, in_thread = None, {}
        if torch.cuda.is_available():
            # copies must not queue behind the next step's kernels
            self.stream = torch.cuda.Stream()
            device = torch.cuda.current_device()  # else the stream's end takes the thread to GPU 0
            in_thread = {"initializer": torch.cuda.set_device, "initargs": (device,)}
        self.thread = ThreadPoolExecutor(max_workers=1, **in_thread)
        self.planner = StagingPlanner()

    def prepare(self, stages, optimizer) -> None:
        """After a first step: let the thread make the memory for copies before a save needs it."""
        if self.mode == "async":
            self.thread.submit(self.planner.reserve, build_state(stages, optimizer))

    def save(self, step: int, stages, optimizer, train_state: dict) -> None:
        """Begin to save step `step`, also if the save before turns out to have failed."""
        if self.hook is None:
            self.hook = optimizer.register_step_pre_hook(lambda *_: self.wait_for_staging())
        failure = None
        try:
            self.wait()
        except CheckpointError as error:  # never if "sync"; told when the new save has begun
            failure = error
        state = build_state(stages, optimizer)
        final = checkpoint_path(self.folder, step)
        temporary = final.with_name(f"{final.name}.tmp-{self.unique}")
        text = json.dumps(train_state, indent=1)
        writer = PublishingWriter(temporary, final, train_state=text, prune=self.prune)
        if self.stream:
            torch.cuda.synchronize()  # which that stream does not wait for
        if self.mode == "sync":
            self.in_flight = step, writer, partial(self.write, state, writer, planner=None)
            return self.wait()
        self.planner.staged.clear()
        future = self.thread.submit(self.write, state, writer, planner=self.planner)
        self.in_flight = step, writer, future.result
        if failure:
            raise failure

    def write(self, state, writer, *, planner):
        """Save through DCP; returns, or raises on all ranks, when `writer` has published."""
        try:
            with torch.cuda.stream(self.stream):  # None: nothing happens
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self.group)
        finally:
            self.planner.staged.set()  # if it failed before

    def wait_for_staging(self) -> None:
        """Return when the state is copied; before it the weights may not change."""
        if self.in_flight is not None:
            self.planner.staged.wait()  # an error of the copying comes out of `wait`

    def wait(self) -> None:
        """Join the save in flight, if any: return when it is published, or raise why it is not."""
        if self.in_flight is None:
            return
        (step, writer, join), self.in_flight = self.in_flight, None
        try:
            join()
        except (Exception, CheckpointException) as error:  # the second is a bare BaseException
            if dist.get_rank() == 0:
                shutil.rmtree(writer.path, ignore_errors=True)
            newest = (list_checkpoints(self.folder) or ["none"])[-1]
            raise CheckpointError(
                f"the save of step {step} failed ({describe_error(error)}); "
                f"newest checkpoint in {self.folder}: {newest}"
            ) from error

    def close(self) -> None:
        """Join the last save and end the thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self.thread.shutdown()


# ---- 4. Loading --------------------------------------------------------------------------------

HARMLESS = {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath"}
HARMLESS |= {"torch.distributed.checkpoint." + name for name in (
    # not BytesStorageMetadata: DCP would unpickle the bytes of such an entry without restriction
    "filesystem._StorageInfo", "metadata.ChunkStorageMetadata", "metadata.Metadata",
    "metadata.MetadataIndex", "metadata.StorageMeta", "metadata.TensorProperties",
    "metadata.TensorStorageMetadata", "metadata._MEM_FORMAT_ENCODING",
)}  # fmt: skip


def enum_member(enum_class, name):
    """The getattr by which Python 3.11.2, for one, pickles enums, and no more of it than that."""
    if isinstance(enum_class, enum.EnumType) and name in enum_class.__members__:
        return enum_class[name]
    raise pickle.UnpicklingError(f"getattr of {name} has no place in a checkpoint's metadata")


class MetadataUnpickler(pickle.Unpickler):
    """A pickle may name any function and call it; this one may name only what we write."""

    def find_class(self, module, name):
        """The object that the pickle names, if it is one of ours; else UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if module == "pathlib._local":
            module = "pathlib"  # older Pythons have it here only
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def read_metadata(path):
    """DCP's table of contents: shapes, dtypes and places of all tensors."""
    with open(Path(path) / ".metadata", "rb") as file:
        return MetadataUnpickler(file).load()


def check_safetensors(flag):
    """Raise ValueError, naming the flag that needs it, if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ValueError(
            f"{flag} conflicts with this Python, where safetensors, which reads and writes Hugging "
            "Face's files, is not installed: run `pip install safetensors`"
        )


def find_checkpoint(flag, path) -> Path:
    """PATH if published, or the newest in PATH or PATH/checkpoints; or a Hugging Face folder."""
    path = Path(path)
    if (path / "config.json").is_file():
        check_safetensors(f"{flag} {path}")
        return path
    if (path / ".metadata").is_file() and ".tmp-" not in path.name:
        return path
    for folder in (path, path / "checkpoints"):
        if steps := list_checkpoints(folder):
            return checkpoint_path(folder, steps[-1])
    what = "no folder step-... with .metadata in it, as published checkpoints are"
    raise ValueError(
        f"{flag} {path} conflicts with what is there: {what if path.exists() else 'nothing'}: give "
        "a checkpoint, the --out of a run that saved one, or a Hugging Face folder"
    )


def weight_files(folder):
    """The files of a Hugging Face folder that its index names; without one model.safetensors."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return [str(folder / name) for name in sorted({*read_json(index)["weight_map"].values()})]
    if single.is_file():
        return [str(single)]
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
    raise ValueError(f"no {single.name} and no {index.name} says which files count; there: {there}")


def open_checkpoint(path):
    """({key: shape} stored, read(state): fills tensors by key), of ours or a Hugging Face folder.

    Costs:   each rank reads the slices it holds, one at a time in host memory.
    """
    if (path / "config.json").is_file():
        reader, files = dcp.HuggingFaceStorageReader(path), weight_files(path)
        reader.fs.ls = lambda _: files  # DCP's own would take every .safetensors that lies there
        metadata = reader.read_metadata()
    else:
        reader = dcp.FileSystemReader(path)
        metadata = read_metadata(path)
    reader.read_metadata = lambda: metadata  # DCP's own would unpickle anything
    shapes = {key: tuple(entry.size) for key, entry in metadata.state_dict_metadata.items()}
    return shapes, partial(dcp.load, storage_reader=reader)


class Unreadable(Exception):
    """Why stored tensors cannot fill those of this run; every rank raises it with one reason."""


def describe_differences(stored, wanted, ignored):
    """What keys or shapes differ, or None; `ignored`, a pattern of stored keys that may be left."""
    keys = [key for key in sorted(stored.keys() | wanted) if stored.get(key) != wanted.get(key)]
    keys = [key for key in keys if key in wanted or not re.fullmatch(ignored, key)]
    if not keys:
        return None
    there, here = (shapes.get(keys[0], "absent") for shapes in (stored, wanted))
    n = len(keys) - 1
    more = f", and {n} other keys differ" if n > 1 else ", and another key differs" * n
    return f"{keys[0]} is {there} there and {here} in this run{more}"


def fill_state(state, wanted, path, *, flag=None, ignored=""):
    """Fill the tensors of `state` in place from a folder, or from the one that FLAG PATH means.

    Args:    wanted, {key: full shape} of the whole model, the same on all ranks: compared with what
             is stored before any tensor is read.
    Raises:  Unreadable, on all ranks: one rank's trouble must not leave the others waiting.
    """
    reason = None
    try:
        stored, read = open_checkpoint(find_checkpoint(flag, path) if flag else path)
        reason = describe_differences(stored, wanted, ignored)
    except Exception as error:  # whatever a damaged file makes of the parsers
        reason = describe_error(error)
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        raise Unreadable(next(filter(None, reasons)))
    try:
        read(state)
    except (Exception, CheckpointException) as error:  # DCP raises it on all ranks alike
        raise Unreadable(describe_error(error)) from error


def load_checkpoint(folder, step: int, stages, optimizer, *, shapes) -> None:
    """Read the weights and the optimizer's state of a step, in place, on whatever mesh this is.

    shapes     {parameter name: full shape} of the whole model, the same on all ranks.
    Raises:    ValueError, the same on all ranks: another model or optimizer, or unreadable files.
    """
    state = build_state(stages, optimizer)
    wanted = {f"model.{name}": tuple(shape) for name, shape in shapes.items()}
    # an optimizer may keep other slots of other parameters, and a stage knows its own alone
    slots = [None] * dist.get_world_size()
    mine = {key: tuple(t.shape) for key, t in state.items() if key.startswith("optimizer.")}
    dist.all_gather_object(slots, mine)
    wanted |= {key: shape for of_rank in slots for key, shape in of_rank.items()}
    try:
        fill_state(state, wanted, checkpoint_path(folder, step))
    except Unreadable as error:
        raise ValueError(describe_refusal(folder, step, error)) from error


# ---- 5. Hugging Face's names and files ---------------------------------------------------------

HUGGINGFACE_MODULES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
QWEN_EXPERTS = {  # {} is an expert's number: in the files each has tensors of its own
    "moe.router": "mlp.gate", "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj", "moe.experts.w3": "mlp.experts.{}.up_proj",
}  # fmt: skip
MIXTRAL_EXPERTS = {"moe.router": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS |= {f"moe.experts.w{i}": f"block_sparse_moe.experts.{{}}.w{i}" for i in (1, 2, 3)}
HUGGINGFACE_FIELDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size",
    "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}


class Family(NamedTuple):
    """Models that one class of transformers holds; its `model_type` is the key in FAMILIES."""

    architecture: str  # the class
    qk_norm: bool  # with the next: what selects the family
    has_experts: bool
    fixed: dict  # what its config.json may say and model.py does not ask, since it is always so
    defaults: dict = DEFAULTS  # of its class, where a config.json is silent
    modules: dict = HUGGINGFACE_MODULES  # {our name: its name}
    fields: dict = HUGGINGFACE_FIELDS  # {our field: its field}
    needs: dict = {}  # our fields that it has not, and the one value that it stands for


QWEN_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
EXPERT_NEEDS = {"n_shared_experts": 0, "n_dense_layers": 0, "router_score": "softmax"}
EXPERT_NEEDS |= {"routed_scale": 1.0}
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", qk_norm=False, has_experts=False,
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", qk_norm=True, has_experts=False, fixed=QWEN_FIXED,
        defaults=DEFAULTS | {"head_dim": 128},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qk_norm=True, has_experts=True,
        fixed=QWEN_FIXED | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        defaults=DEFAULTS | {"norm_topk_prob": False},
        modules=HUGGINGFACE_MODULES | QWEN_EXPERTS,
        fields=HUGGINGFACE_FIELDS | {
            "n_experts": "num_experts", "top_k": "num_experts_per_tok",
            "expert_dim": "moe_intermediate_size", "normalise_top_k": "norm_topk_prob",
        },
        needs=EXPERT_NEEDS,
    ),
    "mixtral": Family(
        "MixtralForCausalLM", qk_norm=False, has_experts=True,
        fixed={"hidden_act": "silu", "sliding_window": None},
        defaults=DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        modules=HUGGINGFACE_MODULES | MIXTRAL_EXPERTS,
        fields=HUGGINGFACE_FIELDS | {  # the last takes the place of ffn_dim
            "n_experts": "num_local_experts", "top_k": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
        },
        needs=EXPERT_NEEDS | {"normalise_top_k": True},
    ),
}  # fmt: skip
# of runs that are older than these fields
OLDER = {"qk_norm": False, "n_experts": 0, "top_k": 0, "expert_dim": 0, "normalise_top_k": False}
OLDER |= EXPERT_NEEDS


def read_model(path) -> dict:
    """{field: value} of the ModelConfig that a checkpoint's train.json holds."""
    config = OLDER | read_json(path / "train.json")["model"]
    return {"head_dim": config["dim"] // config["n_heads"]} | config


def family_of(config) -> str:
    """The key in FAMILIES of the family that the config belongs to; ValueError if it has more."""
    kind = config["qk_norm"], config["n_experts"] > 0
    name = next(n for n, f in FAMILIES.items() if (f.qk_norm, f.has_experts) == kind)
    for field, value in FAMILIES[name].needs.items():
        if config[field] != value:
            raise ValueError(
                f"--set {field}={config[field]} conflicts with Hugging Face's {name}, this model's "
                f"family, where {field} is {value}: use this program's own checkpoints, or export "
                "--format torch"
            )
    return name


def huggingface_name(name, family="llama") -> str:
    """layers.7.attention.wq.weight -> model.layers.7.self_attn.q_proj.weight

    layers.7.moe.experts.w1.5, expert 5 of it -> model.layers.7.mlp.experts.5.gate_proj.weight
    """
    pattern = r"(layers\.\d+\.|)(.+)\.(?:weight|(\d+))"
    block, module, number = re.fullmatch(pattern, name).groups()
    theirs = FAMILIES[family].modules[module].format(number)  # of a block, or with its whole name
    return f"model.{block}{theirs}.weight" if block else f"{theirs}.weight"


def config_to_huggingface(config) -> dict:
    """What config.json says of a ModelConfig; transformers 4 and 5 both read this spelling."""
    name = family_of(config)
    c = {"model_type": name} | FAMILIES[name].fixed | {"rope_scaling": None}
    c |= {theirs: config[ours] for ours, theirs in FAMILIES[name].fields.items()}
    if config["rope_factor"] != 1.0:
        c["rope_scaling"] = {
            "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "factor": config["rope_factor"],
            "original_max_position_embeddings": config["rope_original_seq_len"],
        }  # fmt: skip
    return c


def flatten_config(c, family) -> dict:
    """config.json without the inner dictionary of RoPE, and with the defaults of its class."""
    c = family.fixed | family.defaults | c
    # transformers 5 keeps the base in the same dictionary as the stretch, 4 beside it
    rope = c.pop("rope_scaling", None) or c.pop("rope_parameters", None) or {}
    # and before 4.45 it called the kind `type`
    rope = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
    if "n_experts" in family.fields and "num_local_experts" in c:  # Qwen's, in transformers 5
        c[family.fields["n_experts"]] = c["num_local_experts"]
    # absent or null where they follow from others
    n_heads = c.get("num_attention_heads")
    if c.get("num_key_value_heads") is None:
        c["num_key_value_heads"] = n_heads
    if c.get("head_dim") is None and n_heads:
        c["head_dim"] = c.get("hidden_size", 0) // n_heads
    return c | {"rope_scaling": None, "rope_type": "default", "factor": 1.0} | rope


def split_experts(name, tensor):
    """{name.5: expert 5} of those in (E, out, in) that this rank holds, the same memory."""
    if not isinstance(tensor, DTensor):
        return {f"{name}.{number}": part for number, part in enumerate(tensor)}
    (held,) = tensor.__create_chunk_list__()  # where DCP takes this rank's part to lie
    # an expert whose rows are cut stays so; that other ranks have other experts, it need not know
    is_cut = [not p.is_replicate() and p.dim == 1 for p in tensor.placements]
    where = {"device_mesh": tensor.device_mesh, "run_check": False}
    where["placements"] = [Shard(0) if cut else Replicate() for cut in is_cut]
    where |= {"shape": tensor.shape[1:], "stride": tensor.stride()[1:]}
    parts = enumerate(tensor.to_local(), start=held.offsets[0])
    return {f"{name}.{number}": DTensor.from_local(part, **where) for number, part in parts}


# ---- 6. Weights to start from ------------------------------------------------------------------


def check_init_from(path, config) -> Path:
    """Return the folder that --init-from PATH means, if the model in it is the one of this run.

    Args:    config, {field: value} of this run's ModelConfig. What no shape of a weight tells is
             compared too: heads, RoPE, eps.
    Raises:  ValueError. Needs no process group, so a wrong folder can be told before there is one.
    """
    folder = find_checkpoint("--init-from", path)
    if (folder / "config.json").is_file():
        family = FAMILIES[family_of(config)]
        here = flatten_config(config_to_huggingface(config), family)
        there = flatten_config(read_json(folder / "config.json"), family)
    else:
        here, there = config, read_model(folder)
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        texts = (f"{key} is {there.get(key)} there and {here[key]} here" for key in differing)
        raise ValueError(
            f"--init-from {path} conflicts with this run's model: {', '.join(texts)}: weights fit "
            "only the model they were trained in: give its --model and --set"
        )
    return folder


def to_huggingface(tensors, family):
    """{key of build_state: tensor, or its full shape} under a family's names, expert by expert."""
    renamed = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("model.")
        if name.endswith("moe.bias"):
            continue  # no family has it, so that it is zero
        if ".experts." not in name:
            parts = {name: tensor}
        elif isinstance(tensor, torch.Tensor):
            parts = split_experts(name, tensor)
        else:
            parts = {f"{name}.{number}": tensor[1:] for number in range(tensor[0])}
        renamed |= {huggingface_name(part, family): parts[part] for part in parts}
    return renamed


def load_weights(path, stages, *, shapes) -> None:
    """Read the weights of --init-from PATH, in place, on whatever mesh this is.

    path       what check_init_from accepted: that tells other models which have the same shapes.
    shapes     {parameter name: full shape} of the whole model, the same on all ranks.
    Raises:    ValueError, the same on all ranks: another model, or unreadable files.
    """
    state = build_state(stages, None)
    wanted = {f"model.{name}": tuple(shape) for name, shape in shapes.items()}
    if (Path(path) / "config.json").is_file():
        family = read_json(Path(path) / "config.json")["model_type"]
        state, wanted = (to_huggingface(tensors, family) for tensors in (state, wanted))
    # the second copy of a tied weight, and what model.py computes
    ignored = r"optimizer\..+|lm_head\.weight|.+\.rotary_emb\.inv_freq"
    try:
        fill_state(state, wanted, path, flag="--init-from", ignored=ignored)
    except Unreadable as error:
        raise ValueError(
            f"--init-from {path} conflicts with this run ({error}): weights fit only the model "
            "they were trained in: give its --model and --set, or another path"
        ) from error


# ---- 7. The tool -------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of an export
SAFETENSORS_BYTES = 5 * 10**9  # of an output file, about: where transformers cuts as well


def print_steps(folder):
    """A line per published step, oldest first, then what is there but does not count."""
    published = [checkpoint_path(folder, step) for step in list_checkpoints(folder)]
    for path in published:
        mib = sum(file.stat().st_size for file in path.iterdir()) / 2**20
        tokens = read_json(path / "train.json")["tokens"]
        print(f"{path.name}  {mib:,.2f} MiB  {tokens:,} tokens")
    for path in sorted(set(folder.glob("step-*")) - set(published)):
        print(f"{path.name}  does not count: unfinished, half deleted or set aside")


def print_contents(path):
    """The tensors of a checkpoint, those of all layers in one row, and its train.json."""
    counts = Counter(
        (re.sub(r"\.\d+\.", ".*.", key), tuple(entry.size), entry.properties.dtype)
        for key, entry in read_metadata(path).state_dict_metadata.items()
    )
    print(f"{path}\nnumber  shape of each   dtype      MiB of all  key")
    for (key, shape, dtype), count in sorted(counts.items(), key=str):
        mib = count * math.prod(shape) * dtype.itemsize / 2**20
        shape = " x ".join(map(str, shape)) or "scalar"
        print(f"{count:>6}  {shape:<14}  {str(dtype)[6:]:<8} {mib:>11,.2f}  {key}")
    print((path / "train.json").read_text("utf-8"))


def byte_tokenizer() -> dict:
    """tokenizer.json of data.py's bytes: BPE without merges, over GPT-2's letters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # those that stand for themselves
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain}
    vocab |= {chr(256 + i): byte for i, byte in enumerate(others)}
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    mark = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    mark["special"] = True
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    bos_first = {"type": "TemplateProcessing", "single": [begin, a], "pair": [begin, a, b]}
    bos_first["special_tokens"] = {bos: {"id": bos, "ids": [256], "tokens": [bos]}}
    return {
        "added_tokens": [{"id": 256, "content": bos} | mark, {"id": 257, "content": eos} | mark],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": level,
        "post_processor": bos_first,
        "decoder": level,
    }


def export_tokenizer(tokenizer, folder) -> dict:
    """Write what transformers reads of the run's tokenizer; {name: id} as data.py gives them."""
    n_ranks = 256
    if tokenizer == "bytes":
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    elif not Path(tokenizer).is_file():
        print(f"no tokenizer written: {tokenizer}, which the run used, is not here")
        return {}
    elif tokenizer.endswith(".json"):  # Hugging Face's own, whose ids nobody has told us
        shutil.copy(tokenizer, folder / "tokenizer.json")
        return {}
    else:
        n_ranks = len(Path(tokenizer).read_bytes().split()) // 2  # lines of "base64 rank"
        shutil.copy(tokenizer, folder / "tokenizer.model")
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return {"bos_token_id": n_ranks, "eos_token_id": n_ranks + 1}


def export_huggingface(folder, model, flags, *, shapes, read, dtype):
    """What transformers opens as its family's class, one output file in memory at a time."""
    check_safetensors("--format hf")
    from safetensors.torch import save_file

    config = config_to_huggingface(model)
    biases = [name for name in shapes if name.endswith("moe.bias")]
    if biases and any(bias.any() for bias in read(biases).values()):
        raise ValueError(
            f"--format hf conflicts with {biases[0]}, which --balance-speed has moved: "
            f"{config['model_type']} has none and would choose other experts: train with "
            "--balance-speed 0, or export --format torch"
        )
    parts, total_size, weight_map = defaultdict(list), 0, {}
    for name in sorted(shapes.keys() - {*biases}):
        parts[total_size // SAFETENSORS_BYTES].append(name)
        total_size += math.prod(shapes[name]) * dtype.itemsize
    for i, names in enumerate(parts.values(), start=1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        weights = to_huggingface(read(names), config["model_type"])
        save_file(weights, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors lets nobody else read it
        weight_map |= dict.fromkeys(weights, file)
        print(file, flush=True)
    ids = export_tokenizer(flags["tokenizer"], folder)
    config |= ids
    config["architectures"] = [FAMILIES[config["model_type"]].architecture]
    config["torch_dtype"] = str(dtype).split(".")[1]
    stretched_len = int(model["rope_original_seq_len"] * model["rope_factor"])
    is_stretched = model["rope_factor"] != 1.0
    config["max_position_embeddings"] = stretched_len if is_stretched else flags["seq_len"]
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    files = {"config.json": config, "generation_config.json": ids}
    files["model.safetensors.index.json"] = index
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2))


def export(path, to, *, kind, dtype):
    """Write a folder that is whole once it has its name: what fails on the way leaves nothing."""
    if to.exists():
        raise ValueError(f"--to {to} exists, and an export overwrites nothing: give a new name")
    stored, read_state = open_checkpoint(path)
    shapes = {k.removeprefix("model."): s for k, s in stored.items() if k.startswith("model.")}

    def read(names):  # whole, and rounded if need be
        state = {f"model.{name}": torch.empty(shapes[name], dtype=dtype) for name in names}
        read_state(state)
        return {name: state[f"model.{name}"] for name in names}

    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{to.name}.tmp-", dir=to.parent) as temporary:
        folder = Path(temporary) / "new"  # only its owner may open the temporary one
        folder.mkdir()
        if kind == "hf":
            model, flags = read_model(path), read_json(path / "train.json")["flags"]
            export_huggingface(folder, model, flags, shapes=shapes, read=read, dtype=dtype)
        else:  # all in memory once
            weights = read(shapes)
            weights.setdefault("output.weight", weights["tok_embeddings.weight"])  # stored once
            torch.save(weights, folder / "weights.pt")
        folder.rename(to)
    print(f"{to} holds the weights of {path}")


def parse_args(argv):
    """The tool's flags: inspect CKPT, or export --from CKPT --to FOLDER."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ckpt = {"metavar": "CKPT", "help": "a folder step-..., or a run's --out, for its newest"}
    tells = "tensors, shapes, dtypes, bytes, train.json; of a run's --out also which steps count"
    add = commands.add_parser("inspect", help=tells)
    add.add_argument("checkpoint", nargs="?", default="out", **ckpt)
    add = commands.add_parser("export", help="weights for Hugging Face, or one torch file")
    add.add_argument("--from", dest="checkpoint", required=True, **ckpt)
    add.add_argument("--to", required=True, type=Path, help="new folder, whole once it exists")
    kinds = "hf: for transformers (default); torch: weights.pt, a state dict of model.py"
    add.add_argument("--format", choices=("hf", "torch"), default="hf", help=kinds)
    sizes = "fp32 as trained (default); bf16 halves the size, but rounds"
    add.add_argument("--dtype", choices=DTYPES, default="fp32", help=sizes)
    return parser.parse_args(argv)


def main(argv=None):
    """Look at a checkpoint or export its weights, in one process; what is wrong, in one line."""
    args = parse_args(argv)
    warnings.filterwarnings("ignore", "torch.distributed is")  # not initialised: none is needed
    try:
        flag = "CKPT" if args.command == "inspect" else "--from"
        path = find_checkpoint(flag, args.checkpoint)
        if (path / "config.json").is_file():
            raise ValueError(
                f"{flag} {path} conflicts with what is there: a Hugging Face folder, for train.py "
                "--init-from alone: give a checkpoint, or the --out of a run that saved one"
            )
        if args.command == "inspect":
            if path != Path(args.checkpoint):  # a run's folder
                print_steps(path.parent)
            print_contents(path)
        else:
            export(path, args.to, kind=args.format, dtype=DTYPES[args.dtype])
    except ValueError as error:
        sys.exit(f"checkpoint.py: {error}")
    except (Exception, CheckpointException) as error:  # damaged files fail in many ways
        sys.exit(f"checkpoint.py: {args.checkpoint} cannot be used: {describe_error(error)}")


if __name__ == "__main__":
    main()

"""Checkpoints: saved while training goes on, published whole or not at all, read back on any mesh.

    OUT/
        .lock                               held while a run writes here: lock_folder
        checkpoints/                        the `folder` of the functions below
            step-00000100/                  published: this name says that every byte is on disk
                .metadata                   DCP: which slice of which tensor lies where
                __0_0.distcp, __1_0.distcp  one file per rank: its slices of weights and moments
                train.json                  what else the run needs: step, sequences consumed, flags
            step-00000200.tmp-3f9c21aa-2/   unfinished, by a save under way or one that was killed
            step-00000150.set-aside-1/      kept by `--resume 100`, but no longer counted

A save, with training above the line and a thread below it:

    step 200 | stage | forward, backward | wait_for_staging | update | step 202 | step 203 ...
    ---------+-------+-------------------+------------------+--------+------------------------
                     write, fsync own file | all done: rank 0 writes .metadata, renames, prunes

Staging copies the state to host memory, so the files hold step 200 although the weights move on.
A checkpoint counts from the rename on, so whatever a kill or a full disk tears before it does no
harm. The paper reports that not waiting for the writing cut the overhead of checkpointing Llama 3.1
8B by 5 to 15 times (§2.3.1).

A mesh never shows in the files. Tensors carry their global names and shapes, a DTensor knows which
slice of one it holds, and at loading DCP reads the intersections of stored and wanted slices:

    key                                         shape       kept by
    model.layers.0.attention.wq.weight          (H Dh, D)   every optimizer
    optimizer.layers.0.attention.wq.weight.
        exp_avg, exp_avg_sq                     (H Dh, D)   AdamW
        step                                    ()          AdamW

Not stored: the optimizer's hyperparameters, which come from the flags of the run that resumes; RNG
state, since after initialisation a training step draws no random number; and buffers, which are
computed. A stranger's checkpoint cannot run code: tensors are read by torch's weights-only loader,
and the pickle `.metadata` by an unpickler that knows a dozen harmless names. Missing and cut files
are noticed; a bit that flips on the disk is not, since DCP verifies no checksum.

Sources: TorchTitan (arXiv 2410.06511) §2.3.1; torch.distributed.checkpoint ("DCP").
"""

import fcntl
import json
import os
import pickle
import re
import shutil
import socket
import uuid
from concurrent import futures
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

# ---- 1. Names in the folder --------------------------------------------------------------------


def describe_error(error) -> str:
    """One line about an exception; DCP's hold those of all ranks, of which the first is told."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank = min(error.failures)
    return f"rank {rank}, {describe_error(error.failures[rank][0])}"


def checkpoint_path(folder, step: int) -> Path:
    return Path(folder) / f"step-{step:08d}"


def list_checkpoints(folder) -> list[int]:
    """Steps of the published checkpoints, ascending; whatever else lies there is ignored."""
    matches = [re.fullmatch(r"step-(\d{8,})", path.name) for path in Path(folder).glob("step-*")]
    steps = {int(match[1]) for match in matches if match}
    return sorted(step for step in steps if (checkpoint_path(folder, step) / ".metadata").is_file())


def unpublished(folder) -> list[str]:
    """Names of what a killed save or a killed deletion left behind: never read, worth a mention.

    The next save that is published removes them: only one run at a time holds the folder's lock.
    """
    names = sorted(path.name for path in Path(folder).glob("step-*"))
    return [name for name in names if re.match(r"step-\d{8,}\.tmp-", name)]


def choose_step(folder, resume: str | int) -> int | None:
    """The step to resume from: `resume` is "auto" (the newest), "never" or a step; None: start new.

    Raises:  ValueError if that step is not there, or if "never" would mix two runs in one folder.
    """
    steps = list_checkpoints(folder)
    there = ", ".join(map(str, steps)) or "none"
    if resume == "never" and steps:
        raise ValueError(
            f"--resume never conflicts with the checkpoints in {folder} (steps there: {there}): "
            "one folder holds one run: give another --out, or --resume auto to continue this one"
        )
    if resume in ("auto", "never"):
        return steps[-1] if steps else None
    if resume not in steps:
        raise ValueError(
            f"--resume {resume} is not among the checkpoints in {folder} (steps there: {there}): "
            "only a published step can be resumed: give one of those, or --resume auto"
        )
    return resume


def describe_damage(folder, step, error) -> str:
    """The error text for a published checkpoint that cannot be read."""
    others = [other for other in list_checkpoints(folder) if other != step]
    way_out = f"--resume {others[-1]}" if others else "another --out to start anew"
    return (
        f"--resume {step} conflicts with {checkpoint_path(folder, step)}, which is published but "
        f"unreadable ({describe_error(error)}): a damaged checkpoint is never skipped silently: "
        f"give {way_out} (other steps there: {', '.join(map(str, others)) or 'none'})"
    )


def read_train_state(folder, step: int) -> dict:
    """What the run gave to `Checkpointer.save` beside the tensors."""
    try:
        return json.loads((checkpoint_path(folder, step) / "train.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(describe_damage(folder, step, error)) from error


def set_aside_newer(folder, step: int) -> list[str]:
    """Rename the checkpoints after `step` so that they no longer count, and return the new names.

    Resuming an older step starts a new branch; the next automatic resume must not fall back to the
    abandoned one. Nothing is deleted. For one rank, before training starts.
    """
    names = []
    for newer in [s for s in list_checkpoints(folder) if s > step]:
        path = checkpoint_path(folder, newer)
        n = 1 + len(list(path.parent.glob(f"{path.name}.set-aside-*")))
        names.append(path.rename(f"{path}.set-aside-{n}").name)
    return names


def lock_folder(folder):
    """Hold OUT for this run, on one rank: the lock lasts as long as the returned file stays open.

    The kernel drops it with the process, however that ends: a kill leaves no stale lock.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "a+", encoding="utf-8")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        raise ValueError(
            f"--out {folder} is in use by {handle.read().strip() or 'another run'}: two runs must "
            "not write into one folder: wait until it ends, or give another --out"
        ) from None
    except OSError as error:
        raise ValueError(
            f"--out {folder} conflicts with the file system ({error}): a run must be able to write "
            "into its folder and to lock it: give another --out"
        ) from error
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    handle.flush()
    return handle


# ---- 2. What is saved --------------------------------------------------------------------------


def build_state(model_parts, optimizer) -> dict[str, torch.Tensor]:
    """This rank's weights and optimizer state by global name: the live tensors, not copies.

    `model_parts` are the pipeline stages of this rank, all stepped by the one optimizer (None: only
    weights). An optimizer that never stepped is given zero moments, as the target of a load.
    """
    parts = nn.ModuleList(model_parts)  # one module, since torch maps an optimizer to one
    # canonical names, free of wrappers. This comes first: it reshards what an evaluation gathered.
    weights = get_model_state_dict(parts)
    every_name = dict(parts.named_parameters(remove_duplicate=False)).keys()
    for name in every_name - dict(parts.named_parameters()).keys():
        del weights[name]  # the second name of a tied weight
    # the ModuleList numbers the parts: "3.layers.7..." here and "state.3.layers.7..." below
    state = {"model." + key.split(".", 1)[1]: tensor for key, tensor in weights.items()}
    if optimizer is None:
        return state
    is_fresh = not optimizer.state
    # torch fills an empty state by a step with lr 0 and zero gradients: weights stay, but counters
    # become 1, and a bias correction that is a step ahead would go unnoticed
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for key, value in get_optimizer_state_dict(parts, optimizer, options=options).items():
        if not key.startswith("state."):
            continue  # param_groups: hyperparameters belong to the flags
        if is_fresh and key.endswith(".step"):
            value.zero_()
        state["optimizer." + key.split(".", 2)[2]] = value
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


def apply_retention(folder, *, keep_latest, protected_step):
    """Delete published checkpoints but the newest `keep_latest` (0: keep all), and leftovers.

    A doomed one loses its name first: a deletion that is killed half-way leaves nothing that looks
    whole. `protected_step` (the one resumed from) stays.
    """
    steps = list_checkpoints(folder)
    surplus = steps[:-keep_latest] if keep_latest else []
    for step in surplus:
        if step != protected_step:
            path = checkpoint_path(folder, step)
            path.rename(f"{path}.tmp-deleted")
    for name in unpublished(folder):
        shutil.rmtree(Path(folder) / name)


class PublishingWriter(dcp.FileSystemWriter):
    """DCP's file writer, whose last act is to publish.

    DCP calls `finish` on rank 0 when every rank has written and fsynced its file, and gives what it
    raises to all ranks: so a save succeeds, or fails, on every rank alike.
    """

    def __init__(self, temporary, final, *, train_state, retention):
        super().__init__(temporary)
        self.final = final
        self.train_state = train_state  # JSON text
        self.retention = retention  # keyword arguments of apply_retention

    def finish(self, metadata, results):
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
        apply_retention(self.final.parent, **self.retention)


class Checkpointer:
    """Saves the states of one run into `folder`. Every method is for all ranks together.

    mode         "async": `save` returns once the state is staged (CPU) or staging (GPU), and a
                 thread writes; costs a copy of the state in host memory. "sync": `save` writes.
    keep_latest  published checkpoints to keep beside `protected_step`; 0 keeps all.
    Raises:      CheckpointError, on every rank, if a save failed: at once if "sync", otherwise at
                 the next `save` (which has then begun the new one), `wait` or `close`. To be
                 reported; training may go on. What the failed save wrote is removed.
    """

    def __init__(self, folder, *, mode: str, keep_latest: int, protected_step: int | None = None):
        assert mode in ("async", "sync"), f"unknown mode {mode}"
        self.folder, self.mode = Path(folder), mode
        self.retention = {"keep_latest": keep_latest, "protected_step": protected_step}
        # its own group: the thread's messages must not mix with those of training, nor need a GPU.
        # gloo's 30 minutes bound the time from the first rank's end of writing to the last one's.
        self.group = dist.new_group(backend="gloo")
        run_id = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(run_id, src=0, group=self.group)
        self.run_id, self.n_saves = run_id[0], 0  # with these all ranks agree on a temporary name
        self.saved_step = protected_step
        self.in_flight = None  # (step, writer, function that returns when all is written)
        self.staging = None  # future
        on_gpu = torch.accelerator.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=on_gpu,  # on a CPU staging competes with training for the cores
                use_non_blocking_copy=on_gpu,
            )
        )

    def save(self, step: int, model_parts, optimizer, train_state: dict) -> None:
        """Begin to save step `step`; does nothing if that step was loaded or saved last."""
        earlier = None
        try:
            self.wait()
        except CheckpointError as error:
            earlier = error
        if step != self.saved_step:
            final = checkpoint_path(self.folder, step)
            self.n_saves += 1
            temporary = final.with_name(f"{final.name}.tmp-{self.run_id}-{self.n_saves}")
            text = json.dumps(train_state, indent=1)
            writer = PublishingWriter(temporary, final, train_state=text, retention=self.retention)
            self.begin(step, build_state(model_parts, optimizer), writer)
        if earlier is not None:
            raise earlier

    def begin(self, step, state, writer):
        where = {"storage_writer": writer, "process_group": self.group}
        if self.mode == "sync":
            self.in_flight = step, writer, partial(dcp.save, state, **where)
            self.wait()
            return
        if torch.accelerator.is_available():
            # staging runs on a stream of its own, which does not wait for the optimizer's kernels
            torch.accelerator.synchronize()
        response = dcp.async_save(state, async_stager=self.stager, **where)
        if isinstance(response, futures.Future):  # staged already
            upload = response
        else:
            self.staging, upload = response.staging_completion, response.upload_completion
        self.in_flight = step, writer, upload.result

    def wait_for_staging(self) -> None:
        """Return when the state is copied: to be called before the weights may change."""
        if self.staging is not None:
            futures.wait([self.staging])  # an error in there comes out of `wait`
            self.staging = None

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
        self.saved_step = step

    def close(self) -> None:
        """Join the last save and free the staging memory; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self.stager.close()


# ---- 4. Loading --------------------------------------------------------------------------------

HARMLESS = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # its home in Python 3.13
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}


class MetadataUnpickler(pickle.Unpickler):
    """A pickle may name any function and call it; this one may name only what we write.

    Not BytesStorageMetadata: DCP would unpickle the bytes of such an entry without restriction.
    """

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in HARMLESS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def read_metadata(path) -> Metadata:
    """DCP's table of contents: shapes, dtypes and places of all tensors."""
    with open(Path(path) / ".metadata", "rb") as file:
        return MetadataUnpickler(file).load()


def describe_misfit(step, path, *, stored, wanted):
    """Error text if the shapes by key differ between checkpoint and run, otherwise None."""
    keys = [k for k in sorted(stored.keys() | wanted.keys()) if stored.get(k) != wanted.get(k)]
    if not keys:
        return None
    key, more = keys[0], f" (and {len(keys) - 1} other keys differ)" if len(keys) > 1 else ""
    return (
        f"--resume {step} ({path}): {key} is {stored.get(key, 'absent')} there and "
        f"{wanted.get(key, 'absent')} in this run{more}: a checkpoint fits only the model and "
        "optimizer it was saved from: give that run's --model, --set and --optimizer (they are in "
        "its train.json), or another --out"
    )


def load_checkpoint(folder, step: int, model_parts, optimizer, *, shapes) -> None:
    """Read the weights and the optimizer's state of a step, in place, on whatever mesh this is.

    shapes     {parameter name: full shape} of the whole model, the same on all ranks: compared with
               what is stored before any tensor is read.
    optimizer  may be None: then only weights are read.
    Raises:    ValueError, the same on all ranks: another model or optimizer, or unreadable files.
    Costs:     each rank reads the stored slices that overlap its own, one at a time in host memory.
    """
    path = checkpoint_path(folder, step)
    state = build_state(model_parts, optimizer)
    wanted = {f"model.{name}": tuple(shape) for name, shape in shapes.items()}
    for slot in {key.rsplit(".", 1)[1] for key in state if key.startswith("optimizer.")}:
        for name, shape in shapes.items():
            wanted[f"optimizer.{name}.{slot}"] = () if slot == "step" else tuple(shape)
    metadata = None
    try:
        metadata = read_metadata(path)
        stored = {key: tuple(entry.size) for key, entry in metadata.state_dict_metadata.items()}
        if optimizer is None:
            stored = {key: size for key, size in stored.items() if key.startswith("model.")}
        text = describe_misfit(step, path, stored=stored, wanted=wanted)
    except Exception as error:  # whatever a damaged file makes of the unpickler
        text = describe_damage(folder, step, error)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)  # a rank that cannot read must not leave the others waiting
    if any(texts):
        raise ValueError(next(filter(None, texts)))
    reader = dcp.FileSystemReader(path)
    reader.read_metadata = lambda: metadata  # its own would unpickle anything
    try:
        dcp.load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise ValueError(describe_damage(folder, step, error)) from error

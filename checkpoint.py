"""Checkpoints: saved while training goes on, published whole or not at all, read back on any mesh.

    python checkpoint.py list OUT                      the steps there are
    python checkpoint.py inspect CKPT                  what one holds
    python checkpoint.py export --from CKPT --to DIR   weights for Hugging Face, or one torch file

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

Hugging Face in and out is renaming alone, since model.py has its RoPE layout. Its safetensors files
say in a header where each tensor's bytes lie: a rank maps them into memory and touches its own
slices only, and an export appends one tensor after the other. The tool needs no model code and no
process group: `.metadata` and train.json say all.

Not stored: the optimizer's hyperparameters, which come from the flags of the run that resumes; RNG
state, since after initialisation a training step draws no random number; and buffers, which are
computed. A stranger's checkpoint cannot run code: tensors are read by torch's weights-only loader,
and the pickle `.metadata` by an unpickler that knows a dozen harmless names. Missing and cut files
are noticed; a bit that flips on the disk is not, since DCP verifies no checksum.

Sources: TorchTitan (arXiv 2410.06511) §2.3.1; torch.distributed.checkpoint ("DCP"); the safetensors
format (github.com/huggingface/safetensors).
"""

import argparse
import dataclasses
import fcntl
import json
import math
import mmap
import os
import pickle
import re
import shutil
import socket
import sys
import textwrap
import time
import uuid
import warnings
from collections import Counter
from concurrent import futures
from contextlib import contextmanager
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
from torch.distributed.tensor import DTensor

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


def plain(tensor):
    """The tensor without a wrapping subclass (torchao's weight for float8 gathers), same memory.

    As they are, wrapped weights would put torchao's classes into the files, which then only a
    Python with torchao could read, and only by unpickling them.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return tensor
    inner = getattr(local, local.__tensor_flatten__()[0][0])  # torch's protocol for such classes
    if not isinstance(tensor, DTensor):
        return inner
    where = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        inner, *where, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


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
    state = {"model." + key.split(".", 1)[1]: plain(tensor) for key, tensor in weights.items()}
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
        state["optimizer." + key.split(".", 2)[2]] = plain(value)
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
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip


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


def open_checkpoint(path, prefix=""):
    """({key: shape} of what is stored under the prefix, read(state): fills tensors by key)."""
    metadata = read_metadata(path)
    reader = dcp.FileSystemReader(path)
    reader.read_metadata = lambda: metadata  # its own would unpickle anything
    entries = metadata.state_dict_metadata.items()
    shapes = {key: tuple(entry.size) for key, entry in entries if key.startswith(prefix)}
    return shapes, partial(dcp.load, storage_reader=reader)


def fill_state(state, wanted, open_source, *, where, way_out, describe):
    """Fill the tensors of `state` in place, or raise one ValueError on all ranks.

    Args:    wanted, {key: full shape} of the whole model, the same on all ranks; open_source() ->
             ({key: shape} stored, read(state)); where and way_out, both ends of the text about a
             misfit; describe(error), the text about what cannot be read.
    """
    text = read = None
    try:
        stored, read = open_source()
        keys = [k for k in sorted(stored.keys() | wanted) if stored.get(k) != wanted.get(k)]
        if keys:
            there, here = (shapes.get(keys[0], "absent") for shapes in (stored, wanted))
            more = f" (and {len(keys) - 1} other keys differ)" if len(keys) > 1 else ""
            text = f"{where}: {keys[0]} is {there} there and {here} in this run{more}: {way_out}"
    except Exception as error:  # whatever a damaged file makes of the parsers
        text = describe(error)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)  # a rank that cannot read must not leave the others waiting
    if any(texts):
        raise ValueError(next(filter(None, texts)))
    try:
        read(state)
    except (Exception, CheckpointException) as error:
        raise ValueError(describe(error)) from error


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
    fill_state(
        state,
        wanted,
        partial(open_checkpoint, path, "model." if optimizer is None else ""),
        where=f"--resume {step} ({path})",
        way_out="a checkpoint fits only the model and optimizer it was saved from: give that run's "
        "--model, --set and --optimizer (they are in its train.json), or another --out",
        describe=partial(describe_damage, folder, step),
    )


# ---- 5. Hugging Face's names and files ---------------------------------------------------------

HUGGINGFACE_MODULES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
HUGGINGFACE_FIELDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
# what model.py computes and has no field for: in a folder that is read, another value is refused
LLAMA = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
STRETCH = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def huggingface_name(name) -> str:
    """layers.7.attention.wq.weight -> model.layers.7.self_attn.q_proj.weight"""
    block, module = re.fullmatch(r"(layers\.\d+\.|)(.+)\.weight", name).groups()
    return f"{block and 'model.' + block}{HUGGINGFACE_MODULES[module]}.weight"


def read_json(path):
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error


def config_from_huggingface(path) -> dict:
    """Fields of model.py:ModelConfig, read from the config.json of a Hugging Face folder.

    Raises:  ValueError if it is no Llama, or one that model.py does not compute.
    """
    path = Path(path) / "config.json"
    # what transformers leaves out of the file has the defaults of its LlamaConfig
    c = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | LLAMA | read_json(path)
    absent = [key for key in HUGGINGFACE_FIELDS.values() if key not in c]
    if absent:
        raise ValueError(f"{path} has no {absent[0]}: it describes no Llama")
    config = {ours: c[theirs] for ours, theirs in HUGGINGFACE_FIELDS.items()}
    # transformers 5 keeps the base in the same dictionary as the stretch, 4 beside it
    rope = {"rope_theta": c.get("rope_theta", 10000.0)} | (c.get("rope_scaling") or {})
    rope |= c.get("rope_parameters") or {}
    rope_type = rope.setdefault("rope_type", rope.get("type", "default"))
    head_dim = config["dim"] // config["n_heads"]
    expected = LLAMA | {"head_dim": head_dim} | (STRETCH if rope_type != "default" else {})
    found = {"head_dim": head_dim} | c | rope
    for key, value in expected.items():
        if found.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {found[key]}, but model.py computes {value} only")
    config |= {"rope_theta": float(rope["rope_theta"]), "rope_factor": 1.0}
    if rope_type != "default":
        config["rope_factor"] = float(rope["factor"])
        config["rope_original_seq_len"] = rope["original_max_position_embeddings"]
    return config


def config_to_huggingface(config, *, seq_len, dtype) -> dict:
    """config.json for the fields of a ModelConfig, spelled as transformers 4 and 5 both read it.

    `max_position_embeddings` bounds what may be asked of the model: the length that the stretched
    RoPE is made for or, if it is not stretched, that of the training sequences.
    """
    c = {"architectures": ["LlamaForCausalLM"], "rope_scaling": None} | LLAMA
    c |= {theirs: config[ours] for ours, theirs in HUGGINGFACE_FIELDS.items()}
    c |= {"rope_theta": config["rope_theta"], "max_position_embeddings": seq_len}
    c |= {"head_dim": config["dim"] // config["n_heads"], "torch_dtype": str(dtype).split(".")[1]}
    factor, original = config["rope_factor"], config["rope_original_seq_len"]
    if factor != 1.0:
        c["max_position_embeddings"] = max(seq_len, int(original * factor))
        c["rope_scaling"] = STRETCH | {"factor": factor}
        c["rope_scaling"]["original_max_position_embeddings"] = original
    return c


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of an export
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAFETENSORS_BYTES = 5 * 10**9  # of a file, at most: where transformers cuts as well
INDEX = "model.safetensors.index.json"  # which file holds which tensor


def open_safetensors(folder) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder by name, mapped: the disk is read where one is used.

    A file is the header's length (8 bytes, little endian), the header (JSON) and the raw tensors.
    """
    names = ["model.safetensors"]
    if (folder / INDEX).exists():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    tensors = {}
    for name in names:
        with open(folder / name, "rb") as file:  # a private copy, as torch wants writable memory
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for key, entry in header.items():
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                raise ValueError(f"{key} in {name} is of type {entry['dtype']}, not a plain float")
            flat = torch.frombuffer(
                content,
                dtype=SAFETENSORS_DTYPES[entry["dtype"]],
                count=math.prod(entry["shape"]),
                offset=start + entry["data_offsets"][0],
            )
            tensors[key] = flat.view(entry["shape"])
    return tensors


def write_safetensors(path, shapes, read, *, dtype):
    """Write tensors {name: shape} into one file; read(name) gives one at a time."""
    code = next(code for code, known in SAFETENSORS_DTYPES.items() if known == dtype)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(read(name).to(dtype).flatten().view(torch.uint8).numpy())


# ---- 6. Weights to start from ------------------------------------------------------------------


def find_checkpoint(flag, path) -> Path:
    """The published checkpoint that PATH is, or the newest in PATH or PATH/checkpoints."""
    path = Path(path)
    if (path / ".metadata").is_file() and ".tmp-" not in path.name:
        return path
    for folder in (path, path / "checkpoints"):
        if steps := list_checkpoints(folder):
            return checkpoint_path(folder, steps[-1])
    there = "there is no such folder"
    if path.is_dir():
        there = f"it holds {', '.join(sorted(os.listdir(path))[:4]) or 'nothing'}"
    raise ValueError(
        f"{flag} {path} is no checkpoint ({there}): a published one is a folder step-... with "
        ".metadata in it: give one, or the --out of a run that saved one"
    )


def check_init_from(path, config) -> Path:
    """Return the folder that --init-from PATH means, if the model in it is the one of this run.

    Args:    config, {field: value} of this run's ModelConfig. What no shape of a weight tells is
             compared too: heads, RoPE, eps.
    Raises:  ValueError. Needs no process group, so a wrong folder can be told before there is one.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        there = config_from_huggingface(folder)
    else:
        folder = find_checkpoint("--init-from", path)
        there = read_json(folder / "train.json").get("model", {})
    if there.get("rope_factor") == 1.0:
        there.pop("rope_original_seq_len", None)  # means nothing then
    differing = {key: value for key, value in there.items() if config.get(key) != value}
    if differing:
        both = ", ".join(f"{k} is {v} there and {config.get(k)} here" for k, v in differing.items())
        settings = " ".join(f"{key}={str(value).lower()}" for key, value in differing.items())
        raise ValueError(
            f"--init-from {path} conflicts with this run's model: {both}: weights mean something "
            f"only in the model they were trained in: add --set {settings}"
        )
    return folder


@torch.no_grad()
def copy_slice(target, whole):
    """Fill this rank's part of a weight from the whole one, reading nothing else of it."""
    if isinstance(target, DTensor):
        (chunk,) = target.__create_chunk_list__()  # where the local tensor lies in the whole one
        spans = zip(chunk.offsets, chunk.sizes, strict=True)
        whole = whole[tuple(slice(start, start + size) for start, size in spans)]
        target = target.to_local()
    target.copy_(whole)  # bf16 -> float32, for instance


def open_huggingface(folder, wanted):
    """As open_checkpoint; keys are Hugging Face's names."""
    tensors = open_safetensors(folder)
    for key in tensors.keys() - wanted.keys():
        # computed by model.py, and a second copy of a tied weight
        if key.endswith("rotary_emb.inv_freq") or key == "lm_head.weight":
            del tensors[key]

    def read(state):
        for key, tensor in state.items():
            copy_slice(tensor, tensors[key])

    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}, read


def load_weights(path, model_parts, *, shapes) -> None:
    """Read the weights of --init-from PATH, in place, on whatever mesh this is.

    path       a checkpoint, a folder of them (the newest is taken) or a Hugging Face folder.
    shapes     {parameter name: full shape} of the whole model, the same on all ranks.
    Raises:    ValueError, the same on all ranks: another model, or unreadable files.
    Costs:     each rank reads its own slices.
    """
    is_huggingface = (Path(path) / "config.json").is_file()
    rename = huggingface_name if is_huggingface else "model.{}".format
    wanted = {rename(name): tuple(shape) for name, shape in shapes.items()}
    state = {rename(k.removeprefix("model.")): v for k, v in build_state(model_parts, None).items()}

    def open_source():
        folder = check_init_from(path, dataclasses.asdict(model_parts[0].config))
        if is_huggingface:
            return open_huggingface(folder, wanted)
        return open_checkpoint(folder, "model.")

    flag = f"--init-from {path}"

    def describe(error):
        if str(error).startswith(flag):  # a refusal of check_init_from
            return str(error)
        return (
            f"{flag} conflicts with its files ({describe_error(error)}): weights come from a whole "
            "checkpoint, or the config.json and safetensors of a Llama: give another path"
        )

    way_out = "weights fit only their own model: give its --model and --set, or another path"
    fill_state(state, wanted, open_source, where=flag, way_out=way_out, describe=describe)


# ---- 7. The tool -------------------------------------------------------------------------------


def format_bytes(n_bytes) -> str:
    return f"{n_bytes / 2**30:,.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.2f} MiB"


def print_list(out):
    """A line per step, oldest first; what does not count is marked."""
    folder = Path(out) / "checkpoints"
    folder = folder if folder.is_dir() else Path(out)
    found = [(path, re.match(r"step-(\d{8,})", path.name)) for path in folder.glob("step-*/")]
    paths = sorted((int(match[1]), path) for path, match in found if match)
    if not paths:
        find_checkpoint("OUT", out)  # says what is there instead
    published = list_checkpoints(folder)
    for step, path in paths:
        size = sum(file.stat().st_size for file in path.iterdir())
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        facts = read_json(path / "train.json") if (path / "train.json").is_file() else {}
        mark = "" if path == checkpoint_path(folder, step) and step in published else (
            "  (set aside: does not count)" if ".set-aside-" in path.name else
            "  (unfinished or half deleted: does not count)"
        )  # fmt: skip
        print(f"{path.name}  {date}  {format_bytes(size)}  {facts.get('tokens', 0):,} tokens  "
              f"--model {facts.get('flags', {}).get('model', '?')}{mark}")  # fmt: skip


def print_contents(path):
    """The tensors of a checkpoint, those of all layers in one row, and its train.json."""
    counts, totals = Counter(), Counter()
    for key, entry in read_metadata(path).state_dict_metadata.items():
        kind = re.sub(r"\.\d+\.", ".*.", key), tuple(entry.size), entry.properties.dtype
        counts[kind] += 1
        totals[key.split(".")[0]] += math.prod(entry.size) * kind[2].itemsize
    print(f"{path}\nnumber  shape of each   dtype             all  key")
    for (key, shape, dtype), count in sorted(counts.items(), key=str):
        size = format_bytes(count * math.prod(shape) * dtype.itemsize)
        shape = " x ".join(map(str, shape)) or "scalar"
        print(f"{count:>6}  {shape:<14}  {str(dtype)[6:]:<8} {size:>12}  {key}")
    print("sum: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in totals.items()))
    for key, value in read_json(path / "train.json").items():
        if isinstance(value, dict):
            value = " ".join(f"{name}={item}" for name, item in value.items())
        print(textwrap.fill(f"{key}: {value}", 100, subsequent_indent="    "))


@contextmanager
def publish_folder(path):
    """Give a temporary folder beside `path` that takes its name when the block has ended well."""
    if path.exists():
        raise ValueError(
            f"--to {path} conflicts with what is there: an export overwrites nothing: give a new "
            "name, or remove it"
        )
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.iterdir(), temporary):
            fsync_path(written)
        temporary.rename(path)
        fsync_path(path.parent)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def export_torch(path, folder):
    """weights.pt, for torch.load: the state dict of model.py's Transformer, all in memory once."""
    shapes, read_state = open_checkpoint(path, "model.")
    state = {key: torch.empty(shape) for key, shape in shapes.items()}
    read_state(state)
    weights = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])  # tied: stored once
    torch.save(weights, folder / "weights.pt")


def export_tokenizer(tokenizer, folder, *, vocab_size) -> dict:
    """Write what transformers reads of "bytes" (nothing) or a tiktoken file, or None if unknown.

    Returns: {"bos_token_id": ..., "eos_token_id": ...}, the ids that data.py gives them.
    """
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    n_ranks = 256
    if tokenizer is None:
        print("no tokenizer written: the run's file is not here; give it by --tokenizer FILE")
        return dict.fromkeys(["bos_token_id", "eos_token_id"])
    if tokenizer != "bytes":
        n_ranks = len(Path(tokenizer).read_bytes().split()) // 2  # lines of "base64 rank"
        shutil.copy(tokenizer, folder / "tokenizer.model")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True} | names
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    if n_ranks + 2 > vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer} has {n_ranks + 2} tokens with begin and end, but the model's "
            f"vocab_size is {vocab_size}: every token needs a row: give the one it was trained with"
        )
    return {"bos_token_id": n_ranks, "eos_token_id": n_ranks + 1}


def export_huggingface(path, folder, *, dtype, tokenizer):
    """What transformers opens as LlamaForCausalLM, one tensor in memory at a time."""
    facts = read_json(path / "train.json")
    flags, config = facts["flags"], facts["model"]
    own = flags["tokenizer"]
    if tokenizer is None and (own == "bytes" or Path(own).is_file()):
        tokenizer = own
    ids = export_tokenizer(tokenizer, folder, vocab_size=config["vocab_size"])
    stored, read_state = open_checkpoint(path, "model.")
    keys = {huggingface_name(key.removeprefix("model.")): key for key in sorted(stored)}

    def read(name):
        state = {name: torch.empty(stored[keys[name]])}
        read_state({keys[name]: state[name]})
        return state[name]

    parts, size = [{}], 0
    for name, key in keys.items():
        n_bytes = math.prod(stored[key]) * dtype.itemsize
        if parts[-1] and size + n_bytes > SAFETENSORS_BYTES:
            parts, size = [*parts, {}], 0
        parts[-1][name], size = stored[key], size + n_bytes
    weight_map = {}
    for i, shapes in enumerate(parts, start=1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(folder / file, shapes, read, dtype=dtype)
        weight_map |= dict.fromkeys(shapes, file)
        print(file, flush=True)
    total_size = sum(math.prod(shape) for shape in stored.values()) * dtype.itemsize
    for name, content in (
        ("config.json", config_to_huggingface(config, seq_len=flags["seq_len"], dtype=dtype) | ids),
        ("generation_config.json", ids),
        (INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Look into checkpoints and carry their weights out. The way in is train.py "
        "--init-from, which reads checkpoints and Hugging Face folders as they are.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ckpt = {"metavar": "CKPT", "help": "a folder step-..., or a run's --out, for its newest"}
    add = commands.add_parser("list", help="steps, dates, sizes; marks what does not count")
    out = {"nargs": "?", "default": "out", "metavar": "OUT"}
    add.add_argument("checkpoint", **out, help="a run's --out (default: out)")
    add = commands.add_parser("inspect", help="tensors, shapes, dtypes, bytes and train.json")
    add.add_argument("checkpoint", **ckpt)
    add = commands.add_parser("export", help="weights for Hugging Face, or one torch file")
    add.add_argument("--from", dest="checkpoint", required=True, **ckpt)
    add.add_argument("--to", required=True, type=Path, help="new folder, whole once it exists")
    kinds = "hf: opens as LlamaForCausalLM (default); torch: weights.pt, a state dict of model.py"
    add.add_argument("--format", choices=("hf", "torch"), default="hf", help=kinds)
    sizes = "of hf: fp32 as trained (default); bf16 halves the size, but rounds"
    add.add_argument("--dtype", choices=DTYPES, default="fp32", help=sizes)
    add.add_argument("--tokenizer", help="Llama 3's tokenizer.model (default: the run's own)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    warnings.filterwarnings("ignore", "torch.distributed is")  # not initialised: none is needed
    try:
        if args.command == "list":
            print_list(args.checkpoint)
        elif args.command == "inspect":
            print_contents(find_checkpoint("CKPT", args.checkpoint))
        else:
            path = find_checkpoint("--from", args.checkpoint)
            with publish_folder(args.to) as folder:
                if args.format == "torch":
                    export_torch(path, folder)
                else:
                    dtype = DTYPES[args.dtype]
                    export_huggingface(path, folder, dtype=dtype, tokenizer=args.tokenizer)
            print(f"{args.to} holds the weights of {path}")
    except ValueError as error:
        sys.exit(f"checkpoint.py: {error}")
    except (Exception, CheckpointException) as error:  # damaged files fail in many ways
        sys.exit(f"checkpoint.py: {args.checkpoint} cannot be used: {describe_error(error)}")


if __name__ == "__main__":
    main()

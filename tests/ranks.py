"""Run a function on several gloo ranks, forked from this process: `run_ranks(4, check, arg, ...)`.

Forking shares the imported torch, so two ranks start in well under a second where torchrun takes
more than three. Every rank has one thread, a process group with a short timeout and the environment
variables that torchrun would set. What the function returns (anything picklable) comes back as a
list in rank order; an exception on any rank fails the test with every rank's traceback, the first
failure first, and a hang is killed after `timeout_s`.

`run_program(2, "--steps 5 ...")` runs train.py's main that way, as `torchrun` would: it joins the
ranks itself. It returns the exit status of the ranks and what they printed.

`train_on` is `run_program` for a tiny model that must succeed, `metrics_of` what it logged, and
`make_job("--tp 2 ...")`, inside a rank, the job that train.py's main would train.

`async_tp_graphs` needs a process of its own: what AsyncTP makes of a block on a tp group that is
only pretended.
"""

import json
import multiprocessing
import os
import pickle
import shlex
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(world_size, function, *args, timeout_s=180):
    """Return [function(*args) on rank 0, ... on rank world_size - 1]."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_rank_main, args=(r, world_size, folder, function, args))
            for r in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [r for r, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        failures = sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures or hung:
            texts = [f"--- {path.name}\n{path.read_text()}" for path in failures]
            raise AssertionError(f"ranks still running: {hung}\n" + "\n".join(texts))
        died = [r for r, process in enumerate(processes) if process.exitcode != 0]
        assert not died, f"ranks died without a traceback: {died}"
        return [
            pickle.loads((Path(folder) / f"result-{r}").read_bytes()) for r in range(world_size)
        ]


TINY = (
    "--set dim=32 n_layers=2 n_heads=4 n_kv_heads=2 ffn_dim=48 vocab_size=300 --seq-len 32 "
    "--local-batch-size 2 --log-every 1 --data text"
)


def train_on(world_size, flags, folder, before=None):
    """Run the program on a tiny model and return rank 0's output; it must succeed."""
    codes, outputs = run_program(world_size, f"{TINY} {flags}", cwd=folder, before=before)
    assert codes == [0] * world_size, "\n".join(outputs)
    assert not any(outputs[1:]), "only rank 0 prints"
    return outputs[0]


def metrics_of(folder, out):
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder, out):
    return [row["loss"] for row in metrics_of(folder, out)]


def make_job(flags):
    """(args, job) of train.py's flags on the ranks of this process group."""
    import train

    world_size, hardware = dist.get_world_size(), train.Hardware("cpu", None, None)
    args, config = train.read_flags(shlex.split(flags), hardware, world_size)
    return args, train.start(args, train.build(args, config, torch.device("cpu")))


def async_tp_graphs(tp, cases):
    """For each flags: collectives of a block's forward and of its backward, after the pass.

    Both graphs are compiled as for CUDA, up to the machine code, which nobody runs.
    Returns: [({name: number} of the forward, of the backward), ...]
    """
    import torch._functorch.config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import post_grad
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import float8
    import train

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    dist.is_nccl_available = lambda: True  # else the pass returns at once
    float8.gather_float8_as_bytes = lambda: None  # for gloo only
    torch._functorch.config.force_non_lazy_backward_lowering = True  # with the forward
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    AsyncCompile.cpp_pybinding = lambda *_: None
    overlap, h100 = post_grad.micro_pipeline_tp_pass, train.Hardware("cuda", (9, 0), None)
    found = []
    for flags in cases:
        graphs = []

        def spy(graph, graphs=graphs):
            overlap(graph)
            calls = [node.target for node in graph.nodes if node.op == "call_function"]
            sending = ("_c10d_functional", "symm_mem")
            names = [c.__name__ for c in calls if getattr(c, "namespace", None) in sending]
            graphs.append(dict(Counter(name.split(".")[0] for name in names)))
            if len(graphs) == 2:
                raise StopIteration("both are seen")

        post_grad.micro_pipeline_tp_pass = spy
        torch._dynamo.reset()
        argv = f"--tp {tp} --compile --async-tp {flags}".split()
        args, config = train.read_flags(argv, h100, tp)
        job = train.start(args, train.build(args, config, torch.device("cpu")))
        try:
            job.stages[0](torch.zeros(args.local_batch_size, args.seq_len, dtype=torch.int64))
        except Exception:
            if len(graphs) < 2:
                raise
        found.append(graphs)
    return found


def run_program(world_size, flags, *, cwd, before=None, timeout_s=180, grace_s=1):
    """Run `train.py flags` on forked ranks; `before(rank)` may patch things in the child first.

    When a rank fails the others get SIGTERM and, `grace_s` later, SIGKILL, as from torchrun.
    Returns: ([exit status of each rank], [stdout and stderr of each rank])
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):  # a rank may be stopped before it begins
            (Path(folder) / f"output-{rank}").touch()
        args = (world_size, folder, shlex.split(flags), Path(cwd), port, before)
        processes = [
            context.Process(target=_program_main, args=(r, *args)) for r in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline, stopping = time.monotonic() + timeout_s, False
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            failed = [p for p in processes if not p.is_alive() and p.exitcode != 0]
            if failed and not stopping:
                stopping = True
                for process in processes:
                    process.terminate()
                deadline = min(deadline, time.monotonic() + grace_s)
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        outputs = [(Path(folder) / f"output-{r}").read_text() for r in range(world_size)]
    return [process.exitcode for process in processes], outputs


def _program_main(rank, world_size, folder, argv, cwd, port, before):
    _set_environment(rank, world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    descriptor = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
    import train

    os.chdir(cwd)
    status = 1
    try:
        if before:
            before(rank)
        train.run(argv)
        status = 0
    except SystemExit as exit_:
        status = exit_.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def _set_environment(rank, world_size):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)


def _rank_main(rank, world_size, folder, function, args):
    _set_environment(rank, world_size)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(*args)
        dist.destroy_process_group()
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (Path(folder) / f"error-rank-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # skip the parent's exit handlers, which belong to pytest

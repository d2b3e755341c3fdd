"""gpu_check.py: without a GPU its smoke mode and its arithmetic, with one the real thing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest
import torch

import model

SCRIPT = Path(__file__).with_name("gpu_check.py")


def run_script(*flags, timeout_s):
    command = [sys.executable, str(SCRIPT), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1" if flags else "8"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def statuses(output):
    """{name of a check: its status}."""
    lines = [line.split(maxsplit=1) for line in output.splitlines()]
    found = {}
    for status, text in (line for line in lines if len(line) == 2):
        if status in ("ok", "skipped", "FAILED"):
            found[text.split(":")[0].split(" (")[0]] = status
    return found


def test_every_check_passes_on_tiny_shapes_and_only_cuda_s_own_is_skipped():
    done = run_script("--cpu", timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = statuses(done.stdout)
    skipped = [name for name, status in found.items() if status == "skipped"]
    assert skipped == ["no host sync"]
    float8 = [f"float8 {recipe}" for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
    others = ("throughput", "simulated memory")
    assert set(found) == {*gpu_check.CHECKS, *float8, *gpu_check.ROWS, *others}
    table = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in table] == ["", "---", *gpu_check.ROWS]
    assert {len(row) for row in table} == {8}, "its name, five numbers and the two ends"


def test_a_failed_check_is_counted_with_its_line_and_the_next_one_runs(capsys):
    def broken():
        raise ValueError("what went wrong")

    def inapplicable():
        raise gpu_check.Skip("no such hardware")

    report = gpu_check.Report()
    assert report.run("first", broken) is None
    assert report.run("second", inapplicable) is None
    assert report.run("third", lambda x: x + 1, 2) == 3
    report.end_s -= gpu_check.LIMIT_S - gpu_check.CHECK_S + 1
    assert report.run("fourth", lambda: "never called") is None
    assert report.n_failed == 1
    output = capsys.readouterr().out
    assert "what went wrong" in output and 'raise ValueError("what went wrong")' in output
    assert [line.split("  [")[0] for line in output.splitlines() if "  [" in line][1:] == [
        "skipped  second (no such hardware)",
        "ok       third: 3",
        "skipped  fourth (the time is used up)",
    ]


def test_gaps_are_the_times_when_all_streams_are_idle():
    """Two streams:  A 0-10 | B 2-30 | C 12-20 |           D 50-60 | E 61-70."""

    def event(name, start, end, device="CUDA", note=False):
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            device_type=SimpleNamespace(name=device),
            is_user_annotation=note,
        )

    events = [
        event("E", 61, 70),
        event("A", 0, 10),
        event("C", 12, 20),
        event("B", 2, 30),
        event("D", 50, 60),
        event("launch", 31, 49, device="CPU"),
        event("FSDP::all_gather", 0, 70, note=True),
    ]
    assert gpu_check.find_gaps(events) == [(20, "B", "D"), (1, "D", "E")]
    assert gpu_check.find_gaps([]) == []


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F<a::b>, int>(int, T)",
         "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*)",
         "CatArrayBatchedCopy"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "),
    ],
)  # fmt: skip
def test_kernel_names_are_cut_to_what_tells_them_apart(kernel, short):
    assert gpu_check.short_name(kernel) == short


@pytest.mark.parametrize("free_gib", [79, 139, 178])
def test_the_cut_model_leaves_a_tenth_of_the_memory_free_and_uses_half(free_gib):
    """States of 16 bytes per parameter, float32 logits three times, bf16 activations of --ac op."""
    free_bytes = free_gib * 2**30
    n_layers, local_batch_size = gpu_check.shape_that_fits(free_bytes, 8192)
    per_layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    n_parameters = n_layers * per_layer + 2 * 128256 * 4096 + 4096
    assert n_parameters < model.count_parameters(model.MODELS["8b"]) + 1
    n_tokens = local_batch_size * 8192
    # block input, wq's result and attention's | wv's | w1's
    activations = n_layers * n_tokens * 2 * (3 * 4096 + 1024 + 14336)
    used = 16 * n_parameters + 12 * n_tokens * 128256 + activations
    assert used < 0.9 * free_bytes, "the rest is for gathered weights and what comes and goes"
    assert used > 0.5 * free_bytes or n_layers == 32, "a fuller GPU is more like the real model"


def test_a_gpu_without_room_for_a_layer_is_skipped_with_its_size():
    with pytest.raises(gpu_check.Skip, match="24 GiB"):
        gpu_check.shape_that_fits(24 * 2**30, 8192)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_check_passes_on_this_gpu():
    done = run_script(timeout_s=500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr

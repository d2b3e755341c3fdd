"""One thread per process, set before torch is imported: the tests fork ranks that share the cores,
and a process that has already started an OpenMP pool cannot be forked safely."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with some text: 20 documents, each a sentence of its own repeated."""
    path = tmp_path_factory.mktemp("run")
    (path / "text").mkdir()
    for k in range(20):
        (path / "text" / f"{k:02}.txt").write_text(f"document {k} says {k * k}. " * (3 + k % 7))
    return path

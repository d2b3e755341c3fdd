"""One thread per process, set before torch is imported: the tests fork ranks that share the cores,
and a process that has already started an OpenMP pool cannot be forked safely."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

#!/bin/bash
# One training job on SLURM, preempted and requeued as often as it must be.
#
#   sbatch --nodes 32 recipes/slurm.sh @recipes/llama3_70b.args --data tokens --tokenizer tokenizer.model
#
# SLURM sends SIGUSR1 to this script 300 s before the time limit, and SIGTERM at preemption; the trap
# hands SIGUSR1 to every torchrun, which must be told to pass it on (--signals-to-handle) and to give
# the ranks longer than its default of 30 s to end the step and save (--shutdown-timeout). All ranks
# agree on the step, save and exit with status 0; torchrun itself reports 1 after a signal. The job then
# requeues itself, and the same command resumes from the newest checkpoint.
# Tested with stand-ins for SLURM's commands on one machine; it has not run under SLURM itself.
#SBATCH --job-name=llama3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -uo pipefail
signalled=0
trap 'signalled=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1 TERM # to the steps, not to this shell

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# exec: the signal must reach torchrun itself. A crashed rank restarts all of them up to 3 times.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$0:29500" \
    --max-restarts 3 --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 240 \
    train.py "$@"' "$head_node" "$@" &
training=$!
wait "$training"
status=$?
if [ "$signalled" = 1 ]; then
    wait "$training" # the first wait ended with the signal, not with the job
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"

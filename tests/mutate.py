"""Plant slips, one at a time, in a copy of this repository, and see that a test notices each.

    python tests/mutate.py              all of them, 5 to 10 s each
    python tests/mutate.py rope norm    those whose name holds one of these words

A slip is one plausible wrong edit: (what it is, file, old text, new text, the test that must fail,
as FILE::EXPRESSION of pytest's -k).
The old text must stand in the file exactly once, so that a slip cannot rot unnoticed: the default
suite asks that of all (test_house.py), and `pytest -m soak` runs them.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SLIPS = [
    # what pretrain connects
    ("a save does not ask whether its step is finite", "train.py",
     "    watch.check_finite(step, stats, job.weights)\n    try:", "    try:",
     "test_watch.py::test_a_gradient_that_is_not_finite_stops_all_ranks_and_is_not_saved"),
    ("a run that logs nothing never asks whether it is finite", "train.py",
     "                watch.check_finite(step - 1, read_stats(), job.weights)\n", "",
     "test_watch.py::test_a_gradient_that_is_not_finite_stops_all_ranks_and_is_not_saved"),
    ("the optimizer does not wait for the copy of a save", "checkpoint.py",
     "register_step_pre_hook(lambda *_: self.wait_for_staging())",
     "register_step_pre_hook(lambda *_: None)",
     "test_checkpoint.py::test_the_optimizer_waits_by_itself_until_a_save_has_its_copy"),
    ("resume takes step times batch for the position", "train.py",
     'position = state["sequences"] if state else 0',
     "position = done * args.global_batch_size",
     "test_train.py::test_a_resumed_run_goes_on_where_the_data_stopped_and_keeps_what_it_came_from"),
    ("the folder is not held", "train.py",
     "with checkpoint.hold_folder(args.out) if is_main else nullcontext():", "with nullcontext():",
     "test_train.py::test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon"),
    ("retention may delete what the run was resumed from", "train.py",
     "protected_step=done or None", "protected_step=None",
     "test_train.py::test_a_resumed_run_goes_on_where_the_data_stopped_and_keeps_what_it_came_from"),
    ("garbage is collected whenever Python likes", "train.py", "gc.disable()", "gc.enable()",
     "test_train.py::test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon"),
    ("timeouts stay long after the first step", "train.py", "if step == done + 1:", "if step < 0:",
     "test_train.py::test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon"),
    ("the timeout of a checkpoint's group is shortened too", "watch.py",
     "        if group is not but:\n", "        if group:\n",
     "test_watch.py::test_a_slow_write_outlives_the_timeout_that_ends_a_hang"),
    ("the loop does not say which group is a checkpoint's", "train.py",
     "but=checkpointer and checkpointer.group", "but=None",
     "test_train.py::test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon"),
    ("float8 scales stay those of the weights before a step", "train.py",
     "    job.optimizer.zero_grad()\n    refresh_scales(job)\n", "    job.optimizer.zero_grad()\n",
     "test_train.py::test_float8_scales_are_those_of_the_weights_whenever_these_have_changed"),
    ("float8 scales stay those of the weights before a load", "train.py",
     "    refresh_scales(job)\n    dist.barrier()", "    dist.barrier()",
     "test_train.py::test_float8_scales_are_those_of_the_weights_whenever_these_have_changed"),
    ("a request to end is not passed on", "train.py", "wants_stop=bool(signals)", "wants_stop=0",
     "test_watch.py::test_sigterm_on_one_rank_ends_all_after_the_same_step_with_a_checkpoint"),
    ("the wait for data is not counted", "train.py",
     "            metrics.data_s += loader.wait_s\n", "",
     "test_watch.py::test_metrics_have_the_documented_keys"),
    ("the learning rate stays the first one", "train.py",
     'group["lr"] = lr * group.get("lr_scale", 1.0)', "pass",
     "test_train.py::test_a_run_holds_its_folder_and_collects_no_garbage_and_notices_hangs_soon"),
    ("the global batch forgets replicas", "train.py",
     "args.global_batch_size = args.local_batch_size * args.dp_replicate * args.dp_shard",
     "args.global_batch_size = args.local_batch_size * args.dp_shard",
     "test_train.py::test_what_is_not_given_follows_from_the_mesh"),
    ("weights ignore --seed", "train.py",
     "config=job.config, seed=args.seed, device=weight_device",
     "config=job.config, seed=0, device=weight_device",
     "test_train.py::test_the_program_trains_as_the_plainest_loop"),
    ("the order of the data ignores --seed", "train.py",
     "seq_len=seq_len, seed=args.seed)", "seq_len=seq_len, seed=0)",
     "test_train.py::test_the_program_trains_as_the_plainest_loop"),
    ("a second group's learning rate is overwritten", "train.py",
     'lr * group.get("lr_scale", 1.0)', "lr",
     "test_train.py::test_another_optimizer_keeps_its_rates_and_its_slots_on_any_mesh"),
    # what ranks compare
    ("batches are not compared", "watch.py", ', ("batch", data_rank): checksum(inputs)}', "}",
     "test_watch.py::test_ranks_of_one_data_rank_that_read_another_token_are_named"),
    ("validation texts are not compared", "train.py",
     '    texts["val-data (its tokens)"] = val_tokens and val_tokens.fingerprint\n', "",
     "test_watch.py::test_ranks_that_see_other_text_are_told_so"),
    ("replicas scale by the norms that each of them found", "parallel.py",
     'dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh["dp_replicate"].get_group())', "pass",
     "test_parallel.py::test_replicas_scale_by_one_norm_though_they_found_two"),
    # what a checkpoint promises
    ("a checkpoint has its name before train.json is in it", "checkpoint.py",
     '        (self.path / "train.json").write_text(self.train_state, "utf-8")\n'
     '        fsync_path(self.path / "train.json")\n'
     "        super().finish(metadata, results)  # writes .metadata and fsyncs it\n"
     "        fsync_path(self.path)\n        self.path.rename(self.final)\n",
     "        super().finish(metadata, results)\n"
     "        fsync_path(self.path)\n        self.path.rename(self.final)\n"
     '        (self.final / "train.json").write_text(self.train_state, "utf-8")\n'
     '        fsync_path(self.final / "train.json")\n',
     "test_checkpoint.py::test_a_checkpoint_gets_its_name_when_all_of_it_is_flushed"),
    ("a checkpoint's folder is not flushed before it has its name", "checkpoint.py",
     "        fsync_path(self.path)\n        self.path.rename", "        self.path.rename",
     "test_checkpoint.py::test_a_checkpoint_gets_its_name_when_all_of_it_is_flushed"),
    ("the new name is not flushed", "checkpoint.py", "        fsync_path(self.final.parent)\n", "",
     "test_checkpoint.py::test_a_checkpoint_gets_its_name_when_all_of_it_is_flushed"),
    # numbers
    ("rope: the table is rounded to bf16", "model.py",
     "torch.stack([angles.cos(), angles.sin()]).float()",
     "torch.stack([angles.cos(), angles.sin()]).bfloat16().float()",
     "test_model.py::test_rotation_is_exact_to_float32_far_into_a_long_context"),
    ("rope: angles are made in float32", "model.py",
     "torch.outer(positions.to(torch.float64), frequencies)",
     "torch.outer(positions.float(), frequencies.float())",
     "test_model.py::test_rotation_is_exact_to_float32_far_into_a_long_context"),
    ("rope: computed in the activations' bf16", "model.py",
     "cos, sin = rope[:, : x.shape[1], None, :]", "cos, sin = rope.to(x)[:, : x.shape[1], None, :]",
     "test_model.py::test_rotation_is_exact_to_float32_far_into_a_long_context"),
    ("a tied head multiplies nothing", "model.py",
     "6 * (config.vocab_size * config.dim + config.dim)",
     "6 * (config.vocab_size * config.dim * (not config.tied_embeddings) + config.dim)",
     "test_model.py::test_parameters_and_flops_are_the_published_ones"),
    ("rates count the time of an evaluation", "watch.py",
     "elapsed_s = now_s - self.since_s", "elapsed_s = time.perf_counter() - self.since_s",
     "test_watch.py::test_the_numbers_of_a_row_are_those_of_the_steps_since_the_last"),
    ("rates count from the start of the run", "watch.py",
     "        self.start_interval(step)\n\n    def write", "\n    def write",
     "test_watch.py::test_the_numbers_of_a_row_are_those_of_the_steps_since_the_last"),
    # experts
    ("rows are not sorted by expert after the exchange", "parallel.py",
     "    order = number.argsort(stable=True)\n", "    order = torch.arange(len(number))\n",
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and offload"),
    ("experts' gradients are averaged where only tp shards them", "parallel.py",
     '        n_summed *= mesh["efsdp"].size()', "        n_summed *= 1",
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and tp"),
    ("tp has no style for the router", "parallel.py",
     'plan["ffn_norm"] = plan["moe.router"] = Seq', 'plan["ffn_norm"] = Seq',
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and tp"),
    ("a recomputation counts rows again", "model.py",
     "        self.counts.copy_(counts)\n", "        self.load.add_(counts)\n",
     "test_experts.py::test_recomputation_and_compiled_blocks_count_what_a_plain_step_does"),
    ("an evaluation counts rows", "model.py",
     "if block.moe is not None and torch.is_grad_enabled():", "if block.moe is not None:",
     "test_model.py::test_a_forward_pass_leaves_the_counts_and_only_training_adds_them_up"),
    ("loads are summed over data ranks only", "parallel.py",
     'dist.all_reduce(loads, group=mesh["stage"].get_group())',
     'dist.all_reduce(loads, group=mesh["data"].get_group())',
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and tp"),
    ("biases move with every microbatch", "train.py",
     "        local_loss += forward_backward(job, x, y, divisor)\n",
     "        local_loss += forward_backward(job, x, y, divisor)\n"
     "        if job.config.n_experts:\n"
     "            parallel.balance(job.stages, job.mesh, balance_speed=job.balance_speed)\n",
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and accumulated"),
    ("biases are not compared over ranks", "train.py",
     "[*job.weights, *job.biases]", "[*job.weights]",
     "test_experts.py::test_a_bias_that_drifted_stops_the_run_and_is_named"),
    ("the norm is that of one mesh", "parallel.py",
     "norm = norms[0] if len(norms) == 1 else", "norm = norms[0] if norms else",
     "test_experts.py::test_every_mesh_trains_experts_as_one_process and offload"),
    ("all experts are drawn alike", "parallel.py",
     'draw(f"{name}.{number}", parameter.shape[1:])', 'draw(f"{name}.0", parameter.shape[1:])',
     "test_experts.py::test_the_cases_hold_a_full_an_empty_and_an_idle_expert"),
    ("the router computes in bf16", "model.py",
     "wide = torch.promote_types(x.dtype, torch.float32)\n        # a matmul",
     "wide = x.dtype\n        # a matmul",
     "test_model.py::test_a_forward_pass_leaves_the_counts_and_only_training_adds_them_up"),
    ("biases are not loaded", "train.py",
     "[*whole.named_parameters(), *parallel.named_biases(whole)]", "[*whole.named_parameters()]",
     "test_experts.py::test_a_checkpoint_goes_on_at_any_other_ep_and_back"),
    ("a moved bias is left out of an export without a word", "checkpoint.py",
     "if biases and any(bias.any() for bias in read(biases).values()):", "if False:",
     "test_experts.py::test_what_no_family_has_is_not_exported"),
    # techniques of the parity table
    ("--ac op saves w2's product, which nobody reads", "parallel.py",
     "nth in (1, 3, 5)", "nth in (1, 3, 5, 7)",
     "test_parallel.py::test_a_block_holds_fewer_bytes_for_its_backward"),
    ("--ac full saves what op does", "parallel.py",
     "= checkpoint_wrapper(block, preserve_rng_state=False)\n",
     "= checkpoint_wrapper(block, context_fn=selective_contexts, preserve_rng_state=False)\n",
     "test_parallel.py::test_recomputed_matmuls_per_block_are_0_3_and_6_of_7"),
    ("--ac N counts blocks from 0", "parallel.py",
     "(int(number) + 1) % int(ac)", "int(number) % int(ac)",
     "test_parallel.py::test_every_second_block_is_chosen_by_its_global_number_on_any_stage"),
    ("--loss-chunks takes the labels of other tokens under tp", "parallel.py",
     "labels.unflatten(1, (tp, loss_chunks, -1))",
     "labels.unflatten(1, (loss_chunks, tp, -1)).transpose(1, 2)",
     "test_parallel.py::test_every_mesh_trains_as_one_process and chunks"),
    ("--compile compiles the first block only", "parallel.py",
     "    for block in stage.layers.values():\n        region",
     "    for block in list(stage.layers.values())[:1]:\n        region",
     "test_parallel.py::test_every_block_is_compiled"),
    ("--compile --ac op leaves the checkpoint outside of the graph", "parallel.py",
     'region = block if ac == "op" else inner_block(block)', "region = inner_block(block)",
     "test_parallel.py::test_every_block_is_compiled"),
]  # fmt: skip


def plant(folder, slip):
    """Write the slip into the copy; ValueError if its old text is not there exactly once."""
    what, file, old, new, _ = slip
    text = (folder / file).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{what}: {file} holds {text.count(old)} times {old!r}")
    (folder / file).write_text(text.replace(old, new))


def is_caught(slip):
    """Whether its test fails in a copy with the slip; ValueError if no such test was run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "out"))
        plant(folder, slip)
        file, expression = slip[-1].split("::")
        command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{file}", "-k", expression]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        if done.returncode not in (0, 1):
            raise ValueError(f"{slip[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 1


def main(words):
    survived = []
    for slip in SLIPS:
        if not words or any(word in slip[0] for word in words):
            caught = is_caught(slip)
            survived += [] if caught else [slip[0]]
            print(f"{'caught' if caught else 'SURVIVED':<9} {slip[0]}  ({slip[-1]})", flush=True)
    print(f"{len(survived)} survived")
    return survived


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))

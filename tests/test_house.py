"""The ground plan: who imports whom, where flags land, names, and README's map and ladder."""

import ast
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mutate
import pytest
import torch
from ranks import run_program

import data
import simulate
import train

ROOT = Path(__file__).parents[1]
LEAVES = "model data parallel pipeline float8 checkpoint watch".split()
ROOMS = [*LEAVES, "train", "simulate"]
SOURCE = {room: (ROOT / f"{room}.py").read_text() for room in ROOMS}
TREE = {room: ast.parse(text) for room, text in SOURCE.items()}
README = (ROOT / "README.md").read_text()


# ---- 1. Rooms ----------------------------------------------------------------------------------


def imported(tree):
    """Dotted names of all that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_rooms_are_three_floors():
    """Leaves know no sibling, train knows the leaves, simulate train and leaves."""
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(ROOMS)
    allowed = dict.fromkeys(LEAVES, set()) | {"train": {*LEAVES}, "simulate": {*LEAVES, "train"}}
    for room in ROOMS:
        siblings = {name.split(".")[0] for name in imported(TREE[room])} & {*ROOMS}
        assert siblings <= allowed[room], room
        assert siblings == allowed[room] or room == "simulate", f"{room} knows {siblings}"


def test_importing_any_room_needs_no_extra_and_does_no_work():
    """With torchao and all extras out of reach, no process group, and without a word."""
    code = (
        "import sys\n"
        "extras = 'torchao', 'tiktoken', 'pyarrow', 'tensorboard', 'safetensors', 'transformers'\n"
        "sys.modules.update(dict.fromkeys(extras))\n"
        f"import {', '.join(ROOMS)}\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


COPIES = {"local_tensor", "plain_tensors"}  # helpers that two leaves need


def test_no_two_functions_of_the_house_share_a_name_but_copies_of_one_helper():
    found = {}
    for room in ROOMS:
        for node in TREE[room].body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_source_segment(SOURCE[room], node)
                found.setdefault(node.name, []).append((room, text))
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert shared.keys() <= {"main", "parse_args", *COPIES}, shared.keys()
    for name in COPIES & shared.keys():
        assert len({text for _, text in shared[name]}) == 1, f"{name} is not the same everywhere"


def test_flags_stay_in_the_trainer_and_few_functions_take_them_whole():
    assert len(re.findall(r"\bargs\.", SOURCE["train"])) <= 220
    whole = [
        node.name
        for node in TREE["train"].body
        if isinstance(node, ast.FunctionDef) and "args" in [a.arg for a in node.args.args]
    ]
    assert len(whole) <= 18, whole
    for room in LEAVES:
        tools = {"main", "parse_args"}  # of a leaf that is a tool as well
        for node in TREE[room].body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in tools:
                text = ast.get_source_segment(SOURCE[room], node)
                assert not re.search(r"\bargs\.[a-z]|argparse\.Namespace", text), node.name


# ---- 2. Names that torch keeps private ---------------------------------------------------------


def private_names(tree):
    """Modules and attributes that begin with one underscore and are not a file's own."""
    for name in imported(tree):
        yield from (part for part in name.split(".") if re.match(r"_[^_]", part))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "os")):
                yield node.attr


def borrowed(room):
    """(the dotted names of a file's "What we borrow" block, the file without the block)."""
    block = re.search(r"^# What we borrow.*\n((?:#  .*\n)*)", SOURCE[room], flags=re.M)
    if not block:
        return [], SOURCE[room]
    lines = re.sub(r"\.\n#\s+", ".", block[1])  # a long name goes on in the next line
    names = [line[1:].split()[0] for line in lines.splitlines()]
    return names, SOURCE[room].replace(block[0], "")


CUDA_BUILDS_HAVE = "torch._C._distributed_c10d._dump_nccl_trace"


def exists(dotted):
    """Whether a name can be imported, or is set on instances of the class that it names."""
    if dotted == CUDA_BUILDS_HAVE and not torch.backends.cuda.is_built():
        return True
    try:
        pkgutil.resolve_name(dotted)
        return True
    except AttributeError:
        holder, _, name = dotted.rpartition(".")
        return name in inspect.getsource(pkgutil.resolve_name(holder))


@pytest.mark.parametrize("room", ROOMS)
def test_private_names_are_listed_used_and_there(room):
    listed, rest = borrowed(room)
    parts = {part for name in listed for part in name.split(".") if re.match(r"_[^_]", part)}
    found = set(private_names(TREE[room]))
    assert found <= parts, f"not listed in {room}.py: {found - parts}"
    assert [part for part in parts if not re.search(rf"\b{part}\b", rest)] == [], "not used"
    assert [name for name in listed if not exists(name)] == [], "gone from this torch"


# ---- 3. Flags and pointers ---------------------------------------------------------------------


def flags_of(parser):
    """{group: {dest: help string}} of every flag but --help."""
    groups = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.dest != "help":
                groups.setdefault(group.title, {})[action.dest] = action.help
    return groups


def all_flags():
    """{group: {dest: help}} of both programs: simulate.py's are train.py's and a group more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "parse_args", lambda argv, parser: parser)
        return flags_of(simulate.parse_args([]))


FLAGS = {dest: text for group in all_flags().values() for dest, text in group.items()}
# a flag whose function calls it by another name: {flag: that name}
OTHER_NAMES = {
    "model": "MODELS", "no_loss_parallel": "loss_parallel", "pp_schedule": "schedule",
    "checkpoint_mode": "mode", "check_ranks_every": "check_ranks", "world_size": "world_size",
    "async_tp": "async_tp", "float8_all_gather": "scales",
}  # fmt: skip


def source_of(room, name):
    """Source text of a top-level definition, or None."""
    for node in TREE[room].body:
        names = {getattr(node, "name", None)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if name in names:
            return ast.get_source_segment(SOURCE[room], node)
    return None


def test_every_group_of_flags_has_its_room():
    assert flags_of(train.build_parser()).keys() == {*LEAVES, "train"}
    assert all_flags().keys() == {*ROOMS}


@pytest.mark.parametrize("dest", FLAGS)
def test_help_points_to_the_function_that_sees_the_flag(dest):
    match = re.fullmatch(r"\S.* -> (\w+)\.py:(\w+)", FLAGS[dest])
    assert match, f"--{dest}: words, then -> file.py:function"
    text = source_of(match[1], match[2])
    assert text is not None, f"--{dest}: {match[1]}.py:{match[2]} does not exist"
    stem = OTHER_NAMES.get(dest, dest).replace("_", "[_-]")
    assert re.search(rf"(?<![A-Za-z]){stem}(?![a-z])", text), f"{match[2]} never names {stem}"


def test_few_flags_change_their_name_on_the_way():
    assert len(OTHER_NAMES) <= 10


def test_every_pointer_in_text_exists():
    """file.py:name in README, docs, docstrings, comments and recipes."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("recipes/*")]
    paths += [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    n_found = 0
    for path in paths:
        for room, name in re.findall(r"\b(\w+)\.py:(\w+)", path.read_text()):
            if room in ROOMS:
                n_found += 1
                assert source_of(room, name), f"{path.name} names {room}.py:{name}"
    assert n_found > len(FLAGS)


def test_readme_points_to_sections_that_exist_and_quotes_texts_that_are_printed():
    for room, numbers in re.findall(r"`(\w+)\.py`((?:,? (?:and |to )?§\d)+)", README):
        for n in re.findall(r"§(\d)", numbers):
            assert re.search(rf"^# ---- {n}\. ", SOURCE[room], flags=re.M), f"{room}.py §{n}"
    table = README.split("**When something goes wrong.**")[1].split("\n\n")[1]
    quoted = [text for row in table.splitlines()[2:] for text in
              re.findall(r"`(.+?)`", row.split(" | ")[0])]  # fmt: skip
    of_torch = ["Connection closed by peer", "Timed out waiting", "CUDA out of memory"]
    printed = " ".join(SOURCE.values())
    assert len(quoted) > 8 and [text for text in quoted if text not in printed] == of_torch


def test_every_flag_is_read_somewhere_beyond_the_checks():
    for room, own in (("train", flags_of(train.build_parser())), ("simulate", all_flags())):
        used = {
            node.attr
            for function in TREE[room].body
            if isinstance(function, (ast.FunctionDef, ast.ClassDef))
            and not function.name.startswith(("build_parser", "parse_args", "check_"))
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
        }
        flags = {dest for group in own.values() for dest in group}
        if room == "simulate":
            flags = set(own["simulate"])
        axes = {"pp", "dp_replicate", "dp_shard", "cp", "tp"}  # read by name: degrees_of
        assert flags - used - axes == set()


def test_readme_maps_every_flag_and_names_every_room():
    flag_map = README.split("## Flag map")[1].split("\n## ")[0]
    named = {}
    for group, flags in re.findall(r"^\| (\w+) \| (.+?) \|", flag_map, flags=re.M):
        named[group] = set(re.findall(r"`--([a-z0-9-]+)`", flags))
    named.pop("group")
    assert named == {
        group: {dest.replace("_", "-") for dest in flags} for group, flags in all_flags().items()
    }
    for room in ROOMS:
        assert f"| `{room}.py` |" in README, f"{room}.py is missing from the file table"


# ---- 4. README's ladder ------------------------------------------------------------------------


LADDER = "@recipes/ladder.args"


def ladder():
    """[(ranks, all flags of the rung, its other columns)] of README's table."""
    table = README.split("## The ladder")[1].split("\n## ")[0]
    rungs, flags = [], LADDER
    for row in re.findall(r"^\|(.*)\|$", table, flags=re.M)[2:]:
        added, n_ranks, _, *columns = (cell.strip() for cell in row.split("|"))
        flags = f"{flags} {added.strip('`')}".strip()
        rungs.append((int(n_ranks), flags, columns))
    return rungs


def losses_on_rung(rung, folder):
    """Losses of a rung at steps 1, 10 and 20, as the console prints them."""
    n_ranks, flags, _ = ladder()[rung]
    flags = flags.replace("@recipes", f"@{ROOT}/recipes") + f" --out rung-{rung}"
    codes, outputs = run_program(n_ranks, flags, cwd=folder, timeout_s=900)
    assert codes == [0] * n_ranks, outputs
    lines = (folder / f"rung-{rung}" / "metrics.jsonl").read_text().splitlines()
    return ", ".join(f"{row['loss']:.4f}" for row in map(json.loads, lines))


@pytest.fixture(scope="module")
def first_rung(folder):
    return losses_on_rung(0, folder)


def test_each_rung_of_the_ladder_doubles_the_ranks_and_keeps_the_losses():
    assert [n for n, _, _ in ladder()] == [1, 2, 4, 8, 16]
    assert len({columns[-1] for _, _, columns in ladder()}) == 1
    n_ranks, flags, _ = ladder()[2]
    command = f"torchrun --nproc-per-node {n_ranks} train.py {flags}`"
    assert command in " ".join(README.split()), "README spells one of them out"


def test_the_ladder_shows_what_rank_0_holds_and_sends(monkeypatch):
    monkeypatch.chdir(ROOT)
    for n_ranks, flags, columns in ladder():
        _, args, config = simulate.read_command([*flags.split(), "--world-size", str(n_ranks)])
        (row,) = simulate.trace_ranks([(args, config, 0)])
        shapes = {weight["name"]: weight["local_shape"] for weight in row["weights"]}
        sent = {
            axis: sum(kind["sent_bytes"] for kind in kinds.values()) / 2**20
            for axis, kinds in row["collectives"].items()
        }
        assert columns[:3] == [
            f"{sum(row['state_bytes'].values()) / 2**20:.1f} MiB",
            str(tuple(shapes["layers.0.attention.wq.weight"])),
            # less is what the loss, its count of tokens and the norm take
            ", ".join(f"{a} {sent[a]:.3g}" for a in ("fsdp", "tp", "cp", "pp")
                      if sent.get(a, 0) > 0.01),
        ], flags  # fmt: skip


SOAK = [pytest.param(rung, marks=pytest.mark.soak) for rung in (3, 4)]


@pytest.mark.parametrize("rung", [1, 2, *SOAK])
def test_rungs_of_the_ladder_have_the_same_losses_to_the_printed_digits(rung, first_rung, folder):
    assert losses_on_rung(rung, folder) == first_rung


def test_the_losses_are_those_that_readme_prints(first_rung, folder):
    """They depend on the text of Python's standard library: README names whose it was."""
    (named,) = re.findall(r"fingerprint `([0-9a-f]{16})`", README)
    tokens = data.open_tokens(None, "bytes", data_cache=folder / ".cache", is_builder=True)
    if tokens.fingerprint != named:
        pytest.skip(f"README's losses are of tokens {named}, here they are {tokens.fingerprint}")
    assert first_rung == ladder()[0][2][-1]


# ---- 5. Slips ----------------------------------------------------------------------------------


def test_every_slip_of_mutate_can_still_be_planted(tmp_path):
    names = [slip[0] for slip in mutate.SLIPS]
    assert len(names) == len({*names})
    for slip in mutate.SLIPS:
        shutil.copy(ROOT / slip[1], tmp_path)
        mutate.plant(tmp_path, slip)
        compile((tmp_path / slip[1]).read_text(), slip[1], "exec")


@pytest.mark.soak
def test_every_slip_is_caught():
    assert mutate.main([]) == []

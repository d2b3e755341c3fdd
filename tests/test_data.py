"""data.py: text of any shape becomes one stream of tokens, and a step always gets its windows."""

import base64
import errno
import gzip
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import data


def write_bpe(path):
    """A tiny tiktoken file: the 256 bytes and a few merges, ranks 0 ... 259."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", b"  "]
    lines = [base64.b64encode(t) + b" %d" % rank for rank, t in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def bpe(tmp_path):
    return write_bpe(tmp_path / "tiny.model")


def tokenize(files, out, tokenizer="bytes", n_workers=2):
    return data.tokenize_corpus(files, data.load_tokenizer(tokenizer), out, n_workers=n_workers)


def make_shards(folder, tokens, shard_tokens=7, vocab_size=258):
    """A folder of shards by hand, from its description."""
    folder.mkdir()
    shards = []
    for start in range(0, len(tokens), shard_tokens):
        part = np.asarray(tokens[start : start + shard_tokens], np.uint32)
        shards.append({"file": f"{start}.npy", "n_tokens": len(part)})
        np.save(folder / shards[-1]["file"], part)
    index = {"tokenizer_fingerprint": "bytes", "fingerprint": "x", "vocab_size": vocab_size}
    (folder / "index.json").write_text(json.dumps(index | {"shards": shards}))
    return data.TokenShards(folder)


# ---- the module's definition -------------------------------------------------------------------


def test_text_to_batches_equals_a_straight_line_reference(tmp_path):
    texts = ["first document", "zweites Dokument, größer", "3"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    tokenize(data.find_texts(tmp_path), tmp_path / "out")
    stream = [t for text in texts for t in (256, *text.encode(), 257)]
    tokens = data.TokenShards(tmp_path / "out")
    assert tokens.read(0, tokens.n_tokens).tolist() == stream
    n = (len(stream) - 1) // 8
    inputs, labels = data.batch_at(tokens, range(n), seq_len=8, seed=1)
    rows = {(*x, y[-1]) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)}
    assert rows == {tuple(stream[i * 8 : i * 8 + 9]) for i in range(n)}
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert inputs.dtype == labels.dtype == torch.int64


# ---- 1. Tokenizers -----------------------------------------------------------------------------


def test_special_ids_are_those_of_llama_3(bpe):
    tokenizer = data.load_tokenizer(bpe)
    # published: 128000 and 128001 of 128256, with 128000 ranks
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (260, 261, 516)


def test_text_that_looks_special_is_plain_text(bpe):
    text = "a <|begin_of_text|><|end_of_text|> b"
    ids = data.load_tokenizer(bpe).encode(text)
    assert ids.dtype == np.uint32 and ids.max() < 260
    assert data.load_tokenizer(bpe).bpe.decode(ids.tolist()) == text
    assert data.load_tokenizer("bytes").encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("text", ["", " " * 60_000, "x" * 60_000, "世é" * 30_000, "\r\n" * 40_000])
def test_hostile_text_decodes_back(text, bpe):
    tokenizer = data.load_tokenizer(bpe)
    assert tokenizer.bpe.decode(tokenizer.encode(text).tolist()) == text


def test_cutting_long_text_changes_no_token(bpe, monkeypatch):
    monkeypatch.setattr(data, "MAX_BPE_CHARS", 2000)
    tokenizer = data.load_tokenizer(bpe)
    words = ["the", " the", "  ", "12345", "!?", "\n", " \n\n the", "\u3000x", "it's", "\t", " 世"]
    text = "".join(np.random.default_rng(0).choice(words, 40_000))  # about 60 cuts
    assert tokenizer.encode(text).tolist() == tokenizer.bpe.encode_ordinary(text)


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"\x0a\x07<unk>", b"YQ== 0\nYg== 1\n", b"YQ== 1\n", b"YQ== x\n"]
)
def test_a_wrong_tokenizer_file_is_named(content, tmp_path):
    path = tmp_path / "wrong.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"--tokenizer .*wrong.model .*must be.*--tokenizer bytes"):
        data.load_tokenizer(path)


# ---- 2. Reading text ---------------------------------------------------------------------------


def test_the_default_text_is_the_standard_library_without_tests_and_packages():
    names = [f.as_posix() for f in data.find_texts(None)]
    assert names == sorted(names)
    assert any(n.endswith("/argparse.py") for n in names)
    assert not any("/test/" in n or "-packages/" in n or "_sysconfigdata" in n for n in names)
    assert sum(os.path.getsize(n) for n in names) > 5e6


def test_folder_file_and_glob_find_text(tmp_path):
    for name in ("b[1].txt", "sub/a.json.gz", "c.bin", ".hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "e.txt").touch()
    assert data.find_texts(tmp_path) == [tmp_path / "b[1].txt", tmp_path / "sub/a.json.gz"]
    assert data.find_texts(f"{tmp_path}/*.txt") == [tmp_path / "b[1].txt"]
    assert data.find_texts(tmp_path / "b[1].txt") == [tmp_path / "b[1].txt"]


@pytest.mark.parametrize("name", ["missing", "empty", "binary", "missing/*.txt", "binary/x.bin"])
def test_data_without_text_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/x.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"--data .* names no text: it must be .*; give another"):
        data.find_texts(tmp_path / name)


def test_bad_lines_and_bytes_are_counted_reported_and_survived(tmp_path, capsys):
    lines = [b'{"text": "ok"}', b"[1]", b"{broken", b'{"text": 3}', b'{"no": 1}', b"", b"3"]
    lines += [b"[" * 99_999, b'{"text": ""}', b'{"text": "a\\ud800b"}', b'{"text": "c\xffd"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "end"}']))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfx\xfe\xffy")
    index = tokenize(data.find_texts(tmp_path), tmp_path / "out")
    kinds = ("documents", "damaged", "missing", "empty", "repaired")
    assert [index[f"n_{kind}"] for kind in kinds] == [5, 2, 4, 2, 3]
    tokens = data.TokenShards(tmp_path / "out")
    ids = tokens.read(0, tokens.n_tokens)
    assert bytes(ids[ids < 256].tolist()).decode() == "oka\ufffdbc\ufffddendx\ufffd\ufffdy"
    err = capsys.readouterr().err
    assert "2 texts damaged (no JSON)" in err and "3 texts repaired" in err and "a.jsonl" in err


def words_of(path, tmp_path, name="out"):
    """What the bytes tokenizer makes of a file or folder, as text."""
    tokenize(data.find_texts(path), tmp_path / name)
    tokens = data.TokenShards(tmp_path / name)
    ids = tokens.read(0, tokens.n_tokens)
    return bytes(ids[ids < 256].tolist()).decode()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_with_its_mark_is_decoded(encoding, tmp_path):
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    (tmp_path / "a.txt").write_bytes(mark + "Größe, größer".encode(encoding))
    lines = '{"text": " und Maß"}\n{"text": "!"}\n'
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(mark + lines.encode(encoding)))
    assert words_of(tmp_path, tmp_path) == "Größe, größer und Maß!"


TEXT = "Der Text, um den es geht, и другой текст. " * 20


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("utf-32-le"),
        ("другой текст " * 50).encode("cp1251"),
        ("日本語の文章です。" * 50).encode("shift_jis"),
        bytes(range(256)) * 4,
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "b/c.py"])
def test_other_encodings_and_binary_files_are_refused_by_name(content, name, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"--data .*{name} is no text in UTF-8: of [\d,]+ chara"):
        words_of(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new/out").exists()


def test_a_few_wrong_bytes_in_a_long_text_are_repaired_in_any_kind_of_file(tmp_path):
    good = "a long text " * 20
    (tmp_path / "a.txt").write_bytes(good.encode() + b"\xe9\x00")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "' + good.encode() + b'\xe9\\u0000"}\n')
    assert words_of(tmp_path, tmp_path) == 2 * (good + "\ufffd\ufffd")


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary"])
def test_a_parquet_column_is_read_as_other_files_are(kind, tmp_path):
    """Strings or bytes, valid or not: one policy. Rows without text are counted."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [b"one long enough text", None, b"", b"a wrong byte \xe9 in another"]
    array = pyarrow.array(rows, pyarrow.large_binary()).view(pyarrow.large_binary())
    array = array.cast(pyarrow.binary()) if not kind.startswith("large") else array
    column = array.view(getattr(pyarrow, kind)()) if "string" in kind else array
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    index = tokenize(data.find_texts(tmp_path), tmp_path / "out")
    kinds = ("documents", "damaged", "missing", "empty", "repaired")
    assert [index[f"n_{kind}"] for kind in kinds] == [2, 0, 1, 1, 1]


def test_links_add_no_second_copy_and_what_is_left_out_is_said(tmp_path, capsys):
    (tmp_path / "c/sub").mkdir(parents=True)
    for name, text in (("a.v1.jsonl", '{"text": "a"}'), ("sub/b.jsonl", '{"text": "b"}')):
        (tmp_path / "c" / name).write_text(text)
    (tmp_path / "c/LICENSE.txt").write_text("c")
    for name in ("d.JSONL", "e.json", "f.zst", "g.zst"):
        (tmp_path / "c" / name).write_text("x")
    (tmp_path / "c/self").symlink_to(".")
    (tmp_path / "c/sub/up").symlink_to("..")
    (tmp_path / "c/z-again.jsonl").symlink_to("a.v1.jsonl")
    os.link(tmp_path / "c/a.v1.jsonl", tmp_path / "c/z-hard.jsonl")
    (tmp_path / "c/gone.jsonl").symlink_to("nowhere")
    texts = data.find_texts(tmp_path / "c")
    assert [path.name for path in texts] == ["LICENSE.txt", "a.v1.jsonl", "b.jsonl"]
    data.open_tokens(tmp_path / "c", "bytes", data_cache=tmp_path / "cache", is_builder=True)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "read are" in line]
    assert said.endswith(
        "read are 2 .jsonl, 1 .txt; left out are 1 .JSONL, 1 .json, 2 .zst, 1 broken links"
    )
    assert data.describe_choice(tmp_path / "c/sub/b.jsonl", [tmp_path / "c/sub/b.jsonl"]) is None


def test_the_content_of_text_decides_whose_tokens_they_are(tmp_path):
    """Same names, sizes and times; a file edited in place with its time kept; copies."""
    cache = {"data_cache": tmp_path / "cache", "is_builder": True}

    def opened(name):
        tokens = data.open_tokens(tmp_path / name, "bytes", **cache)
        return tokens.read(1, 1).item()

    for name, letter in (("en", "a"), ("de", "b"), ("copy", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.txt").write_text(letter * 5000)
        os.utime(tmp_path / name / "part.txt", (1_700_000_000, 1_700_000_000))
    assert [opened(name) for name in ("en", "de", "copy")] == [ord("a"), ord("b"), ord("a")]
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 2, "a copy has the same tokens"
    time.sleep(0.02)  # a tick of the file system's clock
    with open(tmp_path / "en/part.txt", "r+") as file:
        file.write("c")
    os.utime(tmp_path / "en/part.txt", (1_700_000_000, 1_700_000_000))
    assert opened("en") == ord("c")


def test_a_damaged_cache_is_made_again_and_a_foreign_index_is_no_shard(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("some text")
    (tmp_path / "text/index.json").write_text('{"shards": "of another tool"}')
    cache = {"data_cache": tmp_path / "cache", "is_builder": True}
    first = data.open_tokens(tmp_path / "text", "bytes", **cache).fingerprint
    (shard,) = (tmp_path / "cache").glob("tokens-*/tokens-00000.npy")
    os.truncate(shard, 10)
    tokens = data.open_tokens(tmp_path / "text", "bytes", **cache)
    assert tokens.fingerprint == first and tokens.read(1, 4).tolist() == [*b"some"]


def test_a_full_disk_leaves_nothing_of_an_unfinished_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", ".out.lock"}


def test_long_files_are_read_in_blocks_and_come_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_CHARS", 64)
    text = "Größe und Maß,\r\ngrößer.\r " * 50
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "z"}')
    (tmp_path / "c.txt").write_text("x" * 128)  # two whole blocks without a place to cut
    tokenize(data.find_texts(tmp_path), tmp_path / "out")
    tokens = data.TokenShards(tmp_path / "out")
    stream = [t for x in (text, text, "z", "x" * 128) for t in (256, *x.encode(), 257)]
    assert tokens.read(0, tokens.n_tokens).tolist() == stream
    assert max(len(piece[0]) for piece, _ in data.read_pieces(tmp_path / "a.txt")) <= 64


def test_a_torn_gzip_names_the_file_and_publishes_nothing(tmp_path):
    noise = np.random.default_rng(0).integers(97, 122, 300_000).astype(np.uint8).tobytes()
    whole = gzip.compress(b'{"text": "' + noise + b'"}\n')
    (tmp_path / "torn.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"torn.json.gz cannot be read"):
        tokenize(data.find_texts(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a.parquet .*pip install pyarrow"):
        tokenize(data.find_texts(tmp_path), tmp_path / "out")


# ---- 3. Tokenising -----------------------------------------------------------------------------


def test_shards_do_not_depend_on_the_number_of_workers(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_CHARS", 500)  # many batches,
    monkeypatch.setattr(data, "SHARD_BATCHES", 10)  # and many shards
    documents = [f"the document {i} " * (i % 40) for i in range(300)]
    with gzip.open(tmp_path / "c4.json.gz", "wt") as stream:
        stream.writelines(json.dumps({"text": d, "url": "u"}) + "\n" for d in documents)
    files = data.find_texts(tmp_path / "c4.json.gz")
    one, four = (tokenize(files, tmp_path / f"w{n}", bpe, n) for n in (1, 4))
    assert one == four and len(one["shards"]) > 10
    bare = data.load_tokenizer(bpe).bpe
    expected = [t for d in documents if d for t in (260, *bare.encode_ordinary(d), 261)]
    for n in (1, 4):
        tokens = data.TokenShards(tmp_path / f"w{n}")
        assert tokens.read(0, tokens.n_tokens).tolist() == expected


def test_progress_says_files_documents_tokens_rate_and_time_left(tmp_path, monkeypatch, capsys):
    clock = itertools.count(0, 6)  # s: every look at it is 6 s after the last
    monkeypatch.setattr(data.time, "monotonic", lambda: next(clock))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 1000)
    arrays = [np.zeros(n, np.uint32) for n in (6_000_000, 1000)]
    counts = Counter(files=1, bytes=1000, documents=1)
    passed = list(data.show_progress(arrays, counts, data.find_texts(tmp_path)))
    assert all(x is y for x, y in zip(passed, arrays, strict=True))
    line = capsys.readouterr().err.splitlines()[0]
    # two looks after the start: 12 s for half of the bytes
    for said in ("1 of 2 files", "1 document,", " 6.00 M tokens", "0.50 M tokens/s", "12 s left"):
        assert said in line


def test_an_unfinished_folder_is_replaced_and_a_finished_one_kept(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/tokens-00009.npy").write_bytes(b"left by a killed process")
    files = data.find_texts(tmp_path / "a.txt")
    tokenize(files, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    assert sorted(os.listdir(tmp_path / "out")) == ["index.json", "tokens-00000.npy"]
    with pytest.raises(FileExistsError, match=r"--out .*exists"):
        tokenize(files, tmp_path / "out")


def test_two_processes_cannot_write_one_folder(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    raised = []

    def write_too():
        try:
            tokenize(data.find_texts(tmp_path / "a.txt"), tmp_path / "out")
        except FileExistsError as error:
            raised.append(error)

    thread = threading.Thread(target=write_too, daemon=True)
    with data.publish_folder(tmp_path / "out") as partial:
        inode = partial.stat().st_ino
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not raised and not (tmp_path / "out").exists()
    thread.join(10)
    assert raised and (tmp_path / "out").stat().st_ino == inode  # renamed, never half copied


def test_a_corpus_of_empty_documents_is_refused(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl: no document, line or row has text, of 2"):
        tokenize(data.find_texts(tmp_path), tmp_path / "out")


# ---- 4. Token shards ---------------------------------------------------------------------------


def test_reading_crosses_shards(tmp_path):
    tokens = make_shards(tmp_path / "s", list(range(50)))
    for start in range(50):
        for count in range(1, 51 - start):
            assert tokens.read(start, count).tolist() == list(range(start, start + count))


@pytest.mark.parametrize("damage", ["torn", "missing", "count", "json", "dtype"])
def test_damaged_shards_are_refused(damage, tmp_path):
    folder = tmp_path / "s"
    make_shards(folder, list(range(50)))
    path, shard = folder / "index.json", folder / "7.npy"
    if damage == "torn":
        shard.write_bytes(shard.read_bytes()[:-4])
    elif damage == "missing":
        shard.unlink()
    elif damage == "dtype":
        np.save(shard, np.zeros(7, np.int64))
    else:
        old, new = {"count": (": 7}", ": 8}"), "json": ("{", "")}[damage]
        path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=r"--data .*damaged folder"):
        data.TokenShards(folder)


def test_an_id_outside_the_vocabulary_stops_the_read(tmp_path):
    tokens = make_shards(tmp_path / "s", [1, 2, 300, 4])
    with pytest.raises(AssertionError, match="258"):
        tokens.read(0, 4)


def test_shards_of_another_tokenizer_are_refused_naming_both(tmp_path, bpe):
    make_shards(tmp_path / "s", list(range(50)))
    with pytest.raises(ValueError, match=r"--tokenizer .*tiny.model .*, bytes did"):
        data.open_tokens(tmp_path / "s", bpe, data_cache=tmp_path / "c", is_builder=True)


def test_text_is_tokenised_once_and_waiting_ranks_get_it(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    opened = []

    def open_tokens(is_builder):
        cache = {"data_cache": tmp_path / "cache", "is_builder": is_builder}
        opened.append(data.open_tokens(tmp_path / "a.txt", "bytes", **cache))

    thread = threading.Thread(target=open_tokens, args=[False], daemon=True)
    thread.start()
    thread.join(0.3)
    assert not opened and not (tmp_path / "cache").exists()
    open_tokens(True)
    thread.join(10)
    assert opened[0].fingerprint == opened[1].fingerprint
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")}
    open_tokens(True)
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")}
    (tmp_path / "a.txt").write_text("more text")  # as long as before: its time tells
    open_tokens(True)
    assert opened[3].fingerprint != opened[2].fingerprint


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"vocab_size": 257}, "--tokenizer bytes has 258 tokens.*try --set vocab_size=258"),
        ({"needed": 4}, r"--data x has 100 tokens, which make 3 sequences of --seq-len 32, but 4"),
    ],
)
def test_tokens_that_do_not_fit_the_model_or_are_too_few_are_refused(tmp_path, wrong, said):
    (tmp_path / "a.txt").write_text("b" * 98)  # with BOS and EOS 100 tokens, 99 of them labels
    tokens = data.open_tokens(tmp_path, "bytes", data_cache=tmp_path / "c", is_builder=True)
    fits = {"source": "--data x", "tokenizer": "bytes", "vocab_size": 258, "seq_len": 32}
    data.check_tokens(tokens, **fits, needed=3)
    with pytest.raises(ValueError, match=said):
        data.check_tokens(tokens, **{**fits, "needed": 3, **wrong})


def test_a_large_corpus_is_refused_with_the_command_to_run(tmp_path):
    with open(tmp_path / "big.jsonl.gz", "wb") as stream:
        stream.truncate(700_000_000)  # sparse; counted 3 times: 2.1 GB
    with pytest.raises(ValueError, match=r"data.py --data .* --tokenizer bytes --out tokens"):
        data.open_tokens(tmp_path, "bytes", data_cache=tmp_path / "c", is_builder=True)


# ---- 5. Shuffle --------------------------------------------------------------------------------


def test_permute_is_a_permutation():
    for n in [*range(1, 70), 1000, 1023, 1024, 1025, 12_345]:
        assert sorted(data.permute(np.arange(n), n, "7:0").tolist()) == list(range(n))


def test_permute_needs_no_table():
    n = 1 << 41  # a table of this size would be 16 TiB
    i = np.arange(n - 1000, n, dtype=np.int64)
    out = data.permute(i, n, 0)
    assert len(set(out.tolist())) == 1000 and out.min() >= 0 and out.max() < n


def test_permute_is_uniform_over_keys():
    # chi-square over 10 cells, 9 degrees of freedom: P(> 40) = 8e-6 for a uniform shuffle
    n, n_keys = 10, 4000
    out = np.stack([data.permute(np.arange(n), n, key) for key in range(n_keys)])
    for i in range(n):
        cells = np.bincount(out[:, i], minlength=n)
        assert ((cells - n_keys / n) ** 2 / (n_keys / n)).sum() < 40
    # neighbours stay neighbours (out[i + 1] = out[i] + 1) with probability 1 / n: 9 * 400 expected,
    # standard deviation about 57
    assert abs((np.diff(out, axis=1) == 1).sum() - 3600) < 6 * 57


def test_every_epoch_is_another_order_of_all_windows():
    epoch, window = data.window_at(np.arange(300), 100, 5)
    assert epoch.tolist() == [0] * 100 + [1] * 100 + [2] * 100
    orders = window.reshape(3, 100)
    assert all(sorted(order) == list(range(100)) for order in orders.tolist())
    # two random orders agree in one place on average; more than 12 has probability below 1e-9
    assert max((orders[a] == orders[b]).sum() for a, b in [(0, 1), (0, 2), (1, 2)]) <= 12
    assert (data.window_at(np.arange(100), 100, 6)[1] != orders[0]).sum() >= 88
    assert [int(data.window_at(i, 100, 5)[1]) for i in range(300)] == window.tolist()


# ---- 6. Batches --------------------------------------------------------------------------------


def test_resuming_on_other_ranks_repeats_and_skips_no_window(tmp_path):
    tokens = make_shards(tmp_path / "s", list(range(241)), shard_tokens=50)  # 24 windows of 10

    def consume(start, stop, global_batch, dp):
        rows = []
        for first in range(start, stop, global_batch):
            ranks = np.arange(first, first + global_batch).reshape(dp, -1)
            rows += [x for r in ranks for x in data.batch_at(tokens, r, seq_len=10, seed=3)[0]]
        return [int(row[0]) for row in rows]

    straight = consume(0, 48, 4, 1)  # two epochs
    assert consume(0, 20, 4, 2) + consume(20, 32, 4, 4) + consume(32, 48, 8, 1) == straight
    assert Counter(straight) == Counter({10 * i: 2 for i in range(24)})


def test_an_incomplete_last_window_is_left_out(tmp_path):
    tokens = make_shards(tmp_path / "s", list(range(106)))  # 10.5 windows of 10
    assert tokens.n_windows(10) == 10
    assert make_shards(tmp_path / "t", list(range(100))).n_windows(10) == 9  # needs 101 for 10
    assert make_shards(tmp_path / "u", [1]).n_windows(10) == 0


def test_validation_beyond_the_last_window_counts_for_nothing(tmp_path):
    tokens = make_shards(tmp_path / "s", list(range(31)))  # 3 windows of 10
    batches = [data.validation_batch_at(tokens, [r, r + 2], seq_len=10) for r in range(2)]
    labels = torch.cat([labels for _, labels in batches])
    assert (labels == -100).all(dim=1).tolist() == [False, False, False, True]
    assert sorted(labels[labels != -100].tolist()) == list(range(1, 31))


def test_the_loader_reads_one_global_batch_ahead_and_raises_in_get():
    started = threading.Event()

    def read(position):
        if position == 12:
            started.set()
        if position == 16:
            raise OSError("disk gone")
        return torch.tensor([position]), torch.tensor([-position])

    loader = data.BatchLoader(read, "cpu", position=8, stride=4)
    assert loader.get()[0].item() == 8 and loader.position == 12
    assert started.wait(10)  # without another get
    assert [x.item() for x in loader.get()] == [12, -12] and loader.wait_s >= 0
    assert loader.position == 16, "sequences consumed, not those read ahead"
    with pytest.raises(OSError, match="disk gone"):
        loader.get()


def test_the_loaders_thread_belongs_to_its_gpu(monkeypatch):
    """As local rank 3. Without a GPU: what CUDA is asked for, and in which thread."""
    asked = []

    def set_device(device):
        asked.append((str(device), threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(data.BatchLoader, "prepare", lambda self, position: None)
    loader = data.BatchLoader(None, "cuda:3", position=0, stride=1)
    loader.next.result(10)
    assert asked == [("cuda:3", False)]


def test_a_batch_goes_to_a_gpu_from_pinned_memory_and_nobody_waits(monkeypatch):
    """Without a GPU: what is asked of torch."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pin") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *to, **how: asked.append((*to, how)) or x)
    x, device = torch.zeros(2), torch.device("cuda:3")
    assert data.send_to(device, (x,)) == [x]
    assert asked == ["pin", (device, {"non_blocking": True})]
    assert data.send_to(torch.device("cpu"), (x,)) == [x] and asked.count("pin") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loader_copies_to_the_gpu_without_host_sync():
    def read(position):
        return torch.full((64, 4096), position), torch.full((64,), -position)

    loader = data.BatchLoader(read, "cuda", position=0, stride=1)
    loader.get()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = [loader.get()[0].sum() for _ in range(1, 20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [s.item() for s in sums] == [step * 64 * 4096 for step in range(1, 20)]


# ---- 7. The tool -------------------------------------------------------------------------------


def run_tool(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, arguments)])
    data.main()


def test_the_tool_writes_shards_and_explains_itself(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("hello")
    command = [sys.executable, data.__file__, "--data", "a.txt", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "7 tokens" in done.stdout, done.stderr
    assert data.TokenShards(tmp_path / "out").read(0, 7).tolist() == [256, *b"hello", 257]
    with pytest.raises(SystemExit, match="0"):
        run_tool(monkeypatch, "--help")
    out = capsys.readouterr().out
    assert all(suffix in out for suffix in data.SUFFIXES)


@pytest.mark.parametrize(
    "arguments", [("--data", "missing"), ("--tokenizer", "missing"), ("--out", "/proc/x")]
)
def test_the_tool_says_errors_in_one_line(arguments, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(SystemExit, match=rf"^data.py: [^\n]*{arguments[1][:5]}[^\n]*$"):
        run_tool(monkeypatch, "--data", tmp_path / "a.txt", "--out", tmp_path / "out", *arguments)


# ---- A tokenizer that is not read here ---------------------------------------------------------


def test_a_tokenizer_json_names_shards_and_is_refused_for_text(tmp_path, monkeypatch):
    """README's ten lines make the shards, with a tokenizer of the package tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("b a\n")
    words = tokenizers.models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="a")
    bpe = tokenizers.Tokenizer(words)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.save("tokenizer.json")
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    lines = readme[readme.index("    import data, numpy, tokenizers") :].split("\n## ")[0]
    namespace = {}
    exec(textwrap.dedent(lines), namespace)
    cache = {"data_cache": tmp_path / "cache", "is_builder": True}
    tokens = data.open_tokens("tokens", "tokenizer.json", **cache)
    assert tokens.read(0, tokens.n_tokens).tolist() == [0, 2, 1, 0]
    assert tokens.vocab_size == 3
    with pytest.raises(ValueError, match="--tokenizer bytes .bytes. did not make --data tokens"):
        data.open_tokens("tokens", "bytes", **cache)
    with pytest.raises(ValueError, match="tokenizer.json, which Qwen3 has, is not read here; make"):
        data.open_tokens("text", "tokenizer.json", **cache)
    with pytest.raises(ValueError, match="--tokenizer elsewhere.json is no file"):
        data.open_tokens("tokens", "elsewhere.json", **cache)

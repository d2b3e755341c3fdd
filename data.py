"""Text -> tokens -> the batch of a step. Nothing here knows of ranks or meshes.

    files -> documents -> [BOS tokens EOS] [BOS tokens EOS] ...     one stream of uint32 ids, kept
                                                                    as .npy shards and index.json
    window i = stream[i * seq_len : (i + 1) * seq_len + 1]          0 <= i < N
    inputs   = all of it but the last token                         N = (n_tokens - 1) // seq_len
    labels   = all of it but the first

Neighbouring windows share one token, the last label of one and the first input of the next: an
epoch predicts every token once, except the stream's first and a tail shorter than a window.

How step, seed and rank pick a window. Training consumes one endless row of sequences. Step s (from
0) takes G of them, the global batch, and data rank r of dp takes the r-th of dp equal slices:

    position      0  1  2  3  4  5  6  7 | 8  9 10 11 ...           G = 4, dp = 2, N = 8, seed 0
    step          0  0  0  0  1  1  1  1 | 2  2  2  2
    data rank     0  0  1  1  0  0  1  1 | 0  0  1  1
    epoch         0  0  0  0  0  0  0  0 | 1  1  1  1               position // N
    window        2  7  1  4  0  5  3  6 | 3  1  0  4               permute(position % N, N, key),
                                                                    key = "seed:epoch"

`permute` evaluates a shuffle of 0 ... N-1 at one point, without a table. So the window is a pure
function of (seed, position), and the loader's state is the number of sequences consumed: a run
resumed on other ranks, or with another global batch, neither repeats a window nor skips one.
TorchTitan instead saves a buffer of tokens per data rank, and cannot change their number.

Left out: masks between the documents of a window (as in TorchTitan), mixtures, downloads.

Sources: Llama 3 (arXiv 2407.21783) §3.2 for the vocabulary; C4 (arXiv 1910.10683); Feistel networks
as permutations: Luby and Rackoff, SIAM J. Computing 17 (1988); walking a cycle to stay below N:
Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

import argparse
import base64
import codecs
import contextlib
import fcntl
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

# ---- 1. Tokenizers -----------------------------------------------------------------------------


def fingerprint_of(spec):
    """What a tokenizer is known by: "bytes", or a hash of its file."""
    if str(spec) == "bytes":
        return "bytes"
    if not Path(spec).is_file():
        raise ValueError(f"--tokenizer {spec} is no file: give the one that made the shards")
    return f"sha256-{hashlib.sha256(Path(spec).read_bytes()).hexdigest()[:16]}"


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids: no file needed, about four times as many tokens."""

    fingerprint = "bytes"
    bos_id, eos_id, vocab_size = 256, 257, 258

    def encode(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)


# How Llama 3 splits text into parts; BPE merges bytes inside a part, never across two.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English endings
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the one space or mark before it
    r"|\p{N}{1,3}"  # digits, up to three
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # marks, with a space before and line ends after
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # the other white space
)
# A boundary of that pattern whatever else is around, so that a cut there changes no token: before
# a space that follows a non-space, and after a line end that a non-space follows.
CLEAN_CUT = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")
MAX_BPE_CHARS = 25_000  # tiktoken crawls on long runs of one kind, and panics on a million spaces


def find_cut(text, limit):
    """Where to cut `text`: the last clean place in 1,000 characters before `limit`, else there."""
    cuts = [m.start() for m in CLEAN_CUT.finditer(text, limit - 1000, limit + 1)]
    return cuts[-1] if cuts else limit


class TiktokenTokenizer:
    """Llama 3's tokenizer, read from its `tokenizer.model`: lines of "base64 rank".

    256 ids above the ranks are reserved for special tokens, and pretraining uses the first two.
    Text that spells the name of one stays text.
    """

    def __init__(self, path):
        import tiktoken

        try:
            pairs = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            if sorted(ranks.values()) != list(range(max(256, len(ranks)))):
                raise ValueError("its ranks are not 0, 1, 2, ... for 256 bytes and more")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--tokenizer {path} cannot be used ({error}): it must be a tiktoken BPE file like "
                "Llama 3's tokenizer.model; give one, or --tokenizer bytes"
            ) from error
        self.fingerprint = fingerprint_of(path)
        self.bos_id, self.eos_id = len(ranks), len(ranks) + 1
        self.vocab_size = len(ranks) + 256
        special = {"<|begin_of_text|>": self.bos_id, "<|end_of_text|>": self.eos_id}
        self.bpe = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text):
        parts, start = [np.zeros(0, np.uint32)], 0
        while start < len(text):
            stop = find_cut(text, start + MAX_BPE_CHARS)
            parts.append(self.bpe.encode_to_numpy(text[start:stop], disallowed_special=()))
            start = stop
        return np.concatenate(parts)


def load_tokenizer(spec):
    """The tokenizer of --tokenizer: "bytes", or the path of a tiktoken BPE file."""
    if Path(spec).suffix == ".json":
        raise ValueError(
            f"--tokenizer {spec} conflicts with text: tokenizer.json, which Qwen3 has, is not read "
            "here; make token shards, as README shows under Hugging Face, and give them as --data"
        )
    return ByteTokenizer() if str(spec) == "bytes" else TiktokenTokenizer(spec)


# ---- 2. Reading text ---------------------------------------------------------------------------

SUFFIXES = (".txt", ".py", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
BLOCK_CHARS = 1 << 20  # what a worker gets at once: 0.1 s of BPE
DAMAGED = object()  # in place of the text of a line that is no JSON


def list_files(data):
    """Files and broken links: --data itself, what its glob names, or all below it but hidden ones.

    Each file is there once, by what it is (device and inode), however many links lead to it.
    """
    tops = [data] if Path(data).exists() else glob.glob(str(data), recursive=True)
    found, seen, ahead = [], set(), sorted(map(Path, tops), reverse=True)
    while ahead:
        path = ahead.pop()
        if os.path.exists(path):
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino))
        if os.path.isdir(path):
            inside = (child for child in path.iterdir() if not child.name.startswith("."))
            ahead += sorted(inside, reverse=True)
        else:
            found.append(path)
    return found


def find_texts(data):
    """The files of --data that hold text, in the order of their paths; not empty ones."""
    if data is None:  # Python's own source: 12 MB, the same wherever its version is
        root = Path(sysconfig.get_path("stdlib"))
        names = sys.stdlib_module_names  # not the folder's list, which may hold site-packages
        files = [f for n in names for f in (root / f"{n}.py", *(root / n).rglob("*.py"))]
        tests = {"test", "tests", "idle_test"}  # some are broken on purpose
        files = [f for f in files if not tests & set(f.relative_to(root).parts)]
    else:
        files = list_files(data)
    files = [f for f in files if f.name.endswith(SUFFIXES) and os.path.isfile(f)]
    texts = [f for f in files if f.stat().st_size]
    if not texts:
        raise ValueError(
            f"--data {data} names no text: it must be token shards, or a file, folder or quoted "
            f"glob of {' '.join(SUFFIXES)} that is not empty; give another path, or none for the "
            "source of Python's standard library"
        )
    return sorted(texts, key=Path.as_posix)


def suffix_of(path):
    """Which of SUFFIXES says how the file is read."""
    return next(suffix for suffix in SUFFIXES if path.name.endswith(suffix))


def describe_choice(data, texts):
    """What of --data is read and what is left out, by kind; None if it is all of one kind."""
    if data is None:
        return None
    kinds, left = Counter(map(suffix_of, texts)), Counter()
    for path in set(list_files(data)).difference(texts):
        left[path.suffix or path.name if os.path.exists(path) else "broken links"] += 1
    if len(kinds) == 1 and not left:
        return None
    read, out = (", ".join(f"{n:,} {kind}" for kind, n in sorted(c.items())) for c in (kinds, left))
    return f"--data {data}: read are {read}; left out are {out or 'none'}"


def read_plain(stream):
    """One document, however long, in blocks."""
    text, opens = stream.read(BLOCK_CHARS), True
    while len(text) == BLOCK_CHARS:
        cut = find_cut(text, BLOCK_CHARS)
        yield text[:cut], opens, False
        text, opens = text[cut:] + stream.read(cut), False
    yield text, opens, True


def read_json_lines(stream):
    """A document a line: the field `text` of an object."""
    for line in stream:
        try:
            text = json.loads(line)["text"] if line.strip() else ""
        except (ValueError, RecursionError):
            text = DAMAGED
        except (LookupError, TypeError):
            text = None
        yield text, True, True


def read_parquet(raw):
    """A document a row: the column `text`, of strings or bytes."""
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(raw).iter_batches(1000, columns=["text"]):
        for row in batch["text"].cast("large_binary").to_pylist():
            text = None if row is None else row.decode("utf-8", "surrogateescape")
            yield text, True, True


def read_pieces(path):
    """Yield ((text, opens, closes), bytes of the file read so far).

    Where `opens` or `closes` is false, the text lacks a document's beginning or end. For a line or
    row without text, None, DAMAGED or another object comes in its place. A lone surrogate in a text
    stands for an invalid byte.
    """
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".parquet":
                pieces = read_parquet(raw)
            else:
                stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
                stream = io.BufferedReader(stream)
                is_utf16 = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                encoding = ("utf-16", "strict") if is_utf16 else ("utf-8-sig", "surrogateescape")
                stream = io.TextIOWrapper(stream, *encoding, newline="\n")
                is_plain = path.suffix in (".txt", ".py")
                pieces = read_plain(stream) if is_plain else read_json_lines(stream)
            for piece in pieces:
                yield piece, raw.tell()
    except Exception as error:
        raise ValueError(
            f"--data {path} cannot be read ({error}): a file must be whole, and .parquet needs a "
            "column `text` and `pip install pyarrow`; fetch the file again, or leave it out"
        ) from error


# ---- 3. Tokenising -----------------------------------------------------------------------------

SHARD_BATCHES = 128  # about 128 MB of text: 32 M tokens of BPE
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NULs, and what UTF-8 cannot hold
FAULTS = {
    "damaged": "no JSON", "missing": "no `text`", "empty": "of no character",
    "repaired": "invalid Unicode or NULs, now U+FFFD",
}  # fmt: skip


def check_share(path, n_chars, n_bad):
    """Raise ValueError if a file has so much that is no text that its encoding is another one."""
    if n_bad > max(10, n_chars / 10):
        raise ValueError(
            f"--data {path} is no text in UTF-8: of {n_chars:,} characters {n_bad:,} are NULs or "
            "invalid, as in UTF-16 without its mark, in an old encoding or in a binary file; "
            "convert it (iconv -t utf-8), or leave it out"
        )


def read_batches(files, counts, faults):
    """Yield lists of (text, opens, closes), about 1 MB each, of valid Unicode; count and report."""
    batch, size = [], 0
    for path in files:
        bytes_before, n_chars, n_bad = counts["bytes"], 0, 0
        for (text, opens, closes), position in read_pieces(path):
            counts["bytes"] = bytes_before + position
            if not isinstance(text, str):
                faults["damaged" if text is DAMAGED else "missing"].append(path)
                continue
            if opens and closes and not text:
                faults["empty"].append(path)
                continue
            text, n = NO_TEXT.subn("\ufffd", text)
            n_chars, n_bad = n_chars + len(text), n_bad + n
            if n:
                faults["repaired"].append(path)
            counts["documents"] += opens
            batch.append((text, opens, closes))
            size += len(text)
            if size >= BLOCK_CHARS:
                yield batch
                batch, size = [], 0
        check_share(path, n_chars, n_bad)  # nothing is published yet
        counts["files"] += 1
    if batch:
        yield batch


def encode_batch(batch, tokenizer):
    """uint32 ids of the texts, BOS and EOS around each document."""
    bos, eos = (np.array([i], np.uint32) for i in (tokenizer.bos_id, tokenizer.eos_id))
    arrays = []
    for text, opens, closes in batch:
        arrays += [bos] * opens + [tokenizer.encode(text)] + [eos] * closes
    return np.concatenate(arrays)


def encode_in_order(batches, tokenizer, n_workers):
    """Yield arrays of tokens in the order of the text, encoded by `n_workers` threads.

    Threads, not processes: BPE, most of the work, runs outside Python's lock. So threads are as
    fast (seen on 2 cores), share one tokenizer, start at once, and are safe beside torch's own.
    """
    pending = deque()  # two batches per worker: the only text in memory
    with ThreadPoolExecutor(n_workers) as pool:
        for batch in batches:
            pending.append(pool.submit(encode_batch, batch, tokenizer))
            if len(pending) == 2 * n_workers:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def count(n, noun):
    """1 file, 2,000 files"""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def show_progress(arrays, counts, files):
    """Pass arrays of tokens on; say on stderr how far they are, every 5 s and at the end."""
    n_bytes = sum(f.stat().st_size for f in files)
    start = shown = time.monotonic()

    def say(elapsed_s):
        left_s = elapsed_s * (n_bytes / max(1, counts["bytes"]) - 1)
        print(
            f"tokenised {counts['files']:,} of {count(len(files), 'file')}: "
            f"{count(counts['documents'], 'document')}, {counts['tokens'] / 1e6:,.2f} M tokens, "
            f"{counts['tokens'] / 1e6 / elapsed_s:.2f} M tokens/s, {left_s:.0f} s left",
            file=sys.stderr,
        )

    for array in arrays:
        counts["tokens"] += len(array)
        if time.monotonic() > shown + 5:
            shown = time.monotonic()
            say(shown - start)
        yield array
    say(time.monotonic() - start)


@contextlib.contextmanager
def publish_folder(out):
    """Give an empty folder OUT.partial to fill, and rename it to `out` if the block ends well.

    So `out` is whole as soon as it exists. What an earlier run left unfinished is removed first.
    """
    partial = Path(f"{out}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f".{out.name}.lock"), "w") as lock:
        with contextlib.suppress(OSError):  # some file systems of clusters have no locks
            # waits for another process that writes `out`; falls with that, however it ends
            fcntl.flock(lock, fcntl.LOCK_EX)
        if out.exists():
            raise FileExistsError(
                f"--out {out} exists, and shards are never overwritten: give another, or remove it"
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
            raise


def tokenize_corpus(files, tokenizer, out, *, n_workers=None):
    """Write the files' tokens, in order, as a folder of shards; return what its index.json says.

    The shards do not depend on `n_workers` (default: all CPUs). What ends this early, an error or
    a signal, leaves no `out`, and it can be run again.

    Costs:   memory of three shards (of 0.5 GB with bytes), and about 10 MB per worker.
    Raises:  ValueError for an unreadable file or no text at all; FileExistsError if `out` exists.
    """
    digest, shards = hashlib.sha256(), []
    counts, faults = Counter(), {kind: [] for kind in FAULTS}
    with publish_folder(Path(out)) as partial:
        batches = read_batches(files, counts, faults)
        arrays = encode_in_order(batches, tokenizer, n_workers or os.cpu_count())
        arrays = show_progress(arrays, counts, files)
        while parts := list(itertools.islice(arrays, SHARD_BATCHES)):
            shard = np.concatenate(parts)
            shards.append({"file": f"tokens-{len(shards):05d}.npy", "n_tokens": len(shard)})
            np.save(partial / shards[-1]["file"], shard)
            digest.update(shard)
        if not shards:
            more = f" and {count(len(files) - 1, 'other')}" if len(files) > 1 else ""
            raise ValueError(
                f"--data {files[0]}{more}: no document, line or row has text, of "
                f'{sum(map(len, faults.values())):,}: give others, or name the JSON field "text"'
            )
        index = {
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": digest.hexdigest()[:16],
            "n_tokens": counts["tokens"],
            "n_documents": counts["documents"],
            **{f"n_{kind}": len(paths) for kind, paths in faults.items()},
            "shards": shards,
        }
        (partial / "index.json").write_text(json.dumps(index, indent=1))
    for kind, paths in faults.items():
        if paths:
            why = f"{count(len(paths), 'text')} {kind} ({FAULTS[kind]}), first in {paths[0]}"
            print(why, file=sys.stderr)
    return index


# ---- 4. Token shards ---------------------------------------------------------------------------


class TokenShards:
    """A folder of token shards as one long array that stays on disk; opening reads no token."""

    def __init__(self, folder):
        self.paths, lengths = [], []
        try:
            index = json.loads((Path(folder) / "index.json").read_text())
            self.tokenizer_fingerprint = index["tokenizer_fingerprint"]
            self.fingerprint = index["fingerprint"]
            self.vocab_size = index["vocab_size"]
            for shard in index["shards"]:
                self.paths.append(Path(folder) / shard["file"])
                array = np.load(self.paths[-1], mmap_mode="r")
                if (array.dtype, array.shape) != (np.uint32, (shard["n_tokens"],)):
                    raise ValueError(f"{shard['file']} is not {shard['n_tokens']} uint32 tokens")
                lengths.append(len(array))
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"--data {folder} is a damaged folder of token shards ({error!r}): tokenise the "
                "text again"
            ) from error
        self.ends = np.cumsum(lengths)  # position in the stream where each shard ends
        self.n_tokens = sum(lengths)
        # an open map holds a file handle, of which a large corpus would use up too many
        self.map_shard = functools.lru_cache(128)(lambda i: np.load(self.paths[i], mmap_mode="r"))

    def n_windows(self, seq_len):
        """Sequences of `seq_len` tokens and their labels in one epoch, N."""
        return (self.n_tokens - 1) // seq_len

    def read(self, start, count):
        """Tokens start ... start + count - 1 of the stream: uint32 (count,)."""
        stop, parts = start + count, []
        while start < stop:
            i = int(np.searchsorted(self.ends, start, side="right"))
            shard = self.map_shard(i)
            offset = start - int(self.ends[i]) + len(shard)
            parts.append(shard[offset : offset + stop - start])
            start += len(parts[-1])
        tokens = np.concatenate(parts)
        # checked here because on a GPU such an id is an assert that names nothing
        assert tokens.max() < self.vocab_size, f"{self.paths[i]} holds an id >= {self.vocab_size}"
        return tokens


def is_shards(folder):
    """Whether a folder holds token shards, be they damaged, and not another's index.json."""
    index = None
    with contextlib.suppress(OSError, ValueError):
        index = json.loads((folder / "index.json").read_text())
    is_ours = isinstance(index, dict) and "tokenizer_fingerprint" in index
    return is_ours or (folder / "tokens-00000.npy").is_file()


def is_whole(folder):
    """Whether the shards of a folder can be opened."""
    try:
        TokenShards(folder)
    except ValueError:
        return False
    return True


def open_tokens(data, tokenizer_spec, *, data_cache, is_builder):
    """The tokens that --data names: a folder of shards as it is, text through a cache of shards.

    On first use the process with `is_builder` tokenises the text. The others look for the folder
    now and then: no collective waits, so none can time out.
    """
    if data is not None and is_shards(Path(data)):
        tokens, fingerprint = TokenShards(data), fingerprint_of(tokenizer_spec)
        if tokens.tokenizer_fingerprint != fingerprint:
            raise ValueError(
                f"--tokenizer {tokenizer_spec} ({fingerprint}) did not make --data {data}, "
                f"{tokens.tokenizer_fingerprint} did: give that one, or tokenise the text again"
            )
        return tokens
    tokenizer, files = load_tokenizer(tokenizer_spec), find_texts(data)
    packed = (".gz", ".parquet")  # to a third, roughly
    n_bytes = sum(f.stat().st_size * (3 if f.suffix in packed else 1) for f in files)
    if n_bytes > 2e9:
        raise ValueError(
            f"--data {data} is about {n_bytes / 1e9:.1f} GB of text, above the 2 GB that one rank "
            "tokenises while the others wait: run "
            f"`python data.py --data '{data}' --tokenizer {tokenizer_spec} --out tokens` ahead, "
            "then give --data tokens"
        )
    key = content_key(files, tokenizer, Path(data_cache), is_builder=is_builder)
    folder = Path(data_cache) / f"tokens-{key}"
    if is_builder and not is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged since
        if choice := describe_choice(data, files):
            print(choice, file=sys.stderr)
        with contextlib.suppress(FileExistsError):  # another run made it while this one waited
            tokenize_corpus(files, tokenizer, folder)
    while not is_builder and not is_whole(folder):
        time.sleep(0.2)
    return TokenShards(folder)


def content_key(files, tokenizer, data_cache, *, is_builder):
    """The name, by their content, of what these files make with this tokenizer: 16 hex digits.

    The builder hashes all bytes, once for files that stay as they are: the answer is noted under
    their inodes, sizes and times, of which one (ctime) nobody can set back. The others wait for it.
    """
    stats = [(str(f), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
             for f in files for s in [f.stat()]]  # fmt: skip
    state = hashlib.sha256(repr((tokenizer.fingerprint, stats)).encode()).hexdigest()[:16]
    note = data_cache / f"content-{state}"
    if is_builder and not note.exists():
        digest = hashlib.sha256(tokenizer.fingerprint.encode())
        for path in files:
            with open(path, "rb") as file:
                of_file = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{suffix_of(path)} {of_file}".encode())
        data_cache.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_name(f"{note.name}.{os.getpid()}")
        unfinished.write_text(digest.hexdigest()[:16])
        unfinished.rename(note)
    while not note.exists():
        time.sleep(0.2)
    return note.read_text()


def check_tokens(tokens, *, source, tokenizer, vocab_size, seq_len, needed):
    """Raise ValueError if the tokens do not fit the model or are fewer than needed.

    Args:    source and tokenizer, the flags as typed; vocab_size, of the model; needed, the number
             of sequences that are read at once.
    """
    if tokens.vocab_size > vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer} has {tokens.vocab_size} tokens, more than vocab_size "
            f"{vocab_size} of the model: try --set vocab_size={tokens.vocab_size}"
        )
    n_windows = tokens.n_windows(seq_len)
    if n_windows < needed:
        raise ValueError(
            f"{source} has {tokens.n_tokens} tokens, which make {n_windows} sequences of --seq-len "
            f"{seq_len}, but {needed} are needed at once (--global-batch-size): try more text, or "
            "less of the two"
        )


# ---- 5. Shuffle --------------------------------------------------------------------------------


def mix_bits(x):
    """Scatter the bits of every uint64 of an array (the output function of SplitMix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def permute(i, n, key):
    """Where the shuffle of 0 ... n-1 that `key` names sends i: int or array -> int64 of its shape.

    A Feistel network of 8 rounds: the bits of i are split in two halves, and each round xors one of
    them with a function of the other. A round can be undone, so this permutes 0 ... 2^bits - 1,
    fewer than 2n numbers. Where that leads to n or above, it is applied again.
    """
    n_bits = (int(n) - 1).bit_length()
    n_low = n_bits // 2
    low_mask, high_mask = (1 << n_low) - 1, (1 << (n_bits - n_low)) - 1
    round_keys = np.frombuffer(hashlib.sha512(str(key).encode()).digest(), "<u8").reshape(4, 2)

    def shuffle_bits(x):
        low, high = x & low_mask, x >> n_low
        for high_key, low_key in round_keys:
            high = high ^ (mix_bits(low + high_key) & high_mask)
            low = low ^ (mix_bits(high + low_key) & low_mask)
        return (high << n_low) | low

    x = shuffle_bits(np.asarray(i, dtype=np.uint64))
    while (outside := x >= n).any():
        x[outside] = shuffle_bits(x[outside])
    return x.astype(np.int64)


def window_at(position, n_windows, seed):
    """(epoch, window) of global sequence positions, an int or an array: int64 of its shape."""
    epoch, index = np.divmod(np.asarray(position, dtype=np.int64), n_windows)
    window = np.zeros_like(index)
    for e in np.unique(epoch):
        window[epoch == e] = permute(index[epoch == e], n_windows, f"{seed}:{e}")
    return epoch, window


# ---- 6. Batches --------------------------------------------------------------------------------


def check_batch(global_batch_size, local_batch_size, n_data):
    """Raise ValueError if the data ranks cannot share the global batch in whole local batches."""
    unit = local_batch_size * n_data
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        raise ValueError(
            f"--global-batch-size {global_batch_size} must be a multiple of --local-batch-size "
            f"{local_batch_size} times {n_data} data ranks (--dp-replicate x --dp-shard): try "
            f"--global-batch-size {f'{below} or ' if below else ''}{below + unit}"
        )


def read_windows(tokens, windows, seq_len):
    """Inputs and labels of the windows: int64 (B, T) each."""
    rows = np.stack([tokens.read(int(w) * seq_len, seq_len + 1) for w in windows])  # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch_at(tokens, positions, *, seq_len, seed):
    """Inputs and labels of global sequence positions, of any epoch: int64 (B, T) each."""
    _, windows = window_at(positions, tokens.n_windows(seq_len), seed)
    return read_windows(tokens, windows, seq_len)


def validation_batch_at(tokens, positions, *, seq_len):
    """Inputs and labels of the windows themselves, unshuffled: int64 (B, T) each.

    Beyond the last window all labels are -100 and count for nothing, so that every rank can run
    the same number of batches, however many windows there are.
    """
    positions, n_windows = np.asarray(positions), tokens.n_windows(seq_len)
    inputs, labels = read_windows(tokens, np.minimum(positions, n_windows - 1), seq_len)
    labels[torch.from_numpy(positions >= n_windows)] = -100
    return inputs, labels


def send_to(device, batch):
    """The batch on the device; to a GPU without waiting, which takes pinned memory.

    Pinned: pages that stay where they are, so that the GPU fetches them by itself.
    """
    if device.type != "cuda":
        return [x.to(device) for x in batch]
    return [x.pin_memory().to(device, non_blocking=True) for x in batch]


class BatchLoader:
    """Prepares the next global batch in a thread while this step runs.

    Args:    read(position) -> (inputs, labels) on the CPU: this rank's part of the global batch
             that begins at that position of the endless row; the device that they go to; position,
             the sequences consumed so far, which `get` moves on by stride, a global batch.
    Costs:   no host sync on CUDA: the thread copies on a stream of its own, and the step's stream,
             not the host, waits for the copy.
    """

    def __init__(self, read, device, *, position, stride):
        self.read, self.position, self.stride = read, position, stride
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # its GPU is that of the device: leaving a stream's context, a thread returns to its own,
        # which would be GPU 0, where each rank would then take some memory
        in_thread = {"initializer": torch.cuda.set_device, "initargs": (self.device,)}
        self.thread = ThreadPoolExecutor(1, **in_thread if self.stream else {})
        self.next = self.thread.submit(self.prepare, position)
        self.wait_s = 0.0  # seconds that the last get waited

    def prepare(self, position):
        batch = self.read(position)
        with torch.cuda.stream(self.stream):  # None: nothing happens
            batch = send_to(self.device, batch)
            return batch, self.stream and self.stream.record_event()

    def get(self):
        """Inputs and labels at `position`, on the device; raises what `read` raised."""
        start = time.perf_counter()
        batch, copied = self.next.result()
        self.wait_s = time.perf_counter() - start
        self.position += self.stride
        self.next = self.thread.submit(self.prepare, self.position)
        if copied is not None:
            step_stream = torch.cuda.current_stream(self.device)
            step_stream.wait_event(copied)
            for x in batch:
                x.record_stream(step_stream)  # its memory is free only after the step used it
        return batch


# ---- 7. The tool -------------------------------------------------------------------------------


def main():
    """Tokenise a text into a folder of token shards."""
    parser = argparse.ArgumentParser(
        description="Tokenise text ahead of training, on all CPUs; then train with the same "
        "--tokenizer and --data OUT.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", help="a file, a folder with all below it, or a quoted glob. A document is a .txt "
        "or .py file, the field `text` of a line of .jsonl, .jsonl.gz or .json.gz, or the column "
        "`text` of a row of .parquet (needs pyarrow); lines without it and invalid UTF-8 are "
        "counted, reported and survived (default: the source of Python's standard library)")
    add("--tokenizer", default="bytes", help="bytes, or Llama 3's tokenizer.model (default: bytes)")
    add("--out", required=True, type=Path, help="new folder, whole once it exists")
    args = parser.parse_args()
    try:
        files, tokenizer = find_texts(args.data), load_tokenizer(args.tokenizer)
        if choice := describe_choice(args.data, files):
            print(choice, file=sys.stderr)
        index = tokenize_corpus(files, tokenizer, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"data.py: {error}")
    except KeyboardInterrupt:
        sys.exit(f"data.py: interrupted, {args.out} was not written; run it again")
    print(f"{args.out}: {index['n_tokens']:,} tokens in {count(len(index['shards']), 'shard')}")


if __name__ == "__main__":
    main()

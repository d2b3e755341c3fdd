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

    position      0  1  2  3  4  5  6  7 | 8  9 10 11 ...           here G = 4, dp = 2, N = 8
    step          0  0  0  0  1  1  1  1 | 2  2  2  2
    data rank     0  0  1  1  0  0  1  1 | 0  0  1  1
    epoch         0  0  0  0  0  0  0  0 | 1  1  1  1               position // N
    window        5  2  7  0  3  6  1  4 | 6  1  3  0               permute(position % N, N, key),
                                                                    key = "seed:epoch"

`permute` evaluates a shuffle of 0 ... N-1 at one point, without a table. So the window is a pure
function of (seed, position), and the loader's state is the number of sequences consumed: a run
resumed on other ranks, or with another global batch, neither repeats a window nor skips one. The
reference system instead saves a buffer of tokens per data rank, and cannot change their number.

Left out: masks between the documents of a window (as in the reference system), mixtures, downloads.

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
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

# torch is imported where tensors are made: without it `python data.py` starts at once

# ---- 1. Tokenizers -----------------------------------------------------------------------------


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids: no file needed, about four times as many tokens."""

    name = "bytes"
    fingerprint = "bytes-1"
    bos_id = 256
    eos_id = 257
    vocab_size = 258

    def encode(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids):
        """The text of the ids; special ids have none."""
        return bytes(int(i) for i in ids if i < self.bos_id).decode(errors="replace")


# How Llama 3 splits text into parts; BPE merges bytes inside a part, never across two.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English endings
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the one space or mark before it
    r"|\p{N}{1,3}"  # digits, up to three
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # marks, with a space before and line ends after
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # the other white space
)

# Llama 3.1's special tokens, with the ids above BPE's; reserved 3, 4, ... fill them up to 256.
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 "
    "finetune_right_pad_id reserved_special_token_2 start_header_id end_header_id eom_id eot_id "
    "python_tag"
).split()
N_SPECIAL = 256

# A boundary of the split pattern whatever else is around: before a space that follows a non-space,
# and after a line end that a non-space follows.
CLEAN_CUT = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")
MAX_BPE_CHARS = 25_000  # tiktoken crawls on long runs of one kind, and panics on a million spaces


def find_cut(text, limit):
    """Where to cut `text`, at `limit` or at most 1,000 characters before it.

    Where it changes no token if there is such a place, else at `limit`, which can change one.
    """
    cuts = [m.start() for m in CLEAN_CUT.finditer(text, limit - 1000, limit + 1)]
    return cuts[-1] if cuts else limit


def load_bpe_ranks(path):
    """Read a tiktoken BPE file, lines of "base64 rank": {bytes of a token: rank}, and its hash."""
    try:
        content = Path(path).read_bytes()
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("its ranks are not 0, 1, 2, ...")
        if not all(bytes([value]) in ranks for value in range(256)):
            raise ValueError("it lacks some of the 256 single bytes")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer {path} cannot be used ({error}): it must be a tiktoken BPE file, lines "
            'of "base64 rank" like tokenizer.model of Llama 3; give one, or --tokenizer bytes'
        ) from error
    return ranks, hashlib.sha256(content).hexdigest()[:16]


class TiktokenTokenizer:
    """Llama 3's tokenizer, read from its `tokenizer.model`."""

    def __init__(self, path):
        import tiktoken

        ranks, self.fingerprint = load_bpe_ranks(path)
        n_reserved = N_SPECIAL - len(LLAMA3_SPECIAL)
        names = LLAMA3_SPECIAL + [f"reserved_special_token_{3 + i}" for i in range(n_reserved)]
        special_ids = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names)}
        self.name = Path(path).name
        self.n_ranks = len(ranks)
        self.vocab_size = len(ranks) + N_SPECIAL
        self.bos_id = special_ids["<|begin_of_text|>"]
        self.eos_id = special_ids["<|end_of_text|>"]
        self.bpe = tiktoken.Encoding(
            self.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special_ids
        )

    def encode(self, text):
        """uint32 ids of plain text: what looks like a special token in it is text as well."""
        parts, start = [np.zeros(0, np.uint32)], 0
        while start < len(text):
            stop = start + MAX_BPE_CHARS
            stop = find_cut(text, stop) if stop < len(text) else len(text)
            parts.append(self.bpe.encode_to_numpy(text[start:stop], disallowed_special=()))
            start = stop
        return np.concatenate(parts)

    def decode(self, ids):
        """The text of the ids; special ids have none."""
        return self.bpe.decode([int(i) for i in ids if i < self.n_ranks])


def load_tokenizer(spec):
    """The tokenizer of --tokenizer: "bytes", or the path of a tiktoken BPE file."""
    return ByteTokenizer() if str(spec) == "bytes" else TiktokenTokenizer(spec)


# ---- 2. Finding text ---------------------------------------------------------------------------

PLAIN_TEXT = (".txt", ".md", ".rst", ".py")  # a file is a document
JSON_LINES = (".jsonl", ".json")  # a line is a document, {"text": ...}
SUFFIXES = (*PLAIN_TEXT, *JSON_LINES, ".parquet")  # each also with .gz after it


def text_suffix(path):
    """The suffix that says how to read the file, .gz left away; "" if it is not text of ours."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES else ""


def find_standard_library():
    """Python's own source without its tests: 12 MB, the same wherever Python's version is."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(sys.stdlib_module_names)  # not the folder's list, which may hold site-packages
    files = [f for n in names for f in (root / f"{n}.py", *(root / n).rglob("*.py"))]
    tests = {"test", "tests", "idle_test"}  # some are broken on purpose
    return [f for f in files if f.is_file() and not tests & set(f.relative_to(root).parts)]


def find_texts(data):
    """The files that --data names, sorted. None names the source of Python's standard library.

    Else a file, a glob, or a folder with all below it but hidden files. ValueError if there is no
    text.
    """
    if data is None:
        files = find_standard_library()
    elif Path(data).is_dir():
        found = (f for f in Path(data).rglob("*") if f.is_file())
        files = [f for f in found if not any(p[0] == "." for p in f.relative_to(data).parts)]
    else:
        names = [data] if Path(data).exists() else glob.glob(str(data), recursive=True)
        files = [Path(name) for name in names if Path(name).is_file()]
    texts = sorted((f for f in files if text_suffix(f)), key=Path.as_posix)
    if not texts:
        found = f"none of the {len(files)} files there is text" if files else "no file is there"
        raise ValueError(
            f"--data {data}: {found}; it must name token shards, or a file, folder or quoted "
            f"glob of {' '.join(SUFFIXES)} or .gz of these: give another path, or leave --data out "
            "for the source of Python's standard library"
        )
    return texts


# ---- 3. Reading text ---------------------------------------------------------------------------

BLOCK_SIZE = 1 << 20  # bytes or characters read at once, and the size of a task: 0.05 s of BPE


class Piece(NamedTuple):
    """What a worker encodes: a document or a block of one (str), or whole JSON lines (bytes)."""

    file: int  # index in the list of files
    content: str | bytes | None  # None: a row without a text
    opens: bool = True  # the document begins here: BOS goes before it
    closes: bool = True  # it ends here: EOS goes after it


def read_plain(stream, file):
    """One document, however long, in blocks."""
    # an invalid byte becomes a lone surrogate here; encode_pieces counts and replaces those
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    text, opens = "", True
    while block := stream.read(BLOCK_SIZE):
        text += decoder.decode(block)
        if len(text) > BLOCK_SIZE:
            cut = find_cut(text, BLOCK_SIZE)
            yield Piece(file, text[:cut], opens, closes=False)
            text, opens = text[cut:], False
    yield Piece(file, text + decoder.decode(b"", final=True), opens)


def read_json_lines(stream, file):
    """Blocks of whole lines, which the workers parse."""
    parts = []
    while block := stream.read(BLOCK_SIZE):
        cut = block.rfind(b"\n") + 1
        if cut:
            yield Piece(file, b"".join(parts) + block[:cut])
            parts = []
        parts.append(block[cut:])
    yield Piece(file, b"".join(parts))


def read_parquet(stream, file):
    """The column `text`, a document a row."""
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(stream).iter_batches(1000, columns=["text"]):
        for text in batch["text"].to_pylist():
            yield Piece(file, text)


def read_pieces(path, file):
    """Yield (piece, bytes of the file read so far); ValueError, naming the file, if it is torn."""
    suffix = text_suffix(path)
    read = read_plain if suffix in PLAIN_TEXT else read_json_lines
    read = read_parquet if suffix == ".parquet" else read
    try:
        with open(path, "rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for piece in read(stream, file):
                yield piece, raw.tell()
    except (EOFError, ImportError, LookupError, OSError, ValueError, zlib.error) as error:
        raise ValueError(
            f"--data {path} cannot be read ({error}): a file must be whole, and .parquet needs a "
            "column `text` and `pip install pyarrow`; fetch the file again, or leave it out"
        ) from error


def read_batches(files):
    """Yield (pieces, about 1 MB together, files done, bytes done)."""
    pieces, size, bytes_done = [], 0, 0
    for file, path in enumerate(files):
        for piece, bytes_read in read_pieces(path, file):
            pieces.append(piece)
            size += len(piece.content or "")
            if size >= BLOCK_SIZE:
                yield pieces, file, bytes_done + bytes_read
                pieces, size = [], 0
        bytes_done += path.stat().st_size
    yield pieces, len(files), bytes_done


# ---- 4. Tokenising -----------------------------------------------------------------------------

FORMAT = 1  # of a folder of shards
SHARD_TOKENS = 1 << 26  # 256 MiB
FAULTS = {
    "skipped": "JSON lines or rows without a text were skipped",
    "repaired": "texts held invalid Unicode, replaced by U+FFFD",
}


def parse_json_line(line):
    """The text of a JSON line (bytes), None if it has none."""
    try:
        value = json.loads(line.decode("utf-8", "surrogateescape").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return value.get("text") if isinstance(value, dict) else None


def replace_surrogates(text):
    """The text itself if UTF-8 can hold it, else a copy with U+FFFD for what it cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_pieces(pieces, tokenizer):
    """uint32 tokens of the pieces, and a Counter of (what, index of the file)."""
    bos, eos = (np.array([i], np.uint32) for i in (tokenizer.bos_id, tokenizer.eos_id))
    arrays, counts = [bos[:0]], Counter()
    for piece in pieces:
        texts = [piece.content]
        if isinstance(piece.content, bytes):
            texts = [parse_json_line(line) for line in piece.content.split(b"\n") if line.strip()]
        for text in texts:
            if not isinstance(text, str):
                counts["skipped", piece.file] += 1
                continue
            if not text and piece.opens and piece.closes:
                counts["empty", piece.file] += 1
                continue
            valid = replace_surrogates(text)
            if valid is not text:
                counts["repaired", piece.file] += 1
            if piece.opens:
                counts["documents", piece.file] += 1
                arrays.append(bos)
            arrays.append(tokenizer.encode(valid))
            if piece.closes:
                arrays.append(eos)
    return np.concatenate(arrays), counts


class Progress:
    """Running totals, shown on stderr: one line rewritten on a terminal, else one every 10 s."""

    def __init__(self, files, is_shown):
        self.files = files
        self.n_bytes = sum(f.stat().st_size for f in files)
        self.counts = Counter()
        self.n_tokens = 0
        self.is_shown = is_shown
        self.is_live = sys.stderr.isatty()
        self.start = self.last = time.monotonic()

    def add(self, encoded, files_done, bytes_done):
        """Count what encode_pieces returned, and hand its tokens on."""
        tokens, counts = encoded
        self.n_tokens += len(tokens)
        self.counts.update(counts)
        now = time.monotonic()
        if self.is_shown and now - self.last > (0.2 if self.is_live else 10.0):
            self.last = now
            left_s = int((now - self.start) * (self.n_bytes / max(1, bytes_done) - 1))
            left = f", {left_s // 60}:{left_s % 60:02d} left"
            self.show(files_done, left, end="" if self.is_live else "\n")
        return tokens

    def total(self, kind):
        return sum(n for (k, _), n in self.counts.items() if k == kind)

    def show(self, files_done, left="", end="\n"):
        clear = "\r\x1b[K" if self.is_live else ""  # back to the line's start, and wipe it
        rate = self.n_tokens / 1e6 / (time.monotonic() - self.start)
        text = (
            f"{clear}tokenised {files_done:,} of {len(self.files):,} files: "
            f"{self.total('documents'):,} documents, {self.n_tokens / 1e6:,.2f} M tokens, "
            f"{rate:.2f} M tokens/s{left}"
        )
        print(text, end=end, file=sys.stderr, flush=True)

    def finish(self):
        if self.is_shown:
            self.show(len(self.files))
        for kind, text in FAULTS.items():
            found = sorted(file for k, file in self.counts if k == kind)
            if found:
                where = f"in {len(found):,} files, the first {self.files[found[0]]}"
                print(f"warning: {self.total(kind):,} {text} ({where})", file=sys.stderr)


def encode_in_order(files, tokenizer, n_workers, progress):
    """Yield arrays of tokens in the order of the text, encoded by `n_workers` threads.

    Threads, not processes: BPE, most of the work, runs outside Python's lock. So threads are as
    fast (seen on 2 cores), share one tokenizer, start at once, and are safe beside torch's own.
    """
    pending = deque()  # two tasks per worker: the only text in memory
    with ThreadPoolExecutor(n_workers) as pool:
        try:
            for pieces, *done in read_batches(files):
                pending.append((pool.submit(encode_pieces, pieces, tokenizer), done))
                if len(pending) == 2 * n_workers:
                    encoded, done = pending.popleft()
                    yield progress.add(encoded.result(), *done)
            for encoded, done in pending:
                yield progress.add(encoded.result(), *done)
        finally:
            pool.shutdown(cancel_futures=True)  # an error or Ctrl-C waits for running tasks only


def cut_shards(arrays, shard_tokens):
    """Yield the same stream in arrays of `shard_tokens`, the last shorter."""
    parts, n_tokens = [], 0
    for array in arrays:
        parts.append(array)
        n_tokens += len(array)
        while n_tokens >= shard_tokens:
            whole = np.concatenate(parts)
            yield whole[:shard_tokens]
            parts, n_tokens = [whole[shard_tokens:]], n_tokens - shard_tokens
    if n_tokens:
        yield np.concatenate(parts)


def sync(path):
    """Return when a file's bytes, or a folder's list of names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


@contextlib.contextmanager
def publish_folder(out):
    """Give an empty folder OUT.partial to fill, and rename it to `out` if the block ends well.

    So `out` is whole as soon as it exists. A lock, which falls with its process however that ends,
    keeps others out meanwhile: they get BlockingIOError, as they do once `out` exists.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, lock_path = Path(f"{out}.partial"), Path(f"{out}.lock")
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if out.exists():
                lock_path.unlink()
                raise BlockingIOError
        except BlockingIOError:
            raise BlockingIOError(
                f"--out {out} exists, or another process is writing it: token shards are never "
                "overwritten; give another --out, or remove this one first"
            ) from None
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir()
            yield partial
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(out)
            sync(out.parent)
            lock_path.unlink()
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def tokenize_corpus(
    files, tokenizer_spec, out, *, n_workers, shard_tokens=SHARD_TOKENS, show_progress=True
):
    """Write the files' tokens, in order, as a folder of shards; return what its index.json says.

    The shards depend on files, tokenizer and `shard_tokens`, never on `n_workers`. What ends this
    early, an error, Ctrl-C or the machine, leaves no `out`, and it can be run again.

    Costs:   memory of three shards, and about 10 MB per worker.
    Raises:  ValueError for an unreadable file or a corpus without a document; BlockingIOError if
             `out` exists or another process is writing it.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    progress, digest, shards = Progress(files, show_progress), hashlib.sha256(), []
    with publish_folder(Path(out)) as partial:
        encoded = encode_in_order(files, tokenizer, n_workers, progress)
        for shard in cut_shards(encoded, shard_tokens):
            shards.append({"file": f"tokens-{len(shards):05d}.npy", "n_tokens": len(shard)})
            np.save(partial / shards[-1]["file"], shard)
            digest.update(shard)
        if not shards:
            raise ValueError(
                f"--data {files[0]} and {len(files) - 1} more files: "
                f"{progress.total('empty')} empty documents, "
                f"{progress.total('skipped')} JSON lines or rows without a text; some "
                'document must have text: give other files, or name the JSON field "text"'
            )
        index = {
            "format": FORMAT,
            "tokenizer_name": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "n_tokens": progress.n_tokens,
            "fingerprint": digest.hexdigest()[:16],  # of the stream, however it is cut
            **{f"n_{kind}": progress.total(kind) for kind in ("documents", "empty", *FAULTS)},
            "shards": shards,
        }
        (partial / "index.json").write_text(json.dumps(index, indent=1))
    progress.finish()
    return index


# ---- 5. Token shards ---------------------------------------------------------------------------


class TokenShards:
    """A folder of token shards as one long array that stays on disk.

    Opening compares the counts in the index with the files, and reads no token.
    """

    def __init__(self, folder):
        folder = Path(folder)
        try:
            index = json.loads((folder / "index.json").read_text())
            assert index["format"] == FORMAT, f"format {index['format']} is not {FORMAT}"
            self.tokenizer_name = index["tokenizer_name"]
            self.tokenizer_fingerprint = index["tokenizer_fingerprint"]
            self.fingerprint = index["fingerprint"]
            self.vocab_size = int(index["vocab_size"])
            self.n_tokens = int(index["n_tokens"])
            self.paths = [folder / shard["file"] for shard in index["shards"]]
            lengths = []
            for path, shard in zip(self.paths, index["shards"], strict=True):
                array = np.load(path, mmap_mode="r")
                message = f"{path.name} does not hold {shard['n_tokens']} uint32 tokens"
                assert (array.dtype, array.shape) == (np.uint32, (shard["n_tokens"],)), message
                lengths.append(len(array))
            message = f"the shards hold {sum(lengths)} tokens, n_tokens says {self.n_tokens}"
            assert sum(lengths) == self.n_tokens, message
        except (OSError, EOFError, ValueError, LookupError, TypeError, AssertionError) as error:
            raise ValueError(
                f"--data {folder} is a damaged folder of token shards ({error!r}): index.json and "
                "the files it lists must be as data.py wrote them; tokenise the text again"
            ) from error
        self.ends = np.cumsum(lengths)  # position in the stream where each shard ends
        # an open map holds a file handle, of which a large corpus would use up too many
        self.map_shard = functools.lru_cache(128)(lambda i: np.load(self.paths[i], mmap_mode="r"))

    def n_windows(self, seq_len):
        return (self.n_tokens - 1) // seq_len

    def read(self, start, count):
        """Tokens start ... start + count - 1 of the stream: uint32 (count,)."""
        stop, parts = start + count, []
        assert 0 <= start < stop <= self.n_tokens, f"no tokens {start} to {stop} in {self.n_tokens}"
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


MAX_CACHED_BYTES = 2_000_000_000
PACKED_RATIO = 3  # bytes of text per byte of .gz or .parquet, roughly


def check_cache_size(files, data, tokenizer_spec):
    """Refuse to tokenise a large corpus at the start of a job whose other ranks would wait."""
    packed = (".gz", ".parquet")
    n_bytes = sum(f.stat().st_size * (PACKED_RATIO if f.suffix in packed else 1) for f in files)
    if n_bytes > MAX_CACHED_BYTES:
        command = ["python", "data.py", "--data", data, "--tokenizer", tokenizer_spec]
        raise ValueError(
            f"--data {data} is about {n_bytes / 1e9:.1f} GB of text (compressed bytes counted "
            f"{PACKED_RATIO} times), above the {MAX_CACHED_BYTES / 1e9:.0f} GB that training "
            "tokenises by itself: a larger corpus is tokenised ahead; run "
            f"`{shlex.join(map(str, command))} --out tokens`, then give --data tokens"
        )


def open_tokens(data, tokenizer_spec, *, cache_dir, is_builder):
    """The tokens that --data names: a folder of shards as it is, text through a cache of shards.

    On first use the process with `is_builder` tokenises the text. The others look for the folder
    now and then: no collective waits, so none can time out.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    if data is not None and (Path(data) / "index.json").is_file():
        tokens = TokenShards(data)
        if tokens.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"--tokenizer {tokenizer_spec} (fingerprint {tokenizer.fingerprint}) did not make "
                f"--data {data}: {tokens.tokenizer_name} ({tokens.tokenizer_fingerprint}) did; ids "
                "mean nothing to another tokenizer: give that one, or run data.py on the text again"
            )
        return tokens
    files = find_texts(data)
    # the standard library is the same on every node, except for when it was installed
    stats = [(f.name, f.stat().st_size, data and f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr((FORMAT, tokenizer.fingerprint, stats)).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"tokens-{key}"
    for attempt in itertools.count():
        if folder.is_dir():
            return TokenShards(folder)
        if attempt == 0:
            check_cache_size(files, data, tokenizer_spec)
        if attempt == 300:
            print(f"waiting for {folder}: do all nodes share --data-cache?", file=sys.stderr)
        if is_builder:
            with contextlib.suppress(BlockingIOError):  # another run is building it: wait too
                tokenize_corpus(files, tokenizer_spec, folder, n_workers=count_cpus())
                continue
        time.sleep(0.2)


# ---- 6. Shuffle --------------------------------------------------------------------------------


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

    x = shuffle_bits(np.array(i, dtype=np.uint64, ndmin=1))
    while (outside := x >= n).any():
        x[outside] = shuffle_bits(x[outside])
    return x.astype(np.int64).reshape(np.shape(i))


def window_at(position, n_windows, seed):
    """(epoch, window) of global sequence positions, an int or an array: int64 of its shape."""
    epoch, index = np.divmod(np.asarray(position, dtype=np.int64), n_windows)
    window = np.zeros_like(index)
    for e in np.unique(epoch):
        window[epoch == e] = permute(index[epoch == e], n_windows, f"{seed}:{e}")
    return epoch, window


# ---- 7. Batches --------------------------------------------------------------------------------

IGNORED = -100  # a label that takes no part in the loss


def read_windows(tokens, windows, seq_len):
    """Inputs and labels of the windows: int64 (B, T) each."""
    import torch

    rows = np.stack([tokens.read(int(w) * seq_len, seq_len + 1) for w in windows])  # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch_at(tokens, positions, *, seq_len, seed):
    """Inputs and labels of global sequence positions, of any epoch: int64 (B, T) each."""
    _, windows = window_at(positions, tokens.n_windows(seq_len), seed)
    return read_windows(tokens, windows, seq_len)


def validation_batch_at(tokens, positions, *, seq_len):
    """Inputs and labels of the windows themselves, unshuffled: int64 (B, T) each.

    Beyond the last window all labels are ignored, so that every rank can run the same number of
    batches, however many windows there are.
    """
    positions, n_windows = np.asarray(positions), tokens.n_windows(seq_len)
    inputs, labels = read_windows(tokens, np.minimum(positions, n_windows - 1), seq_len)
    labels.numpy()[positions >= n_windows] = IGNORED  # the same memory
    return inputs, labels


class BatchLoader:
    """Prepares the next step's batch in a thread while this step runs.

    Args:    read(step) -> (inputs, labels) on the CPU; the device they shall be on.
    Costs:   no host sync on CUDA: the thread copies from pinned memory on a stream of its own, and
             the step's stream, not the host, waits for the copy.
    """

    def __init__(self, read, device):
        import torch

        self.read = read
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)
        self.step, self.pending = None, None  # the step that is prepared, and its future
        self.wait_s = 0.0  # seconds that the last get waited

    def prepare(self, step):
        import torch

        batch = self.read(step)
        if self.stream is None:
            return [x.to(self.device) for x in batch], None
        with torch.cuda.stream(self.stream):  # makes its GPU the thread's, which would be GPU 0
            batch = [x.pin_memory().to(self.device, non_blocking=True) for x in batch]
            return batch, self.stream.record_event()

    def start(self, step):
        self.step, self.pending = step, self.thread.submit(self.prepare, step)

    def get(self, step):
        """Inputs and labels of `step` on the device. What `read` raised is raised here."""
        import torch

        start = time.perf_counter()
        if step != self.step:  # the first, or a jump
            self.start(step)
        batch, copied = self.pending.result()
        self.wait_s = time.perf_counter() - start
        self.start(step + 1)
        if copied is not None:
            step_stream = torch.cuda.current_stream(self.device)
            step_stream.wait_event(copied)
            for x in batch:
                x.record_stream(step_stream)  # its memory is free only after the step used it
        return batch


# ---- 8. The tool -------------------------------------------------------------------------------


def count_cpus():
    return len(os.sched_getaffinity(0))  # those this process may use, not those of the machine


def parse_args():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Tokenise text once, ahead of training. Then train with `train.py --data OUT` "
        "and the same --tokenizer.",
    )
    parser.add_argument(
        "--data",
        help="a file, a folder with all below it, or a quoted glob. A document is a file of "
        f"{' '.join(PLAIN_TEXT)}, the field `text` of a line of {' '.join(JSON_LINES)}, or "
        "the column `text` of a row of .parquet (needs pyarrow); each may be .gz. Lines without "
        "text and invalid UTF-8 are counted, reported and survived (default: the source of "
        "Python's standard library)",
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, or Llama 3's tokenizer.model (default: bytes)"
    )
    parser.add_argument("--out", required=True, type=Path, help="new folder, whole once it exists")
    parser.add_argument(
        "--workers", type=int, default=count_cpus(), help="threads that encode (default: all CPUs)"
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens of a file (default: 2^26)"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    counts = {"n_workers": args.workers, "shard_tokens": args.shard_tokens}
    try:
        if min(counts.values()) < 1:
            raise ValueError(
                f"--workers {args.workers}, --shard-tokens {args.shard_tokens}: both must be at "
                "least 1; leave them out for the defaults"
            )
        index = tokenize_corpus(find_texts(args.data), args.tokenizer, args.out, **counts)
    except (OSError, ValueError) as error:
        sys.exit(f"data.py: {error}")
    except KeyboardInterrupt:
        sys.exit("data.py: interrupted, nothing was written; run it again")
    print(f"{args.out}: {index['n_tokens']:,} tokens in {len(index['shards'])} shards")


if __name__ == "__main__":
    main()

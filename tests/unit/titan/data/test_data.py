"""Text to tokens to batches: guarantees for a training run, and errors for bad data."""

import hashlib
import io
import itertools
import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pyarrow import parquet
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_muon.trainer.checks.start import data_facts
from titan_muon.trainer.data import cache as cache_module
from titan_muon.trainer.data import files as files_module
from titan_muon.trainer.data.blocks import TokenBlocks
from titan_muon.trainer.data.corpus import Corpus, open_corpus
from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.data.loader import PackedDataLoader, bytes_per_token, dataloader_config
from titan_muon.trainer.data.tokenizers import BPETokenizer, ByteTokenizer, tokenizer_config, vocab_size
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.sections import Data

BOS, EOS, SEQ_LEN = 256, 257, 16
TEXTS = ["", "plain ascii\n", "naïve — ünïcode", "🙂🚀 한국어", "a\0b\r\n\ttabs", "�", "<s></s><|endoftext|>"]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Forty documents with unique bytes, so that a block identifies the documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"{i:02}" * (3 + i % 7) + "." * (i % 5))
    return Data(source="files", files=(f"{folder}/*.txt",), validation_fraction=0.25, cache=f"{tmp_path}/cache")


def build(data: Data, *, dp=1, rank=0, batch=2, validation=False, seq_len=SEQ_LEN, tokenizer=None, **changes):
    """The loader of a rank, by default with the data's tokenizer, and with changes of its configuration."""
    config = replace(dataloader_config(data, validation=validation), **changes)
    return config.build(
        dp_world_size=dp,
        dp_rank=rank,
        tokenizer=tokenizer or tokenizer_config(data).build(tokenizer_path="unused"),
        seq_len=seq_len,
        local_batch_size=batch,
        # As TorchTitan's trainer.
        snapshot_every_n_steps=1,
    )


def take(loader, count: int) -> list[torch.Tensor]:
    """Inputs, labels and positions of the next batches, each (batch, 3, seq_len)."""
    batches = itertools.islice(iter(loader), count)
    return [torch.stack([*map(sequences_of, (x["input"], labels, x["positions"]))], dim=1) for x, labels in batches]


def read_by_ranks(data: Data, dp: int, batch: int, steps: int, load=lambda loader: None) -> torch.Tensor:
    """Sequences of all ranks in the order of training. `load`: called with each loader first."""
    loaders = [build(data, dp=dp, rank=rank, batch=batch) for rank in range(dp)]
    for loader in loaders:
        load(loader)
    ranks = [take(loader, steps) for loader in loaders]
    return torch.cat([part for step in zip(*ranks, strict=True) for part in step])


def sequences_of(batch: torch.Tensor) -> torch.Tensor:
    """(batch, seq_len) from a batch of the installed TorchTitan's shape."""
    return batch.view(-1, SEQ_LEN)


def opened(data: Data) -> tuple[Documents, Corpus]:
    documents = Documents(data)
    return documents, open_corpus(documents, ByteTokenizer.Config().build())


def test_no_label_crosses_a_document_and_positions_restart(data):
    for batch in take(build(data), 30):
        assert (batch.shape, batch.dtype) == ((2, 3, SEQ_LEN), torch.int64)
        for inputs, labels, positions in batch:
            starts = inputs == BOS
            starts[0] = True
            assert torch.equal(positions == 0, starts)
            assert torch.equal(positions[1:][~starts[1:]], positions[:-1][~starts[1:]] + 1)
            assert BOS not in labels
            assert EOS not in inputs
            follows = ~starts[1:]
            assert torch.equal(labels[:-1][follows], inputs[1:][follows])
            assert (labels[:-1][~follows] == EOS).all()


def test_an_epoch_reads_every_prediction_once_and_drops_less_than_a_block(data):
    documents, corpus = opened(data)
    blocks = TokenBlocks(corpus, documents.training, SEQ_LEN, seed=3)
    wanted = Counter(pair for d in documents.training for pair in itertools.pairwise(corpus.document(d).tolist()))
    for epoch in range(2):
        numbers = range(epoch * blocks.per_epoch, (epoch + 1) * blocks.per_epoch)
        seen = Counter(pair for k in numbers for pair in zip(*map(np.ndarray.tolist, blocks[k][:2]), strict=True))
        assert seen <= wanted
        assert (wanted - seen).total() == wanted.total() % SEQ_LEN


def test_order_follows_the_seed_and_changes_with_the_epoch(data):
    first, again, other = (take(build(replace(data, seed=s)), 20) for s in (1, 1, 2))
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(other))
    documents, corpus = opened(data)
    blocks = TokenBlocks(corpus, documents.training, SEQ_LEN, seed=1)
    assert not np.array_equal(blocks[0].inputs, blocks[blocks.per_epoch].inputs)


def test_a_global_batch_is_the_same_under_any_number_of_ranks(data):
    """8 sequences a step: 1 rank of 8, 2 of 4, 4 of 2, and 2 of 2 with two accumulated batches."""
    whole = read_by_ranks(data, 1, 8, 6)
    for dp, batch in ((2, 4), (4, 2), (2, 2)):
        assert torch.equal(read_by_ranks(data, dp, batch, 48 // (dp * batch)), whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("dp", "batch"), [(1, 1), (4, 1), (2, 8)])
def test_a_checkpoint_resumes_at_the_next_block_under_any_layout(data, tmp_path, dp, batch):
    """Through DCP, like TorchTitan. Saved by a rank with batch 4 after 10 batches, in the second epoch."""
    stream = torch.cat(take(build(data, batch=4), 30))
    saved = build(data, batch=4)
    take(saved, 10)
    assert saved.state_dict()["blocks"] == 40 > saved._blocks.per_epoch
    dcp.save({"dataloader": saved}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    def load(loader):
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    resumed = read_by_ranks(data, dp, batch, 3, load)
    assert torch.equal(resumed, stream[40 : 40 + len(resumed)])


@pytest.mark.parametrize("change", [{"seed": 9}, {"validation_fraction": 0.5}, {"tokenizer": "bpe", "vocab_size": 260}])
def test_a_state_of_different_data_is_refused(data, change):
    state = build(data).state_dict()
    with pytest.raises(ValueError, match="exclude_from_loading"):
        build(replace(data, **change)).load_state_dict(state)


def held_out(data: Data) -> set[str]:
    documents = Documents(data)
    texts = [content.decode() for _, content in documents.contents()]
    return {texts[i] for i in documents.validation}


def test_new_documents_move_no_document_to_the_other_side_of_the_split(data, tmp_path):
    """Files of another folder rename all files; a run on more text must not train on held-out text."""
    before = held_out(data)
    (tmp_path / "more" / "deep").mkdir(parents=True)
    # With 61 more documents, a fixed share of all documents would select different documents.
    new = {f"something else {number}" for number in range(60)}
    for text in new:
        (tmp_path / "more" / "deep" / f"{text}.txt").write_text(text)
    (tmp_path / "text" / "07.txt").rename(tmp_path / "text" / "renamed.txt")
    after = held_out(replace(data, files=(*data.files, str(tmp_path / "more" / "**" / "*.txt"))))
    assert before == after - new


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_warm_cache_needs_no_text(data, monkeypatch, tokenizer):
    """A start on 8 ranks a node must not read 100 GB of text 16 times."""
    some = replace(data, tokenizer=tokenizer, vocab_size=290)
    expected = torch.cat(take(build(some), 5))
    monkeypatch.setattr(files_module.DataFile, "rows", lambda self: pytest.fail("read the text again"))
    monkeypatch.setattr(ByteTokenizer, "documents", lambda self, texts: pytest.fail("tokenized again"))
    monkeypatch.setattr(Documents, "training_texts", lambda self: pytest.fail("trained again"))
    monkeypatch.setattr(cache_module, "FileLock", lambda path: pytest.fail("wrote to a complete cache"))
    assert torch.equal(torch.cat(take(build(some), 5)), expected)
    build(some, validation=True)


def rows(data: Data, name: str) -> Data:
    return replace(data, files=(str(Path(data.files[0]).with_name(name)),))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_a_file_are_documents(data, tmp_path, suffix):
    texts = [path.read_text() for path in sorted((tmp_path / "text").iterdir())]
    table = [{"text": text, "url": "x"} for text in [*texts, ""]]
    file = tmp_path / "text" / f"all{suffix}"
    if suffix == ".jsonl":
        file.write_text("\n\n".join(map(json.dumps, table)) + "\n")
    else:
        parquet.write_table(pyarrow.Table.from_pylist([*table, {"text": None}]), file)
    from_rows = rows(data, file.name)
    assert held_out(from_rows) == held_out(data)
    assert Documents(from_rows).count == 40
    assert torch.equal(torch.cat(take(build(from_rows), 30)), torch.cat(take(build(data), 30)))


def test_every_start_says_documents_tokens_and_passes(data):
    documents = Documents(data)
    training = len(documents.training)
    tokens = sum(documents.all[number].size + 1 for number in documents.training)
    said = f"data: {training} documents of data.files with {tokens} tokens, and {40 - training} held out; "
    epoch = tokens // SEQ_LEN
    for sequences, passes in ((epoch * 2500, "7,500.0"), (1, f"{3 / epoch:.2g}")):
        assert build(data).describe(3, sequences) == [f"{said}the run makes {passes} passes over them"]
    resumed = build(data)
    resumed.load_state_dict(resumed.state_dict() | {"blocks": epoch})
    assert "makes 4.0 passes" in resumed.describe(3, epoch)[0]


def test_every_start_warns_of_files_that_are_hardly_text(data, tmp_path):
    (tmp_path / "text" / "random.txt").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "text" / "rows.jsonl").write_text(json.dumps({"text": "\ufffd" * 9}) + "\n" + json.dumps({"text": "a"}))
    for _ in range(2):
        *_, line = build(rows(data, "*")).describe(1, 1)
        doubtful = f"{tmp_path}/text/random.txt, {tmp_path}/text/rows.jsonl"
        assert line == f"warning: data.files: many bytes are not UTF-8 in {doubtful}; is this text?"
    assert build(rows(data, "0*.txt")).describe(1, 1)[1:] == []


def test_a_folder_contributes_its_files_of_known_formats(data, tmp_path):
    folder = tmp_path / "text"
    (folder / "deep [1]").mkdir()
    for name in ("notes.md", "rows.jsonl", "picture.png", ".hidden.txt"):
        (folder / "deep [1]" / name).write_text('{"text": "a"}')
    documents = Documents(replace(data, files=(str(folder),)))
    names = [file.name for file in documents.all]
    assert names == [*(f"{i:02}.txt" for i in range(40)), "deep [1]/notes.md", "deep [1]/rows.jsonl"]
    others = f"has files of other formats, which are not read: {folder}/deep [1]/picture.png"
    assert documents.warnings() == [f"data.files: {str(folder)!r} {others}"]


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_of_the_split_have_a_document(data, fraction):
    documents = Documents(replace(data, validation_fraction=fraction))
    assert min(len(documents.training), len(documents.validation)) == 1


def held_out_blocks(data: Data, dp: int, batch: int, sequences: int) -> list[bytes]:
    """The inputs of every counted sequence in a validation on `dp` ranks, in no order."""
    loaders = [build(data, dp=dp, rank=r, batch=batch, validation=True, sequences=sequences) for r in range(dp)]
    ranks = [list(loader) for loader in loaders]
    assert len({len(batches) for batches in ranks}) == 1, "an uneven rest leaves some ranks waiting in a collective"
    read = []
    for inputs, labels in itertools.chain(*ranks):
        counted = sequences_of(labels != -100).any(dim=1)
        assert torch.equal(counted, sequences_of(labels != -100).all(dim=1)), "a filler counts no token at all"
        read += [row.numpy().tobytes() for row in sequences_of(inputs["input"])[counted]]
    for batches, loader in zip(ranks, loaders, strict=True):
        again = [inputs["input"] for inputs, _ in loader]
        assert all(torch.equal(now["input"], later) for (now, _), later in zip(batches, again, strict=True))
    return sorted(read)


@pytest.mark.parametrize("sequences", [-1, 5, 1, 1000])
def test_a_validation_reads_the_same_sequences_on_every_layout(data, sequences):
    """With any seed, and in every pass."""
    documents, corpus = opened(data)
    held_out = TokenBlocks(corpus, documents.validation, SEQ_LEN, seed=None)
    count = held_out.per_epoch if sequences == -1 else min(sequences, held_out.per_epoch)
    expected = sorted(held_out[i].inputs.tobytes() for i in range(count))
    assert count > 5 or sequences in (1, 5), "the text must not divide evenly, or nothing is filled up"
    for seed, (dp, batch) in enumerate(((1, 1), (1, 4), (3, 1), (2, 3), (8, 2))):
        assert held_out_blocks(replace(data, seed=seed), dp, batch, sequences) == expected, (dp, batch)


def test_a_validation_in_microbatches_ends_with_a_whole_batch(data):
    """TorchTitan drops a pipeline batch with missing last microbatches."""
    loader = build(data, dp=2, batch=1, validation=True, sequences=5, multiple=8)
    assert len(list(loader)) == loader.batches == 4


def test_bytes_per_token_count_the_sequences_of_a_validation(data, tmp_path):
    """The loss covers the first sequences only, and documents may differ in bytes per token."""
    folder = tmp_path / "three"
    folder.mkdir()
    texts = ("é" * 64, "plain text " * 12, "한" * 40)
    for name, text in zip("abc", texts, strict=True):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    tokenizer = ByteTokenizer.Config().build()
    tokenizer.documents = lambda texts: [np.array([BOS, *range(min(len(text), 250)), EOS]) for text in texts]
    tokenizer.fingerprint = "characters"
    three = replace(data, files=(str(folder / "*.txt"),), validation_fraction=0.9999999)
    config = dataloader_config(three, validation=True)
    first, second = (texts[number] for number in Documents(three).validation)
    expected = len(first.encode()) / (len(first) + 1)
    single = replace(config, sequences=1)
    assert bytes_per_token(single, tokenizer, len(first) + 1) == pytest.approx(expected)
    assert bytes_per_token(single, tokenizer, 8) == pytest.approx(expected), "a part in proportion"
    both = len((first + second).encode()) / (len(first) + len(second) + 2)
    assert bytes_per_token(config, tokenizer, 1) == pytest.approx(both)


def test_the_standard_library_packs(tmp_path, monkeypatch):
    real = files_module._python_files()
    assert len(real) > 300
    assert not any("site-packages" in name for name in real)
    few = {name: real[name] for name in ("json/decoder.py", "json/encoder.py", "json/scanner.py", "bisect.py")}
    monkeypatch.setattr(files_module, "_python_files", lambda: few)
    inputs = torch.cat([batch[:, 0].flatten() for batch in take(build(Data(cache=str(tmp_path)), batch=4), 100)])
    assert "def " in ByteTokenizer.Config().build().decode(inputs.tolist())


def test_tokenizers_round_trip_any_text(data):
    bpe = replace(data, tokenizer="bpe", vocab_size=280)
    tokenizers = (ByteTokenizer.Config().build(tokenizer_path="unused"), tokenizer_config(bpe).build())
    for tokenizer, text in itertools.product(tokenizers, TEXTS):
        ids = tokenizer.encode(text, add_bos=True, add_eos=True)
        assert ids[0] == tokenizer.bos_id == tokenizer.get_vocab_size() - 2
        assert ids[-1] == tokenizer.eos_id == tokenizer.get_vocab_size() - 1
        assert ids[1:-1] == tokenizer.encode(text)
        assert all(0 <= i < tokenizer.bos_id for i in ids[1:-1])
        assert tokenizer.decode(ids) == text


def test_the_words_of_a_text_have_the_ids_of_the_whole_text(data):
    text, characters = Path(__file__).read_text(), "".join(map(chr, range(128)))
    odd = "it's  \n\n x'''s 1'll \x1c\x1f a\r\n\t b ' s"
    bpe = tokenizer_config(replace(data, tokenizer="bpe", vocab_size=290)).build()
    for case in (text, *TEXTS, 2 * characters, " ".join(characters), odd):
        assert bpe.encode(case) == bpe.bpe.encode(case).ids


def test_invalid_utf8_is_replaced(data, tmp_path):
    tokenizer = ByteTokenizer.Config().build()
    assert tokenizer.decode([0xFF, ord("a"), 0xF0, 0x9F]) == "�a�"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    (tmp_path / "text" / "broken.txt").write_bytes(b"caf\xe9 \xff")
    documents, corpus = opened(data)
    broken = next(i for i, d in enumerate(documents.all) if d.name == "broken.txt")
    assert tokenizer.decode(corpus.document(broken).tolist()) == "caf� �"
    assert corpus.text_bytes[broken] == len("caf� �".encode())


def test_bpe_is_trained_on_the_training_side(data):
    bpe = replace(data, tokenizer="bpe", vocab_size=290)
    tokenizer = tokenizer_config(bpe).build(tokenizer_path="unused")
    assert tokenizer.get_vocab_size() == vocab_size(bpe) == 290
    texts = list(Documents(bpe).training_texts())
    assert len(texts) < 40
    assert sum(len(tokenizer.encode(text)) for text in texts) < 0.9 * sum(map(len, texts))


@pytest.mark.parametrize(("kind", "share"), [("documents", 0.9), ("bpe", 0.5), ("corpus", 0)])
def test_a_damaged_cache_is_made_again(data, caplog, kind, share):
    some = replace(data, tokenizer="bpe", vocab_size=290)
    expected = torch.cat(take(build(some), 5))
    [file] = Path(data.cache).glob(f"{kind}-*.arrow")
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    assert torch.equal(torch.cat(take(build(some), 5)), expected)
    assert "is damaged" in caplog.text


def test_a_damaged_document_of_the_cache_is_refused_at_the_first_reading(data):
    """Otherwise a damaged cache of one node would train other text there."""
    before = take(build(data), 5)
    [file] = Path(data.cache).glob("corpus-*.arrow")
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[content.index(b"2\x002\x002\x002\x00")] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(RuntimeError, match=rf"{file.name} is damaged: document 22 has other tokens.*Delete the file"):
        take(build(data), 40)
    file.unlink()
    assert all(map(torch.equal, take(build(data), 5), before))


@pytest.mark.parametrize("text", ["a line of text\n" * 40, "no line — at all " * 40, "a\n" + "long " * 100])
def test_the_end_of_a_single_document_is_held_out(data, tmp_path, text):
    (tmp_path / "book.txt").write_text(text)
    single = replace(data, files=(f"{tmp_path}/book.txt",))
    documents, corpus = opened(single)
    assert (documents.training.tolist(), documents.validation.tolist()) == ([0], [1])
    parts = [bytes(corpus.document(n)[1:-1].astype(np.uint8)).decode() for n in range(2)]
    assert "".join(parts) == text
    assert 0.15 < len(parts[1]) / len(text) < 0.26
    assert parts[0].endswith("\n") or "\n" not in text[len(text) // 2 :]
    lines = build(single).describe(1, 1)
    assert lines[1] == f"data: {tmp_path}/book.txt: its end is held out, because it is a single document"
    assert list(Documents(replace(single, tokenizer="bpe")).training_texts()) == parts[:1]
    fingerprints = {build(replace(single, validation_fraction=f)).fingerprint for f in (0.0, 0.25, 0.3)}
    assert len(fingerprints) == 3
    assert Documents(replace(single, validation_fraction=0.0)).count == 1


def test_the_end_of_each_single_document_of_a_mixture_and_of_tokens_is_held_out(data, tmp_path):
    """Otherwise the only document of an entry may be held out, and the entry has no training text."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 50)
    np.arange(200, dtype="<u2").tofile(tmp_path / "three.bin")
    files = (f"{tmp_path}/one.txt", f"{tmp_path}/two.txt", f"{tmp_path}/three.bin", *data.files)
    documents, corpus = opened(replace(data, files=files, weights=(1.0,) * 4))
    for side in (documents.training, documents.validation):
        assert set(documents.entries()[side].tolist()) == {0, 1, 2, 3}
    assert documents.count == 46
    [head, tail] = np.flatnonzero(documents.entries() == 2)
    assert corpus.document(head)[1:-1].tolist() == list(range(150))
    assert corpus.document(tail)[1:-1].tolist() == list(range(150, 200))
    assert opened(replace(data, files=files[:2]))[0].count == 2, "one stream of two documents"


def test_a_cache_in_a_shared_folder_follows_no_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "rows.partial").symlink_to(victim)
    table = cache_module.cached(str(tmp_path), "rows", iter([{"n": 1}]), {"n": "int64"})
    assert table.to_pylist() == [{"n": 1}]
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("tokenizer", "validation", "digest"),
    [
        ("bytes", False, "b9d45f864981a8f3"),
        ("bytes", True, "7dba979c1d8da662"),
        ("bpe", False, "8a189a6a2f85d065"),
        ("bpe", True, "b5f586d14388616d"),
    ],
)
def test_the_tokens_and_their_order_never_change(data, monkeypatch, tokenizer, validation, digest, workers):
    """Digests of 60 batches over two epochs: a newer version must continue the checkpoints of an older one."""
    monkeypatch.setattr("titan_muon.trainer.data.corpus._DOCUMENTS_AT_ONCE", 3)
    loader = build(replace(data, tokenizer=tokenizer, vocab_size=290, workers=workers), validation=validation)
    assert hashlib.sha256(torch.cat(take(loader, 60)).numpy().tobytes()).hexdigest()[:16] == digest
    assert loader.fingerprint[:8] == {"bytes": "76147bc2", "bpe": "da397853"}[tokenizer]


def test_order_and_split_depend_on_files_not_on_patterns(data, tmp_path, monkeypatch):
    """Absolute or relative, from any folder, once or twice matched: the same files train and are held out."""
    (tmp_path / "text" / "deep").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number:02}.txt").rename(tmp_path / "text" / "deep" / f"{number:02}.txt")
    monkeypatch.chdir(tmp_path / "text")
    digests = []
    for files in ((f"{tmp_path}/**/*.txt",), ("**/*.txt", "0*.txt"), ("../text/[0-1]*.txt", "./[2-9]*.txt", "deep/*")):
        documents = Documents(replace(data, files=files))
        names = [document.name for document in documents.all]
        digests.append((names, documents.digest, documents.training.tolist(), documents.validation.tolist()))
    assert digests[0] == digests[1] == digests[2]
    assert digests[0][0][-5:] == [f"deep/{number:02}.txt" for number in range(5)]


def written(write: Callable[..., object], *content: object) -> bytes:
    write(stream := io.BytesIO(), *content)
    return stream.getvalue()


def parquet_of(column: list[object]) -> bytes:
    return written(lambda stream: parquet.write_table(pyarrow.table({"text": column}), stream))


HUGE = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1152921504606846976,), }".ljust(117) + b"\n"
# Files of the folder, changed keys, and the start of the error.
REFUSED = {
    "a damaged size": ({"a.npy": b"\x93NUMPY\1\0v\0" + HUGE}, {}, r".*a\.npy' cannot be read: Unable to allocate"),
    "below zero": ({"a.npy": written(np.save, np.array([-1]))}, {}, r".*a\.npy.*one axis of integers from 0"),
    "lists": ({"a.parquet": parquet_of([["a", "b"]])}, {}, r".*'text' \(data\.text_key\) is of type list<.*not text"),
    "bytes": ({"a.parquet": parquet_of([b"a"])}, {}, r".*'text' \(data\.text_key\) is of type binary.*not text"),
    "numbers": ({"a.parquet": parquet_of([1])}, {}, r".*'text' \(data\.text_key\) is of type int64.*not text"),
    "another field": ({"a.jsonl": '{"text": "one"}\n{"body": "two"}\n'}, {}, r".*a\.jsonl:2: no field data\.text_key"),
    "a number": ({"a.jsonl": '{"text": 5}'}, {}, r".*a\.jsonl:1: 'text' \(data\.text_key\) is 5, not text"),
    "not JSON": ({"a.jsonl": '{"text": "one"}\nnot json\n'}, {}, r".*a\.jsonl:2: not JSON"),
    "no object": ({"a.jsonl": "[1]\n"}, {}, r".*a\.jsonl:1: it is of type list; a row is an object"),
    "deep": ({"a.jsonl": '{"text": "one"}\n' + "[" * 100_000}, {}, r".*a\.jsonl:2: .* nested too deeply"),
    "odd bytes": ({"a.bin": "abc"}, {}, r".*a\.bin is cut off within a token of uint16; see data\.token_dtype"),
    "another vocabulary": ({"a.bin": "ab"}, {}, r".*token 25185 in .*a\.bin: data\.tokenizer has 258"),
    "an archive": ({"a.npy": "PK\3\4" * 4}, {}, r".*a\.npy' cannot be read: the magic string is not correct"),
    "tokens": ({"a.bin": "abab"}, {"tokenizer": "bpe", "validation_fraction": 0.0}, r".*a\.bin has tokens and no text"),
    "unknown protocol": ({}, {"files": ("nowhere://a/*.txt",)}, r"data\.files: 'nowhere://a/\*\.txt' cannot be read"),
    "a chain of URLs": ({}, {"files": ("simplecache::memory://a",)}, r".*'simplecache::memory://a' chains file"),
    "bad rows alone": ({"a.jsonl": '{"body": 1}\n'}, {"bad_rows": "skip"}, r".*a\.jsonl:1: no field data\.text_key"),
    "no URL": ({}, {"files": ("memory://nothing/*.txt",)}, r"data\.files: 'memory://nothing/\*\.txt' matches no file"),
    "compressed": ({"a.jsonl.gz": "x"}, {}, r".*a\.jsonl\.gz is compressed; decompress it"),
    "not parquet": ({"a.parquet": "not parquet"}, {}, r".*a\.parquet' cannot be read"),
    "empty": ({"a.txt": ""}, {}, r"data\.files.*no text to train on; 1 empty file found"),
    "empty rows": ({"a.jsonl": '{"text": ""}\n'}, {}, r"data\.files.*no text to train on"),
    "silence": ({}, {"files": ("http://user:secret@localhost:1/a.txt",)}, r"data\.files: 'http://\*\*\*@localhost:1/"),
    "arguments": ({}, {"files": ("reference://a",)}, r"data\.files: 'reference://a' cannot be read: TypeError:"),
    "single": ({"a.txt": "x"}, {}, r"The training text has no block of training\.seq_len"),
    "short": ({"a.txt": "a", "b.txt": "b"}, {}, r"The training text has no block of training\.seq_len"),
    "no match": ({}, {"files": ("/nowhere/**/*.md",)}, r"data\.files: '/nowhere/\*\*/\*\.md' matches no file"),
    "cache": ({"a.txt": "a"}, {"cache": "/dev/null/cache"}, r"data\.cache = '/dev/null/cache' cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_cannot_be_trained_on_is_refused_by_name(tmp_path, case):
    files, changes, message = REFUSED[case]
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    data = Data(source="files", files=(f"{tmp_path}/*.*",), validation_fraction=0.25, cache=f"{tmp_path}/cache")
    with pytest.raises(RecipeError, match=f"^{message}"):
        build(replace(data, **changes))


def test_a_silent_server_is_named_within_the_limit_and_no_password_is_printed(data, monkeypatch, caplog):
    monkeypatch.setattr(files_module, "HTTP_SECONDS", 0.3)
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://user:secret@127.0.0.1:{server.getsockname()[1]}/a.txt"
        with pytest.raises(RecipeError, match=r"'http://\*\*\*@127.*' cannot be read: FSTimeoutError\. Check") as error:
            opened(replace(data, files=(url,)))
    assert "Looking for the files of http://***@127" in caplog.text
    assert "secret" not in caplog.text + str(error.value)


def test_validation_needs_held_out_text(data):
    for options in ({"data": replace(data, validation_fraction=0.0)}, {"data": data, "seq_len": 10_000}):
        with pytest.raises(RecipeError, match=r"held-out text has no block .*validation_fraction"):
            build(validation=True, **options)


def test_a_folder_without_text_is_refused_with_a_pattern(data, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.py").write_text("text")
    pattern = f"{folder}/**/*.py"
    problem = f"the folder '{folder}' has no file of .bin, .jsonl, .md, .npy, .parquet, .txt. Name other files by a"
    with pytest.raises(RecipeError, match=re.escape(f"{problem} pattern, as {pattern!r}")):
        build(replace(data, files=(str(folder),)))
    assert [Path(file.path).name for file in Documents(replace(data, files=(pattern,))).all] == ["a.py"]


def save_hf_tokenizer(data: Data, folder: Path, marks: dict[str, str]) -> Data:
    bpe = tokenizer_config(replace(data, tokenizer="bpe", vocab_size=300)).build()
    assert isinstance(bpe, BPETokenizer)
    folder.mkdir()
    bpe.bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return replace(data, tokenizer="hf", tokenizer_path=str(folder))


@pytest.mark.parametrize("marks", [{"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "</s>"}])
def test_the_hf_tokenizer_marks_start_and_end_of_every_document(data, tmp_path, marks):
    """A tokenizer without an opening mark opens documents with the closing mark."""
    hf = save_hf_tokenizer(data, tmp_path / "hf", marks)
    tokenizer = tokenizer_config(hf).build(tokenizer_path="not this folder")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    opening, closing = (tokenizer.token_to_id(t) for t in (marks.get("bos_token", "</s>"), "</s>"))
    ids = tokenizer.documents(["0707"])[0].tolist()
    assert (ids[0], ids[-1]) == (opening, closing)
    assert tokenizer.decode(ids[1:-1]) == "0707"
    assert tokenizer.get_vocab_size() == max(opening, closing) + 1
    assert vocab_size(hf) is None, "the model brings its own"
    assert isinstance(build(hf), PackedDataLoader)
    other = save_hf_tokenizer(data, tmp_path / "other", {"eos_token": "<end>"})
    facts = [data_facts(build(table), tokenizer_config(table).build()) for table in (hf, hf, other)]
    assert facts[0] == facts[1]
    assert all(facts[0][name] != facts[2][name] for name in facts[0]), "ranks compare these digests"


def test_the_hf_tokenizer_needs_a_file_and_a_mark(data, tmp_path):
    empty = replace(data, tokenizer="hf", tokenizer_path=str(tmp_path))
    with pytest.raises(RecipeError, match=r"data\.tokenizer_path.*tokenizer\.json"):
        tokenizer_config(empty).build()
    with pytest.raises(RecipeError, match="neither bos_token nor eos_token"):
        tokenizer_config(save_hf_tokenizer(data, tmp_path / "hf", {})).build()


def test_hf_source_is_torchtitans_own_loader():
    hf = Data(source="hf", dataset="c4", dataset_path="local/c4", tokenizer="hf", tokenizer_path="folder")
    for validation in (False, True):
        config = dataloader_config(hf, validation=validation)
        assert config._owner.__name__ == "HFTextLoader"
        assert "local/c4" in repr(config)
        assert ("validation" in repr(config)) is validation
        assert bytes_per_token(config, ByteTokenizer.Config().build(), 1) is None
    with pytest.raises(RecipeError, match=r"data\.dataset = 'c5'.*c4"):
        dataloader_config(replace(hf, dataset="c5"))
    with pytest.raises(RecipeError, match=r"c4_test_validation.*validator\.enable"):
        dataloader_config(replace(hf, dataset="c4_test"), validation=True)


def shares(loader: PackedDataLoader, batches: int, sources: int) -> np.ndarray:
    """(batches, sources): blocks of each source, whose documents are digits of that source, in all batches so far."""
    read = torch.stack([rows[:, 0] for rows in take(loader, batches)])
    return np.stack([(read == ord(str(number))).any(dim=2).sum(dim=1) for number in range(sources)], 1).cumsum(axis=0)


@pytest.fixture
def mixture(tmp_path) -> Data:
    """Three sources of different size, each of one digit."""
    files = []
    for number, documents in enumerate((30, 4, 9)):
        (tmp_path / str(number)).mkdir()
        files.append(str(tmp_path / str(number)))
        for name in range(documents):
            (tmp_path / str(number) / f"{name}.txt").write_text(str(number) * (20 + name))
    return Data(files=tuple(files), source="files", weights=(5, 3, 0.5), validation_fraction=0.1, cache=str(tmp_path))


@pytest.mark.parametrize("weights", [(5, 3, 0.5), (1, 1, 1), (0.001, 1, 0.03), (0.7, 0.2, 0.1)])
def test_a_mixture_has_its_shares_after_every_block_and_after_a_resume(mixture, weights):
    weighted = replace(mixture, weights=weights)
    whole = shares(build(weighted, batch=1), 400, 3)
    wanted = np.arange(1, 401)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(whole - wanted).max() < 1
    loader = build(weighted, batch=1)
    take(loader, 150)
    resumed = build(weighted, batch=1)
    resumed.load_state_dict(loader.state_dict())
    assert np.array_equal(whole[149] + shares(resumed, 250, 3), whole[150:])


def test_a_mixture_reads_each_source_in_its_own_order_on_any_number_of_ranks(mixture):
    whole = read_by_ranks(mixture, 1, 4, 12)
    assert torch.equal(read_by_ranks(mixture, 2, 2, 12), whole)
    documents, corpus = opened(mixture)
    for number in range(3):
        training = documents.training[documents.entries()[documents.training] == number]
        alone = TokenBlocks(corpus, training, SEQ_LEN, seed=mixture.seed)
        mixed = whole[(whole[:, 0] == ord(str(number))).any(dim=1)]
        assert np.array_equal(mixed[:, 0], np.stack([alone[k].inputs for k in range(len(mixed))]))


def test_a_mixture_says_shares_and_passes_and_validates_on_all_sources(mixture):
    lines = build(mixture).describe(2, 100)
    for line, share, file in zip(lines[1:], ("58.8%", "35.3%", "5.9%"), mixture.files, strict=True):
        assert re.fullmatch(rf"data: {share} of the blocks from {file}, [\d,]+ tokens, [\d.]+ passes", line)
    held = Documents(mixture).validation
    assert build(mixture, validation=True)._blocks.tokens == (opened(mixture)[1].tokens[held] - 1).sum()
    for changed in ({"weights": (5, 3, 0.6)}, {"files": mixture.files[::-1]}):
        with pytest.raises(ValueError, match=r"data\.weights"):
            build(replace(mixture, **changed)).load_state_dict(build(mixture).state_dict())
    one, two, three = mixture.files
    for files, message in (
        ((one, two, f"{two}/2*"), r"data\.files\[1\] and data\.files\[2\] both match .*2\.txt"),
        ((one, two, f"{three}/1.txt"), r"text of data\.files\[2\] has no block"),
    ):
        with pytest.raises(RecipeError, match=message):
            build(replace(mixture, files=files), seq_len=64)


def test_bad_rows_are_skipped_on_request_and_counted(data, tmp_path):
    good = [json.dumps({"text": f"{number}" * 40}) for number in range(5)]
    bad = ["not json", "[1]", '{"\\ud800": "x"}', '{"text": 5}']
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(good + bad) + "\n")
    (tmp_path / "text" / "b.jsonl").write_text("\n".join(good))
    skipping = replace(rows(data, "*.jsonl"), bad_rows="skip")
    folder = tmp_path / "text"
    (folder / "c.jsonl").write_text("\n".join([*good, "[2]"]))
    for _ in range(2):
        (line,) = build(skipping).describe(1, 1)[1:]
        assert line.startswith(f"data: 5 rows of 2 files skipped, the first: data.files: {folder}/a.jsonl:6: not JSON")
    (folder / "c.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"a\.jsonl:6: not JSON"):
        build(rows(data, "*.jsonl"))
    fingerprint = build(skipping).fingerprint
    (folder / "a.jsonl").write_text("\n".join(good))
    assert build(skipping).fingerprint == fingerprint


def token_files(folder: Path, ids: list[int]) -> dict[str, dict[str, str]]:
    """The same tokens in each format, with the keys that declare them."""
    np.array(ids, "<u2").tofile(folder / "raw16.bin")
    np.array(ids, "<u4").tofile(folder / "raw32.bin")
    for name, magic, dtype in (("gpt2.bin", 20240520, "<u2"), ("llama3.bin", 20240801, "<u4")):
        header = np.zeros(256, "<i4")
        header[0] = magic
        (folder / name).write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    np.save(folder / "signed.npy", np.array(ids, np.int64))
    keys = {name: {} for name in ("raw16.bin", "gpt2.bin", "llama3.bin", "signed.npy")}
    return {**keys, "raw32.bin": {"token_dtype": "uint32"}}


@pytest.mark.parametrize("at_once", [70, 1 << 20])
@pytest.mark.parametrize("marked", ["before", "after", "both"])
def test_files_of_tokens_are_the_documents_of_their_text(data, tmp_path, monkeypatch, marked, at_once):
    """Whatever the format, the place of marks and the number of tokens that are read at once."""
    monkeypatch.setattr(files_module, "TOKENS_AT_ONCE", at_once)
    documents, corpus = opened(data)
    texts = [corpus.document(number).tolist() for number in range(documents.count)]
    side = {"before": slice(0, -1), "after": slice(1, None), "both": slice(None)}[marked]
    (tmp_path / "tokens").mkdir()
    for name, keys in token_files(tmp_path / "tokens", [i for text in texts for i in text[side]]).items():
        tokens = replace(data, files=(f"{tmp_path}/tokens/{name}",), token_marks=(BOS, EOS), **keys)
        other, read = opened(tokens)
        assert [read.document(number).tolist() for number in range(other.count)] == texts
        assert build(tokens).describe(1, 1)[1:] == []
        assert bytes_per_token(dataloader_config(tokens, validation=True), ByteTokenizer.Config().build(), 1) is None


def test_tokens_without_marks_are_cut_into_long_documents(data, tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "TOKENS_AT_ONCE", 50)
    ids = list(range(130))
    for name, keys in token_files(tmp_path, ids).items():
        other, read = opened(replace(data, files=(f"{tmp_path}/{name}",), **keys))
        cut = [read.document(number).tolist()[1:-1] for number in range(other.count)]
        assert cut == [ids[:50], ids[50:100], ids[100:]]


def test_urls_are_read_as_paths(data, tmp_path):
    memory = fsspec.filesystem("memory")
    (tmp_path / "text" / "rows.jsonl").write_text('{"text": "a row"}\n')
    (tmp_path / "text" / ".hidden.txt").write_text("hidden")
    memory.put(f"{tmp_path}/text", "/corpus/text", recursive=True)
    by_path = build(replace(data, files=(str(tmp_path / "text"),)))
    read = torch.cat(take(by_path, 8))
    for folder in ("memory://corpus/text", f"file://{tmp_path}/text"):
        for files in ((folder,), (f"{folder}/[0-9]*.txt", f"{folder}/rows.jsonl")):
            by_url = build(replace(data, files=files, cache=str(tmp_path / "other")))
            assert by_url.fingerprint == by_path.fingerprint
            assert torch.equal(torch.cat(take(by_url, 8)), read)
    memory.pipe("/corpus/text/00.txt", b"changed")
    assert build(replace(data, files=("memory://corpus/text",))).fingerprint != by_path.fingerprint

"""Checkpoints of strangers, and damaged ones: nothing in them runs, even where the manifest fits what they hold."""

import copyreg
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.optim.lr_scheduler import LambdaLR

from distca.apps.common.options import ConfigError
from distca.apps.train import manifest
from distca.apps.train.checkpoint import Checkpoints, RunState, Trained
from distca.apps.train.manifest import CheckpointError, check_digests, read_manifest
from distca.apps.train.unpickling import read_index
from support.train_runs import one_rank

DATA = "__0_0.distcp"


def _trained() -> Trained:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return Trained(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))


def _step(trained: Trained) -> None:
    trained.model(torch.ones(3)).sum().backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.schedule.step()


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    trained = _trained()
    _step(trained)
    Checkpoints(run_dir, keep=1).save(trained, RunState(1, 1, 5))
    return run_dir / "checkpoints" / "step-00000001"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def _load(checkpoint: Path, trained: Trained | None = None) -> RunState:
    return Checkpoints(checkpoint.parent, keep=1).load(trained or _trained(), checkpoint)


def _refusal(checkpoint: Path) -> str:
    """The refusal of a checkpoint. Its manifest is first made to fit, so that the refusal has another reason."""
    manifest.main(str(checkpoint))
    with pytest.raises(CheckpointError) as caught:
        _load(checkpoint)
    message = str(caught.value)
    assert str(checkpoint) in message and "\n" not in message and "weights_only" not in message
    return message


def test_what_was_saved_is_loaded(saved: Path) -> None:
    trained, other = _trained(), _trained()
    _step(trained)
    assert _load(saved, other) == RunState(1, 1, 5)
    for _ in range(2):
        assert torch.equal(trained.model.weight, other.model.weight)
        assert trained.schedule.get_last_lr() == other.schedule.get_last_lr()
        _step(trained)
        _step(other)


# ---- pickles that call something


class Call:
    """Calls the function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


class HostileSize:
    """An object that is pickled as a torch.Size, whose argument calls something."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch.Size, ((self.call,),)


HIDDEN: dict[str, Callable[[Metadata, Any], object]] = {
    "in the planner's data": lambda index, call: index.planner_data.update(x=call),
    "in a tuple of a dict": lambda index, call: index.planner_data.update(x=({"y": [call]},)),
    "among the tensors": lambda index, call: index.state_dict_metadata.update(x=call),
    "in a size": lambda index, call: index.planner_data.update(x=HostileSize(call)),
    "in the names of modules": lambda index, call: setattr(index, "storage_meta", StorageMeta(modules=[call])),
    "in a file's name": lambda index, call: index.storage_data.update({MetadataIndex("x"): _StorageInfo(call, 0, 1)}),
    "in the version": lambda index, call: setattr(index, "version", call),
}


@pytest.mark.parametrize(
    ("where", "protocol"), [("alone", 0), *itertools.product(["alone", *HIDDEN], [2, pickle.HIGHEST_PROTOCOL])]
)
def test_an_index_that_calls_something_is_refused_by_the_name_of_what_it_calls(
    where: str, protocol: int, checkpoint: Path, tmp_path: Path
) -> None:
    call = Call(os.system, f"touch {tmp_path / 'ran'}")
    index: Any = pickle.loads((checkpoint / ".metadata").read_bytes())
    if where == "alone":
        index = call
    else:
        HIDDEN[where](index, call)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index, protocol))
    assert re.search(r"\.metadata names (posix|nt)\.system, which no index", _refusal(checkpoint))
    assert not (tmp_path / "ran").exists()


METADATA = "torch.distributed.checkpoint.metadata"
PICKLES: dict[str, tuple[bytes, str]] = {
    "eval": (pickle.dumps(Call(eval, "1")), "names builtins.eval"),
    "getattr": (pickle.dumps(Call(getattr, 1, "real")), "names builtins.getattr"),
    "a function by text": (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
    "an instance by text": (b"(S'true'\nios\nsystem\n.", "names os.system"),
    "an instance by its class": (b"(cos\nsystem\nS'true'\no.", "names os.system"),
    "a module of an allowed module": (f"c{METADATA}\nos.system\n(S'true'\ntR.".encode(), f"names {METADATA}.os.system"),
    "another name of an allowed module": (f"c{METADATA}\nField\n.".encode(), f"names {METADATA}.Field"),
    "another function of torch": (b"ctorch\nload\n(S'x'\ntR.", "names torch.load"),
    "a persistent id": (b"Px\n.", "persistent"),
    "a persistent id from the stack": (b"\x80\x04\x8c\x01xQ.", "persistent"),
    "a buffer": (b"\x80\x05\x97.", "buffer"),
    "an extension that is none": (b"\x80\x04\x82\xef.", "unregistered extension code 239"),
    "an allowed class itself": (pickle.dumps(Metadata), "a type stands where a _Metadata must be"),
    "arguments of an allowed class": (f"c{METADATA}\nMetadata\n(I1\ntR.".encode(), "TypeError"),
    "nothing": (b"", "EOFError"),
    "another value": (pickle.dumps({"a": 1}), "a dict stands where a _Metadata must be"),
    "no pickle": (b"PK\x03\x04", "is not an index"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_an_index_that_is_none_is_refused_with_the_reason(name: str, checkpoint: Path) -> None:
    content, reason = PICKLES[name]
    (checkpoint / ".metadata").write_bytes(content)
    assert reason in _refusal(checkpoint)


def test_an_index_gets_nothing_that_another_pickle_has_left_in_the_cache_of_extensions(checkpoint: Path) -> None:
    code = 240
    copyreg.add_extension("os", "system", code)
    try:
        content = b"\x80\x04\x82\xf0\x8c\x05false\x85R."
        assert pickle.loads(content) != 0  # the command `false` has run, and the cache holds os.system
        (checkpoint / ".metadata").write_bytes(content)
        assert ".metadata names os.system" in _refusal(checkpoint)
    finally:
        copyreg.remove_extension("os", "system", code)


SLOT = (
    b"\x80\x04c" + METADATA.encode() + b"\n%s\n" + b"N}\x8c\x07changed\x88s\x86b."
)  # sets the attribute `changed` of the named class or value


@pytest.mark.parametrize("of", ["Metadata", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING"])
def test_an_index_cannot_change_what_its_names_stand_for(of: str, checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(SLOT % of.encode())
    assert "is not an index of a checkpoint (" in _refusal(checkpoint)


def _saved_by_torch(value: object, *, in_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=in_zip)
    return file.getvalue()


@pytest.mark.parametrize("in_zip", [True, False], ids=["in a zip", "as a pickle"])
@pytest.mark.parametrize("entry", ["optimizer.param_groups.weight.lr", "schedule.last_epoch", "model.weight"])
def test_a_value_that_calls_something_is_refused_by_the_name_of_what_it_calls_and_the_file(
    entry: str, in_zip: bool, checkpoint: Path, tmp_path: Path
) -> None:
    hostile = _saved_by_torch([Call(os.system, f"touch {tmp_path / 'ran'}")], in_zip=in_zip)
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    [position] = [position for position in index.storage_data if position.fqn == entry]
    index.storage_data[position] = _StorageInfo(DATA, (checkpoint / DATA).stat().st_size, len(hostile))
    with open(checkpoint / DATA, "ab") as file:
        file.write(hostile)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    message = _refusal(checkpoint)
    assert f"{checkpoint / DATA} holds what no run writes" in message and "posix.system" in message
    assert not (tmp_path / "ran").exists()


# ---- places that are none of the checkpoint's


def _place(index: Metadata, **changes: Any) -> None:
    vars(index.storage_data[MetadataIndex("schedule.last_epoch")]).update(changes)


def _tensor(index: Metadata) -> TensorStorageMetadata:
    found = index.state_dict_metadata["model.weight"]
    assert isinstance(found, TensorStorageMetadata)
    return found


PLACES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "above": (lambda index: _place(index, relative_path="../secret"), "'../secret', which is not a file of the"),
    "beside": (lambda index: _place(index, relative_path="x/../../secret"), "'x/../../secret', which is not a file"),
    "absolute": (lambda index: _place(index, relative_path="/etc/passwd"), "'/etc/passwd', which is not a file"),
    "itself": (lambda index: _place(index, relative_path="."), "'.', which is not a file"),
    "no name": (lambda index: _place(index, relative_path=7), "a int stands where a str must be"),
    "before": (lambda index: _place(index, offset=-1), "from -1 on in __0_0.distcp"),
    "behind": (lambda index: _place(index, offset=1 << 40), f"from {1 << 40} on in __0_0.distcp"),
    "too long": (lambda index: _place(index, length=1 << 40), f"has {1 << 40} bytes from"),
    "backwards": (lambda index: _place(index, length=-1), "has -1 bytes from"),
    "no number": (lambda index: _place(index, length=1.0), "a float stands where a int must be"),
    "encoded": (lambda index: _place(index, transform_descriptors=["stream.zstd"]), "is encoded"),
    "no place": (lambda index: index.storage_data.pop(MetadataIndex("schedule.last_epoch")), "epoch is in no file"),
    "no part": (lambda index: setattr(_tensor(index).chunks[0], "offsets", torch.Size([1, 0])), "weight is in no file"),
    "no size": (lambda index: setattr(_tensor(index), "size", (2, -3)), "(2, -3) is not the size of a tensor"),
    "no list": (lambda index: setattr(_tensor(index), "chunks", 3), "a int stands where a list must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_an_index_with_a_place_outside_of_the_checkpoints_files_is_refused(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes((checkpoint / DATA).read_bytes())
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    change, reason = PLACES[name]
    change(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    assert reason in _refusal(checkpoint)


# ---- damage


def test_an_index_that_is_cut_off_anywhere_is_refused(checkpoint: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    content = (checkpoint / ".metadata").read_bytes()
    read_index(checkpoint, sizes)
    for length in range(0, len(content), 97):
        (checkpoint / ".metadata").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata is not an index of a checkpoint \("):
            read_index(checkpoint, sizes)


@pytest.mark.parametrize("name", [DATA, ".metadata", "state.json", "manifest.json"])
def test_a_file_with_one_bit_changed_or_cut_off_anywhere_is_refused_by_name(name: str, checkpoint: Path) -> None:
    content = (checkpoint / name).read_bytes()
    for seed in range(15):
        position, bit = divmod(random.Random(seed).randrange(len(content) * 8), 8)
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        for damaged in (bytes(changed), content[:position]):
            (checkpoint / name).write_bytes(damaged)
            with pytest.raises(ConfigError) as caught:
                _load(checkpoint)
            # A damaged manifest is blamed on any file that it no longer fits, so only the folder is certain.
            assert str(checkpoint / ("" if name == "manifest.json" else name)) in str(caught.value), f"seed {seed}"


def _exchanged(checkpoint: Path, first: str, second: str) -> None:
    (checkpoint / first).rename(checkpoint / "other")
    (checkpoint / second).rename(checkpoint / first)
    (checkpoint / "other").rename(checkpoint / second)


def _halves_exchanged(checkpoint: Path) -> None:
    content = (checkpoint / DATA).read_bytes()
    half = len(content) // 2
    (checkpoint / DATA).write_bytes(content[half:] + content[:half])


def _link(checkpoint: Path) -> None:
    (checkpoint / DATA).rename(checkpoint.parent / "outside")
    (checkpoint / DATA).symlink_to(checkpoint.parent / "outside")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / DATA).unlink(), f"{DATA} is missing"),
    "extra": (lambda folder: (folder / "__1_0.distcp").touch(), r"__1_0\.distcp is not in manifest\.json"),
    "exchanged": (lambda folder: _exchanged(folder, DATA, ".metadata"), r"\.metadata has \d+ bytes, must have \d+"),
    "halves": (_halves_exchanged, f"{DATA} is damaged: its SHA-256 differs"),
    "link": (_link, f"{DATA} is not a regular file"),
    "folder": (lambda folder: (folder / "x").mkdir(), "x is not a regular file"),
    "pipe": (lambda folder: os.mkfifo(folder / "x"), "x is not a regular file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_are_not_those_of_the_manifest_are_refused_by_name(name: str, checkpoint: Path) -> None:
    damage, message = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        _load(checkpoint)


def test_a_manifest_that_names_files_elsewhere_is_refused_and_none_of_them_is_read(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("../pipe", str(checkpoint.parent / "pipe"), "/dev/zero"):  # reading one of these would never end
        files = content["files"] | {name: {"bytes": 0, "sha256": ""}}
        (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
        with pytest.raises(CheckpointError, match="is missing"):
            _load(checkpoint)


def test_the_manifest_has_bytes_and_sha256_of_every_other_file(saved: Path) -> None:
    digests = read_manifest(saved)
    assert digests.keys() == {path.name for path in saved.iterdir()} - {"manifest.json"}
    check_digests(saved, digests, digests)
    # The program sha256sum computes the expected digests.
    sums = os.popen(f"cd '{saved}' && sha256sum .metadata {DATA} state.json").read().split()
    assert {name: sha256 for name, (_, sha256) in digests.items()} == dict(zip(sums[1::2], sums[::2], strict=True))

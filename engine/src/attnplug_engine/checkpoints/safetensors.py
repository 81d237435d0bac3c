"""Checkpoints on disk: Hugging Face folders with ``config.json`` and safetensors, read tensor by tensor.

No pickle is ever loaded, because unpickling runs arbitrary code.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attnplug import UsageError
from attnplug.hf.config_keys import MOST_BYTES, read_json_object, regular_size, show

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""The second is the key of the first versions of compressed-tensors, with the same keys inside."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin.index.json")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGERS = {"I64", "I32"}
_SHOWN = 6
_MAX_NAME = 255
_LEAST_MAPPED, _MOST_MAPPED = 1 << 20, 256 << 20
_MAX_INDEX_BYTES = 1 << 28  # an index of 100,000 tensors has 10 MB


class CheckpointError(UsageError):
    """A checkpoint is wrong or incomplete. ``file`` is the file or folder at fault, ``tensor`` the tensor if any."""

    def __init__(self, message: str, file: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class MissingTensor(CheckpointError):
    """The model needs a tensor that no file holds. ``files`` are those that were searched."""

    def __init__(self, message: str, file: str, tensor: str, files: Sequence[str]) -> None:
        super().__init__(message, file, tensor)
        self.files = tuple(files)


class WrongShape(CheckpointError):
    """A tensor's shape differs from the one that the config implies: ``found`` instead of ``expected``."""

    def __init__(self, message: str, file: str, tensor: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(message, file, tensor)
        self.found = found
        self.expected = expected


class WrongDtype(CheckpointError):
    """A tensor has an element type that cannot be loaded, such as the codes of a quantised weight."""

    def __init__(self, message: str, file: str, tensor: str, found: str) -> None:
        super().__init__(message, file, tensor)
        self.found = found


class UnusedTensors(CheckpointError):
    """The checkpoint holds tensors that no part of the model takes: its config describes another model."""

    def __init__(self, message: str, file: str, tensors: Sequence[str]) -> None:
        super().__init__(message, file, tensors[0])
        self.tensors = tuple(tensors)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its safetensors dtype, such as ``BF16`` or ``F8_E4M3``, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Source of a model's weights: a checkpoint on disk, or random numbers."""

    @property
    def config(self) -> Mapping[str, object]: ...

    @property
    def name(self) -> str:
        """Name in messages: the folder, or the name of the model."""
        ...

    def names(self) -> Collection[str]:
        """Names of the tensors that exist."""
        ...

    @property
    def random(self) -> bool:
        """True if tensors are drawn on request, so that every name exists."""
        ...

    def stored(self, name: str) -> StoredTensor | None:
        """Return the dtype and shape of a tensor; None if there is none, or if tensors are random."""
        ...

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in its file, which may differ."""
        ...

    def check(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = FLOATS) -> None:
        """Raise CheckpointError if there is no tensor of this name and shape, of one of the dtypes ``kinds``."""
        ...

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        kinds: Collection[str] = FLOATS,
    ) -> Tensor:
        """Return a tensor, or the part of it that a rank owns, in its stored dtype. It must not be written to.

        ``shape`` is that of the whole tensor, as the model expects it, and ``kinds`` are the allowed dtypes. Raises
        CheckpointError if it differs.
        """
        ...

    def integers(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        """Return a tensor of integers from 0 to ``below - 1`` as int64. Raises CheckpointError for others."""
        ...


class Checkpoint:
    """A Hugging Face folder. Only the headers of its files, and requested parts of tensors, are read."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        files: Mapping[str, str],
        stored_names: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._files = files
        """File name of each tensor."""
        self._stored_names = stored_names or {}
        """Names in the files, where they differ."""
        self._open: dict[str, Any] = {}
        self._mapped = 0.0
        self._largest = 0
        self._most_mapped = _MOST_MAPPED
        """Bytes of tensors that are read before files are closed: peak host memory is this and the largest tensor."""

    @classmethod
    def open(cls, folder: str | Path, config_file: str = "config.json") -> Checkpoint:
        """Find the files of a checkpoint. Raises CheckpointError if any is missing or cannot be read."""
        folder = Path(folder)
        if not os.path.isdir(folder):
            problem = "is not a folder" if os.path.lexists(folder) else "does not exist"
            raise CheckpointError(f"the checkpoint {str(folder)!r} {problem}; give a Hugging Face folder", str(folder))
        config_path = folder / config_file
        if not os.path.lexists(config_path):
            raise CheckpointError(
                f"the checkpoint {str(folder)!r} holds no config.json; it holds {_listing(folder)}", str(config_path)
            )
        config = _read_json(config_path)
        if os.path.lexists(folder / SINGLE_FILE):
            checkpoint = cls(folder, config, {})
            checkpoint._files = dict.fromkeys(checkpoint._opened(SINGLE_FILE).keys(), SINGLE_FILE)
            return checkpoint
        if os.path.lexists(folder / INDEX_FILE):
            checkpoint = cls(folder, config, _read_index(folder))
            for file in checkpoint.files:  # a truncated one is better found now than after an hour
                checkpoint._opened(file)
            return checkpoint
        raise _no_weights(folder)

    def renamed(self, names: Mapping[str, str], config: Mapping[str, object] | None = None) -> Checkpoint:
        """Return the checkpoint with only the tensors of ``names``, which maps new names to present ones."""
        files = {name: self._files[present] for name, present in names.items()}
        stored = {name: self._stored_names.get(present, present) for name, present in names.items()}
        return Checkpoint(self.folder, self.config if config is None else config, files, stored)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold tensors."""
        return tuple(sorted(set(self._files.values())))

    def names(self) -> Collection[str]:
        return self._files.keys()

    random = False

    def stored(self, name: str) -> StoredTensor | None:
        if name not in self._files:
            return None
        try:
            found = self._opened(self._files[name]).get_slice(self.stored_name(name))
        except SafetensorError:  # the index is wrong, which reading reports
            return None
        return StoredTensor(str(found.get_dtype()), tuple(found.get_shape()))

    def stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    def check(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = FLOATS) -> None:
        self._stored(name, shape, kinds)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        kinds: Collection[str] = FLOATS,
    ) -> Tensor:
        stored = self._stored(name, shape, kinds)
        self._mapped += math.prod(shape) * _bytes_of(str(stored.get_dtype()))
        if not shape:  # a slice cannot index a scalar
            return cast(Tensor, self._opened(self._files[name]).get_tensor(self.stored_name(name)))
        part: Tensor = stored[rows or slice(None)] if columns is None else stored[rows or slice(None), columns]
        return part

    def integers(self, name: str, shape: tuple[int, ...], below: int | None = None) -> Tensor:
        """Return a tensor of integers, such as a token map, as int64; with ``below``, all must be in ``[0, below)``."""
        whole: Tensor = self._stored(name, shape, _INTEGERS)[:].long()
        if below is not None and not bool(((whole >= 0) & (whole < below)).all()):
            low, high = int(whole.min()), int(whole.max())
            raise CheckpointError(
                f"{self.folder / self._files[name]}: tensor {name!r} has numbers from {low} to {high}; the config "
                f"implies 0 to {below - 1}",
                str(self.folder / self._files[name]),
                name,
            )
        return whole

    def _stored(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = FLOATS) -> Any:
        """Return a handle on a tensor in its file; nothing is read yet."""
        if name not in self._files:
            raise self._missing(name, shape)
        file = self._files[name]
        name = self.stored_name(name)
        try:
            stored = self._opened(file).get_slice(name)
        except SafetensorError as error:
            path = str(self.folder / file)
            raise MissingTensor(
                f"{path} has no tensor {name!r} (expected with shape {list(shape)}), but {INDEX_FILE} says it does",
                path,
                name,
                (file,),
            ) from error
        if (found := tuple(stored.get_shape())) != shape:
            path = str(self.folder / file)
            raise WrongShape(
                f"{path}: tensor {name!r} has shape {list(found)}, but the config implies {list(shape)}; "
                "config.json and the weights belong to different models",
                path,
                name,
                found,
                shape,
            )
        if (dtype := str(stored.get_dtype())) not in kinds:
            path = str(self.folder / file)
            quantized = " unless the config's quantization_config covers it" if kinds is FLOATS else ""
            raise WrongDtype(
                f"{path}: tensor {name!r} is of type {dtype}; it must be one of {', '.join(sorted(kinds))}{quantized}",
                path,
                name,
                dtype,
            )
        return stored

    def _opened(self, file: str) -> Any:
        if self._mapped > self._most_mapped:
            # Tensors are views of mapped files, whose pages stay in this process until the files are closed. The
            # caller has copied earlier tensors.
            self._open.clear()
            self._mapped = 0
        if file not in self._open:
            path = self.folder / file
            try:
                size = regular_size(path)
            except UsageError as error:
                raise CheckpointError(str(error), str(path)) from error
            try:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
                self._largest = max(self._largest, size)
                self._most_mapped = min(max(self._largest // 8, _LEAST_MAPPED), _MOST_MAPPED)
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path} ({size} bytes) cannot be read as safetensors: {error}; "
                    "it is truncated or not safetensors; fetch it again",
                    str(path),
                ) from error
        return self._open[file]

    def _missing(self, name: str, shape: tuple[int, ...]) -> MissingTensor:
        files = self.files
        near = difflib.get_close_matches(name, self._files, n=2, cutoff=0.8)
        closest = f"; the closest it has: {', '.join(map(repr, near))}" if near else ""
        return MissingTensor(
            f"the checkpoint {self.name!r} has no tensor {name!r}, which the model needs with shape {list(shape)}; "
            f"searched: {shortened(files)}{closest}",
            self.name,
            name,
            files,
        )


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors are checked and not read: their parts are empty. Only single numbers and vectors of
    integers are read, which quantization schemes compare with the config."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointHeaders:
        return cls(checkpoint.folder, checkpoint.config, checkpoint._files, checkpoint._stored_names)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        kinds: Collection[str] = FLOATS,
    ) -> Tensor:
        if math.prod(shape) == 1 or (len(shape) == 1 and FLOATS.isdisjoint(kinds)):
            return super().tensor(name, shape, rows=rows, columns=columns, kinds=kinds)
        self.check(name, shape, kinds)
        return torch.empty((0,) * len(shape), dtype=torch.int32)  # can be viewed as any type of codes


def _bytes_of(dtype: str) -> float:
    """Bytes of an element of a safetensors dtype, by the number of bits in its name: ``F8_E4M3``, ``BOOL``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1


def checkpoint_folder(reference: str) -> Path:
    """Return the folder of a model reference: the folder itself, or that of the config file that it names."""
    path = Path(reference)
    return path if os.path.isdir(path) else path.parent


def checkpoint_config(reference: str) -> Mapping[str, object]:
    """Return the config of a model reference that is a folder or the path of a config."""
    path = Path(reference)
    return _read_json(path / "config.json" if os.path.isdir(path) else path)


def stored_dtype(reference: str) -> str | None:
    """Return the safetensors dtype of the first float tensor in the first file, by which transformers decides if the
    config has no dtype; None if there is none. Raises CheckpointError."""
    checkpoint = Checkpoint.open(checkpoint_folder(reference))
    names = sorted(name for name, file in checkpoint._files.items() if file == checkpoint.files[0])
    stored = (checkpoint.stored(name) for name in names)
    return next((tensor.dtype for tensor in stored if tensor is not None and tensor.dtype in FLOATS), None)


def quantization_key(config: Mapping[str, object]) -> str | None:
    """Return the config key that describes quantized weights; None for none."""
    return next((key for key in QUANTIZATION_KEYS if config.get(key) is not None), None)


def shortened(names: Sequence[str]) -> str:
    """Format names for a message: the first few, and the number of others."""
    more = len(names) - _SHOWN
    short = (name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in names[:_SHOWN])
    return ", ".join(short) + (f" and {more} more" if more > 0 else "")


def _read_json(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, object]:
    try:
        return read_json_object(path, most_bytes)
    except UsageError as error:
        raise CheckpointError(str(error), str(path)) from error


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises if a file is missing, which is better found now than after an hour."""
    path = folder / INDEX_FILE
    listed = _read_json(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path} has no 'weight_map' from tensor names to file names", str(path))
    for name, file in listed.items():
        # A file elsewhere is not part of this checkpoint, even if the index names it.
        named = isinstance(file, str) and Path(file).name == file != "" and file.isprintable()
        if not named or len(file) > _MAX_NAME:
            raise CheckpointError(
                f"{path} puts tensor {show(name)} into {show(file)}, which is not a file name", str(path), name
            )
    # Not Path.is_file, which raises for names that a file system refuses.
    absent = [file for file in sorted(set(listed.values())) if not os.path.isfile(folder / file)]
    if absent:
        count = len(set(listed.values()))
        raise CheckpointError(
            f"{path} names {count} files, of which {len(absent)} are missing from the folder: {shortened(absent)}; "
            "fetch the rest of the checkpoint",
            str(folder / absent[0]),
        )
    return listed


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        return CheckpointError(
            f"the checkpoint {str(folder)!r} has its weights only as pickle ({shortened(pickles)}), which is never "
            "loaded because unpickling runs code; convert it with transformers' save_pretrained, which writes "
            "safetensors",
            str(folder / pickles[0]),
        )
    return CheckpointError(
        f"the checkpoint {str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; it holds {_listing(folder)}",
        str(folder / SINGLE_FILE),
    )


def _listing(folder: Path) -> str:
    return shortened(sorted(path.name for path in folder.iterdir())) or "nothing"

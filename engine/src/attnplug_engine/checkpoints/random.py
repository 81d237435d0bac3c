"""Random weights with the interface of a checkpoint, for models that have only a config.

A tensor depends only on the seed, its name and the type of device that draws it: neither on the order of calls, nor on
the number of ranks. Tiny models are drawn on the CPU, so they are the same everywhere. Shapes are those that the model
requests, so there is no list of tensors to maintain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnplug.host import ModelConfigError
from attnplug.registry.registry import tiny_config
from attnplug_engine.checkpoints.safetensors import FLOATS, SINGLE_FILE, StoredTensor, checkpoint_config
from attnplug_engine.checkpoints.tensor_names import text_config

TINY = "tiny:"

_USUAL_RANGE = 0.02  # default of transformers for initializer_range
_SMALL = 0.1  # share of the range, for deviations from a centre
_CENTRES = {"norm.weight": 1.0, "norm_f.weight": 1.0, ".D": 1.0, ".dt_bias": -2.0, "_scale": 1.0}
"""Centres of vectors by the end of their names; 0 by default, which is right for biases. A time step's bias of -2 gives
a state that remembers about ten tokens, so that a lost state shows."""


class RandomCheckpoint:
    """Weights for ``config``: normal with the config's ``initializer_range``; vectors lie near their usual values."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        seed: int = 0,
        name: str = "random",
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.name = name
        self._seed = seed
        self._device = torch.device(device)
        value = config.get("initializer_range", _USUAL_RANGE)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelConfigError(f"{name}: 'initializer_range' is {value!r}; it must be a number", name)
        self._range = float(value)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._below: dict[str, int] = {}
        """Exclusive upper bounds of integer tensors."""
        self._stack: tuple[str, Tensor] | None = None
        """The last stack of experts' weights: models read it expert by expert."""

    @classmethod
    def tiny(cls, reference: str, *, seed: int = 0) -> RandomCheckpoint:
        """The tiny model ``tiny:NAME``, of core or of a plugin."""
        return cls(tiny_config(reference), seed=seed, name=reference)

    @classmethod
    def of_folder(cls, reference: str, *, seed: int = 0, device: torch.device | str = "cpu") -> RandomCheckpoint:
        """Checkpoint with random weights, made from the config alone. A GPU draws a billion numbers in milliseconds."""
        return cls(text_config(checkpoint_config(reference), reference), seed=seed, name=reference, device=device)

    def names(self) -> Sequence[str]:
        """Names of the tensors that were requested so far; there are no others."""
        return tuple(self._shapes)

    random = True

    def stored(self, name: str) -> StoredTensor | None:
        return None

    def stored_name(self, name: str) -> str:
        return name

    def check(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = FLOATS) -> None:
        if self._shapes.setdefault(name, shape) != shape:
            raise ValueError(f"tensor {name!r} was requested as {self._shapes[name]} and as {shape}")

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        kinds: Collection[str] = FLOATS,
    ) -> Tensor:
        self.check(name, shape)
        if self._stack is None or self._stack[0] != name:
            self._stack = None  # frees its memory first
            whole = self._whole(name, shape)
            self._stack = (name, whole) if len(shape) > 2 else None
        else:
            whole = self._stack[1]
        part = whole[rows or slice(None)]
        return part if columns is None else part[:, columns]

    def integers(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        self.check(name, shape)
        self._below[name] = below
        return self._whole(name, shape)

    def save(self, folder: str | Path) -> None:
        """Write the tensors requested so far as a Hugging Face folder, from which transformers loads the same model."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        tensors = {name: self._whole(name, shape).cpu() for name, shape in self._shapes.items()}
        save_file(tensors, str(folder / SINGLE_FILE), metadata={"format": "pt"})

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name in self._below:
            return torch.randint(self._below[name], shape, generator=generator, device=self._device)
        normal = torch.randn(shape, generator=generator, dtype=torch.float32, device=self._device)
        if len(shape) > 1:
            return normal.mul_(self._range)
        centre = next((centre for end, centre in _CENTRES.items() if name.endswith(end)), 0.0)
        return normal.mul_(self._range * _SMALL).add_(centre)

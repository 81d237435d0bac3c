"""``PagedCache`` for ``generate``: keys and values are written to a backend's pages and never copied again."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from attnplug import LayerSpec
from attnplug.host import BackendRequest, Limits
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.layer_call import autocast
from attnplug_transformers.pages import Pages, fits, grown_limits
from attnplug_transformers.step import PaddedStep

_LAYER_TYPES = ("full_attention", "sliding_attention")


class PagedCache(Cache):
    """KV cache in pages, for a model with ``attn_implementation="attnplug:NAME"``. It grows as needed.

    Layers with a window also keep every row. Example::

        model.generate(**inputs, past_key_values=PagedCache(model.config))
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        given: Any = config
        text = given.get_text_config(decoder=True)
        has_window = getattr(text, "sliding_window", None) is not None
        kinds = list(getattr(text, "layer_types", None) or [_LAYER_TYPES[has_window]] * text.num_hidden_layers)
        others = sorted(set(kinds) - set(_LAYER_TYPES))
        if others:
            raise BridgeError(
                f"PagedCache holds keys and values, but the model has layers of type {', '.join(others)}; leave "
                "past_key_values out, and transformers makes a cache for it"
            )
        if getattr(text, "kv_lora_rank", None) is not None:
            raise BridgeError(
                f"PagedCache holds keys and values, but the model caches latent rows of {text.kv_lora_rank}, which it "
                "expands before attention; leave past_key_values out, and transformers makes a cache for it"
            )
        if not getattr(text, "use_cache", True):
            raise BridgeError(
                "the model's config has use_cache=False, with which generate passes all tokens again at every step, "
                "and the cache would hold them several times; set use_cache=True in model.config and in "
                "model.generation_config, or leave past_key_values out"
            )
        layers = [PagedLayer(self, index) for index in range(len(kinds))]
        super().__init__(layers=list(layers))
        self._kinds = kinds
        self._same_type = [[other for other, kind in enumerate(kinds) if kind == own] for own in kinds]
        self._pages: dict[LayerSpec, Pages] = {}
        self._request: BackendRequest | None = None
        self._step: PaddedStep | None = None
        self._valid: Tensor | None = None

    def pages(self, index: int, request: BackendRequest, layer: LayerSpec, like: Tensor, step: PaddedStep) -> Pages:
        """Pages of a layer, large enough for a step. Raises :class:`BridgeError` for another backend request."""
        if self._request not in (None, request):
            raise BridgeError(
                f"this PagedCache was filled with {self._request} and is now read with {request}; a cache belongs to "
                "one attn_implementation"
            )
        if step.window is None and self._kinds[index] == "sliding_attention":
            raise BridgeError(
                f"layer {index} has a sliding window by its configuration, but a mask without one: its model relies on "
                "a cache that drops older rows. PagedCache keeps them; leave past_key_values out"
            )
        self._request = request
        self._check_padding(step)
        found, limits = self._pages.get(layer), step.limits
        if found is None or not fits(limits, found.limits):
            found = self._pages[layer] = self._grown(index, request, layer, like, limits, found)
        return found

    def _check_padding(self, step: PaddedStep) -> None:
        """Raise if the padding among older tokens has changed: padding has no rows in the pages."""
        if step is self._step:
            return
        assert isinstance(step.start, int)
        before, now = (_padding(valid, step.start) for valid in (self._valid, step.valid))
        same = before is now if before is None or now is None else torch.equal(before, now)
        if not same:
            raise BridgeError(
                "attention_mask differs for tokens that are already in this PagedCache; padding is not stored, so it "
                "cannot change. Pass the same mask again, with 1 for each new token"
            )
        self._step, self._valid = step, step.valid

    def _grown(
        self, index: int, request: BackendRequest, layer: LayerSpec, like: Tensor, limits: Limits, old: Pages | None
    ) -> Pages:
        layers = {other: replace(layer, layer_id=other) for other in self._same_type[index]}
        made = Pages.make(request, layers, like, grown_limits(limits, None if old is None else old.limits))
        if old is not None:
            for source, target in zip(old.rows(), made.rows(), strict=True):
                target[: source.shape[0], : source.shape[1]] = source
        return made

    def _copied(self, layer: LayerSpec, pages: Pages, limits: Limits) -> Pages:
        """Copy of pages, for at least ``limits``."""
        index = next(iter(pages.layers))
        assert self._request is not None
        return self._grown(index, self._request, layer, pages.pool.keys(index), limits, pages)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Copy with pages of its own: several continuations can follow one prefix."""
        made: PagedCache = copy(self)
        memo[id(self)] = made
        made.layers, made._step = deepcopy(self.layers, memo), None
        made._pages = {layer: self._copied(layer, pages, pages.limits) for layer, pages in self._pages.items()}
        return made

    def select(self, requests: Tensor) -> None:
        """Replace the rows of request i by those of ``requests[i]``, in all layers."""
        count = requests.numel()
        if self._valid is not None:
            self._valid = self._valid.index_select(0, requests.to(self._valid.device))
        for layer, pages in self._pages.items():
            if count > pages.limits.max_requests:
                limits = Limits(count, pages.limits.max_tokens, pages.limits.max_context)
                pages = self._pages[layer] = self._copied(layer, pages, limits)
            filled = max(layer.get_seq_length() for layer in self._own_layers())
            for rows in pages.rows():
                part = rows[:, :filled]
                part[:count] = part.index_select(0, requests.to(part.device))
        for own in self._own_layers():
            own.requests = count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        count = max((layer.requests for layer in self._own_layers()), default=0)
        self.select(torch.arange(count).repeat_interleave(repeats))

    def _own_layers(self) -> Sequence[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a ``PagedCache``. It counts tokens; ``update`` returns only the new keys and values."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self._length = 0
        self._unread = False
        self.requests = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._unread:
            raise BridgeError(
                f"PagedCache was updated for layer {self._index} again before attention read the last tokens; it is "
                "only for models with attn_implementation='attnplug:…'"
            )
        requests = key_states.shape[0]
        if self._length and requests != self.requests:
            raise BridgeError(
                f"this PagedCache has rows of {self.requests} requests, but the model was called with {requests}; "
                "batch_repeat_interleave and batch_select_indices change the requests of a cache"
            )
        self.lazy_initialization(key_states, value_states)
        self.requests, self._length, self._unread = requests, self._length + key_states.shape[2], True
        keys = autocast(key_states).view_as(key_states)  # a new object: the attribute below belongs to this call
        keys.attnplug_layer = self  # type: ignore[attr-defined]
        return keys, value_states

    def pages(
        self, module: torch.nn.Module, request: BackendRequest, layer: LayerSpec, like: Tensor, step: PaddedStep
    ) -> tuple[Pages, LayerSpec]:
        """Pages of the calling layer, and its spec in them. Raises :class:`BridgeError` for another layer's keys."""
        index = getattr(module, "layer_idx", None)
        if index != self._index or not self._unread or step.columns != self._length:
            raise BridgeError(
                f"{type(module).__name__} {index} was given the keys of layer {self._index}, or the same ones twice; "
                "layers that share a cache are not supported"
            )
        self._unread = False
        pages = self._cache.pages(self._index, request, layer, like, step)
        return pages, pages.layers[self._index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise BridgeError(f"crop({tokens_to_remove}): the number of tokens to remove must be negative")
        self._length = max(self._length + tokens_to_remove, 0)

    def reset(self) -> None:
        self._length, self._unread, self.requests = 0, False, 0

    def offload(self) -> None:
        raise BridgeError("PagedCache stays on the backend's device and cannot be offloaded")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise BridgeError("the layers of a PagedCache are reordered together, by the cache")


def _padding(valid: Tensor | None, columns: int) -> Tensor | None:
    """The first ``columns`` of a mask; ``None`` if they contain no padding."""
    return None if valid is None or bool(valid[:, :columns].all()) else valid[:, :columns]


def paged_layer_of(keys: Tensor) -> PagedLayer | None:
    """Return the layer of a ``PagedCache`` that returned these keys, if any."""
    layer = getattr(keys, "attnplug_layer", None)
    return layer if isinstance(layer, PagedLayer) else None

"""Validation of what a backend returns: the first result of each layer. Later calls are free of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from attnplug.author.served_layers import output_width
from attnplug.contract.backend import AttentionBackend, bind_optional_hook, hook_signatures
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.plan import BackendId, Plan, describe_result
from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec

_EXPECTED: dict[str, Callable[..., tuple[tuple[int, ...], Tensor]]] = {
    **dict.fromkeys(
        ("forward_extend", "forward_decode"), lambda q, k, v, layer, _: ((*q.shape[:2], output_width(layer)), q)
    ),
    "forward_ragged": lambda q, k, v, *_: ((*q.shape[:2], v.shape[-1]), q),
    "forward_conv": lambda x, *_: (tuple(x.shape), x),
    "forward_linear": lambda inputs, *_: (tuple(inputs.v.shape), inputs.v),
    "forward_delta": lambda inputs, *_: ((len(inputs.rows), inputs.gate[0].numel()), inputs.rows),
}
"""Functions of a call's positional arguments: shape of its result, and a tensor with its dtype and device."""


def bind_forward(holder: object, attribute: str, backend: AttentionBackend, name: str) -> Any:
    """Bind a method that runs a layer: ``self.run = bind_forward(self, "run", backend, "forward_ragged")``.

    Returns ``None`` if there is none. The function raises a BackendError, with plugin and method, for a result that is
    no tensor of the required shape, dtype and device. It checks the first call of each layer. When a layer runs for the
    second time, it replaces itself in ``attribute`` of the holder by the method.
    """
    method = bind_optional_hook(backend, name) if name in hook_signatures() else getattr(backend, name, None)
    if method is None:
        return None
    owner, checked = ref(holder), set[int]()  # a cycle would keep the holder's pools in memory

    def first_results(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        layer = next(each for each in args if isinstance(each, LayerSpec))
        if layer.layer_id in checked:
            setattr(owner(), attribute, method)
        elif result is not None or name != "forward_delta":  # which may leave a batch to its parts
            if problem := _problem(result, *_EXPECTED[name](*args), getattr(kwargs.get("extras"), "out", None)):
                who = _planner(args, layer) or backend.backend_id
                raise BackendError(f"{name} of {who.label} returned {problem} (layer {layer.layer_id})")
            checked.add(layer.layer_id)
        return result

    return first_results


def _problem(result: object, shape: tuple[int, ...], like: Tensor, out: Tensor | None) -> str:
    found, wanted = describe_result(result), f"{like.dtype} of shape {shape} on {like.device}"
    if not isinstance(result, Tensor) or found != wanted:
        return f"{found}; it must return {wanted}"
    if out is not None and result.data_ptr() != out.data_ptr():
        return "other memory than extras.out, which it was given and claims; it must write to it and return it"
    return ""


def _planner(args: tuple[Any, ...], layer: LayerSpec) -> BackendId | None:
    """Return the backend that ran a layer. A wrapper's plan has one for each kind of layer."""
    plans = [each for each in args if isinstance(each, Plan)]
    plans += [each.plan.attention for each in args if isinstance(each, ForwardBatch) and each.plan is not None]
    return plans[0].planners()[-1 if layer.kind.is_linear else 0] if plans else None

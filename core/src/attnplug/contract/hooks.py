"""Binding of a backend's optional hooks, once, by their own signatures (A8). Nothing uses ``hasattr`` on a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter
from typing import Any

from attnplug.declare.errors import HookError

Hook = Callable[..., Any]
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def bind_hook(target: object, name: str, offered: Sequence[str], may_ignore: Collection[str] = ()) -> Hook | None:
    """Bind hook ``name`` of ``target`` to a caller that offers the named values, in this order.

    Returns ``None`` if the target has no such hook (absent, or ``None``); otherwise a function that takes one
    positional argument per offered name and calls the hook with those it accepts. Parameters are matched by name.
    The first offered value is the hook's subject: if no parameter has its name, it goes to the first positional
    parameter that nothing else fills, whatever its name. ``**kwargs`` takes the remaining values by name. ``*args``
    alone, or a callable without a signature, takes all values in order.

    ``may_ignore`` names the offered values that the hook may omit from its signature. The caller relies on all others.

    Raises :class:`HookError`, naming backend, hook and parameter, if the hook requires a parameter that is not offered,
    does not accept one that its caller relies on, or is not callable.
    """
    hook = _lookup(target, name)
    if hook is None:
        return None
    if not callable(hook):
        raise HookError(f"{_owner(target)}.{name} is {hook!r}, which cannot be called; make it a method or remove it")
    try:
        signature = _signature(hook)
    except ValueError:
        # No signature, as for some C functions: they take all offered values, in order.
        return _adapter(hook, list(offered), offered)
    arguments, ignored = _arguments(signature, offered, f"{_owner(target)}.{name}")
    if unfit := [parameter for parameter in ignored if parameter not in may_ignore]:
        raise HookError(
            f"{_owner(target)}.{name}{shown(signature)} does not accept {', '.join(map(repr, unfit))}, which its "
            f"caller relies on; offered are {', '.join(offered)}. Add the parameter"
        )
    return _adapter(hook, arguments, offered)


def _lookup(target: object, name: str) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        # A property that raises also ends here. Treating it as an absent hook would silently skip planning.
        if inspect.getattr_static(target, name, None) is not None:
            raise
        return None


def shown(signature: inspect.Signature) -> str:
    """Format a signature as its author wrote it: annotations, strings in most modules, are shown without quotes."""
    return str(signature).replace("'", "")


def _signature(hook: Hook) -> inspect.Signature:
    """Return the signature that a call must satisfy.

    A decorator's wrapper with ``(*args, **kwargs)`` accepts what the wrapped function accepts. A wrapper with its own
    parameters is called by those, whatever ``__wrapped__`` says.
    """
    signature = inspect.signature(hook, follow_wrapped=False)
    wrapped = getattr(hook, "__wrapped__", None)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if wrapped is None or kinds != {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return signature
    inner = _signature(wrapped)
    if inspect.ismethod(hook) and not inspect.ismethod(wrapped):
        parameters = list(inner.parameters.values())
        positional = parameters and parameters[0].kind in _POSITIONAL
        inner = inner.replace(parameters=parameters[1:] if positional else parameters)
    return inner


def _arguments(signature: inspect.Signature, offered: Sequence[str], hook: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a call to the hook as source (``["a", "c=c"]``), and the offered names it omits."""
    sources = _sources(signature, offered)
    left = [name for name in offered if name not in sources.values()]
    takes_names = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    positional: list[str] = []
    keywords: list[str] = []
    gap = False  # a parameter keeps its default: later ones can only be passed by name
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            keywords += [f"{name}={name}" for name in left]
            left = []
        elif parameter.kind is Parameter.VAR_POSITIONAL:
            taken = [] if gap else [name for name in left if name == offered[0] or not takes_names]
            positional += taken
            left = [name for name in left if name not in taken]
        elif parameter.name in sources and not (gap and parameter.kind is Parameter.POSITIONAL_ONLY):
            by_position = parameter.kind in _POSITIONAL and not gap
            source = sources[parameter.name]
            (positional if by_position else keywords).append(source if by_position else f"{parameter.name}={source}")
        elif parameter.default is Parameter.empty:
            raise HookError(
                f"{hook}{shown(signature)} requires {parameter.name!r}, which is not offered; "
                f"offered are {', '.join(offered) or 'no arguments'}. "
                "Rename the parameter, give it a default, or remove it"
            )
        else:
            left += [sources[parameter.name]] if parameter.name in sources else []
            gap = gap or parameter.kind in _POSITIONAL
    return positional + keywords, left


def _sources(signature: inspect.Signature, offered: Sequence[str]) -> dict[str, str]:
    """Map parameters to the offered values they receive: ``{parameter: offered name}``."""
    parameters = [p for p in signature.parameters.values() if p.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)]
    sources = {parameter.name: parameter.name for parameter in parameters if parameter.name in offered}
    if offered and offered[0] not in sources:
        unmatched = (p.name for p in parameters if p.kind in _POSITIONAL and p.name not in sources)
        if (first := next(unmatched, None)) is not None:
            sources[first] = offered[0]
    return sources


def _adapter(hook: Hook, arguments: list[str], offered: Sequence[str]) -> Hook:
    if arguments == list(offered):
        return hook  # takes all offered values in order: no adapter, no overhead
    # Compiled, because assembling *args per call costs more: one frame without packing takes under 100 ns.
    source = f"lambda {', '.join(offered)}: hook({', '.join(arguments)})"
    adapter: Hook = eval(source, {"hook": hook})
    return adapter


def _owner(target: object) -> str:
    return target.__qualname__ if isinstance(target, type) else type(target).__qualname__

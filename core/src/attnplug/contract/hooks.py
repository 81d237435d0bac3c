"""Calling a backend's optional hooks by their own signatures (A8).

A hook is looked up and inspected once, by :func:`bind_hook`; what comes back is a plain function of everything
that the caller offers, which passes on what the hook accepts. Only what a hook may ignore is ever left out.
``hasattr`` on a backend appears nowhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter
from typing import Any

from attnplug.declare.errors import HookError

Hook = Callable[..., Any]


def bind_hook(target: object, name: str, offered: Sequence[str], may_ignore: Collection[str] = ()) -> Hook | None:
    """Bind hook ``name`` of ``target`` to a caller that offers the named values, in this order.

    Returns ``None`` if the target has no such hook (absent, or ``None``); otherwise a function that takes one
    positional argument per offered name and calls the hook with those it accepts. Parameters are matched by name.
    The first offered value is the hook's subject: where no parameter carries its name, it goes to the first
    positional parameter that nothing else fills, whatever its author called it. ``**kwargs`` takes all that is
    left, by name; ``*args`` alone, or a callable without a signature, takes everything in order.

    ``may_ignore`` names the offered values that the hook may do without. The caller needs all others honoured.

    Raises :class:`HookError`, naming backend, hook and parameter, if the hook requires a parameter that nobody
    offers, does not accept one that its caller needs honoured, or is not callable.
    """
    hook = _lookup(target, name)
    if hook is None:
        return None
    if not callable(hook):
        raise HookError(f"{_owner(target)}.{name} is {hook!r}, which cannot be called; make it a method or remove it")
    try:
        signature = _signature(hook)
    except ValueError:
        # Nothing to read, as with some C functions: they take the whole offer, in order.
        return _adapter(hook, list(offered), offered)
    arguments, ignored = _arguments(signature, offered, f"{_owner(target)}.{name}")
    if unfit := [parameter for parameter in ignored if parameter not in may_ignore]:
        raise HookError(
            f"{_owner(target)}.{name}{shown(signature)} does not accept {', '.join(map(repr, unfit))}, which its "
            f"caller needs honoured; offered are {', '.join(offered)}. Add the parameter"
        )
    return _adapter(hook, arguments, offered)


def _lookup(target: object, name: str) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        # A property that fails inside also ends here. Taking that for an absent hook is how a plan goes missing.
        if inspect.getattr_static(target, name, None) is not None:
            raise
        return None


def shown(signature: inspect.Signature) -> str:
    """A signature as its author wrote it: annotations are strings in most modules, and are shown without quotes."""
    return str(signature).replace("'", "")


def _signature(hook: Hook) -> inspect.Signature:
    """The signature that a call must satisfy.

    A decorator's wrapper that takes ``(*args, **kwargs)`` accepts what the wrapped function accepts. One with
    parameters of its own is called by those, whatever ``__wrapped__`` says.
    """
    signature = inspect.signature(hook, follow_wrapped=False)
    wrapped = getattr(hook, "__wrapped__", None)
    if wrapped is None or not _takes_anything(signature):
        return signature
    inner = _signature(wrapped)
    if inspect.ismethod(hook) and not inspect.ismethod(wrapped):
        parameters = list(inner.parameters.values())
        positional = parameters and parameters[0].kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        inner = inner.replace(parameters=parameters[1:] if positional else parameters)
    return inner


def _takes_anything(signature: inspect.Signature) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _arguments(signature: inspect.Signature, offered: Sequence[str], hook: str) -> tuple[list[str], list[str]]:
    """The argument list of a call to the hook, as source: ``["a", "c=c"]``, and what of the offer it leaves out."""
    sources = _sources(signature, offered)
    left = [name for name in offered if name not in sources.values()]
    takes_names = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    positional: list[str] = []
    keywords: list[str] = []
    gap = False  # a parameter was left to its default: what follows can only go by name
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
                f"{hook}{shown(signature)} requires {parameter.name!r}, which nobody offers; "
                f"offered are {', '.join(offered) or 'no arguments'}. "
                "Rename the parameter, give it a default, or remove it"
            )
        else:
            left += [sources[parameter.name]] if parameter.name in sources else []
            gap = gap or parameter.kind in _POSITIONAL
    return positional + keywords, left


def _sources(signature: inspect.Signature, offered: Sequence[str]) -> dict[str, str]:
    """Which offered value goes to which named parameter: ``{parameter: offered name}``."""
    parameters = [p for p in signature.parameters.values() if p.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)]
    sources = {parameter.name: parameter.name for parameter in parameters if parameter.name in offered}
    if offered and offered[0] not in sources:
        strangers = (p.name for p in parameters if p.kind in _POSITIONAL and p.name not in sources)
        if (first := next(strangers, None)) is not None:
            sources[first] = offered[0]
    return sources


def _adapter(hook: Hook, arguments: list[str], offered: Sequence[str]) -> Hook:
    if arguments == list(offered):
        return hook  # it takes the whole offer as it is: nothing to adapt, nothing to pay
    # Compiled rather than assembled from *args per call: one frame and no packing, under 100 ns.
    source = f"lambda {', '.join(offered)}: hook({', '.join(arguments)})"
    adapter: Hook = eval(source, {"hook": hook})
    return adapter


def _owner(target: object) -> str:
    return target.__qualname__ if isinstance(target, type) else type(target).__qualname__

"""Backend under test: its claims and refusals, and how to build it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import TypeVar

import torch

from attnplug import (
    AttentionBackend,
    AttentionKind,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    ForwardMode,
    KVFormat,
    ModelSpec,
    Problem,
    Role,
    UsageError,
)
from attnplug.declare.device import Architecture
from attnplug.declare.errors import PluginError
from attnplug.declare.kv_format import BUILT_IN
from attnplug.declare.options import parse_options
from attnplug.declare.spec import Registered
from attnplug.host import (
    AttnplugError,
    HostContext,
    KVPools,
    Limits,
    MLADims,
    Parallel,
    WorkspaceOwner,
    split_settings,
)
from attnplug.kernels import torch_dtype
from attnplug.linear import LinearDims
from attnplug.machine.runtime import open_device
from attnplug.registry.assembly import build_backend
from attnplug.registry.registry import load_registry
from attnplug.sparse import Coordinator
from attnplug_conformance.case import Case
from attnplug_conformance.format_checks import check_format
from attnplug_conformance.stored_rows import format_of, only_coded

PAGES = (16, 32, 64, 128, 256, 8, 1)
EQUAL = ((16, 16), (32, 32), (64, 64), (128, 128))
DIFFERENT = ((32, 16), (64, 32), (128, 64), (192, 128))
HEADS = (4, 8, 16, 32, 64, 128)
"""Candidate head dimensions and head counts; the first that is served is used. A GPU tries common sizes first."""
TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


Shape = TypeVar("Shape")
Allocate = Callable[[int, torch.device, bool], torch.Tensor]
"""Allocator of workspace memory: bytes, device, True for zeroed memory."""


class Unclaimed(Exception):
    """The backend does not claim what a check needs. ``reasons`` are the backend's refusals."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class NotBuilt(Exception):
    """The backend could not be built. The message is that of the error."""


@cache
def _conforms(format: KVFormat, device: torch.device) -> bool:
    try:
        return format.name in BUILT_IN or not any(result.message for result in check_format(format, device))
    except PluginError:
        return False


@dataclass(frozen=True, eq=False)
class Subject:
    """An installed backend on a device.

    ``seam`` describes the reference kernels if the spec's factory builds the backend over these instead of its own.
    """

    registered: Registered
    device: torch.device
    sm: int | None = None
    longest: int = 1100
    """Number of rows of the longest request. Larger on a GPU."""
    seam: str | None = None
    budget: float = 0.3
    """CPU seconds (on a GPU: seconds) to spend on random cases of all claimed kinds together; 0 for none."""
    random_case: str | None = None
    """One random case, as a failure prints it, to run instead of drawing any."""
    invariant: frozenset[str] = frozenset()
    """Levels of invariance that every check requests, for which a backend may run other kernels."""
    options: object = None
    """The backend's own options, parsed; ``None`` for the defaults."""
    settings: tuple[str, ...] = ()
    """The options as given on the command line: ``NAME.KEY=VALUE``."""
    architecture: Architecture | None = None
    """Architecture of a device other than CUDA."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """Environment variables before any check has built the backend."""

    @classmethod
    def installed(cls, registered: Registered, device: str | None, settings: Sequence[str] = ()) -> Subject:
        """Return a subject on ``device``, by default cuda if there is a GPU. ``settings`` are backends' options."""
        place, processor = open_device(device, load_registry().device)
        name = registered.spec.name
        given = split_settings(settings).get(name)
        options = None if given is None else parse_options(name, registered.spec.options, given)
        own = tuple(one for one in settings if one.startswith(f"{name}."))
        longest = 9000 if place.type == "cuda" else 1100
        sm, architecture = processor.sm or None, processor.architecture
        return cls(registered, place, sm, longest, options=options, settings=own, architecture=architecture)

    @property
    def name(self) -> str:
        return self.registered.spec.name

    @property
    def capabilities(self) -> Capabilities:
        return self.registered.spec.capabilities

    @property
    def page_size(self) -> int:
        """The page size of most cases."""
        served = (size for size in PAGES if self.capabilities.page_sizes.kernel_size(size) == size)
        return next(served, max(self.capabilities.page_sizes.kernel or {64}))

    def refusals(self, problem: Problem, role: Role) -> list[str]:
        """Reasons against the problem: the backend's own, and a format that cannot hold the rows.

        A format that does not conform is no fault of a backend that claims any, but of one that claims it by name.
        """
        reasons = [refusal.message for refusal in self.registered.spec.refusals(problem, role, self.options)]
        claims = self.capabilities
        for name, claimed in ((problem.kv_dtype, claims.kv_dtypes), (problem.index_dtype, claims.index_dtypes)):
            if not reasons and claimed is None and name is not None and not _conforms(format_of(name), self.device):
                reasons.append(f"KV format {name} does not conform itself: attnplug conform --kv-format {name}")
        if problem.kv_dtype is not None and problem.model is not None:
            try:
                format_of(problem.kv_dtype).check(problem.model, problem.page_size)
            except UsageError as error:
                reasons.append(str(error))
        return reasons

    def fit(self, case: Case) -> Case:
        """Return the case with every choice made that it leaves open; raises :class:`Unclaimed` if none is served."""
        capabilities = self.capabilities
        self._check_claims(case)
        dtype = case.dtype or next((dtype for dtype in TYPES if dtype in capabilities.dtypes), DType.BFLOAT16)
        kv_dtype = case.kv_dtype
        if kv_dtype is None and capabilities.kv_dtypes is not None and only_coded(capabilities.kv_dtypes):
            kv_dtype = min(capabilities.kv_dtypes)
            case = replace(case, magnitude=min(case.magnitude, 3.0))  # the largest e4m3 value is 448
        page_size = case.page_size or self.page_size
        if CacheLayout.TOKEN_MAJOR not in capabilities.layouts and case.layout is CacheLayout.TOKEN_MAJOR:
            case = replace(case, layout=min(capabilities.layouts, default=case.layout))
        filled = replace(
            case,
            page_size=page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            layers_alike=capabilities.layers_alike,
            invariant=case.invariant | self.invariant,
        )
        first: list[str] | None = None
        for shaped in self.shapes(filled):
            reasons = self.refusals(shaped.problem(self.device.type, self.sm, self.architecture), shaped.role)
            if not reasons:
                return shaped
            first = first or reasons
        raise Unclaimed(*(first or ["no shape of this case is among its dims"]))

    def _check_claims(self, case: Case) -> None:
        capabilities = self.capabilities
        if missing := case.extras - capabilities.extras:
            raise Unclaimed(f"it does not claim the extra {', '.join(sorted(missing))}")
        if case.role not in capabilities.roles:
            raise Unclaimed(f"it does not claim the role {case.role}, only {', '.join(sorted(capabilities.roles))}")
        if case.is_mla and case.role is Role.PREFILL:
            absorbed = ExtendPath.ABSORBED in capabilities.mla_extend
            if not case.ragged and not absorbed:
                raise Unclaimed(
                    "it does not extend MLA absorbed: " + (", ".join(sorted(capabilities.mla_extend)) or "not at all")
                )
            if case.ragged and not capabilities.mla_extend - {ExtendPath.ABSORBED}:
                raise Unclaimed("it extends MLA absorbed only")

    def shapes(self, case: Case) -> Iterator[Case]:
        """Yield the case in each shape that it leaves open, whether it is served or not."""
        if case.is_mla:
            small = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
            dims = [(small, 16)]
            if self.capabilities.mla_dims is not None:
                dims = [
                    (MLADims(rank, 128, rope), 128) for rank, rope in sorted(self.capabilities.mla_dims, reverse=True)
                ]
            else:
                dims.append((MLADims(512, 128, 64), 128))
                dims = list(self._common_first(tuple(dims), dims[-1]))
            counts = self._common_first(HEADS, 16) if case.mla_heads is None else (case.mla_heads,)
            for (mla, width), heads in product(dims if case.mla is None else [(case.mla, case.v_head_dim)], counts):
                yield replace(case, mla=mla, v_head_dim=width, mla_heads=heads)
            return
        if case.kind.is_linear:
            wide = self.device.type == "cuda"
            for linear in (linear_dims(case.kind, *(64, 64) if wide else (12, 8)), linear_dims(case.kind, 64, 64)):
                yield replace(case, linear=case.linear or linear)
            return
        pairs = self._common_first(DIFFERENT, (192, 128)) if case.unequal_dims else self._common_first(EQUAL, (64, 64))
        if self.capabilities.head_dims is not None:
            claimed = sorted(pair for pair in self.capabilities.head_dims if (pair[0] != pair[1]) == case.unequal_dims)
            pairs = tuple(claimed)
        for pair in pairs if case.dims is None else (case.dims,):
            yield replace(case, dims=pair)

    def _common_first(self, found: tuple[Shape, ...], usual: Shape) -> tuple[Shape, ...]:
        return (usual, *(each for each in found if each != usual)) if self.device.type == "cuda" else found

    def build(
        self,
        model: ModelSpec,
        problem: Problem,
        role: Role,
        pools: KVPools,
        limits: Limits,
        roles: frozenset[Role] | None = None,
        coordinator: Coordinator | None = None,
        allocate: Allocate | None = None,
        ranks: int = 1,
    ) -> AttentionBackend:
        """Build the backend for a problem from a new context, as the host of the last of ``ranks`` ranks does.

        ``allocate`` allocates its workspaces. Raises :class:`NotBuilt`.
        """
        assert problem.dtype is not None and problem.kv_dtype is not None and problem.page_size is not None
        context = HostContext(
            model=model,
            device=self.device,
            dtype=torch_dtype(problem.dtype),
            kv_dtype=problem.kv_dtype,
            page_size=problem.page_size,
            limits=limits,
            pools=pools,
            workspace=WorkspaceOwner() if allocate is None else WorkspaceOwner(allocate),
            parallel=Parallel(ranks - 1, ranks),
            coordinator=coordinator,
        )
        if roles is None:
            served = (
                {Role.PREFILL, Role.DECODE} & self.capabilities.roles if role in (Role.PREFILL, Role.DECODE) else {role}
            )
            roles = frozenset(each for each in served if not self.refusals(problem, each)) | {role}
        own = context.for_backend(
            self.name, self.capabilities, roles=roles, options=self.options, invariant=problem.invariant
        )
        try:
            return build_backend(self.registered, own, problem)
        except AttnplugError as error:
            raise NotBuilt(str(error)) from error

    def claimed_kinds(self) -> list[AttentionKind]:
        return sorted(self.capabilities.kinds)

    def serves(self, mode: ForwardMode, kind: AttentionKind) -> bool:
        """Return True if the backend serves this mode and kind (for MLA: absorbed)."""
        try:
            self.fit(Case(((3, 1),), mode, kind))
        except Unclaimed:
            return False
        return True


def linear_dims(kind: AttentionKind, key: int, value: int) -> LinearDims:
    """Dimensions of a linear layer, with more heads than key heads if its kind allows it."""
    if kind is AttentionKind.SHORT_CONV:
        return LinearDims(0, 0, 0, 0, conv_channels=4 * key, conv_width=3)
    heads, key_heads = {AttentionKind.GDN: (4, 2), AttentionKind.MAMBA2: (4, 1)}.get(kind, (3, 3))
    if kind is AttentionKind.LIGHTNING:
        return LinearDims(heads, key_heads, key, value)
    return LinearDims(heads, key_heads, key, value, conv_channels=2 * key_heads * key + heads * value, conv_width=4)

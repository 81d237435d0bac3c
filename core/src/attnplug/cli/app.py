"""The commands and their options. What each does is in a module of its own, imported when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from attnplug.cli import output

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention backends for LLM inference as plugins.",
)


def _reserve(json: bool) -> bool:
    if json:
        output.reserve_for_json()
    return json


Json = Annotated[
    bool,
    typer.Option("--json", callback=_reserve, help="Write JSON to standard output, everything else to standard error."),
]
Attention = Annotated[
    str,
    typer.Option("--attention-backend", metavar="NAME|auto", help="Backend for full attention, prefill and decode."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="Default: cuda where there is a GPU, else cpu.")
]
KVType = Annotated[
    str | None, typer.Option("--kv-dtype", metavar="DTYPE", help="Element type of the cache. Default: as --dtype.")
]
PageSize = Annotated[int | None, typer.Option("--page-size", metavar="TOKENS", help="Tokens per cache page.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--backend-option", metavar="NAME.KEY=VALUE", help="An option of one backend. May be repeated."),
]


def _role(role: str) -> object:
    return typer.Option(f"--{role}-attention-backend", metavar="NAME|auto", help=f"Backend for the role {role} alone.")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of attnplug and of its contract.")
    ] = False,
) -> None:
    if version:
        from importlib import metadata

        from attnplug.contract import CONTRACT_VERSION

        print(f"attnplug {metadata.version('attnplug')}, contract {CONTRACT_VERSION}")
        raise typer.Exit


@app.command()
def backends(
    json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Show broken and blocked plugins too.")] = False,
) -> None:
    """List the installed backends: what each supports, and whether it is usable here."""
    from attnplug.cli.backends import list_backends

    list_backends(json=json, every=every)


@app.command()
def explain(
    model: Annotated[
        str, typer.Option("--model", metavar="CONFIG", help="A config.json, a folder that holds one, or tiny:NAME.")
    ],
    attention_backend: Attention = "auto",
    prefill_attention_backend: Annotated[str | None, _role("prefill")] = None,
    decode_attention_backend: Annotated[str | None, _role("decode")] = None,
    linear_attention_backend: Annotated[str | None, _role("linear")] = None,
    draft_attention_backend: Annotated[str | None, _role("draft")] = None,
    device: Device = None,
    sm: Annotated[
        int | None, typer.Option("--sm", metavar="90", help="Compute capability: 9.0 is 90. Need not be present here.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Element type of activations. Default: the model's.")
    ] = None,
    kv_dtype: KVType = None,
    page_size: PageSize = None,
    speculative_tokens: Annotated[
        int, typer.Option("--speculative-tokens", metavar="N", help="Draft tokens a step.")
    ] = 0,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", help="Ranks sharing the heads.")
    ] = 1,
    cuda_graph: Annotated[
        str, typer.Option("--cuda-graph", metavar="LEVEL", help="never, decode, uniform or always.")
    ] = "never",
    backend_option: Settings = None,
    json: Json = False,
) -> None:
    """Say which backend each role gets for a model, and every reason against every candidate."""
    from attnplug.cli.explain import ExplainOptions, explain_choice

    explain_choice(
        ExplainOptions(
            model=model,
            attention=attention_backend,
            prefill=prefill_attention_backend,
            decode=decode_attention_backend,
            linear=linear_attention_backend,
            draft=draft_attention_backend,
            device=device,
            sm=sm,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            speculative_tokens=speculative_tokens,
            tensor_parallel=tensor_parallel,
            cuda_graph=cuda_graph,
            settings=tuple(backend_option or ()),
        ),
        json=json,
    )


@app.command()
def doctor(json: Json = False) -> None:
    """Report on the environment: Python, torch, GPU, kernel libraries, plugins, caches. Always prints, never fails."""
    from attnplug.cli.doctor import report

    report(json=json)


@app.command()
def check(
    attention_backend: Attention = "auto",
    device: Device = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Element type of activations.")] = "float32",
    kv_dtype: KVType = None,
    page_size: PageSize = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the random inputs.")
    ] = 0,
    backend_option: Settings = None,
    json: Json = False,
) -> None:
    """Run paged attention on a backend and compare every result with an independent float64 computation."""
    from attnplug.cli.check import CheckOptions, run_check

    run_check(
        CheckOptions(
            attention=attention_backend,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            seed=seed,
            settings=tuple(backend_option or ()),
        ),
        json=json,
    )

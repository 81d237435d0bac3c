"""Declarations of ``attnplug tune`` and ``attnplug bench``. torch is imported when a command runs."""

from __future__ import annotations

import argparse

from attnplug.cli.app import Commands, add_cache_options, add_command, add_device_option


def declare_tune(commands: Commands[argparse.ArgumentParser]) -> None:
    def call(parsed: argparse.Namespace) -> int:
        from attnplug_tune.arguments import check_tune

        check_tune(parsed)
        from attnplug_tune.tune_command import tune_backends

        return tune_backends(parsed)

    text = "Measure every usable backend for a model here, and keep the times: auto then takes the fastest."
    parser = add_command(commands, "tune", text, call)
    _add_measuring_options(parser)
    text = "seconds to measure in, without compiling kernels; the most informative points come first"
    parser.add_argument("--budget", type=float, default=180.0, metavar="SECONDS", help=text)
    text = "the file to add to (default: this device's in the user's cache folder)"
    parser.add_argument("--tables", metavar="FILE", help=text)
    parser.add_argument("--again", action="store_true", help="measure points again that the file already has")
    text = "write tables and interactive plots as one HTML page (needs attnplug-tune[plot])"
    parser.add_argument("--report", metavar="FILE", help=text)


def declare_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    def call(parsed: argparse.Namespace) -> int:
        from attnplug_tune.arguments import check_bench

        check_bench(parsed)
        from attnplug_tune.bench_command import bench

        return bench(parsed)

    text = "Measure backends against each other, their libraries and the bandwidth limit, or compare two results."
    parser = add_command(commands, "bench", text, call)
    _add_measuring_options(parser)
    parser.add_argument("--against", metavar="raw", help="measure the backends' libraries too, called directly")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON, for --compare")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the results: out.svg, or out.html with tables (needs attnplug-tune[plot])"
    )
    text = "compare two results: exits with 1 if something became slower beyond noise"
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help=text)


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands share: model, points, backends, device."""
    text = "a config.json, a folder that holds one, or tiny:NAME; no weights are needed"
    parser.add_argument("--model", metavar="CONFIG", help=text)
    text = "in place of a model, layers such as mla:16,gqa:32/8x128 (heads, KV heads, width)"
    parser.add_argument("--shapes", metavar="LAYERS", help=text)
    text = "measure layers as another engine calls them: vllm, sglang or transformers (default: ours)"
    parser.add_argument("--host", metavar="NAME", help=text)
    text = (
        "in place of a grid: 64x4096 decodes, 64x~4096 with lengths around that, 64x4096v4 verifies 4 tokens, 1x8k+512 "
        "prefills 512 after 8192 rows, 1x8k+512&32x4k beside 32 decodes (bench only)"
    )
    parser.add_argument("--points", metavar="POINTS", help=text)
    text = "path of MLA prefills: absorbed, one_shot or chunked (default: as the engine chooses, batch by batch)"
    parser.add_argument("--mla-extend", metavar="PATH", help=text)
    text = "backends to measure, auto included where it is to be compared (default: all that are usable)"
    parser.add_argument("--backends", metavar="A,B", help=text)
    add_device_option(parser)
    parser.add_argument("--dtype", metavar="DTYPE", help="element type of activations (default: the model's)")
    add_cache_options(parser)
    parser.add_argument(
        "--max-batch", type=_count, metavar="N", help="maximum number of requests (default: 256, on a CPU 16)"
    )
    text = "most cache rows of a request (default: 65536, on a CPU 1024, or the model's)"
    parser.add_argument("--max-context", type=_count, metavar="TOKENS", help=text)
    text = "tokens that a verify checks at once; none is measured without"
    parser.add_argument("--speculative-tokens", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)

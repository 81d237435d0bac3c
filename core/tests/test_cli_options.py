"""Every option of ``explain`` is part of the problem or of the request."""

from __future__ import annotations

from attnplug import DType, ExtendPath, GraphLevel, Problem, Role
from attnplug.cli.app import option, parse
from attnplug.cli.explain import problem_of, request_of
from attnplug.host import load_model, load_registry

ROLES = {Role.PREFILL: "two", Role.DECODE: "three", Role.LINEAR: "four", Role.DRAFT: "five"}
OPTIONS = {
    "--model": "tiny:deepseek_v32",
    "--host": "vllm",
    "--attention-backend": "one",
    **{option(role.setting): name for role, name in ROLES.items()},
    "--backend-option": "one.split=2",
    "--device": "cuda",
    "--sm": "90",
    "--dtype": "bf16",
    "--kv-dtype": "fp8",
    "--index-dtype": "fp8",
    "--page-size": "16",
    "--speculative-tokens": "3",
    "--speculative-topk": "4",
    "--tensor-parallel": "2",
    "--mla-extend": "absorbed",
    "--cuda-graph": "uniform",
    "--batch-invariant": "run,batch",
}


def test_every_option_of_explain_is_part_of_the_problem_or_of_the_request() -> None:
    """The options are enumerated, so none is left at its default unnoticed."""
    words = [word for pair in OPTIONS.items() for word in pair]
    parsed, default = (parse(["explain", *each]) for each in ([*words, "--enable-hisparse"], ["--model", "tiny:llama"]))
    same = {name for name, value in vars(parsed).items() if value == getattr(default, name)}
    assert same - {"command", "render"} == {"json", "version"}
    model = load_model("tiny:deepseek_v32")
    assert problem_of(parsed, model, load_registry()) == Problem(
        model=model,
        device="cuda",
        sm=90,
        dtype=DType.BFLOAT16,
        kv_dtype=DType.FLOAT8_E4M3,
        page_size=16,
        cuda_graph=GraphLevel.UNIFORM,
        wants_prefill_graphs=True,
        speculative_tokens=3,
        speculative_topk=4,
        tensor_parallel=2,
        index_dtype=DType.FLOAT8_E4M3,
        coordinator="hisparse",
        mla_extend=ExtendPath.ABSORBED,
        invariant=frozenset({"run", "batch"}),
    )
    request = request_of(parsed)
    assert (request.attention, request.roles, request.options) == ("one", ROLES, {"one": {"split": "2"}})

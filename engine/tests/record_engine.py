"""Start an engine or embedder on a fake H200, and print the Triton kernels that it launches.

Arguments: a model and the settings as JSON; ``embed`` among them for an embedder. With ``prompts``, lengths of prompts
that are served together, batch by batch, the kernels are those that serving launches and the start-up did not. With
``opaque``, kernels of the backend that ``opaque_backend`` defines stop that way. Reports about skipped kernels are
printed among the kernels; with ``variants``, each kernel comes with the key of its variant in Triton's cache.
"""

import json
import sys

import opaque_backend

from attnplug_engine import engine
from attnplug_engine.execution.compile_ahead import GPU, AheadRequest
from attnplug_engine.options import EmbedOptions, EngineOptions
from attnplug_engine.recording.__main__ import start
from attnplug_engine.recording.triton_kernels import record_launches

PROPERTIES = {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232448}
H200 = GPU({"name": "NVIDIA H200", **PROPERTIES}, 140 << 30, ("cuda", 90, 32))

if __name__ == "__main__":
    settings, names = json.loads(sys.argv[2]), []
    kind = EmbedOptions if settings.pop("embed", False) else EngineOptions
    variants = settings.pop("variants", False)
    if (how := settings.pop("opaque", None)) is not None:
        opaque_backend.install(how)
    if (batches := settings.pop("prompts", None)) is not None:
        make = engine.Engine

        def serve(*args: object, **named: object) -> engine.Engine:
            """Take the place of the engine's constructor, because fake tensors live as long as their mode."""
            serving = make(*args, **named)
            names.clear()
            for lengths in batches:
                prompts = [[(number + place) % 97 for place in range(each)] for number, each in enumerate(lengths)]
                serving.generate(prompts, max_tokens=3)
            return serving

        engine.Engine = serve

    def found(name, compile_kernel):
        source, options = compile_kernel.args[0], compile_kernel.keywords["options"]
        names.append(name.rpartition(".")[2] + f" {source.hash()} {sorted(options.items())}" * variants)

    record_launches(H200.target, found)
    request = AheadRequest(sys.argv[1], kind(**settings), H200, ranks=1, workers=1, num_pages=settings.get("num_pages"))
    start(request, lambda event: names.append(event.get("skipped", "")))
    print(json.dumps([name for name in names if name]))

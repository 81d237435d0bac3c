"""Start an engine that decodes by FlashMLA on a fake H200. Print the Triton kernels, and reports about skipped kernels.

Arguments: a model, and the folder of a library in place of FlashMLA.
"""

import json
import sys

from attnplug import Role
from attnplug_engine.execution.compile_ahead import GPU, AheadRequest
from attnplug_engine.options import EngineOptions
from attnplug_engine.recording.__main__ import start
from attnplug_engine.recording.triton_kernels import record_launches

PROPERTIES = {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232448}
H200 = GPU({"name": "NVIDIA H200", **PROPERTIES}, 140 << 30, ("cuda", 90, 32))

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    options = EngineOptions(
        role_backends={Role.PREFILL: "torch_native", Role.DECODE: "flashmla"},
        dtype="bfloat16",
        max_batch=1,
        context_length=8,
        chunked_prefill_size=4,
        num_pages=4,
    )
    found: list[str] = []
    record_launches(H200.target, lambda name, _compile: found.append(name.rpartition(".")[2]))
    request = AheadRequest(sys.argv[1], options, H200, ranks=1, workers=1, num_pages=4)
    start(request, lambda event: found.append(event.get("skipped", "")))
    print(json.dumps(found))

"""Runs cases in a real SGLang, one engine after another, and prints a line of JSON for each.

    python serve.py FOLDER '{"attention_backend": "attnplug:torch_native", …}' …

SGLang starts processes that import this file again: everything is below the guard.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def serve(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Tokens of every prompt, then of the last two again, with their rows in the cache."""
    import sglang

    from tiny_checkpoints import TOKENS, prompts

    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "log_level": "error"}
    try:
        engine = sglang.Engine(model_path=folder, max_total_tokens=4096, **settings, **given)
    except ValueError as error:
        return {"refused": str(error)}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    try:
        first = engine.generate(input_ids=prompts(), sampling_params=sampling)
        again = engine.generate(input_ids=prompts()[6:], sampling_params=sampling)
    finally:
        engine.shutdown()
    return {
        "tokens": [answer["output_ids"] for answer in first],
        "again": [answer["output_ids"] for answer in again],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in again],
        "verified": sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in first),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for text in sys.argv[2:]:
        sys.stdout.write("RESULT " + json.dumps(serve(sys.argv[1], json.loads(text))) + "\n")
        sys.stdout.flush()

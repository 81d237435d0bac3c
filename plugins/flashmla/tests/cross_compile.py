"""Compile the kernel that joins queries for SM 90, also without such a GPU. Prints [type, bytes spilled, loads and
stores of a thread]."""

import json
import re

from attnplug_flashmla.triton_kernels import PAIRS, _join
from attnplug_testing.ahead import compiled, resources

STRIDES = ("latent_row", "latent_head", "rope_row", "rope_head")

if __name__ == "__main__":
    found = []
    for kind in ("bf16", "fp16"):
        kinds = dict.fromkeys(("joined", "latent", "rope"), f"*{kind}")
        constants = {"HEADS": 128, "GIVEN": 128, "RANK": 512, "ROPE": 64, "PAIRS": PAIRS}
        made = compiled(_join, 90, kinds, constants, {}, STRIDES)
        moved = re.findall(r"(?:ld|st)\.global\.\S+", made.asm["ptx"])
        found.append((kind, resources(made)[1], sorted(moved)))
    print(json.dumps(found))

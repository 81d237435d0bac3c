"""Compile the kernel that fills work lists for SM 90, also without such a GPU. Prints [requests, registers, bytes
spilled]."""

import json

from attnplug_flashinfer.triton_kernels import _BLOCK, _fill_schedule
from attnplug_testing.ahead import compiled, resources

POINTERS = (
    *("request_indices", "tile_indices", "chunk_indices", "parts_indptr", "merge_indptr", "chunk_rows"),
    *("kv_lens", "kv_indptr", "last_page_lens"),
)

if __name__ == "__main__":
    kinds = {**dict.fromkeys(POINTERS, "*i32"), "valid": "*u8"}
    found = []
    for requests in (32, 1024):
        constants = {"REQUESTS": requests, "BLOCK": _BLOCK}
        # page_size, queries and tiles of 1 become constants, as the launcher makes them
        ones = {} if requests == 32 else {"queries": 1, "tiles": 1, "least_chunk": 1}
        made = compiled(_fill_schedule, 90, kinds, {**constants, **ones}, {"num_warps": max(requests // 128, 1)})
        found.append((requests, *resources(made)))
    print(json.dumps(found))

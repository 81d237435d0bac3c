"""Stand-ins for two kernels that vLLM has for GPUs only, so that ranks share the rows of a request on a CPU.

A ``vllm.general_plugins`` entry point, so that vLLM calls it in its worker processes.
"""

import torch


def compute_slot_mapping(
    num_tokens,
    max_num_tokens,
    query_start_loc,
    positions,
    block_table,
    block_table_stride,
    slot_mapping,
    KV_CACHE_BLOCK_SIZE,
    TOTAL_CP_WORLD_SIZE=1,
    TOTAL_CP_RANK=0,
    CP_KV_CACHE_INTERLEAVE_SIZE=1,
    PAD_ID=-1,
    BLOCK_SIZE=1024,
):
    """Slots of new rows; ``PAD_ID`` for rows of other ranks. vLLM's C++ operator knows one rank only."""
    size, ranks, interleave = KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    requests = torch.repeat_interleave(query_start_loc.diff())
    position = positions[: requests.shape[0]].long()
    offset = position % (size * ranks)
    local = offset // (ranks * interleave) * interleave + offset % interleave
    slots = block_table[requests, position // (size * ranks)].long() * size + local
    slot_mapping.fill_(PAD_ID)
    slot_mapping[: requests.shape[0]] = torch.where(offset // interleave % ranks == TOTAL_CP_RANK, slots, PAD_ID)


def correct_attn_out(out, lses, cp_rank, ctx, is_lse_base_on_e=True):
    """Weigh a rank's partial result by the log-sum-exps of all ranks."""
    assert is_lse_base_on_e
    total = torch.logsumexp(lses, 0)
    return out.mul_(torch.exp(lses[cp_rank] - total).unsqueeze(-1)), total


def register():
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping
    if isinstance(ComputeSlotMappingKernel.kernel, KernelOverride):
        ComputeSlotMappingKernel.kernel._impl = compute_slot_mapping
    dcp.correct_attn_out = correct_attn_out

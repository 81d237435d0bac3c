"""Stand-in for SGLang's compiled CPU kernels. SGLang imports many of them by name and calls most with AMX only.

Without AMX an x86 host calls none, except around drafts (``speculation``). An Arm host calls the four operators below,
which compute the same with torch. ``convert_weight_packed`` must stay undefined: if it exists, SGLang concludes that
AMX kernels are installed.
"""

import torch
import torch.distributed

from sgl_kernel.speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    decode_attention_cpu,
    extend_attention_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.0.0"

_operators = torch.library.Library("sgl_kernel", "DEF")


def _operator(schema):
    def define(function):
        name = _operators.define(schema)
        _operators.impl(name, function, "CompositeExplicitAutograd")
        return function

    return define


@_operator("init_cpu_threads_env(str cpu_ids) -> str")
def init_cpu_threads_env(cpu_ids):
    """Set the number of threads. Unlike the compiled operator, binds none to a core: tests share few cores."""
    count = 0
    for cpus in cpu_ids.split(","):
        first, _, last = cpus.partition("-")
        count += 1 + int(last or first) - int(first)
    torch.set_num_threads(count)
    return f"{count} threads"


@_operator("initialize(int size, int rank) -> ()")
def initialize(size, rank):
    """Check the arguments. The compiled operator sets up shared memory, which collectives of torch do not need."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")


@_operator("shm_allreduce(Tensor(a!) data, int reduce_op) -> ()")
def shm_allreduce(data, reduce_op):
    """Sum ``data`` over all ranks, in place."""
    assert reduce_op == int(torch.distributed.ReduceOp.SUM), reduce_op
    torch.distributed.all_reduce(data)


@_operator("shm_allgather(Tensor data, int dim) -> Tensor")
def shm_allgather(data, dim):
    """Concatenate ``data`` of all ranks along ``dim``."""
    data = data.contiguous()
    parts = [torch.empty_like(data) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, data)
    return torch.cat(parts, dim)


_HOW = (
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, {more}float scale, float cap, bool cross, "
    "int window, Tensor? encoder_lens, Tensor? sinks"
)
_operator(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor keys, Tensor values, float k_scale, "
    f"float v_scale, {_HOW.format(more='Tensor new_lens, Tensor starts, int longest, ')}, Tensor? tree, bool causal) "
    "-> ()"
)(extend_attention_cpu)
_operator(
    "decode_attention_cpu(Tensor q, Tensor(a!) keys, Tensor(b!) values, float k_scale, float v_scale, Tensor(c!) out, "
    f"Tensor? k, Tensor? v, Tensor slots, Tensor logits, {_HOW.format(more='')}) -> ()"
)(decode_attention_cpu)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*given, **settings):
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return missing

"""SGLang's own host pools on a CPU, and their pages as bytes a layer, read and written by the shape of their tensors."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

HEADS, DIM, LATENT = 2, 16, 48
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def mha_pool(layout, layers, page, dtype, pages, on_device=KVBufferLayout.NHD):
    device = tuple(torch.zeros(page, HEADS, DIM, dtype=dtype) for _ in range(layers))
    pointers = torch.tensor([buffer.data_ptr() for buffer in device], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=device, v=device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=on_device),
        page_size=page, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False,
            device_capacity_tokens=page, start_layer=0, end_layer=layers, host_token_capacity=pages * page,
        )  # fmt: skip


def mla_pool(layout, layers, page, dtype, pages):
    device = tuple(torch.zeros(page, 1, LATENT, dtype=dtype) for _ in range(layers))
    pointers = torch.tensor([buffer.data_ptr() for buffer in device], dtype=torch.uint64)
    info = MLABufferInfo(
        buffers=device, data_ptrs=pointers, layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=page,
        kv_lora_rank=LATENT - 16, qk_rope_head_dim=16, kv_cache_dim=LATENT, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=page, start_layer=0, end_layer=layers,
            target_layer_num=layers, host_token_capacity=pages * page,
        )  # fmt: skip


def page_view(pool, page, layer):
    """A page's KV of one layer: (2, tokens, heads, dim), or (tokens, 1, latent) of MLA."""
    first, step = page * pool.page_size, pool.page_size
    kv = pool.kv_buffer
    if isinstance(pool, MLATokenToKVPoolHost):
        return {
            "layer_first": lambda: kv[layer, first : first + step],
            "page_first": lambda: kv[first : first + step, layer],
            "page_first_direct": lambda: kv[page, layer],
        }[pool.layout]()
    return {
        "layer_first": lambda: kv[:, layer, first : first + step],
        "page_first": lambda: kv[:, first : first + step, layer],
        "page_first_direct": lambda: kv[:, page, layer],
        "page_head": lambda: kv[:, page, :, :, layer].transpose(1, 2),
    }[pool.layout]()


def put(pool, page, layer, data):
    view = page_view(pool, page, layer)
    view.copy_(torch.from_numpy(data.copy()).view(pool.dtype).view(view.shape))


def get(pool, page, layer):
    return page_view(pool, page, layer).contiguous().flatten().view(torch.uint8).numpy().copy()


def layer_bytes(pool):
    return int(np.prod(page_view(pool, 0, 0).shape)) * pool.dtype.itemsize

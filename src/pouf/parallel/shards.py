"""Tensors that lie in parts on several processes (DTensors): made whole one at a time, written to a file, read again.

Every process must call what is here, in the same order. Files are the same as those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pouf.files import atomic_write

# As safetensors calls them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def is_main() -> bool:
    """The process that writes and reads files for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def full(tensor: Any) -> Tensor:
    """The whole of a shard on every process; any other tensor as it is."""
    return tensor.detach().full_tensor() if is_shard(tensor) else tensor  # type: ignore[no-any-return]


def local(tensor: Any) -> Tensor:
    """The part that lies here."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[no-any-return]


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of them whole in the first process's memory; the others get nothing. What is tied there stays tied."""
    known: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in known:
            known[id(tensor)] = full(tensor).detach().cpu() if is_main() else _handed_over(tensor)
    return {name: known[id(tensor)] for name, tensor in tensors.items()} if is_main() else {}


def _handed_over(tensor: Tensor) -> Tensor:
    full(tensor)
    return tensor


def write_shards(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """As safetensors. The first process writes, and no process holds more than one whole tensor at a time."""
    if not is_main():
        for tensor in tensors.values():
            _handed_over(tensor)
        return
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(file) as partial, partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for tensor in tensors.values():
            plain = full(tensor).detach().cpu().contiguous()
            stream.write(plain.flatten().view(torch.uint8).numpy().data)


def from_first(like: Tensor, read: Callable[[], Tensor]) -> Tensor:
    """What the first process reads, sharded as `like` is; each process gets its part alone."""
    device = local(like).device
    given = read().to(device) if is_main() else torch.empty(like.shape, dtype=like.dtype, device=device)
    if not dist.is_initialized():
        return given
    if not is_shard(like):
        dist.broadcast(given, 0)
        return given
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(given.to(like.dtype), sharded.device_mesh, sharded.placements, src_data_rank=0)

"""The memory of the KV cache: blocks of token slots, for all layers.

Knows block ids and rows, not whose they are. The memory is reserved at once but allocated lazily by the operating
system, page by page as blocks are first written; what was never written holds garbage (NaN included), so every reader
must skip masked slots instead of multiplying them by zero.
"""

import torch

MAX_BLOCK_SIZE = 64


class PagedKVStore:
    """Paged keys and values. Owner of its tensor; backends and the runner write through `append` and `copy_rows`.

    Layout: `data[layer, block, 0 = K or 1 = V, offset, kv_head, dim]`, FlashInfer's NHD order.
    """

    __slots__ = ("block_size", "data", "head_dim", "num_blocks", "num_kv_heads", "num_layers")

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve `num_layers * num_blocks` blocks.

        Args:
            num_layers: Layers of the model.
            num_blocks: Blocks per layer; ids are 0 to num_blocks - 1.
            block_size: Token slots per block, a power of two, 64 at most.
            num_kv_heads: KV heads per token.
            head_dim: Values per head.
            dtype: A floating-point type.
            device: Where the memory lives.

        Raises:
            ValueError: a size that is not positive, or a block size that is no power of two up to 64.
            TypeError: a dtype that is not floating point.
        """
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
            raise ValueError(f"block_size is {block_size}; use 1, 2, 4, 8, 16, 32 or {MAX_BLOCK_SIZE}")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype is {dtype}; KV needs a floating-point type")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_for_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, K and V; for sizing a store before it is built."""
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored keys and values."""
        return self.data.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.data.element_size() * self.data.numel() // self.num_blocks

    def layer(self, index: int) -> torch.Tensor:
        """View of one layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`."""
        return self.data[index]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write tokens' KV to their slots, converted to the store's dtype. O(tokens).

        Args:
            layer: Layer index.
            k: Keys `[num_tokens, num_kv_heads, head_dim]`.
            v: Values, same shape.
            slot_mapping: int64 `[num_tokens]`, block id * block_size + offset, no slot twice.

        Raises:
            IndexError: a slot outside of the store.
        """
        self.write_rows(layer, k, v, self.key_rows(slot_mapping).to(self.data.device))

    def key_rows(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Where `write_rows` puts the keys of the slots: int64 `[num_tokens]`, on the slots' device."""
        # a block is block_size rows of K, then block_size rows of V: row = slot + block * block_size (+ block_size)
        return slot_mapping + slot_mapping.div(self.block_size, rounding_mode="floor") * self.block_size

    def write_rows(self, layer: int, k: torch.Tensor, v: torch.Tensor, key_rows: torch.Tensor) -> None:
        """Write tokens' KV where `key_rows`, on the store's device, says. One step's rows serve all layers.

        8-bit types hold what they can: larger values become the largest one.

        Raises:
            IndexError: a row outside of the store (on the CPU; a GPU stops the process).
        """
        rows = self.data[layer].view(self.num_blocks * 2 * self.block_size, self.num_kv_heads, self.head_dim)
        for values, first in ((k, key_rows), (v, key_rows + self.block_size)):
            if self.dtype.itemsize == 1:
                limit = torch.finfo(self.dtype).max
                bits = values.clamp(-limit, limit).to(self.dtype).view(torch.uint8)
                # index_copy_ has no code for 8-bit floats
                rows.view(torch.uint8).index_copy_(0, first, bits)
            else:
                rows.index_copy_(0, first, values.to(self.dtype))

    def copy_rows(self, source_block: int, target_block: int, num_rows: int) -> None:
        """Copy the first rows of a block to another, K and V, in all layers. Nothing to do for the same block.

        Raises:
            ValueError: a block outside of the store, or more rows than a block has.
        """
        for block in (source_block, target_block):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block id {block} is outside of the store's {self.num_blocks} blocks")
        if not 0 <= num_rows <= self.block_size:
            raise ValueError(f"can't copy {num_rows} rows of a block of {self.block_size}")
        if source_block != target_block and num_rows:
            self.data[:, target_block, :, :num_rows] = self.data[:, source_block, :, :num_rows]

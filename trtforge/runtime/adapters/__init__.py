"""LoRA adapters: their files, the layers that they change on a rank, and their products in a mixed batch."""

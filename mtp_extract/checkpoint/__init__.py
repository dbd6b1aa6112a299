"""Writing checkpoints: one module a layout, over a streaming safetensors writer."""

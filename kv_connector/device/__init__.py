"""KV in device memory: moved from device to device, or through pinned host memory."""

"""KV in the memory of a device: moved from device to device, or through pinned host memory."""

"""A decoder of a known shape with random weights, made in the memory of the GPU that runs it, without a file of
weights."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from paged_kernels.gpu.attention import TritonBackend
from transformers import PreTrainedConfig

from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.model_config import load_model_config


def random_decoder(
    config: PreTrainedConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> DecoderForCausalLM:
    """Returns a decoder whose norms are 1 and whose products are about as large as their inputs, so that an error in
    any layer changes the tokens."""
    config.architectures = ["LlamaForCausalLM"]
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        ours = load_model_config(Path(directory))
    model = DecoderForCausalLM(ours, TritonBackend(), max_model_len=max_model_len, weights=WeightFormat(dtype, device))
    for name, slot in model.checkpoint_slots().items():
        memory = slot.open()
        if name.endswith("norm.weight"):
            memory.fill_(1.0)
        else:
            memory.normal_(0.0, memory.shape[-1] ** -0.5)
        slot.filled(memory)
    model.pack()
    return model

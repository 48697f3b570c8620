"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen2 / 2.5 and Qwen3 differ only in their `ModelConfig`.

It is a pre-norm transformer with RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), grouped-query attention
(arXiv:2305.13245) and rotary positions. The tokens of all sequences of a step form one dimension, `num_tokens`; only
attention knows where sequences begin. Invariant: the values of a token depend on its own sequence alone, up to the
rounding of matrix products.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from paged_kernels.base import AttentionBackend, AttentionMetadata, LastTokens
from paged_kernels.fused import add_rms_norm, rms_norm, silu_mul
from torch import Tensor

from kvrelay.engine.layers.layer_stack import layer_stack, stacked_linear
from kvrelay.engine.layers.linear import Linear, LinearLayer, make_linear, make_plain_linear
from kvrelay.engine.layers.quantized_linear import QuantizedLinear
from kvrelay.engine.layers.rotary import RotaryTable
from kvrelay.engine.layers.weight_format import Slot, WeightFormat, slot_of
from kvrelay.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from paged_kernels.cpu.layer_stack import LayerStack, StackedLayer  # they need the extension

_EMBEDDING = "model.embed_tokens"  # its name in the checkpoint


def layer_prefix(layer: int) -> str:
    """Returns the prefix of the names of a layer's tensors in the checkpoint."""
    return f"model.layers.{layer}."


class Attention:
    """The attention of one layer: projections, per-head norms and rotary positions around paged attention."""

    def __init__(self, config: ModelConfig, layer: int, backend: AttentionBackend, weights: WeightFormat) -> None:
        self.layer = layer
        self.backend = backend
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of query, key, value
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer]
        self.eps = config.rms_norm_eps
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_parts = (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size))
        output_parts = (("o_proj", config.hidden_size),)
        prefix = f"{layer_prefix(layer)}self_attn."
        self.qkv = make_linear(qkv_parts, config.hidden_size, bias=config.qkv_bias, weights=weights, prefix=prefix)
        self.output = make_linear(output_parts, query_size, bias=config.output_bias, weights=weights, prefix=prefix)
        self.query_norm = weights.empty(config.head_dim) if config.qk_norm else None
        self.key_norm = weights.empty(config.head_dim) if config.qk_norm else None

    def write_kv(self, x: Tensor, cos: Tensor, sin: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> Tensor:
        """Writes the KV of `x`, `[num_tokens, hidden_size]`, into the pool. Returns the queries, `[num_tokens,
        num_heads, head_dim]`."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        query, key, value = heads.split_with_sizes(self.head_counts, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._norm_heads(query, self.query_norm), self._norm_heads(key, self.key_norm)
        self.backend.write_kv_rotary(query, key, value, (cos, sin), kv_pool, self.layer, slot_mapping)
        return query

    def attend(self, query: Tensor, kv_pool: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Returns the projected result of attention, `[num_tokens, hidden_size]`."""
        attended = self.backend.attend(
            query, kv_pool, self.layer, metadata, scale=self.scale, sliding_window=self.sliding_window
        )
        return self.output(attended.view(len(query), -1))  # [num_tokens, hidden_size]

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalises each head of each token of `x`, `[num_tokens, heads, head_dim]`."""
        return rms_norm(x.reshape(-1, self.head_dim), weight, self.eps).view(x.shape)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.qkv.slots(prefix)
        yield from self.output.slots(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            yield f"{prefix}q_norm.weight", slot_of(self.query_norm)
            yield f"{prefix}k_norm.weight", slot_of(self.key_norm)


class Mlp:
    """The MLP of one layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        size, prefix = config.intermediate_size, f"{layer_prefix(layer)}mlp."
        parts = (("gate_proj", size), ("up_proj", size))
        down_parts = (("down_proj", config.hidden_size),)
        self.gate_up = make_linear(parts, config.hidden_size, bias=config.mlp_bias, weights=weights, prefix=prefix)
        self.down = make_linear(down_parts, size, bias=config.mlp_bias, weights=weights, prefix=prefix)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))  # [num_tokens, hidden_size]

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)


class DecoderLayer:
    """One layer, computed in two calls, `write_kv` and `attend`. Once the last layer has written its KV, tokens whose
    results nobody reads can leave the step. Both calls take the residual, to which the output of the previous sublayer
    is added together with the norm."""

    def __init__(self, config: ModelConfig, layer: int, backend: AttentionBackend, weights: WeightFormat) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = weights.empty(config.hidden_size)
        self.attention = Attention(config, layer, backend, weights)
        self.post_attention_norm = weights.empty(config.hidden_size)
        self.mlp = Mlp(config, layer, weights)

    def write_kv(
        self,
        x: Tensor,  # [num_tokens, hidden_size]
        residual: Tensor | None,  # [num_tokens, hidden_size], None before the first layer
        cos: Tensor,
        sin: Tensor,
        kv_pool: Tensor,
        slot_mapping: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Writes the layer's KV. Returns the queries, `[num_tokens, num_heads, head_dim]`, and the residual."""
        if residual is None:
            x, residual = rms_norm(x, self.input_norm, self.eps), x
        else:
            x, residual = add_rms_norm(x, residual, self.input_norm, self.eps)
        return self.attention.write_kv(x, cos, sin, kv_pool, slot_mapping), residual

    def attend(
        self, query: Tensor, residual: Tensor, kv_pool: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the residual, both `[num_tokens, hidden_size]`."""
        x = self.attention.attend(query, kv_pool, metadata)
        x, residual = add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        return self.mlp(x), residual

    def pack(self) -> None:
        for linear in self.linear_layers():
            linear.pack()

    def stacked(self) -> "StackedLayer | None":
        """Returns the packed layer for a stack; None if it cannot be stacked. Needs the compiled kernels."""
        from paged_kernels.cpu.layer_stack import StackedLayer

        attention = self.attention
        qkv, output, gate_up, down = map(stacked_linear, self.linear_layers())
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return StackedLayer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            input_norm=self.input_norm,
            norm=self.post_attention_norm,
            query_norm=attention.query_norm,
            key_norm=attention.key_norm,
            window=attention.sliding_window,
        )

    def linear_layers(self) -> tuple[LinearLayer, ...]:
        """Returns the layers of query, key and value; of the attention's output; of gate and up; and of down."""
        return self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield f"{prefix}input_layernorm.weight", slot_of(self.input_norm)
        yield from self.attention.slots(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", slot_of(self.post_attention_norm)
        yield from self.mlp.slots(f"{prefix}mlp.")


class DecoderForCausalLM:
    """The whole model. Its weights are undefined until all `checkpoint_slots` are filled and `pack` is called.

    Positions are below `max_model_len`. The KV pool is `[num_blocks, num_kv_heads, num_layers, 2, block_size,
    head_dim]` of the model's dtype or of FP8, on the model's device.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend,
        *,
        max_model_len: int,
        weights: WeightFormat,
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.dtype
        self.device = weights.device
        self.embedding = self._embedding()
        self.layers = [DecoderLayer(config, layer, attention, weights) for layer in range(config.num_layers)]
        self.norm = weights.empty(config.hidden_size)
        self.lm_head: LinearLayer = self.embedding if isinstance(self.embedding, Linear) else self._head()
        self.rotary = RotaryTable(
            config.rope, head_dim=config.head_dim, max_positions=max_model_len, device=weights.device
        )
        self._is_packed = False
        self.stack: LayerStack | None = None  # set by `pack` if the compiled kernels support the model

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_pool: Tensor,
        metadata: AttentionMetadata,
        last: LastTokens | None = None,
        before_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Writes the KV of all tokens into the pool. Returns the hidden states after the last norm, `[num_rows,
        hidden_size]`, of the tokens in `last` or of all. `input_ids` and `positions` are `[num_tokens]` int64. Calls
        `before_layer` before each layer, or once before all of them if compiled kernels compute them."""
        cos, sin = self.rotary.rows(positions)
        x = self._embed(input_ids)
        if self.stack is not None:
            before_layer()
            return self.stack(x, cos, sin, kv_pool, metadata, last)
        residual: Tensor | None = None
        for layer in self.layers:
            before_layer()
            query, residual = layer.write_kv(x, residual, cos, sin, kv_pool, metadata.slot_mapping)
            if last is not None and layer is self.layers[-1]:
                if not len(last.rows):
                    return x[:0]
                query, residual, metadata = query[last.rows], residual[last.rows], last.metadata
            x, residual = layer.attend(query, residual, kv_pool, metadata)
        assert residual is not None
        return add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turns hidden states, `[num_rows, hidden_size]`, into float32 logits, `[num_rows, vocab_size]`."""
        return self.lm_head(hidden).float()

    def attend_with(self, backend: AttentionBackend) -> None:
        """Uses `backend` from the next step on. An FP8 pool needs a backend that knows its scales."""
        for layer in self.layers:
            layer.attention.backend = backend
        self.stack = self._stack()

    def checkpoint_slots(self) -> dict[str, Slot]:
        """Returns the slot of every tensor that the model reads, by its name in the checkpoint. Not allowed after
        `pack`."""
        slots = {"model.norm.weight": slot_of(self.norm)}
        for index, layer in enumerate(self.layers):
            slots.update(layer.slots(layer_prefix(index)))
        if isinstance(self.embedding, Linear):
            slots.update(self.embedding.slots(""))
            return slots
        slots[f"{_EMBEDDING}.weight"] = slot_of(self.embedding)
        if not self.config.tie_word_embeddings:
            slots.update(self.lm_head.slots(""))
        return slots

    def pack(self) -> None:
        """Brings the weights into the form that matrix products read fastest. Called once, after the slots are filled
        and released."""
        for layer in self.layers:
            layer.pack()
        if self.config.tie_word_embeddings and isinstance(self.lm_head, QuantizedLinear):
            assert isinstance(self.embedding, Tensor)
            if not self.weights.memory.is_filled:
                self.lm_head.fill(0, self.embedding)
        self.lm_head.pack()
        self._is_packed = True
        self.stack = self._stack()

    def _stack(self) -> "LayerStack | None":
        if not self._is_packed:
            return None
        attention = self.layers[0].attention
        return layer_stack(
            (layer.stacked() for layer in self.layers),
            attention.backend,
            final_norm=self.norm,
            eps=self.config.rms_norm_eps,
            scale=attention.scale,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=attention.head_dim,
        )

    def linear_layers(self) -> Iterator[LinearLayer]:
        """Yields all linear layers but the head."""
        for layer in self.layers:
            yield from layer.linear_layers()

    def _embedding(self) -> Tensor | Linear:
        """Returns the embedding, `[vocab_size, hidden_size]`. If it is tied and the head is not quantised, it is the
        head itself, in the form that products read fastest: a step reads all of the head, but only one row of the
        embedding per token."""
        vocab_size, hidden_size = self.config.vocab_size, self.config.hidden_size
        if self.config.tie_word_embeddings and self.weights.head_bits is None:
            return Linear(((_EMBEDDING, vocab_size),), hidden_size, bias=False, weights=self.weights)
        return self.weights.empty(vocab_size, hidden_size)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, `[num_tokens, hidden_size]`."""
        if isinstance(self.embedding, Linear):
            return self.embedding.rows(input_ids)
        return self.embedding.index_select(0, input_ids)

    def _head(self) -> LinearLayer:
        """Returns a head of its own: as the checkpoint holds it, or quantised while loading."""
        parts, size = (("lm_head", self.config.vocab_size),), self.config.hidden_size
        prequantized = self.weights.prequantized
        if prequantized is not None and prequantized.quantizes("lm_head"):
            return make_linear(parts, size, bias=False, weights=self.weights, prefix="")
        return make_plain_linear(parts, size, bias=False, weights=self.weights, bits=self.weights.head_bits)

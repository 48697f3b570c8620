// The kernels of one instruction set, and the plain data they work on. The files of this folder named after one compile the same
// sources for it and fill in one table. Nothing here owns memory; every pointer stays valid for the duration of a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/element_types.h"

namespace paged {

// Tokens of KV handled together; tiles start at multiples of it, so that a token's result does not depend on how its sequence was
// cut into chunks or which other tokens share the call, but for chunks of so few rows that they are summed another way (`attend_in_place`).
inline constexpr int kTileTokens = 64;
// KV is attended in chunks that end at multiples of this many positions, whose results are joined in order of position. So a decode query
// over a long sequence can be divided among threads ("flash-decoding", Dao et al., 2023), and gets what a prefill of its token would.
inline constexpr int kChunkTokens = 1024;
static_assert(kChunkTokens % kTileTokens == 0);
// Longest vector of any instruction set, in floats: rows in scratch memory are padded to it.
inline constexpr int kMaxWidth = 16;
inline constexpr int kMaxHeadDim = 256;
// Rows that a linear layer multiplies come in tiles of a matrix unit.
inline constexpr std::int64_t kRowTile = 16;

// One attention call. Strides count elements. `pool` points at block 0 of the wanted layer. Scales are what a stored 1.0 stands for,
// one per KV head; without them it is 1.0.
struct AttentionCall {
  const void* query;  // [num_tokens, num_heads, head_dim]
  std::int64_t query_token_stride;
  std::int64_t query_head_stride;
  void* output;  // like query, contiguous
  const void* pool;
  std::int64_t block_stride;
  std::int64_t head_stride;
  const std::int32_t* block_tables;  // [num_seqs, table_stride]
  std::int64_t table_stride;
  const std::int32_t* query_start_loc;
  const std::int32_t* seq_lens;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int block_size;
  float scale;
  std::int64_t window;  // tokens a query sees, itself included; 0 = all
  float* partials;      // see partial_floats
  const float* key_scales;
  const float* value_scales;

  float key_scale(int kv_head) const { return key_scales != nullptr ? key_scales[kv_head] : 1.0f; }
  float value_scale(int kv_head) const { return value_scales != nullptr ? value_scales[kv_head] : 1.0f; }
};

// All query heads of one KV head, for `num_queries` consecutive queries of a sequence, over KV positions [kv_begin, kv_end).
// `partial` < 0: the result goes to the output; otherwise, of one chunk, unnormalised to slots `partial + g`, one per query head.
struct AttentionItem {
  std::int32_t sequence;
  std::int32_t kv_head;
  std::int32_t first_query;
  std::int32_t num_queries;
  std::int32_t kv_begin;
  std::int32_t kv_end;
  std::int64_t partial;
};

// A decode query whose KV was cut into `num_chunks` items; merged in order of position.
struct MergeItem {
  std::int32_t token;
  std::int32_t kv_head;
  std::int32_t num_chunks;
  std::int64_t partial;
};

inline constexpr int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// A partial slot: maximum, sum, then the accumulated row.
inline constexpr int partial_floats(int head_dim) { return kMaxWidth + padded(head_dim, kMaxWidth); }

// Scratch floats an item needs: query, scores and output rows, row maxima and sums, a K and a V tile, a partial slot per row and one more.
inline std::size_t scratch_floats(int rows, int head_dim) {
  const std::size_t dim = static_cast<std::size_t>(padded(head_dim, 2 * kMaxWidth));
  const std::size_t row_count = static_cast<std::size_t>(padded(rows, kMaxWidth));
  const std::size_t slots = static_cast<std::size_t>(rows + 1) * static_cast<std::size_t>(partial_floats(head_dim));
  return row_count * (2 * dim + kTileTokens + kMaxWidth + 1) + 2 * dim * kTileTokens + slots;
}

struct RowSpan {
  std::int64_t begin;
  std::int64_t end;
};

// x, weight, out and the optional residuals have row length `size`; rows are `*_stride` elements apart.
struct NormCall {
  const void* x;
  std::int64_t x_stride;
  const void* residual;  // null: plain norm
  std::int64_t residual_stride;
  void* residual_out;  // [rows, size] contiguous
  const void* weight;
  void* out;  // [rows, size] contiguous
  std::int64_t size;
  float epsilon;
};

struct SiluMulCall {
  const void* gate_up;  // [rows, 2 * size]
  std::int64_t stride;
  void* out;  // [rows, size] contiguous
  std::int64_t size;
};

// Rotates heads in place; cos and sin are float32 rows of `half` values, element d and d + half turn together.
struct RotaryCall {
  void* x;  // [rows, num_heads, 2 * half]
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::int64_t num_heads;
  const float* cos;
  const float* sin;
  std::int64_t angle_stride;
  std::int64_t half;
};

// Outputs whose weights lie together, one per 32-bit lane: a panel. See quantized.h for the packed format.
inline constexpr int kPanelOutputs = 16;

// y = x W^T + bias over packed weights, or with `dequantize_panels` the weights themselves.
struct QuantizedCall {
  const std::uint8_t* weights;
  const bf16* scales;  // [num_panels, num_groups, kPanelOutputs]; null where there are zeros
  // Null but for weights that were quantised elsewhere: the zeros that their values count from (whole, 0 .. 256), and scales that
  // bfloat16 cannot hold. Both are shaped like `scales`.
  const bf16* zeros;
  const float* wide_scales;
  int bits;  // 8 or 4
  int group_size;
  std::int64_t num_outputs;
  std::int64_t num_inputs;
  std::int64_t num_groups;
  std::int64_t num_rows;
  const void* x;  // [num_rows, num_inputs]
  std::int64_t x_stride;
  const void* bias;  // [num_outputs], or null
  void* out;         // [num_rows, num_outputs], half of them where the call is gated; of `dequantize_panels`: [num_outputs, num_inputs]
  bool gated;        // as in a PackedCall, which such a call becomes
  // What `prepare_rows` makes of x, with rows of padded_inputs(). Either `wide`, or whole numbers, of which each group of a row has its
  // own scale: x = scale * words, or in two digits, in the same memory, x = scale * (256 * high + low). `offsets` is what the weights'
  // offset adds to an integer dot product; where there are zeros, what each unit of them adds. How whole numbers lie is the kernels' own
  // business; there is room for whole tiles of sixteen rows.
  float* wide;
  std::int16_t* words;
  std::int8_t* high;
  std::int8_t* low;
  float* input_scales;    // [num_rows, num_groups]
  std::int32_t* offsets;  // [num_rows, num_groups]

  std::int64_t padded_inputs() const { return num_groups * group_size; }
  std::int64_t panel_bytes() const { return padded_inputs() * bits / 8 * kPanelOutputs; }
};

// Outputs whose bfloat16 weights lie together. See packed_linear.h for the order.
inline constexpr int kPackedOutputs = 32;
inline constexpr std::int64_t kPackedInputs = 32;  // inputs are padded to a multiple
// The least number of rows for which a matrix unit is used, where there is one.
inline constexpr std::int64_t kMinPackedTileRows = 4;

// Sums of many rows, kept between two parts of the inputs and until they are stored.
inline constexpr std::size_t packed_scratch_floats(std::int64_t num_rows, std::int64_t num_panels) {
  return static_cast<std::size_t>((num_rows + 31) / 32 * 32 * num_panels * kPackedOutputs);
}

// y = x W^T + bias over packed bfloat16 weights. For kernels rows of x have padded_inputs(), with zeros.
struct PackedCall {
  const bf16* packed;
  std::int64_t num_outputs;
  std::int64_t num_inputs;
  std::int64_t num_rows;
  const bf16* x;  // [num_rows, num_inputs]
  std::int64_t x_stride;
  // x as floats for multiply_packed_many, where the kernels want it so, [num_rows, padded_inputs()]: every panel would widen it anew.
  const float* wide;
  const bf16* bias;  // [num_outputs], or null
  bf16* out;         // [num_rows, stored_outputs()] contiguous
  // The rows beyond the last whole tile of sixteen, filled up with zeros, [16, padded_inputs()]: for a matrix unit.
  const bf16* last_rows;
  // The first half of the outputs gates the other: silu(gate) * other is stored, each rounded before. For multiply_packed_many only,
  // where half of the outputs are whole panels.
  bool gated;
  std::int64_t gated_apart;  // panels from a gate's to those of what it gates
  // Rows lie in tiles, [num_rows / 16, rounded up][inputs / 32][16][32], all of which there is room for. Inputs are a multiple of 32 then;
  // such a result is multiply_packed_many's, and its outputs are whole panels.
  bool x_in_tiles;
  bool out_in_tiles;

  std::int64_t stored_outputs() const { return gated ? num_outputs / 2 : num_outputs; }
  std::int64_t padded_inputs() const { return (num_inputs + kPackedInputs - 1) / kPackedInputs * kPackedInputs; }
};

// Tokens with consecutive ids that sampling weighs together; part of what a seed means.
inline constexpr int kTokenGroup = 128;

// A row of logits by temperature: a token's distance is how far its logit lies below the largest, and its weight exp(-distance).
struct ScaledLogits {
  float largest;
  float temperature;
};

struct KernelTable {
  const char* name;
  bool emulates_avx512;  // runs on AVX2, for tests
  bool integer_inputs;  // of quantised products, unless x is float32: whole numbers instead of `wide`
  // The first tile of the item that is `following` on the same thread is asked for ahead; null: not known.
  void (*attend[kNumDTypes])(const AttentionCall&, const AttentionItem&, const AttentionItem* following, float* scratch);
  // Indexed by the dtype of the queries.
  void (*attend_e4m3[kNumDTypes])(const AttentionCall&, const AttentionItem&, const AttentionItem* following, float* scratch);
  void (*merge[kNumDTypes])(const AttentionCall&, const MergeItem&);
  void (*encode_row[kNumDTypes])(const void* row, float inverse_scale, int size, e4m3* target);  // size <= kMaxHeadDim
  void (*rms_norm[kNumDTypes])(const NormCall&, RowSpan);
  void (*silu_mul[kNumDTypes])(const SiluMulCall&, RowSpan);
  void (*rotary[kNumDTypes])(const RotaryCall&, RowSpan);
  void (*prepare_rows[kNumDTypes])(const QuantizedCall&, RowSpan rows);
  void (*multiply_panels[kNumDTypes])(const QuantizedCall&, RowSpan panels);
  // The least number of bfloat16 rows for which it pays to widen the weights first and to multiply them as those of a PackedCall.
  std::int64_t (*widened_from)(const QuantizedCall&);
  // Widens panels, from an even one on, to bfloat16 weights in the order of packed_linear.h, two in a panel there.
  void (*widen_panels)(const QuantizedCall&, RowSpan panels, bf16* target);
  void (*dequantize_panels[kNumDTypes])(const QuantizedCall&, RowSpan panels);
  bool packed_wide;      // `multiply_packed_many` reads `wide`
  bool packed_in_tiles;  // `multiply_packed` of kMinPackedTileRows and more reads x in whole tiles
  std::int64_t packed_rows;  // the most rows that `multiply_packed` is made for: reading the weights takes longer than computing
  void (*multiply_packed)(const PackedCall&, RowSpan panels);
  // For more rows, and for fewer that are gated. A matrix unit multiplies `group` panels (of a gated call: pairs of panels) together; scratch has
  // packed_scratch_floats() of one more. Rows start at a multiple of 32.
  void (*multiply_packed_many)(const PackedCall&, RowSpan rows, RowSpan panels, std::int64_t group, float* scratch);
  float (*largest_logit)(const float* logits, int count);
  // Of the `count` tokens of a group: writes distances and weights, both [kTokenGroup], and returns the sum of the weights. The weight of a
  // token beyond `farthest` is 0; distances behind the last token's are infinite.
  float (*weigh_tokens)(const ScaledLogits&, const float* logits, int count, float farthest, float* distances, float* weights);
};

const KernelTable& portable_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_vnni_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& amx_bf16_kernels();
const KernelTable& amx_emulated_kernels();
#endif

}  // namespace paged

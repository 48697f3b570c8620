// Everything that is compiled once per instruction set, in its namespace, after the matching file of simd/.

#include "simd/exponential.inl"
#include "attention/rows_ahead.inl"
#include "attention/matmul.inl"
#include "attention/kv_tile.inl"
#include "attention/attention_kernel.inl"
#include "attention/encode_row.inl"
#include "layers/elementwise_kernel.inl"
#include "quantized/quantized_kernel.inl"
#include "linear/packed_linear_kernel.inl"
#if PAGED_AMX
#include "linear/packed_many_rows_amx.inl"
#else
#include "linear/packed_many_rows.inl"
#endif
#include "quantized/widened_weights.inl"
#include "sampling/weigh_tokens.inl"

static constexpr KernelTable kernel_table(const char* name) {
  return KernelTable{
      name,
      PAGED_EMULATE_AVX512 == 1,
      PAGED_INTEGER_DOT == 1,
      {attend_item<float, float>, attend_item<bf16, bf16>, attend_item<f16, f16>},
      {attend_item<float, e4m3>, attend_item<bf16, e4m3>, attend_item<f16, e4m3>},
      {merge_item<float>, merge_item<bf16>, merge_item<f16>},
      {encode_row<float>, encode_row<bf16>, encode_row<f16>},
      {rms_norm_rows<float>, rms_norm_rows<bf16>, rms_norm_rows<f16>},
      {silu_mul_rows<float>, silu_mul_rows<bf16>, silu_mul_rows<f16>},
      {rotary_rows<float>, rotary_rows<bf16>, rotary_rows<f16>},
      {prepare_rows<float>, prepare_rows<bf16>, prepare_rows<f16>},
      {multiply_panels<float>, multiply_panels<bf16>, multiply_panels<f16>},
      widened_from,
      widen_panels,
      {dequantize_panels<float>, dequantize_panels<bf16>, dequantize_panels<f16>},
      PAGED_BF16_DOT == 0,
      PAGED_AMX == 1,
      PAGED_AMX == 1 ? 32 : kMostPartRows,
      multiply_packed,
      multiply_packed_many,
      largest_logit,
      weigh_tokens,
  };
}

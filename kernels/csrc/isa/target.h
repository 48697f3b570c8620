// What a file is compiled for. Its headers come before PAGED_BEGIN_TARGET, so that no inline function shared with other files is.
//
// A build for tests defines PAGED_EMULATE_AVX512 for files whose AVX-512 its processor lacks: avx512_emulation.inl stands in for it.
#pragma once

#ifndef PAGED_EMULATE_AVX512
#define PAGED_EMULATE_AVX512 0
#endif

#define PAGED_AVX2 "avx2,fma,f16c"
#if PAGED_EMULATE_AVX512
#define PAGED_AVX512 PAGED_AVX2
#define PAGED_AVX512_VNNI PAGED_AVX2
#define PAGED_AVX512_BF16 PAGED_AVX2
#define PAGED_SET_NAME(name) name "_emulated"
#else
#define PAGED_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define PAGED_AVX512_VNNI "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#define PAGED_AVX512_BF16 "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"
#define PAGED_SET_NAME(name) name
#endif
#define PAGED_AMX_BF16 "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8,avx2,fma,f16c"

#define PAGED_PRAGMA(tokens) _Pragma(#tokens)
#if defined(__clang__)
#define PAGED_BEGIN_TARGET(features) PAGED_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PAGED_END_TARGET PAGED_PRAGMA(clang attribute pop)
#else
#define PAGED_BEGIN_TARGET(features) PAGED_PRAGMA(GCC push_options) PAGED_PRAGMA(GCC target(features))
#define PAGED_END_TARGET PAGED_PRAGMA(GCC pop_options)
#endif

#include "isa/instruction_set.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged {
namespace {

#if defined(__x86_64__) && PAGED_WITH_AMX
// The matrix unit's registers are large enough for Linux to hand them out on request only, once for the whole process.
bool request_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  constexpr unsigned kAmxInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0 || (edx & kAmxInt8) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
// Intel's processors with a matrix unit have pairs of bfloat16 multiplied by half of what multiplies floats: without that unit, which
// virtual machines often lack, floats are twice as fast. Elsewhere, also in the one of Intel's before them, pairs are.
bool multiplies_pairs_slowly() { return __builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake"); }
#endif

std::vector<const KernelTable*> find_tables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  std::vector<const KernelTable*> emulated;  // last: only tests ask for them
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
  const auto offer = [&](const KernelTable& table, bool is_supported) {
    if (table.emulates_avx512 ? avx2 : is_supported) (table.emulates_avx512 ? emulated : tables).push_back(&table);
  };
#if PAGED_WITH_AMX
  if (avx512_bf16 && request_amx()) tables.push_back(&amx_bf16_kernels());
#endif
  if (!multiplies_pairs_slowly()) offer(avx512_bf16_kernels(), avx512_bf16);
  offer(avx512_vnni_kernels(), avx512_vnni);
  if (multiplies_pairs_slowly()) offer(avx512_bf16_kernels(), avx512_bf16);
  offer(avx512_kernels(), avx512);
  if (avx2) tables.push_back(&avx2_kernels());
#if PAGED_EMULATE
  if (amx_emulated_kernels().emulates_avx512 ? avx2 : avx512_bf16) emulated.push_back(&amx_emulated_kernels());
#endif
  tables.push_back(&portable_kernels());
  tables.insert(tables.end(), emulated.begin(), emulated.end());
#else
  tables.push_back(&portable_kernels());
#endif
  return tables;
}

const std::vector<const KernelTable*>& available_tables() {
  static const std::vector<const KernelTable*> tables = find_tables();
  return tables;
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table{available_tables().front()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

void force_instruction_set(std::string_view name) {
  for (const KernelTable* table : available_tables()) {
    if (name == table->name) return current().store(table);
  }
  throw std::invalid_argument("instruction set '" + std::string(name) + "' is not available on this processor");
}

}  // namespace paged

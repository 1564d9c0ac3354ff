// Kernels for what torch does too slowly on a CPU. Every function gives the bits of its counterpart in Python: each
// product and each sum is rounded by itself (-ffp-contract=off), and the largest of a block does not depend on the order.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// A record: 256 signed bytes and their scale, a float.
constexpr int64_t kBlock = 256;
constexpr int64_t kRecord = kBlock + 4;
constexpr float kSteps = static_cast<float>(1.0 / 127.0);
// Below it, one divided by the scale would overflow.
constexpr float kLeast = 1e-35f;
// 1.5 times 2^23: adding and subtracting it rounds to the nearest whole number, ties to even.
constexpr float kRounder = 12582912.0f;

inline float scale_of(const int8_t* record) {
  float scale;
  std::memcpy(&scale, record + kBlock, sizeof scale);
  return scale;
}

// Compares bits: floats without their sign are ordered like integers, and numbers that are not finite are the largest.
inline float largest(const float* __restrict values) {
  int32_t most = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float value;
  std::memcpy(&value, &most, sizeof value);
  return value;
}

// A number that is not finite makes the scale NaN for all ranks; the residual then stays as it was.
inline void pack(const float* __restrict values, float* __restrict residual, int8_t* __restrict record) {
  const float most = largest(values);
  float scale = NAN;
  if (most <= FLT_MAX) {
    scale = most > kLeast ? most * kSteps : 0.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < kBlock; ++i) {
      const float whole = (values[i] * inverse + kRounder) - kRounder;
      record[i] = static_cast<int8_t>(static_cast<int32_t>(whole));
      residual[i] = values[i] - whole * scale;
    }
  } else {
    std::memset(record, 0, kBlock);
  }
  std::memcpy(record + kBlock, &scale, sizeof scale);
}

inline void add_record(const int8_t* __restrict record, float* __restrict values) {
  const float scale = scale_of(record);
  for (int64_t i = 0; i < kBlock; ++i) values[i] += static_cast<float>(record[i]) * scale;
}

inline void reduce(const float* __restrict gradient, float* __restrict residual, const int8_t* const* others,
                   int64_t many, int64_t at, int8_t* __restrict record) {
  float values[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) values[i] = gradient[i] + residual[i];
  for (int64_t other = 0; other < many; ++other) add_record(others[other] + at, values);
  pack(values, residual, record);
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t upper_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline float as_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

extern "C" {

// Adds the records of other ranks and encodes the sum. Without others it encodes this rank's numbers for sending.
void int8_reduce(const float* gradient, float* residual, const int8_t* const* others, int64_t many, int8_t* records,
                 int64_t count) {
  const int64_t blocks = count / kBlock, left = count % kBlock;
  for (int64_t i = 0; i < blocks; ++i) {
    reduce(gradient + i * kBlock, residual + i * kBlock, others, many, i * kRecord, records + i * kRecord);
  }
  if (left == 0) return;
  // The last block is padded, because the compiler knows only the length of a whole block.
  float padded[kBlock] = {}, rest[kBlock] = {};
  std::memcpy(padded, gradient + blocks * kBlock, sizeof(float) * left);
  std::memcpy(rest, residual + blocks * kBlock, sizeof(float) * left);
  reduce(padded, rest, others, many, blocks * kRecord, records + blocks * kRecord);
  std::memcpy(residual + blocks * kBlock, rest, sizeof(float) * left);
}

void int8_decode(const int8_t* __restrict records, float* __restrict gradient, int64_t count) {
  for (int64_t at = 0; at < count; at += kBlock, records += kRecord) {
    const int64_t here = count - at < kBlock ? count - at : kBlock;
    const float scale = scale_of(records);
    for (int64_t i = 0; i < here; ++i) gradient[at + i] = static_cast<float>(records[i]) * scale;
  }
}

// Adds the records of other ranks and encodes the sum. Without others it encodes this rank's numbers for sending.
void bf16_reduce(const float* __restrict gradient, const uint16_t* const* others, int64_t many,
                 uint16_t* __restrict records, int64_t count) {
  float values[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t here = count - at < kBlock ? count - at : kBlock;
    std::memcpy(values, gradient + at, sizeof(float) * here);
    for (int64_t other = 0; other < many; ++other) {
      const uint16_t* __restrict record = others[other] + at;
      for (int64_t i = 0; i < here; ++i) values[i] += as_float(record[i]);
    }
    for (int64_t i = 0; i < here; ++i) records[at + i] = upper_half(values[i]);
  }
}

void bf16_decode(const uint16_t* __restrict records, float* __restrict gradient, int64_t count) {
  for (int64_t i = 0; i < count; ++i) gradient[i] = as_float(records[i]);
}

// rows by columns: the sum over `rank` of p[row][k] * lines[k][column], k by k.
void thin_product(const float* __restrict p, const float* __restrict lines, float* __restrict product, int64_t rows,
                  int64_t columns, int64_t rank) {
  for (int64_t row = 0; row < rows; ++row, p += rank, product += columns) {
    const float first = p[0];
    for (int64_t i = 0; i < columns; ++i) product[i] = first * lines[i];
    for (int64_t k = 1; k < rank; ++k) {
      const float* __restrict line = lines + k * columns;
      const float factor = p[k];
      for (int64_t i = 0; i < columns; ++i) product[i] += factor * line[i];
    }
  }
}

#if defined(__aarch64__)
// torch converts one number at a time here; the processor can convert four.
void half_pack(const float* full, uint16_t* half, float scale, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float16x4_t four = vcvt_f16_f32(vmulq_n_f32(vld1q_f32(full + i), scale));
    vst1_u16(half + i, vreinterpret_u16_f16(four));
  }
  for (; i < count; ++i) {
    const __fp16 one = static_cast<__fp16>(full[i] * scale);
    std::memcpy(half + i, &one, sizeof one);
  }
}

void half_unpack(const uint16_t* half, float* full, float scale, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float32x4_t four = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + i)));
    vst1q_f32(full + i, vmulq_n_f32(four, scale));
  }
  for (; i < count; ++i) {
    __fp16 one;
    std::memcpy(&one, half + i, sizeof one);
    full[i] = static_cast<float>(one) * scale;
  }
}
#endif

}  // extern "C"

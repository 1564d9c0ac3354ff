// What torch does too slowly on a CPU. Every function gives the bits of its counterpart in Python: each product and each
// sum is rounded by itself (-ffp-contract=off), and the largest of a block does not depend on the order.
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

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// As bits: of floats without their sign, the order is that of whole numbers, and whatever is not finite comes out on top.
inline float largest(const float* values) {
  int32_t most = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float found;
  std::memcpy(&found, &most, sizeof found);
  return found;
}

inline void add(const float* gradient, const float* residual, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = gradient[i] + residual[i];
  for (int64_t i = count; i < kBlock; ++i) values[i] = 0.0f;
}

inline float scale_of(const int8_t* record) {
  float scale;
  std::memcpy(&scale, record + kBlock, sizeof scale);
  return scale;
}

// A number that is not finite makes the scale NaN, which everybody will see; the residual then stays what it was.
inline void pack(const float* values, int64_t count, float* residual, int8_t* record) {
  const float most = largest(values);
  float scale = NAN;
  if (most <= FLT_MAX) {
    scale = most > kLeast ? most * kSteps : 0.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    float rest[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      const float whole = (values[i] * inverse + kRounder) - kRounder;
      record[i] = static_cast<int8_t>(static_cast<int32_t>(whole));
      rest[i] = values[i] - whole * scale;
    }
    std::memcpy(residual, rest, sizeof(float) * count);
  } else {
    std::memset(record, 0, kBlock);
  }
  std::memcpy(record + kBlock, &scale, sizeof scale);
}

}  // namespace

extern "C" {

void int8_send(const float* gradient, float* residual, int8_t* records, int64_t count) {
  float values[kBlock];
  for (int64_t at = 0; at < count; at += kBlock, records += kRecord) {
    const int64_t here = least(kBlock, count - at);
    add(gradient + at, residual + at, here, values);
    pack(values, here, residual + at, records);
  }
}

void int8_settle(const float* gradient, float* residual, const int8_t* const* others, int64_t many, int8_t* records,
                 int64_t count) {
  float values[kBlock];
  for (int64_t at = 0, block = 0; at < count; at += kBlock, ++block) {
    const int64_t here = least(kBlock, count - at);
    add(gradient + at, residual + at, here, values);
    for (int64_t other = 0; other < many; ++other) {
      const int8_t* record = others[other] + block * kRecord;
      const float scale = scale_of(record);
      for (int64_t i = 0; i < kBlock; ++i) values[i] += static_cast<float>(record[i]) * scale;
    }
    pack(values, here, residual + at, records + block * kRecord);
  }
}

void int8_spread(const int8_t* records, float* gradient, int64_t count) {
  for (int64_t at = 0; at < count; at += kBlock, records += kRecord) {
    const int64_t here = least(kBlock, count - at);
    const float scale = scale_of(records);
    for (int64_t i = 0; i < here; ++i) gradient[at + i] = static_cast<float>(records[i]) * scale;
  }
}

#if defined(__aarch64__)
// torch converts one by one here; the processor can do four.
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

// The own half and those of others, added up as floats by rank, and rounded once.
void half_settle(const float* full, const uint16_t* const* others, int64_t many, uint16_t* half, float scale,
                 int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    float32x4_t sum = vcvt_f32_f16(vcvt_f16_f32(vmulq_n_f32(vld1q_f32(full + i), scale)));
    for (int64_t other = 0; other < many; ++other) {
      sum = vaddq_f32(sum, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(others[other] + i))));
    }
    vst1_u16(half + i, vreinterpret_u16_f16(vcvt_f16_f32(sum)));
  }
  for (; i < count; ++i) {
    float sum = static_cast<float>(static_cast<__fp16>(full[i] * scale));
    for (int64_t other = 0; other < many; ++other) {
      __fp16 one;
      std::memcpy(&one, others[other] + i, sizeof one);
      sum += static_cast<float>(one);
    }
    const __fp16 rounded = static_cast<__fp16>(sum);
    std::memcpy(half + i, &rounded, sizeof rounded);
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

// The arithmetic of the live page, for one thread of WebAssembly with SIMD. `python tools/live.py build` compiles it.
//
// A matrix lies as its GGUF file has it: row after row, each in blocks of 32 weights. A product takes a block once,
// widens it to floats, and multiplies it with all n rows of x before it takes the next: so five rows cost less than
// five times one. What a row gives doesn't depend on how many there are, bit for bit.
#include <wasm_simd128.h>

typedef v128_t v4; // four floats
typedef unsigned char byte;
#define INLINE static inline __attribute__((always_inline))
#define ROWS 8     // rows that a product takes at once

INLINE v4 load(const void *at) { return wasm_v128_load(at); }
INLINE v4 add(v4 a, v4 b) { return wasm_f32x4_add(a, b); }
INLINE v4 mul(v4 a, v4 b) { return wasm_f32x4_mul(a, b); }
INLINE float total(v4 a) {
  a = add(a, wasm_i32x4_shuffle(a, a, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1);
}

// Four half floats, in the lower halves of four lanes, as floats.
INLINE v4 halves(v4 h) {
  v4 sign = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x8000)), 16);
  v4 size = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x7fff)), 13);
  return wasm_v128_or(mul(size, wasm_f32x4_splat(0x1p112f)), sign);
}

// A block of 32 weights is scale · w + shift, w in 8 vectors. A part of a word becomes a float without a shuffle: moved to
// the top, it is a number of 32 bits, its sign included. So a vector holds one place of four words, that is, weights that
// lie four apart, and x is put into the same order (`arrange`): its columns of four become rows.
enum { Q4_1, Q8_0, BF16 };
static const int BYTES[] = {20, 34, 64};

INLINE v4 part(v4 words, int bits, int i) {
  v4 top = wasm_v128_and(wasm_i32x4_shl(words, 32 - bits * (i + 1)), wasm_i32x4_splat(-1 << (32 - bits)));
  return wasm_f32x4_convert_i32x4(top);
}

INLINE void block(int kind, const byte *at, v4 *w, v4 *scale, v4 *shift) {
  if (kind == Q4_1) { // d, m, 16 bytes: weight i is d·(byte & 15) + m, weight i + 16 d·(byte >> 4) + m
    v4 dm = halves(wasm_u32x4_extend_low_u16x8(wasm_v128_load32_zero(at)));
    // -8…7 in place of 0…15: then the sums are small, and less is rounded away
    v4 words = wasm_v128_xor(load(at + 4), wasm_i32x4_splat(0x88888888));
    for (int i = 0; i < 8; i++) w[4 * (i % 2) + i / 2] = part(words, 4, i);
    v4 d = wasm_i32x4_shuffle(dm, dm, 0, 0, 0, 0), m = wasm_i32x4_shuffle(dm, dm, 1, 1, 1, 1);
    *scale = mul(d, wasm_f32x4_splat(0x1p-28f));
    *shift = add(m, mul(d, wasm_f32x4_splat(8)));
  } else if (kind == Q8_0) { // d, 32 signed bytes: weight i is d·byte
    *scale = mul(halves(wasm_i32x4_splat(*(const unsigned short *)at)), wasm_f32x4_splat(0x1p-24f));
    for (int i = 0; i < 8; i++) w[i] = part(load(at + 2 + i / 4 * 16), 8, i % 4);
  } else { // the upper halves of 32 floats
    for (int i = 0; i < 8; i++) w[i] = wasm_i32x4_shl(wasm_u32x4_load16x4(at + 8 * i), 16);
  }
}

// y[r] = w x[r] for n rows of an arranged x.
INLINE void rows(int kind, int n, const byte *w, int in, int out, const float *x, const v4 *sums, float *y) {
  int blocks = in / 32;
  for (int o = 0; o < out; o++) {
    v4 acc[ROWS], q[8], scale, shift;
    for (int r = 0; r < n; r++) acc[r] = wasm_f32x4_splat(0);
    for (int b = 0; b < blocks; b++, w += BYTES[kind]) {
      block(kind, w, q, &scale, &shift);
      for (int r = 0; r < n; r++) {
        const float *at = x + r * in + 32 * b;
        v4 s0 = add(mul(q[0], load(at)), mul(q[1], load(at + 4)));
        v4 s1 = add(mul(q[2], load(at + 8)), mul(q[3], load(at + 12)));
        v4 s2 = add(mul(q[4], load(at + 16)), mul(q[5], load(at + 20)));
        v4 s3 = add(mul(q[6], load(at + 24)), mul(q[7], load(at + 28)));
        v4 sum = add(add(s0, s1), add(s2, s3));
        if (kind != BF16) sum = mul(sum, scale);
        if (kind == Q4_1) sum = add(sum, mul(shift, sums[r * blocks + b]));
        acc[r] = add(acc[r], sum);
      }
    }
    for (int r = 0; r < n; r++) y[r * out + o] = total(acc[r]);
  }
}

// A loop of its own for each number of rows, so that the sums stay in registers.
#define CASE(n) case n: rows(kind, n, w, in, out, x, sums, y); break;
INLINE void product(int kind, int n, const byte *w, int in, int out, const float *x, const v4 *sums, float *y) {
  for (; n > 0; n -= ROWS, x += ROWS * in, sums += ROWS * (in / 32), y += ROWS * out)
    switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) default: CASE(8) }
}

#define EXPORT(name) __attribute__((export_name(#name))) void name
#define PRODUCT(name, kind)                                                                                     \
  EXPORT(name)(const byte *w, int in, int out, const float *x, const v4 *sums, int n, float *y) {               \
    product(kind, n, w, in, out, x, sums, y);                                                                   \
  }
PRODUCT(q4_1, Q4_1)
PRODUCT(q8_0, Q8_0)
PRODUCT(bf16, BF16)

// Sixteen floats, four by four: columns become rows.
INLINE void turned(const float *x, float *to) {
  v4 a = load(x), b = load(x + 4), c = load(x + 8), d = load(x + 12);
  v4 ab = wasm_i32x4_shuffle(a, b, 0, 4, 1, 5), cd = wasm_i32x4_shuffle(c, d, 0, 4, 1, 5);
  wasm_v128_store(to, wasm_i64x2_shuffle(ab, cd, 0, 2));
  wasm_v128_store(to + 4, wasm_i64x2_shuffle(ab, cd, 1, 3));
  ab = wasm_i32x4_shuffle(a, b, 2, 6, 3, 7), cd = wasm_i32x4_shuffle(c, d, 2, 6, 3, 7);
  wasm_v128_store(to + 8, wasm_i64x2_shuffle(ab, cd, 0, 2));
  wasm_v128_store(to + 12, wasm_i64x2_shuffle(ab, cd, 1, 3));
}

// x in the order of the blocks, and of each block four partial sums: what its shift is multiplied by.
EXPORT(arrange)(const float *x, int blocks, float *to, v4 *sums) {
  for (; blocks > 0; blocks--, x += 32, to += 32) {
    v4 sum = load(x);
    for (int i = 4; i < 32; i += 4) sum = add(sum, load(x + i));
    turned(x, to);
    turned(x + 16, to + 16);
    *sums++ = sum;
  }
}

// One row of a matrix as floats: a token's embedding.
EXPORT(embed)(const byte *w, int in, float *y) {
  for (int b = 0; b < in / 32; b++, w += BYTES[Q8_0], y += 32) {
    v4 q[8], scale, shift;
    block(Q8_0, w, q, &scale, &shift);
    float arranged[32];
    for (int i = 0; i < 8; i++) wasm_v128_store(arranged + 4 * i, mul(q[i], scale));
    turned(arranged, y); // rows of four become columns again
    turned(arranged + 16, y + 16);
  }
}

// y = weight · x / root of the mean square of x, for n rows that lie `step` floats apart in y.
EXPORT(norm)(const float *x, const float *weight, int size, float eps, int n, float *y, int step) {
  for (; n > 0; n--, x += size, y += step) {
    v4 sum = wasm_f32x4_splat(0);
    for (int i = 0; i < size; i += 4) sum = add(sum, mul(load(x + i), load(x + i)));
    v4 factor = wasm_f32x4_splat(1 / __builtin_sqrtf(total(sum) / size + eps));
    for (int i = 0; i < size; i += 4) wasm_v128_store(y + i, mul(load(weight + i), mul(load(x + i), factor)));
  }
}

// Turn the pairs of n rows of heads by the angles of their positions; cos, sin: [n][size / 2].
// The two of a pair lie `apart`: 1 in a GGUF file, half a head in other files.
EXPORT(rotate)(float *x, int heads, int size, int apart, const float *cos, const float *sin, int n) {
  int half = size / 2, next = apart == 1 ? 2 : 1;
  for (; n > 0; n--, cos += half, sin += half)
    for (int h = 0; h < heads; h++, x += size)
      for (int i = 0; i < half; i++) {
        float a = x[i * next], b = x[i * next + apart];
        x[i * next] = a * cos[i] - b * sin[i];
        x[i * next + apart] = b * cos[i] + a * sin[i];
      }
}

// e to the x: 2 to a whole number times a polynomial, within 2e-7 of the right size.
INLINE v4 exponential(v4 x) {
  x = wasm_f32x4_max(wasm_f32x4_min(x, wasm_f32x4_splat(88)), wasm_f32x4_splat(-87));
  v4 whole = wasm_f32x4_nearest(mul(x, wasm_f32x4_splat(0x1.715476p0f)));
  v4 rest = wasm_f32x4_sub(x, mul(whole, wasm_f32x4_splat(0x1.62e4p-1f)));
  rest = wasm_f32x4_sub(rest, mul(whole, wasm_f32x4_splat(0x1.7f7d1cp-20f)));
  static const float TERMS[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
  v4 y = wasm_f32x4_splat(TERMS[0]);
  for (int i = 1; i < 8; i++) y = add(mul(y, rest), wasm_f32x4_splat(TERMS[i]));
  v4 power = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(whole), wasm_i32x4_splat(127)), 23);
  return mul(y, power);
}

// gate = gate · sigmoid(gate) · up
EXPORT(gated)(float *gate, const float *up, int size) {
  for (int i = 0; i < size; i += 4) {
    v4 g = load(gate + i), one = wasm_f32x4_splat(1);
    v4 y = wasm_f32x4_div(g, add(one, exponential(wasm_f32x4_neg(g))));
    wasm_v128_store(gate + i, mul(y, load(up + i)));
  }
}

// x += y
EXPORT(plus)(float *x, const float *y, int size) {
  for (int i = 0; i < size; i += 4) wasm_v128_store(x + i, add(load(x + i), load(y + i)));
}

// Attention of n new rows, the first at position `start`, over the keys and values of all positions up to each.
// q, y: [n][heads][64]; keys, values: [position][kv_heads][64]; scores: room for a multiple of four positions.
EXPORT(attend)(const float *q, const float *keys, const float *values, int heads, int kv_heads, int start, int n,
               float *scores, float *y) {
  int step = kv_heads * 64, group = heads / kv_heads;
  for (int r = 0; r < n; r++)
    for (int h = 0; h < heads; h++, q += 64, y += 64) {
      const float *k = keys + h / group * 64, *v = values + h / group * 64;
      int seen = start + r + 1, padded = (seen + 3) & ~3;
      float top = -__builtin_inff();
      v4 query[16], sum = wasm_f32x4_splat(0), out[16];
      for (int i = 0; i < 16; i++) query[i] = load(q + 4 * i), out[i] = sum;
      for (int s = 0; s < seen; s++, k += step) {
        v4 dot = mul(query[0], load(k));
        for (int i = 1; i < 16; i++) dot = add(dot, mul(query[i], load(k + 4 * i)));
        scores[s] = total(dot) * .125f;
        if (scores[s] > top) top = scores[s];
      }
      for (int s = seen; s < padded; s++) scores[s] = -__builtin_inff();
      for (int s = 0; s < padded; s += 4) {
        v4 e = exponential(wasm_f32x4_sub(load(scores + s), wasm_f32x4_splat(top)));
        wasm_v128_store(scores + s, e);
        sum = add(sum, e);
      }
      float whole = 1 / total(sum);
      for (int s = 0; s < seen; s++, v += step) {
        v4 weight = wasm_f32x4_splat(scores[s] * whole);
        for (int i = 0; i < 16; i++) out[i] = add(out[i], mul(weight, load(v + 4 * i)));
      }
      for (int i = 0; i < 16; i++) wasm_v128_store(y + 4 * i, out[i]);
    }
}

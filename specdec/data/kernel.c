// Linear layers on the CPU by weights in the formats of a GGUF file. `specdec.models.kernel` compiles it, where it is
// first needed, for the processor that is there; nbs/engine/25_kernel.ipynb reads it from memory to register.
//
// Weights are rearranged once (`pack`), sixteen rows of a matrix side by side: a tile. Of a tile follow, block after
// block of 32 columns, the levels, so that a vector holds four columns of each row. Activations are rounded to eight
// bits, with a step for each row and block (`rounded`). Their products with levels are whole numbers and add up exactly;
// then the steps are multiplied in, block after block. What a row gives doesn't depend on how many rows there are.
#include <stdint.h>
#include <string.h>

typedef uint8_t byte;
#define INLINE static inline __attribute__((always_inline))
#define TILE 16  // rows of a matrix side by side
#define BLOCK 32 // columns that have a step of their own
#define ROWS 8   // rows of activations that share a weight once it is in a register

// A weight is d · (level - offset) + m, or of the K formats, where steps have steps, d · s · level - m · s'.
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, KINDS };
typedef struct {
  int bits, size, bytes; // of a level; columns and bytes of a block in the file
  int minimum, scales;   // whether there is an m; whole steps for each 32 columns: none, one or two
  int offset;            // as a power of two, 0: none
} Format;
static const Format FORMATS[KINDS] = {
  [Q4_0] = {4, 32, 18, 0, 0, 3},  [Q4_1] = {4, 32, 20, 1, 0, 0},   [Q5_0] = {5, 32, 22, 0, 0, 4},
  [Q5_1] = {5, 32, 24, 1, 0, 0},  [Q8_0] = {8, 32, 34, 0, 0, 0},   [Q4_K] = {4, 256, 144, 1, 1, 0},
  [Q5_K] = {5, 256, 176, 1, 1, 0}, [Q6_K] = {6, 256, 210, 0, 2, 5},
};
INLINE int head_bytes(Format f) { return TILE * 2 * (1 + f.minimum); }
INLINE int block_bytes(Format f) { return TILE * BLOCK * f.bits / 8 + TILE * (f.scales + (f.scales && f.minimum)); }
INLINE int64_t tile_bytes(Format f, int64_t in) {
  return in / f.size * head_bytes(f) + in / BLOCK * block_bytes(f);
}

// --- what each kind of processor has: vectors of LANES whole numbers of 32 bits, or as many floats
// dot: sums, of FIT(bits) products of four levels by four activations at most; fold: to t, sums times whole steps
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define NAME "AVX-512 VNNI"
#define LANES 16
typedef __m512i vi;
typedef __m512 vf;
#define load(p) _mm512_loadu_si512(p)
#define zero() _mm512_setzero_si512()
#define splat(i) _mm512_set1_epi32(i)
#define both(a, b) _mm512_and_si512(a, b)
#define either(a, b) _mm512_or_si512(a, b)
#define shl(a, n) _mm512_slli_epi16(a, n)
#define shr(a, n) _mm512_srli_epi16(a, n)
#define times2(a, n) _mm512_slli_epi32(a, n)
#define plus(a, b) _mm512_add_epi32(a, b)
#define minus(a, b) _mm512_sub_epi32(a, b)
#define counts(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(p)))
#define steps(p, sign) (sign ? _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p))) : counts(p))
#define fold(t, s, scale) _mm512_add_epi32(t, _mm512_mullo_epi32(s, scale))
#define halves(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define floats(a) _mm512_cvtepi32_ps(a)
#define fsplat(x) _mm512_set1_ps(x)
#define fmul(a, b) _mm512_mul_ps(a, b)
#define fma_(a, b, c) _mm512_fmadd_ps(a, b, c)
#define put(p, a) _mm512_storeu_ps(p, a)
#define get(p) _mm512_loadu_ps(p)
INLINE vi dot(int bits, vi s, vi w, vi x) {
  if (bits == 8) w = _mm512_xor_si512(w, _mm512_set1_epi8(-128)); // unsigned: 128 more, see OFFSET8
  return _mm512_dpbusd_epi32(s, w, x);
}
#define FIT(bits) 8
#define OFFSET8 7
#define PAIRED 0
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
typedef __m256i vi;
typedef __m256 vf;
#define load(p) _mm256_loadu_si256((const void *)(p))
#define zero() _mm256_setzero_si256()
#define splat(i) _mm256_set1_epi32(i)
#define both(a, b) _mm256_and_si256(a, b)
#define either(a, b) _mm256_or_si256(a, b)
#define shl(a, n) _mm256_slli_epi16(a, n)
#define shr(a, n) _mm256_srli_epi16(a, n)
#define times2(a, n) _mm256_slli_epi32(a, n)
#define plus(a, b) _mm256_add_epi32(a, b)
#define minus(a, b) _mm256_sub_epi32(a, b)
#define floats(a) _mm256_cvtepi32_ps(a)
#define halves(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define fsplat(x) _mm256_set1_ps(x)
#define fmul(a, b) _mm256_mul_ps(a, b)
#define fma_(a, b, c) _mm256_fmadd_ps(a, b, c)
#define put(p, a) _mm256_storeu_ps(p, a)
#define get(p) _mm256_loadu_ps(p)
#define counts(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p)))
#define wide(p, sign) (sign ? _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p))) : counts(p))
#if defined(__AVXVNNI__)
#define NAME "AVX-VNNI"
#define steps(p, sign) wide(p, sign)
#define fold(t, s, scale) _mm256_add_epi32(t, _mm256_mullo_epi32(s, scale))
INLINE vi dot(int bits, vi s, vi w, vi x) {
  if (bits == 8) w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return _mm256_dpbusd_avx_epi32(s, w, x);
}
#define FIT(bits) 8
#define OFFSET8 7
#define PAIRED 0
#else // sums of two products in 16 bits, which must not overflow: 8 · 2 · 15 · 127 fits, so do 4 · 2 · 31 · 127, 2 · 2 · 63 · 127
#define NAME "AVX2"
INLINE vi steps(const byte *p, int sign) { // twice in 32 bits
  vi one = wide(p, sign);
  return either(both(one, splat(0xffff)), times2(one, 16));
}
#define fold(t, s, scale) _mm256_add_epi32(t, _mm256_madd_epi16(s, scale))
INLINE vi dot(int bits, vi s, vi w, vi x) {
  if (bits == 8) x = _mm256_sign_epi8(x, w), w = _mm256_abs_epi8(w);
  return _mm256_add_epi16(s, _mm256_maddubs_epi16(w, x));
}
#define FIT(bits) ((bits) == 4 ? 8 : (bits) == 5 ? 4 : (bits) == 6 ? 2 : 1)
#define OFFSET8 0
#define PAIRED 1
#endif
#else // vectors of four, by the compiler's own; with NEON's product of bytes where there is one
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif
#define LANES 4
typedef int32_t vi __attribute__((vector_size(16)));
typedef int8_t v16 __attribute__((vector_size(16)));
typedef float vf __attribute__((vector_size(16)));
INLINE vi load(const void *p) { vi v; memcpy(&v, p, 16); return v; }
INLINE vi splat(int32_t i) { return (vi){i, i, i, i}; }
#define zero() splat(0)
#define both(a, b) ((a) & (b))
#define either(a, b) ((a) | (b))
typedef uint16_t u8x __attribute__((vector_size(16)));
#define shl(a, n) ((vi)((u8x)(a) << (n)))
#define shr(a, n) ((vi)((u8x)(a) >> (n)))
typedef uint32_t u4x __attribute__((vector_size(16)));
#define times2(a, n) ((vi)((u4x)(a) << (n)))
#define plus(a, b) ((a) + (b))
#define minus(a, b) ((a) - (b))
INLINE vi counts(const byte *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi steps(const byte *p, int sign) {
  return sign ? (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]} : counts(p);
}
#define fold(t, s, scale) ((t) + (s) * (scale))
INLINE vf floats(vi a) { return (vf){(float)a[0], (float)a[1], (float)a[2], (float)a[3]}; }
INLINE vf fsplat(float x) { return (vf){x, x, x, x}; }
#define fmul(a, b) ((a) * (b))
INLINE void put(float *p, vf a) { memcpy(p, &a, 16); }
INLINE vf get(const float *p) { vf a; memcpy(&a, p, 16); return a; }
#if defined(__ARM_FEATURE_DOTPROD)
#define NAME "NEON with dot product"
INLINE vf halves(const byte *p) {
  uint16x4_t bits;
  memcpy(&bits, p, 8);
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(bits));
}
INLINE vf fma_(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vi dot(int bits, vi s, vi w, vi x) { return (vi)vdotq_s32((int32x4_t)s, (int8x16_t)w, (int8x16_t)x); }
#else
#define NAME "plain C"
INLINE float half(const byte *p) { // by hand: not every processor and compiler has them
  uint32_t h = p[0] | p[1] << 8, bits = (h & 0x7fff) << 13;
  float size;
  memcpy(&size, &bits, 4);
  size *= 0x1p112f;
  if ((h & 0x7c00) == 0x7c00) { // infinite, or no number
    bits |= 0x7f800000;
    memcpy(&size, &bits, 4);
  }
  return h & 0x8000 ? -size : size;
}
INLINE vf halves(const byte *p) { return (vf){half(p), half(p + 2), half(p + 4), half(p + 6)}; }
#if defined(__FMA__)
INLINE vf fma_(vf a, vf b, vf c) {
  for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
#define fma_(a, b, c) ((a) * (b) + (c))
#endif
INLINE vi dot(int bits, vi s, vi w, vi x) {
  v16 a = (v16)w, b = (v16)x;
  for (int i = 0; i < 16; i++) s[i / 4] += a[i] * b[i];
  return s;
}
#endif
#define FIT(bits) 8
#define OFFSET8 0
#define PAIRED 0
#endif

// --- activations: eight bits, a step for each row and block
typedef struct {
  float step, sum;   // what 1 stands for; step times the sum
  int32_t whole;     // the sum
  int32_t half[2];   // of the first 16 and of the last 16; PAIRED: in both halves of 32 bits
} Info;

static void rounded(const float *x, int64_t blocks, int8_t *q, Info *info) {
  for (; blocks > 0; blocks--, x += BLOCK, q += BLOCK, info++) {
    int32_t most = 0, bits[BLOCK], sum[2] = {0, 0};
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) { // as whole numbers: what is no number is larger than all
      int32_t size = bits[i] & 0x7fffffff;
      most = size > most ? size : most;
    }
    float largest, inverse;
    memcpy(&largest, &most, 4);
    inverse = largest > 1e-30f ? 127 / largest : 0;
    for (int i = 0; i < BLOCK; i++) {
      float near = x[i] * inverse + 0x1.8p23f; // its last bits are the whole number
      int32_t level;
      memcpy(&level, &near, 4);
      q[i] = (int8_t)level;
    }
    for (int i = 0; i < BLOCK; i++) sum[i / 16] += q[i];
    info->step = largest / 127;
    info->whole = sum[0] + sum[1];
    info->sum = info->step * info->whole;
    for (int i = 0; i < 2; i++) info->half[i] = PAIRED ? (sum[i] & 0xffff) | (int32_t)((uint32_t)sum[i] << 16) : sum[i];
  }
}

// --- what stands around products: loops that the compiler makes vectors of, with sums in an order of their own
static void normed(const float *x, const float *weight, int64_t size, float eps, float *y) {
  float sums[BLOCK] = {0}, sum = 0;
  for (int64_t i = 0; i < size; i += BLOCK)
    for (int j = 0; j < BLOCK; j++) sums[j] += x[i + j] * x[i + j];
  for (int j = 0; j < BLOCK; j++) sum += sums[j];
  float factor = 1 / __builtin_sqrtf(sum / size + eps);
  for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

// e to the x: 2 to a whole number times a polynomial, within 2e-7 of the right size.
INLINE float exponential(float x) {
  x = x > 88 ? 88 : x < -87 ? -87 : x;
  float near = x * 0x1.715476p0f + 0x1.8p23f, whole = near - 0x1.8p23f; // its last bits are the whole number
  float rest = x - whole * 0x1.62e4p-1f - whole * 0x1.7f7d1cp-20f;
  float y = 1.f / 5040;
  y = y * rest + 1.f / 720, y = y * rest + 1.f / 120, y = y * rest + 1.f / 24, y = y * rest + 1.f / 6;
  y = y * rest + .5f, y = y * rest + 1, y = y * rest + 1;
  uint32_t bits;
  memcpy(&bits, &near, 4);
  bits = (bits + 127) << 23;
  memcpy(&near, &bits, 4);
  return y * near;
}

static void gated(const float *gate, const float *up, int64_t size, float *y) {
  for (int64_t i = 0; i < size; i++) y[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}

// --- the product: a tile by n rows
// Levels of four columns, 4i … 4i + 3, of LANES rows from h · LANES on: four bits, and what is above them.
INLINE vi levels(int bits, const byte *w, int h, int i) {
  const byte *at = w + 4 * LANES * h;
  if (bits == 8) return load(at + 64 * i);
  vi low = load(at + 64 * (i / 2));
  low = both(i % 2 ? shr(low, 4) : low, splat(0x0f0f0f0f));
  if (bits == 4) return low;
  vi high = load(at + 256 + (bits == 6 ? 64 * (i / 4) : 0));
  int from = bits == 6 ? 2 * (i % 4) : i; // where its bits are, and where they belong: at 4
  high = from < 4 ? shl(high, 4 - from) : shr(high, from - 4);
  return either(low, both(high, splat(bits == 6 ? 0x30303030 : 0x10101010)));
}

INLINE void tile(int kind, int n, const byte *w, int64_t in, const int8_t *x, const Info *info, vf out[][ROWS]) {
  const Format f = FORMATS[kind];
  const int64_t blocks = in / BLOCK, offset = kind == Q8_0 ? OFFSET8 : f.offset;
  const byte *head = w;
  for (int h = 0; h < TILE / LANES; h++)
    for (int r = 0; r < n; r++) out[h][r] = fsplat(0);
  for (int64_t b = 0; b < blocks; b++, w += block_bytes(f)) {
    if (b % (f.size / BLOCK) == 0) head = w, w += head_bytes(f);
    const byte *scales = w + TILE * BLOCK * f.bits / 8;
    for (int h = 0; h < TILE / LANES; h++) {
      vf d = halves(head + 2 * LANES * h), m = d;
      if (f.minimum) m = halves(head + 2 * TILE + 2 * LANES * h);
      vi sum[ROWS], total[ROWS], step[2] = {PAIRED ? splat(0x00010001) : splat(1)};
      if (f.scales) step[0] = steps(scales + LANES * h, f.scales == 2);
      if (f.scales == 2) step[1] = steps(scales + TILE + LANES * h, 1);
      if (f.scales && f.minimum) m = fmul(m, fmul(fsplat(-1), floats(counts(scales + TILE + LANES * h))));
      for (int r = 0; r < n; r++) sum[r] = total[r] = zero();
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        vi level = levels(f.bits, w, h, i);
        const int fit = f.scales == 2 && FIT(f.bits) > 4 ? 4 : FIT(f.bits);
        for (int r = 0; r < n; r++) {
          int32_t four;
          memcpy(&four, x + r * in + BLOCK * b + 4 * i, 4);
          sum[r] = dot(f.bits, sum[r], level, splat(four));
          if (i % fit == fit - 1) {
            if (f.scales || PAIRED) total[r] = fold(total[r], sum[r], step[f.scales == 2 ? i / 4 : 0]);
            else total[r] = plus(total[r], sum[r]);
            sum[r] = zero();
          }
        }
      }
      for (int r = 0; r < n; r++) {
        const Info *of = info + r * blocks + b;
        if (f.scales == 2) {
          vi less = fold(fold(zero(), splat(of->half[0]), step[0]), splat(of->half[1]), step[1]);
          total[r] = minus(total[r], times2(less, (int)offset - PAIRED));
        } else if (offset) total[r] = minus(total[r], times2(splat(of->whole), (int)offset));
        out[h][r] = fma_(fmul(d, fsplat(of->step)), floats(total[r]), out[h][r]);
        if (f.minimum) out[h][r] = fma_(m, fsplat(of->sum), out[h][r]);
      }
    }
  }
}

// --- a layer: matrices of one input, their outputs side by side, shared out to threads tile by tile
typedef struct {
  const byte *w; // tiles
  int64_t kind, out;
} Part;
typedef struct { // what may be done to x before, and to y after the product
  const float *norm; // NULL, or the weight of a norm, [in]
  float eps;         // added to its mean square
  int gated;         // x is [n][2 · in], and silu of the first half times the second is multiplied
  const float *bias, *rest; // NULL, or what is added: [out]; [n][out]
} Around;
typedef struct {
  const Part *parts;
  const float *x;
  Around around;
  float *y, *ready; // ready: x as it is multiplied, where something is done to it before
  int8_t *q;
  Info *info;
  int64_t n, in, out, tiles, at_once;
  int next; // what no thread has taken yet
} Layer;

INLINE void product(const Layer *l, const Part *part, int64_t t, int64_t first, int n, int64_t column, int kind) {
  vf sums[TILE / LANES][ROWS];
  tile(kind, n, part->w + t * tile_bytes(FORMATS[kind], l->in), l->in, l->q + first * l->in,
       l->info + first * (l->in / BLOCK), sums);
  int64_t rows = part->out - t * TILE < TILE ? part->out - t * TILE : TILE;
  for (int r = 0; r < n; r++) {
    float row[TILE], *y = l->y + (first + r) * l->out + column;
    for (int h = 0; h < TILE / LANES; h++) put(row + h * LANES, sums[h][r]);
    const float *bias = l->around.bias, *rest = l->around.rest;
    if (bias) for (int64_t i = 0; i < rows; i++) row[i] += bias[column + i];
    if (rest) for (int64_t i = 0; i < rows; i++) row[i] += rest[(first + r) * l->out + column + i];
    memcpy(y, row, rows * sizeof *y);
  }
}

// A function of its own for each format and number of rows, so that the sums stay in registers.
#define ONE(kind, n) \
  static void kind##_##n(const Layer *l, const Part *p, int64_t t, int64_t first, int64_t column) { \
    product(l, p, t, first, n, column, kind); \
  }
#define ALL(kind) ONE(kind, 1) ONE(kind, 2) ONE(kind, 3) ONE(kind, 4) ONE(kind, 5) ONE(kind, 6) ONE(kind, 7) ONE(kind, 8)
ALL(Q4_0) ALL(Q4_1) ALL(Q5_0) ALL(Q5_1) ALL(Q8_0) ALL(Q4_K) ALL(Q5_K) ALL(Q6_K)
#define ROW(kind) {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6, kind##_7, kind##_8}
static void (*const PRODUCTS[KINDS][ROWS])(const Layer *, const Part *, int64_t, int64_t, int64_t) = {
  ROW(Q4_0), ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0), ROW(Q4_K), ROW(Q5_K), ROW(Q6_K)};

static void round_rows(void *at) {
  Layer *l = at;
  for (int64_t r; (r = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED)) < l->n;) {
    const float *x = l->x + r * l->in * (1 + l->around.gated);
    float *ready = l->ready + r * l->in;
    if (l->around.gated) gated(x, x + l->in, l->in, ready);
    if (l->around.norm) normed(x, l->around.norm, l->in, l->around.eps, ready);
    rounded(l->around.gated || l->around.norm ? ready : x, l->in / BLOCK, l->q + r * l->in,
            l->info + r * (l->in / BLOCK));
  }
}

static void multiply_tiles(void *at) {
  Layer *l = at;
  for (;;) {
    int64_t from = l->at_once * __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED), to = from + l->at_once;
    if (from >= l->tiles) return;
    const Part *part = l->parts;
    int64_t column = 0, before = 0; // of this matrix
    for (int64_t i = from; i < to && i < l->tiles; i++) {
      for (int64_t tiles; i - before >= (tiles = (part->out + TILE - 1) / TILE); part++) before += tiles, column += part->out;
      for (int64_t r = 0; r < l->n; r += ROWS)
        PRODUCTS[part->kind][l->n - r < ROWS ? l->n - r - 1 : ROWS - 1](l, part, i - before, r, column + (i - before) * TILE);
    }
  }
}

typedef void Parallel(void (*)(void *), void *, unsigned, unsigned); // OpenMP's, of the library that PyTorch has loaded

static void share(Layer *l, void (*work)(void *), Parallel *parallel, int threads) {
  l->next = 0;
  if (parallel && threads > 1) parallel(work, l, threads, 0);
  else work(l);
}

// y = W x for n rows, and what is around it; scratch: `scratch_bytes`.
void linear(const Part *parts, int64_t count, const float *x, int64_t n, int64_t in, const float *norm, float eps,
            int gated, const float *bias, const float *rest, float *y, byte *scratch, Parallel *parallel, int threads) {
  Layer l = {parts, x, {norm, eps, gated, bias, rest}, y, (void *)scratch, .n = n, .in = in};
  l.info = (void *)(l.ready + n * in);
  l.q = (void *)(l.info + n * (in / BLOCK));
  for (int64_t i = 0; i < count; i++) l.out += parts[i].out, l.tiles += (parts[i].out + TILE - 1) / TILE;
  share(&l, round_rows, n * in > 1 << 16 ? parallel : 0, threads);
  l.at_once = l.tiles / (threads * 8) + 1; // so that no thread waits long for the last
  if (l.at_once > 4) l.at_once = 4;
  share(&l, multiply_tiles, parallel, threads);
}
int64_t scratch_bytes(int64_t n, int64_t in) {
  return n * (in * (int64_t)sizeof(float) + in / BLOCK * (int64_t)(sizeof(Info) + BLOCK));
}

// --- attention of new tokens to a text: each asks on its own, by what it may see
typedef struct {
  const float *q, *k, *v, *mask; // [n][heads][size]; [kv heads][places][size], twice; [n][places], below 0: hidden
  float *y, *scores;             // [n][heads][size]; [n][heads + kv heads][places]
  int64_t n, heads, kv_heads, size, places, q_row, q_head, k_text, k_head, v_text, v_head, mask_row; // steps, in numbers
  float scale;
  int next;
} Attention;

#define HEADS 4 // query heads that share a key once it is in a register
#define VECTORS (TILE / LANES)

INLINE float summed(const vf *of) {
  float sums[TILE];
  for (int l = 0; l < VECTORS; l++) put(sums + l * LANES, of[l]);
  for (int w = TILE / 2; w; w /= 2)
    for (int i = 0; i < w; i++) sums[i] += sums[i + w];
  return sums[0];
}

// n heads of one token, by their keys: scores of the places that it sees.
INLINE void score(int n, const Attention *a, const float *q, const float *k, const int32_t *at, int64_t seen, float *scores) {
  for (int64_t i = 0; i < seen; i++) {
    const float *key = k + at[i] * a->size;
    vf sums[HEADS][VECTORS];
    for (int h = 0; h < n; h++)
      for (int l = 0; l < VECTORS; l++) sums[h][l] = fsplat(0);
    for (int64_t d = 0; d < a->size; d += TILE)
      for (int l = 0; l < VECTORS; l++) {
        vf part = get(key + d + l * LANES);
        for (int h = 0; h < n; h++) sums[h][l] = fma_(get(q + h * a->q_head + d + l * LANES), part, sums[h][l]);
      }
    for (int h = 0; h < n; h++) scores[h * a->places + i] = summed(sums[h]) * a->scale;
  }
}

static void softmax(float *row, int64_t size) {
  float most[TILE], sums[TILE] = {0}, top = row[0], sum = 0;
  int64_t whole = size / TILE * TILE;
  for (int j = 0; j < TILE; j++) most[j] = row[0];
  for (int64_t i = 0; i < whole; i += TILE)
    for (int j = 0; j < TILE; j++) most[j] = row[i + j] > most[j] ? row[i + j] : most[j];
  for (int64_t i = whole; i < size; i++) most[0] = row[i] > most[0] ? row[i] : most[0];
  for (int j = 0; j < TILE; j++) top = most[j] > top ? most[j] : top;
  for (int64_t i = 0; i < size; i++) row[i] = exponential(row[i] - top);
  for (int64_t i = 0; i < whole; i += TILE)
    for (int j = 0; j < TILE; j++) sums[j] += row[i + j];
  for (int64_t i = whole; i < size; i++) sums[i - whole] += row[i];
  for (int j = 0; j < TILE; j++) sum += sums[j];
  for (int64_t i = 0; i < size; i++) row[i] *= 1 / sum;
}

// The values of the places, each times its share.
INLINE void gather(int n, const Attention *a, const float *v, const int32_t *at, int64_t seen, const float *shares, float *y) {
  for (int64_t d = 0; d < a->size; d += TILE) {
    vf sums[HEADS][VECTORS];
    for (int h = 0; h < n; h++)
      for (int l = 0; l < VECTORS; l++) sums[h][l] = fsplat(0);
    for (int64_t i = 0; i < seen; i++)
      for (int l = 0; l < VECTORS; l++) {
        vf part = get(v + at[i] * a->size + d + l * LANES);
        for (int h = 0; h < n; h++) sums[h][l] = fma_(fsplat(shares[h * a->places + i]), part, sums[h][l]);
      }
    for (int h = 0; h < n; h++)
      for (int l = 0; l < VECTORS; l++) put(y + h * a->size + d + l * LANES, sums[h][l]);
  }
}

// One token's heads that share keys. Hidden places take part in no sum, so the branch of a tree gives what the same
// text gives in a row.
static void attend(const Attention *a, int64_t r, int64_t g) {
  const int64_t heads = a->heads / a->kv_heads, task = r * a->kv_heads + g;
  const float *k = a->k + r * a->k_text + g * a->k_head, *v = a->v + r * a->v_text + g * a->v_head;
  const float *mask = a->mask + r * a->mask_row;
  float *scores = a->scores + task * (heads + 1) * a->places;
  int32_t *at = (int32_t *)(scores + heads * a->places);
  int64_t seen = 0;
  for (int64_t i = 0; i < a->places; i++)
    if (!(mask[i] < 0)) at[seen++] = i;
  for (int64_t h = 0; h < heads; h += HEADS) {
    const float *q = a->q + r * a->q_row + (g * heads + h) * a->q_head;
    float *y = a->y + (r * a->heads + g * heads + h) * a->size, *some = scores + h * a->places;
    int n = heads - h < HEADS ? heads - h : HEADS;
#define OF(n) case n: \
    score(n, a, q, k, at, seen, some); \
    for (int i = 0; i < n; i++) softmax(some + i * a->places, seen); \
    gather(n, a, v, at, seen, some, y); \
    break;
    switch (n) { OF(1) OF(2) OF(3) OF(4) }
  }
}

static void attend_all(void *at) {
  Attention *a = at;
  for (int64_t i; (i = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < a->n * a->kv_heads;)
    attend(a, i / a->kv_heads, i % a->kv_heads);
}

// y of n tokens; sizes: n, heads, kv heads, size (a multiple of TILE), places, and the steps; each token sees one place.
void attention(const float *q, const float *k, const float *v, const float *mask, float *y, float *scores,
               const int64_t *sizes, float scale, Parallel *parallel, int threads) {
  Attention a = {q, k, v, mask, y, scores, .scale = scale};
  memcpy(&a.n, sizes, 12 * sizeof *sizes);
  if (parallel && threads > 1 && a.n * a.heads * a.places * a.size > 1 << 16) parallel(attend_all, &a, threads, 0);
  else attend_all(&a);
}

// --- from a file's blocks to tiles
INLINE int value(int kind, const byte *block, int b, int i) { // the level of column i of the b-th 32 of a block
  const byte *q = block;
  int j = i % 16, up = i / 16 * 4;
  switch (kind) {
  case Q4_0: return q[2 + j] >> up & 15;
  case Q4_1: return q[4 + j] >> up & 15;
  case Q5_0: return (q[6 + j] >> up & 15) | (q[2 + i / 8] >> i % 8 & 1) << 4;
  case Q5_1: return (q[8 + j] >> up & 15) | (q[4 + i / 8] >> i % 8 & 1) << 4;
  case Q8_0: return q[2 + i];
  case Q4_K: return q[16 + b / 2 * 32 + i] >> b % 2 * 4 & 15;
  case Q5_K: return (q[48 + b / 2 * 32 + i] >> b % 2 * 4 & 15) | (q[16 + i] >> b & 1) << 4;
  default: // Q6_K
    return (q[b / 4 * 64 + b % 2 * 32 + i] >> b % 4 / 2 * 4 & 15) | (q[128 + b / 4 * 32 + i] >> b % 4 * 2 & 3) << 4;
  }
}

INLINE void pack_as(int kind, const byte *rows, int64_t in, int64_t out, byte *w) {
  const Format f = FORMATS[kind];
  const int64_t row_bytes = in / f.size * f.bytes;
  memset(w, 0, (out + TILE - 1) / TILE * tile_bytes(f, in));
  for (int64_t first = 0; first < out; first += TILE)
    for (int64_t s = 0; s < in / f.size; s++) {
      const byte *from = rows + first * row_bytes + s * f.bytes;
      for (int o = 0; o < TILE && first + o < out; o++) { // step and minimum of the block
        const byte *block = from + o * row_bytes + (kind == Q6_K ? 208 : 0);
        memcpy(w + 2 * o, block, 2);
        if (f.minimum) memcpy(w + 2 * TILE + 2 * o, block + 2, 2);
      }
      w += head_bytes(f);
      for (int b = 0; b < f.size / BLOCK; b++, w += block_bytes(f))
        for (int o = 0; o < TILE && first + o < out; o++) {
          const byte *block = from + o * row_bytes, *q = block + 4;
          byte *scales = w + TILE * BLOCK * f.bits / 8 + o;
          for (int i = 0; i < BLOCK; i++) {
            int level = value(kind, block, b, i), v = i / 4;
            byte *at = w + 4 * o + i % 4;
            if (f.bits == 8) at[64 * v] = level;
            else at[64 * (v / 2)] |= (level & 15) << v % 2 * 4;
            if (f.bits == 5) at[256] |= level >> 4 << v;
            if (f.bits == 6) at[256 + 64 * (v / 4)] |= level >> 4 << 2 * (v % 4);
          }
          if (f.scales == 2) scales[0] = block[192 + 2 * b], scales[TILE] = block[193 + 2 * b];
          else if (f.scales) { // six bits each, as llama.cpp packs them
            scales[0] = b < 4 ? q[b] & 63 : (q[b + 4] & 15) | q[b - 4] >> 6 << 4;
            scales[TILE] = b < 4 ? q[b + 4] & 63 : q[b + 4] >> 4 | q[b] >> 6 << 4;
          }
        }
    }
}

// rows: whole blocks as the file has them, row after row; w: room for `packed_bytes`.
void pack(int kind, const byte *rows, int64_t in, int64_t out, byte *w) {
#define CASE(kind) case kind: pack_as(kind, rows, in, out, w); break;
  switch (kind) { CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K) }
}
int64_t packed_bytes(int kind, int64_t in, int64_t out) { return (out + TILE - 1) / TILE * tile_bytes(FORMATS[kind], in); }
const char *name(void) { return NAME; }

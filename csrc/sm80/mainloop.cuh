// The one tiled product: acc = A B^T over k, A [BM, k] and B [BN, k], from global memory through a
// ring of STAGES shared-memory stages (cp.async) and register fragments (ldmatrix) into mma.sync.

#pragma once

#include <cstdint>

#include "sm80/tile.cuh"

namespace infloss::sm80 {

// One operand's tile in global memory, 16-byte aligned. Lines run along k (K_MAJOR: one a row of
// the tile) or along m or n (MN_MAJOR: one a k). What lies outside reads as zero.
struct Operand {
    const void* origin;
    int64_t stride_bytes;  // between lines
    int lines;             // valid lines from the origin on
    int line_bytes;        // valid bytes of a line from the origin on
};

// Copies one operand's stages to shared memory.
template <class Tile, int ROWS, Major MAJOR>
class Copier {
    static constexpr bool ALONG_K = MAJOR == Major::K;
    static constexpr int ELEMENT_BYTES = sizeof(typename Tile::Storage);
    static constexpr int LINE_BYTES = ALONG_K ? K_BYTES : ROWS * ELEMENT_BYTES;
    static constexpr int LINES = ALONG_K ? ROWS : Tile::BK;
    static constexpr int CHUNKS = LINE_BYTES / CHUNK_BYTES;
    static constexpr int PASS_LINES = Tile::THREADS / CHUNKS;
    static constexpr int PASSES = LINES / PASS_LINES;
    static_assert(LINES % PASS_LINES == 0 && PASS_LINES % (ALONG_K ? 16 : 8) == 0);

  public:
    __device__ Copier(const Operand& operand, uint32_t shared) : operand_(operand) {
        line_ = threadIdx.x / CHUNKS;
        byte_ = threadIdx.x % CHUNKS * CHUNK_BYTES;
        source_ = static_cast<const char*>(operand.origin) + line_ * operand.stride_bytes + byte_;
        const int key = ALONG_K ? k_major_key(line_) : mn_major_key<typename Tile::Storage>(line_);
        target_ = shared + line_ * LINE_BYTES + (byte_ ^ (key * CHUNK_BYTES));
    }

    // Starts the copies of one k tile into a stage.
    __device__ __forceinline__ void copy(int stage, int k_tile) const {
        const int first_line = line_ + (ALONG_K ? 0 : k_tile * Tile::BK);
        const int first_byte = byte_ + (ALONG_K ? k_tile * K_BYTES : 0);
        const int bytes = min(max(operand_.line_bytes - first_byte, 0), CHUNK_BYTES);
        const char* source =
            source_ + (ALONG_K ? int64_t{k_tile} * K_BYTES
                               : int64_t{k_tile} * Tile::BK * operand_.stride_bytes);
        const uint32_t target = target_ + stage * Tile::STAGE_BYTES;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const bool valid = first_line + pass * PASS_LINES < operand_.lines;
            ptx::copy_async_16((target + pass * PASS_LINES * LINE_BYTES) ^ key_change(pass), source,
                               valid ? bytes : 0);
            source += PASS_LINES * operand_.stride_bytes;
        }
    }

  private:
    // How the swizzle of a pass differs from that of pass 0; see k_major_key.
    static constexpr uint32_t key_change(int pass) {
        return ALONG_K ? ((pass * PASS_LINES / 16) & 3) * 2 * CHUNK_BYTES : 0;
    }

    Operand operand_;
    const char* source_;
    uint32_t target_;
    int line_, byte_;
};

// Loads one operand's register fragments of a k step. Within a stage, the address of each fragment
// is a constant away from one of four lane offsets, which differ by the swizzle.
template <class Tile, int ROWS, Major MAJOR>
class FragmentsA {
    static constexpr bool ALONG_K = MAJOR == Major::K;
    static constexpr int ELEMENT_BYTES = sizeof(typename Tile::Storage);
    static constexpr int LINE_BYTES = ALONG_K ? K_BYTES : ROWS * ELEMENT_BYTES;
    static constexpr int K_STEP = K_STEP_BYTES / ELEMENT_BYTES;

  public:
    __device__ FragmentsA(uint32_t shared, const Lane<Tile>& lane) : base_(shared) {
        const int l = threadIdx.x % WARP, line = l % 8, low = l / 8 % 2, high = l / 16;
        if constexpr (ALONG_K) {
            const int row = lane.warp_row + 8 * low + line;
            offset_ = row * LINE_BYTES + (high ^ k_major_key(row)) * CHUNK_BYTES;
        } else if constexpr (ELEMENT_BYTES == 2) {
            const int k = 8 * high + line;
            offset_ = k * LINE_BYTES + ((lane.warp_row / 8 + low) ^ line) * CHUNK_BYTES;
        } else {
            offset_ = lane.quad * LINE_BYTES +
                      (((lane.warp_row + lane.group) * 4) ^ (lane.quad * K_STEP_BYTES));
        }
    }

    __device__ __forceinline__ void load(uint32_t (&out)[Tile::MT][4], int stage,
                                         int k_step) const {
        const uint32_t base = base_ + stage * Tile::STAGE_BYTES;
#pragma unroll
        for (int m = 0; m < Tile::MT; ++m) {
            if constexpr (ALONG_K) {
                // rows 16 apart differ in bits 4 and 5 of the line, which the key folds in
                const uint32_t change = ((k_step ^ m) & 3) * K_STEP_BYTES;
                ptx::load_matrix_x4(out[m], base + m * 16 * LINE_BYTES + (offset_ ^ change));
            } else if constexpr (ELEMENT_BYTES == 2) {
                ptx::load_matrix_x4_transposed(
                    out[m], base + k_step * K_STEP * LINE_BYTES + (offset_ ^ (m * K_STEP_BYTES)));
            } else {
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const uint32_t change = (w % 2 + 2 * (m % 2)) * K_STEP_BYTES;
                    out[m][w] = ptx::load_shared(base + (k_step * K_STEP + w / 2 * 4) * LINE_BYTES +
                                                 m / 2 * 128 + (offset_ ^ change));
                }
            }
        }
    }

  private:
    uint32_t base_, offset_;
};

template <class Tile, int ROWS, Major MAJOR, Columns COLUMNS>
class FragmentsB {
    static constexpr bool ALONG_K = MAJOR == Major::K;
    static constexpr int ELEMENT_BYTES = sizeof(typename Tile::Storage);
    static constexpr int LINE_BYTES = ALONG_K ? K_BYTES : ROWS * ELEMENT_BYTES;
    static constexpr int K_STEP = K_STEP_BYTES / ELEMENT_BYTES;
    static_assert(ALONG_K == (COLUMNS == Columns::GATHERED));

  public:
    __device__ FragmentsB(uint32_t shared, const Lane<Tile>& lane) : base_(shared) {
        const int l = threadIdx.x % WARP, line = l % 8, low = l / 8 % 2, high = l / 16;
        if constexpr (ALONG_K) {
            const int row = lane.warp_col + line / 2 * 16 + 2 * high + line % 2;
            offset_ = row * LINE_BYTES + (low ^ k_major_key(row)) * CHUNK_BYTES;
        } else if constexpr (ELEMENT_BYTES == 2) {
            const int k = 8 * low + line;
            offset_ = k * LINE_BYTES + ((lane.warp_col / 8 + high) ^ line) * CHUNK_BYTES;
        } else {
            offset_ = lane.quad * LINE_BYTES +
                      (((lane.warp_col + lane.group) * 4) ^ (lane.quad * K_STEP_BYTES));
        }
    }

    __device__ __forceinline__ void load(uint32_t (&out)[Tile::NT][2], int stage,
                                         int k_step) const {
        const uint32_t base = base_ + stage * Tile::STAGE_BYTES;
        if constexpr (ELEMENT_BYTES == 4 && !ALONG_K) {
#pragma unroll
            for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
                for (int w = 0; w < 2; ++w)
                    out[n][w] = ptx::load_shared(base + (k_step * K_STEP + w * 4) * LINE_BYTES +
                                                 n / 4 * 128 + (offset_ ^ (n % 4 * K_STEP_BYTES)));
        } else {
#pragma unroll
            for (int n = 0; n < Tile::NT; n += 2) {
                uint32_t words[4];
                if constexpr (ALONG_K) {
                    // blocks n and n + 1 lie 2 lines apart, pairs of blocks 4
                    const uint32_t change = (k_step ^ (n / 2 % 2 * 2)) * K_STEP_BYTES;
                    ptx::load_matrix_x4(words, base + n * 2 * LINE_BYTES + (offset_ ^ change));
                } else {
                    ptx::load_matrix_x4_transposed(words, base + k_step * K_STEP * LINE_BYTES +
                                                              (offset_ ^ (n / 2 * K_STEP_BYTES)));
                }
                out[n][0] = words[0];
                out[n][1] = words[1];
                out[n + 1][0] = words[2];
                out[n + 1][1] = words[3];
            }
        }
    }

  private:
    uint32_t base_, offset_;
};

// acc += A B^T over k_tiles stages of k. All threads of the CTA call it; shared memory is free
// again when it returns.
template <class Tile, Major A, Major B, Columns COLUMNS>
__device__ __forceinline__ void multiply(float (&acc)[Tile::MT][Tile::NT][4], const Operand& a,
                                         const Operand& b, int k_tiles, char* shared) {
    using Element = typename Tile::Element;
    constexpr int STAGES = Tile::STAGES, K_STEPS = Tile::K_STEPS;
    const uint32_t base = ptx::shared_address(shared);
    const Lane<Tile> lane(threadIdx.x);
    const Copier<Tile, Tile::BM, A> copy_a(a, base);
    const Copier<Tile, Tile::BN, B> copy_b(b, base + Tile::A_BYTES);
    const FragmentsA<Tile, Tile::BM, A> load_a(base, lane);
    const FragmentsB<Tile, Tile::BN, B, COLUMNS> load_b(base + Tile::A_BYTES, lane);

    const auto fetch = [&](int stage, int k_tile) {
        if (k_tile < k_tiles) {
            copy_a.copy(stage, k_tile);
            copy_b.copy(stage, k_tile);
        }
        ptx::copy_async_commit();  // an empty group keeps the count of groups in step
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, stage);
    ptx::copy_async_wait<STAGES - 2>();
    __syncthreads();

    uint32_t a_fragments[2][Tile::MT][4], b_fragments[2][Tile::NT][2];
    load_a.load(a_fragments[0], 0, 0);
    load_b.load(b_fragments[0], 0, 0);

    int read = 0, write = STAGES - 1;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
#pragma unroll
        for (int k_step = 0; k_step < K_STEPS; ++k_step) {
            if (k_step == K_STEPS - 1) {
                ptx::copy_async_wait<STAGES - 2>();
                __syncthreads();  // the next stage has landed; this one's fragments are loaded
                read = read + 1 == STAGES ? 0 : read + 1;
            }
            const int next = (k_step + 1) % K_STEPS;
            load_a.load(a_fragments[next % 2], read, next);
            load_b.load(b_fragments[next % 2], read, next);
            if (k_step == 0) {
                // all at once: dealt to several steps, they hold up the fragment loads between them
                fetch(write, k_tile + STAGES - 1);
                write = write + 1 == STAGES ? 0 : write + 1;
            }
            multiply_step(Element{}, acc, a_fragments[k_step % 2], b_fragments[k_step % 2]);
        }
    }
    ptx::copy_async_wait<0>();
    __syncthreads();
}

}  // namespace infloss::sm80
